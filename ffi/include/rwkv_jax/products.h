// What the products of many rows with an epilogue take (cuda/wide_product.cuh).
#pragma once

#include <cstdint>

namespace rwkv_jax {

// rows [M, K] weight [N, K]^T, of bfloat16, dense and row-major.
struct Product {
  int64_t tokens, width, columns;  // M, K and N
  const void *rows, *weight;
};

// K and N are such multiples, and up to so much.
constexpr int64_t kProductWidthMultiple = 64, kProductColumnsMultiple = 256;
constexpr int64_t kMaxProductTokens = 1 << 24, kMaxProductWidth = 1 << 18;

}  // namespace rwkv_jax
