// Products of a chunk of 64 tokens for the gradients of WKV7, from operands in shared memory: arrays of tokens by
// channels and states, which lie in panels of 64 columns, and products of tokens by tokens. L is the layout of a
// kernel's shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "marks.cuh"
#include "matrix.cuh"
#include "tiles.cuh"
#include "wkv7/inverse.cuh"

namespace rwkv_jax::cuda {

constexpr int kChunkTokens = static_cast<int>(kChunk);
static_assert(kChunkTokens == 64, "a chunk is the rows of a warpgroup and the columns of a panel");
constexpr int kChunkTiles = kChunkTokens / kTileTokens;

// A half of the tokens of a chunk.
constexpr int kHalfTokens = kChunkTokens / 2;
constexpr int kHalfTiles = kHalfTokens / kTileTokens;
constexpr int kHalfFragments = kHalfTokens / 8;
using HalfAccumulator = Accumulator<kHalfFragments>;  // 64 channels by half of the tokens

// Operands of several tiles along k. k runs along the rows of an array,
// panel after panel, ...
struct Along {
  uint32_t panel;
  int panel_bytes = 0;

  __device__ KAlongRows Tile(int tile) const { return {panel + tile / 4 * panel_bytes, tile % 4}; }
};

// ... or down the rows of a panel.
struct Down {
  uint32_t panel;
  int column = 0;  // the first, in tiles

  __device__ KDownRows Tile(int tile) const { return {panel, tile, column}; }
};

// The terms of floats have all their products here: with fewer of them errors are a fifth larger, and pairs of tokens
// would not cancel in the gradient of a decay.

// Starts sum = left right, or sum += left right if kAdd, over kTiles tiles of k.
template <typename L, bool kAdd, int kTiles, typename LeftOperand, typename Right>
__device__ void Product(int warp, Accumulator<8>& sum, const LeftOperand& left,
                        const Right& right) {
  BeginProducts();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
    ForProducts<L::kTerms, true>([&](int i, int j) {
      MultiplyOrAdd(kAdd || tile + i + j > 0, sum, warp, left.Tile(tile).Behind(i * L::kTermBytes),
                    right.Tile(tile).Behind(j * L::kTermBytes));
    });
  CommitProducts();
}

// The same product with the left operand in registers.
template <typename L, bool kAdd, int kTiles, typename Right>
__device__ void Product(Accumulator<8>& sum, const Left (&left)[kTiles][L::kTerms],
                        const Right& right) {
  BeginProducts();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
    ForProducts<L::kTerms, true>([&](int i, int j) {
      MultiplyOrAdd(kAdd || tile + i + j > 0, sum, left[tile][i],
                    right.Tile(tile).Behind(j * L::kTermBytes));
    });
  CommitProducts();
}

// Loads left operands from the transpose of a panel: columns 16 * column to 16 * column + 15, and
// kTiles tiles of rows from `first` on.
template <typename L, int kTiles>
__device__ void LoadTransposedPanel(uint32_t panel, int column, int first,
                                    Left (&left)[kTiles][L::kTerms]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term)
      LoadLeftTransposed(panel + term * L::kTermBytes, 16 * (first + tile), column,
                         left[tile][term]);
}

// Starts products with the same left operand of one term, over kTiles tiles of k from `first` on.
template <typename L, bool kAdd, int kSums, int kTiles, typename Right>
__device__ void Products(HalfAccumulator (&sums)[kSums], const Left (&left)[kTiles][L::kTerms],
                         int first, const Right (&right)[kSums]) {
  static_assert(L::kTerms == 1);
  BeginProducts();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      MultiplyOrAdd(kAdd || tile > 0, sums[i], left[tile][0], right[i].Tile(first + tile));
  CommitProducts();
}

// Adds the product of a tile of k to the columns of a frame of one tile, at once. Matrix units cut off what they
// add to large sums: of floats the smallest products come first, and the sum of a tile is apart.
template <typename L, int kFragments, typename Right>
__device__ void AddFrameProduct(Accumulator<kFragments>& sum, int frame,
                                const Left (&left)[L::kTerms], const Right& right) {
  constexpr int kLast = L::kTerms - 1;
  uint32_t b[L::kTerms][4];
#pragma unroll
  for (int term = 0; term < L::kTerms; ++term)
    right.Behind(term * L::kTermBytes).Load(frame, b[term]);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float (&to)[4] = sum[2 * frame + half];
    const auto multiply = [&](float (&of_tile)[4]) {
      ForProducts<L::kTerms, true>([&](int i, int j) {
        WarpMultiply(of_tile, left[kLast - i], b[kLast - j][2 * half], b[kLast - j][2 * half + 1]);
      });
    };
    if constexpr (L::kTerms == 1) {
      multiply(to);
    } else {
      float of_tile[4] = {};
      multiply(of_tile);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[e] += of_tile[e];
    }
  }
}

// Register i of an operand as numbers.
template <int kTerms>
__device__ float2 ValuesOf(const uint32_t (&x)[kTerms][4], int i) {
  float2 sum = {Bf16::Low(x[0][i]), Bf16::High(x[0][i])};
#pragma unroll
  for (int term = 1; term < kTerms; ++term)
    sum.x += Bf16::Low(x[term][i]), sum.y += Bf16::High(x[term][i]);
  return sum;
}

// The 16 channels of a warp in a panel of tokens: columns of the panel, rows of an accumulator. The
// registers of a tile here are two fragments of an accumulator, of 8 tokens each.
template <typename L>
struct WarpChannels {
  uint32_t panel;
  int column;  // in tiles

  __device__ uint32_t Address(int tile, int term = 0) const {
    return TileAddressByRows(panel + term * L::kTermBytes, 16 * tile, column);
  }
  __device__ void Load(int tile, uint32_t (&x)[L::kTerms][4]) const {
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) LoadTransposed(Address(tile, term), x[term]);
  }
  __device__ void Store(int tile, const uint32_t (&x)[L::kTerms][4]) const {
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) StoreTransposed(Address(tile, term), x[term]);
  }
  // Where a float lies that is element `element` of fragment `fragment` of a tile.
  __device__ uint32_t FloatAt(int tile, int fragment, int element) const {
    return FloatAddress(panel, L::kTermBytes,
                        16 * tile + 8 * fragment + 2 * (Lane() % 4) + element % 2,
                        16 * column + Lane() / 4 + element / 2 * 8);
  }
  __device__ void LoadFloats(int tile, float (&x)[2][4]) const {
    ForEachElement<2>(
        [&](int i, int e) { x[i][e] = __uint_as_float(LoadWord(FloatAt(tile, i, e))); });
  }
  // Rounds an accumulator to T and stores it as the tiles from `first` on.
  template <typename T, int kFragments>
  __device__ void StoreSum(int first, const Accumulator<kFragments>& sum) const {
#pragma unroll
    for (int tile = 0; tile < kFragments / 2; ++tile) {
      if constexpr (std::is_same_v<T, float>) {
        ForEachElement<2>([&](int i, int e) {
          StoreWord(FloatAt(first + tile, i, e), __float_as_uint(sum[2 * tile + i][e]));
        });
      } else {
        Left x[L::kTerms];
        Round<T>(sum[2 * tile], sum[2 * tile + 1], x);
        Store(first + tile, x);
      }
    }
  }
  // Calls fn(fragment, element, low, high) with the values of elements `element` and `element` + 1
  // of each fragment that an accumulator has for kTiles tiles from `first` on.
  template <int kTiles, typename Fn>
  __device__ void ForEachPair(int first, Fn&& fn) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t x[L::kTerms][4];
      Load(first + tile, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ValuesOf(x, i);
        fn(2 * tile + i / 2, i % 2 * 2, pair.x, pair.y);
      }
    }
  }
};

// A state of bfloat16 in global memory, [rows, columns], with a factor for each column unless `factors` is null.
// Beyond its rows and columns it is 0.
struct SavedState {
  const uint32_t* pairs;
  const float* factors;
  int rows, columns;

  // Two elements of a row.
  __device__ uint32_t Pair(int row, int column) const {
    if (row >= rows || column >= columns) return 0;
    const uint32_t x = pairs[(row * columns + column) / 2];
    if (factors == nullptr) return x;
    const float2 e = *reinterpret_cast<const float2*>(factors + column);
    return Bf16::Round(Bf16::Low(x) * e.x, Bf16::High(x) * e.y);
  }
  __device__ void FetchIntoL2() const {
    constexpr int kPairs = 32;  // of a line
    const int first = threadIdx.x * kPairs;
    if (2 * first < rows * columns) Prefetch(pairs + first);
  }
  // The transpose of a tile as a left operand.
  __device__ void LoadTransposed(int tile, int column_tile, Left& x) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = Transposed(Pair(16 * tile + i / 2 * 8 + Lane() / 4,
                             16 * column_tile + i % 2 * 8 + 2 * (Lane() % 4)));
  }
};

// 64 rows of it as an operand; k runs along them.
struct SavedRows {
  SavedState state;
  int first, tile = 0;

  __device__ SavedRows Tile(int t) const { return {state, first, t}; }
  __device__ SavedRows Behind(int) const { return *this; }
  __device__ void LoadLeft(int warp, Left& x) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = state.Pair(first + 16 * warp + i % 2 * 8 + Lane() / 4,
                        16 * tile + i / 2 * 8 + 2 * (Lane() % 4));
  }
};

// Stores the lower triangle of a product of tokens by tokens in a panel, rounded: with the diagonal
// if `diagonal`, and without the pairs of tokens of different segments. What is cleared may be infinite.
template <typename L>
__device__ void StoreLower(int warp, uint32_t panel, bool diagonal, const ChunkMarks& marks,
                           Accumulator<8>& sum) {
  if (marks.starts != 0)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int begin = marks.SegmentBegin(16 * warp + Lane() / 4 + e / 2 * 8);
#pragma unroll
      for (int fragment = 0; fragment < 8; ++fragment)
        if (8 * fragment + 2 * (Lane() % 4) + e % 2 < begin) sum[fragment][e] = 0.0f;
    }
  // In both 8 x 8 on the diagonal of the tile that is on the diagonal. Masks take fewer branches than tiles.
  const int below = Lane() / 4 - 2 * (Lane() % 4) + diagonal;
  const uint32_t corner = (below > 0 ? 0xffffu : 0u) | (below > 1 ? 0xffff0000u : 0u);
#pragma unroll
  for (int tile = 0; tile < kChunkTiles; ++tile) {
    Left x[L::kTerms];
    Round(sum[2 * tile], sum[2 * tile + 1], x);
    const uint32_t right = tile < warp ? ~0u : 0u, left = tile <= warp ? ~0u : 0u;
    const uint32_t both = right | (left & corner);
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) {
      x[term][0] &= both, x[term][1] &= left, x[term][2] &= right, x[term][3] &= both;
      StoreMatrices(TileAddress(panel + term * L::kTermBytes, 16 * warp, tile), x[term]);
    }
  }
}

// The tiles of a panel of tokens by tokens; row and col count tiles.
template <typename L>
struct Triangle {
  using Operand = Left[L::kTerms];

  uint32_t panel;

  __device__ void Load(int row, int col, Operand& a) const {
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term)
      LoadLeft(panel + term * L::kTermBytes, 16 * row, col, a[term]);
  }
  __device__ void Store(int row, int col, const Operand& a) const {
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term)
      StoreMatrices(TileAddress(panel + term * L::kTermBytes, 16 * row, col), a[term]);
  }
  // sum += a (the tile at row, col)
  __device__ void AddProduct(Accumulator<2>& sum, const Operand& a, int row, int col) const {
    AddFrameProduct<L>(sum, 0, a, KDownRows{panel, row, col});
  }
};

// Replaces a strictly lower triangular panel A by (I - A)^-1; one warpgroup, whose barrier is
// `barrier`. As in InvertUnitLower, inverses of diagonal parts grow by D + D L D, here from one
// tile per warp to 32 and then to all 64 tokens.
constexpr int kInvertBarriers = 4;  // how often InvertPanel waits at the barrier

template <typename L>
__device__ void InvertPanel(int warp, int barrier, uint32_t panel) {
  const Triangle<L> triangle{panel};
  using Operand = typename Triangle<L>::Operand;
  Operand x, own;
  Accumulator<2> sum = {};
  triangle.Load(warp, warp, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ValuesOf(x, i);
    sum[i / 2][i % 2 * 2] = pair.x, sum[i / 2][i % 2 * 2 + 1] = pair.y;
  }
  InvertUnitLower(sum, own);
  triangle.Store(warp, warp, own);
  Synchronize(barrier, 128);

  // 32 tokens: the lower left tile is D_w A_{w, w-1} D_{w-1}.
  if (warp % 2 == 1) {
    Accumulator<2> left = {}, corner = {};
    triangle.Load(warp, warp - 1, x);
    triangle.AddProduct(left, x, warp - 1, warp - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t upper[L::kTerms], lower[L::kTerms];
      Round(left[i][0], left[i][1], upper), Round(left[i][2], left[i][3], lower);
      ForProducts<L::kTerms, true>([&](int a, int b) {
        WarpMultiply(corner[i], own[a], Transposed(upper[b]), Transposed(lower[b]));
      });
    }
    Round(corner[0], corner[1], x);
    triangle.Store(warp, warp - 1, x);
  }
  Synchronize(barrier, 128);

  // 64 tokens: W = A D with D of the upper half, stored over A; then D of the lower half times W.
  Operand w[2];
  if (warp >= 2) {
    Operand a[2];
    triangle.Load(warp, 0, a[0]);
    triangle.Load(warp, 1, a[1]);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Accumulator<2> left = {};
#pragma unroll
      for (int i = col; i < 2; ++i) triangle.AddProduct(left, a[i], i, col);
      Round(left[0], left[1], w[col]);
    }
    triangle.Store(warp, 0, w[0]);
    triangle.Store(warp, 1, w[1]);
  }
  Synchronize(barrier, 128);
  if (warp >= 2) {
    triangle.Load(warp, 2, x);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Accumulator<2> corner = {};
      triangle.AddProduct(corner, x, 2, col);
      if (warp == 3) triangle.AddProduct(corner, own, 3, col);
      Round(corner[0], corner[1], w[col]);
    }
  }
  Synchronize(barrier, 128);
  if (warp >= 2) {
    triangle.Store(warp, 0, w[0]);
    triangle.Store(warp, 1, w[1]);
  }
}

// A word of two bfloat16 2^-e for a word of two e; of an e above 126 the factor is 0.
__device__ inline uint32_t PowersOfTwo(uint32_t e) {
  return (0x007f007fu - __vminu2(e, 0x007f007fu)) << 7;
}

// Multiplies by the square of factors, which may be too small for a number of its own.
__device__ inline uint32_t MultiplyTwice(uint32_t x, uint32_t factors) {
  return Bf16::Multiply(Bf16::Multiply(x, factors), factors);
}

}  // namespace rwkv_jax::cuda
