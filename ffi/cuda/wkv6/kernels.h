// WKV6 and WKV5 on CUDA: what a handler asks of the kernels. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "splits.h"
#include "rwkv_jax/wkv6.h"

namespace rwkv_jax::cuda {

// --- In float (recurrent.cu): any dtype, head sizes 16 to 128, any decay.

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kWkv6Tile = 8;

// Floats of scratch that the backward pass needs for one split of one head: the gradient of the
// state at its end, and the states inside one chunk.
__host__ __device__ constexpr int64_t Wkv6ScratchSize(int64_t head_size) {
  return kChunk / kWkv6Tile * head_size * head_size;
}

cudaError_t Wkv6Forward(cudaStream_t stream, const Wkv6ForwardCall& call);

// Each split gives a partial sum, and the partial sums beyond them are zeros. `scratch` has at least
// Wkv6ScratchSize(K) floats for each split.
cudaError_t Wkv6Backward(cudaStream_t stream, const Wkv6BackwardCall& call,
                         const ReplayScratch& scratch);

// --- On matrix units (scan.cu, gradients.cu): 16-bit dtypes, head size 64, any decay, saved
// states in bfloat16. On a device with too little shared memory for them the kernels above do it all.

constexpr int kMatrixHeadSize = 64;

// A run of tokens takes a state S to S diag(F) + D: of a split there is first D, which becomes the
// state at its end, then F.
constexpr int64_t kWkv6SummarySize = kMatrixHeadSize * kMatrixHeadSize + kMatrixHeadSize;

// Scratch of the backward pass, [B, H, stride], or all of it that of the kernels above.
struct Wkv6ChunkScratch {
  float* memory;
  int64_t stride, splits;

  static int64_t Size(const Wkv6Call& call, int64_t splits) {
    const int64_t floats =
        StateGradientFloats(kMatrixHeadSize, call.dims.saved) + kWkv6SummarySize * (splits - 1);
    const int64_t least = Wkv6ScratchSize(kMatrixHeadSize);
    return floats < least ? least : floats;
  }
  uint4* Gradients() const { return reinterpret_cast<uint4*>(memory); }
  Splits StateSplits(const Wkv6Call& call) const {
    const int64_t heads = call.dims.batch * call.dims.heads;
    return {splits, memory + heads * StateGradientFloats(kMatrixHeadSize, call.dims.saved),
            kWkv6SummarySize};
  }
};

cudaError_t Wkv6ChunkForward(cudaStream_t stream, const Wkv6ForwardCall& call,
                             const Splits& splits);

// Gives a partial sum for each chunk.
cudaError_t Wkv6ChunkBackward(cudaStream_t stream, const Wkv6BackwardCall& call,
                              const Wkv6ChunkScratch& scratch);

// What the tokens of a head do to a state, S diag(d) + D.
cudaError_t Wkv6Summary(cudaStream_t stream, const Wkv6SummaryCall& call);

// Of the backward pass dinitial_state alone; needs neither k nor v nor the states.
cudaError_t Wkv6ReverseSummary(cudaStream_t stream, const Wkv6BackwardCall& call);

// The parts of the two passes.
cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Splits& splits);

cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call,
                            const Splits& splits, uint4* gradients);

// All gradients but dinitial_state, from what the reverse scan has left.
cudaError_t Wkv6Gradients(cudaStream_t stream, const Wkv6BackwardCall& call,
                              const uint4* gradients);

}  // namespace rwkv_jax::cuda
