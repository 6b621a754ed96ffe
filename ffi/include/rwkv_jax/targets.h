// The targets of a platform: one handler for each operator and pass.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "rwkv_jax/ffi.h"
#include "rwkv_jax/operators.h"

namespace rwkv_jax {

struct Registration {
  std::string name;
  XLA_FFI_Handler* handler;
};

// The handler of one target. A platform has a type Context, by which the FFI finds an `Argument` (a
// stream or a thread pool); kOnlyLaunches, whether its handlers may be part of a CUDA graph; and
// Handle<Operator, kPass>(argument, operands, results, attributes).
template <typename Platform, typename Operator, Pass kPass>
XLA_FFI_Error* Target(XLA_FFI_CallFrame* frame) {
  using Argument = typename Platform::Argument;
  const auto bind = [](auto&& binding, auto call) {
    if constexpr (Platform::kOnlyLaunches)
      return std::move(binding).To(call, {ffi::Traits::kCmdBufferCompatible}).release();
    else
      return std::move(binding).To(call).release();
  };
  static auto* const handler = [&] {
    auto binding = ffi::Ffi::Bind()
                       .template Ctx<typename Platform::Context>()
                       .RemainingArgs()
                       .RemainingRets()
                       .template Attr<int64_t>("decay");
    if constexpr (kPass == Pass::kStep)
      return bind(std::move(binding), [](Argument argument, ffi::RemainingArgs args,
                                         ffi::RemainingRets rets, int64_t decay) {
        return Platform::template Handle<Operator, kPass>(argument, args, rets, {decay});
      });
    else
      return bind(
          std::move(binding).template Attr<int64_t>("exact").template Attr<int64_t>("packing"),
          [](Argument argument, ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t decay,
             int64_t exact, int64_t packing) {
            return Platform::template Handle<Operator, kPass>(argument, args, rets,
                                                              {decay, exact, packing});
          });
  }();
  return handler->Call(frame);
}

// All targets of a platform, rwkv_{op}_{pass}_v2.
template <typename Platform>
std::vector<Registration> Registrations() {
  std::vector<Registration> targets;
  const auto add = [&](auto op, auto pass) {
    using Operator = decltype(op);
    constexpr Pass kPass = pass();
    targets.push_back({std::string("rwkv_") + kOpNames[static_cast<int>(Operator::kOp)] + "_" +
                           kPassNames[static_cast<int>(kPass)] + "_v2",
                       Target<Platform, Operator, kPass>});
  };
  const auto add_all = [&](auto op) {
    add(op, std::integral_constant<Pass, Pass::kForward>());
    add(op, std::integral_constant<Pass, Pass::kBackward>());
    add(op, std::integral_constant<Pass, Pass::kStep>());
    if constexpr (Platform::kHasTransitions && decltype(op)::kHasTransition) {
      add(op, std::integral_constant<Pass, Pass::kTransition>());
      add(op, std::integral_constant<Pass, Pass::kReverseTransition>());
    }
  };
  add_all(Wkv4()), add_all(Wkv5()), add_all(Wkv6()), add_all(Wkv7());
  return targets;
}

}  // namespace rwkv_jax
