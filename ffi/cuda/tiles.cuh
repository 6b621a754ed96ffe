// What the kernels on matrix units share: the log decays of a chunk of tokens, and a state in registers.
#pragma once

#include "decay.cuh"
#include "matrix.cuh"
#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

constexpr uint32_t kAllRows = 0xffff;

// Of a chunk that has `count` tokens, those that are no padding.
__device__ inline uint32_t PresentRows(int count, uint32_t absent) {
  return (count <= 0 ? 0u : count < kTileTokens ? (1u << count) - 1 : kAllRows) & ~absent;
}

// A bit for each row of the matrices of a chunk: before which rows the state is cleared, and which rows
// are tokens; one of the others changes no state. Backwards, where the first row is the last token, the
// state is cleared after the row of a token that starts a segment, which may be behind the last one.
struct RowMarks {
  uint32_t clears, present;

  // Of the word of a chunk that has `count` tokens.
  __device__ RowMarks(uint32_t word, int count, bool reverse = false)
      : clears(word & kAllRows), present(PresentRows(count, word >> 16)) {
    if (reverse) clears = __brev(clears) >> 15, present = __brev(present) >> 16;
  }
  // The rows before FirstCleared() see the state before the chunk, those from LastCleared() on are in that
  // after it; where none clears it, neither is called.
  __device__ int FirstCleared() const { return __ffs(clears) - 1; }
  __device__ int LastCleared() const { return 31 - __clz(clears); }
  // The first row of the segment that a row is in, or 0.
  __device__ int SegmentBegin(int row) const {
    const uint32_t upto = clears & ((2u << row) - 1);
    return upto == 0 ? 0 : 31 - __clz(upto);
  }
};

// The marks of a frame of kChunk tokens, a bit for each: which start a segment, and which are padding.
struct ChunkMarks {
  uint64_t starts = 0, absent = 0;

  __device__ ChunkMarks() {}
  __device__ ChunkMarks(const Marks& marks, int64_t row, int64_t chunk)
      : ChunkMarks(reinterpret_cast<const uint4*>(marks.words + row * marks.per_row)[chunk]) {}
  // From the four words of a chunk.
  __device__ explicit ChunkMarks(const uint4& x) {
    const auto four = [](uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
      return a | b << 16 | c << 32 | d << 48;
    };
    starts = four(x.x & 0xffff, x.y & 0xffff, x.z & 0xffff, x.w & 0xffff);
    absent = four(x.x >> 16, x.y >> 16, x.z >> 16, x.w >> 16);
  }
  // The tokens before FirstStart() are of the segment before the frame, those from LastStart() on of
  // that after it; called where there is one.
  __device__ int FirstStart() const { return __ffsll(starts) - 1; }
  __device__ int LastStart() const { return 63 - __clzll(starts); }
  // The first token of the segment that a token is in, or 0, and the first of the next one, or 64.
  __device__ int SegmentBegin(int token) const {
    const uint64_t upto = starts & ((uint64_t{2} << token) - 1);
    return upto == 0 ? 0 : 63 - __clzll(upto);
  }
  __device__ int SegmentEnd(int token) const {
    const uint64_t later = starts & ~((uint64_t{2} << token) - 1);
    return later == 0 ? 64 : __ffsll(later) - 1;
  }
  // Of the chunk of kTileTokens tokens from this one on.
  __device__ uint32_t Absent(int token) const { return absent >> token & kAllRows; }
};

// Clears the columns of a sum, one for each token from `first` on, that are not from `begin` to `end`.
template <int kTiles>
__device__ void KeepTokens(int first, int begin, int end, float (*sum)[4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = first + 8 * tile + 2 * (Lane() % 4) + e % 2;
      if (token < begin || token >= end) sum[tile][e] = 0.0f;
    }
}

// The same of a left operand.
__device__ inline void KeepTokens(int begin, int end, Left& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int col = i / 2 * 8 + 2 * (Lane() % 4);
    const auto kept = [&](int col) { return col >= begin && col < end; };
    x[i] &= (kept(col) ? 0xffffu : 0u) | (kept(col + 1) ? 0xffff0000u : 0u);
  }
}

template <typename T, Decay kForm>
__device__ void ScaledLogDecays(const uint32_t (&w)[4], uint32_t (&log_decays)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    log_decays[i] = Pair<__half>::Round(ScaledLogDecay<kForm>(Pair<T>::Low(w[i])),
                                        ScaledLogDecay<kForm>(Pair<T>::High(w[i])));
}

// Clears the log decays of tokens that are not there.
__device__ inline void KeepRows(uint32_t there, uint32_t (&log_decays)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t rows = there >> (i % 2 * 8 + 2 * (Lane() % 4));
    log_decays[i] &= (rows & 1 ? 0xffffu : 0u) | (rows & 2 ? 0xffff0000u : 0u);
  }
}

// The scaled log decays of 16 tokens and 16 channels, as right operands for two tiles of 8 channels,
// from the block of w that LoadTransposed has brought.
template <typename T>
__device__ void LogDecays(const uint32_t (&w)[4], Decay form, uint32_t there,
                          uint32_t (&log_decays)[4]) {
  if (form == Decay::kSigmoid)
    ScaledLogDecays<T, Decay::kSigmoid>(w, log_decays);
  else if (form == Decay::kExp)
    ScaledLogDecays<T, Decay::kExp>(w, log_decays);
  else
    ScaledLogDecays<T, Decay::kLog>(w, log_decays);
  if (there != kAllRows) KeepRows(there, log_decays);
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

// Clears what lies above the diagonal of a 16 x 16 matrix, and the diagonal too unless it is kept.
__device__ inline void KeepLower(bool diagonal, Accumulator<2>& m) {
  const int below = Lane() / 4 - 2 * (Lane() % 4) + diagonal;  // in both blocks of the diagonal
  if (below <= 0) m[0][0] = m[1][2] = 0.0f;
  if (below <= 1) m[0][1] = m[1][3] = 0.0f;
  m[1][0] = m[1][1] = 0.0f;
}

// Clears what reads from another segment.
__device__ inline void KeepSegments(const RowMarks& marks, Accumulator<2>& m) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int begin = marks.SegmentBegin(Lane() / 4 + e / 2 * 8), col = 2 * (Lane() % 4) + e % 2;
    if (col < begin) m[0][e] = 0.0f;
    if (col + 8 < begin) m[1][e] = 0.0f;
  }
}

// The rows of a state that this thread has: those of one warp, in the tiles of a Sum.
template <int N>
struct StateAccumulator {
  static constexpr int kPanels = N / kPanelCols;
  using State = float[kPanels][8][4];

  // Calls fn(index, element) for elements 0 and 2 of each tile, which are followed by 1 and 3.
  template <typename Fn>
  static __device__ void ForEachPair(Fn&& fn) {
    const int row = threadIdx.x / 32 % (N / 16) * 16 + Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          fn((row + 8 * half) * N + 64 * panel + 8 * tile + col, panel, tile, 2 * half);
  }

  static __device__ void Load(const float* from, State& s) {
    ForEachPair([&](int index, int panel, int tile, int e) {
      const float2 pair = *reinterpret_cast<const float2*>(from + index);
      s[panel][tile][e] = pair.x, s[panel][tile][e + 1] = pair.y;
    });
  }

  static __device__ void Store(const State& s, float* to) {
    if constexpr (kPanels > 1) {
      ForEachPair([&](int index, int panel, int tile, int e) {
        *reinterpret_cast<float2*>(to + index) = {s[panel][tile][e], s[panel][tile][e + 1]};
      });
    } else {
      // Lanes trade by twos, so that each stores four columns of a row. (Larger states leave no
      // registers for that.)
      const bool odd = Lane() % 2;
      const int row = threadIdx.x / 32 % (N / 16) * 16 + Lane() / 4 + 8 * odd;
      to += row * N + 4 * (Lane() % 4 / 2);
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        const float(&x)[4] = s[0][tile];
        const float first = __shfl_xor_sync(~0u, odd ? x[0] : x[2], 1);
        const float second = __shfl_xor_sync(~0u, odd ? x[1] : x[3], 1);
        *reinterpret_cast<float4*>(to + 8 * tile) =
            odd ? float4{first, second, x[2], x[3]} : float4{x[0], x[1], first, second};
      }
    }
  }

  // As bfloat16, in pieces of eight columns. Of two blocks of a row four lanes have four pieces, a word
  // of each, and trade so that each has a piece.
  static __device__ void StoreRounded(const State& s, uint4* to) {
    const int lane = Lane();
    to += (threadIdx.x / 32 % (N / 16) * 16 + lane / 4) * (N / 8) + lane % 4;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = i / 2 * 4, e = i % 2 * 2;
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          word[j] = Bf16::Round(s[panel][tile + j][e], s[panel][tile + j][e + 1]);
        const auto trade = [&](int distance, uint32_t& low, uint32_t& high) {
          const bool upper = lane & distance;
          const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, distance);
          (upper ? low : high) = got;
        };
        trade(1, word[0], word[1]);
        trade(1, word[2], word[3]);
        trade(2, word[0], word[2]);
        trade(2, word[1], word[3]);
        to[4 * e * (N / 8) + 8 * panel + tile] = {word[0], word[1], word[2], word[3]};
      }
  }

  static __device__ void SetDiagonal(float value, State& s) {
    ForEachPair([&](int index, int panel, int tile, int e) {
      const int row = index / N, col = index % N;
      s[panel][tile][e] = row == col ? value : 0.0f;
      s[panel][tile][e + 1] = row == col + 1 ? value : 0.0f;
    });
  }
};

}  // namespace rwkv_jax::cuda
