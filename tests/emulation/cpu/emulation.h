// CUDA on one CPU thread, as far as handlers and kernels need it. Blocks run one after another. Each
// thread of a block is a fiber that runs until it has to wait for others. Which warp runs next is
// drawn at random from a seed, so a missing barrier shows as a result that depends on the seed.
//
// A kernel that may start early sees memory as it may be then: the operands of a call are there only when it
// has waited for the kernels before it, and so is what kernels of the call have written unless a kernel that
// had waited for them has let this one start. One block, drawn at random, runs up to where all of its threads
// wait before any other block does.
//
// This header takes the place of CUDA's headers and of ffi/cuda/ptx.cuh. Code is compiled as for sm_80.
#pragma once

#include <immintrin.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device.h"

#define __CUDACC__ 1
#define __CUDA_ARCH__ 800
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(...) __attribute__((aligned(__VA_ARGS__)))
#define __shared__ static  // one block at a time

// For what kernels call at many places: the compiler takes longer where it is inlined.
#define OUT_OF_LINE __attribute__((noinline))

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits = 0;
};
struct __half {
  uint16_t bits = 0;
};
struct __half2 {
  __half x, y;
};

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
using cudaStream_t = void*;
enum {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace emulation {

constexpr int kMaxSharedBytes = 232448;
alignas(1024) inline unsigned char shared[kMaxSharedBytes];
inline size_t shared_bytes;  // how many the launched kernel has
inline std::mt19937 random;

inline void Seed(unsigned seed) { random.seed(seed); }

inline cudaStream_t Stream() { return nullptr; }

// Memory that nothing has written is full of ones, which are NaN in all floating-point types.
inline bool Unwritten(const unsigned char* begin, const unsigned char* end) {
  return begin == end || (*begin == 0xff && std::memcmp(begin, begin + 1, end - begin - 1) == 0);
}

// Memory of exactly so many bytes, aligned to 16 bytes and no more, between bytes that no kernel may
// write.
class Memory {
 public:
  explicit Memory(size_t bytes)
      : size_(bytes),
        all_(static_cast<unsigned char*>(std::aligned_alloc(32, Rounded(bytes) + 2 * kGuard)),
             std::free) {
    std::memset(all_.get(), 0xff, Rounded(bytes) + 2 * kGuard);
    all.push_back(this);
  }
  Memory(const Memory&) = delete;
  ~Memory() { all.erase(std::find(all.begin(), all.end(), this)); }
  void* data() const { return all_.get() + kGuard; }
  size_t size() const { return size_; }
  void Write(const void* from) { std::memcpy(data(), from, size_); }
  void Read(void* to) const { std::memcpy(to, data(), size_); }
  bool Intact() const {
    const unsigned char* const data = all_.get() + kGuard;
    return Unwritten(all_.get(), data) && Unwritten(data + size_, data + Rounded(size_) + kGuard);
  }

 private:
  static constexpr size_t kGuard = 4096 + 16;
  static size_t Rounded(size_t bytes) { return (bytes + 31) / 32 * 32; }

  size_t size_;
  std::unique_ptr<unsigned char, void (*)(void*)> all_;

 public:
  static inline std::vector<Memory*> all;  // in the order in which they were made
};

// What all memory holds at some time.
class Contents {
 public:
  static Contents Now() {
    Contents now;
    for (const Memory* memory : Memory::all) {
      const auto* const data = static_cast<const unsigned char*>(memory->data());
      now.of_.emplace_back(data, data + memory->size());
    }
    return now;
  }
  static Contents Unwritten() {
    Contents none;
    for (const Memory* memory : Memory::all) none.of_.emplace_back(memory->size(), 0xff);
    return none;
  }
  void Restore() const {
    for (size_t i = 0; i < of_.size(); ++i)
      std::memcpy(Memory::all[i]->data(), of_[i].data(), of_[i].size());
  }
  // Forgets what is otherwise now.
  [[gnu::optimize("O3")]] void ForgetChanges() {
    for (size_t i = 0; i < of_.size(); ++i) {
      const auto* const now = static_cast<const unsigned char*>(Memory::all[i]->data());
      for (size_t j = 0; j < of_[i].size(); ++j)
        if (of_[i][j] != now[j]) of_[i][j] = 0xff;
    }
  }
  bool operator==(const Contents&) const = default;

 private:
  std::vector<std::vector<unsigned char>> of_;
};

// The last error of CUDA, until somebody asks for it.
inline cudaError_t last_error = cudaSuccess;
inline cudaError_t Remembered(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The bytes of shared memory that a launch of a kernel may ask for: 48 KiB, or what its attribute says.
inline std::map<const void*, int> allowed;
inline int Allowed(const void* kernel) {
  const auto found = allowed.find(kernel);
  return found == allowed.end() ? 48 << 10 : found->second;
}

inline std::string failure;  // of the kernels of a call
inline void Fail(const std::string& what) {
  if (failure.empty()) failure = launched.back().file + ": " + what;
}

// What the next kernel sees until it waits, if it starts early.
inline Contents seen_early;

// A call begins: its operands are in memory, and a kernel that starts early does not see them yet.
inline void Begin() { seen_early = Contents::Unwritten(); }

// Kernels are done when their launch returns; what was wrong with them, if anything.
inline std::string Finish() { return std::exchange(failure, {}); }

struct Copy {
  uint32_t to;
  const void* from;  // null where the copy clears
  size_t bytes;
  std::vector<unsigned char>
      early;  // what it has read, if its block had not waited when it started
};
struct Fiber {
  std::vector<char> stack;  // empty before the fiber has run
  jmp_buf place;            // where it goes on
  std::function<bool()> ready;
  std::vector<std::vector<Copy>> copies;  // under way, by group; the last is still open
  unsigned thread;
  bool done;
};
struct Barrier {
  unsigned arrived = 0, generation = 0;
  bool all = true, result = true;
};
struct WarpState {
  uint32_t posted[2][32][6];  // what each lane shows the others, now and the time before
  Barrier barrier;
};

inline std::vector<Fiber> fibers;
inline Fiber* current;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline std::map<int, Barrier> barriers;
inline std::vector<WarpState> warps;
inline dim3 block_index, grid;
inline unsigned threads;

inline int Lane() { return current->thread % 32; }
inline WarpState& OwnWarp() { return warps[current->thread / 32]; }

// swapcontext would take two system calls.
inline void Suspend() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

OUT_OF_LINE inline void WaitUntil(std::function<bool()> ready) {
  if (ready()) return;
  current->ready = std::move(ready);
  Suspend();
}

inline void Count(Barrier& barrier, unsigned count, bool value = true) {
  barrier.all = barrier.all && value;
  if (++barrier.arrived == count) {
    barrier.result = barrier.all;
    barrier.all = true;
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

OUT_OF_LINE inline bool Arrive(Barrier& barrier, unsigned count, bool value = true) {
  const unsigned generation = barrier.generation;
  Count(barrier, count, value);
  WaitUntil([&barrier, generation] { return barrier.generation != generation; });
  return barrier.result;
}

// All lanes post, then all read. A lane that goes on may post again before the others have read, but
// not twice.
template <typename Read>
auto Exchange(std::initializer_list<uint32_t> words, Read&& read) {
  WarpState& warp = OwnWarp();
  auto& posted = warp.posted[warp.barrier.generation % 2];
  std::copy(words.begin(), words.end(), posted[Lane()]);
  Arrive(warp.barrier, 32);
  return read(posted);
}

// A fiber runs its thread of one block after another.
inline void RunFiber() {
  for (;;) {
    kernel();
    current->done = true;
    Suspend();
  }
}

inline void Start(Fiber& fiber) {
  fiber.stack.resize(1 << 17);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = fiber.stack.size();
  makecontext(&context, RunFiber, 0);
  setcontext(&context);
}

inline void Resume(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.stack.empty()) Start(fiber);
  _longjmp(fiber.place, 1);
}

inline void RunBlock() {
  barriers.clear();
  warps.assign(threads / 32, {});
  std::memset(shared, 0xff, sizeof(shared));
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.ready = nullptr;
    fiber.copies.assign(1, {});
    fiber.thread = t;
    fiber.done = false;
  }
  const auto runs = [](Fiber& fiber) {
    if (fiber.done || (fiber.ready && !fiber.ready())) return false;
    fiber.ready = nullptr;
    Resume(fiber);
    return true;
  };
  // A warp runs as far as it can; then another one is drawn.
  std::vector<unsigned> order(threads / 32);
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (;;) {
    std::shuffle(order.begin(), order.end(), random);
    bool any = false;
    for (unsigned warp : order) {
      bool ran;
      do {
        ran = false;
        for (unsigned lane = 0; lane < 32; ++lane) ran |= runs(fibers[32 * warp + lane]);
        any |= ran;
      } while (ran);
      if (any) break;
    }
    if (any) continue;
    if (std::all_of(fibers.begin(), fibers.begin() + threads, [](auto& f) { return f.done; }))
      break;
    std::fprintf(stderr, "the threads of a block wait for each other\n");
    std::abort();
  }
  if (!Unwritten(shared + shared_bytes, std::end(shared))) {
    std::fprintf(stderr, "a block writes more shared memory than it has\n");
    std::abort();
  }
}

// GPUs compute with subnormal numbers, which XLA turns off in the threads of a CPU.
class WithSubnormals {
 public:
  WithSubnormals() : before_(_mm_getcsr()) {
    _mm_setcsr(before_ & ~(_MM_FLUSH_ZERO_MASK | _MM_DENORMALS_ZERO_MASK));
  }
  ~WithSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// A kernel and the kernels before it, as far as it may start while they still run.
struct LaunchState {
  bool early = false;
  Contents complete;  // what memory holds when the kernels before have ended
  bool waited = false;
  // Of the block that runs, whether it has waited and whether it has let the next kernel start. The next
  // kernel starts when all blocks have; if one of them waited before, the kernels before have ended.
  bool block_waited = false, block_triggered = false;
  bool next_sees_complete = false;
};
inline LaunchState state;
inline Barrier before_wait;  // all threads of a block do what they do early, and then they wait

OUT_OF_LINE inline void WaitForKernelsBefore() {
  if (state.block_waited) return;
  Arrive(before_wait, threads);
  if (state.block_waited) return;
  if (state.early && !state.waited) {
    if (Contents::Now() != seen_early) Fail("a kernel writes before it waits");
    state.complete.Restore();
  }
  state.waited = state.block_waited = true;
}
inline void LetNextKernelStart() {
  if (!state.block_triggered && (state.block_waited || !state.early))
    state.next_sees_complete = true;
  state.block_triggered = true;
}

inline void Launch(std::function<void()> call, dim3 blocks, int block_threads, int dynamic_bytes,
                   bool early) {
  const WithSubnormals with_subnormals;
  kernel = std::move(call);
  grid = blocks;
  threads = block_threads;
  shared_bytes = dynamic_bytes;
  state = {early, Contents::Now()};
  if (early) seen_early.Restore();
  if (fibers.size() < threads) fibers.resize(threads);
  // The first block to run is the one that sees memory as it is early.
  const uint64_t count = uint64_t{grid.x} * grid.y * grid.z, first = random() % count;
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t block = (first + i) % count, row = block / grid.x;
    block_index = dim3(block % grid.x, row % grid.y, row / grid.y);
    state.block_waited = state.block_triggered = false;
    before_wait = {};
    RunBlock();
    if (early && !state.block_waited) Fail("a block never waits for the kernels before it");
    if (!state.block_triggered) LetNextKernelStart();
  }
  if (state.next_sees_complete) seen_early = std::move(state.complete);
  // A kernel that has not waited may read what changes before or after it does.
  if (early) seen_early.ForgetChanges();
  for (const Memory* memory : Memory::all)
    if (!memory->Intact()) Fail("memory around an operand or a result was written");
}

inline float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t ToBf16(float x) {
  const uint32_t word = std::bit_cast<uint32_t>(x);
  if ((word & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
inline float FromHalf(uint16_t bits) { return _cvtsh_ss(bits); }

// A lane's part of a warp's product of 16 x 16 and 16 x 8, which is most of what kernels on matrix units
// take.
[[gnu::optimize("O3")]] inline void AddProducts(float (&sum)[4], const uint32_t (&posted)[32][6],
                                                int lane, bool half) {
  const auto value = [half](uint32_t word) {
    return half ? _cvtsh_ss(word) : std::bit_cast<float>(word << 16);
  };
  float left[2][16], right[2][16];
  for (int k = 0; k < 16; ++k)
    for (int i = 0; i < 2; ++i) {
      const int pair = k % 8 / 2, shift = k % 2 * 16;
      left[i][k] = value(posted[lane / 4 * 4 + pair][i + k / 8 * 2] >> shift);
      right[i][k] = value(posted[(2 * (lane % 4) + i) * 4 + pair][4 + k / 8] >> shift);
    }
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 16; ++k) sum[e] += left[e / 2][k] * right[e % 2][k];
}

OUT_OF_LINE inline void Multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                 bool half) {
  Exchange({a[0], a[1], a[2], a[3], b0, b1}, [&](const auto& posted) {
    AddProducts(sum, posted, Lane(), half);
    return 0;
  });
}

template <typename T>
OUT_OF_LINE T Shuffle(T x, int source) {
  return std::bit_cast<T>(Exchange({std::bit_cast<uint32_t>(x)},
                                   [&](const auto& posted) { return posted[source][0]; }));
}

struct Index {
  unsigned x;
};

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::current->thread})
#define blockIdx (emulation::block_index)
inline const dim3& gridDim = emulation::grid;

// Code has the instructions of dependent launches.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++emulation::asked;
  return *attributes = {0, 90}, cudaSuccess;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, int, int value) {
  ++emulation::asked;
  if (value > emulation::kMaxSharedBytes) return emulation::Remembered(cudaErrorInvalidValue);
  return emulation::allowed[kernel] = value, cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
static cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                                      void (*kernel)(Parameters...), Arguments... arguments) {
  unsigned cluster = 1;
  bool early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster = config->attrs[i].val.clusterDim.x;
    else
      early = config->attrs[i].val.programmaticStreamSerializationAllowed;
  const dim3 blocks = config->gridDim;
  const unsigned threads = config->blockDim.x;
  const int bytes = config->dynamicSmemBytes;
  if (bytes > emulation::Allowed(reinterpret_cast<const void*>(kernel)) ||
      !emulation::Records({__BASE_FILE__, blocks.x, blocks.y, blocks.z, threads, bytes, cluster}))
    return emulation::Remembered(cudaErrorInvalidValue);
  if (!emulation::dry)
    emulation::Launch([&] { kernel(arguments...); }, blocks, threads, bytes, early);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return std::exchange(emulation::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 1 << 20; break;  // limited by set_device
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emulation::kMaxSharedBytes; break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  if (!emulation::dry) std::memset(to, byte, bytes);
  return cudaSuccess;
}

inline float __uint_as_float(uint32_t word) { return std::bit_cast<float>(word); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
OUT_OF_LINE inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return word;
}
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return emulation::FromBf16(x.bits); }
inline float __half2float(__half x) { return emulation::FromHalf(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulation::ToBf16(x)}; }
inline __half __float2half_rn(float x) { return {_cvtss_sh(x, 0)}; }
inline float __low2float(__half2 pair) { return emulation::FromHalf(pair.x.bits); }
inline float __high2float(__half2 pair) { return emulation::FromHalf(pair.y.bits); }
inline void __trap() { std::abort(); }
OUT_OF_LINE inline void __syncthreads() {
  emulation::Arrive(emulation::barriers[0], emulation::threads);
}
OUT_OF_LINE inline int __syncthreads_and(int value) {
  return emulation::Arrive(emulation::barriers[0], emulation::threads, value != 0);
}
inline void __syncwarp() { emulation::Arrive(emulation::OwnWarp().barrier, 32); }
template <typename T>
T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return emulation::Shuffle(x, emulation::Lane() / width * width + lane % width);
}
template <typename T>
T __shfl_down_sync(unsigned, T x, int step, int width = 32) {
  const int lane = emulation::Lane(), source = lane + step;
  return emulation::Shuffle(x, source / width == lane / width ? source : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulation::Shuffle(x, emulation::Lane() ^ mask);
}
// Blocks run one after another.
inline void __threadfence() {}
inline uint32_t atomicAdd(uint32_t* to, uint32_t x) { return std::exchange(*to, *to + x); }
template <typename T>
inline T __ldcg(const T* from) {
  return *from;
}
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __ffsll(uint64_t x) { return __builtin_ffsll(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __clzll(uint64_t x) { return x == 0 ? 64 : __builtin_clzll(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline uint32_t __vminu2(uint32_t x, uint32_t y) {
  return std::min(x >> 16, y >> 16) << 16 | std::min(x & 0xffff, y & 0xffff);
}
inline uint32_t __brev(uint32_t x) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
OUT_OF_LINE inline uint32_t __ballot_sync(unsigned, bool value) {
  return emulation::Exchange({uint32_t{value}}, [](const auto& posted) {
    uint32_t lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= posted[lane][0] << lane;
    return lanes;
  });
}
inline bool __any_sync(unsigned lanes, bool value) { return __ballot_sync(lanes, value) != 0; }

#define RWKV_JAX_DYNAMIC_SHARED(alignment, name) unsigned char* const name = emulation::shared

namespace rwkv_jax::cuda {

inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - emulation::shared;
}

OUT_OF_LINE inline void Synchronize(int number, int threads) {
  emulation::Arrive(emulation::barriers[number], threads);
}

OUT_OF_LINE inline void Arrive(int number, int threads) {
  emulation::Count(emulation::barriers[number], threads);
}

inline int Opaque(int x) { return x; }
inline float Exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline float Reciprocal(float x) { return 1.0f / x; }
inline void Prefetch(const void*) {}
OUT_OF_LINE inline void PrefetchBytes(const void* address, uint32_t bytes) {
  if ((reinterpret_cast<uintptr_t>(address) | bytes) % 16 == 0 && bytes > 0) return;
  std::fprintf(stderr, "a prefetch of %u bytes at %p\n", bytes, address);
  std::abort();
}

OUT_OF_LINE inline uint32_t RoundToBf16(float low, float high) {
  return emulation::ToBf16(low) | uint32_t{emulation::ToBf16(high)} << 16;
}
inline uint32_t RoundToHalf(float low, float high) {
  return uint32_t{_cvtss_sh(low, 0)} | uint32_t{_cvtss_sh(high, 0)} << 16;
}
OUT_OF_LINE inline uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  const auto value = emulation::FromBf16;
  return RoundToBf16(value(a) * value(b), value(a >> 16) * value(b >> 16));
}

OUT_OF_LINE inline void LoadBlocks(uint32_t address, bool transposed, uint32_t (&x)[4]) {
  emulation::Exchange({address}, [&](const auto& posted) {
    for (int i = 0; i < 4; ++i) {
      uint16_t pair[2];
      for (int e = 0; e < 2; ++e) {
        int row = emulation::Lane() / 4, col = 2 * (emulation::Lane() % 4) + e;
        if (transposed) std::swap(row, col);
        std::memcpy(&pair[e], emulation::shared + posted[8 * i + row][0] + 2 * col, 2);
      }
      x[i] = pair[0] | uint32_t{pair[1]} << 16;
    }
    return 0;
  });
  __syncwarp();  // no lane overwrites what another one is reading
}
inline void LoadMatrices(uint32_t address, uint32_t (&x)[4]) { LoadBlocks(address, false, x); }
inline void LoadTransposed(uint32_t address, uint32_t (&x)[4]) { LoadBlocks(address, true, x); }

OUT_OF_LINE inline uint32_t Transposed(uint32_t x) {
  return emulation::Exchange({x}, [](const auto& posted) {
    uint32_t pair = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * (emulation::Lane() % 4) + e, col = emulation::Lane() / 4;
      pair |= (posted[row * 4 + col / 2][0] >> col % 2 * 16 & 0xffff) << 16 * e;
    }
    return pair;
  });
}

inline void StoreWord(uint32_t address, uint32_t x) {
  std::memcpy(emulation::shared + address, &x, 4);
}

inline uint32_t LoadWord(uint32_t address) {
  uint32_t x;
  std::memcpy(&x, emulation::shared + address, 4);
  return x;
}

inline void WarpMultiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Multiply(sum, a, b0, b1, false);
}
inline void WarpMultiplyHalf(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Multiply(sum, a, b0, b1, true);
}

OUT_OF_LINE inline void WarpMultiplyFloat(float (&sum)[4], const float (&a)[4], float b0,
                                          float b1) {
  const auto word = [](float x) { return __float_as_uint(x) & 0xffffe000; };
  emulation::Exchange({word(a[0]), word(a[1]), word(a[2]), word(a[3]), word(b0), word(b1)},
                      [&](const auto& posted) {
                        for (int e = 0; e < 4; ++e) {
                          const int row = emulation::Lane() / 4 + e / 2 * 8,
                                    col = 2 * (emulation::Lane() % 4) + e % 2;
                          for (int k = 0; k < 8; ++k)
                            sum[e] +=
                                __uint_as_float(posted[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]) *
                                __uint_as_float(posted[col * 4 + k % 4][4 + k / 4]);
                        }
                        return 0;
                      });
}

// Copies arrive as late as they may, and read early if they start early.
OUT_OF_LINE inline void StartCopy(uint32_t to, const void* from, size_t bytes) {
  auto& copy = emulation::current->copies.back().emplace_back(emulation::Copy{to, from, bytes});
  const auto* const data = static_cast<const unsigned char*>(from);
  if (from && emulation::state.early && !emulation::state.block_waited)
    copy.early.assign(data, data + bytes);
}
inline void CopyAsync(uint32_t to, const void* from, bool present) {
  StartCopy(to, present ? from : nullptr, 16);
}
inline void CopyWordAsync(uint32_t to, const void* from, bool present) {
  StartCopy(to, present ? from : nullptr, 4);
}
using emulation::LetNextKernelStart;
using emulation::WaitForKernelsBefore;

inline void CommitCopies() { emulation::current->copies.emplace_back(); }
template <int kRunning>
OUT_OF_LINE void WaitForCopies() {
  auto& groups = emulation::current->copies;
  while (groups.size() > (kRunning > 0 ? kRunning + 1 : 0)) {
    for (const auto& copy : groups.front()) {
      if (copy.from)
        std::memcpy(emulation::shared + copy.to, copy.early.empty() ? copy.from : copy.early.data(),
                    copy.bytes);
      else
        std::memset(emulation::shared + copy.to, 0, copy.bytes);
    }
    groups.erase(groups.begin());
  }
  if (groups.empty()) groups.emplace_back();
}

class CopyBarrier {
 public:
  explicit CopyBarrier(uint32_t address)
      : state_(reinterpret_cast<State*>(emulation::shared + address)) {}

  void Init(int threads) const {
    *state_ = {static_cast<uint16_t>(threads), static_cast<uint16_t>(threads), 0};
  }
  void ArriveAfterCopies() const {
    WaitForCopies<0>();
    if (--state_->pending > 0) return;
    state_->pending = state_->threads;
    ++state_->phase;
  }
  OUT_OF_LINE void Wait(uint32_t parity) const {
    emulation::WaitUntil([state = state_, parity] { return state->phase % 2 != parity; });
  }

 private:
  struct State {
    uint16_t pending, threads;
    uint32_t phase;
  };
  State* state_;
};

}  // namespace rwkv_jax::cuda
