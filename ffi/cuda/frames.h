// What the handlers and the kernels of several operators share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "rwkv_jax/sequences.h"

namespace rwkv_jax::cuda {

constexpr int64_t kMaxSegments = 65535;  // of the second axis of a grid

// Scratch of a backward pass one token at a time, which replays the sequence from saved states: what it
// keeps for each of the `segments` that run side by side of each of so many heads, counted over
// sequences and heads. Those run at a time.
struct ReplayScratch {
  float* memory;
  int64_t heads, segments;
  int64_t stride;  // floats for each head
};

// For each head, the floats of the gradients of the state at the end of each frame of kChunk tokens,
// [B, frames, H, V, K] of bfloat16, as the saved states are.
constexpr int64_t FrameGradientsSize(int64_t head_size, int64_t frames) {
  return frames * head_size * head_size / 2;
}

// The tokens of a head are shared out among `count` segments of whole frames, so that few heads fill a
// GPU. The memory has what each but the last, in the order of the recurrence, does to a state.
//
// Sequences of different lengths have segments as long as if they were one, so different numbers of
// them, `count` at most. Then the summary of a segment has its place by where the segment is among the
// tokens of all.
struct Segments {
  int64_t count;
  float* memory;
  int64_t size;        // floats of a summary
  int64_t frames = 0;  // of a segment, if there are sequences

  // Floats for each head, or for each of those that all sequences share.
  int64_t Stride() const { return size * (frames == 0 ? count - 1 : count); }
#ifdef __CUDACC__
  __device__ int64_t Frames(int64_t all) const {
    return frames == 0 ? (all + count - 1) / count : frames;
  }
  __device__ int64_t Count(int64_t all) const {
    return frames == 0 ? count : all == 0 ? 1 : (all + frames - 1) / frames;
  }
  // Of a segment by its place in the recurrence. A head is b * heads + h.
  template <bool kReverse>
  __device__ float* Summary(int64_t head, int64_t heads, const Span& span, int64_t order) const {
    if (frames == 0) return memory + (head * (count - 1) + order) * size;
    const int64_t segment = kReverse ? Count(span.Frames()) - 1 - order : order;
    const int64_t place = (span.first_token / kChunk + segment * frames) / frames;
    return memory + (head % heads * count + place) * size;
  }
#endif
};

// Clears the tokens [B, T] of results that no sequence has, those before the first and after the last
// sequence of a row; of each token `size` numbers of 16 bits.
cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t size,
                         std::initializer_list<void*> results);

}  // namespace rwkv_jax::cuda
