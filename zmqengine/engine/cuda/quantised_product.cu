// y[m, n] = sum over k of x[m, k] * (scale * q[n, k] + bias), for few rows m: every weight is read once. MXFP4, weights
// have no biases. BIASED, each output has a bias, `output_bias`.
// A block makes 32 columns n of y; its warps share the k among them. A warp multiplies 16 weights' rows by 8 rows of x
// at a time (mma.m16n8k16, PTX ISA 9.7.14). Which k stands where in a product is free as long as both sides agree:
// a lane takes 16 bytes of neighbouring weights, and pairs the values i and i + 4 of every eight, as that is how two
// of them come out of a word with one mask.
  constexpr int PER = 128 / BITS;
  constexpr int BLOCK_K = 4 * PER;
  constexpr int CHUNKS = PER / 8;
  __shared__ float shared_sums[WARPS][8 * TILES][32];
  const int M = x_shape[0], K = x_shape[1], N = w_shape[0];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int part = lane & 3, row = lane >> 2;
  const int n0 = blockIdx.x * 32;
  const int words = K * BITS / 32, groups = K / GROUP;
  const uint32_t* weights[4];
  decltype(scales) weight_scales[4], weight_biases[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = min(n0 + row + 8 * i, N - 1);
    weights[i] = w + (long long)n * words;
    weight_scales[i] = scales + (long long)n * groups;
    weight_biases[i] = biases + (long long)n * groups;
  }
  float sums[2][TILES][4];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[i][j][c] = 0.f;

  const int blocks = K / BLOCK_K;
  uint4 next[4];
  T next_scale[4], next_bias[4];
  if (warp < blocks) {
    const int k = warp * BLOCK_K + part * PER;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      next[i] = *reinterpret_cast<const uint4*>(weights[i] + k * BITS / 32);
      next_scale[i] = scale_of<T>(weight_scales[i][k / GROUP]);
      next_bias[i] = bias_of<T>(weight_biases[i][k / GROUP]);
    }
  }
  for (int block = warp; block < blocks; block += WARPS) {
    uint32_t packed[4][4];
    T scale[4], bias[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      packed[i][0] = next[i].x;
      packed[i][1] = next[i].y;
      packed[i][2] = next[i].z;
      packed[i][3] = next[i].w;
      scale[i] = next_scale[i];
      bias[i] = next_bias[i];
    }
    const int k = block * BLOCK_K + part * PER;
    if (block + WARPS < blocks) {
      const int ahead = k + WARPS * BLOCK_K;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        next[i] = *reinterpret_cast<const uint4*>(weights[i] + ahead * BITS / 32);
        next_scale[i] = scale_of<T>(weight_scales[i][ahead / GROUP]);
        next_bias[i] = bias_of<T>(weight_biases[i][ahead / GROUP]);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      uint32_t pairs[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t* words = packed[i] + chunk * BITS / 4;
        const uint2 eight = {words[0], words[BITS == 8]};
        unpack<T, BITS, MXFP4>(eight, scale[i], bias[i], pairs[i]);
      }
#pragma unroll
      for (int j = 0; j < TILES; j++) {
        const int m = j * 8 + row;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (m < M) v = *reinterpret_cast<const uint4*>(x + (long long)m * K + k + chunk * 8);
        const uint32_t b0 = __byte_perm(v.x, v.z, 0x5410), b1 = __byte_perm(v.x, v.z, 0x7632);
        const uint32_t b2 = __byte_perm(v.y, v.w, 0x5410), b3 = __byte_perm(v.y, v.w, 0x7632);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          multiply<T>(sums[i][j], pairs[2 * i][0], pairs[2 * i + 1][0], pairs[2 * i][1], pairs[2 * i + 1][1], b0, b1);
          multiply<T>(sums[i][j], pairs[2 * i][2], pairs[2 * i + 1][2], pairs[2 * i][3], pairs[2 * i + 1][3], b2, b3);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < TILES; j++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        shared_sums[warp][j * 8 + part * 2 + (c & 1)][i * 16 + row + 8 * (c >> 1)] = sums[i][j][c];
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * TILES * 32; i += WARPS * 32) {
    const int m = i / 32, n = n0 + i % 32;
    float sum = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) sum += shared_sums[other][m][i % 32];
    if (BIASED && n < N) sum += static_cast<float>(output_bias[n]);
    if (m < M && n < N) out[(long long)m * N + n] = static_cast<T>(sum);
  }
