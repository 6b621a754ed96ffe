// The kernels of an operator with a state for each head, as handlers call them.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

namespace rwkv_jax::cpu {

// What one call of a backward kernel does: `rows` rows, a multiple of min_rows, of the state of a head, in
// `chunks` chunks, of which the first is number `first_chunk` from the end of the sequence.
//
// The gradients that all rows of a chunk share are sums over rows, which are added in the order of the rows.
// So before a part, all parts have to be done that have the same rows and later chunks, and those that have
// the same chunks and earlier rows.
struct BackwardPart {
  int64_t head, first_row, rows, first_chunk, chunks;
};

// The scratch of a backward kernel: what all parts of a chunk share, and what each call has for itself.
struct BackwardScratch {
  int64_t chunk, own;
};

// The kernels for one instruction set. Head sizes are powers of two from 16 on; scratch is counted
// in floats and aligned to 64 bytes.
template <typename ForwardCall, typename BackwardCall>
struct HeadKernels {
  // The rows of a state are independent of each other in the forward pass. A call takes `rows` of
  // them, a power of two from min_rows on, of one head, counted over sequences and heads.
  int64_t min_rows;
  int64_t (*forward_scratch)(const HeadDims& dims, int64_t rows);
  void (*forward)(const ForwardCall& call, int64_t head, int64_t first_row, int64_t rows,
                  float* scratch);
  BackwardScratch (*backward_scratch)(const HeadDims& dims);
  void (*backward)(const BackwardCall& call, const BackwardPart& part, float* chunk, float* own);
};

}  // namespace rwkv_jax::cpu
