// Which of the blocks that share a result has to finish it.
#pragma once

#include "ptx.cuh"

namespace rwkv_jax::cuda {

// Whether the other ones of `blocks` blocks have called this before, on a ticket that was 0. What they have
// written until then may be read with __ldcg. All threads of a block call it.
// The fences of one thread stand for those of all: the barriers order their accesses before and after it.
__device__ inline bool ArrivesLast(uint32_t* ticket, uint32_t blocks) {
  __syncthreads();
  bool last = true;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(ticket, 1u) == blocks - 1;
    __threadfence();
  }
  return __syncthreads_and(last);
}

}  // namespace rwkv_jax::cuda
