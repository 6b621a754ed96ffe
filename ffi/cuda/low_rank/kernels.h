// The products of low-rank maps on CUDA, for GPUs of compute capability 9.0 alone. Pointers are to device
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/low_rank.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const LowRankForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const LowRankBackwardCall& call, const Device& device);
// If HasTiledProducts (products/kernels.h).
cudaError_t Run(cudaStream_t stream, const LowRankMapsCall& call, const Device& device);

// Whether this build has code of a map alone for the current device.
bool HasLowRank();

}  // namespace rwkv_jax::cuda
