#include "current_device.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

// Has shared memory in the code for sm_90a alone, by which the host knows which code a device runs.
constexpr int kSigns = 1024;

__global__ void ProbeKernel(int* to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ int signs[kSigns];
  atomicExch(signs + threadIdx.x, 1);
  *to = signs[0];
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
  KernelOnDevice probe;
  const cudaError_t error = Prepare(reinterpret_cast<const void*>(ProbeKernel), probe);
  if (error != cudaSuccess) cudaGetLastError();  // there is no code at all for this device
  return hopper_allowed && error == cudaSuccess &&
         probe.static_bytes >= static_cast<int>(kSigns * sizeof(int));
}

}  // namespace rwkv_jax::cuda
