// The passes of WKV6 and WKV5: which kernels run one after another.
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {
namespace {

cudaError_t FindGradients(cudaStream_t stream, const Wkv6BackwardCall& call, const Plan& plan,
                          float* scratch) {
  if (!plan.matrix_units)
    return Wkv6Backward(stream, call, plan.device, plan.Replay(scratch, plan.splits));
  uint4* const gradients = reinterpret_cast<uint4*>(scratch + plan.gradients);
  const cudaError_t error = Wkv6ReverseScan(stream, call, plan.SplitsIn(scratch), gradients);
  return error == cudaSuccess
             ? Wkv6Gradients(stream, call, plan.SplitsIn(scratch), plan.device, gradients)
             : error;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv6ForwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.matrix_units) return Wkv6Forward(stream, call);
  return Wkv6Scan(stream, call, plan.SplitsIn(scratch), plan.device);
}

cudaError_t Run(cudaStream_t stream, const Wkv6BackwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.adds_up) return FindGradients(stream, call, plan, scratch);
  // On matrix units the partial sums of sequences of different lengths are counted by chunks.
  const Sequences by_chunk = plan.matrix_units ? call.sequences : Sequences{};
  const int64_t columns = call.dims.heads * call.dims.head_size;
  const int64_t count = by_chunk.Given() ? call.dims.saved : call.dims.batch * plan.partials;
  Wkv6BackwardCall partial = call;
  partial.du = scratch + plan.sums;
  if (call.constant_decay) partial.dw = partial.du + count * columns;
  const cudaError_t error = FindGradients(stream, partial, plan, scratch);
  if (error != cudaSuccess) return error;
  const PartialSums u = {partial.du, call.du};
  if (!call.constant_decay)
    return SumPartials(stream, call.dims.batch, by_chunk, plan.partials, columns, {u},
                       plan.chunks_per_partial);
  const PartialSums w = {static_cast<float*>(partial.dw), static_cast<float*>(call.dw)};
  return SumPartials(stream, call.dims.batch, by_chunk, plan.partials, columns, {u, w},
                     plan.chunks_per_partial);
}

}  // namespace rwkv_jax::cuda
