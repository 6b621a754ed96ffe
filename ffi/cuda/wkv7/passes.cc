// WKV7 on matrix units: which kernels run one after another.
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

bool IsEmpty(const HeadDims& dims) { return dims.batch * dims.heads == 0; }

// `inexact` ready for the kernels, or null where no chunk can decay too far.
cudaError_t Prepare(cudaStream_t stream, const Wkv7Call& call, float*& inexact) {
  if (call.decay == Decay::kSigmoid) {
    inexact = nullptr;
    return cudaSuccess;
  }
  return cudaMemsetAsync(inexact, 0, sizeof(float) * call.dims.batch * call.dims.heads, stream);
}

}  // namespace

cudaError_t Wkv7ChunkForward(cudaStream_t stream, const Wkv7ForwardCall& call,
                             const Splits& splits, float* inexact) {
  if (IsEmpty(call.dims)) return cudaSuccess;
  cudaError_t error = Prepare(stream, call, inexact);
  if (error == cudaSuccess) error = Wkv7Scan(stream, call, splits, inexact);
  if (error == cudaErrorNotSupported) return Wkv7Forward(stream, call);
  if (error == cudaSuccess && inexact != nullptr) error = Wkv7Forward(stream, call, inexact);
  return error;
}

cudaError_t Wkv7ChunkBackward(cudaStream_t stream, const Wkv7BackwardCall& call,
                              const ChunkScratch& scratch, float* inexact) {
  if (IsEmpty(call.dims)) return cudaSuccess;
  uint4* const gradients = scratch.Gradients();
  cudaError_t error = Prepare(stream, call, inexact);
  if (error == cudaSuccess)
    error = Wkv7ReverseScan(stream, call, scratch.StateSplits(call), gradients, inexact);
  if (error == cudaSuccess) error = Wkv7Gradients(stream, call, gradients, inexact);
  // Heads that are not done above have no use for the rest of the scratch, so it is theirs.
  const auto recurrent = [&](const float* only) {
    const int64_t heads = call.dims.batch * call.dims.heads;
    return Wkv7Backward(stream, call, {scratch.memory, heads, 1, scratch.stride}, only);
  };
  if (error == cudaErrorNotSupported) return recurrent(nullptr);
  if (error == cudaSuccess && inexact != nullptr) error = recurrent(inexact);
  return error;
}

}  // namespace rwkv_jax::cuda
