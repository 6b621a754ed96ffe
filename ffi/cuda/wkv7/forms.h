// Forms of WKV7: targets with other operands, of which the kernels make those of WKV7.
//
//   rwkv_wkv7_keyed_{pass}_v2              k, a and b that wkv7_keys makes
//   rwkv_gated_delta_rule_{pass}_v1        the delta rule, with a decay of each head
//   rwkv_kimi_delta_attention_{pass}_v1    the delta rule, with a decay of each channel
#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

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

// The delta rule. beta and the scale, and before them g of heads, stand behind the operands; likewise their
// gradients.
template <bool kHeadDecay>
struct DeltaRule : Wkv7 {
  using ForwardCall = Wkv7DeltaForwardCall;
  using BackwardCall = Wkv7DeltaBackwardCall;
  static constexpr auto kKeysAndValues =
      std::make_tuple(Input{"q", "BTGK", &ForwardCall::r, &BackwardCall::dr},
                      Input{"k", "BTGK", &ForwardCall::k, &BackwardCall::dk},
                      Input{"v", "BTHV", &ForwardCall::v, &BackwardCall::dv});
  static constexpr auto Inputs() {
    if constexpr (kHeadDecay)
      return kKeysAndValues;
    else
      return std::tuple_cat(
          kKeysAndValues, std::make_tuple(Input{"g", "BTHK", &ForwardCall::w, &BackwardCall::dw}));
  }
  static constexpr auto kInputs = Inputs();

  static void SetConstants(ForwardCall& call) { call.head_decay = kHeadDecay; }
  static void SetConstants(BackwardCall& call) { call.head_decay = kHeadDecay; }
};
using GatedDeltaRule = DeltaRule<true>;
using KimiDeltaAttention = DeltaRule<false>;

// Whether a call is of a form. But for steps such calls have kernels on matrix units alone.
template <typename Call>
constexpr bool kIsKeyed =
    std::is_same_v<Call, Wkv7KeyedForwardCall> || std::is_same_v<Call, Wkv7KeyedBackwardCall>;
template <typename Call>
constexpr bool kIsDelta =
    std::is_same_v<Call, Wkv7DeltaForwardCall> || std::is_same_v<Call, Wkv7DeltaBackwardCall>;
template <typename Call>
constexpr bool kIsForm = kIsKeyed<Call> || kIsDelta<Call>;

// Reads what stands behind the operands and results of WKV7, which `call` has: of an operator nothing, ...
template <typename Call>
void ReadForm(Operands&, Pass, Call&) {}

// ... of a keyed call those of wkv7_keys, ...
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
inline void ReadForm(Operands& operands, Pass, Wkv7KeyedForwardCall& call) {
  ReadParameters(operands, call, call.parameters);
  call.bonus = static_cast<float*>(operands.Ret("bonus", "BTH", Kind::kFloat));
  call.inverse = static_cast<float*>(operands.Ret("inverse", "BTH", Kind::kFloat));
}
inline void ReadForm(Operands& operands, Pass, Wkv7KeyedBackwardCall& call) {
  ReadParameters(operands, call, call.parameters);
  call.inverse = static_cast<const float*>(operands.Arg("inverse", "BTH", Kind::kFloat));
  call.dbonus = static_cast<const float*>(operands.Arg("dbonus", "BTH", Kind::kFloat));
  call.partials = static_cast<float*>(operands.Ret("partials", "BNJHK", Kind::kFloat));
}

// ... and those of the delta rule.
template <typename Call>
void ReadDelta(Operands& operands, Pass pass, Call& call) {
  const bool step = pass == Pass::kStep;
  const char* const axes = step ? "BH" : "BTH";
  if (call.head_decay) call.w = operands.Arg("g", axes, Kind::kFloat);
  call.beta = static_cast<const float*>(operands.Arg("beta", axes, Kind::kFloat));
  call.scale = static_cast<const float*>(operands.Arg("scale", "J", Kind::kFloat));
  operands.Require(operands.Size('J') == 1, "scale has J = ", operands.Size('J'), "; expected 1");
  operands.Require(step || call.dtype != Dtype::kF32,
                   "the dtype is float32; expected bfloat16 or float16");
  operands.Require(call.decay == Decay::kLog, "decay is ", static_cast<int64_t>(call.decay),
                   "; expected 0 (log)");
}
inline void ReadForm(Operands& operands, Pass pass, Wkv7DeltaForwardCall& call) {
  ReadDelta(operands, pass, call);
}
inline void ReadForm(Operands& operands, Pass pass, Wkv7DeltaBackwardCall& call) {
  ReadDelta(operands, pass, call);
  if (call.head_decay) call.dw = operands.Ret("dg", "BTH", Kind::kFloat);
  call.dbeta = static_cast<float*>(operands.Ret("dbeta", "BTH", Kind::kFloat));
}

// The results of float [B, T, H] of a call, which have no dtype of the operands.
template <typename Call>
std::vector<TokenResult> FloatTokenResults(const Call& call) {
  std::vector<TokenResult> results;
  if constexpr (std::is_same_v<Call, Wkv7DeltaBackwardCall>) {
    results.push_back({call.dbeta, call.dims.heads});
    if (call.head_decay) results.push_back({call.dw, call.dims.heads});
  }
  return results;
}

}  // namespace rwkv_jax::cuda
