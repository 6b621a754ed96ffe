// The rows of a product that are normalised, shifted and mixed:
//
//   n = (x - mean) / sqrt(variance + eps) * weight + bias,  mixed = n + (before - n) * mix
//
// Every block finds the moments of all rows: a launch of its own would take longer. They are sums of x - p
// and (x - p)^2, with the mean of a few elements of the row as the pivot p. As this is near the mean, the
// difference of such sums is exact enough.
#pragma once

#include "decoding/product.cuh"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

// The mean of the first elements of a row.
template <typename T>
__device__ float PivotOf(const T* row) {
  constexpr int kVector = kWeightVector<T>;
  const auto vector = LoadPacked<kVector, T>(row, 0);
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kVector; ++c) sum += vector[c];
  return sum * (1.0f / kVector);
}

// Adds x - p and (x - p)^2 of a vector.
template <typename T, int N>
__device__ void AddOffsets(const Packed<T, N>& x, float pivot, float& offsets, float& squares) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    const float offset = x[c] - pivot;
    offsets += offset, squares = fmaf(offset, offset, squares);
  }
}

// The mean of a row and 1 / sqrt(variance + eps), from the sums of its warps.
__device__ inline float2 MomentsOf(const float2 (&sums)[kProductWarps], float pivot, int width) {
  const float share = 1.0f / width;
  float2 all = {};
#pragma unroll
  for (int warp = 0; warp < kProductWarps; ++warp) all.x += sums[warp].x, all.y += sums[warp].y;
  const float mean = all.x * share, variance = fmaf(all.y, share, -mean * mean);
  return {pivot + mean, rsqrtf((variance > 0.0f ? variance : 0.0f) + kLayerNormEps)};
}

template <typename T, int kRows>
struct MixedRows {
  static constexpr int kVector = kWeightVector<T>;
  using Vector = Packed<T, kVector>;

  // The sums of the warps of a block, for each row, in shared memory.
  using Sums = float2[kRows][kProductWarps];

  const T *x, *before, *weight, *bias, *mix;
  T* normalised;  // gets n, unless it is null
  int rows, width;
  Sums& sums;

  // What this thread needs first to make a row of: fetched while the moments are not known yet. That of
  // `before` is of the first row.
  Vector weights, biases, mixes, earlier;

  __device__ void FetchIntoCache() const {
    constexpr int kLine = 128 / sizeof(T);
    for (int i = threadIdx.x * kLine; i < width; i += kProductThreads * kLine)
      Prefetch(weight + i), Prefetch(bias + i), Prefetch(mix + i), Prefetch(before + i);
  }

  __device__ void Fetch() {
    const int at = threadIdx.x * kVector;
    if (at >= width) return;
    weights.Load(weight + at), biases.Load(bias + at), mixes.Load(mix + at);
    earlier.Load(before + at);
  }

  __device__ void Prepare() {
    float pivots[kRows], offsets[kRows] = {}, squares[kRows] = {};
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < rows) pivots[row] = Pivot(row);
    for (int i = threadIdx.x * kVector; i < width; i += kProductThreads * kVector)
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (row >= rows) continue;
        const auto tokens = LoadPacked<kVector, T>(x, int64_t{row} * width + i);
        AddOffsets(tokens, pivots[row], offsets[row], squares[row]);
      }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float2 of_warp{SumOverLanes<32>(offsets[row]), SumOverLanes<32>(squares[row])};
      if (threadIdx.x % 32 == 0) sums[row][threadIdx.x / 32] = of_warp;
    }
  }

  // Behind a barrier after Prepare.
  __device__ void StageFirst(int count, const Slice<T>& slice) const {
    const int own = threadIdx.x * kVector;
    float2 moments[kRows];
    FindMoments(moments);
    if (own < count) Mix(moments, own, weights, biases, mixes, earlier, slice, own);
    StageFrom(own + kProductThreads * kVector, 0, count, moments, slice);
  }
  __device__ void Stage(int first, int count, const Slice<T>& slice) const {
    float2 moments[kRows];
    FindMoments(moments);
    StageFrom(threadIdx.x * kVector, first, count, moments, slice);
  }

 private:
  // The vectors of this thread from `begin` on, of a slice whose first input is `first`.
  __device__ void StageFrom(int begin, int first, int count, const float2 (&moments)[kRows],
                            const Slice<T>& slice) const {
    for (int i = begin; i < count; i += kProductThreads * kVector)
      Mix(moments, first + i, LoadPacked<kVector, T>(weight, first + i),
          LoadPacked<kVector, T>(bias, first + i), LoadPacked<kVector, T>(mix, first + i),
          LoadPacked<kVector, T>(before, first + i), slice, i);
  }

  __device__ float Pivot(int row) const { return PivotOf(x + int64_t{row} * width); }

  // The mean of each row, and 1 / sqrt(variance + eps).
  __device__ void FindMoments(float2 (&moments)[kRows]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (row < rows) moments[row] = MomentsOf(sums[row], Pivot(row), width);
  }

  // Mixes a vector of inputs of each row, from `input` on. `earlier` is of the first row.
  __device__ void Mix(const float2 (&moments)[kRows], int input, const Vector& weights,
                      const Vector& biases, const Vector& mixes, const Vector& earlier,
                      const Slice<T>& slice, int to) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) continue;
      const int64_t at = int64_t{row} * width + input;
      const auto tokens = LoadPacked<kVector, T>(x, at);
      const Vector last = row == 0 ? earlier : LoadPacked<kVector, T>(before, at);
      float n[kVector], mixed[kVector];
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        n[c] = fmaf((tokens[c] - moments[row].x) * moments[row].y, weights[c], biases[c]);
        mixed[c] = fmaf(last[c] - n[c], mixes[c], n[c]);
      }
      if (normalised != nullptr) StoreRounded<T>(normalised, at, n);
      StoreRounded<T>(slice.Row(row), to, mixed);
    }
  }
};

}  // namespace rwkv_jax::cuda
