// The handlers of a low-rank map on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "launch_target.h"
#include "low_rank/kernels.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

// An offset that is not given has a size of 0.
inline void ReadMore(Operands& operands, LowRankForwardCall& call) {
  call.offset = operands.Arg("offset", "O", Kind::kTensor);
  call.result = operands.Ret("y", "BTC", Kind::kTensor);
  call.hidden = operands.Ret("hidden", "BTH", Kind::kTensor);
  const int64_t given = operands.Size('O'), width = operands.Size('C');
  operands.Require(given == 0 || given == width, "offset has O = ", given,
                   "; expected 0 or C = ", width);
  const int64_t expected = operands.Size('R') + (given == 0 ? 0 : kOffsetColumns);
  operands.Require(operands.Size('H') == expected, "hidden has H = ", operands.Size('H'),
                   "; expected ", expected);
  if (given == 0) call.offset = nullptr;
}
inline void ReadMore(Operands& operands, LowRankBackwardCall& call) {
  call.hidden = operands.Arg("hidden", "BTH", Kind::kTensor);
  call.result = operands.Ret("dx", "BTC", Kind::kTensor);
  call.dhidden = operands.Ret("dhidden", "BTR", Kind::kTensor);
  const int64_t given = operands.Size('H'), rank = operands.Size('R');
  operands.Require(given == rank || given == rank + kOffsetColumns, "hidden has H = ", given,
                   "; expected ", rank, " or ", rank + kOffsetColumns);
}

template <typename Call, Activation kActivation>
ffi::Error HandleLowRank(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Operands operands(Call::kName, args, rets);
  Call call = {};
  call.activation = kActivation;
  call.rows = operands.Arg("rows", "BTC", Kind::kTensor);
  call.first = operands.Arg("first", "CR", Kind::kTensor);
  call.second = operands.Arg("second", "RC", Kind::kTensor);
  ReadMore(operands, call);
  const int64_t rows = operands.Size('B'), tokens = operands.Size('T');
  call.width = operands.Size('C'), call.rank = operands.Size('R');
  call.hidden_size = operands.Size('H');
  operands.Require(operands.dtype() == Dtype::kBF16, "rows are not BF16; expected BF16");
  operands.Require(tokens == 0 || rows <= kMaxLowRankTokens / tokens, "rows has B = ", rows,
                   " and T = ", tokens, "; expected up to ", kMaxLowRankTokens, " tokens in all");
  operands.Require(
      call.width > 0 && call.width <= kMaxLowRankWidth && call.width % kLowRankWidthMultiple == 0,
      "rows has C = ", call.width, "; expected a multiple of ", kLowRankWidthMultiple, " up to ",
      kMaxLowRankWidth);
  operands.Require(call.rank > 0 && call.rank <= kMaxLowRank && call.rank % kLowRankMultiple == 0,
                   "first has R = ", call.rank, "; expected a multiple of ", kLowRankMultiple,
                   " up to ", kMaxLowRank);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  call.tokens = rows * tokens;
  if (call.tokens == 0) return ffi::Error::Success();
  operands.Require(HasLowRank(),
                   "this build has kernels for GPUs of compute capability 9.0 alone, or none; "
                   "expected such a GPU, or implementation 'xla'");
  return RunOnCurrentDevice(stream, call, operands);
}

// The targets of low-rank maps, rwkv_low_rank_{activation}_{pass}_v1.
inline std::vector<Registration> LowRankTargets() {
  using Forward = LowRankForwardCall;
  using Backward = LowRankBackwardCall;
  constexpr auto kIdentity = Activation::kIdentity;
  constexpr auto kTanh = Activation::kTanh;
  constexpr auto kSigmoid = Activation::kSigmoid;
  return {{"rwkv_low_rank_identity_fwd_v1", LaunchTarget<HandleLowRank<Forward, kIdentity>>},
          {"rwkv_low_rank_identity_bwd_v1", LaunchTarget<HandleLowRank<Backward, kIdentity>>},
          {"rwkv_low_rank_tanh_fwd_v1", LaunchTarget<HandleLowRank<Forward, kTanh>>},
          {"rwkv_low_rank_tanh_bwd_v1", LaunchTarget<HandleLowRank<Backward, kTanh>>},
          {"rwkv_low_rank_sigmoid_fwd_v1", LaunchTarget<HandleLowRank<Forward, kSigmoid>>},
          {"rwkv_low_rank_sigmoid_bwd_v1", LaunchTarget<HandleLowRank<Backward, kSigmoid>>}};
}

}  // namespace rwkv_jax::cuda
