// Bits that have the order of numbers, and the number of such bits.
__device__ __forceinline__ uint32_t ordered(float number) {
  const uint32_t bits = __float_as_uint(number);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
__device__ __forceinline__ float sigmoid(float number) { return 1.f / (1.f + __expf(-number)); }
