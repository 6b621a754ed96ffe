// The handlers of the step of a whole block on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "decoding/kernels.h"
#include "current_device.h"
#include "launch_target.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

// Reads the operands of one call, in the order in which Python gives them.
class BlockReader {
 public:
  BlockReader(ffi::RemainingArgs args, ffi::RemainingRets rets)
      : operands(Rwkv7BlockCall::kName, args, rets) {}

  Operands operands;

  // The first block of a model makes the value that all others take. `by_input` is for `ffn.value`.
  Rwkv7BlockCall Read(bool is_first, bool by_input, bool defers) {
    Rwkv7BlockCall call = {};
    call.value_by_input = by_input;
    call.x = Tensor("x", "BC"), call.time_before = Tensor("att.shift", "BC");
    call.state = static_cast<const float*>(operands.Arg("att.wkv", "BHVK", Kind::kFloat));
    call.channel_before = Tensor("ffn", "BC");
    if (!is_first) call.first = Tensor("v_first", "BC");
    call.segment_ids = static_cast<const int32_t*>(operands.Arg("segment_ids", "B", Kind::kInts));
    const void* waiting = nullptr;
    if (defers) {
      waiting = Tensor("att.wkv.waiting", "BHNUK");
      call.schedule =
          static_cast<const int32_t*>(operands.Arg("att.wkv.schedule", "P", Kind::kInts));
    }
    call.time_norm = Norm("ln1"), call.channel_norm = Norm("ln2");
    call.head_norm = Norm("att.ln_x");
    constexpr const char* kMixNames[kMixes] = {"r", "w", "k", "v", "a", "g"};
    for (int i = 0; i < kMixes; ++i)
      call.mix[i] = Tensor(std::string("att.x_") + kMixNames[i], "C");
    call.channel_mix = Tensor("ffn.x_k", "C");
    call.w0 = Tensor("att.w0", "C"), ReadMap(call.maps[kDecayMap], "w", 'W');
    call.a0 = Tensor("att.a0", "C"), ReadMap(call.maps[kRateMap], "a", 'A');
    ReadMap(call.maps[kGateMap], "g", 'G');
    if (!is_first) call.v0 = Tensor("att.v0", "C"), ReadMap(call.maps[kShareMap], "v", 'R');
    call.k_k = Tensor("att.k_k", "C"), call.k_a = Tensor("att.k_a", "C");
    call.r_k = Tensor("att.r_k", "HK");
    ReadMatrix(call.receptance, "att.receptance", "CC", nullptr);
    ReadMatrix(call.key, "att.key", "CC", &call.receptance);
    ReadMatrix(call.value, "att.value", "CC", &call.receptance);
    ReadMatrix(call.output, "att.output", "CC", &call.receptance);
    ReadMatrix(call.channel_key, "ffn.key", "FC", &call.receptance);
    ReadMatrix(call.channel_value, "ffn.value", by_input ? "FC" : "CF", &call.receptance, by_input);

    call.out = Result("y", "BC"), call.time_after = Result("next att.shift", "BC");
    call.state_after = static_cast<float*>(operands.Ret("next att.wkv", "BHVK", Kind::kFloat));
    call.channel_after = Result("next ffn", "BC");
    if (is_first) call.made_first = Result("v_first", "BC");
    if (defers) call.waiting = Result("next att.wkv.waiting", "BHNUK");
    operands.Require(!defers || (call.state == call.state_after && call.waiting == waiting),
                     "att.wkv and att.wkv.waiting lie elsewhere than their results; expected them "
                     "to be updated in place");
    call.scratch = static_cast<float*>(operands.Ret("scratch", "X", Kind::kFloat));

    call.rows = operands.Size('B'), call.width = operands.Size('C');
    call.heads = operands.Size('H'), call.hidden = operands.Size('F');
    call.dtype = operands.dtype();
    RequireSizes(call);
    return call;
  }

 private:
  void RequireSizes(const Rwkv7BlockCall& call) {
    operands.Require(call.rows <= kMaxManyRows, "x has B = ", call.rows, "; expected up to ",
                     kMaxManyRows, " rows");
    operands.Require(call.rows <= kMaxBlockRows || (call.dtype == Dtype::kBF16 && HasHopperCode()),
                     "x has B = ", call.rows, "; expected up to ", kMaxBlockRows,
                     " rows, or BF16 on a GPU of compute capability 9.0 with a build for it");
    operands.Require(!call.Quantised() || call.rows <= kMaxQuantisedRows, "x has B = ", call.rows,
                     " where att.receptance.weight is S8; expected ", kMaxQuantisedRows, " row");
    operands.Require(!call.value_by_input || call.rows <= kMaxRowsByInput, "x has B = ", call.rows,
                     " where ffn.value is by input; expected ", kMaxRowsByInput, " row");
    operands.Require(!call.Defers() || (call.OnMatrixUnits() && call.dtype == Dtype::kBF16),
                     "x has B = ", call.rows, " where tokens wait; expected several rows of BF16");
    operands.Require(!call.Defers() || (operands.Size('N') == kMostWaiting &&
                                        operands.Size('U') == kWaitingVectors &&
                                        operands.Size('P') == kScheduleNumbers),
                     "att.wkv.waiting has N = ", operands.Size('N'),
                     " and U = ", operands.Size('U'),
                     " and att.wkv.schedule has P = ", operands.Size('P'), "; expected ",
                     kMostWaiting, ", ", kWaitingVectors, " and ", int64_t{kScheduleNumbers});
    operands.Require(operands.Size('K') == kBlockHeadSize && operands.Size('V') == kBlockHeadSize,
                     "att.wkv has V = ", operands.Size('V'), " and K = ", operands.Size('K'),
                     "; expected ", kBlockHeadSize);
    operands.Require(call.heads > 0 && call.width == call.heads * kBlockHeadSize,
                     "x has C = ", call.width, " where att.wkv has H = ", call.heads,
                     "; expected C = H K > 0");
    operands.Require(call.hidden > 0 && call.hidden % kBlockHeadSize == 0,
                     "ffn.key.weight has F = ", call.hidden, "; expected a multiple of ",
                     kBlockHeadSize);
    operands.Require(call.hidden <= kMaxBlockWidth && call.width <= kMaxBlockWidth,
                     "x has C = ", call.width, " and ffn.key.weight has F = ", call.hidden,
                     "; expected up to ", kMaxBlockWidth);
    const BlockScratch scratch(call);
    operands.Require(operands.Size('X') == scratch.floats, "scratch has X = ", operands.Size('X'),
                     "; expected ", scratch.floats);
  }

  void ReadMap(LowRank& map, const std::string& name, char letter) {
    const std::string rank(1, letter);
    map.first = Tensor("att." + name + "1", "C" + rank);
    map.second = Tensor("att." + name + "2", rank + "C");
    map.rank = operands.Size(letter);
    operands.Require(map.rank > 0 && map.rank <= kMaxRank && map.rank % kRankMultiple == 0, "att.",
                     name, "1 has a rank of ", map.rank, "; expected a multiple of ", kRankMultiple,
                     " up to ", kMaxRank);
  }

  // A scale follows a matrix of int8. All matrices are of int8 if the first one is.
  void ReadMatrix(Matrix& matrix, const std::string& name, const std::string& axes,
                  const Matrix* first, bool by_input = false) {
    const std::string of_weight = name + (by_input ? ".by_input" : ".weight");
    matrix.weight = operands.Arg(of_weight, axes, Kind::kMatrix);
    const bool quantised = operands.weight_type() == ffi::S8;
    operands.Require(first == nullptr || quantised == (first->scale != nullptr), of_weight, " is ",
                     operands.weight_type(),
                     quantised ? "; expected no S8 where att.receptance.weight is not"
                               : "; expected S8 as att.receptance.weight is");
    if (quantised)
      matrix.scale = static_cast<const float*>(
          operands.Arg(name + ".scale", axes.substr(by_input, 1), Kind::kFloat));
  }

  LayerNorm Norm(const std::string& name) {
    const void* const weight = Tensor(name + ".weight", "C");
    return {weight, Tensor(name + ".bias", "C")};
  }
  const void* Tensor(const std::string& name, const std::string& axes) {
    return operands.Arg(name, axes, Kind::kTensor);
  }
  void* Result(const std::string& name, const std::string& axes) {
    return operands.Ret(name, axes, Kind::kTensor);
  }
};

template <bool kFirst, bool kByInput = false, bool kDefers = false>
ffi::Error HandleBlock(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  BlockReader reader(args, rets);
  const Rwkv7BlockCall call = reader.Read(kFirst, kByInput, kDefers);
  return RunOnCurrentDevice(stream, call, reader.operands);
}

// The targets of the step of a block, of the first one of a model and of the others.
inline std::vector<Registration> BlockTargets() {
  return {{"rwkv_rwkv7_first_block_v1", LaunchTarget<HandleBlock<true>>},
          {"rwkv_rwkv7_block_v1", LaunchTarget<HandleBlock<false>>},
          {"rwkv_rwkv7_first_block_by_input_v1", LaunchTarget<HandleBlock<true, true>>},
          {"rwkv_rwkv7_block_by_input_v1", LaunchTarget<HandleBlock<false, true>>},
          {"rwkv_rwkv7_first_block_deferred_v1", LaunchTarget<HandleBlock<true, false, true>>},
          {"rwkv_rwkv7_block_deferred_v1", LaunchTarget<HandleBlock<false, false, true>>}};
}

}  // namespace rwkv_jax::cuda
