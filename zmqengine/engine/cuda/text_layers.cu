// All layers of an encoder of BERT's kind, each a product for queries, keys and values, attention, and three more products.
// The weights of the layers follow each other. A layer has five phases with a barrier of all blocks between two of them, so
// all blocks must run at once: a device has a multiprocessor for each, and kernels of other processes end or are switched
// out. Where they do not, as under a limit on multiprocessors that the driver does not tell, a block gives up after some
// seconds, and all rows but those of later blocks are no numbers: autotune rejects the kernel. A block computes tile after
// tile of a phase, `gridDim.x` apart. `arrivals`, 0 at first, counts blocks at barriers. `out` are sums before the norm of
// the last layer; `scratch` passes results from phase to phase.
  extern __shared__ uint4 shared_start[];
  constexpr int GROUPS = W / 8, HEADS = W / D, WARPS = 8;
  // A block gives up after this number of reads of the counter; a read takes some hundred nanoseconds.
  constexpr int READS_MAX = 1 << 22;
  const int count = states_shape[0], layers = qkv_weight_shape[0];
  const long long size = (long long)count * W;
  float *qkv = scratch, *attended = qkv + 3 * size, *sums = attended + size, *inner = sums + size;
  float *sums_stats = inner + (long long)count * F, *out_stats = sums_stats + 2LL * count * GROUPS;
  int* arrived = const_cast<int*>(arrivals);
  int expected = 0;
  bool gave_up = false;
  auto barrier = [&]() {
    expected += gridDim.x;
    __syncthreads();
    if (threadIdx.x == 0) {
      // Writes of this block are visible to others before it arrives, and theirs to it afterwards.
      __threadfence();
      atomicAdd(arrived, 1);
      for (int reads = 0; !gave_up && *const_cast<volatile int*>(arrived) < expected; reads++) gave_up = reads == READS_MAX;
      __threadfence();
    }
    __syncthreads();
  };
  for (int layer = 0; layer < layers; layer++) {
    const float *before_weight = norm_weight + (layer - 1LL) * W, *before_bias = norm_bias + (layer - 1LL) * W;
    const float *between_weight = middle_weight + (long long)layer * W, *between_bias = middle_bias + (long long)layer * W;
    const Product project = {
        layer ? out : states, qkv_weight + layer * 3LL * W * W, qkv_bias + layer * 3LL * W, nullptr, out_stats,
        before_weight, before_bias, qkv, nullptr, count, 3 * W};
    const Product attend = {
        attended, out_weight + (long long)layer * W * W, nullptr, layer ? out : states, out_stats, before_weight,
        before_bias, sums, sums_stats, count, W};
    const Product widen = {
        sums, up_weight + (long long)layer * F * W, up_bias + (long long)layer * F, nullptr, sums_stats,
        between_weight, between_bias, inner, nullptr, count, F};
    const Product narrow = {
        inner, down_weight + (long long)layer * W * F, nullptr, sums, sums_stats, between_weight, between_bias, out,
        out_stats, count, W};
    if (layer) {
      product_tiles<Tile<QKV_ROWS, QKV_COLUMNS>, W, true, false, false, true, EPS, false>(shared_start, project);
    } else {
      product_tiles<Tile<QKV_ROWS, QKV_COLUMNS>, W, true, false, false, false, EPS, false>(shared_start, project);
    }
    barrier();
    const int blocks = (count + 31) / 32;
    for (int tile = blockIdx.x; tile < blocks * HEADS; tile += gridDim.x) {
      __syncthreads();
      attention_tile<D, WARPS, 1 << 30, false>(
          reinterpret_cast<Four*>(shared_start), {qkv, 3 * W, D}, {qkv + W, 3 * W, D}, {qkv + 2 * W, 3 * W, D}, spans,
          nullptr, __int_as_float(SCALE), attended, count, HEADS, 1, tile / HEADS * 32, tile % HEADS);
    }
    barrier();
    if (layer) {
      product_tiles<Tile<OUT_ROWS, OUT_COLUMNS>, W, false, false, true, true, EPS, true>(shared_start, attend);
    } else {
      product_tiles<Tile<OUT_ROWS, OUT_COLUMNS>, W, false, false, true, false, EPS, true>(shared_start, attend);
    }
    barrier();
    product_tiles<Tile<UP_ROWS, UP_COLUMNS>, W, true, true, false, true, EPS, false>(shared_start, widen);
    barrier();
    product_tiles<Tile<OUT_ROWS, OUT_COLUMNS>, F, false, false, true, true, EPS, true>(shared_start, narrow);
    if (layer + 1 < layers) barrier();
  }
  __syncthreads();
  if (gave_up)
    for (long long i = 0; i < size; i++) out[i] = __int_as_float(0x7fc00000);
