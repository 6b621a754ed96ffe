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

// The tile at an address as an operand of a product: rows of 128 bytes, swizzled over eight rows.
__device__ inline uint64_t Descriptor(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (uint64_t{1} << 16) |
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

// d += a b^T, or d = a b^T, for the 64 x 256 sums of a warpgroup and 16 columns of the operands. Registers
// 4 i to 4 i + 3 are fragment i of matrix.cuh.
__device__ inline void Multiply(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred add; setp.ne.b32 add, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, "
      "%72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, "
      "%88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, "
      "%104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, "
      "%120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, add, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

}  // namespace rwkv_jax::cuda::hopper
