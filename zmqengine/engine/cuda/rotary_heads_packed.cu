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
