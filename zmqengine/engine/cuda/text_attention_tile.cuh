// Attention of texts whose tokens follow each other, in float32. `spans` has the first token of each token's text, then the
// one behind its last. A block takes 32 neighbouring tokens and a head: a lane a token, and a warp some of the keys, of
// which all of its lanes read the same one at a time. 64 keys and their values come into shared memory at once, so that a
// block waits for memory once. Texts may share a block: a lane leaves out the keys that are not of its text, and never
// multiplies with their values, which may be no numbers.
// Numbers [tokens, heads, D], with the steps from a token, and from a head, to the next.
struct Heads {
  const float* numbers;
  long long token_step, head_step;
};
// Fours of shared memory for `attention_tile`.
template <int D, int WARPS>
__device__ constexpr int attention_fours() {
  constexpr int SUMS = (WARPS * 32 * (D + 1) + 3) / 4, KEYS_AND_VALUES = 2 * 64 * D / 4;
  return SUMS > KEYS_AND_VALUES ? SUMS : KEYS_AND_VALUES;
}
// The 32 tokens from `first` on, in the head `h`. `group`: heads that share a head of keys.
template <int D, int WARPS, int WINDOW, bool SLOPED>
__device__ __forceinline__ void attention_tile(
    Four* shared_memory, Heads q, Heads k, Heads v, const int* spans, const float* slopes, float scale, float* out,
    int count, int heads, int group, int first, int h) {
  constexpr int QUERIES = 32, EACH = 4, KEYS = 64, FOURS = D / 4, THREADS = WARPS * 32;
  Four *shared_keys = shared_memory, *shared_values = shared_memory + KEYS * FOURS;
  float* shared_sums = reinterpret_cast<float*>(shared_memory);
  __shared__ float shared_best[WARPS][QUERIES];
  __shared__ float shared_weight[WARPS][QUERIES];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int last = min(first + QUERIES, count) - 1, token = min(first + lane, last);
  const int *begins = spans, *ends = spans + count;
  const int from = max(begins[token], token - WINDOW), to = min(ends[token], token + WINDOW + 1);
  const int lo = max(begins[first], first - WINDOW), hi = min(ends[last], last + WINDOW + 1);
  const float factor = scale * 1.44269504f;
  const float slope = SLOPED ? slopes[h] * 1.44269504f : 0.f;
  const float* query = q.numbers + token * q.token_step + h * q.head_step;
  const float* keys = k.numbers + h / group * k.head_step;
  const float* values = v.numbers + h / group * v.head_step;
  float own[D], sums[D], best = -1e30f, weight = 0.f;
#pragma unroll
  for (int c = 0; c < D / 4; c++) {
    const Four four = reinterpret_cast<const Four*>(query)[c];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      own[c * 4 + j] = four.at[j] * factor;
      sums[c * 4 + j] = 0.f;
    }
  }
  for (int begin = lo; begin < hi; begin += KEYS) {
    const int end = min(begin + KEYS, hi);
    if (begin > lo) __syncthreads();
#pragma unroll
    for (int part = 0; part < (KEYS * FOURS + THREADS - 1) / THREADS; part++) {
      const int at = part * THREADS + threadIdx.x;
      if (KEYS * FOURS % THREADS && at >= KEYS * FOURS) break;
      const long long i = min(begin + at / FOURS, end - 1);
      shared_keys[at] = reinterpret_cast<const Four*>(keys + i * k.token_step)[at % FOURS];
      shared_values[at] = reinterpret_cast<const Four*>(values + i * v.token_step)[at % FOURS];
    }
    __syncthreads();
    for (int i = begin + warp * EACH; i < end; i += WARPS * EACH) {
      float scores[EACH], higher = best;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const Four* key = shared_keys + (i + e - begin) * FOURS;
        float parts[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int c = 0; c < D / 4; c++) {
          const Four four = key[c];
#pragma unroll
          for (int j = 0; j < 4; j++) parts[j] += own[c * 4 + j] * four.at[j];
        }
        const float score = parts[0] + parts[1] + (parts[2] + parts[3]);
        scores[e] = SLOPED ? score - slope * static_cast<float>(max(token - i - e, i + e - token)) : score;
        if (i + e >= from && i + e < to) higher = fmaxf(higher, scores[e]);
      }
      const float old = exp2f(best - higher);
      best = higher;
      weight *= old;
#pragma unroll
      for (int d = 0; d < D; d++) sums[d] *= old;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        if (i + e < from || i + e >= to) continue;
        const Four* value = shared_values + (i + e - begin) * FOURS;
        const float fresh = exp2f(scores[e] - higher);
        weight += fresh;
#pragma unroll
        for (int c = 0; c < D / 4; c++) {
          const Four four = value[c];
#pragma unroll
          for (int j = 0; j < 4; j++) sums[c * 4 + j] += fresh * four.at[j];
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int d = 0; d < D; d++) shared_sums[(warp * QUERIES + lane) * (D + 1) + d] = sums[d];
  shared_best[warp][lane] = best;
  shared_weight[warp][lane] = weight;
  __syncthreads();
  for (int at = threadIdx.x; at < QUERIES * D; at += WARPS * 32) {
    const int m = at / D, d = at % D;
    if (first + m > last) break;
    const Joined joined = join_warps<WARPS>(
        shared_best[0] + m, shared_weight[0] + m, QUERIES, shared_sums + m * (D + 1) + d, QUERIES * (D + 1));
    out[((long long)(first + m) * heads + h) * D + d] = joined.sum / joined.weight;
  }
}
