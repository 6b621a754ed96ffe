#include "current_device.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "asked_once.h"

namespace rwkv_jax::cuda {
namespace {

// The bytes that a block may have on a GPU of compute capability 9.0.
constexpr int64_t kHopperSharedMemory = 232448;

// Has shared memory in the code for sm_90a alone, by which the host knows which code a device runs.
__global__ void ProbeKernel(int* to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ int sign[1];
  atomicExch(sign, 1);
  *to = sign[0];
#endif
}

}  // namespace

cudaError_t DescribeDevice(int ordinal, Device& device) {
  int multiprocessors = 0, shared_memory = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error == cudaSuccess)
    error =
        cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  device = {std::min<int64_t>(multiprocessors, device_limits.multiprocessors),
            std::min<int64_t>(shared_memory, device_limits.shared_memory)};
  return error;
}

cudaError_t CurrentDevice(Device& device) {
  int ordinal = 0;
  const cudaError_t error = cudaGetDevice(&ordinal);
  return error == cudaSuccess ? DescribeDevice(ordinal, device) : error;
}

bool HasHopperCode() {
  static AskedOnce<int, bool> known;
  if (device_limits.shared_memory < kHopperSharedMemory) return false;
  int ordinal = 0;
  bool has_code = false;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error == cudaSuccess)
    error = known.Get(ordinal, has_code, [](bool& answer) {
      cudaFuncAttributes code = {};
      const cudaError_t error =
          cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(ProbeKernel));
      answer = error == cudaSuccess && code.sharedSizeBytes > 0;
      return error;
    });
  if (error != cudaSuccess) cudaGetLastError();  // there is no code at all for this device
  return has_code;
}

}  // namespace rwkv_jax::cuda
