// What w means (the forms of Decay), computed as each kind of kernel needs it.
//
// Values are floored by comparisons and not by fmaxf, so that a NaN stays a NaN.
#pragma once

#include <cfloat>
#include <cstdint>

#include "ptx.cuh"
#include "rwkv_jax/types.h"

namespace rwkv_jax::cuda {

constexpr float kLog2E = 1.4426950408889634f;

// --- In float, with exact exponentials: the kernels that go token by token.

// The decay factor of w, and its derivative in w.
__device__ inline float2 DecayAndSlope(float w, Decay form) {
  float log_decay = w, log_slope = 1.0f;
  if (form == Decay::kExp) {
    log_decay = -expf(w);
    log_decay = log_decay < kMinLogDecay ? kMinLogDecay : log_decay;
    log_slope = log_decay;
  } else if (form == Decay::kSigmoid) {
    log_decay = __fdividef(-kSigmoidScale, 1.0f + expf(-w));
    log_slope = __fdividef(log_decay, 1.0f + expf(w));
  } else {
    log_decay = log_decay < kMinLogDecay ? kMinLogDecay : log_decay;
  }
  const float d = expf(log_decay);
  return {d, d * log_slope};
}

// The log decay of WKV4, which has no floor but that it is finite, and its derivative in w.
__device__ inline float2 UnboundedLogDecay(float w, Decay form) {
  float slope = 1.0f;
  if (form == Decay::kExp) {
    const bool largest = w > kMaxLogRate;
    w = -expf(largest ? kMaxLogRate : w);
    slope = largest ? 0.0f : w;
  }
  // Not -inf: zero tokens times it would be NaN.
  return {w < -FLT_MAX ? -FLT_MAX : w, slope};
}

// --- On matrix units, with approximate exponentials.

// Log decays to base 2 are summed as float16, times this scale so that slow ones are not subnormal: the
// rounding of one changes its factor d by a relative |log d| / 4096 at most.
constexpr float kLogScale = 256.0f;
constexpr uint32_t kInverseLogScale = 0x1c001c00;  // 1 / 256, twice, in float16

// The base-2 logarithm of the decay factor of w, but at least `least`, times the scale.
template <Decay kForm>
__device__ float ScaledLogDecay(float w, float least) {
  constexpr float kScale = kLog2E * kLogScale;
  if (kForm == Decay::kSigmoid)
    return -kSigmoidScale * kScale * Reciprocal(1.0f + Exp2(-kLog2E * w));
  const float x = kForm == Decay::kExp ? -kScale * Exp2(kLog2E * w) : kScale * w;
  return x < least * kLogScale ? least * kLogScale : x;
}

// The same logarithm without the scale, of kLog or kExp.
__device__ inline float Log2Decay(float w, Decay form) {
  const float log2 = kLog2E * (form == Decay::kExp ? -Exp2(kLog2E * w) : w);
  return log2 < kMinLog2Decay ? kMinLog2Decay : log2;
}

// The base-2 logarithm of the decay factor of w, but at least `least`, and the derivative of the natural one in w,
// which is 0 below that. kSigmoid needs no floor.
template <Decay kForm>
__device__ float2 Log2DecayAndSlope(float w, float least) {
  if constexpr (kForm == Decay::kSigmoid) {
    const float exponent = -kLog2E * w;
    const float e = Exp2(exponent > 126.0f ? 126.0f : exponent);
    const float s = Reciprocal(1.0f + e), log_decay = -kSigmoidScale * s;
    return {kLog2E * log_decay, log_decay * s * e};
  }
  const float slope = kForm == Decay::kExp ? -Exp2(kLog2E * w) : 1.0f;
  const float log2 = kLog2E * (kForm == Decay::kExp ? slope : w);
  return log2 < least ? float2{least, 0.0f} : float2{log2, slope};
}

}  // namespace rwkv_jax::cuda
