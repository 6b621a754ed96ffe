// Losses on CUDA. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/losses.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const CrossEntropyCall& call, const Device& device);
// If HasHopperCode (current_device.h).
cudaError_t Run(cudaStream_t stream, const HeadCrossEntropyCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
