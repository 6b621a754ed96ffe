// The calls of the squared-ReLU network of a channel mixing: what the kernels take and give.
#pragma once

#include "rwkv_jax/products.h"

namespace rwkv_jax {

// All arrays are bfloat16; hidden and the result are [M, N].
struct HiddenProductCall : Product {
  void* result;
};

// result = max(rows weight^T, 0)^2
struct SquaredReluCall : HiddenProductCall {
  static constexpr const char* kName = "feed_forward_fwd";
};

// result = (rows V) 2 sqrt(hidden), for rows of dy and V [K, N]. The weight V^T is made where `weight` is.
struct SquaredReluGradientCall : HiddenProductCall {
  static constexpr const char* kName = "feed_forward_bwd";
  const void *value, *hidden;
};

// The kernels take K from so much on.
constexpr int64_t kMinHiddenProductWidth = 512;

}  // namespace rwkv_jax
