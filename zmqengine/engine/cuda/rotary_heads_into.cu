    const long long at = stop[0] - width + ahead;
    const bool are_keys = head < H + KH;
    to = are_keys ? const_cast<T*>(keys) + row * keys_strides[0] + own * keys_strides[1] + at * keys_strides[2]
                  : const_cast<T*>(values) + row * values_strides[0] + own * values_strides[1] + at * values_strides[2];
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) to[lane + i * 32] = static_cast<T>(numbers[i]);
