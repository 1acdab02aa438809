    float* to = out + (place * SPLITS + blockIdx.z) * (D + 2);
    to[d] = joined.sum;
    if (d == 0) {
      to[D] = joined.best;
      to[D + 1] = joined.weight;
    }
  }
