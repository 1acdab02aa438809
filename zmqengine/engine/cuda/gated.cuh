// The activation of a gate times up, rounded to T as it would be between separate kernels. ACTIVATION: 1 silu, 2 gelu by
// the approximation with tanh, 3 gpt_oss's: gate * sigmoid(1.702 gate) * (up + 1), both bounded by 7.
template <typename T, int ACTIVATION>
__device__ __forceinline__ float gated(float gate, float up) {
  float wide = static_cast<float>(static_cast<T>(gate)), other = static_cast<float>(static_cast<T>(up));
  if (ACTIVATION == 1) {
    const float share = static_cast<float>(static_cast<T>(1.f / (1.f + __expf(-wide))));
    return static_cast<float>(static_cast<T>(wide * share)) * other;
  }
  if (ACTIVATION == 2) {
    const float share = 0.5f * (1.f + tanhf(0.79788456f * (wide + 0.044715f * wide * wide * wide)));
    return static_cast<float>(static_cast<T>(wide * share)) * other;
  }
  // What is no number stays so.
  wide = wide > 7.f ? 7.f : wide;
  other = other > 7.f ? 7.f : other < -7.f ? -7.f : other;
  return wide / (1.f + __expf(-1.702f * wide)) * (other + 1.f);
}
