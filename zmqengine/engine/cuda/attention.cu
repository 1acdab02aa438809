// Attention of tokens of rows over their slots, for half precision, by tensor cores: the last W tokens of a row see its
// columns up to their own. A tile has the pool of its row, its slot there, the column behind the last one, the tokens of
// the row, the first query of the tile, the row's first token, and whether its warps have queries of their own. `q` is
// [tokens, H, D]. Queries are some tokens of some heads that share keys: a warp multiplies 16 of them at a time. Where a
// row has few, the warps of a block share the columns. A block makes V of the D dimensions.
//
// `facts` are the factor of scores, the columns that a token sees at most, its own included, and, if CAPPED, what bounds
// scores before the factor. If SINKS, a logit of each head joins the softmax.
  constexpr int QUERIES = 16, G = H / KH;
  const int* tile = tiles + (blockIdx.x / KH) * 7;
  const int slot = tile[1], h = blockIdx.x % KH, end = tile[2], W = tile[3], query0 = tile[4];
  if (W == 0) return;
  const bool apart = tile[6];
  const long long token0 = tile[5], head_step = D, token_step = H * D;
  const T* queries = q + (token0 * H + h * G) * D;
  const T *keys = nullptr, *values = nullptr;
  long long key_step = 0, value_step = 0;
  switch (tile[0]) {
    case @: keys = k@ + slot * k@_strides[0] + h * k@_strides[1], key_step = k@_strides[2];
      values = v@ + slot * v@_strides[0] + h * v@_strides[1], value_step = v@_strides[2]; break;
  }
  constexpr int LINE = V + 2;
  const int first_dim = blockIdx.y * V;
  values += first_dim;
  extern __shared__ uint4 shared_start[];
  __shared__ float most[WARPS * QUERIES], total[WARPS * QUERIES];
  float* sums = reinterpret_cast<float*>(shared_start);
  uint4* queries_place = shared_start + WARPS * QUERIES * LINE / 4;
  const int window = (int)facts[1];
  int lo = seen_from(query0, apart ? WARPS * QUERIES : QUERIES, end, W, window), hi = end;
  const int parts = gridDim.z, share = (hi - lo + parts - 1) / parts;
  lo += (int)blockIdx.z * share;
  hi = min(lo + share, end);
  const float factor = facts[0] * 1.44269504f, cap = CAPPED ? facts[2] : 0.f;
  // Blocks of a part of the dimensions have no room for as many queries.
  if (V == D && apart)
    attend_apart<T, V, WARPS, CAPPED>(
        queries, head_step, token_step, keys, key_step, values, value_step, lo, hi, end, W, window, G * W,
        query0, factor, cap, shared_start, queries_place, sums, most, total);
  else if (G * W - query0 <= 8)
    attend_together<T, D, V, WARPS, true, CAPPED>(
        queries, head_step, token_step, keys, key_step, values, value_step, lo, hi, end, W, window, G * W,
        query0, factor, cap, queries_place, sums, most, total);
  else
    attend_together<T, D, V, WARPS, false, CAPPED>(
        queries, head_step, token_step, keys, key_step, values, value_step, lo, hi, end, W, window, G * W,
        query0, factor, cap, queries_place, sums, most, total);
  __syncthreads();
  for (int at = threadIdx.x; at < (apart ? WARPS : 1) * QUERIES * V; at += WARPS * 32) {
    const int m = at / V, d = at % V, query = query0 + m;
    if (query >= G * W) break;
    const Joined joined = apart ? join_warps<1>(most + m, total + m, 0, sums + m * LINE + d, 0)
                                : join_warps<WARPS>(most + m, total + m, QUERIES, sums + m * LINE + d, QUERIES * LINE);
    const long long place = (token0 + query % W) * H + h * G + query / W;
