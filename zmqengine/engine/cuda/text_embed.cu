// The embeddings of tokens, positions and parts of pairs, summed and normalised; a block takes a token. `tokens` is the
// table of `Ragged`. The spans of tokens and texts are copied: the host writes its next tables into the same pages.
  constexpr int EACH = (W + THREADS - 1) / THREADS, WARPS = THREADS / 32;
  __shared__ float shared_sums[2][WARPS];
  const int count = tokens_shape[1], rows = tokens_shape[0], token = blockIdx.x;
  const int* spans_from = tokens + (long long)(rows - 2) * count;
  const long long id = tokens[token], position = tokens[count + token] + FIRST;
  const long long type = rows > 4 && types_shape[0] > 1 ? tokens[2 * count + token] : 0;
  auto over_block = [&](float sum, float* shared) {
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = sum;
    __syncthreads();
    float all = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) all += shared[warp];
    return all;
  };
  float states[EACH], sum = 0.f, squares = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int column = threadIdx.x + e * THREADS;
    states[e] = 0.f;
    if (column >= W) continue;
    states[e] = words[id * W + column];
    if (POSITIONS) states[e] += positions[position * W + column];
    if (TYPES) states[e] += types[type * W + column];
    sum += states[e];
  }
  const float mean = over_block(sum, shared_sums[0]) / W;
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (threadIdx.x + e * THREADS < W) squares += (states[e] - mean) * (states[e] - mean);
  const float by = rsqrtf(over_block(squares, shared_sums[1]) / W + __int_as_float(EPS));
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int column = threadIdx.x + e * THREADS;
    if (column >= W) continue;
    const float normed = (states[e] - mean) * by * norm_weight[column];
    out[(long long)token * W + column] = BIASED ? normed + norm_bias[column] : normed;
  }
  const int ahead = token * THREADS + threadIdx.x, text_count = texts_shape[1];
  if (threadIdx.x < 2) spans[threadIdx.x * count + token] = spans_from[threadIdx.x * count + token];
  for (int n = ahead; n < 2 * text_count; n += count * THREADS) spans[2 * count + n] = texts[n];
