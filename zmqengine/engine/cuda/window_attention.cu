// Attention of the last W tokens of each row of a batch, as in ragged_attention.cu, for half precision, by tensor cores.
// Queries are some tokens of some heads that share keys: a warp multiplies 16 of them at a time. Where a row has
// few, the warps of a block share the columns; where the queries are `apart`, each warp has its own.
  constexpr int LINE = D + 2;
  extern __shared__ uint4 shared_start[];
  __shared__ float most[WARPS * QUERIES], total[WARPS * QUERIES];
  float* sums = reinterpret_cast<float*>(shared_start);
  int lo = first, hi = end;
  if (SPLITS > 1) {
    const int share = (end - first + SPLITS - 1) / SPLITS;
    lo = first + (int)blockIdx.z * share;
    hi = min(lo + share, end);
  }
  const float factor = scale[0] * 1.44269504f;
  if (apart)
    attend_apart<T, D, WARPS>(
        queries, head_step, token_step, keys, key_step, values, value_step, holes ? marks : nullptr, lo, hi, end, W, G * W,
        query0, factor, shared_start, sums, most, total);
  else if (G * W - query0 <= 8)
    attend_together<T, D, WARPS, true>(
        queries, head_step, token_step, keys, key_step, values, value_step, holes ? marks : nullptr, lo, hi, end, W, G * W,
        query0, factor, shared_start + WARPS * QUERIES * LINE / 4, sums, most, total);
  else
    attend_together<T, D, WARPS, false>(
        queries, head_step, token_step, keys, key_step, values, value_step, holes ? marks : nullptr, lo, hi, end, W, G * W,
        query0, factor, shared_start + WARPS * QUERIES * LINE / 4, sums, most, total);
  __syncthreads();
  for (int at = threadIdx.x; at < (apart ? WARPS : 1) * QUERIES * D; at += WARPS * 32) {
    const int m = at / D, d = at % D, query = query0 + m;
    if (query >= G * W) break;
    const Joined joined = apart ? join_warps<1>(most + m, total + m, 0, sums + m * LINE + d, 0)
                                : join_warps<WARPS>(most + m, total + m, QUERIES, sums + m * LINE + d, QUERIES * LINE);
    const long long place = (token0 + query % W) * heads + h * G + query / W;
