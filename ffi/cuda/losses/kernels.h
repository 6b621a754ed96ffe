// Losses on CUDA. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/losses.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const CrossEntropyCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const HeadCrossEntropyCall& call, const Device& device);

// Whether this build has code of the second one for the current device, one of compute capability 9.0.
bool HasHeadCrossEntropy();

}  // namespace rwkv_jax::cuda
