// A token for each row of logits: the likeliest, or drawn by inverting the cumulative distribution of what top_k, top_p
// and min_p leave. A block takes a row. Both floors are found in the order of the logits' own bits, so they are exact:
// the largest value that still leaves k tokens, and the largest that still leaves top_p of the weight. Each search
// keeps a quarter of its interval a pass. What is added up is added in the same order every time.
//
// `columns` are the numbers of a row of the plan, COLUMNS of them; `gained` is how many tokens have been drawn since they
// were made, and how many rows of logits, one after the other, there are of each.
  constexpr int THREADS = 1024;
  constexpr int PER = 16 / sizeof(T);
  const float infinite = __int_as_float(0x7f800000);
  const int row = blockIdx.x, words = logits_shape[1], thread = threadIdx.x;
  const T* values = logits + (long long)row * words;
  const int width = gained[1];
  const int* own_columns = columns + row / width * COLUMNS;
  const float inverse = __int_as_float(own_columns[3]);
  __shared__ float shared_parts[32][3];
  __shared__ float shared_whole[3];
  __shared__ unsigned int shared_token;

  const bool are_vectors = words % PER == 0 && (reinterpret_cast<unsigned long long>(values) & 15) == 0;
  auto each = [&](auto act) {
    if (are_vectors) {
      const uint4* vectors = reinterpret_cast<const uint4*>(values);
#pragma unroll 2
      for (int i = thread; i < words / PER; i += THREADS) {
        const uint4 raw = vectors[i];
        const T* part = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int p = 0; p < PER; p++) act(part[p], i * PER + p);
      }
    } else {
      for (int i = thread; i < words; i += THREADS) act(values[i], i);
    }
  };
  // The sums of three numbers of every thread, for all threads.
  auto sum_of_block = [&](float* numbers) {
#pragma unroll
    for (int n = 0; n < 3; n++) {
      for (int d = 16; d; d /= 2) numbers[n] += __shfl_xor_sync(0xffffffffu, numbers[n], d);
      if ((thread & 31) == 0) shared_parts[thread >> 5][n] = numbers[n];
    }
    __syncthreads();
    if (thread < 96) {
      float part = shared_parts[thread & 31][thread >> 5];
      for (int d = 16; d; d /= 2) part += __shfl_xor_sync(0xffffffffu, part, d);
      if ((thread & 31) == 0) shared_whole[thread >> 5] = part;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 3; n++) numbers[n] = shared_whole[n];
    __syncthreads();
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
  each([&](T value, int) { best = fmaxf(best, static_cast<float>(value)); });
  for (int d = 16; d; d /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, d));
  if ((thread & 31) == 0) shared_parts[thread >> 5][0] = best;
  if (thread == 0) shared_token = 0xffffffffu;
  __syncthreads();
  for (int i = 0; i < 32; i++) best = fmaxf(best, shared_parts[i][0]);
  __syncthreads();

  if (inverse == 0.f) {
    unsigned int first = 0xffffffffu;
    each([&](T value, int i) {
      if (static_cast<float>(value) == best) first = min(first, static_cast<unsigned int>(i));
    });
    if (first != 0xffffffffu) atomicMin(&shared_token, first);
  } else {
    // The largest of the orders from `low` to `high` of which `enough` is true, as it is of `low`, and of none above
    // one of which it is not.
    auto search = [&](unsigned int low, unsigned int high, float wanted, auto worth) {
      while (low < high) {
        const unsigned int span = high - low;
        const unsigned int steps[3] = {
            low + max(span / 4, 1u), low + max(span / 2, 1u), low + max(span / 4 * 3, 1u)};
        float sums[3] = {0.f, 0.f, 0.f};
        each([&](T value, int) {
          const unsigned int at = order(value);
          if (at < steps[0]) return;
          const float more = worth(value);
          sums[0] += more;
          sums[1] += at >= steps[1] ? more : 0.f;
          sums[2] += at >= steps[2] ? more : 0.f;
        });
        sum_of_block(sums);
        if (sums[2] >= wanted) {
          low = steps[2];
        } else if (sums[1] >= wanted) {
          low = steps[1];
          high = steps[2] - 1;
        } else if (sums[0] >= wanted) {
          low = steps[0];
          high = steps[1] - 1;
        } else {
          high = steps[0] - 1;
        }
      }
      return low;
    };
    const unsigned int highest = order(static_cast<T>(best));
    unsigned int floor = 0;
    const int count_wanted = own_columns[4];
    if (count_wanted < words) {
      floor = search(0u, highest, static_cast<float>(count_wanted), [](T) { return 1.f; });
    }
    auto weight = [&](T value) {
      return order(value) >= floor ? __expf((static_cast<float>(value) - best) * inverse) : 0.f;
    };
    const float share_wanted = __int_as_float(own_columns[5]);
    if (share_wanted < 1.f) {
      float sums[3] = {0.f, 0.f, 0.f};
      each([&](T value, int) { sums[0] += weight(value); });
      sum_of_block(sums);
      // All tokens below this together weigh less than what may be left out.
      const float least = best + __logf(fmaxf(1.f - share_wanted, 1e-7f) / words) * 1.01f / inverse;
      const unsigned int lowest = least > -3e38f ? order(static_cast<T>(least)) : 0u;
      floor = max(floor, search(min(lowest, highest), highest, sums[0] * share_wanted, weight));
    }
    const float below_best = __int_as_float(own_columns[6]);
    auto left = [&](T value) {
      const float scaled = (static_cast<float>(value) - best) * inverse;
      return order(value) >= floor && scaled >= below_best ? __expf(scaled) : 0.f;
    };

    // Each thread takes neighbouring words, so that weights add up in the order of the vocabulary.
    const int share = ((words + THREADS - 1) / THREADS + PER - 1) / PER * PER;
    const int from = min(thread * share, words), to = min(from + share, words);
    float own = 0.f;
    if (are_vectors) {
      for (int i = from; i < to; i += PER) {
        const uint4 raw = *reinterpret_cast<const uint4*>(values + i);
        const T* part = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int p = 0; p < PER; p++) own += left(part[p]);
      }
    } else {
      for (int i = from; i < to; i++) own += left(values[i]);
    }
    float up_to = own;
    for (int d = 1; d < 32; d *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, up_to, d);
      if ((thread & 31) >= d) up_to += before;
    }
    if ((thread & 31) == 31) shared_parts[thread >> 5][0] = up_to;
    __syncthreads();
    float earlier = 0.f, whole = 0.f;
    for (int i = 0; i < 32; i++) {
      if (i < (thread >> 5)) earlier += shared_parts[i][0];
      whole += shared_parts[i][0];
    }
    up_to += earlier;
    // random_bits.py: one step of splitmix64.
    unsigned long long mixed = static_cast<unsigned int>(own_columns[0]) |
        static_cast<unsigned long long>(static_cast<unsigned int>(own_columns[1])) << 32;
    mixed += static_cast<long long>(own_columns[2]) + gained[0] + row % width;
    mixed *= 0x9E3779B97F4A7C15ull;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    mixed ^= mixed >> 31;
    const float target = static_cast<float>(mixed >> 41) * 0x1p-23f * whole;
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
  }
  __syncthreads();
  if (thread == 0) {
    const unsigned int token = shared_token == 0xffffffffu ? 0u : shared_token;
    const float logit = static_cast<float>(values[token]);
    tokens[row] = token;
    write_pair(row, token | (fabsf(logit) < infinite && best < infinite ? 0u : 0x80000000u));
  }
