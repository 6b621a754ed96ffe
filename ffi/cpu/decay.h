// What w means (the forms of Decay) on CPUs. As in vector.h, everything has internal linkage.
#pragma once

#include <cstdint>

#include "vector.h"

namespace rwkv_jax::cpu {
namespace {

// The log decay of WKV4, which has no floor but that it is finite, and its derivative in w.
struct LogDecay {
  Vec value, slope;
};

inline LogDecay UnboundedLogDecay(Vec w, Decay form) {
  if (form == Decay::kLog) return {w, Broadcast(1.0f)};
  const Vec value = -Exp(Clamp(w, kMinExp, kMaxLogRate));
  return {value, w > kMaxLogRate ? Vec{} : value};
}

// Replaces `w` by the decay factor d. `slope`, unless null, becomes the derivative of the log decay
// with respect to w, which is finite, so that its product with a d of 0 is 0. The factor is 0 from
// kMinExp on, which is above kMinLogDecay.
[[gnu::noinline]] inline void DecayRow(Decay form, int64_t count, float* w, float* slope) {
  static_assert(kMinExp > kMinLogDecay);
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec x = Load(w + i), derivative = Broadcast(1.0f);
    if (form == Decay::kLog) {
      x = Clamp(x, kMinExp, kMaxExp);
    } else if (form == Decay::kExp) {
      derivative = -Exp(Clamp(x, kMinExp, 5.0f));  // exp(-exp(5)) is 0
      x = Clamp(derivative, kMinExp, 0.0f);
    } else {
      const Vec e = Exp(Clamp(-x, -80.0f, 80.0f));
      const Vec sigmoid = 1.0f / (1.0f + e);
      x = -kSigmoidScale * sigmoid;
      derivative = x * (e * sigmoid);
    }
    Store(w + i, Exp(x));
    if (slope) Store(slope + i, derivative);
  }
}

}  // namespace
}  // namespace rwkv_jax::cpu
