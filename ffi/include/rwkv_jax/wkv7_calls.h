// The WKV7 targets: what each one takes and gives, checked alike on all platforms.
#pragma once

#include <cstdint>

#include "rwkv_jax/operands.h"
#include "rwkv_jax/wkv7.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7Fwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7Bwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Wkv7Step);

namespace rwkv_jax {

// Each Read function reads all operands and results of its target. The call may be used once
// Operands::Finish has returned no error.

namespace internal {

inline void ReadInputs(Operands& operands, const char* keys, const char* values, Wkv7Call& call) {
  call.r = operands.Arg("r", keys);
  call.w = operands.Arg("w", keys);
  call.k = operands.Arg("k", keys);
  call.v = operands.Arg("v", values);
  call.a = operands.Arg("a", keys);
  call.b = operands.Arg("b", keys);
}

inline void ReadSizes(Operands& operands, int64_t tokens, int64_t decay, int64_t max_head_size,
                      Wkv7Call& call) {
  call.dims = operands.Heads(tokens, max_head_size);
  call.dtype = operands.dtype();
  call.decay = operands.DecayForm(decay, Decay::kSigmoid);
}

}  // namespace internal

inline void ReadForward(Operands& operands, int64_t decay, int64_t max_head_size,
                        Wkv7ForwardCall& call) {
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
                         Wkv7BackwardCall& call) {
  internal::ReadInputs(operands, "BTHK", "BTHV", call);
  call.states = operands.StatesArg("states", "BNHVK", call.states_dtype);
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "SHVK");
  call.dr = operands.Ret("dr", "BTHK");
  call.dw = operands.Ret("dw", "BTHK");
  call.dk = operands.Ret("dk", "BTHK");
  call.dv = operands.Ret("dv", "BTHV");
  call.da = operands.Ret("da", "BTHK");
  call.db = operands.Ret("db", "BTHK");
  call.dinitial_state = operands.FloatRet("dinitial_state", "SHVK");
  operands.RowsArg(call.marks, call.sequences);
  internal::ReadSizes(operands, operands.Size('T'), decay, max_head_size, call);
  operands.RequireSaved();
}

// The forward pass of one token.
inline void ReadStep(Operands& operands, int64_t decay, int64_t max_head_size,
                     Wkv7ForwardCall& call) {
  internal::ReadInputs(operands, "BHK", "BHV", call);
  call.initial_state = operands.FloatArg("state", "BHVK");
  call.y = operands.Ret("y", "BHV");
  call.final_state = operands.FloatRet("state", "BHVK");
  call.states = nullptr;
  call.states_dtype = Dtype::kF32;
  internal::ReadSizes(operands, 1, decay, max_head_size, call);
}

}  // namespace rwkv_jax
