// Queries, keys and values out of the product that makes all three, [tokens, (H + 2 * KH) * D]: heads apart, queries and
// keys normalised where the model does (NORMS), and turned by their positions, the first DIMS of each head. A warp takes
// a head of a token, whose pool, slot, column and position are in `places`; padding has none. Keys and values are written
// there, in place.
  constexpr int HEADS = H + 2 * KH;
  const int one = blockIdx.x * WARPS + (threadIdx.x >> 5), head = one % HEADS, token = one / HEADS;
  if (token >= places_shape[0] / 4) return;
  const int4 where = reinterpret_cast<const int4*>(places)[token];
  if (where.x < 0) return;
  const int position = where.w;
  const long long query = (long long)token * H + head;
  constexpr int EACH = D / 32, PAIRS = DIMS / 64;
  const int lane = threadIdx.x & 31;
  const P* from = product + (long long)one * D + lane;
  float numbers[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) numbers[i] = static_cast<float>(static_cast<T>(static_cast<float>(from[i * 32])));
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
    const float place = __int_as_float(SCALE) * static_cast<float>(position);
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
  const int own = head < H ? head : head < H + KH ? head - H : head - H - KH;
  T* to;
  if (head < H) {
    to = queries + query * D;
  } else {
    const bool are_keys = head < H + KH;
    const int row = where.y, column = where.z;
    switch (where.x) {
      case @: to = const_cast<T*>(are_keys
          ? keys@ + row * keys@_strides[0] + own * keys@_strides[1] + column * keys@_strides[2]
          : values@ + row * values@_strides[0] + own * values@_strides[1] + column * values@_strides[2]); break;
      default: return;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) to[lane + i * 32] = static_cast<T>(numbers[i]);
