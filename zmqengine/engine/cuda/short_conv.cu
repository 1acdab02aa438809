// LFM2's layer between its products, C * conv(B * x) of rows B, C and x of N numbers: a thread takes a channel of TILE
// tokens of a piece. That of the first tokens alone reads the window of its channel, and writes it.
  constexpr int PAST = K - 1;
  static_assert(PAST <= TILE);
  const int tile = blockIdx.y, channel = blockIdx.x * THREADS + threadIdx.x;
  if (channel >= N) return;
  const Piece piece = piece_of(places, tiles[2 * tile]);
  const int first = tiles[2 * tile + 1], end = min(first + TILE, piece.kept_count + piece.count);
  T* to = out + (long long)(piece.begin - piece.kept_count) * N + channel;
  if (piece.slot < 0) {
    for (int i = first; i < end; i++) to[(long long)i * N] = static_cast<T>(0.f);
    return;
  }
  T* window = const_cast<T*>(windows) + (long long)piece.slot * PAST * N + channel;
  auto row_of = [&](int i) {
    return channel + (i < piece.kept_count ? kept + (piece.kept_begin + i) * kept_strides[0]
                                           : product + (piece.begin + i - piece.kept_count) * product_strides[0]);
  };
  auto input = [&](int i) {
    if (i >= 0) return static_cast<T>(wide(row_of(i)[0]) * wide(row_of(i)[2 * N]));
    return piece.is_first ? static_cast<T>(0.f) : window[(PAST + i) * N];
  };
  float weights[K], inputs[K];
#pragma unroll
  for (int tap = 0; tap < K; tap++) weights[tap] = wide(conv[channel * K + tap]);
#pragma unroll
  for (int tap = 0; tap < PAST; tap++) inputs[tap + 1] = wide(input(first - PAST + tap));
  for (int i = first; i < end; i++) {
#pragma unroll
    for (int tap = 0; tap < PAST; tap++) inputs[tap] = inputs[tap + 1];
    inputs[PAST] = wide(input(i));
    float sum = 0.f;
#pragma unroll
    for (int tap = 0; tap < K; tap++) sum += weights[tap] * inputs[tap];
    sum = as<T>(sum);
    if (BIAS) sum = as<T>(sum + wide(bias[channel]));
    if (i >= piece.kept_count) to[(long long)i * N] = static_cast<T>(wide(row_of(i)[N]) * sum);
  }
  if (first) return;
  T last[PAST];
#pragma unroll
  for (int tap = 0; tap < PAST; tap++) last[tap] = input(piece.commit - PAST + tap);
#pragma unroll
  for (int tap = 0; tap < PAST; tap++) window[tap * N] = last[tap];
