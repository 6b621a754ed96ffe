// The operands of each operator, stated once, and the reading of all passes that follows from them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "rwkv_jax/operands.h"
#include "rwkv_jax/problem.h"
#include "rwkv_jax/wkv4.h"
#include "rwkv_jax/wkv6.h"
#include "rwkv_jax/wkv7.h"

namespace rwkv_jax {

// An input: its name, its axes, and the members of a call that are the input and its gradient. An input
// without the axis T is a parameter that all tokens of a sequence share, in float32. G are the heads of keys where a
// platform takes heads that share them, and else H; gradients have H.
template <typename Value, typename Gradient>
struct Input {
  const char *name, *axes;
  Value value;
  Gradient gradient;

  bool Shared() const { return axes[0] == 'S'; }
  bool OfValues() const { return std::string_view(axes).back() == 'V'; }
  Kind kind() const { return Shared() ? Kind::kFloat : Kind::kTensor; }
};
template <typename Value, typename Gradient>
Input(const char*, const char*, Value, Gradient) -> Input<Value, Gradient>;

struct Wkv4 {
  using ForwardCall = Wkv4ForwardCall;
  using BackwardCall = Wkv4BackwardCall;
  static constexpr Op kOp = Op::kWkv4;
  static constexpr Decay kLastDecay = Decay::kExp;
  static constexpr bool kHasTransition = false;
  static constexpr const char *kValue = "C", *kState = "C";  // the last axes of v and of a state
  static constexpr auto kInputs =
      std::make_tuple(Input{"w", "SC", &ForwardCall::w, &BackwardCall::dw},
                      Input{"u", "SC", &ForwardCall::u, &BackwardCall::du},
                      Input{"k", "BTC", &ForwardCall::k, &BackwardCall::dk},
                      Input{"v", "BTC", &ForwardCall::v, &BackwardCall::dv});

  static void SetConstants(Wkv4Call&) {}
};

template <bool kConstantDecay>
struct LinearAttention {
  using ForwardCall = Wkv6ForwardCall;
  using BackwardCall = Wkv6BackwardCall;
  using TransitionCall = Wkv6TransitionCall;
  static constexpr Op kOp = kConstantDecay ? Op::kWkv5 : Op::kWkv6;
  static constexpr Decay kLastDecay = Decay::kExp;
  static constexpr bool kHasTransition = true;
  static constexpr const char *kValue = "HV", *kState = "HVK", *kFactor = "HK";
  static constexpr auto kInputs = std::make_tuple(
      Input{"r", "BTHK", &ForwardCall::r, &BackwardCall::dr},
      Input{"w", kConstantDecay ? "SHK" : "BTHK", &ForwardCall::w, &BackwardCall::dw},
      Input{"k", "BTHK", &ForwardCall::k, &BackwardCall::dk},
      Input{"v", "BTHV", &ForwardCall::v, &BackwardCall::dv},
      Input{"u", "SHK", &ForwardCall::u, &BackwardCall::du});

  static void SetConstants(Wkv6Call& call) { call.constant_decay = kConstantDecay; }
};
using Wkv5 = LinearAttention<true>;
using Wkv6 = LinearAttention<false>;

struct Wkv7 {
  using ForwardCall = Wkv7ForwardCall;
  using BackwardCall = Wkv7BackwardCall;
  using TransitionCall = Wkv7TransitionCall;
  static constexpr Op kOp = Op::kWkv7;
  static constexpr Decay kLastDecay = Decay::kSigmoid;
  static constexpr bool kHasTransition = true;
  static constexpr const char *kValue = "HV", *kState = "HVK", *kFactor = "HKK";
  static constexpr auto kInputs =
      std::make_tuple(Input{"r", "BTGK", &ForwardCall::r, &BackwardCall::dr},
                      Input{"w", "BTGK", &ForwardCall::w, &BackwardCall::dw},
                      Input{"k", "BTGK", &ForwardCall::k, &BackwardCall::dk},
                      Input{"v", "BTHV", &ForwardCall::v, &BackwardCall::dv},
                      Input{"a", "BTGK", &ForwardCall::a, &BackwardCall::da},
                      Input{"b", "BTGK", &ForwardCall::b, &BackwardCall::db});

  static void SetConstants(Wkv7Call&) {}
};

template <typename Operator, typename Fn>
void ForInputs(Fn&& fn) {
  std::apply([&](const auto&... inputs) { (fn(inputs), ...); }, Operator::kInputs);
}

// The arrays of a state, by name.
template <typename Float, typename Fn>
void ForParts(Wkv4State<Float>& state, Fn&& fn) {
  fn("num", state.num), fn("den", state.den), fn("log_max", state.log_max);
}
template <typename Element, typename Fn>
void ForParts(Element*& state, Fn&& fn) {
  fn("state", state);
}

// The attributes of a target; `step` has only the first.
struct Attributes {
  int64_t decay, exact = 0, packing = 0;
};

// Scratch has as many floats as `scratch` of the module says, none on the CPU.
struct Scratch {
  float* memory = nullptr;
  int64_t floats = 0;
};

// Reads all operands and results of a call of an operator. What it has read may be used once
// Finish has returned no error.
template <typename Operator>
class CallReader {
 public:
  // `pads` is that of Operands::Heads, and `shares_keys` says whether heads may share keys.
  CallReader(Pass pass, ffi::RemainingArgs args, ffi::RemainingRets rets,
             const Attributes& attributes, int64_t max_head_size, bool pads = false,
             bool shares_keys = false)
      : operands(NameOf(pass), args, rets, attributes.packing),
        attributes_(attributes),
        max_head_size_(max_head_size),
        pads_(pads),
        shares_keys_(shares_keys) {
    problem.op = Operator::kOp, problem.pass = pass;
  }

  Operands operands;
  Problem problem;
  Scratch scratch;

  void Read(typename Operator::ForwardCall& call) {
    const bool step = problem.pass == Pass::kStep;
    ReadInputs(call);
    ReadState(step ? "" : "initial_", call.initial_state);
    ReadResult("y", (step ? "B" : "BT") + Value(), Kind::kTensor, call.y);
    WriteState(step ? "" : "final_", call.final_state);
    if (!step) {
      ForParts(call.states, [&](const char* part, auto*& saved) {
        ReadResult(Plural(part), Saved(), SavedKind(saved), saved);
      });
      ReadScratch();
      operands.ReadPacking(call.marks, call.sequences);
      operands.RequireSaved(true);
    }
    ReadSizes(call);
    if (!problem.saves) call.states = {};
  }

  void Read(typename Operator::BackwardCall& call) {
    ReadInputs(call);
    const bool states = problem.pass == Pass::kBackward;
    if (states)
      ForParts(call.states, [&](const char* part, auto*& saved) {
        ReadOperand(Plural(part), Saved(), SavedKind(saved), saved);
      });
    call.dy = operands.Arg("dy", "BT" + Value(), Kind::kTensor);
    ReadState("dfinal_", call.dfinal_state);
    if (states)
      ForInputs<Operator>([&](const auto& input) {
        ReadResult(std::string("d") + input.name, AllHeads(input.axes), input.kind(),
                   call.*input.gradient);
      });
    WriteState("dinitial_", call.dinitial_state);
    ReadScratch();
    operands.ReadPacking(call.marks, call.sequences);
    if (states) operands.RequireSaved(false);
    ReadSizes(call);
  }

  template <typename TransitionCall, typename = decltype(TransitionCall::factor)>
  void Read(TransitionCall& call) {
    ReadInputs(call);
    ReadResult("factor", std::string("B") + Operator::kFactor, Kind::kFloat, call.factor);
    ReadResult("added", std::string("B") + Operator::kState, Kind::kFloat, call.added);
    ReadScratch();
    operands.ReadPacking(call.marks, call.sequences);
    ReadSizes(call);
  }

  // The results that have the axis T.
  std::vector<TokenResult> TokenResults(const typename Operator::ForwardCall& call) const {
    return {{call.y, problem.heads * problem.value_size}};
  }
  std::vector<TokenResult> TokenResults(const typename Operator::BackwardCall& call) const {
    std::vector<TokenResult> results;
    ForInputs<Operator>([&](const auto& input) {
      const int64_t size = input.OfValues() ? problem.value_size : problem.head_size;
      if (!input.Shared()) results.push_back({call.*input.gradient, problem.heads * size});
    });
    return results;
  }

 private:
  static std::string NameOf(Pass pass) {
    const char* const names[] = {"", " backward", "_step", " transition", " reverse transition"};
    return kOpNames[static_cast<int>(Operator::kOp)] + std::string(names[static_cast<int>(pass)]);
  }
  static std::string Plural(const char* part) { return std::string(part) + "s"; }
  static std::string AllHeads(std::string axes) {
    for (char& letter : axes) letter = letter == 'G' ? 'H' : letter;
    return axes;
  }
  static std::string Value() { return Operator::kValue; }
  static std::string Saved() { return std::string("BN") + Operator::kState; }
  // Only states without a type of their own may be rounded.
  template <typename Element>
  static Kind SavedKind(Element*) {
    return std::is_void_v<Element> ? Kind::kSaved : Kind::kFloat;
  }

  template <typename Pointer>
  void ReadOperand(const std::string& name, const std::string& axes, Kind kind, Pointer& operand) {
    operand = static_cast<Pointer>(operands.Arg(name, axes, kind));
  }
  template <typename Pointer>
  void ReadResult(const std::string& name, const std::string& axes, Kind kind, Pointer& result) {
    result = static_cast<Pointer>(operands.Ret(name, axes, kind));
  }

  template <typename Call>
  void ReadInputs(Call& call) {
    Operator::SetConstants(call);
    ForInputs<Operator>([&](const auto& input) {
      std::string axes = shares_keys_ ? input.axes : AllHeads(input.axes);
      if (problem.pass == Pass::kStep && !input.Shared()) axes.erase(1, 1);
      ReadOperand(input.name, axes, input.kind(), call.*input.value);
    });
  }

  template <typename State>
  void ReadState(const std::string& which, State& state) {
    ForParts(state, [&](const char* part, auto*& pointer) {
      ReadOperand(which + part, std::string("S") + Operator::kState, Kind::kFloat, pointer);
    });
  }
  template <typename State>
  void WriteState(const std::string& which, State& state) {
    ForParts(state, [&](const char* part, auto*& pointer) {
      ReadResult(which + part, std::string("S") + Operator::kState, Kind::kFloat, pointer);
    });
  }

  void ReadScratch() {
    ReadResult("scratch", "X", Kind::kFloat, scratch.memory);
    scratch.floats = operands.Size('X');
  }

  template <typename Call>
  void ReadSizes(Call& call) {
    const int64_t tokens = problem.pass == Pass::kStep ? 1 : operands.Size('T');
    call.dtype = problem.dtype = operands.dtype();
    call.decay = problem.decay = operands.ReadDecay(attributes_.decay, Operator::kLastDecay);
    problem.exact = operands.ReadExact(attributes_.exact);
    problem.packing = operands.packing();
    problem.rows = operands.Size('B'), problem.tokens = tokens;
    problem.sequences = operands.Size('S');
    problem.saves = operands.Size('N') != 0 && problem.pass != Pass::kReverseTransition;
    if constexpr (std::is_base_of_v<Wkv4Call, Call>) {
      problem.heads = operands.Size('C'), problem.head_size = problem.value_size = 1;
      call.dims = {problem.sequences, tokens, problem.heads, operands.Saved()};
    } else {
      call.dims = operands.Heads(tokens, max_head_size_, pads_);
      problem.heads = call.dims.heads, problem.head_size = call.dims.head_size;
      problem.value_size = call.dims.value_size;
      call.states_dtype = operands.saved_dtype();
      // Kernels on matrix units round the states that they save, and take rounded ones, unless the
      // operands are of float32.
      const Dtype states = call.dtype == Dtype::kF32 ? Dtype::kF32 : Dtype::kBF16;
      if (problem.saves && call.states_dtype != states) problem.exact = true;
    }
  }

  Attributes attributes_;
  int64_t max_head_size_;
  bool pads_, shares_keys_;
};

// The call of a pass, to be read.
template <typename Operator, Pass kPass>
auto EmptyCall() {
  if constexpr (kPass == Pass::kBackward || kPass == Pass::kReverseTransition)
    return typename Operator::BackwardCall{};
  else if constexpr (kPass == Pass::kTransition)
    return typename Operator::TransitionCall{};
  else
    return typename Operator::ForwardCall{};
}

}  // namespace rwkv_jax
