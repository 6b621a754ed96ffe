// WKV4 on CPUs: from XLA's operands to the kernels.
#include "wkv4.h"

#include <cstdint>

#include "handler.h"
#include "rwkv_jax/wkv4_calls.h"

namespace rwkv_jax::cpu {
namespace {

// Calls kernel(call, sequence, first_channel) for all blocks of channels.
template <typename Call>
ffi::Error RunBlocks(const char* op, ffi::ThreadPool& pool, const Call& call,
                     void (*kernel)(const Call&, int64_t, int64_t)) {
  const Wkv4Dims& dims = call.dims;
  const int64_t blocks = (dims.channels + kChannels - 1) / kChannels;
  // With its exponentials, a token of a channel takes about as long as 16 elements of a matrix.
  const int64_t workers = Workers(pool, 16 * AllTokens(call) * dims.channels);
  return Run(op, pool, workers, dims.batch * blocks, 0, [&](int64_t item, float*) {
    kernel(call, item / blocks, item % blocks * kChannels);
  });
}

ffi::Error Forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv4", args, rets);
  Wkv4ForwardCall call;
  ReadForward(operands, decay, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call.sequences, call.dims.channels, {call.y});
  return RunBlocks("wkv4", pool, call, Best<Wkv4Kernels>().forward);
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv4 backward", args, rets);
  Wkv4BackwardCall call;
  ReadBackward(operands, decay, call);
  operands.Require(call.partials == 1, "dw has P = ", call.partials, "; expected 1");
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  ClearOutside(operands, call.sequences, call.dims.channels, {call.dk, call.dv});
  return RunBlocks("wkv4 backward", pool, call, Best<Wkv4Kernels>().backward);
}

ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv4_step", args, rets);
  Wkv4ForwardCall call;
  ReadStep(operands, decay, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return RunBlocks("wkv4_step", pool, call, Best<Wkv4Kernels>().forward);
}

}  // namespace
}  // namespace rwkv_jax::cpu

RWKV_JAX_HANDLER(Wkv4Fwd, rwkv_jax::cpu::Forward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv4Bwd, rwkv_jax::cpu::Backward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv4Step, rwkv_jax::cpu::Step, rwkv_jax::cpu::Binding());
