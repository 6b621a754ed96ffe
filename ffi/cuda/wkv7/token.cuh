// One token of WKV7 in float, for the threads of a block that share the state of a head in registers:
//
//   S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T
#pragma once

#include "fragment.cuh"

namespace rwkv_jax::cuda {

// The vectors of a token in shared memory; that of w has the factors d.
enum Vector { kW, kK, kV, kA, kB, kR, kDy };

// One of the tokens in shared memory, [vectors, kTokens, N].
template <int N, int kTokens>
struct TokenView {
  const float* tokens;
  int token;

  __device__ const float* Row(Vector vector) const {
    return tokens + (vector * kTokens + token) * N;
  }
};

// sa = S_{t-1} a_t
template <typename G, int kTokens>
__device__ void ReadFromState(const G& partition, const TokenView<G::N, kTokens>& at,
                              const Fragment<G>& s, float (&sa)[G::kRows]) {
  float a[G::kCols];
  LoadCols(partition, at.Row(kA), a);
  Dot<G>(s, a, sa);
}

// S_{t-1} becomes S_t; `sa` is S_{t-1} a_t.
template <typename G, int kTokens>
__device__ void UpdateState(const G& partition, const TokenView<G::N, kTokens>& at,
                            const float (&sa)[G::kRows], Fragment<G>& s) {
  float d[G::kCols], x[G::kCols], v[G::kRows];
  LoadCols(partition, at.Row(kW), d);
  LoadCols(partition, at.Row(kB), x);
  DecayAndAdd<G>(s, d, sa, x);
  LoadRows(partition, at.Row(kV), v);
  LoadCols(partition, at.Row(kK), x);
  Add<G>(s, v, x);
}

}  // namespace rwkv_jax::cuda
