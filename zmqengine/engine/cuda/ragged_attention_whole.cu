    out[place * D + d] = static_cast<T>(joined.sum / joined.weight);
  }
