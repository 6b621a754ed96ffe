// The WKV5 and WKV6 targets: what each one takes and gives, checked alike on all platforms.
#pragma once

#include <cstdint>

#include "rwkv_jax/operands.h"
#include "rwkv_jax/wkv6.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5Fwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5Bwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv5Step);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6Fwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6Bwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv6Step);

namespace rwkv_jax {

// Each Read function reads all operands and results of its target. The call, in which
// `constant_decay` is set before, may be used once Operands::Finish has returned no error.

namespace internal {

inline const void* ReadDecays(Operands& operands, const char* keys, bool constant) {
  return constant ? operands.FloatArg("w", "SHK") : operands.Arg("w", keys);
}

inline void ReadInputs(Operands& operands, const char* keys, const char* values, Wkv6Call& call) {
  call.r = operands.Arg("r", keys);
  call.w = ReadDecays(operands, keys, call.constant_decay);
  call.k = operands.Arg("k", keys);
  call.v = operands.Arg("v", values);
  call.u = operands.FloatArg("u", "SHK");
}

inline void ReadSizes(Operands& operands, int64_t tokens, int64_t decay, int64_t max_head_size,
                      Wkv6Call& call) {
  call.dims = operands.Heads(tokens, max_head_size);
  call.dtype = operands.dtype();
  call.decay = operands.DecayForm(decay, Decay::kExp);
}

}  // namespace internal

inline void ReadForward(Operands& operands, int64_t decay, int64_t max_head_size,
                        Wkv6ForwardCall& call) {
  internal::ReadInputs(operands, "BTHK", "BTHV", call);
  call.initial_state = operands.FloatArg("initial_state", "SHVK");
  call.y = operands.Ret("y", "BTHV");
  call.final_state = operands.FloatRet("final_state", "SHVK");
  call.states = operands.StatesRet("states", "BNHVK", call.states_dtype);
  operands.RowsArg(call.marks, call.sequences);
  internal::ReadSizes(operands, operands.Size('T'), decay, max_head_size, call);
  if (!operands.Saves()) call.states = nullptr;
}

inline void ReadBackward(Operands& operands, int64_t decay, int64_t max_head_size,
                         Wkv6BackwardCall& call, const char* partials = "SPHK") {
  internal::ReadInputs(operands, "BTHK", "BTHV", call);
  call.states = operands.StatesArg("states", "BNHVK", call.states_dtype);
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "SHVK");
  call.dr = operands.Ret("dr", "BTHK");
  call.dw = call.constant_decay ? operands.FloatRet("dw", partials) : operands.Ret("dw", "BTHK");
  call.dk = operands.Ret("dk", "BTHK");
  call.dv = operands.Ret("dv", "BTHV");
  call.du = operands.FloatRet("du", partials);
  call.dinitial_state = operands.FloatRet("dinitial_state", "SHVK");
  call.partials = operands.Size('P');
  operands.RowsArg(call.marks, call.sequences);
  internal::ReadSizes(operands, operands.Size('T'), decay, max_head_size, call);
  operands.RequireSaved();
}

// The forward pass of one token.
inline void ReadStep(Operands& operands, int64_t decay, int64_t max_head_size,
                     Wkv6ForwardCall& call) {
  internal::ReadInputs(operands, "BHK", "BHV", call);
  call.initial_state = operands.FloatArg("state", "BHVK");
  call.y = operands.Ret("y", "BHV");
  call.final_state = operands.FloatRet("state", "BHVK");
  call.states = nullptr;
  call.states_dtype = Dtype::kF32;
  internal::ReadSizes(operands, 1, decay, max_head_size, call);
}

}  // namespace rwkv_jax
