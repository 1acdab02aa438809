// The outputs of each token's experts by their shares: out [tokens, D], a thread makes two numbers.
  const int t = blockIdx.y, pair = blockIdx.x * THREADS + threadIdx.x;
  if (2 * pair >= D) return;
  float low = 0.f, high = 0.f;
#pragma unroll
  for (int place = 0; place < PER; place++) {
    const long long row = (long long)t * PER + place;
    float one, other;
    numbers_of<P>(reinterpret_cast<const uint32_t*>(made)[row * (D / 2) + pair], one, other);
    low += shares[row] * one;
    high += shares[row] * other;
  }
  reinterpret_cast<uint32_t*>(out)[(long long)t * (D / 2) + pair] = rounded<P>(low, high);
