// The rest of a product, behind its rows and its weights. BIASED, each output has a bias.
  const int parts = K / 64;
  constexpr int PART = WEIGHTS + 8 * TILES * ROW;
  uint4* ring = shared_start + warp * STAGES * PART;
  const int copied = lane & 7, copied_row = lane >> 3;
  auto fetch = [&](int part, int stage) {
    uint4* to = ring + stage * PART;
    copy_weights(to, part);
    const int k = part * 64 + copied * 8;
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
      const int r = copied_row + 4 * i;
      uint4* at = to + WEIGHTS + r * ROW + turned(copied, r);
      copy_ahead(at, x + (long long)row_of(r, i) * K + k, r < M);
    }
  };
  float sums[EIGHTS / 2][TILES][4];
#pragma unroll
  for (int i = 0; i < EIGHTS / 2; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[i][j][c] = 0.f;

  int coming = warp;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (coming < parts) fetch(coming, stage);
    coming += WARPS;
    end_group();
  }
  int stage = 0;
  for (int part = warp; part < parts; part += WARPS) {
    await_groups<STAGES - 2>();
    __syncwarp();
    if (coming < parts) fetch(coming, stage == 0 ? STAGES - 1 : stage - 1);
    coming += WARPS;
    end_group();
    const uint4* from = ring + stage * PART;
    begin_part(part);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 a[EIGHTS];
      weights_of(from, half, a);
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const uint4 b = as_weights(from[WEIGHTS + (j * 8 + row) * ROW + turned(place_of(half), row)]);
#pragma unroll
        for (int i = 0; i < EIGHTS / 2; i++) {
          multiply<T>(sums[i][j], a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b.x, b.y);
          multiply<T>(sums[i][j], a[2 * i].z, a[2 * i + 1].z, a[2 * i].w, a[2 * i + 1].w, b.z, b.w);
        }
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  await_groups<0>();
  __syncthreads();
  constexpr int LINE = COLUMNS + 4;
  float* shared_sums = reinterpret_cast<float*>(shared_start);
#pragma unroll
  for (int i = 0; i < EIGHTS / 2; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int m = (warp * TILES + j) * 8 + piece * 2 + (c & 1);
        shared_sums[m * LINE + i * 16 + row + 8 * (c >> 1)] = sums[i][j][c];
      }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * TILES * MADE; i += WARPS * 32) {
    const int m = i / MADE, n = i % MADE;
    float sum = 0.f, up = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) {
      const float* line = shared_sums + (other * TILES * 8 + m) * LINE;
      sum += line[n];
      if (GATED) up += line[n + MADE];
    }
    if (m >= M || n0 + n >= N) continue;
    if (BIASED) {
      sum += static_cast<float>(output_bias[rows_before + n0 + n]);
      if (GATED) up += static_cast<float>(output_bias[rows_before + N + n0 + n]);
    }
    out[(long long)made_row(m) * N + n0 + n] = static_cast<T>(GATED ? gated<T, GATED>(sum, up) : sum);
  }
