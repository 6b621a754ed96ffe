// The calls of WKV4: what the kernels of all platforms take and give.
#pragma once

#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

struct Wkv4Dims {
  int64_t batch, tokens, channels;
  int64_t saved;  // N, the states saved for the backward pass: Chunks(tokens), or 0
};

// A state is two sums over past tokens, num e^log_max and den e^log_max. Its three arrays, and those of
// its gradient, are float [S, C]; saved states are float [B, N, C].
template <typename Float>
struct Wkv4State {
  Float *num, *den, *log_max;
};

// Arrays are dense and row-major: k, v, y and their cotangents are [B, T, C] of `dtype`; w and u are
// float [S, C].
struct Wkv4Call {
  Wkv4Dims dims;
  Dtype dtype;
  Decay decay;  // kLog or kExp
  const float *w, *u;
  const void *k, *v;
  Marks marks;
  Sequences sequences;
};

struct Wkv4ForwardCall : Wkv4Call {
  Wkv4State<const float> initial_state;  // may be final_state
  void* y;
  Wkv4State<float> final_state;
  Wkv4State<float> states;  // null if no states are saved
};

// dw and du are sums over all tokens of a sequence, or, where a kernel writes partial sums, over those of
// one split.
struct Wkv4BackwardCall : Wkv4Call {
  Wkv4State<const float> states;
  const void* dy;
  Wkv4State<const float> dfinal_state;
  float *dw, *du;
  void *dk, *dv;
  Wkv4State<float> dinitial_state;
};

}  // namespace rwkv_jax
