// The handlers of low-rank maps on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <vector>

#include "current_device.h"
#include "launch_target.h"
#include "low_rank/kernels.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

// The axes of ranks and of offsets of maps side by side.
constexpr char kRankLetters[] = "RQUVWXY", kOffsetLetters[] = "DEFGIJL";
static_assert(sizeof(kRankLetters) > kMaxProducts && sizeof(kOffsetLetters) > kMaxProducts);

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

inline void RequireTokens(Operands& operands) {
  const int64_t rows = operands.Size('B'), tokens = operands.Size('T');
  operands.Require(operands.dtype() == Dtype::kBF16, "rows are not BF16; expected BF16");
  operands.Require(tokens == 0 || rows <= kMaxLowRankTokens / tokens, "rows has B = ", rows,
                   " and T = ", tokens, "; expected up to ", kMaxLowRankTokens, " tokens in all");
}

inline void RequireCode(Operands& operands) {
  operands.Require(HasHopperCode(),
                   "this build has kernels for GPUs of compute capability 9.0 alone, or none; "
                   "expected such a GPU, or implementation 'xla'");
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
  call.width = operands.Size('C'), call.rank = operands.Size('R');
  call.hidden_size = operands.Size('H');
  RequireTokens(operands);
  operands.Require(
      call.width > 0 && call.width <= kMaxLowRankWidth && call.width % kLowRankWidthMultiple == 0,
      "rows has C = ", call.width, "; expected a multiple of ", kLowRankWidthMultiple, " up to ",
      kMaxLowRankWidth);
  operands.Require(call.rank > 0 && call.rank <= kMaxLowRank && call.rank % kLowRankMultiple == 0,
                   "first has R = ", call.rank, "; expected a multiple of ", kLowRankMultiple,
                   " up to ", kMaxLowRank);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  call.tokens = operands.Size('B') * operands.Size('T');
  if (call.tokens == 0) return ffi::Error::Success();
  RequireCode(operands);
  return RunOnCurrentDevice(stream, call, operands);
}

// Each map has four operands, its offset with a size of 0 if it has none, and two results. `activations`
// has a digit to the base kActivations for each map, the first one's last.
inline ffi::Error HandleLowRankMaps(cudaStream_t stream, ffi::RemainingArgs args,
                                    ffi::RemainingRets rets, int64_t activations) {
  Operands operands(LowRankMapsCall::kName, args, rets);
  LowRankMapsCall call = {};
  call.count = static_cast<int>(std::min<size_t>(args.size() / 4, kMaxProducts));
  operands.Require(call.count > 0, args.size(), " operands given; expected four for each map");
  int64_t digits = activations;
  for (int i = 0; i < call.count; ++i, digits /= kActivations) {
    LowRankMapsCall::Map& map = call.maps[i];
    const std::string number = std::to_string(i);
    const std::string rank(1, kRankLetters[i]), size(1, kOffsetLetters[i]);
    map.rows = operands.Arg("rows " + number, "BTC", Kind::kTensor);
    map.first = operands.Arg("first " + number, "C" + rank, Kind::kTensor);
    map.second = operands.Arg("second " + number, rank + "C", Kind::kTensor);
    map.offset = operands.Arg("offset " + number, size, Kind::kTensor);
    map.hidden = operands.Ret("hidden " + number, "BT" + rank, Kind::kTensor);
    map.result = operands.Ret("y " + number, "BTC", Kind::kTensor);
    const int64_t given = operands.Size(size[0]), width = operands.Size('C');
    operands.Require(given == 0 || given == width, "offset ", number, " has a size of ", given,
                     "; expected 0 or C = ", width);
    if (given == 0) map.offset = nullptr;
    map.rank = operands.Size(rank[0]);
    operands.Require(
        map.rank > 0 && map.rank <= kMaxSideBySideRank && map.rank % kLowRankMultiple == 0,
        "first ", number, " has a rank of ", map.rank, "; expected a multiple of ",
        kLowRankMultiple, " up to ", kMaxSideBySideRank);
    map.activation = static_cast<Activation>(digits % kActivations);
  }
  operands.Require(activations >= 0 && digits == 0, "activations is ", activations, "; expected ",
                   int64_t{call.count}, " digits to the base ", int64_t{kActivations});
  RequireTokens(operands);
  call.width = operands.Size('C');
  operands.Require(
      call.width > 0 && call.width <= kMaxLowRankWidth && call.width % kLowRankMultiple == 0,
      "rows has C = ", call.width, "; expected a multiple of ", kLowRankMultiple, " up to ",
      kMaxLowRankWidth);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  call.tokens = operands.Size('B') * operands.Size('T');
  if (call.tokens == 0) return ffi::Error::Success();
  RequireCode(operands);
  return RunOnCurrentDevice(stream, call, operands);
}

inline XLA_FFI_Error* LowRankMapsTarget(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attr<int64_t>("activations")
                                   .To(HandleLowRankMaps, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

// The targets of a low-rank map, rwkv_low_rank_{activation}_{pass}_v1, and of several.
inline std::vector<Registration> LowRankTargets() {
  using Forward = LowRankForwardCall;
  using Backward = LowRankBackwardCall;
  constexpr auto kIdentity = Activation::kIdentity;
  constexpr auto kTanh = Activation::kTanh;
  constexpr auto kSigmoid = Activation::kSigmoid;
  return {{"rwkv_low_rank_maps_v1", LowRankMapsTarget},
          {"rwkv_low_rank_identity_fwd_v1", LaunchTarget<HandleLowRank<Forward, kIdentity>>},
          {"rwkv_low_rank_identity_bwd_v1", LaunchTarget<HandleLowRank<Backward, kIdentity>>},
          {"rwkv_low_rank_tanh_fwd_v1", LaunchTarget<HandleLowRank<Forward, kTanh>>},
          {"rwkv_low_rank_tanh_bwd_v1", LaunchTarget<HandleLowRank<Backward, kTanh>>},
          {"rwkv_low_rank_sigmoid_fwd_v1", LaunchTarget<HandleLowRank<Forward, kSigmoid>>},
          {"rwkv_low_rank_sigmoid_bwd_v1", LaunchTarget<HandleLowRank<Backward, kSigmoid>>}};
}

}  // namespace rwkv_jax::cuda
