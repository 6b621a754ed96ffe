// WKV7 on CPUs: from XLA's operands to the kernels.
#include "wkv7.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv7_calls.h"

namespace rwkv_jax::cpu {
namespace {

ffi::Error Forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call, {call.y});
  return RunForward<Wkv7Kernels>("wkv7", pool, call);
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call, {call.dr, call.dw, call.dk, call.dv, call.da, call.db});
  return RunBackward<Wkv7Kernels>("wkv7 backward", pool, call);
}

ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv7_step", args, rets);
  Wkv7ForwardCall call;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return RunForward<Wkv7Kernels>("wkv7_step", pool, call);
}

}  // namespace
}  // namespace rwkv_jax::cpu

RWKV_JAX_HANDLER(Wkv7Fwd, rwkv_jax::cpu::Forward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv7Bwd, rwkv_jax::cpu::Backward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv7Step, rwkv_jax::cpu::Step, rwkv_jax::cpu::Binding());
