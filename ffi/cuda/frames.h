// What the handlers and the kernels on matrix units of several operators share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace rwkv_jax::cuda {

constexpr int64_t kMaxSegments = 65535;  // of the second axis of a grid

// The gradient of the state at the end of each frame of kChunk tokens, [V, K] of bfloat16 in pieces of
// eight columns.
struct FrameGradients {
  uint4* memory;
  int64_t stride;  // pieces for each head

  // Floats for each head.
  static constexpr int64_t Size(int64_t head_size, int64_t frames) {
    return frames * head_size * head_size / 2;
  }
};

}  // namespace rwkv_jax::cuda
