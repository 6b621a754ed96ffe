// The products of low-rank maps on CUDA, if HasHopperCode (current_device.h). Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/low_rank.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const LowRankForwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const LowRankBackwardCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const LowRankMapsCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
