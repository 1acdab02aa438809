// Queries, keys and values out of the product that makes all three, [tokens, (H + 2 * KH) * D]: heads apart, queries and
// keys normalised where the model does (NORMS), and turned by their places, the first DIMS of each head. A warp takes a
// head of a token. Where the product was cut among blocks, there is a part of each, which is added here.
  constexpr int EACH = D / 32, HEADS = H + 2 * KH, PAIRS = DIMS / 64;
  const int lane = threadIdx.x & 31, one = blockIdx.x * WARPS + (threadIdx.x >> 5);
  const int rows = offset_shape[0], tokens = product_shape[WHOLE ? 0 : 1], width = tokens / rows;
  const int parts = WHOLE ? 1 : product_shape[0];
  const int head = one % HEADS, token = one / HEADS, row = token / width;
  if (token >= tokens) return;
  const P* from = product + (long long)one * D + lane;
  float numbers[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    float sum = 0.f;
    for (int part = 0; part < parts; part++)
      sum += static_cast<float>(from[(long long)part * tokens * HEADS * D + i * 32]);
    numbers[i] = static_cast<float>(static_cast<T>(sum));
  }
  if (NORMS && head < H + KH) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares += numbers[i] * numbers[i];
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float by = rsqrtf(squares / D + __int_as_float(EPS));
    const T* weight = reinterpret_cast<const T*>(head < H ? query_norm : key_norm);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const T scaled = static_cast<T>(numbers[i] * by);
      const float weighed = static_cast<float>(weight[lane + i * 32]) * static_cast<float>(scaled);
      numbers[i] = static_cast<float>(static_cast<T>(weighed));
    }
  }
  if (head < H + KH) {
    const float place = __int_as_float(SCALE) * static_cast<float>(offset[row] + token % width);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int d = lane + i * 32;
      const float frequency =
          FREQS ? 1.f / freqs[d] : exp2f(-(static_cast<float>(d) / (DIMS / 2)) * __int_as_float(BASE));
      float sine, cosine;
      sincosf(place * frequency, &sine, &cosine);
      const float low = numbers[i], high = numbers[i + PAIRS];
      numbers[i] = low * cosine - high * sine;
      numbers[i + PAIRS] = low * sine + high * cosine;
    }
  }
  const int own = head < H ? head : head < H + KH ? head - H : head - H - KH, ahead = token % width;
  T* to;
  if (head < H) {
    to = queries + (((long long)row * H + own) * width + ahead) * D;
  } else {
