// The WKV4 targets: what each one takes and gives, checked alike on all platforms.
#pragma once

#include <cstdint>

#include "rwkv_jax/operands.h"
#include "rwkv_jax/wkv4.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv4Fwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv4Bwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv4Step);

namespace rwkv_jax {

// Each Read function reads all operands and results of its target. The call may be used once
// Operands::Finish has returned no error.

namespace internal {

inline void ReadInputs(Operands& operands, const char* tokens, Wkv4Call& call) {
  call.w = operands.FloatArg("w", "SC");
  call.u = operands.FloatArg("u", "SC");
  call.k = operands.Arg("k", tokens);
  call.v = operands.Arg("v", tokens);
}

// The parts of a state.
inline Wkv4State<const float> StateArgs(Operands& operands, const char* const (&names)[3],
                                        const char* axes) {
  const float* const num = operands.FloatArg(names[0], axes);
  const float* const den = operands.FloatArg(names[1], axes);
  return {num, den, operands.FloatArg(names[2], axes)};
}

inline Wkv4State<float> StateRets(Operands& operands, const char* const (&names)[3],
                                  const char* axes) {
  float* const num = operands.FloatRet(names[0], axes);
  float* const den = operands.FloatRet(names[1], axes);
  return {num, den, operands.FloatRet(names[2], axes)};
}

inline void ReadSizes(Operands& operands, int64_t tokens, int64_t decay, Wkv4Call& call) {
  call.dims = {operands.Size('S'), tokens, operands.Size('C'), operands.Saved()};
  call.dtype = operands.dtype();
  call.decay = operands.DecayForm(decay, Decay::kExp);
}

}  // namespace internal

inline void ReadForward(Operands& operands, int64_t decay, Wkv4ForwardCall& call) {
  internal::ReadInputs(operands, "BTC", call);
  call.initial_state =
      internal::StateArgs(operands, {"initial_num", "initial_den", "initial_log_max"}, "SC");
  call.y = operands.Ret("y", "BTC");
  call.final_state = internal::StateRets(operands, {"final_num", "final_den", "final_log_max"}, "SC");
  call.states = internal::StateRets(operands, {"nums", "dens", "log_maxs"}, "BNC");
  operands.RowsArg(call.marks, call.sequences);
  internal::ReadSizes(operands, operands.Size('T'), decay, call);
  if (!operands.Saves()) call.states = {};
}

inline void ReadBackward(Operands& operands, int64_t decay, Wkv4BackwardCall& call) {
  internal::ReadInputs(operands, "BTC", call);
  call.states = internal::StateArgs(operands, {"nums", "dens", "log_maxs"}, "BNC");
  call.dy = operands.Arg("dy", "BTC");
  call.dfinal_state =
      internal::StateArgs(operands, {"dfinal_num", "dfinal_den", "dfinal_log_max"}, "SC");
  call.dw = operands.FloatRet("dw", "SPC");
  call.du = operands.FloatRet("du", "SPC");
  call.dk = operands.Ret("dk", "BTC");
  call.dv = operands.Ret("dv", "BTC");
  call.dinitial_state =
      internal::StateRets(operands, {"dinitial_num", "dinitial_den", "dinitial_log_max"}, "SC");
  call.partials = operands.Size('P');
  operands.RowsArg(call.marks, call.sequences);
  internal::ReadSizes(operands, operands.Size('T'), decay, call);
  operands.RequireSaved();
}

// The forward pass of one token.
inline void ReadStep(Operands& operands, int64_t decay, Wkv4ForwardCall& call) {
  internal::ReadInputs(operands, "BC", call);
  call.initial_state = internal::StateArgs(operands, {"num", "den", "log_max"}, "BC");
  call.y = operands.Ret("y", "BC");
  call.final_state = internal::StateRets(operands, {"num", "den", "log_max"}, "BC");
  call.states = {};
  internal::ReadSizes(operands, 1, decay, call);
}

}  // namespace rwkv_jax
