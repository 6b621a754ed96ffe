// The calls of WKV7: what the kernels of all platforms take and give.
#pragma once

#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

// Arrays are dense and row-major: v, y and their cotangents are [B, T, H, V] of `dtype`, the other inputs
// [B, T, key heads, K], and the gradients of these [B, T, H, K]; a state is float [S, H, V, K]; saved states are
// [B, N, H, V, K] of `states_dtype`, which is kF32 or kBF16.
struct Wkv7Call {
  HeadDims dims;
  Dtype dtype, states_dtype;
  Decay decay;
  const void *r, *w, *k, *v, *a, *b;
  Marks marks;
  Sequences sequences;
};

// All tokens of a sequence take a state S to S factor + added. r is not read.
struct Wkv7TransitionCall : Wkv7Call {
  float *factor, *added;  // [B, H, K, K] and [B, H, V, K]
};

struct Wkv7ForwardCall : Wkv7Call {
  const float* initial_state;  // may be final_state
  void* y;
  float* final_state;
  void* states;  // null if no states are saved
};

struct Wkv7BackwardCall : Wkv7Call {
  const void* states;
  const void* dy;
  const float* dfinal_state;
  void *dr, *dw, *dk, *dv, *da, *db;
  float* dinitial_state;
};

// WKV7 with the operands k, a and b that wkv7_keys makes (layers.h), which are never stored: `k` is the
// projected k, `a` has the rate, and `b` is null. The gradients are those of these inputs. The parameters of
// wkv7_keys are [B, J, H, K], and `bonus` and `inverse`, its results, are [B, T, H].
struct Wkv7KeyedForwardCall : Wkv7ForwardCall {
  const float* parameters;
  float *bonus, *inverse;
};

// `partials` [B, runs, J, H, K] are partial sums of the gradients of the parameters.
struct Wkv7KeyedBackwardCall : Wkv7BackwardCall {
  const float *parameters, *inverse, *dbonus;
  float* partials;
};

// WKV7 with operands of the delta rule, from which the kernels make those of WKV7 (`w` is g, the others of its
// calls are stored nowhere):
//
//   r = scale q     k = beta k'     a = exp(g) k'     b = -beta k'
//
// `r` is q, `k` is k', and `a` and `b` are null. beta is [B, T, H]. g is [B, T, H, K] or, if `head_decay`, float
// [B, T, H], and so is its gradient: heads share q and k alone. `scale` is one number. The gradients are those of these
// inputs.
struct Wkv7DeltaForwardCall : Wkv7ForwardCall {
  const float *scale, *beta;
  bool head_decay;
};

struct Wkv7DeltaBackwardCall : Wkv7BackwardCall {
  const float *scale, *beta;
  bool head_decay;
  float* dbeta;
};

}  // namespace rwkv_jax
