// The handlers of the losses on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

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

// The targets of the losses, rwkv_{loss}_v1.
inline std::vector<Registration> LossTargets() {
  return {{"rwkv_cross_entropy_v1", LaunchTarget<HandleCrossEntropy>}};
}

}  // namespace rwkv_jax::cuda
