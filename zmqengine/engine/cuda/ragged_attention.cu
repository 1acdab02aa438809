// Attention of the last W tokens of each row of a batch over the row's own columns, from starts[row] up to the column
// of the token itself; the newest token stands in column `stop` - 1. Columns that `hidden` marks are left out. Rows and
// columns of `k`, `v` and `hidden` are found by strides: their shapes may be those of a part. One mark stands for none.
// A block takes some heads of one row that share keys, one of the W tokens, and one part of the columns. Eight lanes
// share a key, so a warp looks at four keys at a time, and loads the next four meanwhile. Sums are in float32; parts
// are put together as in FlashDecoding (Dao et al., crfm.stanford.edu/2023/10/12/flashdecoding.html).
  constexpr int LANES = 8;
  constexpr int E = D / LANES;
  constexpr int VEC = (E % 8 == 0) ? 8 : 4;
  constexpr int CH = E / VEC;
  constexpr int KEYS = 32 / LANES;
  constexpr int STEP = WARPS * KEYS;
  struct alignas(sizeof(T) * VEC > 16 ? 16 : sizeof(T) * VEC) Vec { T x[VEC]; };
  __shared__ float shared_sums[WARPS][G][D];
  __shared__ float shared_best[WARPS][G];
  __shared__ float shared_weight[WARPS][G];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int part = lane % LANES, slot = lane / LANES;
  const int key_heads = k_shape[1], heads = q_shape[1], W = q_shape[2];
  const int blocks = heads / G;
  const int b = blockIdx.x / blocks, first_head = (blockIdx.x % blocks) * G;
  const int h = first_head / (heads / key_heads);
  const int w = blockIdx.y;
  // To compile another kernel for it would hold up everybody for seconds when the first gap comes.
  const bool holes = hidden_strides[0] > 1;
  const int first = starts[b], last = stop[0] - (W - 1 - w);
  int lo = first, hi = last;
  if (SPLITS > 1) {
    const int share = (last - first + SPLITS - 1) / SPLITS;
    lo = first + (int)blockIdx.z * share;
    hi = min(lo + share, last);
  }
  const float factor = scale[0] * 1.44269504f;
  float qv[G][E], sums[G][E], best[G], weight[G];
#pragma unroll
  for (int g = 0; g < G; g++) {
    const T* from = q + b * q_strides[0] + (first_head + g) * q_strides[1] + w * q_strides[2];
#pragma unroll
    for (int c = 0; c < CH; c++)
#pragma unroll
      for (int j = 0; j < VEC; j++) {
        qv[g][c * VEC + j] = factor * static_cast<float>(from[c * LANES * VEC + part * VEC + j]);
        sums[g][c * VEC + j] = 0.f;
      }
    best[g] = -1e30f;
    weight[g] = 0.f;
  }
  const T* keys = k + b * k_strides[0] + h * k_strides[1] + part * VEC;
  const T* values = v + b * v_strides[0] + h * v_strides[1] + part * VEC;
  Vec kk[CH], vv[CH], next_k[CH], next_v[CH];
  int i = lo + warp * KEYS + slot;
  if (i - slot < hi) {
    const long long at = min(i, hi - 1);
#pragma unroll
    for (int c = 0; c < CH; c++) {
      next_k[c] = *reinterpret_cast<const Vec*>(keys + at * k_strides[2] + c * LANES * VEC);
      next_v[c] = *reinterpret_cast<const Vec*>(values + at * v_strides[2] + c * LANES * VEC);
    }
  }
  for (; i - slot < hi; i += STEP) {
    bool used = i < hi;
    if (holes) used = used && !hidden[b * hidden_strides[0] + min(i, hi - 1)];
#pragma unroll
    for (int c = 0; c < CH; c++) {
      kk[c] = next_k[c];
      vv[c] = next_v[c];
    }
    if (i - slot + STEP < hi) {
      const long long at = min(i + STEP, hi - 1);
#pragma unroll
      for (int c = 0; c < CH; c++) {
        next_k[c] = *reinterpret_cast<const Vec*>(keys + at * k_strides[2] + c * LANES * VEC);
        next_v[c] = *reinterpret_cast<const Vec*>(values + at * v_strides[2] + c * LANES * VEC);
      }
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
      float score = 0.f;
#pragma unroll
      for (int c = 0; c < CH; c++)
#pragma unroll
        for (int j = 0; j < VEC; j++) score += qv[g][c * VEC + j] * static_cast<float>(kk[c].x[j]);
#pragma unroll
      for (int d = LANES / 2; d; d /= 2) score += __shfl_xor_sync(0xffffffffu, score, d);
      score = used ? score : -1e30f;
      const float higher = fmaxf(best[g], score);
      const float old = exp2f(best[g] - higher);
      const float fresh = used ? exp2f(score - higher) : 0.f;
      best[g] = higher;
      weight[g] = weight[g] * old + fresh;
#pragma unroll
      for (int c = 0; c < CH; c++)
#pragma unroll
        for (int j = 0; j < VEC; j++)
          sums[g][c * VEC + j] = sums[g][c * VEC + j] * old + fresh * static_cast<float>(vv[c].x[j]);
    }
  }
#pragma unroll
  for (int g = 0; g < G; g++) {
#pragma unroll
    for (int d = LANES; d < 32; d *= 2) {
      const float other_best = __shfl_xor_sync(0xffffffffu, best[g], d);
      const float other_weight = __shfl_xor_sync(0xffffffffu, weight[g], d);
      const float higher = fmaxf(best[g], other_best);
      const float mine = exp2f(best[g] - higher), its = exp2f(other_best - higher);
      weight[g] = weight[g] * mine + other_weight * its;
      best[g] = higher;
#pragma unroll
      for (int j = 0; j < E; j++) {
        const float other = __shfl_xor_sync(0xffffffffu, sums[g][j], d);
        sums[g][j] = sums[g][j] * mine + other * its;
      }
    }
    if (slot == 0) {
#pragma unroll
      for (int c = 0; c < CH; c++)
#pragma unroll
        for (int j = 0; j < VEC; j++)
          shared_sums[warp][g][c * LANES * VEC + part * VEC + j] = sums[g][c * VEC + j];
      if (part == 0) {
        shared_best[warp][g] = best[g];
        shared_weight[warp][g] = weight[g];
      }
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < G * D; at += WARPS * 32) {
    const int g = at / D, d = at % D;
    const Joined joined = join_warps<WARPS>(shared_best[0] + g, shared_weight[0] + g, G, &shared_sums[0][g][d], G * D);
    const long long place = ((long long)b * W + w) * heads + first_head + g;
