// Tokens [B, T] in runs, one for each block.
//
// The gradient of a parameter is a sum over tokens. A block adds it up over its run, in registers and in
// float32, and writes one partial sum, and XLA adds up the partial sums of all runs. So no kernel needs
// atomic operations, and results do not depend on the order of blocks. All parameters are one array, and
// so are all partial sums: what XLA does with them is one small kernel, and not one for each parameter.
#pragma once

#include <cstdint>

namespace rwkv_jax::cuda {

// The run of a block. The runs of all rows, one row after another, lie along the first axis of the grid, the
// only one along which there may be more than 65,535 blocks.
struct TokenRun {
  int64_t row, begin, end;  // the tokens of a row from `begin` on and before `end`

  __device__ TokenRun(int64_t tokens, int64_t length) {
    const unsigned runs = static_cast<unsigned>((tokens + length - 1) / length);
    row = blockIdx.x / runs, begin = blockIdx.x % runs * length;
    end = begin + length < tokens ? begin + length : tokens;
  }
};

}  // namespace rwkv_jax::cuda
