// Sequences of different lengths, one after another in rows of a batch.
#pragma once

#include <cstdint>

#include "rwkv_jax/marks.h"

namespace rwkv_jax {

// The tokens of one sequence, and its chunks of kChunk tokens, for each of which a state is saved.
struct Span {
  int64_t first_token, tokens, first_chunk;

  RWKV_JAX_ANYWHERE int64_t Chunks() const { return (tokens + kChunk - 1) / kChunk; }
};

struct Turn {
  Span span;
  int64_t sequence;
};

// If it is given, the batch of a call are these sequences, wherever they are in its rows of tokens; the
// caller vouches that they do not overlap.
struct Sequences {
  // [sequences, words]: the Span of each and its number; with kWordsInTurn then the same of the sequence
  // that is to run as the first, the second and so on, long ones before others, so that none is
  // waited for at the end. To know these takes the time of a load before anything else, so short
  // sequences have none.
  const int32_t* spans = nullptr;
  const int32_t* owners = nullptr;  // [chunks]: the sequence of each, or -1
  int64_t count = 0, words = kWords;
  int64_t tokens = 0;  // of all rows

  static constexpr int64_t kWords = 4, kWordsInTurn = 8;

  RWKV_JAX_ANYWHERE bool Given() const { return spans != nullptr; }
  // Without sequences, row `index` of `tokens` tokens.
  RWKV_JAX_ANYWHERE Span operator()(int64_t index, int64_t tokens) const {
    if (!Given()) return {index * tokens, tokens, index * ((tokens + kChunk - 1) / kChunk)};
    const int32_t* const span = spans + words * index;
    return {span[0], span[1], span[2]};
  }
  // What is to run as number `index`.
  RWKV_JAX_ANYWHERE Turn InTurn(int64_t index, int64_t tokens) const {
    if (!Given() || words == kWords) return {(*this)(index, tokens), index};
    const int32_t* const turn = spans + words * index + kWords;
    return {{turn[0], turn[1], turn[2]}, turn[3]};
  }
  // All tokens that `each` sequences have of a row.
  RWKV_JAX_ANYWHERE Span OfRow(int64_t row, int64_t each, int64_t tokens) const {
    if (each == 0) return {row * tokens, 0, 0};
    const Span first = (*this)(row * each, tokens), last = (*this)((row + 1) * each - 1, tokens);
    return {first.first_token, last.first_token + last.tokens - first.first_token,
            first.first_chunk};
  }
};

}  // namespace rwkv_jax
