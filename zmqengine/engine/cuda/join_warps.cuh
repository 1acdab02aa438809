// What the warps of a block have found of a query, as one: the sum of a dimension, the best score, and the weight of all
// columns. That of one warp and that of the next are `step` apart, or `sums_step`.
struct Joined {
  float sum, best, weight;
};
template <int WARPS>
__device__ __forceinline__ Joined
join_warps(const float* best, const float* weight, int step, const float* sums, int sums_step) {
  Joined joined = {0.f, best[0], 0.f};
#pragma unroll
  for (int warp = 1; warp < WARPS; warp++) joined.best = fmaxf(joined.best, best[warp * step]);
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) {
    const float mine = exp2f(best[warp * step] - joined.best);
    joined.weight += weight[warp * step] * mine;
    joined.sum += sums[warp * sums_step] * mine;
  }
  return joined;
}
// The output of a query. With SINK its logit joins the softmax, which has no value.
template <bool SINK>
__device__ __forceinline__ float output_of(Joined joined, float sink) {
  if (!SINK) return joined.weight == 0.f ? 0.f : joined.sum / joined.weight;
  const float exponent = sink * 1.44269504f, best = fmaxf(joined.best, exponent);
  const float mine = exp2f(joined.best - best);
  return joined.sum * mine / (joined.weight * mine + exp2f(exponent - best));
}
