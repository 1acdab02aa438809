// A product of some rows with weights [outputs, K], in float32. A block takes 32 rows and 8 outputs, a lane a row, and a
// warp an eighth of each piece of K: all its lanes read the same weights. The next piece is loaded meanwhile. The rows, or
// the array added to the product, may be normalised first: the product that made them left the mean of each 8 columns, and
// the sum of the squared differences to it, which are combined here (Chan et al., 1979).
  constexpr int ROWS = 32, OUTPUTS = 8, WARPS = 8, PIECE = 128, FOURS = PIECE / 4, LINE = PIECE + 4;
  constexpr int EACH = ROWS * FOURS / (WARPS * 32);
  struct alignas(16) Four { float at[4]; };
  __shared__ Four shared_rows[2][ROWS * LINE / 4];
  __shared__ Four shared_weights[2][OUTPUTS * FOURS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int count = rows_shape[0], outputs = weights_shape[1];
  const int output0 = blockIdx.x * OUTPUTS, row0 = blockIdx.y * ROWS;
  const Four* from_rows = reinterpret_cast<const Four*>(rows);
  const Four* from_weights = reinterpret_cast<const Four*>(weights);
  const Four zeros = {0.f, 0.f, 0.f, 0.f};
  Four next_rows[EACH], next_weights;
  __shared__ float shared_mean[ROWS], shared_by[ROWS];
  float mean[EACH], by[EACH];
  auto fetch = [&](int piece) {
    const int at = piece * FOURS + lane;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int row = row0 + warp + e * WARPS;
      next_rows[e] = row < count && at < K / 4 ? from_rows[(long long)row * (K / 4) + at] : zeros;
    }
    const int output = output0 + warp;
    next_weights = output < outputs && at < K / 4 ? from_weights[(long long)output * (K / 4) + at] : zeros;
  };
  float sums[OUTPUTS];
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) sums[o] = 0.f;
  constexpr int PIECES = (K + PIECE - 1) / PIECE;
  fetch(0);
  if (NORMED) {
    const int groups = stats_shape[1];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int row = row0 + warp + e * WARPS;
      const float* stat = stats + (long long)row * groups * 2;
      float all = 0.f, squares = 0.f;
      for (int g = lane; g < groups && row < count; g += 32) all += stat[2 * g];
      for (int d = 16; d; d /= 2) all += __shfl_xor_sync(0xffffffffu, all, d);
      mean[e] = all / groups;
      for (int g = lane; g < groups && row < count; g += 32) {
        const float apart = stat[2 * g] - mean[e];
        squares += stat[2 * g + 1] + OUTPUTS * apart * apart;
      }
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
      by[e] = rsqrtf(squares / (groups * OUTPUTS) + __int_as_float(EPS));
      shared_mean[warp + e * WARPS] = mean[e];
      shared_by[warp + e * WARPS] = by[e];
    }
  }
  for (int piece = 0; piece < PIECES; piece++) {
    Four* piece_rows = shared_rows[piece & 1];
    Four* piece_weights = shared_weights[piece & 1];
    if (NORMED && !ADDED && piece * FOURS + lane < K / 4) {
      const Four factor = reinterpret_cast<const Four*>(norm_weight)[piece * FOURS + lane];
      const Four term = reinterpret_cast<const Four*>(norm_bias)[piece * FOURS + lane];
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          next_rows[e].at[j] = (next_rows[e].at[j] - mean[e]) * by[e] * factor.at[j] + term.at[j];
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) piece_rows[(warp + e * WARPS) * (LINE / 4) + lane] = next_rows[e];
    piece_weights[warp * FOURS + lane] = next_weights;
    // One barrier is enough: who writes into the other half has passed it, and so have all who read that half before.
    __syncthreads();
    if (piece + 1 < PIECES) fetch(piece + 1);
#pragma unroll
    for (int f = 0; f < FOURS / WARPS; f++) {
      const int at = warp * (FOURS / WARPS) + f;
      const Four own = piece_rows[lane * (LINE / 4) + at];
#pragma unroll
      for (int o = 0; o < OUTPUTS; o++) {
        const Four other = piece_weights[o * FOURS + at];
#pragma unroll
        for (int j = 0; j < 4; j++) sums[o] += own.at[j] * other.at[j];
      }
    }
  }
  __syncthreads();
  float* shared_sums = reinterpret_cast<float*>(shared_rows);
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) shared_sums[(warp * ROWS + lane) * OUTPUTS + o] = sums[o];
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += shared_sums[w * ROWS * OUTPUTS + threadIdx.x];
  const int own_row = threadIdx.x / OUTPUTS, row = row0 + own_row, output = output0 + threadIdx.x % OUTPUTS;
  const bool is_used = row < count && output < outputs;
  const long long place = (long long)row * outputs + output;
  if (BIAS && is_used) sum += bias[output];
  if (GELU) sum = sum * (1.f + erff(sum * 0.70710678f)) * 0.5f;
  if (ADDED && is_used) {
    const float other = added[place];
    sum += NORMED ? (other - shared_mean[own_row]) * shared_by[own_row] * norm_weight[output] + norm_bias[output] : other;
  }
  if (is_used) out[place] = sum;
