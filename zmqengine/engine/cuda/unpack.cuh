template <typename T>
struct TwoOf;
template <>
struct TwoOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr uint32_t magic = 0x43004300u;  // 128 + q in each half, exactly, for q < 128
  // A number of 4 bits in place of the upper ones of an exponent and a mantissa is too small by a power of two.
  static constexpr int shift = 6;
  static constexpr uint32_t raise = 0x7e807e80u;  // 2 ^ 126
  static __device__ type pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ type both(__nv_bfloat16 a) { return __bfloat162bfloat162(a); }
};
template <>
struct TwoOf<__half> {
  using type = __half2;
  static constexpr uint32_t magic = 0x64006400u;  // 1024 + q
  static constexpr int shift = 9;
  static constexpr uint32_t raise = 0x74007400u;  // 2 ^ 14
  static __device__ type pair(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ type both(__half a) { return __half2half2(a); }
};

// Scales and biases as numbers: those of MXFP4 are the bits of an exponent, in place of biases too, which it has not.
template <typename T>
__device__ __forceinline__ T scale_of(T scale) { return scale; }
template <typename T>
__device__ __forceinline__ T scale_of(uint8_t exponent) { return static_cast<T>(__int_as_float(exponent << 23)); }
template <typename T>
__device__ __forceinline__ T bias_of(T bias) { return bias; }
template <typename T>
__device__ __forceinline__ T bias_of(uint8_t) { return static_cast<T>(0.f); }
// A number of MXFP4: a sign, two bits of an exponent and one of a mantissa.
__device__ __forceinline__ float number_of_4(uint32_t bits) {
  return __int_as_float((bits & 8) << 28 | (bits & 7) << 22) * 0x1p126f;
}

// Eight weights of a lane: values p and p + 4 in `pairs[p]`, scale * q + bias rounded once, or MXFP4. Those of 4 bits are
// in x.
template <typename T, int BITS, bool MXFP4>
__device__ __forceinline__ void unpack(uint2 words, T scale, T bias, uint32_t* pairs) {
  using Two = typename TwoOf<T>::type;
  if (MXFP4) {
    constexpr int shift = TwoOf<T>::shift;
    constexpr uint32_t raise = TwoOf<T>::raise;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const uint32_t both = words.x >> (4 * p);
      const uint32_t small = (both & 0x00080008u) << 12 | (both & 0x00070007u) << shift;
      const Two number = __hmul2(*reinterpret_cast<const Two*>(&small), *reinterpret_cast<const Two*>(&raise));
      const Two value = __hmul2(number, TwoOf<T>::both(scale));
      pairs[p] = *reinterpret_cast<const uint32_t*>(&value);
    }
  } else if (BITS == 4) {
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
