// The instructions of sm_90a that copy tiles to shared memory and multiply them there, and nothing
// else. The emulation of tests/emulation has none of them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rwkv_jax::cuda::hopper {

// A barrier in shared memory: a phase ends after so many arrivals, and when all announced bytes are
// there. Addresses are those of the shared memory of this block.
__device__ inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// The memory of a barrier may then hold other things.
__device__ inline void InvalidateBarrier(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes new barriers known to the other block and to the copies.
__device__ inline void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline bool PhaseOver(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; "
      "selp.u32 %0, 1, 0, over;}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over;
}

__device__ inline void AwaitPhase(uint32_t barrier, uint32_t parity) {
  if (PhaseOver(barrier, parity)) return;
  while (!PhaseOver(barrier, parity)) continue;
}

__device__ inline void ExpectBytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at this barrier of a block of the cluster. Not with the scope of the cluster, which costs a
// fence of the whole GPU: what was read, was read by products that are complete.
__device__ inline void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ inline uint32_t RankInCluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void SynchronizeCluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts to copy the box of a map of rank 2 whose first element is [row, column].
__device__ inline void CopyBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column,
                               int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// The same to this place of the blocks of the cluster that `blocks` has a bit for. Each of them has a
// barrier at this place.
__device__ inline void CopyBoxTo(uint32_t blocks, uint32_t to, const CUtensorMap* map,
                                 uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

// Starts to copy the box of a map of rank 5, whose last axis is groups of rows, to the same place of both
// blocks of the cluster.
__device__ inline void CopyGroupsToBoth(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                        int column, int group) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(group), "h"(static_cast<uint16_t>(3)), "r"(0)
      : "memory");
}

// Starts to copy the box of a map of rank 2 from shared memory, which the warp has written before
// PublishToCopies. A thread waits for the stores that it has started itself.
__device__ inline void StoreBox(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(column), "r"(row)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void PublishToCopies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Returns when all stores but the last kRunning ones have read shared memory.
template <int kRunning>
__device__ void AwaitReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kRunning) : "memory");
}

// Stores four 8 x 8 matrices; lane 8 i + j has the address of row j of matrix i.
__device__ inline void StoreMatrices(uint32_t to, const uint32_t* x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The tile at an address as an operand of a product: rows of 128 bytes, swizzled over eight rows, 1024
// bytes from eight rows to the next. If the rows are columns of the operand, it has more than 64 rows, and
// `stride` bytes lie between 64 of them and the next.
__device__ inline uint64_t Descriptor(uint32_t address, uint32_t stride = 16) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (uint64_t{stride >> 4} << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

__device__ inline void FenceProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kRunning>
__device__ void AwaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kRunning) : "memory");
}

template <int kRegisters>
__device__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// d += a b^T, or d = a b^T, for the 64 x `kColumns` sums of a warpgroup and 16 columns of the operands.
// Registers 4 i to 4 i + 3 are fragment i of matrix.cuh. With kTransposed the columns of b, not its rows,
// lie in shared memory one after another, and with kLeftTransposed those of a.
//
// An instruction names its registers, so there is one for each number of columns.
#define RWKV_JAX_SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define RWKV_JAX_SUMS_16 \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define RWKV_JAX_SUMS_32 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define RWKV_JAX_SUMS_48 \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define RWKV_JAX_SUMS_64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define RWKV_JAX_SUMS_80 \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define RWKV_JAX_SUMS_96 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define RWKV_JAX_SUMS_112 \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define RWKV_JAX_NAMES_8 "%0, %1, %2, %3"
#define RWKV_JAX_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RWKV_JAX_NAMES_32 RWKV_JAX_SUMS_0
#define RWKV_JAX_NAMES_64 RWKV_JAX_SUMS_0 ", " RWKV_JAX_SUMS_16
#define RWKV_JAX_NAMES_96 RWKV_JAX_NAMES_64 ", " RWKV_JAX_SUMS_32
#define RWKV_JAX_NAMES_128 RWKV_JAX_NAMES_96 ", " RWKV_JAX_SUMS_48
#define RWKV_JAX_NAMES_160 RWKV_JAX_NAMES_128 ", " RWKV_JAX_SUMS_64
#define RWKV_JAX_NAMES_192 RWKV_JAX_NAMES_160 ", " RWKV_JAX_SUMS_80
#define RWKV_JAX_NAMES_224 RWKV_JAX_NAMES_192 ", " RWKV_JAX_SUMS_96
#define RWKV_JAX_NAMES_256 RWKV_JAX_NAMES_224 ", " RWKV_JAX_SUMS_112
#define RWKV_JAX_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RWKV_JAX_16(i) RWKV_JAX_4(i), RWKV_JAX_4(i + 4), RWKV_JAX_4(i + 8), RWKV_JAX_4(i + 12)
#define RWKV_JAX_OPERANDS_8 RWKV_JAX_4(0)
#define RWKV_JAX_OPERANDS_16 RWKV_JAX_4(0), RWKV_JAX_4(4)
#define RWKV_JAX_OPERANDS_32 RWKV_JAX_16(0)
#define RWKV_JAX_OPERANDS_64 RWKV_JAX_16(0), RWKV_JAX_16(16)
#define RWKV_JAX_OPERANDS_96 RWKV_JAX_OPERANDS_64, RWKV_JAX_16(32)
#define RWKV_JAX_OPERANDS_128 RWKV_JAX_OPERANDS_96, RWKV_JAX_16(48)
#define RWKV_JAX_OPERANDS_160 RWKV_JAX_OPERANDS_128, RWKV_JAX_16(64)
#define RWKV_JAX_OPERANDS_192 RWKV_JAX_OPERANDS_160, RWKV_JAX_16(80)
#define RWKV_JAX_OPERANDS_224 RWKV_JAX_OPERANDS_192, RWKV_JAX_16(96)
#define RWKV_JAX_OPERANDS_256 RWKV_JAX_OPERANDS_224, RWKV_JAX_16(112)
// `a`, `b`, `add` and both `transposed` are the names of the operands that follow the sums.
#define RWKV_JAX_MULTIPLY(columns, a_name, b_name, add_name, left_name, right_name)    \
  asm volatile("{.reg .pred add; setp.ne.b32 add, " add_name                           \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #columns                       \
               "k16.f32.bf16.bf16 {" RWKV_JAX_NAMES_##columns                          \
               "}, " a_name ", " b_name ", add, 1, 1, " left_name ", " right_name ";}" \
               : RWKV_JAX_OPERANDS_##columns                                           \
               : "l"(a), "l"(b), "r"(static_cast<int>(add)),                           \
                 "n"(static_cast<int>(kLeftTransposed)), "n"(static_cast<int>(kTransposed)))

template <int kColumns, bool kTransposed = false, bool kLeftTransposed = false>
__device__ void Multiply(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool add) {
  if constexpr (kColumns == 8) {
    RWKV_JAX_MULTIPLY(8, "%4", "%5", "%6", "%7", "%8");
  } else if constexpr (kColumns == 16) {
    RWKV_JAX_MULTIPLY(16, "%8", "%9", "%10", "%11", "%12");
  } else if constexpr (kColumns == 32) {
    RWKV_JAX_MULTIPLY(32, "%16", "%17", "%18", "%19", "%20");
  } else if constexpr (kColumns == 64) {
    RWKV_JAX_MULTIPLY(64, "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (kColumns == 96) {
    RWKV_JAX_MULTIPLY(96, "%48", "%49", "%50", "%51", "%52");
  } else if constexpr (kColumns == 128) {
    RWKV_JAX_MULTIPLY(128, "%64", "%65", "%66", "%67", "%68");
  } else if constexpr (kColumns == 160) {
    RWKV_JAX_MULTIPLY(160, "%80", "%81", "%82", "%83", "%84");
  } else if constexpr (kColumns == 192) {
    RWKV_JAX_MULTIPLY(192, "%96", "%97", "%98", "%99", "%100");
  } else if constexpr (kColumns == 224) {
    RWKV_JAX_MULTIPLY(224, "%112", "%113", "%114", "%115", "%116");
  } else {
    static_assert(kColumns == 256);
    RWKV_JAX_MULTIPLY(256, "%128", "%129", "%130", "%131", "%132");
  }
}

// d += a b^T for 64 columns, with a fragment of `a` in registers.
template <bool kTransposed>
__device__ void Multiply(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, 1, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" RWKV_JAX_NAMES_64
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, %37;}"
      : RWKV_JAX_OPERANDS_64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kTransposed)));
}

}  // namespace rwkv_jax::cuda::hopper
