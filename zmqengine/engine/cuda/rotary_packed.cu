// The token and the head of a warp, where each token has a place: its segment, and its row, column and position there.
  constexpr int HEADS = H + 2 * KH;
  const int one = blockIdx.x * WARPS + (threadIdx.x >> 5), head = one % HEADS, token = one / HEADS;
  if (token >= places_shape[0] / 4) return;
  const int4 where = reinterpret_cast<const int4*>(places)[token];
  if (where.x < 0) return;
  const int position = where.w;
  const long long query = (long long)token * H + head;
