// The calls of losses: what the kernels take and give.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

namespace rwkv_jax {

// The loss of each token and its gradient, from the logits of all tokens, float [T, V]. `targets` are
// [T], `scale` and `loss` float [T], `coefficients` float [2]: z_loss and l2_wrap. `dlogits` are [T, V]
// of `dtype`.
struct CrossEntropyCall {
  static constexpr const char* kName = "cross_entropy";
  int64_t tokens, vocabulary;
  Dtype dtype;
  const float* logits;
  const int32_t* targets;
  const float *scale, *coefficients;
  float* loss;
  void* dlogits;
};

// Logits are read eight at a time.
constexpr int64_t kVocabularyMultiple = 8;

}  // namespace rwkv_jax
