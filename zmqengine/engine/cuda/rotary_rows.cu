// The token and the head of a warp, where all rows are equally wide.
  constexpr int HEADS = H + 2 * KH;
  const int one = blockIdx.x * WARPS + (threadIdx.x >> 5), head = one % HEADS, token = one / HEADS;
  const int rows = offset_shape[0], tokens = product_shape[0], width = tokens / rows, row = token / width;
  if (token >= tokens) return;
  const int ahead = token % width, position = offset[row] + ahead;
  const long long query = ((long long)row * H + head) * width + ahead;
