// What the WKV4 kernels of all platforms take and give.
#pragma once

#include "rwkv_jax/sequences.h"

namespace rwkv_jax {

struct Wkv4Dims {
  int64_t batch, tokens, channels;
  int64_t saved;  // N, the states saved for the backward pass: Chunks(tokens), or 0
};

// The sums num e^log_max and den e^log_max over past tokens, and their gradients; [B, C] of float, or
// [B, N, C] where they are saved.
template <typename Float>
struct Wkv4State {
  Float *num, *den, *log_max;
};

// Arrays are dense and row-major: k, v, y and their cotangents [B, T, C] of `dtype`; a parameter is
// there once for each sequence, as float [B, C].
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
  Wkv4State<float> states;  // null if none are to be saved
};

// The gradients of parameters are partial sums, float [B, partials, C], which the caller adds up.
struct Wkv4BackwardCall : Wkv4Call {
  Wkv4State<const float> states;
  const void* dy;
  Wkv4State<const float> dfinal_state;
  int64_t partials;
  float *dw, *du;
  void *dk, *dv;
  Wkv4State<float> dinitial_state;
};

}  // namespace rwkv_jax
