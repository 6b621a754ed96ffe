// The targets that do nothing but launch kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "current_device.h"
#include "rwkv_jax/ffi.h"
#include "rwkv_jax/operands.h"

namespace rwkv_jax::cuda {

// What a handler returns. CUDA keeps the last error of a thread until somebody asks for it: nobody is to take it
// for a later one.
inline ffi::Error ErrorOf(Operands& operands, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  cudaGetLastError();
  return operands.Internal(cudaGetErrorString(error));
}

// Runs a call if all of its operands are right.
template <typename Call>
ffi::Error RunOnCurrentDevice(cudaStream_t stream, const Call& call, Operands& operands) {
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  Device device;
  cudaError_t error = CurrentDevice(device);
  if (error == cudaSuccess) error = Run(stream, call, device);
  return ErrorOf(operands, error);
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
