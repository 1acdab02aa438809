#include <cuda/std/type_traits>
// Products of a group of four warps on Hopper (wgmma, PTX ISA 9.7.15), both sides in shared memory: lines of 64 k, which
// are 128 bytes, with the 16 bytes at c standing at c ^ (line & 7), as the tensor cores find them without conflicts.
__device__ __forceinline__ uint64_t lines_at(const void* first) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(first));
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3ffff) >> 4);
}
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
#define SUMS_20(i) \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
      "+f"(sums[i + 6]), "+f"(sums[i + 7]), "+f"(sums[i + 8]), "+f"(sums[i + 9]), "+f"(sums[i + 10]), \
      "+f"(sums[i + 11]), "+f"(sums[i + 12]), "+f"(sums[i + 13]), "+f"(sums[i + 14]), "+f"(sums[i + 15]), \
      "+f"(sums[i + 16]), "+f"(sums[i + 17]), "+f"(sums[i + 18]), "+f"(sums[i + 19])
#define SUMS_40 SUMS_20(0), SUMS_20(20)
#define SUMS_80 SUMS_40, SUMS_20(40), SUMS_20(60)
#define NAMES_20 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
#define NAMES_40 \
  NAMES_20 ",%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define NAMES_80 \
  NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64," \
           "%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define MULTIPLY_AS(type, rows, names, left, right, ...) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" rows "k16.f32." type "." type \
               " {" names "}, " left ", " right ", p, 1, 1, 0, 0;}" \
               : __VA_ARGS__ : "l"(a), "l"(b))
// sums [64, ROWS], spread over the warps, += a [64, 16] * b [ROWS, 16] turned.
#define MULTIPLY_LINES(count, rows, names, left, right, ...) \
  template <typename T> \
  __device__ __forceinline__ void multiply_lines(float (&sums)[count], uint64_t a, uint64_t b) { \
    if constexpr (cuda::std::is_same_v<T, __half>) { \
      MULTIPLY_AS("f16", rows, names, left, right, __VA_ARGS__); \
    } else { \
      MULTIPLY_AS("bf16", rows, names, left, right, __VA_ARGS__); \
    } \
  }
MULTIPLY_LINES(20, "40", NAMES_20, "%20", "%21", SUMS_20(0))
MULTIPLY_LINES(40, "80", NAMES_40, "%40", "%41", SUMS_40)
MULTIPLY_LINES(80, "160", NAMES_80, "%80", "%81", SUMS_80)
