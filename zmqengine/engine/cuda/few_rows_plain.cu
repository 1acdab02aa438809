// Weights of the type of x: a row of a part is that of x.
  constexpr int WEIGHTS = COLUMNS * ROW;  // of a part, in 16 bytes
  auto place_of = [&](int half) { return half * 4 + piece; };
  auto turned = [](int place, int row) { return place ^ ((row & 1) << 2); };
  auto copy_weights = [&](uint4* to, int part) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i++) {
      const int place = lane & 7, column = lane / 8 + 4 * i;
      const long long from = (rows_before + weights_row(column)) * K + part * 64 + place * 8;
      copy_ahead(to + column * ROW + turned(place, column), w + from, true);
    }
  };
  auto begin_part = [](int) {};
  auto weights_of = [&](const uint4* from, int half, uint4* to) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) to[i] = from[(i * 8 + row) * ROW + turned(place_of(half), row)];
  };
  auto as_weights = [](uint4 given) { return given; };
