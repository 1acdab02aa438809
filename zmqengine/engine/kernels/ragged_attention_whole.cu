    out[place * D + d] = static_cast<T>(sum / total);
  }
