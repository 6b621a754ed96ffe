// The product of a few rows with a matrix, as decoding needs it: y = x W^T for W [O, I], or y = x W for
// W [I, O]. Rows are float32. The matrix is read once, in the type in which it is stored, and of W [I, O]
// only the inputs that are not zero in all rows.
#pragma once

#include <cstdint>

namespace rwkv_jax::cpu {

enum class Stored { kF32, kBF16, kF16, kI8 };

struct RowProductCall {
  int64_t rows, inputs, outputs;  // B, I, O
  bool by_output;                 // whether the matrix is [O, I]
  Stored stored;
  const float* x;      // [B, I]
  const void* weight;  // [O, I] or [I, O]
  // The factor of each group of inputs of an output, [O, G]; null where there is none. G divides I.
  const float* scale;
  int64_t groups;
  float* y;  // [B, O]
};

struct RowProductKernels {
  // For W [O, I]: computes the outputs from `first` on, up to `last`.
  void (*outputs)(const RowProductCall& call, int64_t first, int64_t last);
  // For W [I, O]: what the inputs from `begin` on, up to `end`, contribute to the outputs from `first` on,
  // up to `last`, of `sums` [B, O].
  void (*inputs)(const RowProductCall& call, int64_t begin, int64_t end, int64_t first,
                 int64_t last, float* sums);

  static const RowProductKernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
