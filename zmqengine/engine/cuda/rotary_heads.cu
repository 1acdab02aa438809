// Queries, keys and values out of the product that makes all three: heads apart, queries and keys normalised where the
// model does (NORMS), values too (VALUE_NORMS), and turned by their positions, the first DIMS of each head times FACTOR.
// A warp takes a head of a token, whose pool, slot, column and position are in `places`; padding has none. Keys and
// values are written there, in place.
//
// Where heads of queries are GATED, a gate follows each. KEYS_ARE_VALUES: values are keys before their norm. READS_ONLY:
// there are queries alone.
  constexpr int KEYS = READS_ONLY ? 0 : KH, HEADS = H + 2 * KEYS;
  constexpr int FIRST_KEY = GATED ? 2 * H : H, WIDTH = FIRST_KEY + (KEYS_ARE_VALUES ? KEYS : 2 * KEYS);
  const int one = blockIdx.x * WARPS + (threadIdx.x >> 5), head = one % HEADS, token = one / HEADS;
  if (token >= places_shape[0] / 4) return;
  const int4 where = reinterpret_cast<const int4*>(places)[token];
  if (where.x < 0) return;
  const bool is_query = head < H, are_values = head >= H + KH;
  const int given = is_query ? head * (FIRST_KEY / H) : FIRST_KEY + head - H - (KEYS_ARE_VALUES && are_values ? KH : 0);
  constexpr int EACH = D / 32, TURNED = DIMS / 32;
  const int lane = threadIdx.x & 31;
  const P* from = product + ((long long)token * WIDTH + given) * D + lane;
  float numbers[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) numbers[i] = static_cast<float>(static_cast<T>(static_cast<float>(from[i * 32])));
  if (are_values ? VALUE_NORMS : NORMS) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares += numbers[i] * numbers[i];
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float by = rsqrtf(squares / D + __int_as_float(are_values ? VALUE_EPS : EPS));
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int d = lane + i * 32;
      const float scaled = static_cast<float>(static_cast<T>(numbers[i] * by));
      const float weight = are_values ? 1.f
          : is_query ? static_cast<float>(query_norm[d]) : static_cast<float>(key_norm[d]);
      numbers[i] = static_cast<float>(static_cast<T>(weight * scaled));
    }
  }
  if (!are_values) {
    const float factor = __int_as_float(FACTOR);
    if (factor != 1.f) {
#pragma unroll
      for (int i = 0; i < TURNED; i++) numbers[i] = static_cast<float>(static_cast<T>(numbers[i] * factor));
    }
    const float place = __int_as_float(SCALE) * static_cast<float>(where.w);
    auto turn = [&](int pair, float& low, float& high) {
      const float frequency =
          FREQS ? 1.f / freqs[pair] : exp2f(-(static_cast<float>(pair) / (DIMS / 2)) * __int_as_float(BASE));
      float sine, cosine;
      sincosf(place * frequency, &sine, &cosine);
      const float before = low;
      low = before * cosine - high * sine;
      high = before * sine + high * cosine;
    };
    if (TRADITIONAL) {
      // Neighbours are a pair: a lane has one of them.
#pragma unroll
      for (int i = 0; i < TURNED; i++) {
        float other = __shfl_xor_sync(0xffffffffu, numbers[i], 1);
        turn((lane + i * 32) / 2, lane & 1 ? other : numbers[i], lane & 1 ? numbers[i] : other);
      }
    } else {
#pragma unroll
      for (int i = 0; i < TURNED / 2; i++) turn(lane + i * 32, numbers[i], numbers[i + TURNED / 2]);
    }
  }
  T* to;
  if (is_query) {
    to = queries + ((long long)token * H + head) * D;
  } else {
    const int own = (head - H) % KH, row = where.y, column = where.z;
    switch (where.x) {
      case @: to = const_cast<T*>(are_values
          ? values@ + row * values@_strides[0] + own * values@_strides[1] + column * values@_strides[2]
          : keys@ + row * keys@_strides[0] + own * keys@_strides[1] + column * keys@_strides[2]); break;
      default: return;
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) to[lane + i * 32] = static_cast<T>(numbers[i]);
