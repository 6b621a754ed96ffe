// The mathematics that the matrix-unit kernels of WKV6 share: the decays of a tile of L = 16
// tokens, and the products of the tokens of a tile by each other.
//
// The recurrence is the time mixing of Finch (RWKV-6) in "Eagle and Finch: RWKV with Matrix-Valued
// States and Dynamic Recurrence", arXiv:2404.05892; its official kernel is
// RWKV-v5/cuda/wkv6_cuda.cu of RWKV-LM. For each head, with a state S [V, K], decay factors d_t [K]
// and the bonus u [K],
//
//   y_t = S r_t + ((u k_t)^T r_t) v_t        S <- S diag(d_t) + v_t k_t^T.
//
// The kernels take a tile of tokens at once, in the chunkwise form of gated linear attention
// (arXiv:2312.06635). The rows of R, K, V and Y are the tokens of a tile. G is the sum of the log
// decays of the tile up to and with a token, G' is the sum up to but without that token, and G_L is
// the sum over the whole tile. Then
//
//   Rt = R exp(G')   Kh = K exp(G_L - G)   Kb = K exp(-G)
//   A  = tril_strict(Rt Kb^T) + diag(R (u K)^T)
//   Y  = Rt S^T + A V        S <- S diag(exp(G_L)) + V^T Kh.
//
// Where a segment starts in the tile, the state is cleared before its first token. Then Rt S^T has
// no rows from the first such token on, Kh has no rows before the last such token, exp(G_L) is 0,
// and A has no pairs of tokens from different segments.
//
// The factors of Rt and Kh are at most 1, so the state is accurate for any decay. The factors of Kb
// are at least 1 and may overflow: a tile is "far" if it decays further than kMaxTileLog2, and its
// products of tokens by tokens are computed without Kb, by halves (MultiplyByHalves).
//
// Floats are multiplied in terms (matrix.cuh). They are copied to where their terms will lie: a panel of first
// terms, and behind it one of second terms. One kernel takes them with marks and without.
#pragma once

#include "tiles.cuh"
#include "kernel_choice.cuh"
#include "launch.cuh"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {

constexpr int kChunkTokens = static_cast<int>(kChunk);
constexpr int kChunkTiles = kChunkTokens / kTileTokens;
constexpr int kColumnTiles = kPanelCols / kTileTokens;  // tiles side by side in a panel
// A panel has 64 channels as its columns, and as its rows the 64 tokens of a chunk or 64 rows of a state.
constexpr int kPanelBytes = kChunkTokens * kRowBytes;
constexpr int kTileStride = kTileTokens * kRowBytes;  // bytes from a tile of tokens to the next one
// The panels side by side that a chunk of a head of N channels fills, which are 64 or 128.
template <int N>
constexpr int kPanels = N / kPanelCols;
static_assert(kChunkTokens == kPanelCols, "the tokens of a chunk are the rows of a panel");

// The bytes of a panel in all its terms, and of a packed tile of tokens by tokens.
template <typename T>
constexpr int kPanelTermsBytes = kTermsOf<T> * kPanelBytes;
template <typename T>
constexpr int kTileTermsBytes = kTermsOf<T> * kTileBytes;

// Two elements of an input that follow each other in a row.
template <typename T>
using Two = std::conditional_t<std::is_same_v<T, float>, float2, uint32_t>;

template <typename T>
__device__ float2 ValuesOf(const Two<T>& x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return {Pair<T>::Low(x), Pair<T>::High(x)};
}

// Where a float of 16 tokens by 16 channels of a panel lies. As in TileAddress, a constant `column` stays one.
__device__ inline uint32_t FloatOfTile(uint32_t panel, int tile, int column, int row, int col) {
  return panel + tile * kTileStride + (FloatAddress(0, kPanelBytes, row, col) ^ (column << 5));
}

// 16 tokens by 16 channels of a panel, as the registers of a left operand have them; of 16-bit types they are
// converted to bfloat16.
template <typename T>
__device__ void LoadTile(uint32_t panel, int tile, int column, Two<T> (&x)[4]) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at =
          FloatOfTile(panel, tile, column, Lane() / 4 + i % 2 * 8, i / 2 * 8 + 2 * (Lane() % 4));
      x[i] = {__uint_as_float(LoadWord(at)), __uint_as_float(LoadWord(at + 4))};
    }
  } else {
    LoadMatrices(TileAddress(panel, 16 * tile, column), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ToBf16<T>(x[i]);
  }
}

// The terms of what LoadTile has loaded, times factor(i, e) for each element of an Accumulator<2>.
template <typename T, typename Factor>
__device__ void ScaleTile(const Two<T> (&x)[4], Factor&& factor, Left (&scaled)[kTermsOf<T>]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = factor(i / 2, i % 2 * 2), high = factor(i / 2, i % 2 * 2 + 1);
    if constexpr (std::is_same_v<T, float>) {
      uint32_t terms[2];
      Round(x[i].x * low, x[i].y * high, terms);
      scaled[0][i] = terms[0], scaled[1][i] = terms[1];
    } else {
      scaled[0][i] = Bf16::Multiply(x[i], Bf16::Round(low, high));
    }
  }
}

// Stores terms in place of what LoadTile has loaded.
template <int kTerms>
__device__ void StoreTile(uint32_t panel, int tile, int column, const Left (&x)[kTerms]) {
  if constexpr (kTerms > 1) __syncwarp();  // all lanes have read what others overwrite
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
    StoreMatrices(TileAddress(panel + term * kPanelBytes, 16 * tile, column), x[term]);
}

// Floats of 16 tokens by 16 channels of a panel, each where it lies in an Accumulator<2> with channels as rows.
__device__ inline uint32_t FloatByChannel(uint32_t panel, int tile, int column, int i, int e) {
  return FloatOfTile(panel, tile, column, 8 * i + 2 * (Lane() % 4) + e % 2, Lane() / 4 + e / 2 * 8);
}
__device__ inline void LoadFloats(uint32_t panel, int tile, int column, float (*x)[4]) {
  ForEachElement<2>([&](int i, int e) {
    x[i][e] = __uint_as_float(LoadWord(FloatByChannel(panel, tile, column, i, e)));
  });
}
__device__ inline void StoreFloats(uint32_t panel, int tile, int column, const float (&x)[2][4]) {
  ForEachElement<2>([&](int i, int e) {
    StoreWord(FloatByChannel(panel, tile, column, i, e), __float_as_uint(x[i][e]));
  });
}

// The sum of log2 decays of a tile below which the tile is far.
constexpr float kMaxTileLog2 = 100.0f;

// The log2 decays of 64 channels of a chunk: a panel of w, or one row that all tokens have in common.
template <typename T, bool kConstant>
struct ChunkDecays {
  static constexpr int kTerms = kTermsOf<T>;
  uint32_t w_panel;
  const float* constant;  // [64], in shared memory
  Decay form;
  bool converted = false;  // the panel has scaled log decays in place of w

  // Loads the scaled log decays of a tile of tokens and 16 channels, as right operands of two
  // products with 8 channels each.
  __device__ void Load(int tile, int column, uint32_t present,
                       uint32_t (&log_decays)[kTerms][4]) const {
    if (kTerms > 1 && !converted) {
      float w[2][4], pairs[4][2];
      LoadFloats(w_panel, tile, column, w);
      ForEachElement<2>([&](int i, int e) { pairs[i + e / 2 * 2][e % 2] = w[i][e]; });
      if constexpr (kTerms > 1)
        LogDecays<Decay::kExp>(pairs, form, kMinLog2Decay, present, log_decays);
      return;
    }
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadTransposed(TileAddress(w_panel + term * kPanelBytes, 16 * tile, column),
                     log_decays[term]);
    if constexpr (kTerms == 1)
      if (!converted)
        LogDecays<T, Decay::kExp>(log_decays[0], form, kMinLog2Decay, present, log_decays[0]);
  }
};

// For each element of a 16 x 16 tile, the sums of log2 decays before its token (G') and up to it
// (G), and of floats the sums after it, which as G_L - G would have the rounding of large sums. Element [i][e]
// lies where element e of half i of an Accumulator<2> lies.
struct DecaySums {
  float before[2][4], upto[2][4], after[2][4];

  // Sets the sums of one element where all tokens have the same decay.
  __device__ void Set(int i, int e, float log_decay, uint32_t present, int token) {
    const int earlier = __popc(present & ((1u << token) - 1));
    before[i][e] = log_decay * static_cast<float>(earlier);
    upto[i][e] = log_decay * static_cast<float>(earlier + (present >> token & 1));
    after[i][e] = log_decay * static_cast<float>(__popc(present >> token >> 1));
  }
  // G_L - G of an element, where G_L is `total`.
  template <typename T>
  __device__ float ToEnd(int i, int e, float total) const {
    return std::is_same_v<T, float> ? after[i][e] : total - upto[i][e];
  }
};

// The sums of log decays with tokens as the rows of the tile.
template <int kTerms>
__device__ void SumByToken(const uint32_t (&log_decays)[kTerms][4], DecaySums& sums) {
  const Ones inclusive(true, true, false), exclusive(true, false, false);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.before[i][e] = sums.upto[i][e] = sums.after[i][e] = 0.0f;
    const auto add = [&](float (&sum)[4], const Ones& ones) {
      AddTerms<kTerms>(sum, [&](int term, float (&to)[4]) {
        WarpMultiplyHalf(to, ones.a, log_decays[term][2 * i], log_decays[term][2 * i + 1]);
      });
    };
    add(sums.upto[i], inclusive);
    add(sums.before[i], exclusive);
    if constexpr (kTerms > 1) add(sums.after[i], Ones(false, false, true));
  }
}

template <typename T, bool kConstant>
__device__ void SumByToken(const ChunkDecays<T, kConstant>& decays, int tile, int column,
                           uint32_t present, DecaySums& sums) {
  if constexpr (kConstant) {
    const int row = Lane() / 4, col = 16 * column + 2 * (Lane() % 4);
    ForEachElement<2>([&](int i, int e) {
      sums.Set(i, e, decays.constant[col + 8 * i + e % 2], present, row + e / 2 * 8);
    });
  } else {
    uint32_t log_decays[kTermsOf<T>][4];
    decays.Load(tile, column, present, log_decays);
    SumByToken(log_decays, sums);
  }
}

// The sums of log decays with channels as the rows of the tile: the 16 channels of a warp, from a
// panel that has scaled log decays already.
template <typename T, bool kConstant>
__device__ void SumByChannel(const ChunkDecays<T, kConstant>& decays, int tile, int warp,
                             uint32_t present, DecaySums& sums) {
  if constexpr (kConstant) {
    const int row = 16 * warp + Lane() / 4, col = 2 * (Lane() % 4);
    ForEachElement<2>([&](int i, int e) {
      sums.Set(i, e, decays.constant[row + e / 2 * 8], present, col + 8 * i + e % 2);
    });
  } else {
    const Ones inclusive(true, true, false), exclusive(true, false, false);
    constexpr int kTerms = kTermsOf<T>;
    Left log_decays[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadLeftTransposed(decays.w_panel + term * kPanelBytes, 16 * tile, warp, log_decays[term]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.before[i][e] = sums.upto[i][e] = sums.after[i][e] = 0.0f;
      const auto add = [&](float (&sum)[4], const Ones& ones) {
        AddTerms<kTerms>(sum, [&](int term, float (&to)[4]) {
          WarpMultiplyHalf(to, log_decays[term], ones.a[i], ones.a[i + 2]);
        });
      };
      add(sums.before[i], exclusive);
      add(sums.upto[i], inclusive);
      if constexpr (kTerms > 1) add(sums.after[i], Ones(false, false, true));
    }
  }
}

// The log2 decays of the tokens themselves, for the same channels, of which SumByChannel has made `sums`. Floats
// are not their differences, which would have the rounding of large sums.
template <typename T, bool kConstant>
__device__ void OwnByChannel(const ChunkDecays<T, kConstant>& decays, int tile, int warp,
                             const DecaySums& sums, float (&own)[2][4]) {
  ForEachElement<2>([&](int i, int e) { own[i][e] = sums.upto[i][e] - sums.before[i][e]; });
  if constexpr (kTermsOf<T> > 1 && !kConstant) {
    uint32_t x[2][4];
#pragma unroll
    for (int term = 0; term < 2; ++term)
      LoadTransposed(TileAddress(decays.w_panel + term * kPanelBytes, 16 * tile, warp), x[term]);
    ForEachElement<2>([&](int i, int e) {
      const auto of = [&](uint32_t pair) {
        return e % 2 ? Pair<__half>::High(pair) : Pair<__half>::Low(pair);
      };
      const int n = e / 2 * 2 + i;
      own[i][e] = (of(x[0][n]) + of(x[1][n])) * (1.0f / kLogScale);
    });
  }
}

// The sums over a whole tile (G_L), for the columns of this lane.
__device__ inline void LastRow(const DecaySums& sums, float (&total)[2][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) total[i][e] = __shfl_sync(~0u, sums.upto[i][2 + e], 28 | Lane());
}

// sum += x y^T, where x and y have 16 tokens by 16 channels each.
__device__ inline void AddTokenProducts(Accumulator<2>& sum, const uint32_t (&x)[4],
                                        const uint32_t (&y)[4]) {
  WarpMultiply(sum[0], x, y[0], y[2]);
  WarpMultiply(sum[1], x, y[1], y[3]);
}

// The same of operands in terms; kAll as of ForProducts.
template <bool kAll = false, int kTerms>
__device__ void AddTokenProducts(Accumulator<2>& sum, const Left (&x)[kTerms],
                                 const Left (&y)[kTerms]) {
  ForProducts<kTerms, kAll>([&](int i, int j) { AddTokenProducts(sum, x[i], y[j]); });
}

// Adds R (u K)^T of 16 channels, of which only the diagonal counts; u(i) has those of register i. Floats are added
// up by lanes, whose sums SetDiagonal adds up.
template <typename T, typename Bonus>
__device__ void AddBonus(const Two<T> (&r)[4], const Two<T> (&k)[4], Bonus&& u,
                         Accumulator<2>& bonus) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 own = u(i);
      bonus[i % 2][i % 2 * 2] += r[i].x * own.x * k[i].x + r[i].y * own.y * k[i].y;
    }
  } else {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Bf16::Multiply(r[i], u(i));
    AddTokenProducts(bonus, x, k);
  }
}

// The factors exp(G_L) of 64 channels of a tile in shared memory. They are sorted by lane % 4, the
// lanes that have the same columns of an accumulator, so that the four lanes of a row read
// different banks. The factors are 0 where the tile clears the state.
constexpr int kFactorStride = kPanelCols / 4 + 4;
constexpr int kFactorFloats = 4 * kFactorStride;

__device__ inline void StoreFactors(int column, const float (&factor)[2][2], bool clears,
                                    float* factors) {
  float4 x = {factor[0][0], factor[0][1], factor[1][0], factor[1][1]};
  if (clears) x = {0.0f, 0.0f, 0.0f, 0.0f};
  if (Lane() < 4) *reinterpret_cast<float4*>(factors + Lane() * kFactorStride + 4 * column) = x;
}

// S <- S diag(factors) for 64 columns, with the rows of S as the rows of the accumulator.
__device__ inline void ScaleColumns(const float* factors, Accumulator<8>& s) {
#pragma unroll
  for (int column = 0; column < kColumnTiles; ++column) {
    const float4 f =
        *reinterpret_cast<const float4*>(factors + Lane() % 4 * kFactorStride + 4 * column);
    float (&left)[4] = s[2 * column];
    float (&right)[4] = s[2 * column + 1];
    left[0] *= f.x, left[1] *= f.y, left[2] *= f.x, left[3] *= f.y;
    right[0] *= f.z, right[1] *= f.w, right[2] *= f.z, right[3] *= f.w;
  }
}

// The rows of r and k in global memory, from the first token of a tile and the first channel of a
// head on.
template <typename T>
struct RawTile {
  const T *r, *k;
  int stride;
  RowMarks marks;

  // Loads 16 channels of r or k as the registers of a left operand have them.
  __device__ void Load(const T* from, int column, Two<T> (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Lane() / 4 + i % 2 * 8, col = 16 * column + i / 2 * 8 + 2 * (Lane() % 4);
      x[i] = marks.present >> row & 1
                 ? *reinterpret_cast<const Two<T>*>(from + static_cast<int64_t>(row) * stride + col)
                 : Two<T>{};
    }
  }
};

// a = tril_strict(Rt Kb^T) over some of the channels, for any decay. Any two tokens of a tile lie
// in different halves of exactly one aligned run of 16, 8, 4 or 2 tokens. The decay between the two
// tokens is the decay from the earlier one to the middle of that run, times the decay from there to
// the later one, and neither factor exceeds 1.
template <typename T, bool kConstant>
__device__ void MultiplyByHalves(const ChunkDecays<T, kConstant>& decays, int tile,
                                 const RawTile<T>& raw, int first_column, int end_column,
                                 Accumulator<2>& a) {
  constexpr int kTerms = kTermsOf<T>;
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
  for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = 0.0f;
#pragma unroll 1
  for (int half = kTileTokens / 2; half >= 1; half /= 2) {
    // Which tokens lie between a token and the middle, and are not the token itself.
    const auto between = [&](int token, int other) {
      return (token ^ other) < half && (token & half ? other < token : other > token);
    };
    Left ones;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = row + i % 2 * 8, other = col + i / 2 * 8;
      ones[i] = kInverseLogScale & ((between(token, other) ? 0xffffu : 0u) |
                                    (between(token, other + 1) ? 0xffff0000u : 0u));
    }
    Accumulator<2> part = {};
#pragma unroll 1
    for (int column = first_column; column < end_column; ++column) {
      float sums[2][4] = {};
      if constexpr (kConstant) {
        ForEachElement<2>([&](int i, int e) {
          const int token = row + e / 2 * 8, begin = token & -half;
          const uint32_t upto = (2u << token) - 1, of_half = ((1u << half) - 1) << begin;
          const uint32_t others = of_half & (token & half ? upto >> 1 : ~upto);
          sums[i][e] = decays.constant[16 * column + col + 8 * i + e % 2] *
                       static_cast<float>(__popc(raw.marks.present & others));
        });
      } else {
        uint32_t log_decays[kTerms][4];
        decays.Load(tile, column, raw.marks.present, log_decays);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          AddTerms<kTerms>(sums[i], [&](int term, float (&to)[4]) {
            WarpMultiplyHalf(to, ones, log_decays[term][2 * i], log_decays[term][2 * i + 1]);
          });
      }
      Two<T> raw_r[4], raw_k[4];
      raw.Load(raw.r, column, raw_r);
      raw.Load(raw.k, column, raw_k);
      Left r[kTerms], k[kTerms];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool reads = (row + i % 2 * 8) & half;
        const float* const own = sums[i / 2] + i % 2 * 2;
        Two<T> own_raw = raw_k[i];
        if (reads) own_raw = raw_r[i];
        const float2 from = ValuesOf<T>(own_raw);
        uint32_t scaled[kTerms];
        Round(from.x * Exp2(own[0]), from.y * Exp2(own[1]), scaled);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          r[term][i] = reads ? scaled[term] : 0u;
          k[term][i] = reads ? 0u : scaled[term];
        }
      }
      AddTokenProducts(part, r, k);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + e / 2 * 8, j = 8 * side + col + e % 2;
        if (i / (2 * half) == j / (2 * half)) a[side][e] += part[side][e];
      }
  }
}

// Sets the diagonal of a 16 x 16 matrix to what AddBonus has added up.
template <typename T>
__device__ void SetDiagonal(Accumulator<2>& diagonal, Accumulator<2>& m) {
  if constexpr (std::is_same_v<T, float>)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& sum = diagonal[i][2 * i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      diagonal[i][2 * i + 1] = sum;
    }
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (row == col + e) {
      m[0][e] = diagonal[0][e];
      m[1][2 + e] = diagonal[1][2 + e];
    }
}

// Stores A of a tile, or its transpose, from its products and what AddBonus has added up.
template <typename T, bool kTransposed>
__device__ void StoreScores(const RowMarks& marks, Accumulator<2>& bonus, Accumulator<2>& a,
                            uint32_t packed) {
  KeepLower(false, a);
  if (marks.clears != 0) KeepSegments(marks, a);
  SetDiagonal<T>(bonus, a);
  Left rounded[kTermsOf<T>];
  Round(a[0], a[1], rounded);
#pragma unroll
  for (int term = 0; term < kTermsOf<T>; ++term) {
    const Left& x = rounded[term];
    const uint32_t to = PackedTileAddress(packed) + term * kTileBytes;
    // In the transpose, the upper right and the lower left 8 x 8 matrix change places.
    if constexpr (kTransposed)
      StoreTransposed(to, {x[0], x[2], x[1], x[3]});
    else
      StoreMatrices(to, x);
  }
}

// 64 channels of a head of a chunk in arrays [B, T, H, N], and the pieces of 16 bytes of them that one
// of kThreads threads copies.
template <int kThreads>
struct ChunkCopier {
  int64_t first;        // the first of these elements in an array
  int stride, tokens;   // elements from a token to the next one, tokens of the chunk
  uint64_t absent = 0;  // a bit for each token that is padding

  // Calls fn(bytes from the start of a panel, element of an array, token) for each piece of this
  // thread. Of floats it has two, which lie 8 channels apart, in the same place of both terms.
  template <typename T, typename Fn>
  __device__ void ForEachPiece(Fn&& fn) const {
    // A multiple of 8, so that a thread has its pieces in the same place of each of its rows.
    constexpr int kRows = kThreads / 8, kTerms = kTermsOf<T>;
    const int row = threadIdx.x % kThreads / 8, piece = threadIdx.x % 8;
    const uint32_t at = PieceAddress(0, row, piece);
    const int col = kTerms == 1 ? piece * 8 : piece / 2 * 16 + piece % 2 * 4;
    const int64_t element = first + static_cast<int64_t>(row) * stride + col;
#pragma unroll
    for (int i = 0; i < kChunkTokens / kRows; ++i)
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
        fn(at + i * kRows * kRowBytes + term * kPanelBytes,
           element + i * kRows * static_cast<int64_t>(stride) + term * 8, row + i * kRows);
  }
  // Starts to copy the pieces of this thread into a panel, with zeros for tokens that are padding.
  // `offset` elements from its own channels on.
  template <typename T>
  __device__ void Copy(uint32_t panel, const T* from, int offset = 0) const {
    ForEachPiece<T>([&](uint32_t to, int64_t element, int row) {
      CopyAsync(panel + to, from + element + offset, row < tokens && (absent >> row & 1) == 0);
    });
  }
};

// Whether tokens have marks, in a kernel that may take them.
template <typename T, bool kMarked>
__device__ bool HasMarks(const Marks& marks) {
  return kMarked && (!std::is_same_v<T, float> || marks.Given());
}

constexpr int kPanelThreads = 128;  // a warpgroup, which has 64 rows of a state

// The head and the split that a thread block has. Chunks are counted in the order of the recurrence.
template <int N, bool kReverse>
struct SplitOfBlock {
  int64_t sequence, heads;
  unsigned own_head;  // of the sequence
  Span span;          // the tokens of the sequence
  int splits,
      order;  // the number of splits, and the place of this one in the order of the recurrence
  int64_t first_chunk;
  int chunks;

  __device__ SplitOfBlock(const Wkv6Call& call, const Splits& all, bool transition)
      : SplitOfBlock(call, all,
                     all.WorkOfBlock<kReverse>(call.sequences, call.dims.tokens, call.dims.heads,
                                               transition)) {}
  __device__ SplitOfBlock(const Wkv6Call& call, const Splits& all, const BlockWork& work)
      : sequence(work.turn.sequence),
        heads(call.dims.heads),
        own_head(static_cast<unsigned>(blockIdx.x % call.dims.heads)),
        span(work.turn.span),
        splits(static_cast<int>(all.Count(span.Chunks()))),
        order(
            static_cast<int>(kReverse && work.split >= 0 ? splits - 1 - work.split : work.split)) {
    const int64_t most = all.ChunksPerSplit(span.Chunks());
    first_chunk = work.split * most;
    const int64_t left = span.Chunks() - first_chunk;
    chunks = static_cast<int>(left < 0 ? 0 : left < most ? left : most);
  }

  // Whether there is no split for this block.
  __device__ bool None() const { return order < 0; }
  __device__ bool Last() const { return order == splits - 1; }
  // The head in [S, H].
  __device__ int64_t Head() const { return sequence * heads + own_head; }
  // Chunk i in the sequence.
  __device__ int64_t Place(int i) const { return first_chunk + (kReverse ? chunks - 1 - i : i); }
  // A panel of chunk i in arrays [B, T, H, N].
  __device__ ChunkCopier<kPanelThreads> Chunk(int i, int panel, uint64_t absent = 0) const {
    const int64_t token = Place(i) * kChunkTokens, left = span.tokens - token;
    return {((span.first_token + token) * heads + own_head) * N + panel * kPanelCols,
            static_cast<int>(heads) * N,
            static_cast<int>(left < kChunkTokens ? left : kChunkTokens), absent};
  }
  // Chunk i in [B, N, H].
  __device__ int64_t SavedState(int i) const {
    return (span.first_chunk + Place(i)) * heads + own_head;
  }
  template <typename T, bool kMarked>
  __device__ ChunkMarks MarksOf(int i, const Marks& marks) const {
    return HasMarks<T, kMarked>(marks) ? ChunkMarks(marks, sequence, Place(i)) : ChunkMarks();
  }
};

// Clears the rows of a left operand before row `begin` and from row `end` on.
template <int kTerms>
__device__ void KeepRowsBetween(int begin, int end, Left (&x)[kTerms]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = Lane() / 4 + i % 2 * 8;
    if (row < begin || row >= end)
#pragma unroll
      for (int term = 0; term < kTerms; ++term) x[term][i] = 0u;
  }
}

// Converts the pieces of a panel that this thread has copied to bfloat16, or to terms.
template <typename T, int kThreads>
__device__ void ConvertOwnPieces(unsigned char* panel) {
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
      uint4& x = *reinterpret_cast<uint4*>(
          panel +
          PieceAddress(0, threadIdx.x % kThreads / 8 + i * (kThreads / 8), threadIdx.x % 8));
      x = {ToBf16<T>(x.x), ToBf16<T>(x.y), ToBf16<T>(x.z), ToBf16<T>(x.w)};
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
      // The floats of a piece are half of a piece of terms, and the thread of the other half is in this warp.
      const int row = threadIdx.x % kThreads / 8 + i * (kThreads / 8), piece = threadIdx.x % 8;
      float4 x[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[half] =
            *reinterpret_cast<const float4*>(panel + PieceAddress(half * kPanelBytes, row, piece));
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t left[2], right[2];
        Round(x[half].x, x[half].y, left), Round(x[half].z, x[half].w, right);
#pragma unroll
        for (int term = 0; term < 2; ++term)
          *reinterpret_cast<uint2*>(panel +
                                    PieceAddress(term * kPanelBytes, row, piece / 2 * 2 + half) +
                                    piece % 2 * 8) = {left[term], right[term]};
      }
    }
  }
}

// Puts the log2 decays that all tokens have in common into shared memory, for so many channels.
template <int kChannels>
__device__ void LoadConstantDecays(const Wkv6Call& call, int64_t first_channel, float* log_decays) {
  const float* const w = static_cast<const float*>(call.w) + first_channel;
  if (threadIdx.x < kChannels) log_decays[threadIdx.x] = Log2Decay(w[threadIdx.x], call.decay);
}

// Calls fn(T(), integral_constant<int, head size>(), bool_constant<constant decay>()).
template <typename Fn>
cudaError_t ForKinds(const Wkv6Call& call, Fn&& fn) {
  const auto with = [&](auto zero, auto size) {
    return call.constant_decay ? fn(zero, size, std::true_type())
                               : fn(zero, size, std::false_type());
  };
  if (call.dtype == Dtype::kF32) return ForHeadSize<64>(call.dims.head_size, 0.0f, with);
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, with);
}

// Calls fn(bool_constant<whether the kernel takes marks>()).
template <typename T, typename Fn>
cudaError_t ForMarksOf(const Marks& marks, Fn&& fn) {
  if constexpr (std::is_same_v<T, float>)
    return fn(std::true_type());
  else
    return ForMarks(marks, fn);
}

}  // namespace rwkv_jax::cuda
