    float* to = out + (place * parts + blockIdx.z) * (D + 2);
    to[first_dim + d] = joined.sum;
    if (first_dim + d == 0) {
      to[D] = joined.best;
      to[D + 1] = joined.weight;
    }
  }
