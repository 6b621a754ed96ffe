// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "grid.h"

namespace rwkv_jax::cuda {

// What CUDA tells about a kernel on a device.
struct KernelOnDevice {
  int static_bytes;  // of shared memory, besides what a launch asks for
  bool waits;        // whether the code has the instructions of programmatic dependent launches
};

// Describes a kernel on the current device, and allows its blocks all shared memory that the device offers. CUDA
// is asked once for each kernel and device.
cudaError_t Prepare(const void* kernel, KernelOnDevice& prepared);

// Launches a kernel and returns the error of this launch alone. With `early`, it may start while the kernel
// before it still runs; LaunchChain (launch_chain.cuh) says what that takes.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchAs(bool early, void (*kernel)(Parameters...), const Grid& grid, int threads,
                     int64_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  if (!grid.Fits()) return cudaErrorInvalidConfiguration;
  KernelOnDevice prepared;
  const cudaError_t error = Prepare(reinterpret_cast<const void*>(kernel), prepared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.x, grid.y, grid.z), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (grid.cluster > 1) {
    auto& cluster = add(cudaLaunchAttributeClusterDimension).clusterDim;
    cluster.x = grid.cluster, cluster.y = cluster.z = 1;
  }
  if (early && prepared.waits)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), const Grid& grid, int threads,
                   int64_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  return LaunchAs(false, kernel, grid, threads, shared_bytes, stream, arguments...);
}

}  // namespace rwkv_jax::cuda
