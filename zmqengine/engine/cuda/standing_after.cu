// Where rows stand after a window on its way, of which each keeps the first `kept` of its columns, and after the columns
// that are then added; and which columns are hidden from it, those included that it does not keep. A block takes a row.
  const int row = blockIdx.x, columns = marks_shape[1], stop = window[0], width = window[1];
  const int keeps = kept[row];
  if (threadIdx.x == 0) {
    offset_before[row] = offset[row] - width + keeps;
    offset_after[row] = offset[row] - width + keeps + added[0];
  }
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    const long long at = (long long)row * columns + i;
    const int ahead = i - (stop - width);
    hidden[at] = ahead < 0 || ahead >= width ? marks[at] : ahead >= keeps;
  }
