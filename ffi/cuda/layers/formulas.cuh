// The formulas of one token of a head that the layer functions share with the step of a whole block. A
// lane has kHeadVector consecutive channels of the head, and kLanes neighbouring lanes have all of them.
#pragma once

#include "layers/vectors.cuh"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

constexpr int kHeadVector = 8;

using HeadVector = float[kHeadVector];

// 1 / max(|u|, eps), and whether |u| is the larger one.
template <int kLanes, typename Vector>
__device__ float2 InverseLength(const Vector& k, const HeadVector& k_k) {
  float square = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) square += k[c] * k_k[c] * (k[c] * k_k[c]);
  const float length = sqrtf(SumOverLanes<kLanes>(square));
  return {1.0f / (length > kUnitLengthEps ? length : kUnitLengthEps),
          length > kUnitLengthEps ? 1.0f : 0.0f};
}

// The operands k, a and b of WKV7.
template <int kLanes, typename Vector>
__device__ void MakeKeys(const Vector& k, const Vector& rate, const HeadVector& k_k,
                         const HeadVector& k_a, const HeadVector& a0, HeadVector& key,
                         HeadVector& a, HeadVector& b) {
  const float inverse = InverseLength<kLanes>(k, k_k).x;
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    const float alpha = Sigmoid(a0[c] + rate[c]), kk = k[c] * k_k[c] * inverse;
    key[c] = k[c] * (1.0f + (alpha - 1.0f) * k_a[c]);
    a[c] = -kk, b[c] = kk * alpha;
  }
}

// The share of the value of a token that is read out besides the output of WKV7.
template <int kLanes, typename Vector>
__device__ float Bonus(const Vector& r, const HeadVector& key, const HeadVector& r_k) {
  float bonus = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) bonus += r[c] * key[c] * r_k[c];
  return SumOverLanes<kLanes>(bonus);
}

// A token of a head: y normalised, and 1 / sqrt(variance + eps).
template <int kLanes>
struct Normalised {
  HeadVector z;
  float scale;

  template <typename Vector>
  __device__ explicit Normalised(const Vector& y) {
    constexpr float kShare = 1.0f / (kLanes * kHeadVector);
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) sum += y[c];
    const float mean = SumOverLanes<kLanes>(sum) * kShare;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      z[c] = y[c] - mean;
      squares += z[c] * z[c];
    }
    scale = 1.0f / sqrtf(SumOverLanes<kLanes>(squares) * kShare + kGroupNormEps);
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) z[c] *= scale;
  }
};

}  // namespace rwkv_jax::cuda
