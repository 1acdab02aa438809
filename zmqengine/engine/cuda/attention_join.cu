// The parts of a row's columns [tokens, H, count, D + 2] as one: a block takes a query.
  const int d = threadIdx.x, count = parts_shape[2];
  const float* from = parts + (long long)blockIdx.x * count * (D + 2);
  Joined joined = {0.f, -1e30f, 0.f};
  for (int i = 0; i < count; i++) joined.best = fmaxf(joined.best, from[i * (D + 2) + D]);
  for (int i = 0; i < count; i++) {
    const float mine = exp2f(from[i * (D + 2) + D] - joined.best);
    joined.weight += from[i * (D + 2) + D + 1] * mine;
    joined.sum += from[i * (D + 2) + d] * mine;
  }
  const float sink = SINKS ? static_cast<float>(sinks[blockIdx.x % H]) : 0.f;
  out[(long long)blockIdx.x * D + d] = static_cast<T>(output_of<SINKS>(joined, sink));
