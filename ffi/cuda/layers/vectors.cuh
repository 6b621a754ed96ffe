// What a thread of a layer function has of a token: some consecutive channels, loaded and stored at
// once, and their sums over the threads of a head or of a warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx.cuh"
#include "rwkv_jax/types.h"

namespace rwkv_jax::cuda {

// N channels as they are in memory, in an array that starts at a multiple of their bytes, up to 16.
template <typename T, int N>
struct Packed {
  static constexpr int kWords = N * sizeof(T) / 4;
  uint32_t words[kWords];

  __device__ void Load(const T* from) {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = reinterpret_cast<const uint4*>(from)[i / 4];
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      words[0] = two.x, words[1] = two.y;
    } else {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }

  __device__ void Store(T* to) const {
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4)
        reinterpret_cast<uint4*>(to)[i / 4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    }
  }

  __device__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, int8_t>) {
      // 2^23 + 128 + x, whose lowest byte is 128 + x. Conversions of integers are slow.
      const uint32_t positive = words[i / 4] ^ 0x80808080u;
      return __uint_as_float(__byte_perm(positive, 0x4b000000u, 0x7440 + i % 4)) - 8388736.0f;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      const __half2 pair = reinterpret_cast<const __half2&>(words[i / 2]);
      return i % 2 ? __high2float(pair) : __low2float(pair);
    }
  }

  __device__ void Set(const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<T, float>)
        words[i] = __float_as_uint(x[i]);
      else if constexpr (std::is_same_v<T, __nv_bfloat16>)
        words[i] = RoundToBf16(x[2 * i], x[2 * i + 1]);
      else
        words[i] = RoundToHalf(x[2 * i], x[2 * i + 1]);
    }
  }
};

template <int N, typename T>
__device__ Packed<T, N> LoadPacked(const void* array, int64_t at) {
  Packed<T, N> packed;
  packed.Load(static_cast<const T*>(array) + at);
  return packed;
}

// Starts to copy N elements to shared memory.
template <int N, typename T>
__device__ void CopyPacked(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < N; i += 16 / sizeof(T)) CopyAsync(SharedAddress(to + i), from + i, true);
}

template <typename T, int N>
__device__ void StoreRounded(void* array, int64_t at, const float (&x)[N]) {
  Packed<T, N> packed;
  packed.Set(x);
  packed.Store(static_cast<T*>(array) + at);
}

// Two floats, or a multiple of four.
template <int N>
__device__ void LoadFloats(const float* from, float (&x)[N]) {
  Packed<float, N> packed;
  packed.Load(from);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = packed[i];
}

template <int N>
__device__ void StoreFloats(float* to, const float (&x)[N]) {
  Packed<float, N> packed;
  packed.Set(x);
  packed.Store(to);
}

// The sum over kLanes neighbouring lanes, a power of two of them.
template <int kLanes>
__device__ float SumOverLanes(float x) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

__device__ inline float Sigmoid(float x) {
  return Reciprocal(1.0f + Exp2(-1.4426950408889634f * x));
}

}  // namespace rwkv_jax::cuda
