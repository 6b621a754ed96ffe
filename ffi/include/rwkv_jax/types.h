// Types that handlers and kernels share; nothing of the FFI, so that kernels do not depend on it.
#pragma once

namespace rwkv_jax {

enum class Dtype { kF32, kBF16, kF16 };

// What w is, as in rwkv_jax/_decay.py; the codes are those of the `decay` attribute.
enum class Decay { kLog = 0, kExp = 1, kSigmoid = 2 };

// A log decay is floored here: exp(-200) is 0 in float32, and every derivative stays finite.
constexpr float kMinLogDecay = -200.0f;

// exp(-1/2), the largest decay rate of RWKV-7.
constexpr float kSigmoidScale = 0.6065306597126334f;

}  // namespace rwkv_jax
