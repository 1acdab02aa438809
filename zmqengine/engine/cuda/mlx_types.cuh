// Types of the arguments that MLX passes to a kernel, in place of mlx/backend/cuda/device/utils.cuh; see nvrtc.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
namespace mlx::core::cu {
template <typename T>
struct Numbers {
  T number[10];
  __device__ const T& operator[](int i) const { return number[i]; }
};
using Shape = Numbers<int32_t>;
using Strides = Numbers<int64_t>;
}
