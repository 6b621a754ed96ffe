// The products of a channel mixing on CUDA, if HasHopperCode (current_device.h). Pointers are to device
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/feed_forward.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const SquaredReluCall& call, const Device& device);
cudaError_t Run(cudaStream_t stream, const SquaredReluGradientCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
