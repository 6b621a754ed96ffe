// WKV7 on CUDA: what a handler asks of the kernels. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "splits.h"
#include "rwkv_jax/wkv7.h"

namespace rwkv_jax::cuda {

// --- One token at a time, in float (recurrent.cu): any dtype, head sizes 16 to 128, any decay.

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kReplayTokens = 4;

// Floats of scratch that the backward pass needs for one split of one head: the gradient of the
// state at its end, the states inside one chunk, and S_{t-1} a_t for each token of the chunk.
__host__ __device__ constexpr int64_t ScratchSize(int64_t head_size) {
  return kChunk / kReplayTokens * head_size * head_size + kChunk * head_size;
}

// If `only` [B, H] is given, the heads that it marks with anything but 0.
cudaError_t Wkv7Forward(cudaStream_t stream, const Wkv7ForwardCall& call,
                        const float* only = nullptr);

// `scratch` has at least ScratchSize(K) floats for each split.
cudaError_t Wkv7Backward(cudaStream_t stream, const Wkv7BackwardCall& call,
                         const ReplayScratch& scratch, const float* only = nullptr);

// --- On matrix units: 16-bit dtypes, head sizes 64 and 128, any decay, saved states in bfloat16. The
// kernels of scan.cu and gradients.cu take chunks of kChunk tokens that do not decay too far
// for their arithmetic. A head with another chunk they mark in `inexact` [B, H] and leave undefined,
// and the kernels above redo it; on a device with too little shared memory for them those do it all.

// A run of tokens takes a state S to S M + D: of a split there is first D, which becomes the state at
// its end, then M.
constexpr int64_t SummarySize(int64_t head_size) { return 2 * head_size * head_size; }

// Scratch of the backward pass, [B, H, stride]. A head that the matrix units leave to the kernels
// above has no use for it, so those may have it all.
struct ChunkScratch {
  float* memory;
  int64_t stride, splits;

  static int64_t Size(const Wkv7Call& call, int64_t splits) {
    const int64_t size = call.dims.head_size;
    const int64_t floats = StateGradientFloats(size, call.dims.saved) +
                           SummarySize(size) * (splits - 1);
    return floats < ScratchSize(size) ? ScratchSize(size) : floats;
  }
  uint4* Gradients() const { return reinterpret_cast<uint4*>(memory); }
  Splits StateSplits(const Wkv7Call& call) const {
    const int64_t size = call.dims.head_size, heads = call.dims.batch * call.dims.heads;
    return {splits, memory + heads * StateGradientFloats(size, call.dims.saved),
            SummarySize(size)};
  }
};

cudaError_t Wkv7ChunkForward(cudaStream_t stream, const Wkv7ForwardCall& call,
                             const Splits& splits, float* inexact);

cudaError_t Wkv7ChunkBackward(cudaStream_t stream, const Wkv7BackwardCall& call,
                              const ChunkScratch& scratch, float* inexact);

// What the tokens of a head do to a state, S M + D, for decays that cannot go too far, those of
// Decay::kSigmoid. On every device with matrix units, whatever its shared memory.
cudaError_t Wkv7Summary(cudaStream_t stream, const Wkv7SummaryCall& call);

// Of the backward pass dinitial_state alone; needs neither k nor v nor the states.
cudaError_t Wkv7ReverseSummary(cudaStream_t stream, const Wkv7BackwardCall& call);

// The parts of the two passes; `inexact` is null where no decay can go too far.
cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7ForwardCall& call, const Splits& splits,
                     float* inexact);

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7BackwardCall& call,
                            const Splits& splits, uint4* gradients, float* inexact);

// All gradients but dinitial_state, from what the reverse scan has left.
cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7BackwardCall& call,
                              const uint4* gradients, const float* inexact);

}  // namespace rwkv_jax::cuda
