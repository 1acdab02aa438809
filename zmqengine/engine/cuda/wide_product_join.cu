// The sum of what the blocks of wide_product.cu give that have the same rows and columns, [blocks, rows, columns].
  const int fours = parts_shape[1] * parts_shape[2] / 4, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= fours) return;
  float4 sum = reinterpret_cast<const float4*>(parts)[i];
  for (int block = 1; block < parts_shape[0]; block++) {
    const float4 more = reinterpret_cast<const float4*>(parts)[(long long)block * fours + i];
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  }
  T some[4] = {static_cast<T>(sum.x), static_cast<T>(sum.y), static_cast<T>(sum.z), static_cast<T>(sum.w)};
  reinterpret_cast<uint2*>(out)[i] = *reinterpret_cast<const uint2*>(some);
