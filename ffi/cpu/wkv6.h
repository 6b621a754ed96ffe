// WKV6 on CPUs: what a handler asks of the kernels.
#pragma once

#include "kernels.h"
#include "rwkv_jax/wkv6.h"

namespace rwkv_jax::cpu {

struct Wkv6Kernels : HeadKernels<Wkv6ForwardCall, Wkv6BackwardCall> {
  static const Wkv6Kernels baseline, avx2, avx512;
};

}  // namespace rwkv_jax::cpu
