// The GPU that a call runs on.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>

#include "plan.h"

namespace rwkv_jax::cuda {

// What devices are taken to have at most, and whether kernels for compute capability 9.0 alone may run. Tests
// change it, so that kernels run as on other devices.
inline Device device_limits = {std::numeric_limits<int64_t>::max(),
                               std::numeric_limits<int64_t>::max()};
inline bool hopper_allowed = true;

cudaError_t DescribeDevice(int ordinal, Device& device);
cudaError_t CurrentDevice(Device& device);

// Whether those kernels can run: the current device has compute capability 9.0, and this build has code for it.
bool HasHopperCode();

}  // namespace rwkv_jax::cuda
