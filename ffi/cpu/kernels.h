// The kernels of an operator with a state for each head, as handlers call them.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

namespace rwkv_jax::cpu {

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
  int64_t (*backward_scratch)(const HeadDims& dims);
  void (*backward)(const BackwardCall& call, int64_t head, float* scratch);
};

}  // namespace rwkv_jax::cpu
