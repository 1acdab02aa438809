// Statistics for a norm of the sums, for each 8 columns: their mean, and the sum of the squared differences to it.
  float average = sum;
  for (int d = 1; d < OUTPUTS; d *= 2) average += __shfl_xor_sync(0xffffffffu, average, d);
  average /= OUTPUTS;
  float squares = (sum - average) * (sum - average);
  for (int d = 1; d < OUTPUTS; d *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
  if (threadIdx.x % OUTPUTS == 0 && row < count) {
    told[((long long)row * gridDim.x + blockIdx.x) * 2] = average;
    told[((long long)row * gridDim.x + blockIdx.x) * 2 + 1] = squares;
  }
