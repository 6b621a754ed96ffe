// The target rwkv_wkv7_keyed_bwd_v1: the backward pass of WKV7 and, from what it gives, that of wkv7_keys.
#pragma once

#include "layers/kernels.h"
#include "rwkv_jax/operators.h"

namespace rwkv_jax::cuda {

// Operands and results are those of rwkv_wkv7_bwd_v2, with those of wkv7_keys behind them. Its dk, da and dr
// are the results dk, drate and dr, and db is room for a cotangent that need not be written.
struct KeyedWkv7 : Wkv7 {
  using BackwardCall = Wkv7KeyedBackwardCall;
};

// Reads what stands behind the operands and results of an operator, which `call` has: here nothing, ...
template <typename Call>
void ReadKeys(Operands&, Call&) {}

// ... and those of the keys.
inline void ReadKeys(Operands& operands, Wkv7KeyedBackwardCall& call) {
  Wkv7KeysBackwardCall& keys = call.keys;
  keys.k = operands.Arg("projected k", "BTHK", Kind::kTensor);
  keys.rate = operands.Arg("rate", "BTHK", Kind::kTensor);
  keys.parameters = static_cast<const float*>(operands.Arg("parameters", "BJHK", Kind::kFloat));
  keys.dbonus = static_cast<const float*>(operands.Arg("dbonus", "BTH", Kind::kFloat));
  keys.partials = static_cast<float*>(operands.Ret("partials", "BNJHK", Kind::kFloat));
  keys.r = call.r;
  keys.dkey = keys.dk = call.dk, keys.da = keys.drate = call.da, keys.db = call.db;
  keys.dpassed = keys.dr = call.dr;
  keys.rows = operands.Size('B'), keys.tokens = operands.Size('T');
  keys.width = operands.Size('H') * operands.Size('K'), keys.head_size = operands.Size('K');
  keys.dtype = operands.dtype();
  const int64_t count = operands.Size('J');
  operands.Require(count == keys.kParameters, "parameters has J = ", count, "; expected ",
                   keys.kParameters);
  operands.Require(keys.head_size == 64, "K = ", keys.head_size, "; expected 64");
  operands.Require(call.decay == Decay::kSigmoid, "decay is ", static_cast<int64_t>(call.decay),
                   "; expected 2 (sigmoid)");
  operands.Require(operands.packing() != Packing::kSequences,
                   "packing is 2 (sequences); expected 0 (none) or 1 (marks)");
  operands.Require(keys.rows <= kMaxRows && keys.tokens <= kMaxTokens, "B = ", keys.rows,
                   " and T = ", keys.tokens, "; expected up to ", kMaxRows, " rows of ", kMaxTokens,
                   " tokens");
}

}  // namespace rwkv_jax::cuda
