// Tokens of one row in a step: `kept_count` accepted ones, row `kept_begin` on of the product of the step before, then
// `count` ones, row `begin` on of this product. `work`: row of the first of them in arrays that have both. The slot
// keeps the row as it is behind `commit` of them; it has nothing of the row yet if `is_first`. Padding has a negative slot.
struct Piece { int slot, begin, count, kept_begin, kept_count, work, commit, is_first; };
__device__ __forceinline__ Piece piece_of(const int* places, int number) {
  return reinterpret_cast<const Piece*>(places)[number];
}
template <typename T>
__device__ __forceinline__ float wide(T number) { return static_cast<float>(number); }
// A number rounded to T.
template <typename T>
__device__ __forceinline__ float as(float number) { return static_cast<float>(static_cast<T>(number)); }
