// The mean of the states of each text, or the largest in every column; 0 for texts without tokens. `texts` has the first token
// of each, then the one behind its last. A block takes a text and some columns.
  const int count = gridDim.x, width = states_shape[1];
  const int text = blockIdx.x, column = blockIdx.y * THREADS + threadIdx.x;
  const int begin = texts[text], end = texts[count + text];
  if (column >= width) return;
  float found = LARGEST && begin < end ? states[(long long)begin * width + column] : 0.f;
#pragma unroll 8
  for (int token = begin; token < end; token++) {
    const float state = states[(long long)token * width + column];
    if (LARGEST) {
      // A NaN stays.
      found = state > found || state != state ? state : found;
    } else {
      found += state;
    }
  }
  out[(long long)text * width + column] = LARGEST || begin == end ? found : found / static_cast<float>(end - begin);
