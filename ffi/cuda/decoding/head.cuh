// The formulas of a head of a block of RWKV-7, for one token between the projections of a block and its
// output product. A lane has kChannels consecutive channels, and kLanes neighbouring lanes have the head.
#pragma once

#include "decoding/kernels.h"
#include "layers/formulas.cuh"
#include "wkv7/token.cuh"

namespace rwkv_jax::cuda {

// Turns the sums of its low-rank map into factors of decay.
template <int kChannels>
__device__ void MakeFactors(const float (&w0)[kChannels], float (&w)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) w[c] = DecayAndSlope(w0[c] + w[c], Decay::kSigmoid).x;
}

// Adds to v its share of the first layer's value.
template <int kChannels>
__device__ void AddShare(const float (&first)[kChannels], const float (&v0)[kChannels],
                         const float (&share)[kChannels], float (&v)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) v[c] += (first[c] - v[c]) * Sigmoid(v0[c] + share[c]);
}

// Turns y of wkv7 into the input of the output product.
template <int kLanes, int kChannels>
__device__ void NormaliseAndGate(float bonus, const float (&v)[kChannels],
                                 const float (&gate)[kChannels], const float (&weight)[kChannels],
                                 const float (&bias)[kChannels], float (&y)[kChannels]) {
  const Normalised<kLanes, kChannels> normal(y);
#pragma unroll
  for (int c = 0; c < kChannels; ++c)
    y[c] = (normal.z[c] * weight[c] + bias[c] + bonus * v[c]) * gate[c];
}

// The channels of a lane, from `channel` on.
template <typename T, int kChannels>
__device__ void LoadWide(const void* array, int64_t channel, float (&x)[kChannels]) {
  const auto packed = LoadPacked<kChannels, T>(array, channel);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) x[c] = packed[c];
}

using Token = TokenView<kBlockHeadSize, 1>;

template <typename Partition>
__device__ void Step(const Partition& partition, const Token& token, Fragment<Partition>& s) {
  float sa[Partition::kRows];
  ReadFromState(partition, token, s, sa);
  UpdateState(partition, token, sa, s);
}

// y = s x, with the columns of x that a lane has.
template <typename Partition>
__device__ void Read(const Partition& partition, const Fragment<Partition>& s,
                     const float (&x)[Partition::kCols], float* y) {
  float sums[Partition::kRows];
  PartialDot<Partition>(s, x, sums);
  const int found = ReduceScatter<1, Partition::kColGroups>(sums, partition.lane);
  if (found >= 0) y[partition.first_row + found] = sums[0];
}

}  // namespace rwkv_jax::cuda
