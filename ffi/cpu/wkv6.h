// The kernels of WKV6 on CPUs, as handlers call them.
#pragma once

#include "kernels.h"
#include "rwkv_jax/wkv6.h"

namespace rwkv_jax::cpu {

struct Wkv6Kernels : HeadKernels<Wkv6ForwardCall, Wkv6BackwardCall> {
  static const Wkv6Kernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
