// Columns of one slot of keys or values, [slots, heads, columns, D], written in place; MLX is not told that they change.
// `place` has the slot, the first column and how many are written. A block takes COLUMNS of them of one head.
  constexpr int COLUMNS = 64, PIECES = D * (int)sizeof(T) / 16;
  const int head = blockIdx.x, slot = place[0], start = place[1], count = place[2];
  const T* from = columns + head * columns_strides[1];
  T* to = const_cast<T*>(array) + slot * array_strides[0] + head * array_strides[1] + start * array_strides[2];
  const int begin = blockIdx.y * COLUMNS, end = min(begin + COLUMNS, count);
  for (int at = begin * PIECES + threadIdx.x; at < end * PIECES; at += THREADS) {
    const int column = at / PIECES, piece = at % PIECES;
    reinterpret_cast<uint4*>(to + column * array_strides[2])[piece] =
        reinterpret_cast<const uint4*>(from + column * columns_strides[2])[piece];
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) done[0] = 1;
