// Two numbers in half precision as an operand of `multiply`.
template <typename T>
__device__ __forceinline__ uint32_t pair(T low, T high) {
  return *reinterpret_cast<const unsigned short*>(&low) |
      static_cast<uint32_t>(*reinterpret_cast<const unsigned short*>(&high)) << 16;
}
// Weights of two columns as a sum of two numbers in half precision, so that they lose nothing.
template <typename T>
__device__ __forceinline__ void halves(const float* weights, uint32_t& upper, uint32_t& lower) {
  const T one = static_cast<T>(weights[0]), other = static_cast<T>(weights[1]);
  upper = pair<T>(one, other);
  lower = pair<T>(
      static_cast<T>(weights[0] - static_cast<float>(one)), static_cast<T>(weights[1] - static_cast<float>(other)));
}
// The column behind the last one that any of `queries` queries from `first` on sees, in a row whose last W tokens end
// before column `end`.
__device__ __forceinline__ int seen_by(int first, int queries, int end, int W) {
  return end - (W - 1 - min(first % W + queries - 1, W - 1));
}
// Attention of 16 queries over columns `lo` to `hi` of their row, where the warps of a block take 16 columns at a time in
// turn. Each warp leaves its sums in `sums` [warps, queries, D + 2], the best score and the weight of its columns in `most`
// and `total` [warps, queries]; `shared` has the queries. Which dimension of a key stands where in a product is free as long
// as queries agree, and so is which column of the output is which: a lane loads 16 bytes at a time.
template <typename T, int D, int WARPS>
__device__ __forceinline__ void attend_together(
    const T* queries, long long head_step, long long token_step, const T* keys, long long key_step, const T* values,
    long long value_step, const unsigned char* marks, int lo, int hi, int end, int W, int count, int query0, float factor,
    uint4* shared, float* sums, float* most, float* total) {
  constexpr int QUERIES = 16, CH = D / 32, HALVES = D / 64, LINE = D + 2;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int piece = lane & 3, row = lane >> 2;
  hi = min(hi, seen_by(query0, QUERIES, end, W));
  for (int at = threadIdx.x; at < QUERIES * D / 8; at += WARPS * 32) {
    const int m = at / (D / 8), chunk = at % (D / 8), query = min(query0 + m, count - 1);
    const T* from = queries + (query / W) * head_step + (query % W) * token_step;
    shared[m * (D / 8) + (chunk ^ ((m & 1) << 2))] = *reinterpret_cast<const uint4*>(from + chunk * 8);
  }
  int last[2];
#pragma unroll
  for (int r = 0; r < 2; r++) last[r] = end - (W - 1 - (query0 + row + 8 * r) % W);
  keys += piece * 8;
  values += row * 8;
  float made[HALVES * 8][4];
#pragma unroll
  for (int t = 0; t < HALVES * 8; t++)
#pragma unroll
    for (int c = 0; c < 4; c++) made[t][c] = 0.f;
  float best[2] = {-1e30f, -1e30f}, weight[2] = {0.f, 0.f};
  uint4 kk[2][CH], vv[4][HALVES];
  bool marked[4];
  auto column = [&](int i, int place) { return i + piece * 2 + (place & 1) + 8 * (place >> 1); };
  auto fetch_keys = [&](int i) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const long long at = min(i + n * 8 + row, hi - 1);
#pragma unroll
      for (int c = 0; c < CH; c++) kk[n][c] = *reinterpret_cast<const uint4*>(keys + at * key_step + c * 32);
    }
#pragma unroll
    for (int place = 0; place < 4; place++) marked[place] = marks && marks[min(column(i, place), hi - 1)];
  };
  auto fetch_values = [&](int i) {
#pragma unroll
    for (int place = 0; place < 4; place++) {
      const long long at = min(column(i, place), hi - 1);
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        vv[place][half] = *reinterpret_cast<const uint4*>(values + at * value_step + half * 64);
    }
  };
  int i = lo + warp * 16;
  if (i < hi) fetch_keys(i);
  __syncthreads();
  for (; i < hi; i += WARPS * 16) {
    fetch_values(i);
    float scores[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) scores[n][c] = 0.f;
#pragma unroll
    for (int c = 0; c < CH; c++) {
      const int at = (c * 4 + piece) ^ ((row & 1) << 2);
      const uint4 upper = shared[row * (D / 8) + at], lower = shared[(row + 8) * (D / 8) + at];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        multiply<T>(scores[n], upper.x, lower.x, upper.y, lower.y, kk[n][c].x, kk[n][c].y);
        multiply<T>(scores[n], upper.z, lower.z, upper.w, lower.w, kk[n][c].z, kk[n][c].w);
      }
    }
    bool used[4];
#pragma unroll
    for (int place = 0; place < 4; place++) used[place] = column(i, place) < hi && !marked[place];
    if (i + WARPS * 16 < hi) fetch_keys(i + WARPS * 16);
    uint32_t upper_half[2][2], lower_half[2][2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float higher = best[r];
#pragma unroll
      for (int place = 0; place < 4; place++) {
        float& score = scores[place >> 1][2 * r + (place & 1)];
        score = used[place] && column(i, place) < last[r] ? score * factor : -1e30f;
        higher = fmaxf(higher, score);
      }
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(0xffffffffu, higher, 2));
      const float old = exp2f(best[r] - higher);
      best[r] = higher;
      weight[r] *= old;
#pragma unroll
      for (int t = 0; t < HALVES * 8; t++) {
        made[t][2 * r] *= old;
        made[t][2 * r + 1] *= old;
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
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
        multiply<T>(to, upper_half[0][0], upper_half[0][1], upper_half[1][0], upper_half[1][1], from[0], from[1]);
        multiply<T>(to, lower_half[0][0], lower_half[0][1], lower_half[1][0], lower_half[1][1], from[0], from[1]);
      }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 1);
    weight[r] += __shfl_xor_sync(0xffffffffu, weight[r], 2);
    if (piece == 0) {
      most[warp * QUERIES + row + 8 * r] = best[r];
      total[warp * QUERIES + row + 8 * r] = weight[r];
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int d = half * 64 + (piece * 2 + e) * 8 + t;
          sums[(warp * QUERIES + row + 8 * r) * LINE + d] = made[half * 8 + t][2 * r + e];
        }
  }
}
