// The instructions that CUDA C++ has no name for, and nothing else. tests/emulation has the same
// functions for threads that a CPU runs, so that the kernels can be tested on a machine without a
// GPU.
#pragma once

#ifdef RWKV_JAX_EMULATION
#include "emulation.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// Declares the shared memory that a launch asks for.
#define RWKV_JAX_DYNAMIC_SHARED(alignment, name) \
  extern __shared__ __align__(alignment)         \
  unsigned char name[]

namespace rwkv_jax::cuda {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Waits at a named barrier until `threads` threads have come to it. Barrier 0 is that of
// __syncthreads. PTX's `bar.sync` would promise that all of them execute the same instruction, and
// warps with different roles wait in different places.
__device__ inline void Synchronize(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as coming to a named barrier, and does not wait there.
__device__ inline void Arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// x, of which the compiler knows nothing: what follows from it is computed where it is needed, and not kept in
// registers from before a loop.
__device__ inline int Opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Fetches the cache line at an address of global memory into L2.
__device__ inline void Prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Fetches `bytes` from an address of global memory on into L2; both are multiples of 16.
__device__ inline void PrefetchBytes(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// A pair is two 16-bit elements in one register.
__device__ inline uint32_t RoundToBf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t RoundToHalf(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t MultiplyBf16(uint32_t a, uint32_t b) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0
#endif
  return pair;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l points to row l % 8 of matrix l / 8. It gets
// of each matrix, or of its transpose, row l / 4 in columns 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void LoadMatrices(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ inline void LoadTransposed(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

// The transpose of an 8 x 8 matrix that lies across the lanes.
__device__ inline uint32_t Transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

#if __CUDA_ARCH__ >= 900
__device__ inline void StoreMatricesNatively(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

__device__ inline void StoreTransposedNatively(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
      : "memory");
}
#endif

__device__ inline void StoreWord(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ inline uint32_t LoadWord(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

// sum += a b of one warp, where a is a Left and sum a fragment of matrix.cuh. b0 and b1 are the
// transposes of the upper and the lower 8 x 8 of b, 16 x 8.
__device__ inline void WarpMultiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum += a b with operands of float16.
__device__ inline void WarpMultiplyHalf(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum += a b with a 16 x 8 and b 8 x 8 of floats, rounded to 10 bits of mantissa (tf32). Elements
// a[0] and a[2] of lane l are row l / 4 of a, a[1] and a[3] row l / 4 + 8; a[0] and a[1] are column
// l % 4, a[2] and a[3] column l % 4 + 4. b0 and b1 are rows l % 4 and l % 4 + 4 of column l / 4 of
// b.
__device__ inline void WarpMultiplyFloat(float (&sum)[4], const float (&a)[4], float b0, float b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Starts to copy 16 bytes from global to shared memory; if not `present`, it clears them instead
// and reads nothing.
__device__ inline void CopyAsync(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ inline void CopyWordAsync(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(present ? 4 : 0)
               : "memory");
}

#if __CUDA_ARCH__ >= 900
#define RWKV_JAX_WAIT "try_wait"
#else
#define RWKV_JAX_WAIT "test_wait"
#endif

// An mbarrier at which the copies of threads arrive. A phase of it ends when the copies of all
// threads have arrived.
class CopyBarrier {
 public:
  __device__ explicit CopyBarrier(uint32_t address) : address_(address) {}

  __device__ void Init(int threads) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(threads) : "memory");
  }
  // Arrives for this thread once all copies that it has started are done.
  __device__ void ArriveAfterCopies() const {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_) : "memory");
  }
  __device__ void Wait(uint32_t parity) const {
    uint32_t done;
    do {
      asm volatile("{.reg .pred done; mbarrier." RWKV_JAX_WAIT
                   ".parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                   : "=r"(done)
                   : "r"(address_), "r"(parity)
                   : "memory");
    } while (!done);
  }

 private:
  uint32_t address_;
};

// For launch_chain.cuh alone: returns when the kernels before this one have ended and what they have written is
// there.
__device__ inline void WaitForKernelsBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For launch_chain.cuh alone: lets the next kernel start once all blocks of this one have called it or ended.
__device__ inline void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// CommitCopies makes a group of the copies that this thread has started since the last group.
// WaitForCopies<n> returns when all groups but the last n are done; WaitForCopies<0> waits for all
// copies, in a group or not.
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kRunning>
__device__ void WaitForCopies() {
  if constexpr (kRunning > 0)
    asm volatile("cp.async.wait_group %0;" ::"n"(kRunning) : "memory");
  else
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
