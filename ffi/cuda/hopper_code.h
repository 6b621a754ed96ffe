// Whether a build has code for GPUs of compute capability 9.0, on one of them.
#pragma once

#include <cuda_runtime.h>

namespace rwkv_jax::cuda {

// Whether a kernel that only traps on other GPUs has code for the current device.
template <typename Kernel>
bool IsCompiledForHopper(Kernel* kernel) {
  int ordinal = 0, major = 0;
  cudaFuncAttributes code = {};
  return cudaGetDevice(&ordinal) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) ==
             cudaSuccess &&
         major == 9 && cudaFuncGetAttributes(&code, kernel) == cudaSuccess &&
         code.numRegs > 64;  // a kernel that only traps has few
}

}  // namespace rwkv_jax::cuda
