// Rows of a batch's keys and values, [rows, heads, columns, D], copied into new arrays with the columns in `order`
// [rows, new columns]: place row * columns + column, or a negative number for columns that are left as they are. A block
// takes COLUMNS new columns of one head.
  constexpr int COLUMNS = 64, PIECES = D * (int)sizeof(T) / 16;
  const int heads = keys_shape[1], old_columns = keys_shape[2], columns = order_shape[1];
  const int row = blockIdx.x / (2 * heads), head = blockIdx.x / 2 % heads;
  const bool are_keys = blockIdx.x % 2 == 0;
  const T* from = are_keys ? keys + head * keys_strides[1] : values + head * values_strides[1];
  const long long row_step = are_keys ? keys_strides[0] : values_strides[0];
  const long long step = are_keys ? keys_strides[2] : values_strides[2];
  T* to = (are_keys ? new_keys : new_values) + ((long long)row * heads + head) * columns * D;
  const int begin = blockIdx.y * COLUMNS, end = min(begin + COLUMNS, columns);
  for (int at = begin * PIECES + threadIdx.x; at < end * PIECES; at += THREADS) {
    const int column = at / PIECES, piece = at % PIECES;
    const int place = order[row * order_strides[0] + column * order_strides[1]];
    if (place < 0) continue;
    const T* old = from + place / old_columns * row_step + place % old_columns * step;
    reinterpret_cast<uint4*>(to + (long long)column * D)[piece] = reinterpret_cast<const uint4*>(old)[piece];
  }
