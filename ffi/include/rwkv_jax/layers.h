// The calls of the layer functions, which stand around the operators: what the kernels take and give.
//
// A layer function is computed token by token, besides the token before. Its kernels add up the
// gradients of parameters over runs of tokens, and leave a partial sum of each.
#pragma once

#include <cstdint>

#include "rwkv_jax/types.h"

namespace rwkv_jax {

// A kernel adds up the gradients of parameters over so many tokens of a row.
constexpr int64_t kRun = 64;

constexpr int64_t Runs(int64_t tokens, int64_t length = kRun) {
  return (tokens + length - 1) / length;
}

constexpr float kLayerNormEps = 1e-5f;
constexpr float kGroupNormEps = 64e-5f;
constexpr float kUnitLengthEps = 1e-12f;

// What stands before a token: the token before it in the row, nothing, or the state.
enum class Origin : int32_t { kToken = 0, kNothing = 1, kState = 2 };

constexpr int kMaxMixes = 6;

// Arrays are dense and row-major. x and the mixed arrays are [B, T, D] of `dtype`, `before` is [B, D] of
// `dtype`. The parameters are [B, J, D] with J = 2 + I: weight, bias and the rows of mix. `origin` is
// [B, T], or null where each row is one sequence that goes on from the state.
struct NormShiftMixCall {
  static constexpr const char* kName = "norm_shift_mix";
  int64_t rows, tokens, width, mixes;
  Dtype dtype;
  const void *x, *before;
  const float* parameters;
  const int32_t* origin;
};
// `moments` are [B, T, 2]: the mean and 1 / sqrt(variance + eps) of each token.
struct NormShiftMixForwardCall : NormShiftMixCall {
  void* mixed[kMaxMixes];
  float* moments;
};
// `dpassed` is the cotangent of x where x is passed on; dx contains it. The partial sums are
// [B, runs, J, D]: of the gradients of the parameters.
struct NormShiftMixBackwardCall : NormShiftMixCall {
  const float* moments;
  const void* dpassed;
  const void* dmixed[kMaxMixes];
  void *dx, *dbefore;
  float* partials;
};

struct HeadTokens {
  int64_t rows, tokens, width, head_size;  // all heads have `width` channels
  Dtype dtype;
};

// Tensors are [B, T, H, K], the parameters [B, J, H, K], and the partial sums [B, runs, J, H, K] of the
// gradients of parameters. `bonus` is [B, T, H] of float. A result with two uses has a cotangent from each.
struct Wkv7KeysCall : HeadTokens {
  static constexpr const char* kName = "wkv7_keys";
  static constexpr int64_t kParameters = 4;  // J
  const void *k, *rate, *r;
  const float* parameters;  // k_k, k_a, a0 and r_k
};
// If `inverse` [B, T, H] of float is given, it gets 1 / max(|k k_k|, eps), and key, a and b are not written.
struct Wkv7KeysForwardCall : Wkv7KeysCall {
  void *key, *a, *b;
  float *bonus, *inverse;
};
// `dpassed` is the cotangent of r where it is passed on; dr contains it.
struct Wkv7KeysBackwardCall : Wkv7KeysCall {
  const void *dkey, *da, *db;
  const float* dbonus;
  const void* dpassed;
  void *dk, *drate, *dr;
  float* partials;
};

struct ValueResidualCall : HeadTokens {
  static constexpr const char* kName = "value_residual";
  static constexpr int64_t kParameters = 1;
  const void *v, *rate, *first;
  const float* parameters;  // v0
};
struct ValueResidualForwardCall : ValueResidualCall {
  void* value;
};
// `dpassed` is the cotangent of `first` where it is passed on; dfirst contains it.
struct ValueResidualBackwardCall : ValueResidualCall {
  const void *dvalue[2], *dpassed;
  void *dv, *drate, *dfirst;
  float* partials;
};

struct ReadOutCall : HeadTokens {
  static constexpr const char* kName = "read_out";
  static constexpr int64_t kParameters = 2;
  const void* y;
  const float* bonus;
  const void *v, *gate;
  const float* parameters;  // weight and bias
};
struct ReadOutForwardCall : ReadOutCall {
  void* out;
};
struct ReadOutBackwardCall : ReadOutCall {
  const void* dout;
  void* dy;
  float* dbonus;
  void *dv, *dgate;
  float* partials;
  void* out;  // null where it is not restored
};
// Restores the result of the forward pass.
struct ReadOutRestoringBackwardCall : ReadOutBackwardCall {};

}  // namespace rwkv_jax
