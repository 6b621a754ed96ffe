// Sequences of different lengths, one after another in rows of a batch.
#pragma once

#include <cstdint>

#include "rwkv_jax/marks.h"

namespace rwkv_jax {

// The tokens of one sequence. `first_chunk` is the number of its first chunk, counted over all rows.
struct Span {
  int64_t first_token, tokens, first_chunk;

  RWKV_JAX_ANYWHERE int64_t Chunks() const { return (tokens + kChunk - 1) / kChunk; }
};

// The sequence that runs as number n of all, which need not be sequence n.
struct Turn {
  Span span;
  int64_t sequence;
};

// If sequences are given, they are the batch of a call, wherever they lie in its rows of tokens; the
// caller vouches that they do not overlap.
struct Sequences {
  // [S, words]. Row s has the Span of sequence s and the number s. With kWordsInTurn there follow the
  // Span and the number of the sequence that runs as number s: long sequences run before short ones,
  // so that no block is left with a long one at the end. To load these words delays a block, so calls
  // with short sequences leave them out.
  const int32_t* spans = nullptr;
  const int32_t* owners = nullptr;  // [B, N]: the sequence of each chunk, or -1 where there is none
  int64_t count = 0, words = kWords;
  int64_t tokens = 0;  // of all rows

  static constexpr int64_t kWords = 4, kWordsInTurn = 8;

  RWKV_JAX_ANYWHERE bool Given() const { return spans != nullptr; }
  // The span of sequence `index`; without sequences that of row `index`, which has `tokens` tokens.
  RWKV_JAX_ANYWHERE Span operator()(int64_t index, int64_t tokens) const {
    if (!Given()) return {index * tokens, tokens, index * ((tokens + kChunk - 1) / kChunk)};
    const int32_t* const span = spans + words * index;
    return {span[0], span[1], span[2]};
  }
  // The sequence that runs as number `index`.
  RWKV_JAX_ANYWHERE Turn InTurn(int64_t index, int64_t tokens) const {
    if (!Given() || words == kWords) return {(*this)(index, tokens), index};
    const int32_t* const turn = spans + words * index + kWords;
    return {{turn[0], turn[1], turn[2]}, turn[3]};
  }
  // The sequence that has a chunk, whose number counts the chunks of all rows.
  RWKV_JAX_ANYWHERE Turn OfChunk(int64_t chunk, int64_t tokens) const {
    const int64_t sequence = Given() ? owners[chunk] : chunk / ((tokens + kChunk - 1) / kChunk);
    return {(*this)(sequence, tokens), sequence};
  }
  // The tokens from the first to the last of the `each` sequences of a row.
  RWKV_JAX_ANYWHERE Span OfRow(int64_t row, int64_t each, int64_t tokens) const {
    if (each == 0) return {row * tokens, 0, 0};
    const Span first = (*this)(row * each, tokens), last = (*this)((row + 1) * each - 1, tokens);
    return {first.first_token, last.first_token + last.tokens - first.first_token,
            first.first_chunk};
  }
};

// A result with the axis T, and its elements for one token.
struct TokenResult {
  void* data;
  int64_t size;
};

}  // namespace rwkv_jax
