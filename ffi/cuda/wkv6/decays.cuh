// What the matrix-unit kernels of WKV6 share: the decays of a chunk of L = 16 tokens, and the products
// of its tokens by each other.
//
// With G the sum of the log decays of a chunk up to a token, G' that before it and G_L that of all, rows
// being tokens,
//
//   Rt = R exp(G')   Kh = K exp(G_L - G)   Kb = K exp(-G)
//   A  = tril_strict(Rt Kb^T) + diag(R (u K)^T)
//   Y  = Rt S^T + A V        S <- S diag(exp(G_L)) + V^T Kh.
//
// Where a state is cleared before a token of the chunk, Rt S^T lacks the rows from the first such token
// on, Kh those before the last, exp(G_L) is 0, and A has no pairs of different splits.
//
// Rt and Kh have factors of at most 1, so the state is right for any decay. Kb has not: a chunk that
// decays further than kMaxTileLog2 takes the products of its tokens by halves, without it.
#pragma once

#include "tiles.cuh"
#include "launch.cuh"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {

constexpr int kHeadSize = kMatrixHeadSize;
using Tiles = StateAccumulator<kHeadSize>;
constexpr int kFrame = static_cast<int>(kChunk);
constexpr int kFrameChunks = kFrame / kTileTokens;
constexpr int kBlocks = kHeadSize / kTileTokens;  // of 16 channels
constexpr int kTile = kFrame * kRowBytes;  // of a frame of tokens, or of a state
constexpr int kChunkRows = kTileTokens * kRowBytes;
static_assert(kHeadSize == kPanelCols && kFrame == kPanelCols, "a frame and a state are one tile each");

constexpr float kMaxTileLog2 = 100.0f;

// The log2 decays of a frame: a tile of w, or the same for all tokens.
template <typename T, bool kConstant>
struct FrameDecays {
  uint32_t w_tile;
  const float* constant;  // [64], in shared memory
  Decay form;
  bool converted = false;  // the tile of w has become one of log decays

  // Those of 16 channels of a chunk, as right operands for two tiles of 8 channels.
  __device__ void Load(int chunk, int block, uint32_t there, uint32_t (&log_decays)[4]) const {
    uint32_t w[4];
    LoadTransposed(TileAddress(w_tile, 16 * chunk, block), w);
    if (converted) {
#pragma unroll
      for (int i = 0; i < 4; ++i) log_decays[i] = w[i];
    } else {
      if (form == Decay::kExp)
        ScaledLogDecays<T, Decay::kExp>(w, log_decays);
      else
        ScaledLogDecays<T, Decay::kLog>(w, log_decays);
      if (there != kAllRows) KeepRows(there, log_decays);
    }
  }
};

// Sums of log2 decays before and up to each token.
struct DecaySums {
  float before[2][4], upto[2][4];

  // Of a token, if all have the same.
  __device__ void Set(int i, int e, float log_decay, uint32_t there, int token) {
    const int earlier = __popc(there & ((1u << token) - 1));
    before[i][e] = log_decay * static_cast<float>(earlier);
    upto[i][e] = log_decay * static_cast<float>(earlier + (there >> token & 1));
  }
};

// With tokens as the rows of a tile of sums.
__device__ inline void SumByToken(const uint32_t (&log_decays)[4], DecaySums& sums) {
  const Ones inclusive(true, true, false), exclusive(true, false, false);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.before[i][e] = sums.upto[i][e] = 0.0f;
    WarpMultiplyHalf(sums.upto[i], inclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
    WarpMultiplyHalf(sums.before[i], exclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
  }
}

template <typename T, bool kConstant>
__device__ void SumByToken(const FrameDecays<T, kConstant>& decays, int chunk, int block,
                           uint32_t there, DecaySums& sums) {
  if constexpr (kConstant) {
    const int row = Lane() / 4, col = 16 * block + 2 * (Lane() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums.Set(i, e, decays.constant[col + 8 * i + e % 2], there, row + e / 2 * 8);
  } else {
    uint32_t log_decays[4];
    decays.Load(chunk, block, there, log_decays);
    SumByToken(log_decays, sums);
  }
}

// With the channels as rows: a chunk of the 16 channels of a warp, from converted decays.
template <typename T, bool kConstant>
__device__ void SumByChannel(const FrameDecays<T, kConstant>& decays, int chunk, int warp,
                             uint32_t there, DecaySums& sums) {
  if constexpr (kConstant) {
    const int row = 16 * warp + Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums.Set(i, e, decays.constant[row + e / 2 * 8], there, col + 8 * i + e % 2);
  } else {
    const Ones inclusive(true, true, false), exclusive(true, false, false);
    uint32_t x[4];
    LoadTransposed(TileAddress(decays.w_tile, 16 * chunk, warp), x);
    const Left log_decays = {x[0], x[2], x[1], x[3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.before[i][e] = sums.upto[i][e] = 0.0f;
      WarpMultiplyHalf(sums.before[i], log_decays, exclusive.a[i], exclusive.a[i + 2]);
      WarpMultiplyHalf(sums.upto[i], log_decays, inclusive.a[i], inclusive.a[i + 2]);
    }
  }
}

// The sums of a whole chunk, for the columns of this lane.
__device__ inline void LastRow(const DecaySums& sums, float (&total)[2][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) total[i][e] = __shfl_sync(~0u, sums.upto[i][2 + e], 28 | Lane());
}

// exp2 of a value of each element of two tiles, rounded as a Left.
template <typename Value>
__device__ void Exponentials(Value&& value, uint32_t (&e)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    e[i] = Bf16::Round(Exp2(value(i / 2, i % 2 * 2)), Exp2(value(i / 2, i % 2 * 2 + 1)));
}

__device__ inline void MultiplyPairs(const uint32_t (&x)[4], const uint32_t (&e)[4],
                                     uint32_t (&product)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) product[i] = Bf16::Multiply(x[i], e[i]);
}

// sum += x y^T of tokens by tokens, over 16 channels.
__device__ inline void AddTokenProducts(Accumulator<2>& sum, const uint32_t (&x)[4], const uint32_t (&y)[4]) {
  WarpMultiply(sum[0], x, y[0], y[2]);
  WarpMultiply(sum[1], x, y[1], y[3]);
}

// Factors of channels, so that the four lanes of a row find theirs in different banks: those of two tiles
// of a lane, by lane % 4. They are 0 where a state is cleared.
constexpr int kFactorStride = kHeadSize / 4 + 4;
constexpr int kFactorFloats = 4 * kFactorStride;

__device__ inline void StoreFactors(int block, const float (&factor)[2][2], bool clears,
                                    float* factors) {
  float4 x = {factor[0][0], factor[0][1], factor[1][0], factor[1][1]};
  if (clears) x = {0.0f, 0.0f, 0.0f, 0.0f};
  if (Lane() < 4) *reinterpret_cast<float4*>(factors + Lane() * kFactorStride + 4 * block) = x;
}

// S diag(factors), for rows of S.
__device__ inline void ScaleColumns(const float* factors, Accumulator<8>& s) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const float4 f =
        *reinterpret_cast<const float4*>(factors + Lane() % 4 * kFactorStride + 4 * block);
    float(&left)[4] = s[2 * block];
    float(&right)[4] = s[2 * block + 1];
    left[0] *= f.x, left[1] *= f.y, left[2] *= f.x, left[3] *= f.y;
    right[0] *= f.z, right[1] *= f.w, right[2] *= f.z, right[3] *= f.w;
  }
}

// Rows of r and k in global memory, from the first token of a chunk and the first channel of a head on.
template <typename T>
struct RawChunk {
  const T *r, *k;
  int stride;
  RowMarks marks;

  // A block of 16 channels of r or k as a Left.
  __device__ void Load(const T* from, int block, uint32_t (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Lane() / 4 + i % 2 * 8, col = 16 * block + i / 2 * 8 + 2 * (Lane() % 4);
      x[i] = marks.present >> row & 1 ? *reinterpret_cast<const uint32_t*>(
                               from + static_cast<int64_t>(row) * stride + col)
                         : 0u;
    }
  }
};

// tril_strict(Rt Kb^T) of some channels for any decay: of tokens in the two halves of a run of 16, of 8, of 4 and of 2,
// the decay between them is that to the middle of the run times that from it, and none exceeds 1.
template <typename T, bool kConstant>
__device__ void MultiplyByHalves(const FrameDecays<T, kConstant>& decays, int chunk,
                                 const RawChunk<T>& raw, int first_block, int end_block,
                                 Accumulator<2>& a) {
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int half = kTileTokens / 2; half >= 1; half /= 2) {
    Accumulator<2> part = {};
#pragma unroll 1
    for (int block = first_block; block < end_block; ++block) {
      DecaySums sums;
      SumByToken(decays, chunk, block, raw.marks.present, sums);
      uint32_t r[4], k[4];
      raw.Load(raw.r, block, r);
      raw.Load(raw.k, block, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = row + i % 2 * 8, first = i % 2 * 2;
        const bool reads = token & half;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // The sum up to the last token of the first half; with halves of 8 that is token 7.
          const int from = half == 8 ? 7 : ((row & ~(2 * half - 1)) + half - 1) % 8;
          const float upper = sums.upto[i / 2][e], own = sums.upto[i / 2][first + e];
          const float mine = half == 8 ? upper : own;
          const float middle = __shfl_sync(~0u, mine, 4 * from + Lane() % 4);
          x[e] = Exp2(reads ? sums.before[i / 2][first + e] - middle
                            : middle - sums.upto[i / 2][first + e]);
        }
        const uint32_t from = reads ? r[i] : k[i];
        const uint32_t scaled = Bf16::Round(Pair<T>::Low(from) * x[0], Pair<T>::High(from) * x[1]);
        r[i] = reads ? scaled : 0u;
        k[i] = reads ? 0u : scaled;
      }
      AddTokenProducts(part, r, k);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + e / 2 * 8, j = 8 * tile + col + e % 2;
        if (i / (2 * half) == j / (2 * half)) a[tile][e] += part[tile][e];
      }
  }
}

// Sets the diagonal of a 16 x 16 matrix to that of another.
__device__ inline void SetDiagonal(const Accumulator<2>& diagonal, Accumulator<2>& m) {
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (row == col + e) {
      m[0][e] = diagonal[0][e];
      m[1][2 + e] = diagonal[1][2 + e];
    }
}

// A frame of a head in arrays [B, T, H, 64], and the pieces of 16 bytes of it that a thread copies.
template <int kThreads>
struct FrameCopier {
  int64_t first;  // element
  int stride, tokens;
  uint64_t absent = 0;  // a bit for each token that is padding

  template <typename Fn>
  __device__ void ForEachPiece(Fn&& fn) const {
    constexpr int kRows = kThreads / 8;  // a multiple of 8, so they have their pieces in the same places
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    const uint32_t at = PieceAddress(0, row, piece);
    const int64_t element = first + static_cast<int64_t>(row) * stride + piece * 8;
#pragma unroll
    for (int i = 0; i < kFrame / kRows; ++i)
      fn(at + i * kRows * kRowBytes, element + i * kRows * static_cast<int64_t>(stride),
         row + i * kRows);
  }
  template <typename T>
  __device__ void Copy(uint32_t tile, const T* from) const {
    ForEachPiece([&](uint32_t to, int64_t element, int row) {
      CopyAsync(tile + to, from + element, row < tokens && (absent >> row & 1) == 0);
    });
  }
};

// Rows of a block of operands as a Left: those before `begin`, or not before `end`, are cleared.
__device__ inline void KeepRowsBetween(int begin, int end, uint32_t (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = Lane() / 4 + i % 2 * 8;
    if (row < begin || row >= end) x[i] = 0u;
  }
}

// The pieces of a tile that this thread has copied, as bfloat16.
template <typename T, int kThreads>
__device__ void ConvertOwnPieces(unsigned char* tile) {
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < kFrame * 8 / kThreads; ++i) {
      uint4& x = *reinterpret_cast<uint4*>(
          tile + PieceAddress(0, threadIdx.x / 8 + i * (kThreads / 8), threadIdx.x % 8));
      x = {ToBf16<T>(x.x), ToBf16<T>(x.y), ToBf16<T>(x.z), ToBf16<T>(x.w)};
    }
  }
}

// The log2 decays that do not change, into shared memory.
__device__ inline void LoadConstantDecays(const float* w, Decay form, float* log_decays) {
  if (threadIdx.x < kHeadSize) {
    const float x = w[threadIdx.x];
    const float log2 = kLog2E * (form == Decay::kExp ? -Exp2(kLog2E * x) : x);
    log_decays[threadIdx.x] = log2 < kMinLog2Decay ? kMinLog2Decay : log2;
  }
}

}  // namespace rwkv_jax::cuda
