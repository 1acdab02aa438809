// Weights of two columns as a sum of two numbers in half precision, so that they lose nothing.
template <typename T>
__device__ __forceinline__ void halves(const float* weights, uint32_t& upper, uint32_t& lower) {
  float one, other;
  upper = rounded<T>(weights[0], weights[1]);
  numbers_of<T>(upper, one, other);
  lower = rounded<T>(weights[0] - one, weights[1] - other);
}
// The factor of what was summed before scores with the highest of `best`, which is taken of the four lanes of a query.
// `scaled` becomes the exponent that weights have from now on. Without a column so far the weight of each score is 0.
__device__ __forceinline__ float rescaled(float& best, float& scaled, float factor) {
  best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
  best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
  const float before = scaled;
  scaled = best > -1e29f ? best * factor : 0.f;
  return power_of_2(before - scaled);
}
// Leave the best score and the weight of all columns of a query, of which each of four lanes has a part.
__device__ __forceinline__ void leave(float best, float scaled, float weight, int piece, float* most, float* total) {
  weight += __shfl_xor_sync(0xffffffffu, weight, 1);
  weight += __shfl_xor_sync(0xffffffffu, weight, 2);
  if (piece == 0) {
    *most = best > -1e29f ? scaled : -1e30f;
    *total = weight;
  }
}
// The column behind the last one that any of `queries` queries from `first` on sees, in a row whose last W tokens end
// before column `end`.
__device__ __forceinline__ int seen_by(int first, int queries, int end, int W) {
  return end - (W - 1 - min(first % W + queries - 1, W - 1));
}
// The column before which 16 queries from `first` on see every column.
__device__ __forceinline__ int seen_by_all(int first, int end, int W) {
  const int token = first % W;
  return end - (W - 1 - (token + 15 < W ? token : 0));
}
// The first column that any of `queries` queries from `first` on sees, of `window` columns up to its own.
__device__ __forceinline__ int seen_from(int first, int queries, int end, int W, int window) {
  const int token = first % W;
  return max(0, end - (W - 1 - (token + queries <= W ? token : 0)) - window);
}
// Attention of 16 queries over columns `lo` to `hi` of their row, where the warps of a block take 16 columns at a time in
// turn. Each warp leaves its sums in `sums` [warps, queries, D + 2], the best score and the weight of its columns in `most`
// and `total` [warps, queries]; `shared` has the queries. The block makes V dimensions from `values` on. Which dimension of a key stands where in a product is free as long
// as queries agree, and so is which column of the output is which: a lane loads 16 bytes at a time.
//
// FEW: there are at most 8 queries, as of a decode step. Their weights take the upper half of an operand of 16 rows, and
// what is lost when these are rounded takes the lower half.
//
// Keys are loaded a step ahead, and values before the scores are made, where there are registers for both.
template <typename T, int D, int V, int WARPS, bool FEW, bool CAPPED>
__device__ __forceinline__ void attend_together(
    const T* queries, long long head_step, long long token_step, const T* keys, long long key_step, const T* values,
    long long value_step, int lo, int hi, int end, int W, int window, int count, int query0, float factor,
    float cap, uint4* shared, float* sums, float* most, float* total) {
  constexpr int QUERIES = 16, ROWS = FEW ? 1 : 2, CH = D / 32, HALVES = V / 64, LINE = V + 2;
  constexpr bool AHEAD = D <= 128;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int piece = lane & 3, row = lane >> 2;
  const int seen = seen_by(query0, QUERIES, end, W);
  hi = min(hi, seen);
  const int common_lo = seen - window, common_hi = min(hi, seen_by_all(query0, end, W));
  for (int at = threadIdx.x; at < 8 * ROWS * D / 8; at += WARPS * 32) {
    const int m = at / (D / 8), chunk = at % (D / 8), query = min(query0 + m, count - 1);
    const T* from = queries + (query / W) * head_step + (query % W) * token_step;
    shared[m * (D / 8) + (chunk ^ ((m & 1) << 2))] = *reinterpret_cast<const uint4*>(from + chunk * 8);
  }
  int first[ROWS], last[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    last[r] = end - (W - 1 - (query0 + row + 8 * r) % W);
    first[r] = last[r] - window;
    last[r] = min(hi, last[r]);
  }
  keys += piece * 8;
  values += row * 8;
  float made[HALVES * 8][4];
#pragma unroll
  for (int t = 0; t < HALVES * 8; t++)
#pragma unroll
    for (int c = 0; c < 4; c++) made[t][c] = 0.f;
  float best[ROWS], scaled[ROWS], weight[ROWS], old[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) best[r] = scaled[r] = -1e30f, weight[r] = 0.f;
  uint4 kk[2][CH], vv[4][HALVES];
  auto column = [&](int i, int place) { return i + piece * 2 + (place & 1) + 8 * (place >> 1); };
  auto fetch_keys = [&](int i) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const T* from = keys + min(i + n * 8 + row, hi - 1) * key_step;
#pragma unroll
      for (int c = 0; c < CH; c++) kk[n][c] = *reinterpret_cast<const uint4*>(from + c * 32);
    }
  };
  auto fetch_values = [&](int i) {
#pragma unroll
    for (int place = 0; place < 4; place++) {
      const T* from = values + min(column(i, place), hi - 1) * value_step;
#pragma unroll
      for (int half = 0; half < HALVES; half++) vv[place][half] = *reinterpret_cast<const uint4*>(from + half * 64);
    }
  };
  int i = lo + warp * 16;
  if (AHEAD && i < hi) fetch_keys(i);
  __syncthreads();
  for (; i < hi; i += WARPS * 16) {
    if (AHEAD) fetch_values(i);
    else fetch_keys(i);
    float scores[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) scores[n][c] = 0.f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
      const int at = (c * 4 + piece) ^ ((row & 1) << 2);
      const uint4 upper = shared[row * (D / 8) + at], lower = FEW ? upper : shared[(row + 8) * (D / 8) + at];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        multiply<T>(scores[n], upper.x, lower.x, upper.y, lower.y, kk[n][c].x, kk[n][c].y);
        multiply<T>(scores[n], upper.z, lower.z, upper.w, lower.w, kk[n][c].z, kk[n][c].w);
      }
    }
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 2 * ROWS; c++) scores[n][c] = cap * tanhf(scores[n][c] / cap);
    }
    if (i < common_lo || i + 16 > common_hi) {
#pragma unroll
      for (int place = 0; place < 4; place++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
          if (column(i, place) < first[r] || column(i, place) >= last[r])
            scores[place >> 1][2 * r + (place & 1)] = -1e30f;
    }
    if (!AHEAD) fetch_values(i);
    else if (i + WARPS * 16 < hi) fetch_keys(i + WARPS * 16);
    bool changed = false;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int n = 0; n < 2; n++) best[r] = fmaxf(best[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      old[r] = rescaled(best[r], scaled[r], factor);
      weight[r] *= old[r];
      changed |= old[r] != 1.f;
    }
    if (__any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int t = 0; t < HALVES * 8; t++)
#pragma unroll
        for (int c = 0; c < 4; c++) made[t][c] *= old[FEW ? 0 : c >> 1];
    }
    // The operand of the weights: of rows 0 to 7 and 8 to 15.
    uint32_t weights[2][2], lost[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float fresh[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          fresh[e] = power_of_2(scores[n][2 * r + e] * factor - scaled[r]);
          weight[r] += fresh[e];
        }
        halves<T>(fresh, weights[n][r], FEW ? weights[n][1] : lost[n][r]);
      }
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int t = 0; t < 8; t++) {
        const uint32_t how = t & 1 ? 0x7632 : 0x5410;
        uint32_t from[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const uint32_t* one = reinterpret_cast<const uint32_t*>(&vv[2 * n][half]);
          const uint32_t* other = reinterpret_cast<const uint32_t*>(&vv[2 * n + 1][half]);
          from[n] = __byte_perm(one[t >> 1], other[t >> 1], how);
        }
        float* to = made[half * 8 + t];
        multiply<T>(to, weights[0][0], weights[0][1], weights[1][0], weights[1][1], from[0], from[1]);
        if (!FEW) multiply<T>(to, lost[0][0], lost[0][1], lost[1][0], lost[1][1], from[0], from[1]);
      }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int m = warp * QUERIES + row + 8 * r;
    leave(best[r], scaled[r], weight[r], piece, most + m, total + m);
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float* found = made[half * 8 + t];
          sums[m * LINE + half * 64 + (piece * 2 + e) * 8 + t] = FEW ? found[e] + found[2 + e] : found[2 * r + e];
        }
  }
}
