// What the handlers and the kernels on matrix units of several operators share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace rwkv_jax::cuda {

constexpr int64_t kMaxSegments = 65535;  // of the second axis of a grid

// For each head, the floats of the gradients of the state at the end of each frame of kChunk tokens,
// [B, frames, H, V, K] of bfloat16, as the saved states are.
constexpr int64_t FrameGradientsSize(int64_t head_size, int64_t frames) {
  return frames * head_size * head_size / 2;
}

}  // namespace rwkv_jax::cuda
