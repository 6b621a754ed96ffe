// States in halves (Schedule), and their products with a vector (decoding/summed_heads.cu).
#pragma once

#include "decoding/head_token.cuh"
#include "fragment.cuh"

namespace rwkv_jax::cuda {

// What is added to the bits of a float before it is cut in halves, so that the upper one is rounded.
constexpr uint32_t kHalfOfLower = 0x8000u;

// A float is a sum of so many numbers of bfloat16.
constexpr int kParts = 3;

// Copies kCount elements, with all threads of a block.
template <int kCount, int kThreads, typename T>
__device__ void CopyElements(const T* from, T* to) {
  constexpr int kEach = 16 / sizeof(T);
  const int first = kEach * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kCount; i += kEach * kThreads)
    if (i + kEach * kThreads <= kCount || i + first < kCount)
      CopyPacked<kEach>(to + first + i, from + first + i);
}

// A state in halves has them in turn for the rows that a warp has at once: the upper ones of these rows, then
// the lower ones. So each warp changes the form of its rows in place.
template <typename G>
constexpr int kRowsOfWarp = G::kRowGroups * G::kRows;

// The first of these rows.
template <typename G>
__device__ int FirstOfWarp(const G& partition) {
  return partition.first_row / kRowsOfWarp<G> * kRowsOfWarp<G>;
}

// Where the columns of a lane lie in one half of these rows: side by side, so that it reads and writes 16 bytes
// of a row.
template <typename G>
__device__ int PlaceInHalf(const G& partition, int row) {
  return (partition.first_row % kRowsOfWarp<G> + row) * kHeadChannels +
         partition.col_group * G::kCols;
}

// Starts to copy all upper halves to shared memory, where they lie one after the other.
template <typename G, int kThreads>
__device__ void CopyUpper(const float* state, uint16_t* upper) {
#pragma unroll
  for (int row = 0; row < kHeadChannels; row += kRowsOfWarp<G>)
    CopyElements<kRowsOfWarp<G> * kHeadChannels, kThreads>(
        reinterpret_cast<const uint16_t*>(state + row * kHeadChannels),
        upper + row * kHeadChannels);
}

// The lower halves of a warp's rows.
template <typename G>
__device__ const uint16_t* LowerOf(const float* rows) {
  return reinterpret_cast<const uint16_t*>(rows) + kRowsOfWarp<G> * kHeadChannels;
}

// Fetches all lower halves into L2.
template <typename G>
__device__ void PrefetchLower(const float* state) {
  const int row = threadIdx.x * kRowsOfWarp<G>;
  if (row < kHeadChannels)
    PrefetchBytes(LowerOf<G>(state + row * kHeadChannels),
                  kRowsOfWarp<G> * kHeadChannels * sizeof(uint16_t));
}

// Where PlaceInHalf puts a column, the inverse of StatePartition::Col.
__device__ inline int PlaceOfColumn(int column) {
  return column % (kHeadChannels / 2) / 4 * 8 + column / (kHeadChannels / 2) * 4 + column % 4;
}

// Cuts the vector of a warp into parts, the largest first, that together have all bits of its floats. They are
// in the order of the halves. Of the vector, the last rest is left.
__device__ inline void CutIntoParts(LaneVector& x, __nv_bfloat16 (&parts)[kParts][kHeadChannels]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    Packed<__nv_bfloat16, kLaneChannels> rounded;
    rounded.Set(x);
    rounded.Store(parts[i] + PlaceOfColumn(OwnChannel()));
#pragma unroll
    for (int c = 0; c < kLaneChannels; ++c) x[c] -= rounded[c];
  }
}

// y = S u on the matrix units, with the upper halves of S and with u in parts, which are columns of the right
// operand. A fragment's inputs are in another order than in memory, the same in both operands, so that a lane
// has eight neighbouring ones.
template <int kWarps>
__device__ void ReadUpper(const __nv_bfloat16* upper,
                          const __nv_bfloat16 (&u)[kParts][kHeadChannels],
                          float (&y)[kHeadChannels]) {
  constexpr int kRows = 16, kInputs = 32;
  const int lane = threadIdx.x % 32, own = lane / 4, input = lane % 4 * 8;
  using Vector = Packed<__nv_bfloat16, 8>;
  Vector right[kHeadChannels / kInputs] = {};
#pragma unroll
  for (int i = 0; i < kHeadChannels / kInputs; ++i)
    if (own < kParts) right[i].Load(u[own] + i * kInputs + input);
#pragma unroll
  for (int turn = 0; turn < kHeadChannels / kRows / kWarps; ++turn) {
    const int row = (turn * kWarps + threadIdx.x / 32) * kRows + own;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kHeadChannels / kInputs; ++i) {
      Vector left[2];
      left[0].Load(upper + row * kHeadChannels + i * kInputs + input);
      left[1].Load(upper + (row + 8) * kHeadChannels + i * kInputs + input);
#pragma unroll
      for (int w = 0; w < Vector::kWords; w += 2)
        WarpMultiply(
            sums, {left[0].words[w], left[1].words[w], left[0].words[w + 1], left[1].words[w + 1]},
            right[i].words[w], right[i].words[w + 1]);
    }
    // Of the first lane's two columns and of the next one's.
    float rows[2] = {sums[0] + sums[1], sums[2] + sums[3]};
    AllReduce<1, 2>(rows);
    if (lane % 4 == 0) y[row] = rows[0], y[row + 8] = rows[1];
  }
}

template <typename G>
__device__ void LoadHalves(const G& partition, const uint16_t* upper, const uint16_t* lower,
                           Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i) {
    const int place = PlaceInHalf(partition, i);
    const auto uppers = LoadPacked<G::kCols, uint16_t>(upper, place);
    const auto lowers = LoadPacked<G::kCols, uint16_t>(lower, place);
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) {
      const uint32_t bits =
          __byte_perm(lowers.words[c / 2], uppers.words[c / 2], c % 2 ? 0x7632 : 0x5410);
      s[i][c] = __uint_as_float(bits - kHalfOfLower);
    }
  }
}

template <typename G>
__device__ void StoreHalves(const G& partition, float* rows, const Fragment<G>& s) {
  auto* const upper = reinterpret_cast<uint16_t*>(rows);
  // NaN has many forms, and the upper halves of some are numbers.
  const auto bits = [](float x) {
    return (x != x ? 0x7fc00000u : __float_as_uint(x)) + kHalfOfLower;
  };
#pragma unroll
  for (int i = 0; i < G::kRows; ++i) {
    Packed<uint16_t, G::kCols> uppers, lowers;
#pragma unroll
    for (int c = 0; c < G::kCols; c += 2) {
      const uint32_t even = bits(s[i][c]), odd = bits(s[i][c + 1]);
      uppers.words[c / 2] = __byte_perm(even, odd, 0x7632);
      lowers.words[c / 2] = __byte_perm(even, odd, 0x5410);
    }
    const int place = PlaceInHalf(partition, i);
    uppers.Store(upper + place), lowers.Store(upper + kRowsOfWarp<G> * kHeadChannels + place);
  }
}

}  // namespace rwkv_jax::cuda
