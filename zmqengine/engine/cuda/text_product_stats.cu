// Statistics for a norm of the sums, for each 8 columns: their mean, and the sum of the squared differences to it.
    float average = sum;
    for (int d = 1; d < GROUP; d *= 2) average += __shfl_xor_sync(0xffffffffu, average, d);
    average /= GROUP;
    float squares = (sum - average) * (sum - average);
    for (int d = 1; d < GROUP; d *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    if (n % GROUP == 0 && is_used) {
      told[((long long)row * outputs + output) / GROUP * 2] = average;
      told[((long long)row * outputs + output) / GROUP * 2 + 1] = squares;
    }
