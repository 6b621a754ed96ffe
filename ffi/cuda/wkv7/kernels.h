// WKV7 on CUDA: its passes, and the kernels that these launch. Pointers are to device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"
#include "rwkv_jax/wkv7.h"
#include "splits.h"

namespace rwkv_jax::cuda {

// --- The passes (passes.cc).

cudaError_t Run(cudaStream_t stream, const Wkv7ForwardCall& call, const Plan& plan, float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv7BackwardCall& call, const Plan& plan,
                float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv7KeyedForwardCall& call, const Plan& plan,
                float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv7KeyedBackwardCall& call, const Plan& plan,
                float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv7DeltaForwardCall& call, const Plan& plan,
                float* scratch);
cudaError_t Run(cudaStream_t stream, const Wkv7DeltaBackwardCall& call, const Plan& plan,
                float* scratch);

// What the tokens of a head do to a state, and, of the backward pass, dinitial_state alone, which needs
// neither k nor v nor the saved states. Both are computed on matrix units.
cudaError_t RunTransition(cudaStream_t stream, const Wkv7TransitionCall& call);
cudaError_t RunReverseTransition(cudaStream_t stream, const Wkv7BackwardCall& call);

// --- Kernels that go token by token, in float (recurrent.cu): any dtype, head sizes 16 to 128, any decay.

// Tokens between two states that the backward pass keeps in its scratch.
constexpr int64_t kReplayTokens = 4;
constexpr int kChunkQuads = kChunk / kReplayTokens;

// The floats of scratch that the backward pass needs for one split of one head: the gradient of the
// state at its end, the states inside one chunk, and S_{t-1} a_t for each token of the chunk. For large
// heads it is one state more, since two states inside a quad may be kept where that gradient was.
__host__ __device__ constexpr int64_t ScratchSize(int64_t head_size) {
  const int64_t states = kChunkQuads + (head_size > 64 ? 1 : 0);
  return states * head_size * head_size + kChunk * head_size;
}

// One token of each head, without marks and sequences, and of which no state is saved (step.cu).
cudaError_t Wkv7Step(cudaStream_t stream, const Wkv7ForwardCall& call);
cudaError_t Wkv7Step(cudaStream_t stream, const Wkv7DeltaForwardCall& call);

// `few_heads` is that of the plan.
cudaError_t Wkv7Forward(cudaStream_t stream, const Wkv7ForwardCall& call, bool few_heads);
cudaError_t Wkv7Backward(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                         const ReplayScratch& scratch);
// The steep chunks that Wkv7Gradients has left, in at most `scratch.heads` blocks.
cudaError_t Wkv7SteepChunks(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                            const ReplayScratch& scratch, const uint4* gradients,
                            const uint32_t* steep);
cudaError_t Wkv7SteepChunks(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                            const Device& device, const ReplayScratch& scratch,
                            const uint4* gradients, const uint32_t* steep);

// --- Kernels on matrix units (scan.cu, gradients.cu): any decay; 16-bit dtypes, K and V in multiples of kHeadPiece up
// to 128, saved states in bfloat16; in calls that are not keyed also float32, K and V of 64, saved states in float32.
// There are kernels for heads of 64 and of 128, which fill up others with zeros where they have them on the chip,
// and in the scratch. In calls that are not keyed heads may share keys (HeadDims): a block then reads those of its key
// head, and writes the gradients of its own head.

constexpr int64_t MatrixHeadSize(int64_t keys, int64_t values) {
  return keys <= 64 && values <= 64 ? 64 : 128;
}
constexpr int64_t MatrixHeadSize(const HeadDims& dims) {
  return MatrixHeadSize(dims.head_size, dims.value_size);
}
// Whether a head fills those kernels. If it does not, the kernels for calls with marks take it.
constexpr bool FillsMatrixHead(const HeadDims& dims) {
  const int64_t size = MatrixHeadSize(dims);
  return dims.head_size == size && dims.value_size == size;
}

// A run of tokens takes a state S to S M + D. The transition of a split is D, which becomes the state at its
// end, and then M.
constexpr int64_t TransitionSize(int64_t head_size) { return 2 * head_size * head_size; }

// The bytes of shared memory that a block of any kernel of a pass needs, in each of the two files.
int64_t Wkv7ScanSharedMemory(Pass pass, Dtype dtype, int64_t head_size, Decay decay);
int64_t Wkv7GradientSharedMemory(Dtype dtype, int64_t head_size);

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7ForwardCall& call, const Device& device,
                     const Splits& splits);
cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7KeyedForwardCall& call, const Device& device,
                     const Splits& splits);
cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7DeltaForwardCall& call, const Device& device,
                     const Splits& splits);

// Leaves the gradients of the states at the ends of chunks, [B, N, H, V, K] in the dtype of saved states with
// MatrixHeadSize for V and K.
cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                            const Splits& splits, uint4* gradients);
cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7KeyedBackwardCall& call,
                            const Device& device, const Splits& splits, uint4* gradients);
cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                            const Device& device, const Splits& splits, uint4* gradients);

// All gradients but dinitial_state, from what the reverse scan has left. A chunk is steep if it decays too
// far for the arithmetic of this kernel, as none can of Decay::kSigmoid. `steep` gets, behind their
// count, which is 0 before, the numbers of those chunks in [B, N, H]; nothing of them is written.
cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                          const uint4* gradients, uint32_t* steep);

cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7KeyedBackwardCall& call,
                          const Device& device, const uint4* gradients);
cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                          const Device& device, const uint4* gradients, uint32_t* steep);
// The same of a call with decays of heads (head_decay_gradients.cu), of which no chunk is steep.
cudaError_t Wkv7HeadDecayGradients(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                                   const uint4* gradients);

}  // namespace rwkv_jax::cuda
