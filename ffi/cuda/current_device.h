// The GPU that a call runs on.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>

#include "plan.h"

namespace rwkv_jax::cuda {

// What devices are taken to have at most. Tests lower it, so that kernels run as on smaller devices.
inline Device device_limits = {std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::max()};

cudaError_t DescribeDevice(int ordinal, Device& device);
cudaError_t CurrentDevice(Device& device);

// Whether the kernels that only GPUs of compute capability 9.0 have can run: the current device is one, and
// this build has code for it.
bool HasHopperCode();

}  // namespace rwkv_jax::cuda
