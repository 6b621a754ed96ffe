// The parts that the kernels of all operators with a state for each head share. As in vector.h, everything
// has internal linkage.
#pragma once

#include <cstdint>

#include "decay.h"
#include "kernels.h"
#include "rwkv_jax/sequences.h"
#include "vector.h"

namespace rwkv_jax::cpu {
namespace {

// Where the arrays of one head of a sequence are.
struct Head {
  template <typename Call>
  Head(const Call& call, int64_t index)
      : size(call.dims.head_size),
        sequence(index / call.dims.heads),
        span(call.sequences(sequence, call.dims.tokens)),
        index(index),
        heads(call.dims.heads) {}

  int64_t Token(int64_t t) const { return ((span.first_token + t) * heads + index % heads) * size; }
  int64_t Parameter() const { return index * size; }
  int64_t State() const { return Parameter() * size; }
  int64_t SavedState(int64_t n) const {
    return ((span.first_chunk + n) * heads + index % heads) * size * size;
  }

  const int64_t size, sequence;
  const Span span;

 private:
  const int64_t index, heads;
};

// The tokens of a run or a chunk. Arrays of loaded inputs have one row for each token that is not padding,
// one after another, so that the kernels need not know of padding.
struct Tokens {
  Tokens(Marks marks, int64_t row, int64_t first, int64_t all) : all(all) {
    int64_t end = all;
    for (int64_t t = first; t < first + all; ++t) {
      starts[there] = marks.Starts(row, t);
      at[marks.Absent(row, t) ? --end : there++] = t;
    }
  }

  const int64_t all;
  int64_t there = 0;    // how many are not padding
  int64_t at[kChunk];   // where they are, in their order, and then where the padding is
  bool starts[kChunk];  // whether the state is cleared before each of them
};

inline void Clear(float* x, int64_t count) { __builtin_memset(x, 0, count * sizeof(float)); }

// Stores zeros as the results of padding.
inline void StoreZeros(const Tokens& tokens, const Head& head, int64_t first, int64_t count,
                       Dtype dtype, void* to) {
  for (int64_t i = tokens.there; i < tokens.all; ++i)
    __builtin_memset(static_cast<char*>(to) + (head.Token(tokens.at[i]) + first) * Bytes(dtype), 0,
                     count * Bytes(dtype));
}

// `rows` rows of a [V, K] state to or from `columns`, [K, rows].
inline void LoadColumns(const float* state, int64_t size, int64_t rows, float* columns) {
  for (int64_t row = 0; row < rows; row += kLanes)
    for (int64_t key = 0; key < size; key += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = Load(state + (row + i) * size + key);
      Transpose(x);
      for (int i = 0; i < kLanes; ++i) Store(columns + (key + i) * rows + row, x[i]);
    }
}

inline void StoreColumns(const float* columns, int64_t size, int64_t rows, Dtype dtype, void* to,
                         int64_t index) {
  for (int64_t row = 0; row < rows; row += kLanes)
    for (int64_t key = 0; key < size; key += kLanes) {
      Vec x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = Load(columns + (key + i) * rows + row);
      Transpose(x);
      for (int i = 0; i < kLanes; ++i) StoreAs(dtype, to, index + (row + i) * size + key, x[i]);
    }
}

template <int kVecs>
inline void StoreVecs(Dtype dtype, void* to, int64_t index, const Vec (&x)[kVecs]) {
  alignas(64) float row[kVecs * kLanes];
  for (int i = 0; i < kVecs; ++i) Store(row + i * kLanes, x[i]);
  StoreRow(dtype, to, index, kVecs * kLanes, row);
}

// Tokens that the forward pass loads at once; divides kChunk.
constexpr int64_t kRun = 16;

// The forward pass over `rows` rows, kVecs vectors of them at a time. There is a lane for each row,
// so that the state times a vector needs no sum over lanes.
//
// `Inputs` has the inputs of a run of tokens: Read loads them, and Forward takes kRows rows, from `row` on,
// through these tokens, of which there is at least one.
template <int kVecs, typename Inputs, typename Call>
void ForwardRows(const Call& call, const Head& head, int64_t first_row, int64_t rows,
                 float* scratch) {
  constexpr int64_t kRows = kVecs * kLanes;
  const int64_t size = head.size, offset = first_row * size;
  const Inputs in(scratch, kRun, size);
  float* const states = scratch + Inputs::Scratch(kRun, size);
  const float* const initial_state = call.initial_state + head.State() + offset;
  for (int64_t row = 0; row < rows; row += kRows)
    LoadColumns(initial_state + row * size, size, kRows, states + row * size);

  for (int64_t start = 0; start < head.span.tokens; start += kRun) {
    const Tokens tokens(call.marks, head.sequence, start, Smaller(head.span.tokens - start, kRun));
    in.Read(call, head, tokens, nullptr);
    StoreZeros(tokens, head, first_row, rows, call.dtype, call.y);
    for (int64_t row = 0; row < rows; row += kRows) {
      float* const columns = states + row * size;
      if (call.states && start % kChunk == 0)
        StoreColumns(columns, size, kRows, call.states_dtype, call.states,
                     head.SavedState(start / kChunk) + offset + row * size);
      if (tokens.there > 0)
        in.template Forward<kVecs>(call, head, tokens, first_row + row, row == 0, columns);
    }
  }
  for (int64_t row = 0; row < rows; row += kRows)
    StoreColumns(states + row * size, size, kRows, Dtype::kF32, call.final_state,
                 head.State() + offset + row * size);
}

template <typename Inputs>
int64_t ForwardScratch(const HeadDims& dims, int64_t rows) {
  return Inputs::Scratch(kRun, dims.head_size) + dims.head_size * rows;
}

template <typename Inputs, typename Call>
void Forward(const Call& call, int64_t index, int64_t first_row, int64_t rows, float* scratch) {
  const Head head(call, index);
  if (rows >= Inputs::kMaxVecs * kLanes)
    ForwardRows<Inputs::kMaxVecs, Inputs>(call, head, first_row, rows, scratch);
  else if (rows == 2 * kLanes)
    ForwardRows<2, Inputs>(call, head, first_row, rows, scratch);
  else
    ForwardRows<1, Inputs>(call, head, first_row, rows, scratch);
}

// Rows that the backward pass works on together, so that the vectors of a token are loaded once for
// all of them.
constexpr int kGroup = 4;

// The gradients that the tokens of a chunk have of their own, and the arrays that they go to.
struct TokenGradients {
  struct Each {
    const float* from;
    void* to;
  };

  const Each* begin() const { return each; }
  const Each* end() const { return each + count; }

  Each each[6];
  int count;
};

// What the backward pass takes of scratch for a Chunk, as below.
template <typename Chunk>
BackwardScratch ScratchOf(const HeadDims& dims) {
  const int64_t tokens = Smaller(dims.tokens, kChunk), size = dims.head_size;
  return {Chunk::kArrays * tokens * size, kLanes * (tokens + (tokens + 1) * size)};
}

// The backward pass of a part of a head. It has a lane for each key, since most of its sums are over rows.
//
// `Chunk` has what it needs of one chunk of tokens: kArrays arrays [tokens, size] that all parts share, which
// are the inputs, dy, the slope of the decays and sums over rows; and the states of kLanes rows. Among the
// sums, `dlog` is still without its factors d and slope. If `dlog_sum` is not null, it gets the sum of dlog
// over all tokens. ClearTotals, Start, Replay and StepBack are the operator's own.
template <typename Chunk, typename Call>
void Backward(const Call& call, const BackwardPart& part, float* shared, float* own) {
  const Head head(call, part.head);
  const int64_t size = head.size, last_row = part.first_row + part.rows;
  float* const ds = call.dinitial_state + head.State();
  const Chunk chunk(call, head, shared, own);
  if (part.first_chunk == 0) {
    const int64_t offset = part.first_row * size;
    __builtin_memcpy(ds + offset, call.dfinal_state + head.State() + offset,
                     part.rows * size * sizeof(float));
    if (part.first_row == 0) chunk.ClearTotals(size);
  }
  const TokenGradients gradients = chunk.Gradients(call);
  const int64_t end = head.span.Chunks() - part.first_chunk;
  for (int64_t n = end - 1; n >= 0 && n >= end - part.chunks; --n) {
    const int64_t first = n * kChunk;
    const Tokens tokens(call.marks, head.sequence, first,
                        Smaller(head.span.tokens - first, kChunk));
    if (part.first_row == 0) {
      for (const auto& gradient : gradients)
        StoreZeros(tokens, head, 0, size, call.dtype, gradient.to);
      chunk.Read(call, head, tokens, chunk.slope);
      for (int64_t t = 0; t < tokens.there; ++t)
        LoadRow(call.dtype, call.dy, head.Token(tokens.at[t]), size, chunk.dy + t * size);
      Start(chunk, tokens.there, size);
    }
    if (tokens.there == 0) continue;

    for (int64_t row = part.first_row; row < last_row; row += kLanes) {
      LoadRow(call.states_dtype, call.states, head.SavedState(n) + row * size, kLanes * size,
              chunk.states);
      Replay(chunk, tokens, size, row);
      float* const ds_rows = ds + row * size;
      for (int64_t t = tokens.there - 1; t >= 0; --t) {
        // A slice of what is loaded next and of what is stored at the end of this chunk.
        const int64_t now = head.Token(tokens.at[t]) + row;
        if (n > 0) {
          const int64_t next = head.Token(tokens.at[t] - kChunk) + row;
          Chunk::PrefetchToken(call, next);
          Prefetch(call.dtype, call.dy, next);
        }
        for (const auto& gradient : gradients) Prefetch(call.dtype, gradient.to, now);
        StepBack(chunk, t, size, row, ds_rows);
        if (tokens.starts[t]) Clear(ds_rows, kLanes * size);
      }
    }

    if (last_row < size) continue;
    for (int64_t i = 0; i < tokens.there * size; i += kLanes)
      Store(chunk.dlog + i, Load(chunk.dlog + i) * Load(chunk.d + i) * Load(chunk.slope + i));
    for (int64_t t = 0; t < tokens.there; ++t) {
      for (const auto& gradient : gradients)
        StoreRow(call.dtype, gradient.to, head.Token(tokens.at[t]), size, gradient.from + t * size);
      for (int64_t i = 0; i < size && chunk.dlog_sum; i += kLanes)
        Store(chunk.dlog_sum + i, Load(chunk.dlog_sum + i) + Load(chunk.dlog + t * size + i));
    }
  }
}

}  // namespace
}  // namespace rwkv_jax::cpu
