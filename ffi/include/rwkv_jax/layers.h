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

constexpr int64_t Runs(int64_t tokens) { return (tokens + kRun - 1) / kRun; }

constexpr float kLayerNormEps = 1e-5f;
constexpr float kGroupNormEps = 64e-5f;
constexpr float kUnitLengthEps = 1e-12f;

// What stands before a token: the token before it in the row, nothing, or the state.
enum class Origin : int32_t { kToken = 0, kNothing = 1, kState = 2 };

constexpr int kMaxMixes = 6;

// Arrays are dense and row-major. x and the mixed arrays are [B, T, D] of `dtype`, `before` is [B, D] of
// `dtype`; parameters are float: weight and bias [B, D], mix [B, I, D]. `origin` is [B, T], or null
// where each row is one sequence that goes on from the state.
struct NormShiftMixCall {
  static constexpr const char* kName = "norm_shift_mix";
  int64_t rows, tokens, width, mixes;
  Dtype dtype;
  const void *x, *before;
  const float *weight, *bias, *mix;
  const int32_t* origin;
};
struct NormShiftMixForwardCall : NormShiftMixCall {
  void* mixed[kMaxMixes];
};
// `dpassed` is the cotangent of x where x is passed on; dx contains it. The partial sums are
// [B, runs, J, D] with J = 2 + I: of the gradients of weight, bias and mix.
struct NormShiftMixBackwardCall : NormShiftMixCall {
  const void* dpassed;
  const void* dmixed[kMaxMixes];
  void *dx, *dbefore;
  float* partials;
};

struct HeadTokens {
  int64_t rows, tokens, width, head_size;  // all heads have `width` channels
  Dtype dtype;
};

// Tensors are [B, T, H, K], parameters float [B, H, K], and the partial sums [B, runs, J, H, K]. A result
// with two uses has a cotangent from each.
struct Wkv7KeysCall : HeadTokens {
  static constexpr const char* kName = "wkv7_keys";
  const void *k, *rate;
  const float *k_k, *k_a, *a0;
};
struct Wkv7KeysForwardCall : Wkv7KeysCall {
  void *key, *a, *b;
};
struct Wkv7KeysBackwardCall : Wkv7KeysCall {
  const void *dkey[2], *da, *db;
  void *dk, *drate;
  float* partials;  // J = 3: of the gradients of k_k, k_a and a0
};

struct ValueResidualCall : HeadTokens {
  static constexpr const char* kName = "value_residual";
  const void *v, *rate, *first;
  const float* v0;
};
struct ValueResidualForwardCall : ValueResidualCall {
  void* value;
};
// `dpassed` is the cotangent of `first` where it is passed on; dfirst contains it.
struct ValueResidualBackwardCall : ValueResidualCall {
  const void *dvalue[2], *dpassed;
  void *dv, *drate, *dfirst;
  float* partials;  // J = 1: of the gradient of v0
};

struct ReadOutCall : HeadTokens {
  static constexpr const char* kName = "read_out";
  const void *y, *r, *k, *v, *gate;
  const float *weight, *bias, *r_k;
};
struct ReadOutForwardCall : ReadOutCall {
  void* out;
};
struct ReadOutBackwardCall : ReadOutCall {
  const void* dout;
  void *dy, *dr, *dk, *dv, *dgate;
  float* partials;  // J = 3: of the gradients of weight, bias and r_k
};

}  // namespace rwkv_jax
