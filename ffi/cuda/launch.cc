#include <cuda_runtime_api.h>

#include <utility>

#include "asked_once.h"
#include "launch.cuh"

namespace rwkv_jax::cuda {

cudaError_t Prepare(const void* kernel, KernelOnDevice& prepared) {
  static AskedOnce<std::pair<int, const void*>, KernelOnDevice> known;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return known.Get({device, kernel}, prepared, [&](KernelOnDevice& answer) {
    cudaFuncAttributes code = {};
    int most = 0;
    error = cudaFuncGetAttributes(&code, kernel);
    if (error == cudaSuccess)
      error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   most - static_cast<int>(code.sharedSizeBytes));
    // Code for earlier devices has none, also where a later device runs it.
    answer.waits = code.ptxVersion >= 90;
    return error;
  });
}

}  // namespace rwkv_jax::cuda
