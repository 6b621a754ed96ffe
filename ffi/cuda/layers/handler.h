// The handlers of the layer functions on CUDA: from XLA's operands to the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "launch_target.h"
#include "layers/kernels.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/targets.h"

namespace rwkv_jax::cuda {

// Reads the operands of one call, in the order in which Python gives them.
class LayerReader {
 public:
  LayerReader(const char* name, ffi::RemainingArgs args, ffi::RemainingRets rets)
      : operands(name, args, rets) {}

  Operands operands;

  void Read(NormShiftMixForwardCall& call) {
    ReadInputs(call);
    for (int64_t i = 0; i < Mixes(call); ++i)
      call.mixed[i] = operands.Ret("mixed " + std::to_string(i), "BTD", Kind::kTensor);
    call.moments = static_cast<float*>(operands.Ret("moments", "BTE", Kind::kFloat));
    RequireMoments();
  }

  void Read(NormShiftMixBackwardCall& call) {
    ReadInputs(call);
    call.moments = Floats("moments", "BTE");
    RequireMoments();
    for (int64_t i = 0; i < Mixes(call); ++i)
      call.dmixed[i] = Tensor("dmixed " + std::to_string(i), "BTD");
    call.dpassed = Tensor("dpassed", "BTD");
    call.dx = operands.Ret("dx", "BTD", Kind::kTensor);
    call.dbefore = operands.Ret("dbefore", "BD", Kind::kTensor);
    call.partials = Partials("BNJD");
  }

  void Read(Wkv7KeysForwardCall& call) {
    ReadInputs(call);
    call.key = Result("key"), call.a = Result("a"), call.b = Result("b");
    call.bonus = FloatResult("bonus");
  }

  void Read(Wkv7KeysBackwardCall& call) {
    ReadInputs(call);
    call.dkey = Tensor("dkey"), call.da = Tensor("da"), call.db = Tensor("db");
    call.dbonus = Floats("dbonus", "BTH"), call.dpassed = Tensor("dpassed");
    call.dk = Result("dk"), call.drate = Result("drate"), call.dr = Result("dr");
    call.partials = Partials("BNJHK");
  }

  void Read(ValueResidualForwardCall& call) {
    ReadInputs(call);
    call.value = Result("value");
  }

  void Read(ValueResidualBackwardCall& call) {
    ReadInputs(call);
    call.dvalue[0] = Tensor("dvalue"), call.dvalue[1] = Tensor("dvalue_again");
    call.dpassed = Tensor("dpassed");
    call.dv = Result("dv"), call.drate = Result("drate"), call.dfirst = Result("dfirst");
    call.partials = Partials("BNJHK");
  }

  void Read(ReadOutForwardCall& call) {
    ReadInputs(call);
    call.out = Result("out");
  }

  void Read(ReadOutBackwardCall& call) {
    ReadInputs(call);
    call.dout = Tensor("dout");
    call.dy = Result("dy"), call.dbonus = FloatResult("dbonus");
    call.dv = Result("dv"), call.dgate = Result("dgate");
    call.partials = Partials("BNJHK");
  }

  void Read(ReadOutRestoringBackwardCall& call) {
    Read(static_cast<ReadOutBackwardCall&>(call));
    call.out = Result("out");
  }

 private:
  // `origin` follows all other inputs, with a size of 0 where it is not given.
  void ReadInputs(NormShiftMixCall& call) {
    call.x = Tensor("x", "BTD"), call.before = Tensor("before", "BD");
    call.parameters = Floats("parameters", "BJD");
    call.origin = static_cast<const int32_t*>(operands.Arg("origin", "BO", Kind::kInts));
    RequireTokens();
    call.rows = operands.Size('B'), call.tokens = operands.Size('T');
    call.width = operands.Size('D'), call.mixes = operands.Size('J') - 2;
    call.dtype = operands.dtype();
    const int64_t given = operands.Size('O');
    operands.Require(given == 0 || given == call.tokens, "origin has O = ", given,
                     "; expected 0 or T = ", call.tokens);
    if (given == 0) call.origin = nullptr;
    operands.Require(call.width > 0 && call.width <= kMaxLayerWidth && call.width % 16 == 0,
                     "x has D = ", call.width, "; expected a multiple of 16 up to ",
                     kMaxLayerWidth);
    operands.Require(call.mixes == 1 || call.mixes == 6, "parameters has J = ", call.mixes + 2,
                     "; expected 3 or 8");
  }
  void RequireMoments() {
    operands.Require(operands.Size('E') == 2, "moments has E = ", operands.Size('E'),
                     "; expected 2");
  }
  // As many as a call has room for.
  int64_t Mixes(const NormShiftMixCall& call) const {
    return call.mixes < kMaxMixes ? call.mixes : kMaxMixes;
  }

  void ReadInputs(Wkv7KeysCall& call) {
    call.k = Tensor("k"), call.rate = Tensor("rate"), call.r = Tensor("r");
    ReadParameters(call);
  }

  void ReadInputs(ValueResidualCall& call) {
    call.v = Tensor("v"), call.rate = Tensor("rate"), call.first = Tensor("first");
    ReadParameters(call);
  }

  void ReadInputs(ReadOutCall& call) {
    call.y = Tensor("y"), call.bonus = Floats("bonus", "BTH");
    call.v = Tensor("v"), call.gate = Tensor("gate");
    ReadParameters(call);
  }

  template <typename Call>
  void ReadParameters(Call& call) {
    call.parameters = Floats("parameters", "BJHK");
    operands.Require(operands.Size('J') == Call::kParameters,
                     "parameters has J = ", operands.Size('J'), "; expected ", Call::kParameters);
    ReadSizes(call);
  }

  void ReadSizes(HeadTokens& call) {
    const int64_t size = operands.Size('K');
    operands.Require(size >= 16 && size <= 256 && (size & (size - 1)) == 0, "K = ", size,
                     "; expected a power of two from 16 to 256");
    RequireTokens();
    call.rows = operands.Size('B'), call.tokens = operands.Size('T');
    call.width = operands.Size('H') * size, call.head_size = size;
    call.dtype = operands.dtype();
  }

  void RequireTokens() {
    const int64_t rows = operands.Size('B'), tokens = operands.Size('T');
    operands.Require(tokens == 0 || rows <= kMaxTokens / tokens, "B = ", rows, " and T = ", tokens,
                     "; expected up to ", kMaxTokens, " tokens in all");
  }

  const void* Tensor(const std::string& name, const char* axes = "BTHK") {
    return operands.Arg(name, axes, Kind::kTensor);
  }
  const float* Floats(const std::string& name, const char* axes) {
    return static_cast<const float*>(operands.Arg(name, axes, Kind::kFloat));
  }
  void* Result(const std::string& name) { return operands.Ret(name, "BTHK", Kind::kTensor); }
  float* FloatResult(const std::string& name) {
    return static_cast<float*>(operands.Ret(name, "BTH", Kind::kFloat));
  }
  float* Partials(const char* axes) {
    void* const partials = operands.Ret("partials", axes, Kind::kFloat);
    const int64_t runs = Runs(operands.Size('T'));
    operands.Require(operands.Size('N') == runs, "partials has N = ", operands.Size('N'),
                     "; expected ", runs);
    return static_cast<float*>(partials);
  }
};

template <typename Call>
ffi::Error HandleLayer(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  LayerReader reader(Call::kName, args, rets);
  Call call = {};
  reader.Read(call);
  return RunOnCurrentDevice(stream, call, reader.operands);
}

// The targets of the layer functions, rwkv_{function}_{pass}_v1, and of the backward pass that restores a
// result, rwkv_{function}_restoring_bwd_v1.
inline std::vector<Registration> LayerTargets() {
  std::vector<Registration> targets;
  const auto add = [&](auto forward, auto backward) {
    using Forward = decltype(forward);
    using Backward = decltype(backward);
    const std::string name = std::string("rwkv_") + Forward::kName;
    targets.push_back({name + "_fwd_v1", LaunchTarget<HandleLayer<Forward>>});
    targets.push_back({name + "_bwd_v1", LaunchTarget<HandleLayer<Backward>>});
  };
  add(NormShiftMixForwardCall(), NormShiftMixBackwardCall());
  add(Wkv7KeysForwardCall(), Wkv7KeysBackwardCall());
  add(ValueResidualForwardCall(), ValueResidualBackwardCall());
  add(ReadOutForwardCall(), ReadOutBackwardCall());
  targets.push_back(
      {"rwkv_read_out_restoring_bwd_v1", LaunchTarget<HandleLayer<ReadOutRestoringBackwardCall>>});
  return targets;
}

}  // namespace rwkv_jax::cuda
