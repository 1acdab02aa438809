// Attention of a block of queries over the columns of their row from `lo` on, where each warp has 16 queries of its own.
// All warps take the same columns, 32 at a time: the block copies the next ones into shared memory while it multiplies.
// Each thread leaves its part of the sums of its queries in `sums` [queries, D + 2], the best score and the weight of all
// columns in `most` and `total` [queries]. `shared` has the columns before, in the same memory as the sums.
//
// A row of shared memory is a column, D / 8 pieces of 16 bytes; piece p of column c is in place p ^ c % 8, so that the 8
// rows that are read together are in different banks.
template <typename T, int D, int WARPS>
__device__ __forceinline__ void attend_apart(
    const T* queries, long long head_step, long long token_step, const T* keys, long long key_step, const T* values,
    long long value_step, const unsigned char* marks, int lo, int hi, int end, int W, int count, int query0, float factor,
    uint4* shared, float* sums, float* most, float* total) {
  constexpr int COLUMNS = 32, PIECES = D / 8, LINE = D + 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, piece = lane & 3, row = lane >> 2;
  const int own = query0 + warp * 16;
  const int block_hi = min(hi, seen_by(query0, WARPS * 16, end, W));
  const int own_hi = own < count ? min(hi, seen_by(own, 16, end, W)) : lo;
  uint32_t q[D / 16][4];
  int last[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int query = min(own + row + 8 * r, count - 1);
    last[r] = min(own_hi, end - (W - 1 - query % W));
    const T* from = queries + (query / W) * head_step + (query % W) * token_step + piece * 2;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      q[step][r] = *reinterpret_cast<const uint32_t*>(from + step * 16);
      q[step][r + 2] = *reinterpret_cast<const uint32_t*>(from + step * 16 + 8);
    }
  }
  auto fetch = [&](int i, uint4* to) {
    for (int at = threadIdx.x; at < COLUMNS * PIECES; at += WARPS * 32) {
      const int c = at / PIECES, p = at % PIECES, place = c * PIECES + (p ^ (c & 7));
      const long long column = min(i + c, block_hi - 1);
      begin_copy(to + place, keys + column * key_step + p * 8);
      begin_copy(to + COLUMNS * PIECES + place, values + column * value_step + p * 8);
    }
  };
  float made[D / 8][4];
#pragma unroll
  for (int t = 0; t < D / 8; t++)
#pragma unroll
    for (int c = 0; c < 4; c++) made[t][c] = 0.f;
  float best[2] = {-1e30f, -1e30f}, weight[2] = {0.f, 0.f};
  uint4 *now = shared, *next = shared + 2 * COLUMNS * PIECES;
  if (lo < block_hi) fetch(lo, now);
  for (int i = lo; i < block_hi; i += COLUMNS) {
    wait_for_copies();
    __syncthreads();
    if (i + COLUMNS < block_hi) fetch(i + COLUMNS, next);
    if (i < own_hi) {
      float scores[4][4];
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) scores[n][c] = 0.f;
#pragma unroll
      for (int step = 0; step < D / 16; step++)
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          const int c = n * 8 + (lane >> 4) * 8 + (lane & 7), p = step * 2 + (lane >> 3 & 1);
          uint32_t b[4];
          load_matrices(b, now + c * PIECES + (p ^ (c & 7)));
          multiply<T>(scores[n], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
          multiply<T>(scores[n + 1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
        }
      uint32_t upper_half[4][2], lower_half[4][2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float higher = best[r];
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& score = scores[n][2 * r + e];
            const int column = i + n * 8 + piece * 2 + e;
            const bool used = column < last[r] && !(marks && marks[min(column, block_hi - 1)]);
            score = used ? score * factor : -1e30f;
            higher = fmaxf(higher, score);
          }
        higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
        higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
        const float old = exp2f(best[r] - higher);
        best[r] = higher;
        weight[r] *= old;
#pragma unroll
        for (int t = 0; t < D / 8; t++) {
          made[t][2 * r] *= old;
          made[t][2 * r + 1] *= old;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
          float fresh[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float score = scores[n][2 * r + e];
            fresh[e] = score > -1e29f ? exp2f(score - higher) : 0.f;
            weight[r] += fresh[e];
          }
          halves<T>(fresh, upper_half[n][r], lower_half[n][r]);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; n += 2)
#pragma unroll
        for (int t = 0; t < D / 8; t += 2) {
          const int c = n * 8 + (lane & 15), p = t + (lane >> 4);
          uint32_t b[4];
          load_matrices_across(b, now + COLUMNS * PIECES + c * PIECES + (p ^ (c & 7)));
#pragma unroll
          for (int other = 0; other < 2; other++) {
            const uint32_t(*half)[2] = other ? lower_half : upper_half;
            const uint32_t *a = half[n], *behind = half[n + 1];
            multiply<T>(made[t], a[0], a[1], behind[0], behind[1], b[0], b[1]);
            multiply<T>(made[t + 1], a[0], a[1], behind[0], behind[1], b[2], b[3]);
          }
        }
    }
    uint4* const before = now;
    now = next;
    next = before;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 1);
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 2);
    const int m = warp * 16 + row + 8 * r;
    if (piece == 0) {
      most[m] = best[r];
      total[m] = weight[r];
    }
#pragma unroll
    for (int t = 0; t < D / 8; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) sums[m * LINE + t * 8 + piece * 2 + e] = made[t][2 * r + e];
  }
}
