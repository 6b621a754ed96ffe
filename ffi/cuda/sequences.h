// Rows of sequences of different lengths: what their handlers share.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "frames.h"
#include "handler.h"
#include "rwkv_jax/operands.h"

namespace rwkv_jax::cuda {

// The sizes of a call, whose operands and results have been read: states are [B, S, H, V, K], of which
// frames of a row are saved, or none if they may be left out.
template <typename Call>
void ReadSequences(Operands& operands, int64_t decay, bool may_leave_out, Call& call) {
  const int64_t rows = operands.Size('B'), sequences = operands.Size('S'), tokens = operands.Size('T');
  const int64_t length = tokens < kChunk ? tokens : kChunk;
  const int64_t saved = operands.Size('N');
  const int64_t frames = length == 0 ? 0 : (tokens + sequences * (length - 1)) / length;
  internal::ReadSizes(operands, rows * tokens, decay, kMaxHeadSize, call);
  operands.Require(operands.Size('W') == 4, "spans has W = ", operands.Size('W'), "; expected 4");
  operands.Require(saved == frames || (saved == 0 && may_leave_out), "states has N = ", saved, "; expected ", frames,
                   " for ", tokens, " tokens of ", sequences, " sequences");
  call.dims.batch = rows * sequences;
  call.dims.saved = rows * saved;
}

// Of `count` segments as if all tokens were one sequence.
inline Segments SegmentsOf(Operands& operands, int64_t count, float* memory, int64_t size) {
  const int64_t all = Chunks(operands.Size('B') * operands.Size('T'));
  operands.Require(count >= 1 && count <= kMaxSegments, "segments is ", count, "; expected 1 to ",
                   kMaxSegments);
  if (count <= 1) return {count, memory, size};
  return {count, memory, size, all > 0 ? (all + count - 1) / count : 1};
}

template <typename Call>
void RequireGradients(Operands& operands, const Call& call) {
  const int64_t floats = FrameGradientsSize(call.dims.head_size, 1);
  operands.Require(operands.Size('Y') == floats, "gradients has ", operands.Size('Y'),
                   " floats for each frame; expected ", floats);
}

template <typename Call>
cudaError_t ClearOutside(cudaStream_t stream, const Operands& operands, const Call& call,
                         std::initializer_list<void*> results) {
  return ClearOutside(stream, call.sequences, operands.Size('B'), operands.Size('S'),
                      operands.Size('T'), 2 * call.dims.heads * call.dims.head_size, results);
}

}  // namespace rwkv_jax::cuda
