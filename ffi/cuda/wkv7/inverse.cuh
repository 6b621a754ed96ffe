// What the matrix-unit kernels of WKV7 share beyond tiles.cuh: the floors of the decays, and the inverse
// of a tile.
#pragma once

#include "tiles.cuh"

namespace rwkv_jax::cuda {

constexpr int kPanelTiles = kPanelCols / kTileTokens;  // tiles side by side in a panel

// The least log2 decay of a token. What such a token lets through, 2^-60 of the state, is nothing beside
// what it writes, and tokens with it stay in the range of the scaled operands.
constexpr float kLeastLog2 = -60.0f;

// The same where no operand is scaled. It lets nothing through, and lower ones would make sums less precise.
constexpr float kVanishedLog2 = -150.0f;

// Multiplies x by e, which has the elements of two fragments, and converts it to bfloat16.
template <typename T>
__device__ void Scale(const float (&e)[2][4], uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = &e[i / 2][i % 2 * 2];
    x[i] = Bf16::Round(Pair<T>::Low(x[i]) * pair[0], Pair<T>::High(x[i]) * pair[1]);
  }
}

// (I - m)^-1 for a strictly lower triangular m, rounded to terms.
//
// The submatrices on the diagonal that are inverted grow from 2 x 2 to 16 x 16. If D holds the
// inverses of one size, and L is the part of m inside the submatrices of twice that size but
// outside those of this size, then D + D L D holds the inverses of twice that size. This is forward
// substitution by submatrices: no intermediate result is larger than the inverse. The powers of m,
// which a Neumann series needs, may overflow where the inverse is moderate.
//
// The result must not take the place of m: ptxas 13.0 then rounds m again after it is overwritten.
template <int kTerms>
__device__ void InvertUnitLower(const Accumulator<2>& m, Left (&inverse)[kTerms]) {
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
  const bool in_2 = col / 2 == row / 2, in_4 = col / 4 == row / 4;
  // Both 8 x 8 submatrices on the diagonal are in one fragment: the upper is its rows 0 to 7, the
  // lower its rows 8 to 15.
  using Terms = uint32_t[kTerms];
  Terms upper, lower;
  Round(m[0][0], m[0][1], upper), Round(m[1][2], m[1][3], lower);
  float d[4];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float unit = row == col + e ? 1.0f : 0.0f;
    d[e] = in_2 ? m[0][e] + unit : unit;
    d[2 + e] = in_2 ? m[1][2 + e] + unit : unit;
  }
  Terms d_upper, d_lower, left_upper, left_lower;
  const auto round = [&] { Round(d[0], d[1], d_upper), Round(d[2], d[3], d_lower); };
#pragma unroll
  for (int size = 2; size <= 4; size *= 2) {
    const uint32_t added = (size == 2 ? in_4 && !in_2 : !in_4) ? ~0u : 0u;
    round();
    float left[4] = {};
    ForProducts<kTerms>([&](int i, int j) {
      WarpMultiply(left, {d_upper[i], 0u, 0u, d_lower[i]}, Transposed(upper[j] & added),
                   Transposed(lower[j] & added));
    });
    Round(left[0], left[1], left_upper), Round(left[2], left[3], left_lower);
    ForProducts<kTerms>([&](int i, int j) {
      WarpMultiply(d, {left_upper[i], 0u, 0u, left_lower[i]}, Transposed(d_upper[j]),
                   Transposed(d_lower[j]));
    });
  }
  round();
  float left[4] = {}, corner[4] = {};
  Terms below, corner_below;
  Round(m[0][2], m[0][3], below);
  ForProducts<kTerms>([&](int i, int j) {
    WarpMultiply(left, {0u, 0u, 0u, d_lower[i]}, 0u, Transposed(below[j]));
  });
  Round(left[2], left[3], left_lower);
  ForProducts<kTerms>([&](int i, int j) {
    WarpMultiply(corner, {0u, left_lower[i], 0u, 0u}, Transposed(d_upper[j]), 0u);
  });
  Round(corner[2], corner[3], corner_below);
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    inverse[term][0] = d_upper[term];
    inverse[term][1] = corner_below[term];
    inverse[term][2] = 0u;
    inverse[term][3] = d_lower[term];
  }
}

}  // namespace rwkv_jax::cuda
