// The delta rule over the tokens of a piece, one after the other, of VALUES rows of a value head's state S, which stay in
// registers: LANES threads have a row. With all rows in a block the outputs are normalised and gated by z; else they are
// y = S q. States are read and written in place; MLX is not told that they change.
  constexpr int PARTS = DV / VALUES, THREADS = VALUES * LANES, FOURS = DK / 4, EACH = FOURS / LANES;
  constexpr int KEYS = KH * DK, CHANNELS = 2 * KEYS + VH * DV;
  struct alignas(4 * sizeof(T)) FourOfT { T at[4]; };
  __shared__ Four queries[TILE * FOURS], keys[TILE * FOURS];
  __shared__ float values[TILE * VALUES], decays[TILE], betas[TILE];
  const int number = blockIdx.x, head = blockIdx.y, begin = blockIdx.z * VALUES;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const Piece piece = piece_of(places, number);
  T* outputs = out + (long long)piece.begin * VH * DV + head * DV + begin;
  if (piece.slot < 0) {
    for (int at = threadIdx.x; at < piece.count * VALUES; at += THREADS)
      outputs[(long long)(at / VALUES) * VH * DV + at % VALUES] = static_cast<T>(0.f);
    return;
  }
  Four* stored = reinterpret_cast<Four*>(const_cast<float*>(states)) +
      (((long long)piece.slot * VH + head) * DV + begin + row) * FOURS + lane;
  Four state[EACH];
#pragma unroll
  for (int e = 0; e < EACH; e++) state[e] = piece.is_first ? Four{} : stored[e * LANES];
  const int total = piece.kept_count + piece.count;
  for (int first = 0; first < total; first += TILE) {
    const int tokens = min(TILE, total - first);
    __syncthreads();
    const T* from = heads + (long long)(piece.work + first) * CHANNELS;
    for (int at = threadIdx.x; at < tokens * FOURS; at += THREADS) {
      const T* own = from + (long long)(at / FOURS) * CHANNELS + head / (VH / KH) * DK + at % FOURS * 4;
      const FourOfT query = *reinterpret_cast<const FourOfT*>(own), key = *reinterpret_cast<const FourOfT*>(own + KEYS);
#pragma unroll
      for (int j = 0; j < 4; j++) queries[at].at[j] = wide(query.at[j]), keys[at].at[j] = wide(key.at[j]);
    }
    for (int at = threadIdx.x; at < tokens * VALUES; at += THREADS)
      values[at] = wide(from[(long long)(at / VALUES) * CHANNELS + 2 * KEYS + head * DV + begin + at % VALUES]);
    for (int t = threadIdx.x; t < tokens; t += THREADS) {
      const float* gate = gates + 2 * ((long long)(piece.work + first + t) * VH + head);
      decays[t] = gate[0], betas[t] = gate[1];
    }
    __syncthreads();
    for (int t = 0; t < tokens; t++) {
      if (piece.commit && first + t == piece.commit) {
#pragma unroll
        for (int e = 0; e < EACH; e++) stored[e * LANES] = state[e];
      }
      const Four* key = keys + t * FOURS + lane;
      const Four* query = queries + t * FOURS + lane;
      float has[4] = {}, read[4] = {};
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int j = 0; j < 4; j++) has[j] += state[e].at[j] * key[e * LANES].at[j];
      float sum = has[0] + has[1] + (has[2] + has[3]);
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      const float decay = decays[t], added = betas[t] * (values[t * VALUES + row] - decay * sum);
#pragma unroll
      for (int e = 0; e < EACH; e++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          state[e].at[j] = decay * state[e].at[j] + added * key[e * LANES].at[j];
          read[j] += state[e].at[j] * query[e * LANES].at[j];
        }
      float y = read[0] + read[1] + (read[2] + read[3]);
#pragma unroll
      for (int d = 1; d < LANES; d *= 2) y += __shfl_xor_sync(0xffffffffu, y, d);
      if (lane == 0) values[t * VALUES + row] = as<T>(y);
    }
    __syncthreads();
    if (PARTS > 1) {
      for (int at = threadIdx.x; at < tokens * VALUES; at += THREADS) {
        const int i = first + at / VALUES - piece.kept_count;
        if (i >= 0) outputs[(long long)i * VH * DV + at % VALUES] = static_cast<T>(values[at]);
      }
    } else {
      for (int t = threadIdx.x >> 5; t < tokens; t += THREADS / 32) {
        const int i = first + t - piece.kept_count;
        if (i < 0) continue;
        const float* y = values + t * VALUES;
        float squares = 0.f;
        for (int d = threadIdx.x & 31; d < DV; d += 32) squares += y[d] * y[d];
        for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
        const float by = rsqrtf(squares / DV + __int_as_float(EPS));
        const T* gate = product + (piece.begin + i) * product_strides[0] + CHANNELS + head * DV;
        for (int d = threadIdx.x & 31; d < DV; d += 32) {
          const float normed = as<W>(wide(norm[d]) * as<W>(y[d] * by)), z = wide(gate[d]);
          outputs[(long long)i * VH * DV + d] = static_cast<T>(z / (1.f + expf(-z)) * normed);
        }
      }
    }
  }
  if (piece.commit == total) {
#pragma unroll
    for (int e = 0; e < EACH; e++) stored[e * LANES] = state[e];
  }
