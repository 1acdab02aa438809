// y[m, n] = sum over k of x[m, k] * w[n, k] on Hopper, mostly for more rows m than plain_product.cu is for.
// A block makes 64 * GROUPS columns of ROWS rows of y: a group of four warps has 64 rows of w, and all have the rows of
// x. They copy parts of 64 k ahead into a ring of STAGES parts in shared memory, and wait for a product when the next
// one is on its way. Blocks with the same rows of w stand next to each other. Where there are few columns the k are cut
// among gridDim.y blocks, and unless these are the WHOLE wide_product_join.cu adds what each of them gives.
// What a row gives does not depend on how many there are. GATED, the first half of w are gates of the other, and a block
// makes half as many columns, of both.
  extern __shared__ __align__(1024) uint4 shared_parts[];
  constexpr int COLUMNS = 64 * GROUPS;
  constexpr int MADE = GATED ? COLUMNS / 2 : COLUMNS;
  constexpr int THREADS = 128 * GROUPS;
  constexpr int PART = (COLUMNS + ROWS) * 8;  // in 16 bytes
  const int tiles = (x_shape[0] + ROWS - 1) / ROWS, m0 = blockIdx.x % tiles * ROWS;
  const int M = min(ROWS, x_shape[0] - m0), K = x_shape[1], N = w_shape[0] / (COLUMNS / MADE);
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3;
  const int n0 = blockIdx.x / tiles * MADE;
  const int first = K / 64 * blockIdx.y / gridDim.y, parts = K / 64 * (blockIdx.y + 1) / gridDim.y - first;
  const int chunk = threadIdx.x & 7, line = threadIdx.x >> 3;
  const T* w_from = w + (long long)(n0 + line) * K + first * 64 + chunk * 8;
  const T* x_from = x + (long long)(m0 + line) * K + first * 64 + chunk * 8;
  const int to = line * 8 + (chunk ^ (line & 7)), step = THREADS / 8 * K;
  auto fetch = [&](int part) {
    uint4* stage = shared_parts + part % STAGES * PART + to;
    const T* from = w_from;
#pragma unroll
    for (int i = 0; i < COLUMNS; i += THREADS / 8) {
      const bool is_other = i >= MADE;
      const bool is_there = n0 + line + i - (is_other ? MADE : 0) < N;
      copy_ahead(stage + i * 8, is_there ? from + (is_other ? (long long)(N - MADE) * K : 0) : w, is_there);
      from += step;
    }
    from = x_from;
#pragma unroll
    for (int i = 0; i < ROWS; i += THREADS / 8) {
      const bool is_there = line + i < M;
      if (ROWS % (THREADS / 8) == 0 || line + i < ROWS)
        copy_ahead(stage + (COLUMNS + i) * 8, is_there ? from : x, is_there);
      from += step;
    }
    w_from += 64;
    x_from += 64;
  };
  float sums[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) sums[i] = 0.f;
#pragma unroll
  for (int part = 0; part < STAGES - 2; part++) {
    if (part < parts) fetch(part);
    end_group();
  }
  for (int part = 0; part < parts; part++) {
    await_groups<STAGES - 3>();
    show_to_tensor_cores();
    await_products<1>();
    __syncthreads();
    const uint4* stage = shared_parts + part % STAGES * PART;
    const uint64_t a = lines_at(stage + group * 64 * 8), b = lines_at(stage + COLUMNS * 8);
    begin_products();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_lines<T>(sums, a + 2 * k, b + 2 * k);
    end_products();
    if (part + STAGES - 2 < parts) fetch(part + STAGES - 2);
    end_group();
  }
  await_products<0>();
  await_groups<0>();
  __syncthreads();
  constexpr int LINE = COLUMNS + 4;
  float* shared_sums = reinterpret_cast<float*>(shared_parts);
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) {
    const int m = i / 4 * 8 + (lane & 3) * 2 + (i & 1);
    shared_sums[m * LINE + group * 64 + warp * 16 + (lane >> 2) + 8 * (i >> 1 & 1)] = sums[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < M * MADE / 4; i += THREADS) {
    const int m = i / (MADE / 4), n = i % (MADE / 4) * 4;
    if (n0 + n >= N) continue;
    float4 four = *reinterpret_cast<const float4*>(shared_sums + m * LINE + n);
    if constexpr (GATED) {
      const float4 up = *reinterpret_cast<const float4*>(shared_sums + m * LINE + n + MADE);
      four = {gated<T>(four.x, up.x), gated<T>(four.y, up.y), gated<T>(four.z, up.z), gated<T>(four.w, up.w)};
    }
    auto* const at = out + ((long long)blockIdx.y * x_shape[0] + m0 + m) * N + n0 + n;
    if constexpr (WHOLE) {
      T some[4] = {static_cast<T>(four.x), static_cast<T>(four.y), static_cast<T>(four.z), static_cast<T>(four.w)};
      *reinterpret_cast<uint2*>(at) = *reinterpret_cast<const uint2*>(some);
    } else {
      *reinterpret_cast<float4*>(at) = four;
    }
  }
