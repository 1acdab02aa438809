// Queries, keys and values of the delta rule, and its gates, out of a layer's joined product, whose rows have queries,
// keys and values, z, b and a: convolution, silu, and queries and keys normalised. A warp takes a head of TILE tokens of a
// piece, or all gates of these. That of the first tokens alone reads the window of its channels, and writes it. Rounded
// to T wherever separate kernels would; S is the type of a sum with `dt_bias`.
  constexpr int HEADS = 2 * KH + VH + 1, KEYS = KH * DK, CHANNELS = 2 * KEYS + VH * DV, PAST = K - 1;
  constexpr int EACH = (DK > DV ? DK : DV) / 32;
  static_assert(PAST <= TILE);
  const int one = blockIdx.x * WARPS + (threadIdx.x >> 5), head = one % HEADS, tile = one / HEADS;
  const int lane = threadIdx.x & 31;
  if (tile >= tiles_shape[0] / 2) return;
  const Piece piece = piece_of(places, tiles[2 * tile]);
  if (piece.slot < 0) return;
  const int first = tiles[2 * tile + 1], end = min(first + TILE, piece.kept_count + piece.count);
  auto row_of = [&](int i) {
    return i < piece.kept_count ? kept + (piece.kept_begin + i) * kept_strides[0]
                                : product + (piece.begin + i - piece.kept_count) * product_strides[0];
  };
  if (head == HEADS - 1) {
    for (int at = lane; at < (end - first) * VH; at += 32) {
      const int i = first + at / VH, h = at % VH;
      const T* from = row_of(i) + CHANNELS + VH * DV + h;
      const float step = as<S>(wide(from[VH]) + wide(dt_bias[h]));
      const float softplus = as<S>(fmaxf(step, 0.f) + log1pf(expf(-fabsf(step))));
      float* to = gates + 2 * ((long long)(piece.work + i) * VH + h);
      to[0] = expf(-expf(a_log[h]) * softplus);
      to[1] = as<T>(1.f / (1.f + expf(-wide(from[0]))));
    }
    return;
  }
  const bool is_key = head < 2 * KH;
  const int dim = is_key ? DK : DV, channel = is_key ? head * DK : 2 * KEYS + (head - 2 * KH) * DV;
  T* window = const_cast<T*>(windows) + (long long)piece.slot * PAST * CHANNELS + channel;
  auto input = [&](int i, int d) {
    if (i >= 0) return row_of(i)[channel + d];
    return piece.is_first ? static_cast<T>(0.f) : window[(PAST + i) * CHANNELS + d];
  };
  float weights[EACH][K], inputs[EACH][K];
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int d = lane + 32 * e;
    if (d >= dim) continue;
#pragma unroll
    for (int tap = 0; tap < K; tap++) weights[e][tap] = wide(conv[(channel + d) * K + tap]);
#pragma unroll
    for (int tap = 0; tap < PAST; tap++) inputs[e][tap + 1] = wide(input(first - PAST + tap, d));
  }
  for (int i = first; i < end; i++) {
    float numbers[EACH], squares = 0.f;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int d = lane + 32 * e;
      if (d >= dim) continue;
#pragma unroll
      for (int tap = 0; tap < PAST; tap++) inputs[e][tap] = inputs[e][tap + 1];
      inputs[e][PAST] = wide(input(i, d));
      float sum = 0.f;
#pragma unroll
      for (int tap = 0; tap < K; tap++) sum += weights[e][tap] * inputs[e][tap];
      sum = as<T>(sum);
      numbers[e] = as<T>(sum * as<T>(1.f / (1.f + expf(-sum))));
      squares += numbers[e] * numbers[e];
    }
    if (is_key) {
      for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
      const float by = rsqrtf(squares / DK + __int_as_float(EPS)), scale = __int_as_float(SCALE);
      const float length = as<T>(head < KH ? scale * scale : scale);
#pragma unroll
      for (int e = 0; e < EACH; e++) numbers[e] = length * as<T>(numbers[e] * by);
    }
    T* to = heads + (long long)(piece.work + i) * CHANNELS + channel;
#pragma unroll
    for (int e = 0; e < EACH; e++)
      if (lane + 32 * e < dim) to[lane + 32 * e] = static_cast<T>(numbers[e]);
  }
  if (first) return;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int d = lane + 32 * e;
    if (d >= dim) continue;
    T last[PAST];
#pragma unroll
    for (int tap = 0; tap < PAST; tap++) last[tap] = input(piece.commit - PAST + tap, d);
#pragma unroll
    for (int tap = 0; tap < PAST; tap++) window[tap * CHANNELS + d] = last[tap];
  }
