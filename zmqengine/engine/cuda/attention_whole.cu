    const float sink = SINKS ? static_cast<float>(sinks[h * G + query / W]) : 0.f;
    out[place * D + first_dim + d] = static_cast<T>(output_of<SINKS>(joined, sink));
  }
