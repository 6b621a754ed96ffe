// WKV6 on matrix units: which kernels run one after another.
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {

cudaError_t Wkv6ChunkForward(cudaStream_t stream, const Wkv6ForwardCall& call,
                             const Splits& splits) {
  if (call.dims.batch * call.dims.heads == 0) return cudaSuccess;
  const cudaError_t error = Wkv6Scan(stream, call, splits);
  return error == cudaErrorNotSupported ? Wkv6Forward(stream, call) : error;
}

cudaError_t Wkv6ChunkBackward(cudaStream_t stream, const Wkv6BackwardCall& call,
                              const Wkv6ChunkScratch& scratch) {
  if (call.dims.batch * call.dims.heads == 0) return cudaSuccess;
  uint4* const gradients = scratch.Gradients();
  cudaError_t error = Wkv6ReverseScan(stream, call, scratch.StateSplits(call), gradients);
  if (error == cudaSuccess) error = Wkv6Gradients(stream, call, gradients);
  if (error != cudaErrorNotSupported) return error;
  const int64_t heads = call.dims.batch * call.dims.heads;
  return Wkv6Backward(stream, call, {scratch.memory, heads, 1, scratch.stride});
}

}  // namespace rwkv_jax::cuda
