// WKV7 on CUDA: from XLA's operands to the kernels.
#include "wkv7.h"

#include <string>

#include "rwkv_jax/wkv7_calls.h"

namespace rwkv_jax::cuda {
namespace {

ffi::Error Launched(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

ffi::Error Forward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7", Wkv7Forward(stream, call));
}

ffi::Error Step(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv7_step", args, rets);
  Wkv7ForwardCall call;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7_step", Wkv7Forward(stream, call));
}

ffi::Error Backward(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  float* const scratch = operands.FloatRet("scratch", "BHSX");
  const int64_t segments = operands.Size('S'), floats = ScratchSize(call.dims.head_size);
  operands.Require(segments >= 1 && operands.Size('X') == floats, "scratch has ", segments,
                   " segments of ", operands.Size('X'), " floats; expected at least 1 of ", floats);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return Launched("wkv7 backward", Wkv7Backward(stream, call, segments, scratch));
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("decay");
}

}  // namespace
}  // namespace rwkv_jax::cuda

// The handlers only launch kernels, so they may be part of a CUDA graph.
RWKV_JAX_HANDLER(Wkv7Fwd, rwkv_jax::cuda::Forward, rwkv_jax::cuda::Binding(),
                 {rwkv_jax::ffi::Traits::kCmdBufferCompatible});
RWKV_JAX_HANDLER(Wkv7Bwd, rwkv_jax::cuda::Backward, rwkv_jax::cuda::Binding(),
                 {rwkv_jax::ffi::Traits::kCmdBufferCompatible});
RWKV_JAX_HANDLER(Wkv7Step, rwkv_jax::cuda::Step, rwkv_jax::cuda::Binding(),
                 {rwkv_jax::ffi::Traits::kCmdBufferCompatible});
