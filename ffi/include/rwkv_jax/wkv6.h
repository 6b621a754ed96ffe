// What the WKV6 kernels of all platforms take and give. WKV5 is WKV6 with a decay that is the same for
// all tokens.
#pragma once

#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

// Arrays are dense and row-major: the inputs, y and their cotangents [B, T, H, K] of `dtype`, a
// state [B, H, V, K] of float, the saved states [B, N, H, V, K] of `states_dtype`, which is kF32 or
// kBF16. A parameter of the batch is there once for each sequence, as float [B, H, K].
struct Wkv6Call {
  HeadDims dims;
  Dtype dtype, states_dtype;
  Decay decay;          // kLog or kExp
  bool constant_decay;  // w is a parameter
  const void *r, *w, *k, *v;
  const float* u;
  Marks marks;
  Sequences sequences;
};

// Of all tokens together; needs neither r nor u.
struct Wkv6SummaryCall : Wkv6Call {
  float *factor, *added;  // d [B, H, K] and D [B, H, V, K]
};

struct Wkv6ForwardCall : Wkv6Call {
  const float* initial_state;  // may be final_state
  void* y;
  float* final_state;
  void* states;  // null if none are to be saved
};

// The gradients of parameters are partial sums, float [B, partials, H, K], which the caller adds up.
struct Wkv6BackwardCall : Wkv6Call {
  const void* states;
  const void* dy;
  const float* dfinal_state;
  int64_t partials;
  void *dr, *dw, *dk, *dv;
  float *du, *dinitial_state;
};

}  // namespace rwkv_jax
