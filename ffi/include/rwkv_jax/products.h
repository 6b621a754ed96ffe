// What matrix products take: those of many rows with an epilogue (cuda/wide_product.cuh), and several side by
// side (cuda/products).
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

// So many products side by side. Their outputs are cut into groups. In tiles, a block of threads has up to
// kTileRows rows and kMaxTileOutputs outputs at a time; where blocks share out the inputs of a product, there
// are at most kMaxTileBlocks of them.
constexpr int kMaxProducts = 7, kGroupOutputs = 128;
constexpr int64_t kTileRows = 128, kMaxTileOutputs = 256, kMaxTileBlocks = 192;

}  // namespace rwkv_jax
