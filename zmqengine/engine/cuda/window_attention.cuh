// Two numbers in half precision as an operand of `multiply`.
template <typename T>
__device__ __forceinline__ uint32_t pair(T low, T high) {
  return *reinterpret_cast<const unsigned short*>(&low) |
      static_cast<uint32_t>(*reinterpret_cast<const unsigned short*>(&high)) << 16;
}
