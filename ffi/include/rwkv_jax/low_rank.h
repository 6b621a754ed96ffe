// The calls of low-rank maps, one or several side by side: what the kernels take and give.
#pragma once

#include <cstdint>

#include "rwkv_jax/products.h"

namespace rwkv_jax {

enum class Activation { kIdentity, kTanh, kSigmoid };
constexpr int kActivations = 3;

// All arrays are bfloat16, dense and row-major: first [C, R], second [R, C], rows and the result [M, C].
struct LowRankCall {
  int64_t tokens, width, rank;  // M, C and R
  int64_t hidden_size;          // R, or R + 8 with an offset: the last eight columns are 1
  Activation activation;
  const void *rows, *first, *second;
  void* result;
};

// hidden = activation(rows first), and result = hidden second + offset, for rows of x
struct LowRankForwardCall : LowRankCall {
  static constexpr const char* kName = "low_rank_fwd";
  const void* offset;  // [C], or null
  void* hidden;        // [M, hidden_size]
};

// dhidden = (rows second^T) activation'(hidden), and result = dhidden first^T, for rows of dy
struct LowRankBackwardCall : LowRankCall {
  static constexpr const char* kName = "low_rank_bwd";
  const void* hidden;  // [M, hidden_size]
  void* dhidden;       // [M, R]
};

// For each map hidden = activation(rows first), and result = hidden second + offset.
struct LowRankMapsCall {
  static constexpr const char* kName = "low_rank_maps";
  struct Map {
    const void *rows, *first, *second;  // [M, C], [C, R], [R, C]
    const void* offset;                 // [C], or null
    void *hidden, *result;              // [M, R], [M, C]
    int64_t rank;
    Activation activation;
  };
  int64_t tokens, width;  // M and C
  Map maps[kMaxProducts];
  int count;
};

// What the kernels take: C in such multiples, R in such multiples, and up to so much.
constexpr int64_t kLowRankWidthMultiple = 128, kLowRankMultiple = 8;
constexpr int64_t kMaxLowRank = 256, kMaxLowRankWidth = 1 << 18, kMaxLowRankTokens = 1 << 24;
// The columns that an offset adds to the hidden layer.
constexpr int64_t kOffsetColumns = 8;
// Maps side by side have C in multiples of kLowRankMultiple, and ranks up to so much.
constexpr int64_t kMaxSideBySideRank = 1024;

}  // namespace rwkv_jax
