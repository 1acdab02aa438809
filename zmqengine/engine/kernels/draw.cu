// A token for each row of logits, drawn by inverting the cumulative distribution of what top_k, top_p and min_p leave.
// A block takes a row. Both floors are found bit by bit in the order of the logits' own bits, so they are exact: the
// largest value that still leaves k tokens, and the largest that still leaves top_p of the weight.
  constexpr int THREADS = 1024;
  const float infinite = __int_as_float(0x7f800000);
  const int row = blockIdx.x, words = logits_shape[1], thread = threadIdx.x;
  const T* values = logits + (long long)row * words;
  const float inverse = inverse_temperature[row];
  __shared__ float shared_part[32];
  __shared__ float shared_whole;
  __shared__ unsigned int shared_token;

  auto sum_of_block = [&](float value) {
    for (int d = 16; d; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
    if ((thread & 31) == 0) shared_part[thread >> 5] = value;
    __syncthreads();
    if (thread < 32) {
      float part = shared_part[thread];
      for (int d = 16; d; d /= 2) part += __shfl_xor_sync(0xffffffffu, part, d);
      if (thread == 0) shared_whole = part;
    }
    __syncthreads();
    const float whole = shared_whole;
    __syncthreads();
    return whole;
  };
  auto order = [](T value) {
    if (sizeof(T) == 2) {
      const unsigned int bits = *reinterpret_cast<const unsigned short*>(&value);
      return (bits & 0x8000u) ? 0xffffu & ~bits : bits | 0x8000u;
    }
    const float wide = static_cast<float>(value);
    const unsigned int bits = __float_as_uint(wide);
    return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  };

  float best = -infinite;
  for (int i = thread; i < words; i += THREADS) best = fmaxf(best, static_cast<float>(values[i]));
  for (int d = 16; d; d /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, d));
  if ((thread & 31) == 0) shared_part[thread >> 5] = best;
  __syncthreads();
  if (thread == 0) {
    for (int i = 1; i < 32; i++) best = fmaxf(best, shared_part[i]);
    shared_whole = best;
    shared_token = 0xffffffffu;
  }
  __syncthreads();
  best = shared_whole;
  __syncthreads();
  auto weight = [&](T value, unsigned int floor) {
    return order(value) >= floor ? __expf((static_cast<float>(value) - best) * inverse) : 0.f;
  };

  constexpr int HIGHEST = sizeof(T) == 2 ? 15 : 31;
  unsigned int floor = 0;
  const int count_wanted = counts_shape[0] > 1 ? counts[row] : counts[0];
  if (count_wanted < words) {
    for (int bit = HIGHEST; bit >= 0; bit--) {
      const unsigned int higher = floor | (1u << bit);
      float count = 0.f;
      for (int i = thread; i < words; i += THREADS) count += order(values[i]) >= higher ? 1.f : 0.f;
      if (sum_of_block(count) >= static_cast<float>(count_wanted)) floor = higher;
    }
  }
  const float weight_wanted = shares_shape[0] > 1 ? shares[row] : shares[0];
  if (weight_wanted < 1.f) {
    float sum = 0.f;
    for (int i = thread; i < words; i += THREADS) sum += weight(values[i], floor);
    const float wanted = sum_of_block(sum) * weight_wanted;
    unsigned int least = 0;
    for (int bit = HIGHEST; bit >= 0; bit--) {
      const unsigned int higher = least | (1u << bit);
      float above = 0.f;
      for (int i = thread; i < words; i += THREADS) above += weight(values[i], max(higher, floor));
      if (sum_of_block(above) >= wanted) least = higher;
    }
    floor = max(floor, least);
  }
  const float lowest = floors_shape[0] > 1 ? floors[row] : floors[0];
  auto left = [&](T value) {
    const float scaled = (static_cast<float>(value) - best) * inverse;
    return order(value) >= floor && scaled >= lowest ? __expf(scaled) : 0.f;
  };

  // Each thread takes neighbouring words, so that weights add up in the order of the vocabulary.
  const int share = (words + THREADS - 1) / THREADS;
  const int from = min(thread * share, words), to = min(from + share, words);
  float own = 0.f;
  for (int i = from; i < to; i++) own += left(values[i]);
  float up_to = own;
  for (int d = 1; d < 32; d *= 2) {
    const float before = __shfl_up_sync(0xffffffffu, up_to, d);
    if ((thread & 31) >= d) up_to += before;
  }
  if ((thread & 31) == 31) shared_part[thread >> 5] = up_to;
  __syncthreads();
  float earlier = 0.f, whole = 0.f;
  for (int i = 0; i < 32; i++) {
    if (i < (thread >> 5)) earlier += shared_part[i];
    whole += shared_part[i];
  }
  up_to += earlier;
  const float target = uniforms[row] * whole;
  if (up_to > target && own > 0.f) {
    float sum = up_to - own;
    unsigned int last = 0xffffffffu;
    for (int i = from; i < to; i++) {
      const float part = left(values[i]);
      if (part > 0.f) last = i;
      sum += part;
      if (sum > target && part > 0.f) break;
    }
    // The first thread that gets past the target has the token; those after it get past it as well.
    atomicMin(&shared_token, last);
  }
  __syncthreads();
  if (thread == 0) out[row] = shared_token == 0xffffffffu ? 0u : shared_token;
