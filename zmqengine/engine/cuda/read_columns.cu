// A copy of columns of one slot of keys and values of some layers, `copied` [arrays, heads, columns, D]. The arrays
// [slots, heads, columns, D] are alike. `place` has the slot, the first column, how many are read, and the heads. A block
// takes COLUMNS of them of one head of one array.
  constexpr int COLUMNS = 64, PIECES = D * (int)sizeof(T) / 16;
  const int head = blockIdx.x, slot = place[0], start = place[1], count = place[2], heads = place[3];
  const T* array = nullptr;
  switch (blockIdx.z) {
    case @: array = array@; break;
  }
  const T* from = array + slot * array0_strides[0] + head * array0_strides[1] + start * array0_strides[2];
  T* to = copied + ((long long)blockIdx.z * heads + head) * count * D;
  const int begin = blockIdx.y * COLUMNS, end = min(begin + COLUMNS, count);
  for (int at = begin * PIECES + threadIdx.x; at < end * PIECES; at += THREADS) {
    const int column = at / PIECES, piece = at % PIECES;
    reinterpret_cast<uint4*>(to + (long long)column * D)[piece] =
        reinterpret_cast<const uint4*>(from + column * array0_strides[2])[piece];
  }
