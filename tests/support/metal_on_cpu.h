// The Metal Shading Language on a CPU, as far as our kernels use it: thread blocks and warps of cuda_on_cpu.h are its
// threadgroups and simdgroups.
#include "cuda_on_cpu.h"

#define device
#define constant
#define threadgroup static
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
#define threadgroup_position_in_grid blockIdx

using half = __half;
using bfloat16_t = __nv_bfloat16;
enum class mem_flags { mem_threadgroup };
static void threadgroup_barrier(mem_flags) { __syncthreads(); }
static float simd_sum(float value) {
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}
