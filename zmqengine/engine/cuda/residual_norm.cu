// The sum of a row of the residual stream and of a product, and that sum normalised: w * s / rms(s). ADDED_NORM: the
// product is normalised before. SCALED: the sum is multiplied by a factor. A block takes a row. Intermediate results are
// rounded to T, as they are between separate kernels.
  struct alignas(4 * sizeof(T)) Four { T at[4]; };
  struct alignas(4 * sizeof(A)) FourAdded { A at[4]; };
  constexpr int EACH = (N / 4 + THREADS - 1) / THREADS;
  __shared__ float shared_squares[2][32];
  const long long first = (long long)blockIdx.x * (N / 4);
  const FourAdded* from = reinterpret_cast<const FourAdded*>(added) + first;
  auto each = [&](auto act) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = threadIdx.x + e * THREADS;
      if (i < N / 4) act(e, i);
    }
  };
  Four fours[EACH];
  // The fours of all threads normalised, from the squares of a thread's.
  auto normalise = [&](float squares, float* parts, int eps, const T* weight) {
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = squares;
    __syncthreads();
    squares = (threadIdx.x & 31) < THREADS / 32 ? parts[threadIdx.x & 31] : 0.f;
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float by = rsqrtf(squares / N + __int_as_float(eps));
    each([&](int e, int i) {
      const Four weights = reinterpret_cast<const Four*>(weight)[i];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const T scaled = static_cast<T>(static_cast<float>(fours[e].at[j]) * by);
        fours[e].at[j] = static_cast<T>(static_cast<float>(weights.at[j]) * static_cast<float>(scaled));
      }
    });
  };
  float squares = 0.f;
  each([&](int e, int i) {
    const FourAdded more = from[i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      fours[e].at[j] = static_cast<T>(static_cast<float>(more.at[j]));
      squares += static_cast<float>(fours[e].at[j]) * static_cast<float>(fours[e].at[j]);
    }
  });
  if (ADDED_NORM) normalise(squares, shared_squares[0], ADDED_EPS, added_weight);
  squares = 0.f;
  each([&](int e, int i) {
    const Four stream = reinterpret_cast<const Four*>(residual)[first + i];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      fours[e].at[j] = static_cast<T>(static_cast<float>(stream.at[j]) + static_cast<float>(fours[e].at[j]));
      if (SCALED) fours[e].at[j] = static_cast<T>(static_cast<float>(fours[e].at[j]) * static_cast<float>(scale[0]));
      squares += static_cast<float>(fours[e].at[j]) * static_cast<float>(fours[e].at[j]);
    }
    reinterpret_cast<Four*>(sum)[first + i] = fours[e];
  });
  normalise(squares, shared_squares[1], EPS, weight);
  each([&](int e, int i) { reinterpret_cast<Four*>(normed)[first + i] = fours[e]; });
