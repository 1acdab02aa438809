// Copies from device memory into shared memory beside what the thread does, in groups (cp.async, PTX ISA 9.7.9.25).
//
// 16 bytes of device memory on their way to shared memory; zeros if they are not there.
__device__ __forceinline__ void copy_ahead(void* to, const void* from, bool are_there) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = are_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;"); }
template <int LEFT>
__device__ __forceinline__ void await_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
}
