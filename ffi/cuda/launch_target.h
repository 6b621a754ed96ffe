// What handlers ask of the device, and the targets that do nothing but launch kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"
#include "rwkv_jax/ffi.h"

namespace rwkv_jax::cuda {

inline cudaError_t DescribeDevice(int ordinal, Device& device) {
  int multiprocessors = 0, shared_memory = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal);
  if (error == cudaSuccess)
    error =
        cudaDeviceGetAttribute(&shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
  device = {multiprocessors, shared_memory};
  return error;
}

inline cudaError_t CurrentDevice(Device& device) {
  int ordinal = 0;
  const cudaError_t error = cudaGetDevice(&ordinal);
  return error == cudaSuccess ? DescribeDevice(ordinal, device) : error;
}

// A target of operands and results alone. It may be part of a CUDA graph.
template <ffi::Error (*kHandle)(cudaStream_t, ffi::RemainingArgs, ffi::RemainingRets)>
XLA_FFI_Error* LaunchTarget(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .To(kHandle, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(frame);
}

}  // namespace rwkv_jax::cuda
