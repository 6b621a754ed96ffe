// The operands k, a and b of a keyed call, as the kernels on matrix units make them in their registers.
#pragma once

#include "layers/formulas.cuh"
#include "matrix.cuh"

namespace rwkv_jax::cuda {

// Makes two elements of each, which are a pair in a register: two channels of a token, or two tokens of a
// channel. The floats are those of the elements (layers/formulas.cuh).
template <typename T>
__device__ void MakeKeys(uint32_t k, uint32_t rate, float2 k_k, float2 k_a, float2 a0,
                         float2 inverse, uint32_t& key, uint32_t& a, uint32_t& b) {
  const KeyChannel low(Pair<T>::Low(k), Pair<T>::Low(rate), k_k.x, k_a.x, a0.x, inverse.x);
  const KeyChannel high(Pair<T>::High(k), Pair<T>::High(rate), k_k.y, k_a.y, a0.y, inverse.y);
  key = Pair<T>::Round(low.key, high.key);
  a = Pair<T>::Round(low.a, high.a);
  b = Pair<T>::Round(low.b, high.b);
}

}  // namespace rwkv_jax::cuda
