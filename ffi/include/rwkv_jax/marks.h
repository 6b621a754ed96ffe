// Which tokens of a row start a segment, and which are padding.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

// Functions that CPU kernels call are always inlined: the kernels are compiled once for each instruction
// set, and of a function that is not inlined the linker would keep one copy for all of them.
#ifdef __CUDACC__
#define RWKV_JAX_ANYWHERE __host__ __device__
#else
#define RWKV_JAX_ANYWHERE [[gnu::always_inline]]
#endif

namespace rwkv_jax {

// One word has the marks of so many tokens.
constexpr int64_t kWordTokens = 16;

// A row has one word for every kWordTokens tokens, up to the end of its last chunk. The low 16 bits of a
// word say before which tokens the state is cleared, its high 16 bits which tokens are padding. Padding
// changes no state, its y and its gradients are 0, and its inputs are not read.
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
