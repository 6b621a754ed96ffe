// The passes of WKV7: which kernels run one after another.
#include "layers/kernels.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t stream, const Wkv7ForwardCall& call, const Plan& plan,
                float* scratch) {
  if (plan.matrix_units) return Wkv7Scan(stream, call, plan.device, plan.SplitsIn(scratch));
  const bool one_token = call.dims.tokens == 1 && !call.marks.Given() && !call.sequences.Given();
  return one_token && call.states == nullptr ? Wkv7Step(stream, call)
                                             : Wkv7Forward(stream, call, plan.few_heads);
}

// Whether a chunk may be steep.
bool HasSteepChunks(const Wkv7BackwardCall& call) { return call.decay != Decay::kSigmoid; }
bool HasSteepChunks(const Wkv7DeltaBackwardCall& call) { return !call.head_decay; }

// The backward pass on matrix units, of WKV7 or a form of it, with any decay.
template <typename Call>
cudaError_t RunBackward(cudaStream_t stream, const Call& call, const Plan& plan, float* scratch) {
  uint4* const gradients = reinterpret_cast<uint4*>(scratch + plan.gradients);
  uint32_t* const steep =
      HasSteepChunks(call) ? reinterpret_cast<uint32_t*>(scratch + plan.steep) : nullptr;
  cudaError_t error = Wkv7ReverseScan(stream, call, plan.device, plan.SplitsIn(scratch), gradients);
  if (error == cudaSuccess && steep != nullptr)
    error = cudaMemsetAsync(steep, 0, sizeof(*steep), stream);
  if (error == cudaSuccess) error = Wkv7Gradients(stream, call, plan.device, gradients, steep);
  if (error == cudaSuccess && steep != nullptr)
    error = Wkv7SteepChunks(stream, call, plan.device, plan.Replay(scratch, 1), gradients, steep);
  return error;
}

cudaError_t Run(cudaStream_t stream, const Wkv7BackwardCall& call, const Plan& plan,
                float* scratch) {
  return plan.matrix_units
             ? RunBackward(stream, call, plan, scratch)
             : Wkv7Backward(stream, call, plan.device, plan.Replay(scratch, plan.splits));
}

cudaError_t Run(cudaStream_t stream, const Wkv7DeltaForwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.matrix_units) return Wkv7Step(stream, call);
  return Wkv7Scan(stream, call, plan.device, plan.SplitsIn(scratch));
}

cudaError_t Run(cudaStream_t stream, const Wkv7DeltaBackwardCall& call, const Plan& plan,
                float* scratch) {
  return RunBackward(stream, call, plan, scratch);
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
  return error == cudaSuccess ? Wkv7Gradients(stream, call, plan.device, gradients) : error;
}

}  // namespace rwkv_jax::cuda
