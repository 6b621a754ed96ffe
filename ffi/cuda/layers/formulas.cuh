// The formulas of one token of a head that the layer functions share with the step of a whole block. A
// lane has some consecutive channels of the head, in the layer functions kHeadVector of them, and kLanes
// neighbouring lanes have all of them.
#pragma once

#include "layers/vectors.cuh"
#include "rwkv_jax/layers.h"

namespace rwkv_jax::cuda {

constexpr int kHeadVector = 8;

using HeadVector = float[kHeadVector];

// 1 / max(|u|, eps).
template <int kLanes, typename Vector, int kChannels>
__device__ float InverseLength(const Vector& k, const float (&k_k)[kChannels]) {
  float square = 0.0f;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) square += k[c] * k_k[c] * (k[c] * k_k[c]);
  const float length = sqrtf(SumOverLanes<kLanes>(square));
  return 1.0f / (length > kUnitLengthEps ? length : kUnitLengthEps);
}

// The operands k, a and b of WKV7 in one channel; `inverse` is 1 / max(|u|, eps).
struct KeyChannel {
  float key, a, b;

  __device__ KeyChannel(float k, float rate, float k_k, float k_a, float a0, float inverse) {
    const float alpha = Sigmoid(a0 + rate), kk = k * k_k * inverse;
    key = k * (1.0f + (alpha - 1.0f) * k_a);
    a = -kk, b = kk * alpha;
  }
};

// The same in all channels of a lane.
template <typename Vector, int kChannels>
__device__ void MakeKeys(const Vector& k, const Vector& rate, const float (&k_k)[kChannels],
                         const float (&k_a)[kChannels], const float (&a0)[kChannels], float inverse,
                         float (&key)[kChannels], float (&a)[kChannels], float (&b)[kChannels]) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    const KeyChannel made(k[c], rate[c], k_k[c], k_a[c], a0[c], inverse);
    key[c] = made.key, a[c] = made.a, b[c] = made.b;
  }
}

// The parameters of wkv7_keys but r_k, which its passes load where they need it: registers do not hold all.
struct KeyParameters {
  HeadVector k_k = {}, k_a = {}, a0 = {};
};

// The gradients of all four, to be summed over tokens.
struct KeyParameterGradients {
  HeadVector k_k = {}, k_a = {}, a0 = {}, r_k = {};
};

// The gradients that the bonus of a token gives: dr, the complete cotangent of the key, and dr_k. `dpassed`
// is the cotangent of r from its other use.
template <typename Vector>
__device__ void AddBonusGradients(const Vector& k, const Vector& r, const HeadVector& alpha,
                                  const HeadVector& k_a, const HeadVector& r_k,
                                  const Vector& dkey_given, float dbonus, const Vector& dpassed,
                                  HeadVector& dkey, HeadVector& dr, HeadVector& dr_k) {
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    const float slope = dbonus * k[c] * (1.0f + (alpha[c] - 1.0f) * k_a[c]);
    dr[c] = dpassed[c] + slope * r_k[c];
    dkey[c] = dkey_given[c] + dbonus * r[c] * r_k[c];
    dr_k[c] += slope * r[c];
  }
}

// The other gradients of a token of wkv7_keys. Adds to those of its parameters.
template <int kLanes, typename Vector>
__device__ void AddKeyGradients(const Vector& k, const HeadVector& alpha, const HeadVector& dkey,
                                const Vector& da, const Vector& db, const KeyParameters& parameters,
                                float inverse, HeadVector& dk, HeadVector& drate,
                                KeyParameterGradients& sums) {
  float product = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c)
    product += (db[c] * alpha[c] - da[c]) * k[c] * parameters.k_k[c];
  product = SumOverLanes<kLanes>(product) * inverse * inverse;
  // A length below eps does not count.
  if (inverse >= 1.0f / kUnitLengthEps) product = 0.0f;
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    const float u = k[c] * parameters.k_k[c];
    const float du = (db[c] * alpha[c] - da[c] - u * product) * inverse;
    const float dalpha = db[c] * u * inverse + dkey[c] * k[c] * parameters.k_a[c];
    dk[c] = dkey[c] * (1.0f + (alpha[c] - 1.0f) * parameters.k_a[c]) + du * parameters.k_k[c];
    drate[c] = dalpha * alpha[c] * (1.0f - alpha[c]);
    sums.k_k[c] += du * k[c];
    sums.k_a[c] += dkey[c] * k[c] * (alpha[c] - 1.0f);
    sums.a0[c] += drate[c];
  }
}

// The share of the value of a token that is read out besides the output of WKV7.
template <int kLanes, typename Vector, int kChannels>
__device__ float Bonus(const Vector& r, const float (&key)[kChannels],
                       const float (&r_k)[kChannels]) {
  float bonus = 0.0f;
#pragma unroll
  for (int c = 0; c < kChannels; ++c) bonus += r[c] * key[c] * r_k[c];
  return SumOverLanes<kLanes>(bonus);
}

// A token of a head: y normalised, and 1 / sqrt(variance + eps).
template <int kLanes, int kChannels = kHeadVector>
struct Normalised {
  float z[kChannels];
  float scale;

  template <typename Vector>
  __device__ explicit Normalised(const Vector& y) {
    constexpr float kShare = 1.0f / (kLanes * kChannels);
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) sum += y[c];
    const float mean = SumOverLanes<kLanes>(sum) * kShare;
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      z[c] = y[c] - mean;
      squares += z[c] * z[c];
    }
    scale = 1.0f / sqrtf(SumOverLanes<kLanes>(squares) * kShare + kGroupNormEps);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[c] *= scale;
  }
};

}  // namespace rwkv_jax::cuda
