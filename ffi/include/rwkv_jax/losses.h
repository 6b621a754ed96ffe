// The calls of losses: what the kernels take and give.
#pragma once

#include <cstdint>

#include "rwkv_jax/products.h"
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

// The loss of each token and its gradient from features and the weight of the head, both of bfloat16, as a
// Product whose columns are the vocabulary. The gradient of the logits of a token is its factor times its
// exponentials, bfloat16 [T, V]. `of_target` are the logits of the targets, anything where a target is
// outside the vocabulary. The rest is scratch: `bases` [T], `again` one number for each kHeadTileTokens
// tokens, and four for each token and kHeadTileColumns columns in `statistics`.
struct HeadCrossEntropyCall : Product {
  static constexpr const char* kName = "head_cross_entropy";
  const int32_t* targets;
  const float *of_target, *scale, *l2_wrap;
  float *loss, *factors;
  void* exponentials;
  float* bases;
  int32_t* again;
  void* statistics;
};

constexpr int64_t kHeadTileTokens = 256, kHeadTileColumns = 256;

}  // namespace rwkv_jax
