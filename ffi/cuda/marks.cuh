// What the marks of a row say of a tile of its tokens.
#pragma once

#include <cstdint>

#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

// Of tokens that lie within a word, from the one at bit 0 on. Without kMarked, where each row is one
// sequence, there is nothing to keep and nothing to ask.
template <bool kMarked>
struct TileMarks {
  uint32_t bits = 0;

  __device__ bool Absent(int t) const { return kMarked && bits >> (kWordTokens + t) & 1; }
  // Whether the state is cleared before token t, or before one from `first` up to `end`.
  __device__ bool Starts(int t) const { return kMarked && bits >> t & 1; }
  __device__ bool Starts(int first, int end) const {
    return kMarked && (bits & ((1u << end) - (1u << first))) != 0;
  }
  // Whether the first `count` tokens have any.
  __device__ bool Any(int count) const {
    return kMarked && (bits & ((1u << count) - 1) * ((1u << kWordTokens) + 1)) != 0;
  }
  // The same tokens, from token t on.
  __device__ TileMarks From(int t) const { return {bits >> t}; }
};

// Those from `token` of a row on.
template <bool kMarked>
__device__ TileMarks<kMarked> LoadMarks(const Marks& marks, int64_t row, int64_t token) {
  if constexpr (kMarked)
    return {marks.Word(row, token) >> token % kWordTokens};
  else
    return {};
}

// Calls body(marks) with the marks of kTokens tokens, or with none if they have none, which is built as
// if no row had any. All threads of a block have the same marks.
template <int kTokens, bool kMarked, typename Body>
__device__ void WithMarks(TileMarks<kMarked> marks, Body&& body) {
  if (marks.Any(kTokens))
    body(marks);
  else
    body(TileMarks<false>());
}

}  // namespace rwkv_jax::cuda
