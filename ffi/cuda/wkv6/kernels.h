// WKV6 and WKV5 on CUDA: their passes, and the kernels that these launch. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"
#include "rwkv_jax/wkv6.h"
#include "splits.h"

namespace rwkv_jax::cuda {

// --- The passes (passes.cc).

cudaError_t Run(cudaStream_t stream, const Wkv6ForwardCall& call, const Plan& plan, float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv6BackwardCall& call, const Plan& plan,
                float* scratch);

// What the tokens of a head do to a state, and, of the backward pass, dinitial_state alone, which needs
// neither k nor v nor the saved states. Both are computed on matrix units.
cudaError_t RunTransition(cudaStream_t stream, const Wkv6TransitionCall& call);
cudaError_t RunReverseTransition(cudaStream_t stream, const Wkv6BackwardCall& call);

// --- Kernels that go token by token, in float (recurrent.cu): any dtype, head sizes 16 to 128, any decay.

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kWkv6ReplayTokens = 8;

// The floats of scratch that the backward pass needs for one split of one head: the gradient of the
// state at its end, and the states inside one chunk.
__host__ __device__ constexpr int64_t Wkv6ScratchSize(int64_t head_size) {
  return kChunk / kWkv6ReplayTokens * head_size * head_size;
}

cudaError_t Wkv6Forward(cudaStream_t stream, const Wkv6ForwardCall& call);

// du, and the dw of WKV5, are partial sums, one for each split.
cudaError_t Wkv6Backward(cudaStream_t stream, const Wkv6BackwardCall& call, const Device& device,
                         const ReplayScratch& scratch);

// --- Kernels on matrix units (scan.cu, gradients.cu), any decay: 16-bit dtypes, head sizes 64 and 128, saved
// states in bfloat16; float32, head size 64, saved states in float32.

// A run of tokens takes a state S to S diag(F) + D. The transition of a split is D, which becomes the state
// at its end, and then F.
__host__ __device__ constexpr int64_t Wkv6TransitionSize(int64_t head_size) {
  return head_size * head_size + head_size;
}

// The bytes of shared memory that a block of any kernel of a pass needs at least, in each of the two files.
int64_t Wkv6ScanSharedMemory(Pass pass, Dtype dtype, int64_t head_size);
int64_t Wkv6GradientSharedMemory(Dtype dtype, int64_t head_size);

cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Splits& splits,
                     const Device& device);

// Of heads of 128, dv, dinitial_state and the gradients of the states at the ends of chunks, [B, N, H, V, K] of
// bfloat16. Of heads of 64, the gradients of the states at the ends of splits alone, as transitions.
cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call, const Splits& splits,
                            uint4* gradients);

// All other gradients, from what the reverse scan has left. du, and the dw of WKV5, are partial sums, one for
// each chunk of heads of 128, and one for each split of heads of 64.
cudaError_t Wkv6Gradients(cudaStream_t stream, const Wkv6BackwardCall& call, const Splits& splits,
                          const Device& device, uint4* gradients);

}  // namespace rwkv_jax::cuda
