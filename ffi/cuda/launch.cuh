// From a call to the kernel for its element type and head size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "plan.h"
#include "ptx.cuh"
#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  // Set at every launch: the attribute belongs to the current device.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
#ifdef RWKV_JAX_EMULATION
  emulation::Launch([&] { kernel(arguments...); }, blocks, threads);
#else
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...);
#endif
  return cudaGetLastError();
}

// The blocks of a launch, and how many of them a cluster has.
struct Grid {
  dim3 blocks;
  unsigned cluster = 1;

  Grid(dim3 blocks) : blocks(blocks) {}
  Grid(unsigned blocks, unsigned cluster = 1) : blocks(blocks), cluster(cluster) {}
};

// As Launch, for a kernel that may start while the one before it still runs: it calls WaitForKernelsBefore
// (ptx.cuh) in all threads before it reads what other kernels write, and before it writes.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchEarly(void (*kernel)(Parameters...), Grid grid, int threads, size_t shared_bytes,
                        cudaStream_t stream, Arguments... arguments) {
#ifndef RWKV_JAX_EMULATION
  cudaFuncAttributes code;
  cudaError_t error = cudaFuncGetAttributes(&code, kernel);
  if (error != cudaSuccess) return error;
  // Code for earlier devices does not wait, also where a later one runs it.
  if (code.ptxVersion >= 90) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {grid.cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid.blocks, config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = grid.cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
  }
#endif
  return Launch(kernel, grid.blocks, threads, shared_bytes, stream, arguments...);
}

// ForHalfTypes and ForAllTypes call fn(T(), integral_constant<int, N>()) with the element type T of
// `dtype` and the head size N, which is one of kSizes.
template <int... kSizes, typename T, typename Fn>
cudaError_t ForHeadSize(int64_t head_size, T zero, Fn&& fn) {
  cudaError_t error = cudaErrorInvalidValue;
  ((head_size == kSizes ? void(error = fn(zero, std::integral_constant<int, kSizes>())) : void()),
   ...);
  return error;
}

template <int... kSizes, typename Fn>
cudaError_t ForHalfTypes(Dtype dtype, int64_t head_size, Fn&& fn) {
  switch (dtype) {
    case Dtype::kBF16: return ForHeadSize<kSizes...>(head_size, __nv_bfloat16(), fn);
    case Dtype::kF16: return ForHeadSize<kSizes...>(head_size, __half(), fn);
    default: return cudaErrorInvalidValue;
  }
}

template <int... kSizes, typename Fn>
cudaError_t ForAllTypes(Dtype dtype, int64_t head_size, Fn&& fn) {
  if (dtype == Dtype::kF32) return ForHeadSize<kSizes...>(head_size, 0.0f, fn);
  return ForHalfTypes<kSizes...>(dtype, head_size, fn);
}

// Calls fn(bool_constant<whether tokens have marks>()). Kernels without marks are built apart, because
// asking for marks would cost them a tenth of their time.
template <typename Fn>
cudaError_t ForMarks(const Marks& marks, Fn&& fn) {
  return marks.Given() ? fn(std::true_type()) : fn(std::false_type());
}

// Calls fn(bool_constant<whether a block may have `kWanted` bytes of shared memory>()). The kernel for
// devices that have less is built only if there are such devices.
template <int64_t kWanted, typename Fn>
cudaError_t ForSharedMemory(const Device& device, Fn&& fn) {
  if constexpr (kWanted > kLeastSharedMemory)
    if (kWanted > device.shared_memory) return fn(std::false_type());
  return fn(std::true_type());
}

}  // namespace rwkv_jax::cuda
