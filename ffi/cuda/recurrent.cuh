// What the kernels share that go token by token in float: where a head lies in the arrays, its
// saved states, and the splits of the backward pass.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernel_choice.cuh"
#include "splits.h"
#include "rwkv_jax/sequences.h"
#include "fragment.cuh"

namespace rwkv_jax::cuda {

// Calls fn(T(), integral_constant<int, head size>()), T being float or AnyHalf. 16-bit types are here only where
// the kernels on matrix units do not take them, so that one kernel does for both.
template <typename Fn>
cudaError_t ForFloatOrHalf(Dtype dtype, int64_t head_size, Fn&& fn) {
  if (dtype == Dtype::kF32) return ForHeadSize<16, 32, 64, 128>(head_size, 0.0f, fn);
  return ForHeadSize<16, 32, 64, 128>(head_size, AnyHalf(), fn);
}

// Where one head of a sequence lies in arrays [B, T, H, N] and [S, H, N, N].
template <int N>
struct Head {
  int64_t turn;  // in which place it runs, of all heads of all sequences
  int64_t index, sequence, head, heads;
  Span span;

  __device__ Head(int64_t turn, int64_t tokens, int64_t heads, const Sequences& sequences)
      : Head(turn, heads, sequences.InTurn(turn / heads, tokens)) {}
  __device__ Head(int64_t turn, int64_t heads, const Turn& now)
      : turn(turn),
        index(now.sequence * heads + turn % heads),
        sequence(now.sequence),
        head(turn % heads),
        heads(heads),
        span(now.span) {}

  __device__ int64_t FirstToken() const { return (span.first_token * heads + head) * N; }
  __device__ int64_t TokenStride() const { return heads * N; }
  __device__ int64_t State() const { return index * N * N; }
  // The saved state before token n * kChunk, in [chunks, H, N, N].
  __device__ int64_t SavedState(int64_t n) const {
    return ((span.first_chunk + n) * heads + head) * N * N;
  }
};

// The states at chunk boundaries, float or bfloat16.
struct SavedStates {
  void* data;
  bool rounded;

  template <typename G>
  __device__ void Load(const G& partition, int64_t index, Fragment<G>& s) const {
    if (rounded)
      LoadState(partition, static_cast<const __nv_bfloat16*>(data) + index, s);
    else
      LoadState(partition, static_cast<const float*>(data) + index, s);
  }
  template <typename G>
  __device__ void Store(const G& partition, int64_t index, const Fragment<G>& s) const {
    if (rounded)
      StoreState(partition, static_cast<__nv_bfloat16*>(data) + index, s);
    else
      StoreState(partition, static_cast<float*>(data) + index, s);
  }
};

template <typename Call>
__host__ __device__ SavedStates StatesOf(const Call& call) {
  return {const_cast<void*>(call.states), call.states_dtype == Dtype::kBF16};
}

// The heads that one launch of the backward pass runs. The chunks of a head are shared out among
// splits, and each split has a block. The scratch of a split starts with the gradient of the state
// at its end.
struct ReplayLot {
  int64_t first_head;
  ReplayScratch scratch;

  __device__ int64_t Turn() const { return first_head + blockIdx.x / scratch.splits; }
  __device__ int64_t Split() const { return blockIdx.x % scratch.splits; }
  __device__ int64_t Length(int64_t chunks) const {
    return (chunks + scratch.splits - 1) / scratch.splits;
  }
  // The scratch of a split, where each split has `size` floats.
  __device__ float* Scratch(int64_t turn, int64_t split, int64_t size) const {
    return scratch.memory + (turn - first_head) * scratch.stride + split * size;
  }
};

// Calls launch(lot, heads of the lot) for one lot of heads after another.
template <typename Fn>
cudaError_t ForHeads(int64_t heads, const ReplayScratch& scratch, Fn&& launch) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < heads && error == cudaSuccess; first += scratch.heads) {
    const int64_t left = heads - first;
    error = launch(ReplayLot{first, scratch}, left < scratch.heads ? left : scratch.heads);
  }
  return error;
}

// x^T m for the columns of this lane, summed over its rows.
template <typename G>
__device__ void TransposedDot(const float (&x)[G::kRows], const Fragment<G>& m,
                              float (&out)[G::kCols]) {
#pragma unroll
  for (int c = 0; c < G::kCols; ++c) {
    out[c] = x[0] * m[0][c];
#pragma unroll
    for (int i = 1; i < G::kRows; ++i) out[c] = fmaf(x[i], m[i][c], out[c]);
  }
}

}  // namespace rwkv_jax::cuda
