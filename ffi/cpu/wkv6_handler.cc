// WKV5 and WKV6 on CPUs: from XLA's operands to the kernels, which they share.
#include "wkv6.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv6_calls.h"

namespace rwkv_jax::cpu {
namespace {

template <bool kConstantDecay>
ffi::Error Forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5" : "wkv6";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call, {call.y});
  return RunForward<Wkv6Kernels>(op, pool, call);
}

template <bool kConstantDecay>
ffi::Error Backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5 backward" : "wkv6 backward";
  Operands operands(op, args, rets);
  Wkv6BackwardCall call;
  call.constant_decay = kConstantDecay;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  operands.Require(call.partials == 1, "du has P = ", call.partials, "; expected 1");
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call, {call.dr, call.dk, call.dv});
  if (!kConstantDecay) ClearOutside(operands, call, {call.dw});
  return RunBackward<Wkv6Kernels>(op, pool, call);
}

template <bool kConstantDecay>
ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  const char* const op = kConstantDecay ? "wkv5_step" : "wkv6_step";
  Operands operands(op, args, rets);
  Wkv6ForwardCall call;
  call.constant_decay = kConstantDecay;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return RunForward<Wkv6Kernels>(op, pool, call);
}

}  // namespace
}  // namespace rwkv_jax::cpu

RWKV_JAX_HANDLER(Wkv5Fwd, rwkv_jax::cpu::Forward<true>, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv5Bwd, rwkv_jax::cpu::Backward<true>, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv5Step, rwkv_jax::cpu::Step<true>, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv6Fwd, rwkv_jax::cpu::Forward<false>, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv6Bwd, rwkv_jax::cpu::Backward<false>, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv6Step, rwkv_jax::cpu::Step<false>, rwkv_jax::cpu::Binding());
