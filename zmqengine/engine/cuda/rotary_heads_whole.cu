    to = (head < H + KH ? keys : values) + (((long long)row * KH + own) * width + ahead) * D;
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) to[lane + i * 32] = static_cast<T>(numbers[i]);
