// Rows of one expert, by the tiles of experts_route.cu: a tile has its expert, its first pair in `order` and the one
// behind its last. GATED rows are those of the tokens, and their results lie by `order`; the others lie so, and their
// results by token.
  const int* tile = tiles + blockIdx.y * 3;
  const int first = tile[1], M = tile[2] - first;
  if (M == 0) return;
  const int K = x_shape[1], N = w_shape[1] / (GATED ? 2 : 1);
  const long long rows_before = (long long)tile[0] * w_shape[1];
  int given_rows[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    const int pair = first + min((int)(threadIdx.x & 31) / 8 + 4 * i, M - 1);
    given_rows[i] = GATED ? order[pair] / PER : pair;
  }
  auto row_of = [&](int, int i) { return given_rows[i]; };
  auto made_row = [&](int row) { return GATED ? first + row : order[first + row]; };
