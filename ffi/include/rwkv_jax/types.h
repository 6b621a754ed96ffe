// Types that handlers and kernels share; nothing of the FFI, so that kernels do not depend on it.
#pragma once

#include <cstdint>

namespace rwkv_jax {

enum class Dtype { kF32, kBF16, kF16 };

// What w is, as in rwkv_jax/_decay.py; the codes are those of the `decay` attribute.
enum class Decay { kLog = 0, kExp = 1, kSigmoid = 2 };

// A log decay is floored here: exp(-200) is 0 in float32, and every derivative stays finite.
constexpr float kMinLogDecay = -200.0f;

// exp(-1/2), the largest decay rate of RWKV-7.
constexpr float kSigmoidScale = 0.6065306597126334f;

// Tokens between two saved states, as CHUNK in rwkv_jax/_chunked.py.
constexpr int64_t kChunk = 64;

constexpr int64_t Chunks(int64_t tokens) { return (tokens + kChunk - 1) / kChunk; }

// The sizes of an operator whose state is a matrix for each head.
struct HeadDims {
  int64_t batch, tokens, heads;
  int64_t head_size;  // K = V
  int64_t saved;      // N, the states saved for the backward pass: Chunks(tokens), or 0
};

}  // namespace rwkv_jax
