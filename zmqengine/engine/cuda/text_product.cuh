// A number with 10 bits of mantissa, the nearest, as an operand of `multiply_tf32`.
__device__ __forceinline__ uint32_t to_tf32(float number) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(number));
  return rounded;
}
// sum [16, 8] += a [16, 8] * b [8, 8], spread over a warp (mma.m16n8k8 with tf32, PTX ISA 9.7.14).
__device__ __forceinline__ void multiply_tf32(
    float* sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
