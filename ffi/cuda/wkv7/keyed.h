// The targets rwkv_wkv7_keyed_{pass}_v2: WKV7 with the operands k, a and b that wkv7_keys makes.
#pragma once

#include <tuple>
#include <type_traits>

#include "layers/kernels.h"
#include "rwkv_jax/operators.h"

namespace rwkv_jax::cuda {

// The operands and results are those of WKV7 with `rate` in place of a and b, with those of wkv7_keys behind
// them.
struct KeyedWkv7 : Wkv7 {
  using ForwardCall = Wkv7KeyedForwardCall;
  using BackwardCall = Wkv7KeyedBackwardCall;
  static constexpr auto kInputs =
      std::make_tuple(Input{"r", "BTHK", &ForwardCall::r, &BackwardCall::dr},
                      Input{"w", "BTHK", &ForwardCall::w, &BackwardCall::dw},
                      Input{"k", "BTHK", &ForwardCall::k, &BackwardCall::dk},
                      Input{"v", "BTHV", &ForwardCall::v, &BackwardCall::dv},
                      Input{"rate", "BTHK", &ForwardCall::a, &BackwardCall::da});
};

// Whether a call is keyed. Such calls have kernels on matrix units alone.
template <typename Call>
constexpr bool kIsKeyed =
    std::is_same_v<Call, Wkv7KeyedForwardCall> || std::is_same_v<Call, Wkv7KeyedBackwardCall>;

// Reads what stands behind the operands and results of an operator, which `call` has: here nothing, ...
template <typename Call>
void ReadKeys(Operands&, Call&) {}

// ... and those of wkv7_keys.
inline void ReadParameters(Operands& operands, const Wkv7Call& call, const float*& parameters) {
  parameters = static_cast<const float*>(operands.Arg("parameters", "BJHK", Kind::kFloat));
  const int64_t count = operands.Size('J'), size = operands.Size('K');
  operands.Require(count == Wkv7KeysCall::kParameters, "parameters has J = ", count, "; expected ",
                   Wkv7KeysCall::kParameters);
  operands.Require(size == 64, "K = ", size, "; expected 64");
  operands.Require(call.dtype != Dtype::kF32, "the dtype is float32; expected bfloat16 or float16");
  operands.Require(call.decay == Decay::kSigmoid, "decay is ", static_cast<int64_t>(call.decay),
                   "; expected 2 (sigmoid)");
  operands.Require(operands.packing() != Packing::kSequences,
                   "packing is 2 (sequences); expected 0 (none) or 1 (marks)");
}
inline void ReadKeys(Operands& operands, Wkv7KeyedForwardCall& call) {
  ReadParameters(operands, call, call.parameters);
  call.bonus = static_cast<float*>(operands.Ret("bonus", "BTH", Kind::kFloat));
  call.inverse = static_cast<float*>(operands.Ret("inverse", "BTH", Kind::kFloat));
}
inline void ReadKeys(Operands& operands, Wkv7KeyedBackwardCall& call) {
  ReadParameters(operands, call, call.parameters);
  call.inverse = static_cast<const float*>(operands.Arg("inverse", "BTH", Kind::kFloat));
  call.dbonus = static_cast<const float*>(operands.Arg("dbonus", "BTH", Kind::kFloat));
  call.partials = static_cast<float*>(operands.Ret("partials", "BNJHK", Kind::kFloat));
}

}  // namespace rwkv_jax::cuda
