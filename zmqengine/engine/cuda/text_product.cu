// A product of rows with weights [outputs, K], of which a block computes one tile.
  extern __shared__ uint4 shared_start[];
  const Product product = {
      rows, weights, bias, added, stats, norm_weight, norm_bias, out, told, rows_shape[0], weights_shape[1]};
  product_tile<Tile<ROWS, COLUMNS>, K, BIAS, GELU, ADDED, NORMED, EPS, TOLD>(
      shared_start, product, blockIdx.y * ROWS, blockIdx.x * COLUMNS);
