  const int d = threadIdx.x;
  const float* from = parts + (long long)blockIdx.x * SPLITS * (D + 2);
  float highest = -1e30f;
  for (int i = 0; i < SPLITS; i++) highest = fmaxf(highest, from[i * (D + 2) + D]);
  float total = 0.f, sum = 0.f;
  for (int i = 0; i < SPLITS; i++) {
    const float mine = exp2f(from[i * (D + 2) + D] - highest);
    total += from[i * (D + 2) + D + 1] * mine;
    sum += from[i * (D + 2) + d] * mine;
  }
  out[(long long)blockIdx.x * D + d] = static_cast<T>(total == 0.f ? 0.f : sum / total);
