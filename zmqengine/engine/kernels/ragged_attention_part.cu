    float* to = out + (place * SPLITS + blockIdx.z) * (D + 2);
    to[d] = sum;
    if (d == 0) {
      to[D] = highest;
      to[D + 1] = total;
    }
  }
