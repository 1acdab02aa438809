    out[place * D + d] = static_cast<T>(joined.weight == 0.f ? 0.f : joined.sum / joined.weight);
  }
