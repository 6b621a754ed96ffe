// The layer functions on CUDA: their passes. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>

#include "plan.h"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

// The largest width that one block can have.
constexpr int64_t kMaxLayerWidth = 4096;

// The tokens of all rows: a kernel has a block for one or more of them.
constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const NormShiftMixBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const Wkv7KeysForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const Wkv7KeysBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ValueResidualForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ValueResidualBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ReadOutForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const ReadOutBackwardCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
