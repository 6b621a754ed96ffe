// WKV4 on CUDA: its passes. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"
#include "rwkv_jax/wkv4.h"

namespace rwkv_jax::cuda {

// Splits of a sequence are whole chunks and run side by side. Each split but the last leaves what it
// hands on in scratch: so many floats for each channel.
constexpr int64_t kWkv4ForwardTransition = 3, kWkv4BackwardTransition = 4;

cudaError_t Run(cudaStream_t stream, const Wkv4ForwardCall& call, const Plan& plan, float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv4BackwardCall& call, const Plan& plan,
                float* scratch);

}  // namespace rwkv_jax::cuda
