// WKV7 on CUDA: what a handler asks of the kernels. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rwkv_jax/wkv7.h"

namespace rwkv_jax::cuda {

constexpr int64_t kMaxHeadSize = 128;

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kBlock = 4;

// Floats of scratch that the backward pass needs for one segment of one head: the gradient of the
// state at its end, the states inside one chunk, and S_{t-1} a_t for each token of the chunk.
__host__ __device__ constexpr int64_t ScratchSize(int64_t head_size) {
  return kChunk / kBlock * head_size * head_size + kChunk * head_size;
}

cudaError_t Wkv7Forward(cudaStream_t stream, const Wkv7ForwardCall& call);

// Any number of segments >= 1; `scratch` is [B, H, segments, ScratchSize(K)].
cudaError_t Wkv7Backward(cudaStream_t stream, const Wkv7BackwardCall& call, int64_t segments,
                         float* scratch);

}  // namespace rwkv_jax::cuda
