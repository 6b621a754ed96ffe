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
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) continue;
      const T* const tokens = x + int64_t{row} * width;
      const float pivot = Pivot(tokens);
      float sum = 0.0f, squares = 0.0f;
      for (int i = threadIdx.x * kVector; i < width; i += kProductThreads * kVector) {
        const auto vector = LoadPacked<kVector, T>(tokens, i);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          const float offset = vector[c] - pivot;
          sum += offset, squares = fmaf(offset, offset, squares);
        }
      }
      sum = SumOverLanes<32>(sum), squares = SumOverLanes<32>(squares);
      if (threadIdx.x % 32 == 0) sums[row][threadIdx.x / 32] = {sum, squares};
    }
  }

  // Behind a barrier after Prepare.
  __device__ void StageFirst(int count, const Slice<T>& slice) const {
    const int own = threadIdx.x * kVector;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (own >= count || row >= rows) continue;
      const int64_t at = int64_t{row} * width + own;
      const Vector own_before = row == 0 ? earlier : LoadPacked<kVector, T>(before, at);
      Mix(Moments(row), at, weights, biases, mixes, own_before, slice.Row(row) + own);
    }
    StageFrom(own + kProductThreads * kVector, 0, count, slice);
  }
  __device__ void Stage(int first, int count, const Slice<T>& slice) const {
    StageFrom(threadIdx.x * kVector, first, count, slice);
  }

 private:
  // The vectors of this thread from `begin` on, of a slice whose first input is `first`.
  __device__ void StageFrom(int begin, int first, int count, const Slice<T>& slice) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows) continue;
      const float2 moments = Moments(row);
      const int64_t start = int64_t{row} * width + first;
      for (int i = begin; i < count; i += kProductThreads * kVector)
        Mix(moments, start + i, LoadPacked<kVector, T>(weight, first + i),
            LoadPacked<kVector, T>(bias, first + i), LoadPacked<kVector, T>(mix, first + i),
            LoadPacked<kVector, T>(before, start + i), slice.Row(row) + i);
    }
  }

  __device__ static float Pivot(const T* tokens) {
    const auto vector = LoadPacked<kVector, T>(tokens, 0);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum += vector[c];
    return sum * (1.0f / kVector);
  }

  // The mean of a row, and 1 / sqrt(variance + eps).
  __device__ float2 Moments(int row) const {
    float2 all = {};
#pragma unroll
    for (int warp = 0; warp < kProductWarps; ++warp)
      all.x += sums[row][warp].x, all.y += sums[row][warp].y;
    const float share = 1.0f / width, mean = all.x * share;
    const float variance = fmaf(all.y, share, -mean * mean);
    return {Pivot(x + int64_t{row} * width) + mean,
            rsqrtf((variance > 0.0f ? variance : 0.0f) + kLayerNormEps)};
  }

  __device__ void Mix(const float2& moments, int64_t at, const Vector& weights,
                      const Vector& biases, const Vector& mixes, const Vector& earlier,
                      T* to) const {
    const auto tokens = LoadPacked<kVector, T>(x, at);
    float n[kVector], mixed[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      n[c] = fmaf((tokens[c] - moments.x) * moments.y, weights[c], biases[c]);
      mixed[c] = fmaf(earlier[c] - n[c], mixes[c], n[c]);
    }
    if (normalised != nullptr) StoreRounded<T>(normalised, at, n);
    StoreRounded<T>(to, 0, mixed);
  }
};

}  // namespace rwkv_jax::cuda
