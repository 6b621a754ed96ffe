// What test_emulation.py says of the rows of a call.
#pragma once

#include <cstdint>

#include "splits.h"

namespace emulation {

// As the operands of a target, null where they are not given.
struct Rows {
  const uint32_t* marks;
  const int32_t *spans, *owners;
  int64_t words;   // of a sequence in spans
  int64_t frames;  // of all rows, for which states are saved

  template <typename Call>
  void Put(Call& call) const {
    call.marks = {marks, rwkv_jax::Marks::Words(call.dims.tokens)};
    call.sequences = {spans, owners, call.dims.batch, words, call.dims.tokens};
    call.dims.saved = spans == nullptr ? rwkv_jax::Chunks(call.dims.tokens) : frames;
  }
  // As the handlers for sequences make them.
  rwkv_jax::cuda::Splits SplitsOf(int64_t tokens, int64_t count, float* memory,
                                      int64_t size) const {
    if (count == 1) return {count, memory, size};
    return {count, memory, size, (rwkv_jax::Chunks(tokens) + count - 1) / count};
  }
};

}  // namespace emulation
