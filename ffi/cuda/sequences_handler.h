// Rows of sequences of different lengths: what their handlers share.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "splits.h"
#include "handler.h"
#include "rwkv_jax/operands.h"

namespace rwkv_jax::cuda {

// On matrix units `count` splits are as if all tokens were one sequence.
inline Splits ReadSplits(Operands& operands, int64_t count, int64_t size) {
  float* const memory = operands.FloatRet("scratch", "HX");
  const int64_t all = Chunks(operands.Size('B') * operands.Size('T'));
  operands.Require(operands.HasSequences(), "spans is missing");
  operands.Require(count >= 1 && count <= kMaxSplits, "splits is ", count, "; expected 1 to ",
                   kMaxSplits);
  if (count <= 1) return {count, memory, size};
  return {count, memory, size, all > 0 ? (all + count - 1) / count : 1};
}

// The gradients of the state at the end of each chunk; the call gets the sequences of the chunks.
template <typename Call>
uint4* ReadStateGradients(Operands& operands, Call& call) {
  call.sequences.owners = operands.IntArg("owners", "BN");
  float* const gradients = operands.FloatRet("gradients", "BNHY");
  const int64_t floats = StateGradientFloats(call.dims.head_size, 1);
  operands.Require(operands.Size('Y') == floats, "gradients has ", operands.Size('Y'),
                   " floats for each chunk; expected ", floats);
  return reinterpret_cast<uint4*>(gradients);
}

// Of results with `size` elements for each token.
inline cudaError_t ClearOutside(cudaStream_t stream, const Operands& operands,
                                const Sequences& sequences, int64_t size,
                                std::initializer_list<void*> results) {
  const int64_t rows = operands.Size('B');
  if (!sequences.Given() || rows == 0) return cudaSuccess;
  return ClearOutside(stream, sequences, rows, operands.Size('S') / rows, operands.Size('T'),
                      operands.dtype() == Dtype::kF32 ? 2 * size : size, results);
}

template <typename Call>
cudaError_t ClearOutside(cudaStream_t stream, const Operands& operands, const Call& call,
                         std::initializer_list<void*> results) {
  return ClearOutside(stream, operands, call.sequences, call.dims.heads * call.dims.head_size,
                      results);
}

}  // namespace rwkv_jax::cuda
