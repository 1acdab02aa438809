// The logit of a key, whose upper half has its bits in the order of numbers.
template <typename P>
__device__ __forceinline__ float logit_of(uint32_t key) {
  const uint32_t half = key >> 16;
  float low, high;
  numbers_of<P>(half & 0x8000 ? half ^ 0x8000 : half ^ 0xffff, low, high);
  return low;
}
