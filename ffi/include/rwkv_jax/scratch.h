// The parts of a scratch, one after another.
#pragma once

#include <cstdint>

namespace rwkv_jax {

// Tests put a gap of so many floats behind each part, and look whether a kernel has written it.
#ifdef RWKV_JAX_SCRATCH_GAP
constexpr int64_t kScratchGap = RWKV_JAX_SCRATCH_GAP;
#else
constexpr int64_t kScratchGap = 0;
#endif

// Where the next part begins, which has so many floats; `end` is that of all parts.
inline int64_t TakePart(int64_t floats, int64_t& end) {
  const int64_t begin = end;
  end += floats + kScratchGap;
  return begin;
}

}  // namespace rwkv_jax
