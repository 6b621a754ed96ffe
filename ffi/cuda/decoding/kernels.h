// The step of a whole block on CUDA. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/decoding.h"

namespace rwkv_jax::cuda {

class LaunchChain;

cudaError_t Run(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device);

// Several rows of 16-bit elements: all launches, and what stands between the products that give r, k, v and
// the low-rank maps and the output product, wkv7 included.
cudaError_t RunOnMatrixUnits(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);
cudaError_t StepSummedHeads(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);

// Other rows, up to kRowsAtOnce of them, in five launches.

// Layer normalisation, token shift and mixing, the products that give r, k and v, and the first product
// of each low-rank map.
cudaError_t ProjectTokens(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);
// What stands between these and the output product, wkv7 included.
cudaError_t StepHeads(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);
// The output product and the sum with the block's input.
cudaError_t ReadTokens(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);
// Layer normalisation, token shift, mixing and the key product of the channel mixing.
cudaError_t ProjectChannels(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);
// Its value product, and the sum that leaves the block.
cudaError_t ReadChannels(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device);

}  // namespace rwkv_jax::cuda
