// y[m, n] = sum over k of x[m, k] * weights[n, k], for the M rows of a block: every weight is read once for them.
// A block makes COLUMNS of y; its warps share the k among them, 64 at a time in turn. A warp copies its own parts of w and
// x ahead into a ring of STAGES parts in shared memory, and has no barrier until the end. It multiplies 16 weights'
// rows by 8 rows of x at a time. Which k stands where in a product is free as long as both sides agree: a lane takes 16
// bytes of each side. Every other row has its pieces in another order, so that lanes read from banks of their own.
// The result of a row does not depend on M. GATED by an activation, the first half of w are gates of the other, and a
// block makes half as many columns, of both.
  extern __shared__ uint4 shared_start[];
  constexpr int ROW = 8;  // of a part of x, in 16 bytes
  constexpr int EIGHTS = COLUMNS / 8;
  constexpr int MADE = GATED ? COLUMNS / 2 : COLUMNS;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int piece = lane & 3, row = lane >> 2;
  const int n0 = blockIdx.x * MADE;
  // The row of w, of those of the expert, with the weights of a column of the block.
  auto weights_row = [&](int column) {
    return column < MADE ? min(n0 + column, N - 1) : N + min(n0 + column - MADE, N - 1);
  };
