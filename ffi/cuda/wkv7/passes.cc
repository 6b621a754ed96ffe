// The passes of WKV7: which kernels run one after another.
#include "layers/kernels.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// dS behind the last tokens is known, and then each chunk finds dS of the one before it.
template <typename Call>
cudaError_t RunRelays(cudaStream_t stream, const Call& call, const Plan& plan, float* scratch) {
  Relays relays = {plan.SplitsIn(scratch), call.sequences, call.dims.batch, call.dims.tokens,
                   call.dims.heads};
  relays.rows = call.dims.value_size, relays.columns = call.dims.head_size;
  relays.size = MatrixHeadSize(call.dims);
  relays.start = call.dfinal_state, relays.end = call.dinitial_state;
  relays.rounded = reinterpret_cast<uint4*>(scratch + plan.gradients);
  relays.done = reinterpret_cast<uint32_t*>(scratch + plan.relays);
  relays.order = reinterpret_cast<int32_t*>(relays.done) + relays.Count();
  relays.chunks = call.dims.saved * (call.sequences.Given() ? 1 : call.dims.batch);
  // With few relays, blocks would wait for each other.
  relays.at_once = relays.Count() < 2 * plan.device.multiprocessors;
  cudaError_t error = Wkv7ReverseSplits(stream, call, relays.splits);
  if (error == cudaSuccess) error = BeginRelays(stream, relays);
  return error == cudaSuccess ? Wkv7Gradients(stream, call, relays) : error;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv7ForwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.matrix_units) return Wkv7Forward(stream, call, plan.few_heads);
  return Wkv7Scan(stream, call, plan.device, plan.SplitsIn(scratch));
}

cudaError_t Run(cudaStream_t stream, const Wkv7BackwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.matrix_units)
    return Wkv7Backward(stream, call, plan.device, plan.Replay(scratch, plan.splits));
  if (HasRelays(call.dtype, call.decay)) return RunRelays(stream, call, plan, scratch);
  uint4* const gradients = reinterpret_cast<uint4*>(scratch + plan.gradients);
  uint32_t* const steep =
      call.decay == Decay::kSigmoid ? nullptr : reinterpret_cast<uint32_t*>(scratch + plan.steep);
  cudaError_t error = Wkv7ReverseScan(stream, call, plan.device, plan.SplitsIn(scratch), gradients);
  if (error == cudaSuccess && steep != nullptr)
    error = cudaMemsetAsync(steep, 0, sizeof(*steep), stream);
  if (error == cudaSuccess) error = Wkv7Gradients(stream, call, gradients, steep);
  if (error == cudaSuccess && steep != nullptr)
    error = Wkv7SteepChunks(stream, call, plan.Replay(scratch, 1), gradients, steep);
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
  return RunRelays(stream, call, plan, scratch);
}

}  // namespace rwkv_jax::cuda
