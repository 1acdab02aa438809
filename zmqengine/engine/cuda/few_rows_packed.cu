// Weights scale * q + bias, of BITS bits, or MXFP4. A lane takes 16 neighbours of a row, its eights of both halves of a part, and
// pairs the values i and i + 4 of every eight, as that is how two of them come out of a word with one mask.
  constexpr int WEIGHT_ROW = BITS / 2;  // of a row of a part, in 16 bytes
  constexpr int WEIGHTS = COLUMNS * WEIGHT_ROW;
  auto place_of = [&](int half) { return 2 * piece + half; };
  auto turned = [](int place, int row) { return place ^ (row & 1); };
  auto copy_weights = [&](uint4* to, int part) {
#pragma unroll
    for (int i = 0; i < WEIGHTS / 32; i++) {
      const int place = (lane + 32 * i) % WEIGHT_ROW, column = (lane + 32 * i) / WEIGHT_ROW;
      const long long from = (rows_before + weights_row(column)) * (K * BITS / 32) + part * 2 * BITS + place * 4;
      copy_ahead(to + column * WEIGHT_ROW + place, w + from, true);
    }
  };
  // The scales and biases of a lane's weights, those of the part that is multiplied and those of the next.
  T scale[EIGHTS], bias[EIGHTS], next_scale[EIGHTS], next_bias[EIGHTS];
  auto read_scales = [&](int part) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
      const long long at = (rows_before + weights_row(i * 8 + row)) * (K / GROUP) + (part * 64 + piece * 16) / GROUP;
      next_scale[i] = scale_of<T>(scales[at]), next_bias[i] = bias_of<T>(biases[at]);
    }
  };
  if (warp < K / 64) read_scales(warp);
  auto begin_part = [&](int part) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) scale[i] = next_scale[i], bias[i] = next_bias[i];
    if (part + WARPS < K / 64) read_scales(part + WARPS);
  };
  auto weights_of = [&](const uint4* from, int half, uint4* to) {
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
      const uint2* words = reinterpret_cast<const uint2*>(from + (i * 8 + row) * WEIGHT_ROW);
      uint2 eight = words[BITS == 4 ? piece : 2 * piece + half];
      if (BITS == 4 && half) eight.x = eight.y;
      uint32_t pairs[4];
      unpack<T, BITS, MXFP4>(eight, scale[i], bias[i], pairs);
      to[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  };
  auto as_weights = [](uint4 given) {
    return make_uint4(
        __byte_perm(given.x, given.z, 0x5410), __byte_perm(given.x, given.z, 0x7632),
        __byte_perm(given.y, given.w, 0x5410), __byte_perm(given.y, given.w, 0x7632));
  };
