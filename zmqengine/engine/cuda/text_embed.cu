// The embeddings of tokens, positions and parts of pairs, summed and normalised; a warp takes a token. `tokens` is the
// table of `Ragged`, in memory of the host: a block reads its part of each row once, and copies what later kernels read,
// the spans of tokens, their positions, and the spans of texts. A 0 follows, the counter of `text_layers.cu`.
  constexpr int TOKENS = THREADS / 32, EACH = (W + 31) / 32;
  __shared__ int shared_table[5][TOKENS];
  const int count = tokens_shape[1], rows = tokens_shape[0], text_count = texts_shape[1];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x * TOKENS + warp;
  if (threadIdx.x < rows * TOKENS) {
    const int row = threadIdx.x / TOKENS, at = threadIdx.x % TOKENS;
    shared_table[row][at] = tokens[row * count + min(blockIdx.x * TOKENS + at, count - 1)];
  }
  for (int n = blockIdx.x * THREADS + threadIdx.x; n < 2 * text_count; n += gridDim.x * THREADS)
    copied[3 * count + n] = texts[n];
  if (blockIdx.x == 0 && threadIdx.x == 0) copied[3 * count + 2 * text_count] = 0;
  __syncthreads();
  if (token >= count) return;
  if (lane < 3) copied[lane * count + token] = shared_table[lane < 2 ? rows - 2 + lane : 1][warp];
  const long long id = shared_table[0][warp], position = shared_table[1][warp] + FIRST;
  const long long type = rows > 4 && types_shape[0] > 1 ? shared_table[2][warp] : 0;
  auto over_warp = [](float sum) {
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
  };
  float states[EACH], sum = 0.f, squares = 0.f;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int column = lane + e * 32;
    states[e] = 0.f;
    if (column >= W) continue;
    states[e] = words[id * W + column];
    if (POSITIONS) states[e] += positions[position * W + column];
    if (TYPES) states[e] += types[type * W + column];
    sum += states[e];
  }
  const float mean = over_warp(sum) / W;
#pragma unroll
  for (int e = 0; e < EACH; e++)
    if (lane + e * 32 < W) squares += (states[e] - mean) * (states[e] - mean);
  const float by = rsqrtf(over_warp(squares) / W + __int_as_float(EPS));
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int column = lane + e * 32;
    if (column >= W) continue;
    const float normed = (states[e] - mean) * by * norm_weight[column];
    out[(long long)token * W + column] = BIASED ? normed + norm_bias[column] : normed;
  }
