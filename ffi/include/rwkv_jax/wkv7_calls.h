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
  const int64_t keys = operands.Size('K'), values = operands.Size('V');
  const bool power_of_two = (keys & (keys - 1)) == 0;
  operands.Require(keys == values && power_of_two && keys >= 16 && keys <= max_head_size,
                   "r and v have K = ", keys, " and V = ", values,
                   "; expected K = V, a power of two from 16 to ", max_head_size);
  operands.Require(decay >= 0 && decay <= 2, "decay is ", decay,
                   "; expected 0 (log), 1 (exp) or 2 (sigmoid)");
  call.dims = {operands.Size('B'), tokens, operands.Size('H'), keys, operands.Size('N')};
  call.dtype = operands.dtype();
  call.decay = static_cast<Decay>(decay);
}

inline int64_t Chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

}  // namespace internal

inline void ReadForward(Operands& operands, int64_t decay, int64_t max_head_size,
                        Wkv7ForwardCall& call) {
  internal::ReadInputs(operands, "BTHK", "BTHV", call);
  call.initial_state = operands.FloatArg("initial_state", "BHVK");
  call.y = operands.Ret("y", "BTHV");
  call.final_state = operands.FloatRet("final_state", "BHVK");
  call.states = operands.StatesRet("states", "BNHVK", call.states_dtype);
  const int64_t tokens = operands.Size('T'), saved = operands.Size('N');
  internal::ReadSizes(operands, tokens, decay, max_head_size, call);
  operands.Require(saved == 0 || saved == internal::Chunks(tokens), "states has N = ", saved,
                   "; expected 0 or ", internal::Chunks(tokens), " for ", tokens, " tokens");
  if (saved == 0) call.states = nullptr;
}

inline void ReadBackward(Operands& operands, int64_t decay, int64_t max_head_size,
                         Wkv7BackwardCall& call) {
  internal::ReadInputs(operands, "BTHK", "BTHV", call);
  call.states = operands.StatesArg("states", "BNHVK", call.states_dtype);
  call.dy = operands.Arg("dy", "BTHV");
  call.dfinal_state = operands.FloatArg("dfinal_state", "BHVK");
  call.dr = operands.Ret("dr", "BTHK");
  call.dw = operands.Ret("dw", "BTHK");
  call.dk = operands.Ret("dk", "BTHK");
  call.dv = operands.Ret("dv", "BTHV");
  call.da = operands.Ret("da", "BTHK");
  call.db = operands.Ret("db", "BTHK");
  call.dinitial_state = operands.FloatRet("dinitial_state", "BHVK");
  const int64_t tokens = operands.Size('T'), saved = operands.Size('N');
  internal::ReadSizes(operands, tokens, decay, max_head_size, call);
  operands.Require(saved == internal::Chunks(tokens), "states has N = ", saved, "; expected ",
                   internal::Chunks(tokens), " for ", tokens, " tokens");
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
