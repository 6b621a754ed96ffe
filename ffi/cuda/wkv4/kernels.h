// WKV4 on CUDA: what a handler asks of the kernels. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rwkv_jax/wkv4.h"

namespace rwkv_jax::cuda {

// A sequence is split into splits of whole chunks, which run side by side; what they hand on they
// leave in `scratch`, kWkv4Summary * C floats for each sequence and each split but one.
constexpr int64_t kWkv4ForwardSummary = 3, kWkv4BackwardSummary = 4;
constexpr int64_t kMaxWkv4Splits = 65535;  // of the second axis of a grid

cudaError_t Wkv4Forward(cudaStream_t stream, const Wkv4ForwardCall& call, int64_t splits,
                        float* scratch);

// As many splits as partials.
cudaError_t Wkv4Backward(cudaStream_t stream, const Wkv4BackwardCall& call, float* scratch);

// One token; the final state may be the initial state.
cudaError_t Wkv4Step(cudaStream_t stream, const Wkv4ForwardCall& call);

}  // namespace rwkv_jax::cuda
