// The handlers on CUDA: from XLA's operands, by a plan for the device of the call, to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decoding/handler.h"
#include "feed_forward/handler.h"
#include "launch_target.h"
#include "layers/handler.h"
#include "losses/handler.h"
#include "low_rank/handler.h"
#include "plan.h"
#include "rwkv_jax/targets.h"
#include "splits.h"
#include "wkv4/kernels.h"
#include "wkv6/kernels.h"
#include "wkv7/forms.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {

// The platform of rwkv_jax/targets.h and rwkv_jax/module.h. Handlers only launch kernels, so that they
// may be part of a CUDA graph.
struct Cuda {
  using Context = ffi::PlatformStream<cudaStream_t>;
  using Argument = cudaStream_t;
  static constexpr bool kHasTransitions = true;
  static constexpr int64_t kMaxHeadSize = cuda::kMaxHeadSize;
  static constexpr bool kOnlyLaunches = true;

  static std::vector<Registration> Targets() {
    std::vector<Registration> targets = Registrations<Cuda>();
    targets.push_back({"rwkv_wkv7_keyed_fwd_v2", Target<Cuda, KeyedWkv7, Pass::kForward>});
    targets.push_back({"rwkv_wkv7_keyed_bwd_v2", Target<Cuda, KeyedWkv7, Pass::kBackward>});
    targets.push_back(
        {"rwkv_gated_delta_rule_fwd_v1", Target<Cuda, GatedDeltaRule, Pass::kForward>});
    targets.push_back(
        {"rwkv_gated_delta_rule_bwd_v1", Target<Cuda, GatedDeltaRule, Pass::kBackward>});
    targets.push_back({"rwkv_gated_delta_rule_step_v1", Target<Cuda, GatedDeltaRule, Pass::kStep>});
    targets.push_back(
        {"rwkv_kimi_delta_attention_fwd_v1", Target<Cuda, KimiDeltaAttention, Pass::kForward>});
    targets.push_back(
        {"rwkv_kimi_delta_attention_bwd_v1", Target<Cuda, KimiDeltaAttention, Pass::kBackward>});
    targets.push_back(
        {"rwkv_kimi_delta_attention_step_v1", Target<Cuda, KimiDeltaAttention, Pass::kStep>});
    for (const auto& more :
         {LayerTargets(), FeedForwardTargets(), LowRankTargets(), LossTargets(), BlockTargets()})
      targets.insert(targets.end(), more.begin(), more.end());
    return targets;
  }

  template <typename Operator, Pass kPass>
  static ffi::Error Handle(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           const Attributes& attributes) {
    constexpr bool kPads = std::is_base_of_v<Wkv7, Operator> &&
                           !std::is_same_v<Operator, KeyedWkv7> && kPass != Pass::kStep;
    auto call = EmptyCall<Operator, kPass>();
    constexpr bool kSharesKeys = kPads || kIsDelta<decltype(call)>;
    CallReader<Operator> reader(kPass, args, rets, attributes, kMaxHeadSize, kPads, kSharesKeys);
    reader.Read(call);
    ReadForm(reader.operands, kPass, call);
    if (ffi::Error error = reader.operands.Finish(); error.failure()) return error;

    const Problem& problem = reader.problem;
    Plan plan;
    cudaError_t error = CurrentDevice(plan.device);
    if (error != cudaSuccess) return ErrorOf(reader.operands, error);
    plan = MakePlan(plan.device, problem, reader.scratch.floats);
    reader.operands.Require(plan.scratch <= reader.scratch.floats,
                            "scratch has X = ", reader.scratch.floats, "; expected at least ",
                            plan.scratch);
    if constexpr (kPads)
      reader.operands.Require(
          plan.matrix_units || (problem.RunsByToken() && call.dims.group == 1),
          "r and v have K = ", problem.head_size, " and V = ", problem.value_size,
          " and heads of H / ", call.dims.group,
          "; expected K = V, a power of two, and as many heads, where the kernels on matrix units "
          "do not take a call");
    if constexpr (kPass == Pass::kTransition || kPass == Pass::kReverseTransition)
      reader.operands.Require(
          plan.matrix_units,
          "no kernel computes this transition; has_transition tells which ones exist");
    if constexpr (kIsForm<decltype(call)> && kPass != Pass::kStep)
      reader.operands.Require(plan.matrix_units, "T = ", problem.tokens, " on a device with ",
                              plan.device.shared_memory,
                              " bytes of shared memory for a block; expected at least ",
                              int64_t{kTileTokens}, " tokens and ", plan.shared_memory, " bytes");
    if (ffi::Error error = reader.operands.Finish(); error.failure()) return error;

    if constexpr (kPass == Pass::kForward || kPass == Pass::kBackward)
      if (call.sequences.Given() && problem.rows > 0) {
        const int64_t halves = problem.dtype == Dtype::kF32 ? 2 : 1;
        error = ClearOutside(stream, call.sequences, problem.rows, problem.sequences / problem.rows,
                             problem.tokens, halves, reader.TokenResults(call));
        if (const auto floats = FloatTokenResults(call); error == cudaSuccess && !floats.empty())
          error = ClearOutside(stream, call.sequences, problem.rows,
                               problem.sequences / problem.rows, problem.tokens, 2, floats);
      }
    if (error == cudaSuccess && problem.AllHeads() > 0) {
      if constexpr (kPass == Pass::kTransition)
        error = RunTransition(stream, call);
      else if constexpr (kPass == Pass::kReverseTransition)
        error = RunReverseTransition(stream, call);
      else
        error = Run(stream, call, plan, reader.scratch.memory);
    }
    return ErrorOf(reader.operands, error);
  }

  static int64_t ScratchFloats(const Problem& problem) { return cuda::ScratchFloats(problem); }
  static bool HasTransition(const Problem& problem) { return cuda::HasTransition(problem); }
  static Description PlanOf(int64_t multiprocessors, int64_t shared_memory,
                            const Problem& problem) {
    return Describe(
        MakePlan({multiprocessors, shared_memory}, problem, cuda::ScratchFloats(problem)));
  }
  // The multiprocessors of a device and the shared memory that its blocks may have, if it is there.
  static std::optional<std::pair<int64_t, int64_t>> DeviceOf(int ordinal) {
    Device device;
    if (DescribeDevice(ordinal, device) != cudaSuccess) return cudaGetLastError(), std::nullopt;
    return std::make_pair(device.multiprocessors, device.shared_memory);
  }
};

}  // namespace rwkv_jax::cuda
