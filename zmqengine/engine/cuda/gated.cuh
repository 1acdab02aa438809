// silu(gate) * up, as separate kernels would round it.
template <typename T>
__device__ __forceinline__ float gated(float gate, float up) {
  const float wide = static_cast<float>(static_cast<T>(gate));
  const float share = static_cast<float>(static_cast<T>(1.f / (1.f + __expf(-wide))));
  return static_cast<float>(static_cast<T>(wide * share)) * static_cast<float>(static_cast<T>(up));
}
