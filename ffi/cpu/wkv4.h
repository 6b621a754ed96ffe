// The kernels of WKV4 on CPUs, as handlers call them.
#pragma once

#include <cstdint>

#include "rwkv_jax/wkv4.h"

namespace rwkv_jax::cpu {

// The kernels for one instruction set. Channels are independent of each other. A call takes those from `first`,
// a multiple of 16, up to `end`.
struct Wkv4Kernels {
  void (*forward)(const Wkv4ForwardCall& call, int64_t sequence, int64_t first, int64_t end);
  void (*backward)(const Wkv4BackwardCall& call, int64_t sequence, int64_t first, int64_t end);

  static const Wkv4Kernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
