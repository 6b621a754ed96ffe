// The kernels of WKV7 on CPUs, as handlers call them.
#pragma once

#include "kernels.h"
#include "rwkv_jax/wkv7.h"

namespace rwkv_jax::cpu {

struct Wkv7Kernels : HeadKernels<Wkv7ForwardCall, Wkv7BackwardCall> {
  static const Wkv7Kernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
