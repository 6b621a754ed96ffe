// The marks of a few tokens of a row, in a register.
#pragma once

#include <cstdint>

#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

// The marks of tokens that lie within one word, from the token at bit 0 on. Without kMarked each
// row is one sequence, and every question is answered at compile time.
template <bool kMarked>
struct TileMarks {
  uint32_t bits = 0;

  __device__ bool Absent(int t) const { return kMarked && bits >> (kWordTokens + t) & 1; }
  // Whether the state is cleared before token t, or before any token from `first` to `end` - 1.
  __device__ bool Starts(int t) const { return kMarked && bits >> t & 1; }
  __device__ bool Starts(int first, int end) const {
    return kMarked && (bits & ((1u << end) - (1u << first))) != 0;
  }
  // Whether any of the first `count` tokens has a mark.
  __device__ bool Any(int count) const {
    return kMarked && (bits & ((1u << count) - 1) * ((1u << kWordTokens) + 1)) != 0;
  }
  // The marks from token t on.
  __device__ TileMarks From(int t) const { return {bits >> t}; }
};

// Loads the marks of a row from `token` on. A kernel with kMarked also takes calls without marks.
template <bool kMarked>
__device__ TileMarks<kMarked> LoadMarks(const Marks& marks, int64_t row, int64_t token) {
  if (!kMarked || !marks.Given()) return {};
  return {marks.Word(row, token) >> token % kWordTokens};
}

// Calls body(marks) with the marks of kTokens tokens. If no token has a mark, `marks` has the type
// of a kernel without marks, which is faster. All threads of a block must have the same marks.
template <int kTokens, bool kMarked, typename Body>
__device__ void WithMarks(TileMarks<kMarked> marks, Body&& body) {
  if (marks.Any(kTokens))
    body(marks);
  else
    body(TileMarks<false>());
}

}  // namespace rwkv_jax::cuda
