// The handlers of the products of a channel mixing on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "feed_forward/kernels.h"
#include "current_device.h"
#include "launch_target.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

inline void ReadArrays(Operands& operands, SquaredReluCall& call) {
  call.weight = operands.Arg("weight", "FC", Kind::kTensor);
  call.result = operands.Ret("result", "BTF", Kind::kTensor);
}
inline void ReadArrays(Operands& operands, SquaredReluGradientCall& call) {
  call.value = operands.Arg("value", "CF", Kind::kTensor);
  call.hidden = operands.Arg("hidden", "BTF", Kind::kTensor);
  call.result = operands.Ret("result", "BTF", Kind::kTensor);
  call.weight = operands.Ret("transpose of value", "FC", Kind::kTensor);
}

template <typename Call>
ffi::Error HandleProduct(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Operands operands(Call::kName, args, rets);
  Call call = {};
  call.rows = operands.Arg("rows", "BTC", Kind::kTensor);
  ReadArrays(operands, call);
  const int64_t rows = operands.Size('B'), tokens = operands.Size('T');
  call.width = operands.Size('C'), call.columns = operands.Size('F');
  operands.Require(operands.dtype() == Dtype::kBF16, "rows are not BF16; expected BF16");
  operands.Require(tokens == 0 || rows <= kMaxProductTokens / tokens, "rows has B = ", rows,
                   " and T = ", tokens, "; expected up to ", kMaxProductTokens, " tokens in all");
  operands.Require(call.width >= kMinHiddenProductWidth && call.width <= kMaxProductWidth &&
                       call.width % kProductWidthMultiple == 0,
                   "rows has C = ", call.width, "; expected a multiple of ", kProductWidthMultiple,
                   " from ", kMinHiddenProductWidth, " to ", kMaxProductWidth);
  operands.Require(call.columns <= kMaxProductWidth && call.columns % kProductColumnsMultiple == 0,
                   "the matrix has F = ", call.columns, "; expected a multiple of ",
                   kProductColumnsMultiple, " up to ", kMaxProductWidth);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  call.tokens = rows * tokens;
  if (call.tokens == 0 || call.columns == 0) return ffi::Error::Success();
  operands.Require(HasHopperCode(),
                   "this build has kernels for GPUs of compute capability 9.0 alone, or none; "
                   "expected such a GPU, or implementation 'xla'");
  return RunOnCurrentDevice(stream, call, operands);
}

// The targets of the products.
inline std::vector<Registration> FeedForwardTargets() {
  return {{"rwkv_feed_forward_fwd_v1", LaunchTarget<HandleProduct<SquaredReluCall>>},
          {"rwkv_feed_forward_bwd_v2", LaunchTarget<HandleProduct<SquaredReluGradientCall>>}};
}

}  // namespace rwkv_jax::cuda
