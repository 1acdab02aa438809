// Attention of a block of queries over the columns of their row from `lo` on, where each warp has 16 queries of its own.
// All warps take the same columns, 32 at a time: the block copies the next ones into shared memory while it multiplies.
// Leaves the sums of each query in `sums` [queries, D + 2], its best score and the weight of all columns in `most` and
// `total` [queries]. `shared` has the columns before, in the same memory as the sums; `queries_place` is for the queries of
// heads whose numbers of a lane would fill its registers.
//
// The limit is the number of instructions beside the products. So addresses in shared memory are a constant of the lane
// and one of the place in the loop, scores are scaled within the exponent, masks are for the last columns alone, and sums
// are scaled again only where the best score has changed.
//
// In shared memory a column is D / 8 pieces of 16 bytes; piece p of column c is in place p ^ c % 8, so that the 8 rows that
// are read together are in different banks.
template <typename T, int D, int WARPS, bool CAPPED>
__device__ __forceinline__ void attend_apart(
    const T* queries, long long head_step, long long token_step, const T* keys, long long key_step, const T* values,
    long long value_step, int lo, int hi, int end, int W, int window, int count, int query0, float factor,
    float cap, uint4* shared, uint4* queries_place, float* sums, float* most, float* total) {
  constexpr int COLUMNS = 32, PIECES = D / 8, LINE = D + 2, BYTES = D * 2, TILE = COLUMNS * BYTES;
  constexpr int TOGETHER = WARPS * 32 / PIECES;
  constexpr bool HELD = D <= 128;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, piece = lane & 3, row = lane >> 2;
  const int own = query0 + warp * 16;
  const int block_hi = min(hi, seen_by(query0, WARPS * 16, end, W));
  const int own_lo = seen_from(own, 16, end, W, window);
  const int own_hi = own < count ? min(hi, seen_by(own, 16, end, W)) : lo;
  const int common_lo = seen_by(own, 16, end, W) - window, common_hi = min(own_hi, seen_by_all(own, end, W));
  uint32_t q[HELD ? D / 16 : 1][4];
  int first[2], last[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int query = min(own + row + 8 * r, count - 1);
    last[r] = end - (W - 1 - query % W);
    first[r] = last[r] - window;
    last[r] = min(own_hi, last[r]);
    const T* from = queries + (query / W) * head_step + (query % W) * token_step + piece * 2;
    if (HELD) {
#pragma unroll
      for (int step = 0; step < D / 16; step++) {
        q[HELD ? step : 0][r] = *reinterpret_cast<const uint32_t*>(from + step * 16);
        q[HELD ? step : 0][r + 2] = *reinterpret_cast<const uint32_t*>(from + step * 16 + 8);
      }
    }
  }
  const SharedPlace start = shared_place(shared), own_queries = shared_place(queries_place) + warp * 16 * BYTES;
  if (!HELD) {
    for (int i = lane; i < 16 * PIECES; i += 32) {
      const int m = i / PIECES, chunk = i % PIECES, query = min(own + m, count - 1);
      begin_copy(
          own_queries + m * BYTES + (chunk ^ (m & 7)) * 16,
          queries + (query / W) * head_step + (query % W) * token_step + chunk * 8);
    }
  }
  const int copied = threadIdx.x / PIECES, at = threadIdx.x % PIECES;
  keys += at * 8;
  values += at * 8;
  auto fetch = [&](int i, int buffer) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c += TOGETHER) {
      const long long column = min(i + copied + c, block_hi - 1);
      const SharedPlace to = start + (copied + c) * BYTES + (at ^ (copied + c & 7)) * 16 + buffer;
      begin_copy(to, keys + column * key_step);
      begin_copy(to + TILE, values + column * value_step);
    }
  };
  // The row of keys that the lane loads of each 16 columns, that of values, and that of queries.
  const SharedPlace key_row = start + ((lane >> 4) * 8 + (lane & 7)) * BYTES;
  const SharedPlace value_row = start + TILE + (lane & 15) * BYTES, query_row = own_queries + (lane & 15) * BYTES;
  const int key_piece = ((lane >> 3 & 1) ^ (lane & 7)) * 16, value_piece = ((lane >> 4) ^ (lane & 7)) * 16;
  float made[D / 8][4];
#pragma unroll
  for (int t = 0; t < D / 8; t++)
#pragma unroll
    for (int c = 0; c < 4; c++) made[t][c] = 0.f;
  float best[2] = {-1e30f, -1e30f}, scaled[2] = {-1e30f, -1e30f}, weight[2] = {0.f, 0.f};
  if (lo < block_hi) fetch(lo, 0);
  for (int i = lo, buffer = 0; i < block_hi; i += COLUMNS, buffer ^= 2 * TILE) {
    wait_for_copies();
    __syncthreads();
    if (i + COLUMNS < block_hi) fetch(i + COLUMNS, buffer ^ 2 * TILE);
    if (i >= own_hi || i + COLUMNS <= own_lo) continue;
    float scores[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) scores[n][c] = 0.f;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      if (!HELD) load_matrices(q[0], query_row + (step * 32 ^ value_piece));
      const uint32_t* a = q[HELD ? step : 0];
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        uint32_t b[4];
        load_matrices(b, key_row + (step * 32 ^ key_piece) + buffer + n * 8 * BYTES);
        multiply<T>(scores[n], a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply<T>(scores[n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) scores[n][c] = cap * tanhf(scores[n][c] / cap);
    }
    if (i < common_lo || i + COLUMNS > common_hi) {
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const int column = i + n * 8 + piece * 2 + (c & 1);
          if (column < first[c >> 1] || column >= last[c >> 1]) scores[n][c] = -1e30f;
        }
    }
    float old[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int n = 0; n < 4; n++) best[r] = fmaxf(best[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      old[r] = rescaled(best[r], scaled[r], factor);
      weight[r] *= old[r];
    }
    if (__any_sync(0xffffffffu, old[0] != 1.f || old[1] != 1.f)) {
#pragma unroll
      for (int t = 0; t < D / 8; t++)
#pragma unroll
        for (int c = 0; c < 4; c++) made[t][c] *= old[c >> 1];
    }
    uint32_t upper[4][2], lower[4][2];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float fresh[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          fresh[e] = power_of_2(scores[n][2 * r + e] * factor - scaled[r]);
          weight[r] += fresh[e];
        }
        halves<T>(fresh, upper[n][r], lower[n][r]);
      }
#pragma unroll
    for (int n = 0; n < 4; n += 2)
#pragma unroll
      for (int t = 0; t < D / 8; t += 4) {
        uint32_t b[8];
#pragma unroll
        for (int u = 0; u < 4; u += 2)
          load_matrices_across(b + 2 * u, value_row + ((t + u) * 16 ^ value_piece) + buffer + n * 8 * BYTES);
        // A product does not wait for the one before it.
#pragma unroll
        for (int u = 0; u < 4; u++)
          multiply<T>(
              made[t + u], upper[n][0], upper[n][1], upper[n + 1][0], upper[n + 1][1], b[2 * u], b[2 * u + 1]);
#pragma unroll
        for (int u = 0; u < 4; u++)
          multiply<T>(
              made[t + u], lower[n][0], lower[n][1], lower[n + 1][0], lower[n + 1][1], b[2 * u], b[2 * u + 1]);
      }
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int m = warp * 16 + row + 8 * r;
    leave(best[r], scaled[r], weight[r], piece, most + m, total + m);
#pragma unroll
    for (int t = 0; t < D / 8; t++)
#pragma unroll
      for (int e = 0; e < 2; e++) sums[m * LINE + t * 8 + piece * 2 + e] = made[t][2 * r + e];
  }
}
