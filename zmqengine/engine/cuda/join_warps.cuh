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
