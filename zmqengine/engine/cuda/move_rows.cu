// Columns of rows of a batch's keys and values, [rows, heads, columns, D], copied into other rows, of the same arrays or
// of others. A move is five numbers: from which row, into which, from which column on, into which, and how many columns.
// A block takes COLUMNS of them of one head. MLX is not told that the arrays change.
  constexpr int COLUMNS = 64, PIECES = D * (int)sizeof(T) / 16;
  const int heads = keys_shape[1];
  const int* move = moves + blockIdx.x / (2 * heads) * 5;
  const int head = blockIdx.x / 2 % heads;
  const int from_row = move[0], row = move[1], from_start = move[2], start = move[3], columns = move[4];
  const bool are_keys = blockIdx.x % 2 == 0;
  const T* from;
  T* to;
  long long from_step, step;
  if (are_keys) {
    from = from_keys + from_row * from_keys_strides[0] + head * from_keys_strides[1] + from_start * from_keys_strides[2];
    to = const_cast<T*>(keys) + row * keys_strides[0] + head * keys_strides[1] + start * keys_strides[2];
    from_step = from_keys_strides[2];
    step = keys_strides[2];
  } else {
    from = from_values + from_row * from_values_strides[0] + head * from_values_strides[1] +
           from_start * from_values_strides[2];
    to = const_cast<T*>(values) + row * values_strides[0] + head * values_strides[1] + start * values_strides[2];
    from_step = from_values_strides[2];
    step = values_strides[2];
  }
  const int begin = blockIdx.y * COLUMNS, end = min(begin + COLUMNS, columns);
  for (int at = begin * PIECES + threadIdx.x; at < end * PIECES; at += THREADS) {
    const int column = at / PIECES, piece = at % PIECES;
    reinterpret_cast<uint4*>(to + column * step)[piece] = reinterpret_cast<const uint4*>(from + column * from_step)[piece];
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) done[0] = 1;
