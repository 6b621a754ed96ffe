// How kernels share out the tokens of a sequence among splits, and what several operators have besides
// their kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "grid.h"
#include "rwkv_jax/sequences.h"
#include "rwkv_jax/types.h"

namespace rwkv_jax::cuda {

// Scratch of a backward pass that goes token by token and replays the sequence from saved states. So many
// heads, counted over all sequences, run at a time, each in `splits` splits, which run side by side.
struct ReplayScratch {
  float* memory;
  int64_t heads, splits;
  int64_t stride;  // floats for each head
};

// The floats of the gradient of one state at the end of a chunk, [V, K] of bfloat16 or, in calls of float32, of
// float32.
constexpr int64_t StateGradientFloats(Dtype dtype, int64_t head_size) {
  return head_size * head_size / (dtype == Dtype::kF32 ? 1 : 2);
}

// The work of a block: a split of a sequence, or nothing if `split` is negative.
struct BlockWork {
  Turn turn;
  int64_t split;
};

// The tokens of a head are shared out among `count` splits of whole chunks, so that few heads fill a
// GPU. `memory` has transitions: what each split does to a state. The last split in the order of the
// recurrence needs none.
//
// Sequences of different lengths have splits as long as if all tokens were one sequence. So they have
// different numbers of splits, but at most `count`. Each split has a place, a number below `count` that
// follows from where it lies among all tokens. Two splits that are not the first of their sequence
// have different places.
struct Splits {
  int64_t count;
  float* memory;
  int64_t size;        // floats of a transition
  int64_t chunks = 0;  // of a split, if sequences have different lengths, or else 0

  // The floats of transitions for each head of each sequence. Sequences of different lengths share the
  // transitions of a head.
  int64_t Stride() const { return size * (chunks == 0 ? count - 1 : count); }
  // The blocks of a kernel that runs all splits of so many sequences. For sequences of different lengths
  // there is a block for each place but the first, and then one for the first split of each sequence.
  Grid Blocks(int64_t sequences, int64_t heads) const { return GridOf(sequences, heads, count); }
  // The blocks of a kernel that finds the transitions.
  Grid TransitionBlocks(int64_t sequences, int64_t heads) const {
    return chunks == 0 ? GridOf(sequences, heads, count - 1) : GridOf(0, heads, count);
  }
  // The heads of all sequences that may have transitions, for a kernel that combines them.
  int64_t HeadsWithTransitions(int64_t sequences, int64_t heads) const {
    return (chunks == 0 ? sequences : count - 1) * heads;
  }
#ifdef __CUDACC__
  __device__ int64_t ChunksPerSplit(int64_t all) const {
    return chunks == 0 ? (all + count - 1) / count : chunks;
  }
  __device__ int64_t Count(int64_t all) const {
    return chunks == 0 ? count : all == 0 ? 1 : (all + chunks - 1) / chunks;
  }
  // The work of this block, one of `Blocks` or, if `transition`, of `TransitionBlocks`. Where
  // sequences have different lengths, the block of a place finds the transition of the split there
  // or, if the recurrence runs forwards, of the split before it.
  template <bool kReverse>
  __device__ BlockWork WorkOfBlock(const Sequences& sequences, int64_t tokens, int64_t heads,
                                   bool transition) const {
    const int64_t index = blockIdx.x / heads;
    if (chunks == 0)
      return {sequences.InTurn(index, tokens), kReverse ? count - 1 - blockIdx.y : blockIdx.y};
    if (index >= count - 1) return {sequences.InTurn(index - (count - 1), tokens), 0};
    BlockWork work = Later(sequences, index + 1);
    if (transition && !kReverse) --work.split;
    return work;
  }
  // The number of a split among all splits of all sequences.
  __device__ int64_t IndexOf(int64_t sequence, const Span& span, int64_t split) const {
    if (chunks == 0) return sequence * count + split;
    return split == 0 ? count - 1 + sequence : Place(span) + split - 1;
  }
  // The sequence of a block, one of `HeadsWithTransitions`, or -1 if it has none.
  __device__ int64_t SequenceWithTransitions(const Sequences& sequences, int64_t heads) const {
    const int64_t index = blockIdx.x / heads;
    if (chunks == 0) return index;
    const BlockWork work = Later(sequences, index + 1);
    return work.split == 1 ? work.turn.sequence : -1;
  }
  // The transition of a split. `order` is its number in the order of the recurrence; `head` is
  // sequence * heads + h.
  template <bool kReverse>
  __device__ float* Transition(int64_t head, int64_t heads, const Span& span, int64_t order) const {
    if (chunks == 0) return memory + (head * (count - 1) + order) * size;
    const int64_t split = kReverse ? Count(span.Chunks()) - 1 - order : order;
    return memory + (head % heads * count + Place(span) + split) * size;
  }
#endif

 private:
  Grid GridOf(int64_t sequences, int64_t heads, int64_t splits) const {
    if (chunks == 0) return {sequences * heads, splits};
    return (splits - 1 + sequences) * heads;
  }
#ifdef __CUDACC__
  // The place of the first split.
  __device__ unsigned Place(const Span& span) const {
    return static_cast<unsigned>(span.first_token / kChunk) / static_cast<unsigned>(chunks);
  }
  // The split at a place that is not the first of its sequence, found by a warp together.
  __device__ BlockWork Later(const Sequences& sequences, int64_t place) const {
    int64_t begin = 0, end = sequences.count;
    while (begin < end) {
      const int64_t step = (end - begin + 31) / 32, probe = begin + threadIdx.x % 32 * step;
      const bool earlier = probe < end && Place(sequences(probe, 0)) < place;
      const int64_t count = __popc(__ballot_sync(~0u, earlier));
      if (count == 0) break;
      const int64_t most = begin + count * step;
      end = end < most ? end : most;
      begin += (count - 1) * step + 1;
    }
    if (begin == 0) return {{}, -1};
    const Turn turn = {sequences(begin - 1, 0), begin - 1};
    const int64_t split = place - Place(turn.span);
    return {turn, split < Count(turn.span.Chunks()) ? split : -1};
  }
#endif
};

constexpr Splits kOneSplit = {1, nullptr, 0};

// Clears the tokens [B, T] of results that no sequence has, those before the first and after the last
// sequence of a row. Elements have `halves` times 16 bits. There are at most 6 results.
cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t halves,
                         const std::vector<TokenResult>& results);

// The gradient of an input that all tokens share: partial sums [n, columns] and their sums [S, columns].
struct PartialSums {
  const float* from;
  float* to;
};

// Adds up partial sums in a fixed order. Each of `count` sequences has `partials` of them, one after
// another, or, if `sequences` are given, one for every `chunks` of its chunks, at the first of them. There are at
// most 2 inputs.
cudaError_t SumPartials(cudaStream_t stream, int64_t count, const Sequences& sequences,
                        int64_t partials, int64_t columns,
                        std::initializer_list<PartialSums> inputs, int64_t chunks = 1);

}  // namespace rwkv_jax::cuda
