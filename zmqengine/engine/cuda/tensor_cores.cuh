// PTX instructions of the device.
//
// sum [16, 8] += a [16, 16] * b [16, 8], spread over a warp (mma.m16n8k16, PTX ISA 9.7.14).
template <typename T>
__device__ __forceinline__ void multiply(
    float* sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void multiply<__nv_bfloat16>(
    float* sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply<__half>(
    float* sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Two numbers as one operand in half precision, and the numbers of an operand.
template <typename T>
__device__ __forceinline__ uint32_t rounded(float low, float high);
template <>
__device__ __forceinline__ uint32_t rounded<__nv_bfloat16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ __forceinline__ uint32_t rounded<__half>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <typename T>
__device__ __forceinline__ void numbers_of(uint32_t both, float& low, float& high);
template <>
__device__ __forceinline__ void numbers_of<__nv_bfloat16>(uint32_t both, float& low, float& high) {
  low = __int_as_float(both << 16);
  high = __int_as_float(both & 0xffff0000u);
}
template <>
__device__ __forceinline__ void numbers_of<__half>(uint32_t both, float& low, float& high) {
  asm("{ .reg .f16 one, other; mov.b32 {one, other}, %2; cvt.f32.f16 %0, one; cvt.f32.f16 %1, other; }"
      : "=f"(low), "=f"(high)
      : "r"(both));
}
// 2 ^ exponent; 0 for a result that is not normal, which exp2f takes four more instructions for.
__device__ __forceinline__ float power_of_2(float exponent) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(exponent));
  return found;
}
using SharedPlace = uint32_t;
__device__ __forceinline__ SharedPlace shared_place(const void* pointer) {
  SharedPlace place;
  asm("{ .reg .u64 whole; cvta.to.shared.u64 whole, %1; cvt.u32.u64 %0, whole; }" : "=r"(place) : "l"(pointer));
  return place;
}
// 16 bytes from memory into shared memory, beside what the thread does until `wait_for_copies` (cp.async).
__device__ __forceinline__ void begin_copy(SharedPlace to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Four matrices of 8 rows of 16 bytes in shared memory as operands b0, b1 of two products, spread over a warp (ldmatrix,
// PTX ISA 9.7.14.5). Lane i gives the place of row i % 8 of matrix i / 8. Across: transposed.
__device__ __forceinline__ void load_matrices(uint32_t* to, SharedPlace row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_matrices_across(uint32_t* to, SharedPlace row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
