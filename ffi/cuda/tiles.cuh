// What the kernels on matrix units share: the marks and the log decays of a tile of tokens, and a
// state in registers.
#pragma once

#include "decay.cuh"
#include "matrix.cuh"
#include "rwkv_jax/marks.h"

namespace rwkv_jax::cuda {

constexpr uint32_t kAllRows = 0xffff;

// A bit for each row of a tile of `count` tokens: whether it is a token and no padding.
__device__ inline uint32_t PresentRows(int count, uint32_t absent) {
  return (count <= 0 ? 0u : count < kTileTokens ? (1u << count) - 1 : kAllRows) & ~absent;
}

// A bit for each row of a tile: before which rows the state is cleared, and which rows are tokens.
// The other rows are padding or behind the end, and change no state. In reverse the first row is
// the last token, and the state is cleared after the row of a token that starts a segment: before
// the next row, which may be the row behind the last one.
struct RowMarks {
  uint32_t clears, present;

  // `word` has the marks of the tile, `count` of whose rows are not behind the end.
  __device__ RowMarks(uint32_t word, int count, bool reverse = false)
      : clears(word & kAllRows), present(PresentRows(count, word >> 16)) {
    if (reverse) clears = __brev(clears) >> 15, present = __brev(present) >> 16;
  }
  // Rows before FirstCleared() read the state before the tile. Rows from LastCleared() on write to
  // the state after the tile. Neither may be called where no row clears the state.
  __device__ int FirstCleared() const { return __ffs(clears) - 1; }
  __device__ int LastCleared() const { return 31 - __clz(clears); }
  // The first row of the segment of `row`, or 0 if the segment starts before the tile.
  __device__ int SegmentBegin(int row) const {
    const uint32_t upto = clears & ((2u << row) - 1);
    return upto == 0 ? 0 : 31 - __clz(upto);
  }
};

// A bit for each token of a chunk: which tokens start a segment, and which are padding.
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
  // Tokens before FirstStart() belong to the segment of the tokens before the chunk, tokens from
  // LastStart() on to that of the tokens after it. Neither may be called where no token starts one.
  __device__ int FirstStart() const { return __ffsll(starts) - 1; }
  __device__ int LastStart() const { return 63 - __clzll(starts); }
  // The first token of the segment of `token`, or 0, and the first of the next segment, or 64.
  __device__ int SegmentBegin(int token) const {
    const uint64_t upto = starts & ((uint64_t{2} << token) - 1);
    return upto == 0 ? 0 : 63 - __clzll(upto);
  }
  __device__ int SegmentEnd(int token) const {
    const uint64_t later = starts & ~((uint64_t{2} << token) - 1);
    return later == 0 ? 64 : __ffsll(later) - 1;
  }
  // A bit for each token of a tile from `token` on: whether it is padding.
  __device__ uint32_t Absent(int token) const { return absent >> token & kAllRows; }
};

// Clears the columns of a sum whose tokens are before `begin` or not before `end`. Its columns are
// the tokens from `first` on.
template <int kFragments>
__device__ void KeepTokens(int first, int begin, int end, float (*sum)[4]) {
  ForEachElement<kFragments>([&](int fragment, int e) {
    const int token = first + 8 * fragment + 2 * (Lane() % 4) + e % 2;
    if (token < begin || token >= end) sum[fragment][e] = 0.0f;
  });
}

// Clears columns of a left operand in the same way; they are the tokens from 0 on.
__device__ inline void KeepTokens(int begin, int end, Left& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int col = i / 2 * 8 + 2 * (Lane() % 4);
    const auto kept = [&](int col) { return col >= begin && col < end; };
    x[i] &= (kept(col) ? 0xffffu : 0u) | (kept(col + 1) ? 0xffff0000u : 0u);
  }
}

template <typename T, Decay kForm>
__device__ void ScaledLogDecays(const uint32_t (&w)[4], float least, uint32_t (&log_decays)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    log_decays[i] = Pair<__half>::Round(ScaledLogDecay<kForm>(Pair<T>::Low(w[i]), least),
                                        ScaledLogDecay<kForm>(Pair<T>::High(w[i]), least));
}

// Clears the log decays of rows that are not tokens.
__device__ inline void KeepRows(uint32_t present, uint32_t (&log_decays)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t rows = present >> (i % 2 * 8 + 2 * (Lane() % 4));
    log_decays[i] &= (rows & 1 ? 0xffffu : 0u) | (rows & 2 ? 0xffff0000u : 0u);
  }
}

// The scaled log decays of 16 tokens and 16 channels, as right operands for two fragments of 8
// channels, from the tile of w that LoadTransposed has loaded; none is below `least` to base 2. kLast is
// the last form that w may have.
template <typename T, Decay kLast>
__device__ void LogDecays(const uint32_t (&w)[4], Decay form, float least, uint32_t present,
                          uint32_t (&log_decays)[4]) {
  if (kLast == Decay::kSigmoid && form == Decay::kSigmoid)
    ScaledLogDecays<T, Decay::kSigmoid>(w, least, log_decays);
  else if (form == Decay::kExp)
    ScaledLogDecays<T, Decay::kExp>(w, least, log_decays);
  else
    ScaledLogDecays<T, Decay::kLog>(w, least, log_decays);
  if (present != kAllRows) KeepRows(present, log_decays);
}

// The same for floats, in terms of float16: w[i] has the two elements that a pair of a 16-bit type has.
template <Decay kLast = Decay::kSigmoid>
__device__ void LogDecays(const float (&w)[4][2], Decay form, float least, uint32_t present,
                          uint32_t (&log_decays)[2][4]) {
  const auto scaled = [&](float w) {
    if (kLast == Decay::kSigmoid && form == Decay::kSigmoid)
      return ScaledLogDecay<Decay::kSigmoid>(w, least);
    return form == Decay::kExp ? ScaledLogDecay<Decay::kExp>(w, least)
                               : ScaledLogDecay<Decay::kLog>(w, least);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t terms[2];
    Round<__half>(scaled(w[i][0]), scaled(w[i][1]), terms);
    log_decays[0][i] = terms[0], log_decays[1][i] = terms[1];
  }
  if (present != kAllRows) KeepRows(present, log_decays[0]), KeepRows(present, log_decays[1]);
}

// sum += the sum of what add(term, sum) adds for each term. Those of second terms are summed apart: first terms of
// log decays sum without rounding.
template <int kTerms, typename Add>
__device__ void AddTerms(float (&sum)[4], Add&& add) {
  add(0, sum);
#pragma unroll
  for (int term = 1; term < kTerms; ++term) {
    float apart[4] = {};
    add(term, apart);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += apart[e];
  }
}

// A tile with ones below, on or above its diagonal, divided by the scale of the log decays. As a
// left operand it sums log decays over tokens.
struct Ones {
  Left a;

  __device__ Ones(bool below, bool diagonal, bool above) {
    const int row = Lane() / 4, col = 2 * (Lane() % 4);
    const auto has = [&](int col) { return col < row ? below : col == row ? diagonal : above; };
    a[0] = a[3] =
        kInverseLogScale & ((has(col) ? 0xffffu : 0u) | (has(col + 1) ? 0xffff0000u : 0u));
    a[1] = below ? kInverseLogScale : 0u;
    a[2] = above ? kInverseLogScale : 0u;
  }
};

// Clears a tile above its diagonal, and the diagonal too unless `diagonal`.
__device__ inline void KeepLower(bool diagonal, Accumulator<2>& m) {
  const int below = Lane() / 4 - 2 * (Lane() % 4) + diagonal;  // in both 8 x 8 on the diagonal
  if (below <= 0) m[0][0] = m[1][2] = 0.0f;
  if (below <= 1) m[0][1] = m[1][3] = 0.0f;
  m[1][0] = m[1][1] = 0.0f;
}

// Clears the elements of a tile of tokens by tokens whose two tokens are of different segments.
__device__ inline void KeepSegments(const RowMarks& marks, Accumulator<2>& m) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int begin = marks.SegmentBegin(Lane() / 4 + e / 2 * 8), col = 2 * (Lane() % 4) + e % 2;
    if (col < begin) m[0][e] = 0.0f;
    if (col + 8 < begin) m[1][e] = 0.0f;
  }
}

// A state [V, K] in the accumulators of warps, each of which has 16 rows.
template <int N>
struct StateAccumulator {
  static constexpr int kPanels = N / kPanelCols;
  using State = float[kPanels][8][4];

  // The row of elements 0 and 1 of a fragment; elements 2 and 3 have the eighth after it.
  static __device__ int FirstRow(unsigned thread = threadIdx.x) {
    return thread / 32 % (N / 16) * 16 + thread % 32 / 4;
  }

  // Calls fn(index, panel, fragment, element) for elements 0 and 2 of each fragment, where `index`
  // is that of the element in the state. Elements 1 and 3 follow them.
  template <typename Fn>
  static __device__ void ForEachPair(Fn&& fn) {
    const int row = FirstRow(), col = 2 * (Lane() % 4);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int fragment = 0; fragment < 8; ++fragment)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          fn((row + 8 * half) * N + 64 * panel + 8 * fragment + col, panel, fragment, 2 * half);
  }

  static __device__ void Load(const float* from, State& s) {
    ForEachPair([&](int index, int panel, int fragment, int e) {
      const float2 pair = *reinterpret_cast<const float2*>(from + index);
      s[panel][fragment][e] = pair.x, s[panel][fragment][e + 1] = pair.y;
    });
  }

  // Calls fn(present, index, panel, fragment, element) in the same way where the state is [rows, cols] of at most
  // N each, and columns are multiples of 8.
  template <typename Fn>
  static __device__ void ForEachPairOf(int rows, int cols, Fn&& fn) {
    const int row = FirstRow(), col = 2 * (Lane() % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
        for (int fragment = 0; fragment < 8; ++fragment) {
          const int first = 64 * panel + 8 * fragment;
          fn(row + 8 * half < rows && first < cols, (row + 8 * half) * cols + first + col, panel,
             fragment, 2 * half);
        }
  }

  // Load, Store and StoreRounded of such a state; what it lacks is 0 in registers.
  static __device__ void LoadPart(const float* from, int rows, int cols, State& s) {
    ForEachPairOf(rows, cols, [&](bool present, int index, int panel, int fragment, int e) {
      float2 pair = {};
      if (present) pair = *reinterpret_cast<const float2*>(from + index);
      s[panel][fragment][e] = pair.x, s[panel][fragment][e + 1] = pair.y;
    });
  }
  static __device__ void StorePart(const State& s, int rows, int cols, float* to) {
    ForEachPairOf(rows, cols, [&](bool present, int index, int panel, int fragment, int e) {
      if (present)
        *reinterpret_cast<float2*>(to + index) = {s[panel][fragment][e], s[panel][fragment][e + 1]};
    });
  }
  static __device__ void StorePartRounded(const State& s, int rows, int cols, uint4* to) {
    const int thread = Opaque(threadIdx.x), row = FirstRow(thread), piece = thread % 4;
    rows = Opaque(rows), cols = Opaque(cols);
    to += row * (cols / 8) + piece;
    ForEachPiece(s, [&](int down, int along, const uint4& words) {
      if (row + down < rows && 8 * (piece + along) < cols) to[down * (cols / 8) + along] = words;
    });
  }

  static __device__ void Store(const State& s, float* to) {
    if constexpr (kPanels > 1) {
      ForEachPair([&](int index, int panel, int fragment, int e) {
        *reinterpret_cast<float2*>(to + index) = {s[panel][fragment][e], s[panel][fragment][e + 1]};
      });
    } else {
      // Pairs of lanes trade elements, so that each lane stores four columns of a row. Larger
      // states leave no registers for that.
      const bool odd = Lane() % 2;
      const int row = threadIdx.x / 32 % (N / 16) * 16 + Lane() / 4 + 8 * odd;
      to += row * N + 4 * (Lane() % 4 / 2);
#pragma unroll
      for (int fragment = 0; fragment < 8; ++fragment) {
        const float (&x)[4] = s[0][fragment];
        const float first = __shfl_xor_sync(~0u, odd ? x[0] : x[2], 1);
        const float second = __shfl_xor_sync(~0u, odd ? x[1] : x[3], 1);
        *reinterpret_cast<float4*>(to + 8 * fragment) =
            odd ? float4{first, second, x[2], x[3]} : float4{x[0], x[1], first, second};
      }
    }
  }

  // Stores a state as bfloat16.
  static __device__ void StoreRounded(const State& s, uint4* to) {
    to += FirstRow() * (N / 8) + Lane() % 4;
    ForEachPiece(
        s, [&](int down, int along, const uint4& words) { to[down * (N / 8) + along] = words; });
  }

  // Calls fn(down, along, words) with pieces of eight columns of bfloat16, so many rows and pieces from row
  // FirstRow() and piece Lane() % 4. Four lanes have four pieces of a row, each lane a word of every piece; they
  // trade words so that each lane has a piece.
  template <typename Fn>
  static __device__ void ForEachPiece(const State& s, Fn&& fn) {
    const int lane = Lane();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int fragment = i / 2 * 4, e = i % 2 * 2;
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          word[j] = Bf16::Round(s[panel][fragment + j][e], s[panel][fragment + j][e + 1]);
        const auto trade = [&](int distance, uint32_t& low, uint32_t& high) {
          const bool upper = lane & distance;
          const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, distance);
          (upper ? low : high) = got;
        };
        trade(1, word[0], word[1]);
        trade(1, word[2], word[3]);
        trade(2, word[0], word[2]);
        trade(2, word[1], word[3]);
        fn(4 * e, 8 * panel + fragment, uint4{word[0], word[1], word[2], word[3]});
      }
  }

  static __device__ void SetDiagonal(float value, State& s) {
    ForEachPair([&](int index, int panel, int fragment, int e) {
      const int row = index / N, col = index % N;
      s[panel][fragment][e] = row == col ? value : 0.0f;
      s[panel][fragment][e + 1] = row == col + 1 ? value : 0.0f;
    });
  }
};

}  // namespace rwkv_jax::cuda
