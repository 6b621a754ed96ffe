// The rows of a product that are normalised, shifted and mixed:
//
//   n = (x - mean) / sqrt(variance + eps) * weight + bias,  mixed = n + (before - n) * mix
//
// Every block finds the moments of all rows: a launch of its own would take longer.
#pragma once

#include "decoding/product.cuh"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

// The sums of kRows numbers of each thread over a block, in each thread. `posted` must not be in use.
template <int kRows>
__device__ void SumOverBlock(float (&posted)[kProductWarps][kRows], float (&x)[kRows]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    x[row] = SumOverLanes<32>(x[row]);
    if (threadIdx.x % 32 == 0) posted[threadIdx.x / 32][row] = x[row];
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    x[row] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kProductWarps; ++warp) x[row] += posted[warp][row];
  }
}

template <typename T, int kRows>
struct MixedRows {
  const T *x, *before, *weight, *bias, *mix;
  T* normalised;  // gets n, unless it is null
  int rows, width;
  float2* moments;  // [kRows] in shared memory: the mean and 1 / sqrt(variance + eps)

  __device__ void Prepare() {
    __shared__ float posted[2][kProductWarps][kRows];
    const float share = 1.0f / width;
    float mean[kRows] = {}, squares[kRows] = {};
    ForVectors([&](int row, const auto& vector) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) mean[row] += vector[c];
    });
    SumOverBlock(posted[0], mean);
#pragma unroll
    for (int row = 0; row < kRows; ++row) mean[row] *= share;
    ForVectors([&](int row, const auto& vector) {
#pragma unroll
      for (int c = 0; c < kVector; ++c)
        squares[row] += (vector[c] - mean[row]) * (vector[c] - mean[row]);
    });
    SumOverBlock(posted[1], squares);
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (threadIdx.x == 0)
        moments[row] = {mean[row], rsqrtf(squares[row] * share + kLayerNormEps)};
  }

  __device__ void Stage(int first, int count, const Slice<T>& slice) const {
    for (int i = threadIdx.x * kVector; i < count; i += kProductThreads * kVector) {
      const auto weights = LoadPacked<kVector, T>(weight, first + i);
      const auto biases = LoadPacked<kVector, T>(bias, first + i);
      const auto mixes = LoadPacked<kVector, T>(mix, first + i);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        float mixed[kVector] = {};
        if (row < rows) {
          const int64_t at = int64_t{row} * width + first + i;
          const auto tokens = LoadPacked<kVector, T>(x, at);
          const auto earlier = LoadPacked<kVector, T>(before, at);
          const float2 of_row = moments[row];
          float n[kVector];
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            n[c] = (tokens[c] - of_row.x) * of_row.y * weights[c] + biases[c];
            mixed[c] = n[c] + (earlier[c] - n[c]) * mixes[c];
          }
          if (normalised != nullptr) StoreRounded<T>(normalised, at, n);
        }
        StoreRounded<T>(slice.Row(row), i, mixed);
      }
    }
  }

 private:
  static constexpr int kVector = kWeightVector<T>;

  // Calls fn(row, vector) with the vectors of this thread.
  template <typename Fn>
  __device__ void ForVectors(Fn&& fn) const {
    for (int i = threadIdx.x * kVector; i < width; i += kProductThreads * kVector)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        if (row < rows) fn(row, LoadPacked<kVector, T>(x, int64_t{row} * width + i));
  }
};

}  // namespace rwkv_jax::cuda
