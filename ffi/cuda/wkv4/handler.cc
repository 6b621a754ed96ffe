// WKV4 on CUDA: from XLA's operands to the kernels.
#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv4_calls.h"
#include "sequences_handler.h"
#include "wkv4/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Scratch has the size for all splits but one; `splits` gets how many there are.
float* ReadScratch(Operands& operands, int64_t summary, int64_t& splits) {
  float* const scratch = operands.FloatRet("scratch", "SZXC");
  splits = operands.Size('Z') + 1;
  operands.Require(splits <= kMaxWkv4Splits && operands.Size('X') == summary,
                   "scratch has Z = ", splits - 1, " and X = ", operands.Size('X'),
                   "; expected Z < ", kMaxWkv4Splits, " and X = ", summary);
  return scratch;
}

ffi::Error Forward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv4", args, rets);
  Wkv4ForwardCall call;
  ReadForward(operands, decay, call);
  int64_t splits;
  float* const scratch = ReadScratch(operands, kWkv4ForwardSummary, splits);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error = ClearOutside(stream, operands, call.sequences, call.dims.channels, {call.y});
  if (error == cudaSuccess) error = Wkv4Forward(stream, call, splits, scratch);
  return Launched("wkv4", error);
}

ffi::Error Backward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv4 backward", args, rets);
  Wkv4BackwardCall call;
  ReadBackward(operands, decay, call);
  int64_t splits;
  float* const scratch = ReadScratch(operands, kWkv4BackwardSummary, splits);
  operands.Require(call.partials == splits, "dw has P = ", call.partials, "; expected ", splits,
                   ", one more than scratch has Z");
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  cudaError_t error =
      ClearOutside(stream, operands, call.sequences, call.dims.channels, {call.dk, call.dv});
  if (error == cudaSuccess) error = Wkv4Backward(stream, call, scratch);
  return Launched("wkv4 backward", error);
}

ffi::Error Step(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv4_step", args, rets);
  Wkv4ForwardCall call;
  ReadStep(operands, decay, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv4_step", Wkv4Step(stream, call));
}

}  // namespace
}  // namespace rwkv_jax::cuda

RWKV_JAX_CUDA_HANDLER(Wkv4Fwd, rwkv_jax::cuda::Forward, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv4Bwd, rwkv_jax::cuda::Backward, rwkv_jax::cuda::Binding());
RWKV_JAX_CUDA_HANDLER(Wkv4Step, rwkv_jax::cuda::Step, rwkv_jax::cuda::Binding());
