// What the lanes of a warp have of a head and of a token of it, two channels each, where several rows take a
// step (decoding/summed_heads.cu).
#pragma once

#include "decoding/head.cuh"

namespace rwkv_jax::cuda {

constexpr int kHeadChannels = kBlockHeadSize, kLaneChannels = kHeadChannels / 32;

using LaneVector = float[kLaneChannels];

// The first two elements of w of a row without a token: a NaN that CUDA does not make.
constexpr uint32_t kNoToken = ~0u;

static_assert(kW == 0 && kB == kWaitingVectors - 1);

__device__ inline int OwnChannel() { return threadIdx.x % 32 * kLaneChannels; }

// What a lane has of the parameters of a head, and of the first layer's value.
template <typename T>
struct LaneParameters {
  LaneVector w0, k_k, k_a, a0, v0, first, r_k, weight, bias;

  // `channel` is the lane's first one of all, and `at` that of its row.
  __device__ void Load(const Rwkv7BlockCall& call, int64_t channel, int64_t at) {
    LoadWide<T>(call.w0, channel, w0), LoadWide<T>(call.k_k, channel, k_k);
    LoadWide<T>(call.k_a, channel, k_a), LoadWide<T>(call.a0, channel, a0);
    LoadWide<T>(call.r_k, channel, r_k), LoadWide<T>(call.head_norm.weight, channel, weight);
    LoadWide<T>(call.head_norm.bias, channel, bias);
    if (call.first == nullptr) return;
    LoadWide<T>(call.v0, channel, v0), LoadWide<T>(call.first, at, first);
  }
};

// What a lane has of what the projections give for a head, as it is in memory.
template <typename T>
struct LaneProjections {
  Packed<T, kLaneChannels> r, k, v, maps[kLowRankMaps];

  // `row` is the first number of the row.
  __device__ void Load(const Rwkv7BlockCall& call, const T* row, int64_t channel) {
    const T* const from = row + channel;
    r.Load(from), k.Load(from + call.width), v.Load(from + 2 * call.width);
#pragma unroll
    for (int i = 0; i < kLowRankMaps; ++i)
      if (i != kShareMap || call.first != nullptr) maps[i].Load(from + (3 + i) * call.width);
  }
};

template <typename T>
__device__ void Widen(const Packed<T, kLaneChannels>& from, LaneVector& to) {
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) to[c] = from[c];
}

// What a lane has of the vectors of a token.
template <typename T>
struct LaneToken {
  using Pair = Packed<T, kLaneChannels>;

  LaneVector w, k, v, a, b;
  Pair packed[kWaitingVectors];  // the same as they wait

  // `bonus` is that of the read-out.
  __device__ void Make(const Rwkv7BlockCall& call, const LaneParameters<T>& own,
                       const LaneProjections<T>& given, int64_t at, const LaneVector& r,
                       float& bonus) {
    LaneVector projected, rate, share;
    packed[kW] = given.maps[kDecayMap];
    MakeFactor(own.w0);
    Widen(given.k, projected), Widen(given.v, v), Widen(given.maps[kRateMap], rate);
    if (call.first != nullptr) {
      Widen(given.maps[kShareMap], share);
      AddShare(own.first, own.v0, share, v);
    } else {
      StoreRounded<T>(call.made_first, at, v);
    }
    const float inverse = InverseLength<32>(projected, own.k_k);
    MakeKeys(projected, rate, own.k_k, own.k_a, own.a0, inverse, k, a, b);
    bonus = Bonus<32>(r, k, own.r_k);
    ForRounded([&](Vector vector, LaneVector& x) {
      packed[vector].Set(x);
      Widen(packed[vector], x);
    });
  }

  // Loads a token that waits.
  __device__ void Load(const T* token, const LaneVector& w0) {
#pragma unroll
    for (int i = 0; i < kWaitingVectors; ++i)
      packed[i].Load(token + i * kHeadChannels + OwnChannel());
    MakeFactor(w0);
    ForRounded([&](Vector vector, LaneVector& x) { Widen(packed[vector], x); });
  }

  __device__ void Store(float* token) {
    ForRounded([&](Vector vector, const LaneVector& x) {
      StoreFloats(token + vector * kHeadChannels + OwnChannel(), x);
    });
  }

  __device__ void Store(T* token) const {
#pragma unroll
    for (int i = 0; i < kWaitingVectors; ++i)
      packed[i].Store(token + i * kHeadChannels + OwnChannel());
  }

 private:
  __device__ void MakeFactor(const LaneVector& w0) { Widen(packed[kW], w), MakeFactors(w0, w); }

  template <typename Fn>
  __device__ void ForRounded(Fn&& fn) {
    fn(kK, k), fn(kV, v), fn(kA, a), fn(kB, b);
  }
};

// Whether a token that waits is there.
template <typename T>
__device__ bool IsThere(const T (&token)[kWaitingVectors][kHeadChannels]) {
  return *reinterpret_cast<const uint32_t*>(token[kW]) != kNoToken;
}

// u_j becomes u_{j-1}, and what the token adds to y is added to `added`.
template <typename T>
__device__ void ReadThrough(const LaneToken<T>& token, LaneVector& u, LaneVector& added) {
  float sums[2] = {};
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) {
    sums[0] = fmaf(token.k[c], u[c], sums[0]);
    sums[1] = fmaf(token.b[c], u[c], sums[1]);
  }
  AllReduce<1, 32>(sums);
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) {
    added[c] = fmaf(token.v[c], sums[0], added[c]);
    u[c] = fmaf(token.w[c], u[c], token.a[c] * sums[1]);
  }
}

}  // namespace rwkv_jax::cuda
