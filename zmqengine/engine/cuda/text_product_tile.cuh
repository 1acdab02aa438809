// A product of rows with weights [outputs, K]: factors are rounded to TF32, sums are in float32. A block computes ROWS by
// COLUMNS of it. Parts of both sides, PART numbers of K, are copied ahead into a ring of STAGES in shared memory; of a part
// the warps share the rows, the columns and 16 numbers of K at a time, and those of K_WARPS are summed up at the end.
// Which k stands where in a product of the tensor cores is free as long as both sides agree: a lane takes 16 bytes of each
// side. Every other line has its halves of 32 numbers the other way round, so that lanes read from banks of their own.
// The rows, or the array added to the product, may be normalised first: the product that made them left the mean of each 8
// columns, and the sum of the squared differences to it, which are combined here (Chan et al., 1979).
// What a product reads and writes; without a norm, a bias, an added array or statistics their pointers are not used.
struct Product {
  const float *rows, *weights, *bias, *added, *stats, *norm_weight, *norm_bias;
  float *out, *told;
  int count, outputs;
};
// The tile of `out` at a row and a column. With TOLD it leaves statistics for a norm of the sums too.
template <typename TILE, int K, bool BIAS, bool GELU, bool ADDED, bool NORMED, int EPS, bool TOLD>
__device__ __forceinline__ void product_tile(uint4* shared_start, const Product& product, int row0, int output0) {
  constexpr int ROWS = TILE::ROWS, COLUMNS = TILE::COLUMNS, ROW_WARPS = TILE::ROW_WARPS;
  constexpr int COLUMN_WARPS = TILE::COLUMN_WARPS, K_WARPS = TILE::K_WARPS, STAGES = TILE::STAGES;
  constexpr int GROUP = 8, THREADS = ROW_WARPS * COLUMN_WARPS * K_WARPS * 32;
  constexpr int PART = K_WARPS > 1 ? K_WARPS * 16 : 32, STEPS = PART / (K_WARPS * 16), PARTS = (K + PART - 1) / PART;
  constexpr int LINE = PART / 4, STAGE = (ROWS + COLUMNS) * LINE, LINES_AT_ONCE = THREADS / LINE;
  constexpr int ROW_TILES = ROWS / (16 * ROW_WARPS), COLUMN_TILES = COLUMNS / (8 * COLUMN_WARPS);
  constexpr bool ROWS_NORMED = NORMED && !ADDED;
  __shared__ float shared_mean[ROWS], shared_by[ROWS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int piece = lane & 3, line = lane >> 2;
  const float *rows = product.rows, *weights = product.weights, *stats = product.stats;
  const float *norm_weight = product.norm_weight, *norm_bias = product.norm_bias;
  const int count = product.count, outputs = product.outputs;
  const int k_warp = warp % K_WARPS, row_warp = warp / K_WARPS % ROW_WARPS, column_warp = warp / K_WARPS / ROW_WARPS;
  auto fetch = [&](int part, int stage) {
    const int to = threadIdx.x / LINE, at = threadIdx.x % LINE, k = part * PART + at * 4;
#pragma unroll
    for (int first = 0; first < ROWS + COLUMNS; first += LINES_AT_ONCE) {
      const bool is_row = first < ROWS;
      const int index = to + (is_row ? row0 + first : output0 + first - ROWS);
      const bool is_there = index < (is_row ? count : outputs) && k < K;
      const float* from = is_row ? rows : weights;
      uint4* place = shared_start + stage * STAGE + (first + to) * LINE + (at ^ ((to & 1) << 2));
      copy_ahead(place, is_there ? from + (long long)index * K + k : from, is_there);
    }
  };
  float sums[ROW_TILES][COLUMN_TILES][4];
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[i][j][c] = 0.f;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (stage < PARTS) fetch(stage, stage);
    end_group();
  }
  float mean[ROW_TILES][2], by[ROW_TILES][2];
  if (NORMED) {
    const int groups = (ADDED ? outputs : K) / GROUP;
    for (int m = threadIdx.x / 8; m < ROWS; m += THREADS / 8) {
      const float* stat = stats + (long long)min(row0 + m, count - 1) * groups * 2;
      float all = 0.f, squares = 0.f;
      for (int g = threadIdx.x & 7; g < groups; g += 8) all += stat[2 * g];
      for (int d = 4; d; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
      all /= groups;
      for (int g = threadIdx.x & 7; g < groups; g += 8) {
        const float apart = stat[2 * g] - all;
        squares += stat[2 * g + 1] + GROUP * apart * apart;
      }
      for (int d = 4; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
      shared_mean[m] = all;
      shared_by[m] = rsqrtf(squares / (groups * GROUP) + __int_as_float(EPS));
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; i++) {
      mean[i / 2][i % 2] = shared_mean[row_warp * ROW_TILES * 16 + i * 8 + line];
      by[i / 2][i % 2] = shared_by[row_warp * ROW_TILES * 16 + i * 8 + line];
    }
  }
  int stage = 0;
#pragma unroll 1
  for (int part = 0; part < PARTS; part++) {
    Four factors[STEPS], terms[STEPS];
    if (ROWS_NORMED) {
#pragma unroll
      for (int step = 0; step < STEPS; step++) {
        const int k = part * PART + ((k_warp * STEPS + step) * 4 + piece) * 4;
        factors[step] = terms[step] = {0.f, 0.f, 0.f, 0.f};
        if (k >= K) continue;
        factors[step] = *reinterpret_cast<const Four*>(norm_weight + k);
        terms[step] = *reinterpret_cast<const Four*>(norm_bias + k);
      }
    }
    await_groups<STAGES - 2>();
    // Behind this barrier every thread has read the part before: the next one may replace it.
    __syncthreads();
    if (part + STAGES - 1 < PARTS) fetch(part + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1);
    end_group();
    const Four* from = reinterpret_cast<const Four*>(shared_start) + stage * STAGE;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      const int at = ((k_warp * STEPS + step) * 4 + piece) ^ ((line & 1) << 2);
      uint32_t b[COLUMN_TILES][4];
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) {
        const Four four = from[(ROWS + (column_warp * COLUMN_TILES + j) * 8 + line) * LINE + at];
#pragma unroll
        for (int c = 0; c < 4; c++) b[j][c] = to_tf32(four.at[c]);
      }
#pragma unroll
      for (int i = 0; i < ROW_TILES; i++) {
        uint32_t a[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Four four = from[((row_warp * ROW_TILES + i) * 16 + h * 8 + line) * LINE + at];
#pragma unroll
          for (int c = 0; c < 4; c++) {
            const float own = four.at[c];
            a[h][c] = to_tf32(
                ROWS_NORMED ? (own - mean[i][h]) * by[i][h] * factors[step].at[c] + terms[step].at[c] : own);
          }
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++) {
          multiply_tf32(sums[i][j], a[0][0], a[1][0], a[0][1], a[1][1], b[j][0], b[j][1]);
          multiply_tf32(sums[i][j], a[0][2], a[1][2], a[0][3], a[1][3], b[j][2], b[j][3]);
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  await_groups<0>();
  __syncthreads();
  constexpr int SUMS_LINE = COLUMNS + 4;
  float* shared_sums = reinterpret_cast<float*>(shared_start);
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int m = (row_warp * ROW_TILES + i) * 16 + (c >> 1) * 8 + line;
        const int n = (column_warp * COLUMN_TILES + j) * 8 + piece * 2 + (c & 1);
        shared_sums[(k_warp * ROWS + m) * SUMS_LINE + n] = sums[i][j][c];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
    const int m = i / COLUMNS, n = i % COLUMNS, row = row0 + m, output = output0 + n;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < K_WARPS; w++) sum += shared_sums[(w * ROWS + m) * SUMS_LINE + n];
    const bool is_used = row < count && output < outputs;
    const long long place = (long long)row * outputs + output;
    if (BIAS && is_used) sum += product.bias[output];
    if (GELU) sum = sum * (1.f + erff(sum * 0.70710678f)) * 0.5f;
    if (ADDED && is_used) {
      const float other = product.added[place];
      sum += NORMED ? (other - shared_mean[m]) * shared_by[m] * norm_weight[output] + norm_bias[output] : other;
    }
    if (is_used) product.out[place] = sum;
    if (TOLD) {
      float average = sum;
      for (int d = 1; d < GROUP; d *= 2) average += __shfl_xor_sync(0xffffffffu, average, d);
      average /= GROUP;
      float squares = (sum - average) * (sum - average);
      for (int d = 1; d < GROUP; d *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
      if (n % GROUP == 0 && is_used) {
        product.told[((long long)row * outputs + output) / GROUP * 2] = average;
        product.told[((long long)row * outputs + output) / GROUP * 2 + 1] = squares;
      }
    }
  }
}
// A block's tiles of a product, `gridDim.x` apart.
template <typename TILE, int K, bool BIAS, bool GELU, bool ADDED, bool NORMED, int EPS, bool TOLD>
__device__ __forceinline__ void product_tiles(uint4* shared_start, const Product& product) {
  const int columns = (product.outputs + TILE::COLUMNS - 1) / TILE::COLUMNS;
  const int tiles = (product.count + TILE::ROWS - 1) / TILE::ROWS * columns;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    // The tile before has been written from shared memory.
    __syncthreads();
    product_tile<TILE, K, BIAS, GELU, ADDED, NORMED, EPS, TOLD>(
        shared_start, product, tile / columns * TILE::ROWS, tile % columns * TILE::COLUMNS);
  }
}
