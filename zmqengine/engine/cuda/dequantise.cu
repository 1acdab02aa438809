// Weights scale * q + bias, or MXFP4, rounded once: a thread makes eight of a row at a time, EACH times.
  constexpr int WORDS = BITS / 4;
  constexpr uint32_t MASK = (1u << BITS) - 1;
  const long long eights = (long long)w_shape[0] * w_shape[1] / WORDS;
  const long long first = (long long)blockIdx.x * THREADS * EACH + threadIdx.x;
  uint32_t words[EACH][WORDS];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const long long at = min(first + e * THREADS, eights - 1);
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[e][i] = w[at * WORDS + i];
  }
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const long long at = first + e * THREADS;
    if (at >= eights) return;
    const float scale = static_cast<float>(scale_of<T>(scales[at * 8 / GROUP]));
    const float bias = static_cast<float>(bias_of<T>(biases[at * 8 / GROUP]));
    float made[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t bits = words[e][i * BITS / 32] >> (i * BITS % 32) & MASK;
      made[i] = fmaf(MXFP4 ? number_of_4(bits) : static_cast<float>(bits), scale, bias);
    }
    reinterpret_cast<uint4*>(out)[at] = make_uint4(
        rounded<T>(made[0], made[1]), rounded<T>(made[2], made[3]), rounded<T>(made[4], made[5]),
        rounded<T>(made[6], made[7]));
  }
