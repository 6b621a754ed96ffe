// The calls of WKV6 and WKV5: what the kernels of all platforms take and give. WKV5 is WKV6 with a decay
// that is the same for all tokens.
#pragma once

#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

// Arrays are dense and row-major: r, w, k, v, y and their cotangents are [B, T, H, K] of `dtype`; u, and
// the w of WKV5, are float [S, H, K]; a state is float [S, H, V, K]; saved states are [B, N, H, V, K] of
// `states_dtype`, which is kF32 or kBF16.
struct Wkv6Call {
  HeadDims dims;
  Dtype dtype, states_dtype;
  Decay decay;          // kLog or kExp
  bool constant_decay;  // WKV5: w is the same for all tokens
  const void *r, *w, *k, *v;
  const float* u;
  Marks marks;
  Sequences sequences;
};

// All tokens of a sequence take a state S to S diag(factor) + added. Neither r nor u is read.
struct Wkv6TransitionCall : Wkv6Call {
  float *factor, *added;  // [B, H, K] and [B, H, V, K]
};

struct Wkv6ForwardCall : Wkv6Call {
  const float* initial_state;  // may be final_state
  void* y;
  float* final_state;
  void* states;  // null if no states are saved
};

// du, and the dw of WKV5, are sums over all tokens of a sequence, or, where a kernel writes partial sums,
// over those of one split or chunk.
struct Wkv6BackwardCall : Wkv6Call {
  const void* states;
  const void* dy;
  const float* dfinal_state;
  void *dr, *dw, *dk, *dv;
  float *du, *dinitial_state;
};

}  // namespace rwkv_jax
