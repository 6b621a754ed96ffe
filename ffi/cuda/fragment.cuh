// How the threads of a block share the state of one head in registers, and how they load its
// tokens.
//
// A warp has whole rows of the state S [V, K]. The recurrence never mixes rows, so sums over a row
// stay inside the warp, and only sums over a column cross warps. A lane has a fragment of kRows x
// kCols elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "decay.cuh"
#include "marks.cuh"
#include "ptx.cuh"
#include "rwkv_jax/types.h"

namespace rwkv_jax::cuda {

__host__ __device__ constexpr int Min(int a, int b) { return a < b ? a : b; }

// Which fragment of the state a lane has.
template <int kHeadSize, int kMaxRows>
struct StatePartition {
  static constexpr int N = kHeadSize;
  static constexpr int kCols = 8;
  static constexpr int kColGroups = N / kCols;
  static constexpr int kRowGroups = 32 / kColGroups;
  static constexpr int kRows = Min(kMaxRows, N / kRowGroups);
  static constexpr int kWarps = N / (kRowGroups * kRows);
  static constexpr int kThreads = 32 * kWarps;

  int col_group, first_row, lane;

  __device__ StatePartition()
      : col_group(threadIdx.x % kColGroups),
        first_row(threadIdx.x / kColGroups * kRows),
        lane(threadIdx.x % 32) {}

  // The column of element c of a row of the fragment. The lane has columns 4 g to 4 g + 3 of each
  // half of the state, g being its col_group, so that the lanes of a row read 128 bytes without a
  // gap.
  __device__ int Col(int c) const { return c / 4 * (N / 2) + 4 * col_group + c % 4; }
};

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

// An element of a 16-bit type that a kernel is told as it runs, so that it is compiled once for both types.
struct AnyHalf {
  uint16_t bits;
};

template <typename T>
__device__ float ToFloat(T x, Dtype dtype) {
  if constexpr (std::is_same_v<T, AnyHalf>) {
    // Both, since a branch would take longer.
    const float bf16 = ToFloat(*reinterpret_cast<const __nv_bfloat16*>(&x));
    const float f16 = ToFloat(*reinterpret_cast<const __half*>(&x));
    return dtype == Dtype::kBF16 ? bf16 : f16;
  } else {
    return ToFloat(x);
  }
}

template <typename G>
using Fragment = float[G::kRows][G::kCols];

// Clears by stores, since a product with 0 would keep what is not finite.
template <typename G>
__device__ void Clear(Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) s[i][c] = 0.0f;
}

__device__ inline float4 Pack(const float* x) { return {x[0], x[1], x[2], x[3]}; }

__device__ inline void Unpack(float4 packed, float* x) {
  x[0] = packed.x, x[1] = packed.y, x[2] = packed.z, x[3] = packed.w;
}

// The same of four bfloat16.
__device__ inline void Unpack(uint2 packed, float* x) {
  x[0] = __uint_as_float(packed.x << 16), x[1] = __uint_as_float(packed.x & 0xffff0000u);
  x[2] = __uint_as_float(packed.y << 16), x[3] = __uint_as_float(packed.y & 0xffff0000u);
}

template <typename G>
__device__ void LoadCols(const G& partition, const float* row, float (&x)[G::kCols]) {
#pragma unroll
  for (int c = 0; c < G::kCols; c += 4)
    Unpack(*reinterpret_cast<const float4*>(row + partition.Col(c)), &x[c]);
}

template <typename G>
__device__ void LoadRows(const G& partition, const float* col, float (&x)[G::kRows]) {
  if constexpr (G::kRows % 4 == 0) {
#pragma unroll
    for (int i = 0; i < G::kRows; i += 4)
      Unpack(*reinterpret_cast<const float4*>(col + partition.first_row + i), x + i);
  } else {
#pragma unroll
    for (int i = 0; i < G::kRows; ++i) x[i] = col[partition.first_row + i];
  }
}

template <typename G>
__device__ void StoreRows(const G& partition, float* col, const float (&x)[G::kRows]) {
  if constexpr (G::kRows % 4 == 0) {
#pragma unroll
    for (int i = 0; i < G::kRows; i += 4)
      *reinterpret_cast<float4*>(col + partition.first_row + i) = Pack(x + i);
  } else {
#pragma unroll
    for (int i = 0; i < G::kRows; ++i) col[partition.first_row + i] = x[i];
  }
}

template <typename G>
__device__ void LoadCols(const G& partition, const __nv_bfloat16* row, float (&x)[G::kCols]) {
#pragma unroll
  for (int c = 0; c < G::kCols; c += 4)
    Unpack(*reinterpret_cast<const uint2*>(row + partition.Col(c)), &x[c]);
}

template <typename G>
__device__ void StoreCols(const G& partition, float* row, const float (&x)[G::kCols]) {
#pragma unroll
  for (int c = 0; c < G::kCols; c += 4)
    *reinterpret_cast<float4*>(row + partition.Col(c)) = Pack(&x[c]);
}

template <typename G>
__device__ void StoreCols(const G& partition, __nv_bfloat16* row, const float (&x)[G::kCols]) {
#pragma unroll
  for (int c = 0; c < G::kCols; c += 4)
    *reinterpret_cast<uint2*>(row + partition.Col(c)) = {RoundToBf16(x[c], x[c + 1]),
                                                         RoundToBf16(x[c + 2], x[c + 3])};
}

// Loads and stores the fragment of a state [N, N] of T, float or bfloat16.
template <typename G, typename T>
__device__ void LoadState(const G& partition, const T* state, Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
    LoadCols(partition, state + (partition.first_row + i) * G::N, s[i]);
}

template <typename G, typename T>
__device__ void StoreState(const G& partition, T* state, const Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
    StoreCols(partition, state + (partition.first_row + i) * G::N, s[i]);
}

// The same of a state [rows, cols] with at most N of each, multiples of 4; what it lacks is 0 in registers.
template <typename G, typename T>
__device__ void LoadStatePart(const G& partition, const T* state, int rows, int cols,
                              Fragment<G>& s) {
  using Packed = std::conditional_t<std::is_same_v<T, float>, float4, uint2>;
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; c += 4) {
      const int row = partition.first_row + i, col = partition.Col(c);
      Packed packed = {};
      if (row < rows && col < cols)
        packed = *reinterpret_cast<const Packed*>(state + row * cols + col);
      Unpack(packed, &s[i][c]);
    }
}

template <typename G>
__device__ void StoreStatePart(const G& partition, float* state, int rows, int cols,
                               const Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; c += 4) {
      const int row = partition.first_row + i, col = partition.Col(c);
      if (row < rows && col < cols)
        *reinterpret_cast<float4*>(state + row * cols + col) = Pack(&s[i][c]);
    }
}

// Sums x over the lanes that differ only in the bits kLow to kHigh / 2 of their number; all of them
// get the sums.
template <int kLow, int kHigh, int kCount>
__device__ void AllReduce(float (&x)[kCount]) {
#pragma unroll
  for (int bit = kLow; bit < kHigh; bit *= 2)
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(~0u, x[i], bit);
}

// Shares out the same sums among those lanes: x[0], x[1] and so on of each lane get kCount / (kHigh
// / kLow) of them, at least one. Returns the index of the first, or -1 where a lower lane has the
// same sum.
template <int kLow, int kHigh, int kCount>
__device__ int ReduceScatter(float (&x)[kCount], int lane) {
  int first = 0;
  int left = kCount;
  bool again = false;
#pragma unroll
  for (int bit = kHigh / 2; bit >= kLow; bit /= 2) {
    const bool upper = lane & bit;
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int i = 0; i < left; ++i) {
        const float keep = upper ? x[i + left] : x[i];
        const float give = upper ? x[i] : x[i + left];
        x[i] = keep + __shfl_xor_sync(~0u, give, bit);
      }
      first += upper ? left : 0;
    } else {
      x[0] += __shfl_xor_sync(~0u, x[0], bit);
      again |= upper;
    }
  }
  return again ? -1 : first;
}

// The sums of s * x over the columns of this lane, for each row.
template <typename G>
__device__ void PartialDot(const Fragment<G>& s, const float (&x)[G::kCols],
                           float (&sums)[G::kRows]) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i) {
    float even = s[i][0] * x[0], odd = s[i][1] * x[1];
#pragma unroll
    for (int c = 2; c < G::kCols; c += 2) {
      even = fmaf(s[i][c], x[c], even);
      odd = fmaf(s[i][c + 1], x[c + 1], odd);
    }
    sums[i] = even + odd;
  }
}

// s x: the sums over all columns.
template <typename G>
__device__ void Dot(const Fragment<G>& s, const float (&x)[G::kCols], float (&sums)[G::kRows]) {
  PartialDot<G>(s, x, sums);
  AllReduce<1, G::kColGroups>(sums);
}

// s = s diag(d) + left right^T
template <typename G>
__device__ void DecayAndAdd(Fragment<G>& s, const float (&d)[G::kCols],
                            const float (&left)[G::kRows], const float (&right)[G::kCols]) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) s[i][c] = fmaf(s[i][c], d[c], left[i] * right[c]);
}

// s += left right^T
template <typename G>
__device__ void Add(Fragment<G>& s, const float (&left)[G::kRows], const float (&right)[G::kCols]) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) s[i][c] = fmaf(left[i], right[c], s[i][c]);
}

template <typename T>
__device__ T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T>
__device__ T FromFloat(float x, Dtype dtype) {
  if constexpr (std::is_same_v<T, AnyHalf>) {
    const __nv_bfloat16 bf16 = FromFloat<__nv_bfloat16>(x);
    const __half f16 = FromFloat<__half>(x);
    const AnyHalf as_bf16 = *reinterpret_cast<const AnyHalf*>(&bf16);
    const AnyHalf as_f16 = *reinterpret_cast<const AnyHalf*>(&f16);
    return {dtype == Dtype::kBF16 ? as_bf16.bits : as_f16.bits};
  } else {
    return FromFloat<T>(x);
  }
}

// Where the tokens of a head lie in an array: `first` and `stride`, from token to token, count heads of `size` channels.
struct TokenRows {
  int64_t first, stride;
  int size;

  __device__ int64_t Element(int token) const { return (first + token * stride) * size; }
};

// Loads kTokens rows of w and of kVectors - 1 other vectors of N elements from global memory to
// shared memory, as float, and w as decay factors. Fetch loads them to registers and Store stores
// them, so that the next tokens are on their way while these are computed. A token past the end, or
// one that is padding, is stored as a token that changes no state: with decay 1 and all else 0.
template <typename T, typename G, int kVectors, int kTokens>
class TokenLoader {
 public:
  // Fetches `count` tokens, the first at element `first` of each array, `stride` elements apart; w
  // is vectors[0].
  __device__ void Fetch(const T* const* vectors, int64_t first, int64_t stride, int count) {
    if (DecayToken() < Min(count, kTokens))
      w_ = *reinterpret_cast<const Decays*>(vectors[0] + first + DecayToken() * stride +
                                            threadIdx.x * kDecays % G::N);
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int piece = Index(j), token = piece / kRowPieces % kTokens;
      if (piece < kPieces && token < count) {
        const T* row = vectors[1 + piece / (kRowPieces * kTokens)] + first + token * stride;
        mine_[j] = *reinterpret_cast<const Piece*>(row + piece % kRowPieces * kPiece);
      }
    }
  }

  // The same of arrays that lie differently: rows_of(vector) says how. What heads of less than N channels lack is 0.
  template <typename RowsOf>
  __device__ void FetchPart(const T* const* vectors, int count, RowsOf&& rows_of) {
    const int w_col = threadIdx.x * kDecays % G::N;
    const TokenRows of_w = rows_of(0);
    w_ = {};
    if (DecayToken() < Min(count, kTokens) && w_col < of_w.size)
      w_ = *reinterpret_cast<const Decays*>(vectors[0] + of_w.Element(DecayToken()) + w_col);
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int piece = Index(j), token = piece / kRowPieces % kTokens;
      const int vector = 1 + piece / (kRowPieces * kTokens), col = piece % kRowPieces * kPiece;
      const TokenRows rows = rows_of(vector);
      mine_[j] = {};
      if (piece < kPieces && token < count && col < rows.size)
        mine_[j] = *reinterpret_cast<const Piece*>(vectors[vector] + rows.Element(token) + col);
    }
  }

  // `tokens` is [kVectors, kTokens, N]; `slopes` [kTokens, N] gets the derivatives of the decay
  // factors.
  template <bool kSlopes, bool kMarked>
  __device__ void Store(float* tokens, float* slopes, int count, TileMarks<kMarked> marks,
                        Decay form, Dtype dtype) const {
    const auto present = [&](int token) { return token < count && !marks.Absent(token); };
#pragma unroll
    for (int e = 0; e < kDecays; ++e) {
      if (DecayToken() >= kTokens) continue;
      float2 decay{1.0f, 0.0f};
      if (present(DecayToken())) decay = DecayAndSlope(ToFloat(w_.x[e], dtype), form);
      tokens[threadIdx.x * kDecays + e] = decay.x;
      if constexpr (kSlopes) slopes[threadIdx.x * kDecays + e] = decay.y;
    }
#pragma unroll
    for (int j = 0; j < kMine; ++j) {
      const int piece = Index(j), token = piece / kRowPieces % kTokens;
      if (piece >= kPieces) continue;
      float x[kPiece];
#pragma unroll
      for (int e = 0; e < kPiece; ++e) x[e] = present(token) ? ToFloat(mine_[j].x[e], dtype) : 0.0f;
#pragma unroll
      for (int e = 0; e < kPiece; e += 4)
        *reinterpret_cast<float4*>(tokens + kTokens * G::N + piece * kPiece + e) = Pack(x + e);
    }
  }

 private:
  // A decay factor takes far longer than a conversion, so every thread computes the same number of
  // decay factors.
  static constexpr int kDecays = (kTokens * G::N + G::kThreads - 1) / G::kThreads;
  static constexpr int kPiece = 8;
  static constexpr int kRowPieces = G::N / kPiece;
  static constexpr int kPieces = (kVectors - 1) * kTokens * kRowPieces;
  static constexpr int kMine = (kPieces + G::kThreads - 1) / G::kThreads;
  struct alignas(Min(16, kDecays * sizeof(T))) Decays {
    T x[kDecays];
  };
  struct alignas(16) Piece {
    T x[kPiece];
  };

  static __device__ int DecayToken() { return threadIdx.x * kDecays / G::N; }
  static __device__ int Index(int j) { return threadIdx.x + j * G::kThreads; }

  Decays w_;
  Piece mine_[kMine];
};

}  // namespace rwkv_jax::cuda
