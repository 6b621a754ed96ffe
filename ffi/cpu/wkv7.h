// WKV7 on CPUs: what a handler asks of the kernels.
#pragma once

#include <cstdint>

#include "rwkv_jax/wkv7.h"

namespace rwkv_jax::cpu {

// The kernels for one instruction set. Head sizes are powers of two from 16 on; scratch is counted
// in floats and aligned to 64 bytes.
struct Wkv7Kernels {
  // The rows of a state are independent of each other in the forward pass. A call takes `rows` of
  // them, a power of two from min_rows on, of one head, counted over batch and heads.
  int64_t min_rows;
  int64_t (*forward_scratch)(const Wkv7Dims& dims, int64_t rows);
  void (*forward)(const Wkv7ForwardCall& call, int64_t head, int64_t first_row, int64_t rows,
                  float* scratch);
  int64_t (*backward_scratch)(const Wkv7Dims& dims);
  void (*backward)(const Wkv7BackwardCall& call, int64_t head, float* scratch);
};

// clang-format off
#if defined(__x86_64__)
namespace avx512 { extern const Wkv7Kernels kWkv7; }
namespace avx2 { extern const Wkv7Kernels kWkv7; }
#endif
namespace baseline { extern const Wkv7Kernels kWkv7; }
// clang-format on

}  // namespace rwkv_jax::cpu
