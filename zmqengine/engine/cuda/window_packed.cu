// The row and the queries of a block in a packed step: a tile has its segment, its row there, the first column of the row
// and the one behind its last, the tokens of the row, the first query of the tile, the row's first token, and whether its
// warps have queries of their own. `q` is [tokens, H, D].
  constexpr int QUERIES = 16, heads = H, G = H / KH;
  const int* tile = tiles + (blockIdx.x / KH) * 8;
  const int b = tile[1], h = blockIdx.x % KH, first = tile[2], end = tile[3], W = tile[4], query0 = tile[5];
  if (W == 0) return;
  const bool apart = tile[7];
  const long long token0 = tile[6], head_step = D, token_step = H * D;
  const T* queries = q + (token0 * H + h * G) * D;
  const T *keys = nullptr, *values = nullptr;
  const unsigned char* marks = nullptr;
  long long key_step = 0, value_step = 0;
  bool holes = false;
  switch (tile[0]) {
    case @: keys = k@ + b * k@_strides[0] + h * k@_strides[1], key_step = k@_strides[2];
      values = v@ + b * v@_strides[0] + h * v@_strides[1], value_step = v@_strides[2];
      marks = hidden@ + b * hidden@_strides[0], holes = hidden@_strides[0] > 1; break;
  }
