// From a call to the kernel for its element type and head size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "plan.h"
#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

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

// Calls fn(bool_constant<whether the kernel asks for marks>()). If kApart, calls without marks have a kernel
// of their own, because asking for marks would cost them a tenth of their time.
template <bool kApart = true, typename Fn>
cudaError_t ForMarks(const Marks& marks, Fn&& fn) {
  if constexpr (kApart)
    if (!marks.Given()) return fn(std::false_type());
  return fn(std::true_type());
}

// Whether the GPUs that this code is compiled for offer a block 227 KiB of shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool kAmpleSharedMemory = true;
#else
constexpr bool kAmpleSharedMemory = false;
#endif
// Whether no GPU with less can run it: PTX runs on later GPUs, code for 9.0a on no other ones.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(RWKV_JAX_EMULATION)
constexpr bool kNeverLessMemory = true;
#else
constexpr bool kNeverLessMemory = false;
#endif

// Calls fn(bool_constant<whether a block may have `kWanted` bytes of shared memory>()). The kernel for
// devices that have less is built only if there are such devices, and may be empty in code with kNeverLessMemory.
template <int64_t kWanted, typename Fn>
cudaError_t ForSharedMemory(const Device& device, Fn&& fn) {
  if constexpr (kWanted > kLeastSharedMemory)
    if (kWanted > device.shared_memory) return fn(std::false_type());
  return fn(std::true_type());
}

}  // namespace rwkv_jax::cuda
