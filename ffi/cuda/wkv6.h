// WKV6 and WKV5 on CUDA: what a handler asks of the kernels. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "frames.h"
#include "rwkv_jax/wkv6.h"

namespace rwkv_jax::cuda {

// --- In float (wkv6_recurrent.cu): any dtype, head sizes 16 to 128, any decay.

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kWkv6Tile = 8;

// Floats of scratch that the backward pass needs for one segment of one head: the gradient of the
// state at its end, and the states inside one chunk.
__host__ __device__ constexpr int64_t Wkv6ScratchSize(int64_t head_size) {
  return kChunk / kWkv6Tile * head_size * head_size;
}

cudaError_t Wkv6Forward(cudaStream_t stream, const Wkv6ForwardCall& call);

// Each segment gives a partial sum, and the partial sums beyond them are zeros; at least one segment.
// `scratch` is [B, H, segments, Wkv6ScratchSize(K)].
cudaError_t Wkv6Backward(cudaStream_t stream, const Wkv6BackwardCall& call, int64_t segments,
                         float* scratch);

// --- On matrix units (wkv6_scan.cu, wkv6_gradient.cu): 16-bit dtypes, head size 64, any decay, saved
// states in bfloat16. On a device with too little shared memory for them the kernels above do it all.

constexpr int kMatrixHeadSize = 64;

// The tokens of a head are shared out among `count` segments of whole frames. A run of tokens takes a
// state S to S diag(F) + D; the memory has, for each head and each segment but the last, first D, which
// becomes the state at the end of the segment, then F.
struct Wkv6Segments {
  int64_t count;
  float* memory;
  int64_t stride;  // floats for each head

  static constexpr int kState = kMatrixHeadSize * kMatrixHeadSize;

  static constexpr int64_t Size(int64_t count) { return (kState + kMatrixHeadSize) * (count - 1); }
#ifdef __CUDACC__
  __device__ int64_t Frames(int64_t frames) const { return (frames + count - 1) / count; }
  __device__ float* State(int64_t head, int64_t segment) const {
    return memory + head * stride + (kState + kMatrixHeadSize) * segment;
  }
  __device__ float* Factor(int64_t head, int64_t segment) const {
    return State(head, segment) + kState;
  }
#endif
};

// Scratch of the backward pass, [B, H, stride], or all of it that of the kernels above.
struct Wkv6ChunkScratch {
  float* memory;
  int64_t stride, segments;

  static int64_t Size(const Wkv6Call& call, int64_t segments) {
    const int64_t floats =
        FrameGradients::Size(kMatrixHeadSize, call.dims.saved) + Wkv6Segments::Size(segments);
    const int64_t least = Wkv6ScratchSize(kMatrixHeadSize);
    return floats < least ? least : floats;
  }
  FrameGradients Gradients() const { return {reinterpret_cast<uint4*>(memory), stride / 4}; }
  Wkv6Segments StateSegments(const Wkv6Call& call) const {
    return {segments, memory + FrameGradients::Size(kMatrixHeadSize, call.dims.saved), stride};
  }
};

cudaError_t Wkv6ChunkForward(cudaStream_t stream, const Wkv6ForwardCall& call,
                             const Wkv6Segments& segments);

// Gives a partial sum for each frame.
cudaError_t Wkv6ChunkBackward(cudaStream_t stream, const Wkv6BackwardCall& call,
                              const Wkv6ChunkScratch& scratch);

// What the tokens of a head do to a state, S diag(d) + D.
cudaError_t Wkv6Summary(cudaStream_t stream, const Wkv6SummaryCall& call);

// Of the backward pass dinitial_state alone; needs neither k nor v nor the states.
cudaError_t Wkv6ReverseSummary(cudaStream_t stream, const Wkv6BackwardCall& call);

// The parts of the two passes.
cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Wkv6Segments& segments);

cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call,
                            const Wkv6Segments& segments, const FrameGradients& gradients);

// All gradients but dinitial_state, from what the reverse scan has left.
cudaError_t Wkv6FrameBackward(cudaStream_t stream, const Wkv6BackwardCall& call,
                              const FrameGradients& gradients);

}  // namespace rwkv_jax::cuda
