// Attention of texts; a block computes one tile.
  __shared__ Four shared_memory[attention_fours<D, WARPS>()];
  const Heads queries = {q, q_strides[0], q_strides[1]};
  const Heads keys = {k, k_strides[0], k_strides[1]}, values = {v, v_strides[0], v_strides[1]};
  attention_tile<D, WARPS, WINDOW, SLOPED>(
      shared_memory, queries, keys, values, spans, slopes, scale[0], out, q_shape[0], q_shape[1],
      q_shape[1] / k_shape[1], blockIdx.x * 32, blockIdx.y);
