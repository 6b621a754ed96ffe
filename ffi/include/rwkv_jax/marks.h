// Where segments start that share a row of a batch, and which tokens belong to none.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

// Inlined on CPUs, whose kernels are built for several instruction sets, with one copy of what is not.
#ifdef __CUDACC__
#define RWKV_JAX_ANYWHERE __host__ __device__
#else
#define RWKV_JAX_ANYWHERE [[gnu::always_inline]]
#endif

namespace rwkv_jax {

constexpr int64_t kWordTokens = 16;

// A word for each kWordTokens tokens of a row, of whole chunks, as rwkv_jax/_packing.py makes them: its
// low bits say before which tokens the state is cleared, its high bits which tokens are padding. Those
// change no state; their y and their gradients are 0, and what they contain is not read.
struct Marks {
  const uint32_t* words = nullptr;  // [B, M], or null where each row is one sequence
  int64_t per_row = 0;              // M

  static constexpr int64_t Words(int64_t tokens) { return Chunks(tokens) * (kChunk / kWordTokens); }

  RWKV_JAX_ANYWHERE bool Given() const { return words != nullptr; }
  RWKV_JAX_ANYWHERE uint32_t Word(int64_t row, int64_t token) const {
    return words[row * per_row + token / kWordTokens];
  }
  RWKV_JAX_ANYWHERE bool Starts(int64_t row, int64_t token) const {
    return Given() && Word(row, token) >> token % kWordTokens & 1;
  }
  RWKV_JAX_ANYWHERE bool Absent(int64_t row, int64_t token) const {
    return Given() && Word(row, token) >> (kWordTokens + token % kWordTokens) & 1;
  }
};

}  // namespace rwkv_jax
