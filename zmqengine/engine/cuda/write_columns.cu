// Columns of one slot of keys and values of some layers, written in place; MLX is not told that they change. The arrays
// [slots, heads, columns, D] are alike, and `columns` has as many [heads, columns, D]. `place` has the slot, the first
// column and how many are written. A block takes COLUMNS of them of one head of one array.
  constexpr int COLUMNS = 64, PIECES = D * (int)sizeof(T) / 16;
  const int head = blockIdx.x, slot = place[0], start = place[1], count = place[2];
  const T* array = nullptr;
  switch (blockIdx.z) {
    case @: array = array@; break;
  }
  const T* from = columns + blockIdx.z * columns_strides[0] + head * columns_strides[2];
  T* to = const_cast<T*>(array) + slot * array0_strides[0] + head * array0_strides[1] + start * array0_strides[2];
  const int begin = blockIdx.y * COLUMNS, end = min(begin + COLUMNS, count);
  for (int at = begin * PIECES + threadIdx.x; at < end * PIECES; at += THREADS) {
    const int column = at / PIECES, piece = at % PIECES;
    reinterpret_cast<uint4*>(to + column * array0_strides[2])[piece] =
        reinterpret_cast<const uint4*>(from + column * columns_strides[3])[piece];
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) done[0] = 1;
