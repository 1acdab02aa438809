// The PER experts of each token with the largest ranks, the smaller number first of equal ones, and their shares. The rank
// is the logit, or its sigmoid (SIGMOID), to which a bias is added if BIASED; a share is that without the bias, or else of
// a softmax over all E experts. If NORMALISED, shares add up to 1. They are multiplied by SCALE, or by a scale of each
// expert (SCALED).
//
// Then the pairs of token and expert, number token * PER + place, ordered by expert, and tiles of at most ROWS pairs of
// one expert, which the products take. One block does all.
  constexpr int EACH = (E + 31) / 32, WARPS = 32, LAST = 0xffff;
  __shared__ int counts[32 * EACH], starts[32 * EACH], tiles_before[32 * EACH], tile_count;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int T = logits_shape[0], pairs = T * PER, tiles_max = pairs / ROWS + min(E, pairs);
  for (int e = threadIdx.x; e < 32 * EACH; e += WARPS * 32) counts[e] = 0;
  __syncthreads();
  for (int t = warp; t < T; t += WARPS) {
    const P* own_logits = logits + (long long)t * E;
    uint32_t keys[EACH];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int e = lane + 32 * i;
      // 0 is of no expert.
      keys[i] = 0;
      if (e < E) {
        float rank = static_cast<float>(own_logits[e]);
        if (SIGMOID) rank = sigmoid(rank);
        if (BIASED) rank += static_cast<float>(bias[e]);
        keys[i] = max(ordered(rank), 1u);
      }
      largest = max(largest, keys[i]);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    const float most = number_of(largest);
    float sum = 0.f;
    if (!SIGMOID && !NORMALISED) {
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (keys[i]) sum += __expf(number_of(keys[i]) - most);
    }
    int expert = 0;
    for (int place = 0; place < PER; place++) {
      uint32_t first = 0;
#pragma unroll
      for (int i = EACH - 1; i >= 0; i--)
        if (keys[i] == largest) first = LAST - (lane + 32 * i);
      first = LAST - __reduce_max_sync(0xffffffffu, first);
      if (lane == place) expert = first;
      uint32_t next = 0;
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        if (lane + 32 * i == first) keys[i] = 0;
        next = max(next, keys[i]);
      }
      largest = __reduce_max_sync(0xffffffffu, next);
    }
    const float logit = static_cast<float>(own_logits[expert]);
    const float share = lane >= PER ? 0.f : SIGMOID ? sigmoid(logit) : __expf(logit - most);
    if (NORMALISED) sum = share;
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (lane < PER) {
      chosen[t * PER + lane] = expert;
      const float scale = SCALED ? static_cast<float>(scales[expert]) : __int_as_float(SCALE);
      shares[t * PER + lane] = (SIGMOID && !NORMALISED ? share : share / sum) * scale;
      atomicAdd(&counts[expert], 1);
    }
  }
  __syncthreads();
  if (warp == 0) {
    int own_pairs = 0, own_tiles = 0;
    for (int i = 0; i < EACH; i++) {
      const int count = counts[lane * EACH + i];
      own_pairs += count;
      own_tiles += (count + ROWS - 1) / ROWS;
    }
    int pairs_before = 0, before = 0, all_pairs = own_pairs, all_tiles = own_tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int other_pairs = __shfl_xor_sync(0xffffffffu, all_pairs, d);
      const int other_tiles = __shfl_xor_sync(0xffffffffu, all_tiles, d);
      if (lane & d) pairs_before += other_pairs, before += other_tiles;
      all_pairs += other_pairs;
      all_tiles += other_tiles;
    }
    for (int i = 0; i < EACH; i++) {
      const int e = lane * EACH + i;
      starts[e] = pairs_before;
      tiles_before[e] = before;
      pairs_before += counts[e];
      before += (counts[e] + ROWS - 1) / ROWS;
    }
    if (lane == 0) tile_count = all_tiles;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += WARPS * 32) {
    const int start = starts[e], end = start + counts[e];
    int* tile = tiles + 3 * tiles_before[e];
    for (int first = start; first < end; first += ROWS, tile += 3)
      tile[0] = e, tile[1] = first, tile[2] = min(first + ROWS, end);
  }
  for (int i = 3 * tile_count + threadIdx.x; i < 3 * tiles_max; i += WARPS * 32) tiles[i] = 0;
  __syncthreads();
  // The order within an expert is any: a row of a product does not depend on its place.
  for (int pair = threadIdx.x; pair < pairs; pair += WARPS * 32) order[atomicAdd(&starts[chosen[pair]], 1)] = pair;
