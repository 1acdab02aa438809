template <typename T>
struct TwoOf;
template <>
struct TwoOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr uint32_t magic = 0x43004300u;  // 128 + q in each half, exactly, for q < 128
  static __device__ type pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ type both(__nv_bfloat16 a) { return __bfloat162bfloat162(a); }
};
template <>
struct TwoOf<__half> {
  using type = __half2;
  static constexpr uint32_t magic = 0x64006400u;  // 1024 + q
  static __device__ type pair(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ type both(__half a) { return __half2half2(a); }
};

// Eight weights of a lane: values p and p + 4 in `pairs[p]`, scale * q + bias rounded once. Those of 4 bits are in x.
template <typename T, int BITS>
__device__ __forceinline__ void unpack(uint2 words, T scale, T bias, uint32_t* pairs) {
  using Two = typename TwoOf<T>::type;
  if (BITS == 4) {
    const uint32_t word = words.x;
    constexpr uint32_t magic = TwoOf<T>::magic;
    Two base;
    *reinterpret_cast<uint32_t*>(&base) = magic;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const uint32_t raised = ((word >> (4 * p)) & 0x000f000fu) | magic;
      const Two q = __hsub2(*reinterpret_cast<const Two*>(&raised), base);
      const Two value = __hfma2(q, TwoOf<T>::both(scale), TwoOf<T>::both(bias));
      pairs[p] = *reinterpret_cast<const uint32_t*>(&value);
    }
  } else {
    const uint32_t low = words.x, high = words.y;
    const float s = static_cast<float>(scale), b = static_cast<float>(bias);
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float one = __uint_as_float(0x4b000000u | ((low >> (8 * p)) & 0xffu)) - 8388608.f;
      const float other = __uint_as_float(0x4b000000u | ((high >> (8 * p)) & 0xffu)) - 8388608.f;
      const Two value = TwoOf<T>::pair(fmaf(one, s, b), fmaf(other, s, b));
      pairs[p] = *reinterpret_cast<const uint32_t*>(&value);
    }
  }
}
