// What the handlers share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>
#include <string>

#include "splits.h"
#include "rwkv_jax/operands.h"

namespace rwkv_jax::cuda {

constexpr int64_t kMaxHeadSize = 128;

inline ffi::Error Launched(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(what) + ": " + cudaGetErrorString(error));
}

inline auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("decay");
}

inline auto ChunkBinding() { return Binding().Attr<int64_t>("splits"); }

// With `floats` for each split.
inline ReplayScratch ReadReplayScratch(Operands& operands, int64_t floats) {
  float* const memory = operands.FloatRet("scratch", "GHPX");
  const int64_t splits = operands.Size('P'), sequences = operands.Size('G');
  operands.Require(operands.Size('X') == floats, "scratch has ", operands.Size('X'),
                   " floats for each split; expected ", floats);
  operands.Require(splits >= 1 && (sequences >= 1 || operands.Size('S') == 0), "scratch is for ",
                   splits, " splits of ", sequences, " sequences; expected at least 1");
  return {memory, sequences * operands.Size('H'), splits, splits * floats};
}

inline void RequireRows(Operands& operands) {
  operands.Require(!operands.HasSequences(), "spans is given; the target for sequences takes it");
}

// What all kernels on matrix units need.
template <typename Call>
void RequireMatrixUnits(Operands& operands, const Call& call) {
  operands.Require(call.dtype != Dtype::kF32, "w is F32; the kernels on matrix units take BF16 or F16");
  constexpr int64_t kMaxStride = std::numeric_limits<int32_t>::max();
  operands.Require(call.dims.heads * call.dims.head_size <= kMaxStride, "w has H = ",
                   call.dims.heads, "; H * K must be at most ", kMaxStride);
}

// What those that save states or read them do; `floats` is the scratch for each head.
template <typename Call>
void RequireScratch(Operands& operands, const Call& call, int64_t splits, int64_t floats) {
  operands.Require(call.states_dtype == Dtype::kBF16, "states is F32; the kernels on matrix units ",
                   "take BF16");
  operands.Require(splits >= 1 && splits <= kMaxSplits, "splits is ", splits,
                   "; expected 1 to ", kMaxSplits);
  operands.Require(operands.Size('X') == floats, "scratch has ", operands.Size('X'),
                   " floats for each head; expected ", floats);
}

}  // namespace rwkv_jax::cuda

// RWKV_JAX_HANDLER for handlers that only launch kernels, so that they may be part of a CUDA graph.
#define RWKV_JAX_CUDA_HANDLER(fn, impl, binding) \
  RWKV_JAX_HANDLER(fn, impl, binding, {rwkv_jax::ffi::Traits::kCmdBufferCompatible})
