// CUDA C++ on a CPU, as far as our kernels use it: thread blocks run one after the other, a thread is a fiber, and a
// barrier passes on to the next fiber. Arrays of the host may lie anywhere, so vectors of numbers need no alignment.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define alignas(...)
#define __syncthreads() block_barrier.wait()
#define __threadfence()

struct Dim { int x, y, z; };
static Dim blockIdx, threadIdx, gridDim;
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct int4 { int x, y, z, w; };
using __half = _Float16;
struct __nv_bfloat16 {
  uint16_t number;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float from) {
    uint32_t whole;
    memcpy(&whole, &from, 4);
    // To the nearest, halves to even.
    number = from == from ? (whole + 0x7fff + (whole >> 16 & 1)) >> 16 : 0x7fc0;
  }
  explicit operator float() const {
    const uint32_t whole = (uint32_t)number << 16;
    float to;
    memcpy(&to, &whole, 4);
    return to;
  }
};
using std::max;
using std::min;

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  bool ended = false;
};
static std::vector<Fiber> fibers;
static ucontext_t host;

static Fiber* next_fiber() {
  const int count = fibers.size();
  for (int step = 1; step <= count; step++) {
    const int other = (threadIdx.x + step) % count;
    if (!fibers[other].ended) {
      threadIdx.x = other;
      return &fibers[other];
    }
  }
  return nullptr;
}

// Threads that have ended are not waited for.
struct Barrier {
  int threads = 0, waiting = 0, passed = 0;
  void wait() {
    const int before = passed;
    waiting++;
    while (passed == before) {
      if (waiting >= threads) {
        waiting = 0;
        passed++;
        return;
      }
      Fiber* own = &fibers[threadIdx.x];
      Fiber* other = next_fiber();
      if (other != own) swapcontext(&own->context, &other->context);
    }
  }
};
static Barrier block_barrier, warp_barriers[32];
static void __syncwarp() { warp_barriers[threadIdx.x / 32].wait(); }

// Operands of the lanes of a warp, written by each lane and read by all between two barriers.
static uint32_t operands[32][32][6];
template <typename Read>
static auto exchange(std::initializer_list<uint32_t> own, Read read) {
  const int warp = threadIdx.x / 32;
  std::copy(own.begin(), own.end(), operands[warp][threadIdx.x % 32]);
  warp_barriers[warp].wait();
  auto found = read(operands[warp], threadIdx.x % 32);
  warp_barriers[warp].wait();
  return found;
}

template <typename To, typename From>
static To bits(From from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
template <typename Value>
static Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return exchange({bits<uint32_t>(value)}, [&](auto lanes, int lane) { return bits<Value>(lanes[lane ^ mask][0]); });
}
static uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return exchange({value}, [](auto lanes, int) {
    uint32_t found = 0;
    for (int lane = 0; lane < 32; lane++) found = max(found, lanes[lane][0]);
    return found;
  });
}
static int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
#define __expf expf
static bool __any_sync(unsigned, bool own) {
  return exchange({(uint32_t)own}, [](auto lanes, int) {
    bool found = false;
    for (int lane = 0; lane < 32; lane++) found |= lanes[lane][0];
    return found;
  });
}
static float __int_as_float(int number) { return bits<float>(number); }
static float __uint_as_float(uint32_t number) { return bits<float>(number); }
static uint32_t __float_as_uint(float number) { return bits<uint32_t>(number); }
static float rsqrtf(float number) { return 1.f / sqrtf(number); }
static uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = (uint64_t)high << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= (both >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  return found;
}

// In place of tensor_cores.cuh. Fragments as in PTX ISA 9.7.14, mma.m16n8k16.
template <typename T>
static float half_of(uint32_t pair, int place) {
  return static_cast<float>(bits<T>((uint16_t)(pair >> (16 * place))));
}
struct Sums { float at[4]; };
template <typename T>
static void multiply(float* sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const Sums found = exchange({a0, a1, a2, a3, b0, b1}, [](auto lanes, int lane) {
    Sums sums = {};
    for (int c = 0; c < 4; c++) {
      const int row = lane / 4 + 8 * (c / 2), column = lane % 4 * 2 + c % 2;
      for (int k = 0; k < 16; k++) {
        const int piece = k % 8 / 2;
        sums.at[c] += half_of<T>(lanes[row % 8 * 4 + piece][row / 8 + 2 * (k / 8)], k % 2) *
            half_of<T>(lanes[column * 4 + piece][4 + k / 8], k % 2);
      }
    }
    return sums;
  });
  for (int c = 0; c < 4; c++) sum[c] += found.at[c];
}

// Fragments as in PTX ISA 9.7.14.5, ldmatrix. A copy is made at once.
using SharedPlace = uint64_t;
static SharedPlace shared_place(const void* pointer) { return (SharedPlace)pointer; }
static void begin_copy(SharedPlace to, const void* from) { memcpy((void*)to, from, 16); }
static void wait_for_copies() {}
template <bool ACROSS>
static void load(uint32_t* to, SharedPlace place) {
  struct Found { uint32_t at[4]; };
  const Found found = exchange({(uint32_t)place, (uint32_t)(place >> 32)}, [](auto lanes, int lane) {
    Found found = {};
    for (int matrix = 0; matrix < 4; matrix++)
      for (int place = 0; place < 2; place++) {
        const int row = ACROSS ? lane % 4 * 2 + place : lane / 4, column = ACROSS ? lane / 4 : lane % 4 * 2 + place;
        const uint32_t* address = lanes[matrix * 8 + row];
        const auto* numbers = (const uint16_t*)(address[0] | (uint64_t)address[1] << 32);
        found.at[matrix] |= (uint32_t)numbers[column] << (16 * place);
      }
    return found;
  });
  for (int matrix = 0; matrix < 4; matrix++) to[matrix] = found.at[matrix];
}
static void load_matrices(uint32_t* to, SharedPlace row) { load<false>(to, row); }
static void load_matrices_across(uint32_t* to, SharedPlace row) { load<true>(to, row); }
static float power_of_2(float exponent) { return exp2f(exponent); }
template <typename T>
static uint32_t rounded(float low, float high) {
  return bits<uint16_t>(static_cast<T>(low)) | (uint32_t)bits<uint16_t>(static_cast<T>(high)) << 16;
}
template <typename T>
static void numbers_of(uint32_t both, float& low, float& high) {
  low = half_of<T>(both, 0);
  high = half_of<T>(both, 1);
}

// In place of copies_ahead.cuh. A copy arrives when it is awaited, in any case no sooner.
struct Copy {
  void* to;
  uint4 numbers;
  int group;
};
static std::vector<Copy> copies_of[1024];
static int groups_of[1024];
static void copy_ahead(void* to, const void* from, bool are_there) {
  uint4 numbers = {};
  if (are_there) memcpy(&numbers, from, 16);
  copies_of[threadIdx.x].push_back({to, numbers, groups_of[threadIdx.x]});
}
static void end_group() { groups_of[threadIdx.x]++; }
template <int LEFT>
static void await_groups() {
  std::vector<Copy>& copies = copies_of[threadIdx.x];
  const int arrived = groups_of[threadIdx.x] - LEFT;
  for (const Copy& copy : copies)
    if (copy.group < arrived) memcpy(copy.to, &copy.numbers, 16);
  std::erase_if(copies, [&](const Copy& copy) { return copy.group < arrived; });
}

// Two numbers in half precision, rounded after each operation.
template <typename T>
struct Two { T x, y; };
using __nv_bfloat162 = Two<__nv_bfloat16>;
using __half2 = Two<__half>;
template <typename T>
static Two<T> pair_of(float low, float high) { return {static_cast<T>(low), static_cast<T>(high)}; }
static __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return pair_of<__nv_bfloat16>(low, high); }
static __half2 __floats2half2_rn(float low, float high) { return pair_of<__half>(low, high); }
static __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 number) { return {number, number}; }
static __half2 __half2half2(__half number) { return {number, number}; }
template <typename T>
static Two<T> __hfma2(Two<T> a, Two<T> b, Two<T> c) {
  return pair_of<T>(
      fmaf(static_cast<float>(a.x), static_cast<float>(b.x), static_cast<float>(c.x)),
      fmaf(static_cast<float>(a.y), static_cast<float>(b.y), static_cast<float>(c.y)));
}
template <typename T>
static Two<T> __hmul2(Two<T> a, Two<T> b) {
  return pair_of<T>(static_cast<float>(a.x) * static_cast<float>(b.x), static_cast<float>(a.y) * static_cast<float>(b.y));
}
template <typename T>
static Two<T> __hsub2(Two<T> a, Two<T> b) {
  return pair_of<T>(static_cast<float>(a.x) - static_cast<float>(b.x), static_cast<float>(a.y) - static_cast<float>(b.y));
}

namespace cooperative_groups {}
namespace mlx::core::cu {
template <typename T>
struct Numbers {
  T number[10];
  const T& operator[](int i) const { return number[i]; }
};
using Shape = Numbers<int32_t>;
using Strides = Numbers<int64_t>;
static uint4 shared_start[1 << 16];
}

template <typename Kernel>
static void run_thread(Kernel* kernel) {
  (*kernel)();
  fibers[threadIdx.x].ended = true;
  block_barrier.threads--;
  warp_barriers[threadIdx.x / 32].threads--;
  Fiber* other = next_fiber();
  setcontext(other ? &other->context : &host);
}

template <typename Kernel>
static void launch(Dim grid, int threads, Kernel kernel) {
  static Kernel* started;
  started = &kernel;
  gridDim = grid;
  // Once for all blocks: new stacks take longer than the threads.
  fibers = std::vector<Fiber>(threads);
  for (int block = 0; block < grid.x * grid.y * grid.z; block++) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    block_barrier = {threads};
    for (int warp = 0; warp < 32; warp++) warp_barriers[warp] = {max(0, min(32, threads - 32 * warp))};
    for (Fiber& fiber : fibers) {
      fiber.ended = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, +[] { run_thread(started); }, 0);
    }
    threadIdx = {0, 0, 0};
    swapcontext(&host, &fibers[0].context);
  }
}
