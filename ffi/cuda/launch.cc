#include "launch.cuh"

#include <cuda_runtime_api.h>

#include "asked_once.h"

namespace rwkv_jax::cuda {

cudaError_t Prepare(const void* kernel, KernelOnDevice& prepared) {
  static auto& known = *new AskedOnce<const void*, KernelOnDevice>;
  return known.Get(kernel, prepared, [kernel](KernelOnDevice& answer, int device) {
    cudaFuncAttributes code = {};
    int most = 0;
    cudaError_t error = cudaFuncGetAttributes(&code, kernel);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    answer.static_bytes = static_cast<int>(code.sharedSizeBytes);
    // Code for earlier devices has none, also where a later device runs it.
    answer.waits = code.ptxVersion >= 90;
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   most - answer.static_bytes);
    return error;
  });
}

}  // namespace rwkv_jax::cuda
