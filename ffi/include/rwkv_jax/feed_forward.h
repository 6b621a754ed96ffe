// The calls of the squared-ReLU network of a channel mixing: what the kernels take and give.
#pragma once

#include <cstdint>

namespace rwkv_jax {

// All arrays are bfloat16, dense and row-major: rows [M, K], weight [N, K], hidden and the result [M, N].
struct ProductCall {
  int64_t tokens, width, hidden_size;  // M, K and N
  const void *rows, *weight;
  void* result;
};

// result = max(rows weight^T, 0)^2
struct SquaredReluCall : ProductCall {
  static constexpr const char* kName = "feed_forward_fwd";
};

// result = (rows weight^T) 2 sqrt(hidden), for rows of dy and the weight V^T
struct SquaredReluGradientCall : ProductCall {
  static constexpr const char* kName = "feed_forward_bwd";
  const void* hidden;
};

// What the kernels take: K from so much on, in such multiples, N in such multiples, and up to so much.
constexpr int64_t kMinProductWidth = 512, kProductWidthMultiple = 64;
constexpr int64_t kHiddenMultiple = 256;
constexpr int64_t kMaxProductTokens = 1 << 24, kMaxProductWidth = 1 << 18;

}  // namespace rwkv_jax
