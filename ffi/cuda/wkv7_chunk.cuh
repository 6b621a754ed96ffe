// What the matrix-unit kernels of WKV7 share: sums of log decays, and the inverse of a chunk.
//
// Log decays are summed inside a frame of kChunk tokens, and the operands of a frame are scaled by
// exponentials of those sums, up or down, so that the state needs no scaling inside a frame. A frame
// whose sum leaves the range of the scale is not computed: its head is left to the recurrent kernel,
// which takes any decay.
#pragma once

#include "matrix.cuh"
#include "rwkv_jax/wkv7.h"

namespace rwkv_jax::cuda {

// Tokens that are taken together: those of one matrix product.
constexpr int kSub = 16;

// The largest sum of log2 decays of a frame: products of two scaled operands stay finite in float.
constexpr float kMaxFrameLog2 = 86.0f;

constexpr float kLog2E = 1.4426950408889634f;

// Log decays are summed as float16, times this scale so that slow ones are not subnormal: the
// rounding of one changes its factor d by a relative |log d| / 4096 at most.
constexpr float kLogScale = 256.0f;
constexpr uint32_t kInverseLogScale = 0x1c001c00;  // 1 / 256, twice, in float16

// The base-2 logarithm of the decay factor of w, times the scale, and no less than twice what a frame
// may have. A comparison, not fmaxf, so that a NaN stays a NaN.
template <Decay kForm>
__device__ float ScaledLogDecay(float w) {
  constexpr float kScale = kLog2E * kLogScale;
  if (kForm == Decay::kSigmoid)
    return -kSigmoidScale * kScale * Reciprocal(1.0f + Exp2(-kLog2E * w));
  constexpr float kLeast = -2 * kMaxFrameLog2 * kLogScale;
  const float x = kForm == Decay::kExp ? -kScale * Exp2(kLog2E * w) : kScale * w;
  return x < kLeast ? kLeast : x;
}

// Which of the tokens of a chunk are there; a row of the others changes no state.
struct Rows {
  int first, end;

  __device__ bool All() const { return first <= 0 && end >= kSub; }
  __device__ bool Has(int row) const { return row >= first && row < end; }
};

template <typename T, Decay kForm>
__device__ void ScaledLogDecays(const uint32_t (&w)[4], uint32_t (&log_decays)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    log_decays[i] = Pair<__half>::Round(ScaledLogDecay<kForm>(Pair<T>::Low(w[i])),
                                        ScaledLogDecay<kForm>(Pair<T>::High(w[i])));
}

// The scaled log decays of 16 tokens and 16 channels, as right operands for two tiles of 8 channels,
// from the block of w that LoadTransposed has brought.
template <typename T>
__device__ void LogDecays(const uint32_t (&w)[4], Decay form, const Rows& rows,
                          uint32_t (&log_decays)[4]) {
  if (form == Decay::kSigmoid)
    ScaledLogDecays<T, Decay::kSigmoid>(w, log_decays);
  else if (form == Decay::kExp)
    ScaledLogDecays<T, Decay::kExp>(w, log_decays);
  else
    ScaledLogDecays<T, Decay::kLog>(w, log_decays);
  if (!rows.All()) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2 * 8 + 2 * (Lane() % 4);
      log_decays[i] &= (rows.Has(row) ? 0xffffu : 0u) | (rows.Has(row + 1) ? 0xffff0000u : 0u);
    }
  }
}

// Ones below, on or above the diagonal of a 16 x 16 matrix, over the scale of the log decays: as a
// left operand it sums them.
struct Ones {
  Left a;

  __device__ Ones(bool below, bool diagonal, bool above) {
    const int row = Lane() / 4, col = 2 * (Lane() % 4);
    const auto has = [&](int col) {
      return col < row ? below : col == row ? diagonal : above;
    };
    a[0] = a[3] = kInverseLogScale &
                  ((has(col) ? 0xffffu : 0u) | (has(col + 1) ? 0xffff0000u : 0u));
    a[1] = below ? kInverseLogScale : 0u;
    a[2] = above ? kInverseLogScale : 0u;
  }
};

// x scaled by e, which has the elements of two tiles of sums, as bfloat16.
template <typename T>
__device__ void Scale(const float (&e)[2][4], uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &e[i / 2][i % 2 * 2];
    x[i] = Bf16::Round(Pair<T>::Low(x[i]) * pair[0], Pair<T>::High(x[i]) * pair[1]);
  }
}

// Clears what lies above the diagonal of a 16 x 16 matrix, and the diagonal too unless it is kept.
__device__ inline void KeepLower(bool diagonal, Sum<2>& m) {
  const int below = Lane() / 4 - 2 * (Lane() % 4) + diagonal;  // in both blocks of the diagonal
  if (below <= 0) m[0][0] = m[1][2] = 0.0f;
  if (below <= 1) m[0][1] = m[1][3] = 0.0f;
  m[1][0] = m[1][1] = 0.0f;
}

// (I - m)^-1 for a strictly lower triangular m, rounded.
//
// Inverses of diagonal blocks grow from 2 x 2 to 16 x 16: if D inverts the blocks of one size, and L
// is what of m lies in the blocks of twice that size but outside these, then D + D L D inverts the
// larger ones. That is substitution by blocks, so nothing grows that is not large in the inverse; the
// powers of m, which other ways need, may overflow where the inverse is moderate.
//
// The result must not take the place of m: ptxas 13.0 then rounds m again after it is overwritten.
__device__ inline void InvertUnitLower(const Sum<2>& m, Left& inverse) {
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
  const bool in_2 = col / 2 == row / 2, in_4 = col / 4 == row / 4;
  // The diagonal blocks of 8 x 8, both in one sum: the upper is its rows 0 to 7, the lower 8 to 15.
  const uint32_t upper = Bf16::Round(m[0][0], m[0][1]), lower = Bf16::Round(m[1][2], m[1][3]);
  float d[4];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float unit = row == col + e ? 1.0f : 0.0f;
    d[e] = in_2 ? m[0][e] + unit : unit;
    d[2 + e] = in_2 ? m[1][2 + e] + unit : unit;
  }
  uint32_t d_upper, d_lower;
  const auto round = [&] {
    d_upper = Bf16::Round(d[0], d[1]);
    d_lower = Bf16::Round(d[2], d[3]);
  };
#pragma unroll
  for (int size = 2; size <= 4; size *= 2) {
    const uint32_t added = (size == 2 ? in_4 && !in_2 : !in_4) ? ~0u : 0u;
    round();
    float left[4] = {};
    WarpMultiply(left, {d_upper, 0u, 0u, d_lower}, Transposed(upper & added),
                 Transposed(lower & added));
    WarpMultiply(d, {Bf16::Round(left[0], left[1]), 0u, 0u, Bf16::Round(left[2], left[3])},
                 Transposed(d_upper), Transposed(d_lower));
  }
  round();
  float left[4] = {}, corner[4] = {};
  WarpMultiply(left, {0u, 0u, 0u, d_lower}, 0u, Transposed(Bf16::Round(m[0][2], m[0][3])));
  WarpMultiply(corner, {0u, Bf16::Round(left[2], left[3]), 0u, 0u}, Transposed(d_upper), 0u);
  inverse[0] = d_upper;
  inverse[1] = Bf16::Round(corner[2], corner[3]);
  inverse[2] = 0u;
  inverse[3] = d_lower;
}

}  // namespace rwkv_jax::cuda
