// The handlers of the losses on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "current_device.h"
#include "launch_target.h"
#include "losses/kernels.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

inline ffi::Error HandleCrossEntropy(cudaStream_t stream, ffi::RemainingArgs args,
                                     ffi::RemainingRets rets) {
  Operands operands(CrossEntropyCall::kName, args, rets);
  const auto floats = [&](const char* name, const char* axes) {
    return static_cast<const float*>(operands.Arg(name, axes, Kind::kFloat));
  };
  CrossEntropyCall call = {};
  call.logits = floats("logits", "TV");
  call.targets = static_cast<const int32_t*>(operands.Arg("targets", "T", Kind::kInts));
  call.scale = floats("scale", "T");
  call.coefficients = floats("coefficients", "E");
  call.loss = static_cast<float*>(operands.Ret("loss", "T", Kind::kFloat));
  call.dlogits = operands.Ret("dlogits", "TV", Kind::kTensor);
  call.tokens = operands.Size('T'), call.vocabulary = operands.Size('V');
  call.dtype = operands.dtype();
  operands.Require(operands.Size('E') == 2, "coefficients has E = ", operands.Size('E'),
                   "; expected 2");
  operands.Require(call.vocabulary % kVocabularyMultiple == 0, "logits has V = ", call.vocabulary,
                   "; expected a multiple of ", kVocabularyMultiple);
  return RunOnCurrentDevice(stream, call, operands);
}

inline ffi::Error HandleHeadCrossEntropy(cudaStream_t stream, ffi::RemainingArgs args,
                                         ffi::RemainingRets rets) {
  Operands operands(HeadCrossEntropyCall::kName, args, rets);
  const auto floats = [&](const char* name, const char* axes) {
    return static_cast<const float*>(operands.Arg(name, axes, Kind::kFloat));
  };
  const auto results = [&](const char* name, const char* axes) {
    return static_cast<float*>(operands.Ret(name, axes, Kind::kFloat));
  };
  HeadCrossEntropyCall call = {};
  call.rows = operands.Arg("features", "TC", Kind::kTensor);
  call.weight = operands.Arg("weight", "VC", Kind::kTensor);
  call.targets = static_cast<const int32_t*>(operands.Arg("targets", "T", Kind::kInts));
  call.of_target = floats("of_target", "T"), call.scale = floats("scale", "T");
  call.l2_wrap = floats("l2_wrap", "L");
  call.loss = results("loss", "T"), call.factors = results("factors", "T");
  call.exponentials = operands.Ret("exponentials", "TV", Kind::kTensor);
  call.bases = results("bases", "T");
  call.again = static_cast<int32_t*>(operands.Ret("again", "R", Kind::kInts));
  call.statistics = results("statistics", "NTE");
  call.tokens = operands.Size('T'), call.width = operands.Size('C');
  call.columns = operands.Size('V');
  const auto require = [&](const char* what, char axis, int64_t expected) {
    operands.Require(operands.Size(axis) == expected, what, " has ", axis, " = ",
                     operands.Size(axis), "; expected ", expected);
  };
  operands.Require(operands.dtype() == Dtype::kBF16, "features are not BF16; expected BF16");
  operands.Require(call.tokens <= kMaxProductTokens, "features has T = ", call.tokens,
                   "; expected up to ", kMaxProductTokens);
  operands.Require(
      call.width > 0 && call.width <= kMaxProductWidth && call.width % kProductWidthMultiple == 0,
      "features has C = ", call.width, "; expected a multiple of ", kProductWidthMultiple,
      " up to ", kMaxProductWidth);
  operands.Require(call.columns > 0 && call.columns <= kMaxProductWidth &&
                       call.columns % kProductColumnsMultiple == 0,
                   "weight has V = ", call.columns, "; expected a multiple of ",
                   kProductColumnsMultiple, " up to ", kMaxProductWidth);
  require("l2_wrap", 'L', 1), require("statistics", 'E', 4);
  require("statistics", 'N', call.columns / kHeadTileColumns);
  require("again", 'R', (call.tokens + kHeadTileTokens - 1) / kHeadTileTokens);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  operands.Require(HasHopperCode(),
                   "this build has kernels for GPUs of compute capability 9.0 alone, or none; "
                   "expected such a GPU");
  return RunOnCurrentDevice(stream, call, operands);
}

// The targets of the losses, rwkv_{loss}_v1.
inline std::vector<Registration> LossTargets() {
  return {{"rwkv_cross_entropy_v1", LaunchTarget<HandleCrossEntropy>},
          {"rwkv_head_cross_entropy_v1", LaunchTarget<HandleHeadCrossEntropy>}};
}

}  // namespace rwkv_jax::cuda
