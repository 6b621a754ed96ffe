// The kernels of WKV4 on CPUs, as handlers call them.
#pragma once

#include <cstdint>

#include "rwkv_jax/wkv4.h"

namespace rwkv_jax::cpu {

// Channels are independent of each other. A kernel takes so many of them, or those that are left.
constexpr int64_t kChannels = 128;

// The kernels for one instruction set.
struct Wkv4Kernels {
  void (*forward)(const Wkv4ForwardCall& call, int64_t sequence, int64_t first_channel);
  void (*backward)(const Wkv4BackwardCall& call, int64_t sequence, int64_t first_channel);

  static const Wkv4Kernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
