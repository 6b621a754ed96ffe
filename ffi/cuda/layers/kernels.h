// The layer functions on CUDA: their passes. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

// The largest width that one block can have.
constexpr int64_t kMaxLayerWidth = 4096;

// The grids have a block of each row for each 16 tokens or more.
constexpr int64_t kMaxRows = 65535, kMaxTokens = 16 * kMaxRows;

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const NormShiftMixBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const Wkv7KeysForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const Wkv7KeysBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ValueResidualForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ValueResidualBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ReadOutForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ReadOutBackwardCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
