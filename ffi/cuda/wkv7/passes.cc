// The passes of WKV7: which kernels run one after another.
#include "layers/kernels.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Finds room for `inexact` and clears it, unless no chunk can decay too far.
cudaError_t ClearInexact(cudaStream_t stream, const Wkv7Call& call, const Plan& plan,
                         float* scratch, float*& inexact) {
  inexact = nullptr;
  if (call.decay == Decay::kSigmoid) return cudaSuccess;
  inexact = scratch + plan.inexact;
  return cudaMemsetAsync(inexact, 0, sizeof(float) * call.dims.batch * call.dims.heads, stream);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv7ForwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.matrix_units) return Wkv7Forward(stream, call, plan.few_heads);
  float* inexact;
  cudaError_t error = ClearInexact(stream, call, plan, scratch, inexact);
  if (error == cudaSuccess)
    error = Wkv7Scan(stream, call, plan.device, plan.SplitsIn(scratch), inexact);
  if (error == cudaSuccess && inexact != nullptr)
    error = Wkv7Forward(stream, call, plan.few_heads, inexact);
  return error;
}

cudaError_t Run(cudaStream_t stream, const Wkv7BackwardCall& call, const Plan& plan,
                float* scratch) {
  const auto replay = [&](int64_t splits, const float* only) {
    return Wkv7Backward(stream, call, plan.device, plan.Replay(scratch, splits), only);
  };
  if (!plan.matrix_units) return replay(plan.splits, nullptr);
  uint4* const gradients = reinterpret_cast<uint4*>(scratch + plan.gradients);
  float* inexact;
  cudaError_t error = ClearInexact(stream, call, plan, scratch, inexact);
  if (error == cudaSuccess)
    error = Wkv7ReverseScan(stream, call, plan.device, plan.SplitsIn(scratch), gradients, inexact);
  if (error == cudaSuccess) error = Wkv7Gradients(stream, call, gradients, inexact);
  // The kernels on matrix units no longer need their memory.
  if (error == cudaSuccess && inexact != nullptr) error = replay(1, inexact);
  return error;
}

cudaError_t Run(cudaStream_t stream, const Wkv7KeyedForwardCall& call, const Plan& plan,
                float* scratch) {
  Wkv7KeysForwardCall keys = {};
  keys.rows = call.dims.batch, keys.tokens = call.dims.tokens;
  keys.width = call.dims.heads * call.dims.head_size, keys.head_size = call.dims.head_size;
  keys.dtype = call.dtype, keys.parameters = call.parameters;
  keys.k = call.k, keys.rate = call.a, keys.r = call.r;
  keys.bonus = call.bonus, keys.inverse = call.inverse;
  const cudaError_t error = Run(stream, keys, plan.device);
  return error == cudaSuccess ? Wkv7Scan(stream, call, plan.device, plan.SplitsIn(scratch)) : error;
}

cudaError_t Run(cudaStream_t stream, const Wkv7KeyedBackwardCall& call, const Plan& plan,
                float* scratch) {
  uint4* const gradients = reinterpret_cast<uint4*>(scratch + plan.gradients);
  const cudaError_t error =
      Wkv7ReverseScan(stream, call, plan.device, plan.SplitsIn(scratch), gradients);
  return error == cudaSuccess ? Wkv7Gradients(stream, call, gradients) : error;
}

}  // namespace rwkv_jax::cuda
