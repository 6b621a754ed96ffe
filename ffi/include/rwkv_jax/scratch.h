// Between the parts of a scratch.
#pragma once

#include <cstdint>

namespace rwkv_jax {

// Tests put so many floats behind each part, and look whether a kernel has written them.
#ifdef RWKV_JAX_SCRATCH_GAP
constexpr int64_t kScratchGap = RWKV_JAX_SCRATCH_GAP;
#else
constexpr int64_t kScratchGap = 0;
#endif

}  // namespace rwkv_jax
