// The row, the queries and the columns of a block in a packed step: a tile has its segment, its row there, the first of its
// columns and the one behind its last, the one behind the row's last, the tokens of the row, the first query of the tile,
// and the row's first token; then its part of the columns that its queries see, the number of these parts, and the first
// part's place in `part_sums`. `q` is [tokens, H, D].
  constexpr int QUERIES = 16, heads = H, G = H / KH;
  const int* tile = tiles + (blockIdx.x / KH) * 12;
  const int b = tile[1], h = blockIdx.x % KH, lo = tile[2], end = tile[4], W = tile[5], query0 = tile[6];
  const int part = tile[8], parts = tile[9], slot = tile[10];
  int hi = tile[3];
  const long long token0 = tile[7], head_step = D, token_step = H * D;
  const T* queries = q + (token0 * H + h * G) * D;
  const T *keys = nullptr, *values = nullptr;
  const unsigned char* marks = nullptr;
  long long key_step = 0, value_step = 0;
  bool holes = false;
  switch (tile[0]) {
    case @: keys = k@ + b * k@_strides[0] + h * k@_strides[1], key_step = k@_strides[2];
      values = v@ + b * v@_strides[0] + h * v@_strides[1], value_step = v@_strides[2];
      marks = hidden@ + (long long)b * hidden@_shape[1], holes = hidden@_shape[1] > 1; break;
  }
