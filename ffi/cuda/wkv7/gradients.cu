// WKV7 on matrix units, the gradients of the inputs: one block of threads per head and frame of
// L = 64 tokens, from the state S0 before the frame and the gradient dS of the state after it.
//
// The operands are scaled so that a state keeps its value from the end of the frame backwards: with g
// the sum of the log decays of the tokens after a token, and g' that and its own,
//
//   At = A exp(-g')   Rt = R exp(-g)   Bh = B exp(g)   Kh = K exp(g)   Sp = S0 exp(g' of token 0)
//   Aab = tril_strict(At Bh^T)   Aak = tril_strict(At Kh^T)   Qrb = tril(Rt Bh^T)   Qrk = tril(Rt Kh^T)
//   M = (I - Aab)^-1   Z = At Sp^T + Aak V   U = M Z   Y = Rt Sp^T + Qrb U + Qrk V
//
// and backwards
//
//   dU = Qrb^T dY + Bh dS^T    dZ = M^T dU    dV = Qrk^T dY + Kh dS^T + Aak^T dZ
//   dQrb = tril(dY U^T)   dQrk = tril(dY V^T)   dAab = tril_strict(dZ U^T)   dAak = tril_strict(dZ V^T)
//   dBh = U dS + dQrb^T Rt + dAab^T At       dRt = dY Sp + dQrb Bh + dQrk Kh
//   dKh = V dS + dQrk^T Rt + dAak^T At       dAt = dZ Sp + dAab Bh + dAak Kh.
//
// A log decay scales what is read after it and not what is written after it, so its gradient is a sum
// over the tokens from its own on,
//
//   dlog d_t = sum_v dS * S_L + sum_{s >= t} (Rt dRt - Bh dBh - Kh dKh)_s + sum_{s > t} (At dAt)_s,
//
// in which what is both written and read in that run occurs twice and cancels: hence every factor is
// the rounded one that the other side has, too.
//
// All but the products of tokens by tokens is computed transposed, with channels as the rows. Then a
// left operand is the same for two results and stays in registers, what one product gives is a left
// operand of the next, and sums over tokens run along the rows, which one warp has. What bounds the
// kernel is the traffic of shared memory.
#include "launch.cuh"
#include "wkv7/kernels.h"
#include "wkv7/inverse.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kFrame = static_cast<int>(kChunk);
static_assert(kFrame == 64, "a frame is the rows of a warpgroup and the columns of a tile");
constexpr int kFrameBlocks = kFrame / kTileTokens;

template <typename T>
struct Frames {
  const T *r, *w, *k, *v, *a, *b, *dy;
  T *dr, *dw, *dk, *dv, *da, *db;
  int64_t tokens;
  unsigned heads, frames;
  Decay decay;
  Marks marks;
  Sequences sequences;
  const uint4 *states, *gradients;  // [B, frames, H, V, K] of bfloat16
  const float* inexact;
};

// Two warpgroups have a panel of 64 channels, and each of them half of the tokens. Tiles of tokens have
// kPanels panels of 64 channels, states [V, K] as many panels of 64 columns.
constexpr int kHalf = kFrame / 2;
constexpr int kHalfBlocks = kHalf / kTileTokens;
constexpr int kHalfTiles = kHalf / 8;
using HalfAccumulator = Accumulator<kHalfTiles>;  // 64 channels by half of the tokens

template <int N>
struct FrameLayout {
  static constexpr int kPanels = N / kPanelCols;
  static constexpr int kGroups = 2 * kPanels;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kPanel = kFrame * kRowBytes;
  static constexpr int kStatePanel = N * kRowBytes;
  static constexpr int kTokens = kPanels * kPanel;
  static constexpr int kState = kPanels * kStatePanel;

  static constexpr int kAt = 0;
  static constexpr int kRt = kAt + kTokens;
  static constexpr int kBh = kRt + kTokens;
  static constexpr int kKh = kBh + kTokens;
  static constexpr int kV = kKh + kTokens;
  static constexpr int kDy = kV + kTokens;
  static constexpr int kU = kDy + kTokens;
  static constexpr int kDz = kU + kTokens;  // first w
  static constexpr int kSp = kDz + kTokens;
  static constexpr int kDs = kSp + kState;
  // Of tokens by tokens, first the products themselves, then their gradients; M is first Aab.
  static constexpr int kM = kDs + kState;
  static constexpr int kAak = kM + kPanel;
  static constexpr int kQrb = kAak + kPanel;
  static constexpr int kQrk = kQrb + kPanel;
  static constexpr int kSums = kQrk + kPanel;  // float [4, N]
  static constexpr int kBytes = kSums + 4 * N * sizeof(float);
};

// Operands of several blocks of 16: a tile of which the sum runs along the rows, panel after panel, or
// down the rows.
struct Along {
  uint32_t tile;
  int panel_bytes = 0;

  __device__ KAlongRows Block(int block) const {
    return {tile + block / 4 * panel_bytes, block % 4};
  }
};

struct Down {
  uint32_t tile;
  int column = 0;  // the first, in units of 16

  __device__ KDownRows Block(int block) const { return {tile, block, column}; }
};

// sum = left right, or sum += left right, over kBlocks blocks of 16; to be waited for.
template <bool kAdd, int kBlocks, typename LeftTile, typename Right>
__device__ void Product(int warp, Accumulator<8>& sum, const LeftTile& left, const Right& right) {
  BeginProducts();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (kAdd || block > 0)
      Multiply<true>(sum, warp, left.Block(block), right.Block(block));
    else
      Multiply<false>(sum, warp, left.Block(block), right.Block(block));
  }
  CommitProducts();
}

// The same with the left operand in registers.
template <bool kAdd, typename Right>
__device__ void Product(Accumulator<8>& sum, const Left (&left)[kFrameBlocks], const Right& right) {
  BeginProducts();
#pragma unroll
  for (int block = 0; block < kFrameBlocks; ++block) {
    if (kAdd || block > 0)
      Multiply<true>(sum, left[block], right.Block(block));
    else
      Multiply<false>(sum, left[block], right.Block(block));
  }
  CommitProducts();
}

// Left operands from the transpose of a tile, of which this warp has columns 16 * column on: blocks
// `first` and on.
template <int kBlocks>
__device__ void LoadTransposedTile(uint32_t tile, int column, int first, Left (&left)[kBlocks]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    LoadLeftTransposed(tile, 16 * (first + block), column, left[block]);
}

// Two products with the same left operand, blocks `first` and on; to be waited for.
template <bool kAdd, int kBlocks, typename Right>
__device__ void ProductPair(HalfAccumulator (&sums)[2], const Left (&left)[kBlocks], int first,
                            const Right& right_of_first, const Right& right_of_second) {
  BeginProducts();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (kAdd || block > 0) {
      Multiply<true>(sums[0], left[block], right_of_first.Block(first + block));
      Multiply<true>(sums[1], left[block], right_of_second.Block(first + block));
    } else {
      Multiply<false>(sums[0], left[block], right_of_first.Block(first + block));
      Multiply<false>(sums[1], left[block], right_of_second.Block(first + block));
    }
  }
  CommitProducts();
}

__device__ void Finish(HalfAccumulator (&pair)[2]) {
  WaitForProducts<0>();
  Settle(pair[0]);
  Settle(pair[1]);
}

__device__ void Finish(Accumulator<8>& sum) {
  WaitForProducts<0>();
  Settle(sum);
}

// The 16 channels of a tile of tokens that a warp has, as 16 tokens of them lie in two tiles of a sum.
struct ChannelTile {
  uint32_t tile;
  int column;  // the channels, in units of 16

  __device__ uint32_t Address(int block) const {
    return TileAddressByRows(tile, 16 * block, column);
  }
  __device__ void Load(int block, uint32_t (&x)[4]) const { LoadTransposed(Address(block), x); }
  __device__ void Store(int block, const uint32_t (&x)[4]) const {
    StoreTransposed(Address(block), x);
  }
  // The tiles of a sum, by twos, as blocks `first` and on.
  template <typename T, int kTiles>
  __device__ void StoreSum(int first, const Accumulator<kTiles>& sum) const {
#pragma unroll
    for (int block = 0; block < kTiles / 2; ++block) {
      uint32_t x[4];
      Round<T>(sum[2 * block], sum[2 * block + 1], x);
      Store(first + block, x);
    }
  }
  // Calls fn(tile, element, low, high) with the elements of blocks `first` and on as a HalfAccumulator has
  // them, by pairs.
  template <typename Fn>
  __device__ void ForEachPair(int first, Fn&& fn) const {
#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
      uint32_t x[4];
      Load(first + block, x);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        fn(2 * block + i / 2, i % 2 * 2, Bf16::Low(x[i]), Bf16::High(x[i]));
    }
  }
};

// Calls fn(tile, element) for all elements of a HalfAccumulator.
template <typename Fn>
__device__ void ForEachElement(Fn&& fn) {
#pragma unroll
  for (int tile = 0; tile < kHalfTiles; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) fn(tile, e);
}

// The lower triangle of tokens by tokens, rounded, into a tile, with the diagonal if it is kept, and
// without what reads from another segment.
__device__ void StoreLower(int warp, uint32_t tile, bool diagonal, const ChunkMarks& marks,
                           Accumulator<8>& sum) {
  if (marks.starts != 0)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int begin = marks.SegmentBegin(16 * warp + Lane() / 4 + e / 2 * 8);
#pragma unroll
      for (int tile = 0; tile < 8; ++tile)
        if (8 * tile + 2 * (Lane() % 4) + e % 2 < begin) sum[tile][e] = 0.0f;
    }
#pragma unroll
  for (int block = 0; block < kFrameBlocks; ++block) {
    Left x = {};
    if (block < warp) {
      Round(sum[2 * block], sum[2 * block + 1], x);
    } else if (block == warp) {
      Accumulator<2> corner;
#pragma unroll
      for (int i = 0; i < 8; ++i) corner[i / 4][i % 4] = sum[2 * block + i / 4][i % 4];
      KeepLower(diagonal, corner);
      Round(corner[0], corner[1], x);
    }
    StoreMatrices(TileAddress(tile, 16 * warp, block), x);
  }
}

// 16 x 16 blocks of a tile of tokens by tokens.
struct SquareTile {
  uint32_t tile;

  __device__ void LoadRows(int row, int col, Left& a) const { LoadLeft(tile, 16 * row, col, a); }
  __device__ void Store(int row, int col, const Left& a) const {
    StoreMatrices(TileAddress(tile, 16 * row, col), a);
  }
  // sum += a [row, col]
  __device__ void AddProduct(Accumulator<2>& sum, const Left& a, int row, int col) const {
    uint32_t b[4];
    LoadTransposed(TileAddress(tile, 16 * row, col), b);
    WarpMultiply(sum[0], a, b[0], b[1]);
    WarpMultiply(sum[1], a, b[2], b[3]);
  }
};

// A strictly lower triangular tile becomes (I - tile)^-1, with this many barriers of a group. As in InvertUnitLower inverses of diagonal
// blocks grow, here from those of 16 x 16, one per warp: D + D L D.
constexpr int kInvertBarriers = 4;

__device__ void InvertTile(int warp, int group, uint32_t address) {
  const SquareTile tile{address};
  Left x, own;
  Accumulator<2> sum = {};
  tile.LoadRows(warp, warp, x);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i][0] = Bf16::Low(x[2 * i]), sum[i][1] = Bf16::High(x[2 * i]);
    sum[i][2] = Bf16::Low(x[2 * i + 1]), sum[i][3] = Bf16::High(x[2 * i + 1]);
  }
  InvertUnitLower(sum, own);
  tile.Store(warp, warp, own);
  Synchronize(1 + group, 128);

  // Blocks of 32: the lower left one is D_w A_{w, w-1} D_{w-1}.
  if (warp % 2 == 1) {
    Accumulator<2> left = {}, corner = {};
    tile.LoadRows(warp, warp - 1, x);
    tile.AddProduct(left, x, warp - 1, warp - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      WarpMultiply(corner[i], own, Transposed(Bf16::Round(left[i][0], left[i][1])),
                   Transposed(Bf16::Round(left[i][2], left[i][3])));
    Round(corner[0], corner[1], x);
    tile.Store(warp, warp - 1, x);
  }
  Synchronize(1 + group, 128);

  // All 64: W = A D of the upper half, in place, then D of the lower half times W.
  Left w[2];
  if (warp >= 2) {
    Left a[2];
    tile.LoadRows(warp, 0, a[0]);
    tile.LoadRows(warp, 1, a[1]);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Accumulator<2> left = {};
#pragma unroll
      for (int i = col; i < 2; ++i) tile.AddProduct(left, a[i], i, col);
      Round(left[0], left[1], w[col]);
    }
    tile.Store(warp, 0, w[0]);
    tile.Store(warp, 1, w[1]);
  }
  Synchronize(1 + group, 128);
  if (warp >= 2) {
    tile.LoadRows(warp, 2, x);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Accumulator<2> corner = {};
      tile.AddProduct(corner, warp == 2 ? own : x, 2, col);
      if (warp == 3) tile.AddProduct(corner, own, 3, col);
      Round(corner[0], corner[1], w[col]);
    }
  }
  Synchronize(1 + group, 128);
  if (warp >= 2) {
    tile.Store(warp, 0, w[0]);
    tile.Store(warp, 1, w[1]);
  }
}

// The log decay of w and its derivative in w; by selection, since branches would outnumber what they
// save.
__device__ inline float2 LogDecayAndSlope(float w, Decay form) {
  const bool sigmoid = form == Decay::kSigmoid;
  const float exponent = (sigmoid ? -kLog2E : kLog2E) * w;
  const float e = Exp2(exponent > 126.0f ? 126.0f : exponent);
  const float s = Reciprocal(1.0f + e), scaled = -kSigmoidScale * s;
  const float log_decay = sigmoid ? scaled : form == Decay::kExp ? -e : w;
  return {log_decay, sigmoid ? scaled * s * e : form == Decay::kExp ? -e : 1.0f};
}

template <typename T, int N, bool kMarked>
__global__ __launch_bounds__(4 * N, N == 64 ? 2 : 1) void GradientKernel(
    const __grid_constant__ Frames<T> in) {
  using L = FrameLayout<N>;
  constexpr int kBlocks = N / kTileTokens;
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp() % 4, group = Warp() / 4, panel = group / 2, half = group % 2;
  const int lane = Lane();
  // Of [B, frames, H].
  const int64_t all_frames = blockIdx.x / in.heads, own_head = blockIdx.x - all_frames * in.heads;
  const int64_t batch = in.sequences.Given() ? in.sequences.owners[all_frames]
                                             : all_frames / in.frames;
  if (batch < 0) return;
  if (in.inexact != nullptr && in.inexact[batch * in.heads + own_head] != 0.0f) return;
  const Span span = in.sequences(batch, in.tokens);
  const int64_t frame = all_frames - span.first_chunk, first_token = frame * kFrame;
  // Read again wherever they are needed: there are no registers to keep them.
  const auto marks = [&] {
    return kMarked ? ChunkMarks(in.marks, batch, frame) : ChunkMarks();
  };
  const int stride = static_cast<int>(in.heads * N);
  const int64_t first = (span.first_token + first_token) * stride + own_head * N;
  const int64_t left_tokens = span.tokens - first_token;
  const int tokens = static_cast<int>(left_tokens < kFrame ? left_tokens : kFrame);

  // All of the frame, in pieces of 16 bytes: first the decays, then what they scale, then the rest.
  constexpr int kRowPieces = N / 8;
  const uint64_t absent = marks().absent;
  const auto copy = [&](int tile, const T* from) {
#pragma unroll
    for (int i = 0; i < kFrame * kRowPieces / L::kThreads; ++i) {
      const int index = threadIdx.x + i * L::kThreads;
      const int row = index / kRowPieces, piece = index % kRowPieces;
      const bool there = row < tokens && (absent >> row & 1) == 0;
      CopyAsync(PieceAddress(shared + tile + piece / 8 * L::kPanel, row, piece % 8),
                from + first + static_cast<int64_t>(row) * stride + piece * 8, there);
    }
  };
  const auto state_tile = [&](int tile, int step) {
    const int index = threadIdx.x + step * L::kThreads;
    const int row = index / kRowPieces, piece = index % kRowPieces;
    return PieceAddress(tile + piece / 8 * L::kStatePanel, row, piece % 8);
  };
  copy(L::kDz, in.w);
  CommitCopies();
  copy(L::kAt, in.a);
  copy(L::kBh, in.b);
  copy(L::kKh, in.k);
  copy(L::kRt, in.r);
  if constexpr (kBf16) CommitCopies();
  copy(L::kV, in.v);
  copy(L::kDy, in.dy);
  constexpr int kStatePieces = N * kRowPieces, kStateSteps = kStatePieces / L::kThreads;
  uint4 state[kStateSteps];
  {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kStatePieces + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kStateSteps; ++i) {
      CopyAsync(state_tile(shared + L::kDs, i), in.gradients + index + i * L::kThreads, true);
      state[i] = in.states[index + i * L::kThreads];
    }
  }
  CommitCopies();
  WaitForCopies<kBf16 ? 2 : 1>();
  __syncthreads();

  const auto at = [&](int tile) { return shared + tile; };
  const auto own = [&](int tile) { return shared + tile + panel * L::kPanel; };
  const auto channels = [&](int tile) { return ChannelTile{own(tile), warp}; };
  const int first_block = half * kHalfBlocks;  // of the tokens of this warpgroup

  // Sums of log2 decays over the tokens after each token.
  float* const sums = reinterpret_cast<float*>(memory + L::kSums);
  const int channel = kPanelCols * panel + 16 * warp + lane / 4;  // of elements 0 and 1; 2 and 3: + 8
  HalfAccumulator after = {};
  uint32_t raw_w[kHalfBlocks][4];
  {
    const Ones later(false, false, true), all(true, true, true), itself(false, true, false);
    // As right operands of two tiles: the second has the lower rows of the transpose.
    const auto add = [](float(&sum)[4], const Left& log_decays, const Ones& ones, int tile) {
      WarpMultiplyHalf(sum, log_decays, ones.a[tile], ones.a[tile + 2]);
    };
    float total[4] = {};
    Left log_decays[kHalfBlocks];
#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
      uint32_t x[4];
      LoadTransposed(TileAddress(own(L::kDz), 16 * (first_block + block), warp), raw_w[block]);
      const int token = 16 * (first_block + block);
      LogDecays<T>(raw_w[block], in.decay, PresentRows(tokens - token, marks().Absent(token)), x);
      log_decays[block][0] = x[0], log_decays[block][1] = x[2];
      log_decays[block][2] = x[1], log_decays[block][3] = x[3];
      add(total, log_decays[block], all, 0);
#pragma unroll
      for (int tile = 0; tile < 2 * block; ++tile) add(after[tile], log_decays[block], all, tile % 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) add(after[2 * block + i], log_decays[block], later, i);
    }
    if (lane % 4 == 0) {
      sums[half * N + channel] = total[0];
      sums[half * N + channel + 8] = total[2];
    }
    WaitForCopies<kBf16 ? 1 : 0>();
    __syncthreads();
    if (half == 0) {
      const float later_half[2] = {sums[N + channel], sums[N + channel + 8]};
      ForEachElement([&](int tile, int e) { after[tile][e] += later_half[e / 2]; });
    }

#pragma unroll
    for (int block = 0; block < kHalfBlocks; ++block) {
      float e[2][4];
      const auto scale = [&](int tile) {
        uint32_t x[4];
        channels(tile).Load(first_block + block, x);
        Scale<T>(e, x);
        channels(tile).Store(first_block + block, x);
      };
      const auto set = [&](auto value) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) e[i][j] = value(i, j);
      };
      set([&](int i, int j) { return Exp2(after[2 * block + i][j]); });
      scale(L::kBh);
      scale(L::kKh);
      set([&](int i, int j) { return Exp2(-after[2 * block + i][j]); });
      scale(L::kRt);
      set([&](int i, int j) { return after[2 * block + i][j]; });
#pragma unroll
      for (int i = 0; i < 2; ++i) add(e[i], log_decays[block], itself, i);
      set([&](int i, int j) { return Exp2(-e[i][j]); });
      scale(L::kAt);
      if constexpr (!kBf16) {
        set([](int, int) { return 1.0f; });
        scale(L::kV);
        scale(L::kDy);
      }
    }
  }
  {
    float e[8];  // of the columns of this thread
    const int col = threadIdx.x % kRowPieces * 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) e[c] = Exp2(sums[col + c] + sums[N + col + c]);
#pragma unroll
    for (int i = 0; i < kStateSteps; ++i) {
      const auto scaled = [&](uint32_t x, int c) {
        return Bf16::Round(Bf16::Low(x) * e[c], Bf16::High(x) * e[c + 1]);
      };
      *reinterpret_cast<uint4*>(memory + state_tile(L::kSp, i)) = {
          scaled(state[i].x, 0), scaled(state[i].y, 2), scaled(state[i].z, 4),
          scaled(state[i].w, 6)};
    }
  }
  WaitForCopies<0>();
  PublishOperands();
  __syncthreads();

  // The products of tokens by tokens, and later their gradients, are shared out among the warpgroups.
  // The one with the product to be inverted has no other, if there are two.
  const auto all_along = [&](int tile) { return Along{at(tile), L::kPanel}; };
  const auto square = [&](int to, int left, int right, bool diagonal) {
    Accumulator<8> sum;
    Product<false, kBlocks>(warp, sum, all_along(left), all_along(right));
    Finish(sum);
    StoreLower(warp, at(to), diagonal, marks(), sum);
  };
  if (group == 0) {
    square(L::kM, L::kAt, L::kBh, false);
    __syncwarp();
    InvertTile(warp, group, at(L::kM));
  } else {
    // compute-sanitizer's racecheck orders accesses by the number of barriers that a warp has passed.
    for (int i = 0; i < kInvertBarriers; ++i) Synchronize(1 + group, 128);
  }
  if (group == (L::kPanels == 1 ? 1 : 2)) square(L::kAak, L::kAt, L::kKh, false);
  if (group == 1) square(L::kQrb, L::kRt, L::kBh, true);
  if (group == L::kGroups - 1) square(L::kQrk, L::kRt, L::kKh, true);
  PublishOperands();
  __syncthreads();

  // The values of this panel: the first of its warpgroups has Z, U and then the gradients of the
  // products of tokens by tokens, the second dU, dZ, dV.
  const auto rows_along = [&](int tile) {
    return Along{at(tile) + panel * kFrame * kRowBytes, L::kStatePanel};
  };
  const auto wait_for_group = [&] { Synchronize(1 + group, 128); };
  const auto wait_for_half = [&] { Synchronize(1 + L::kGroups + half, 128 * L::kPanels); };
  const auto wait_for_all = [&] {
    PublishOperands();
    Synchronize(1 + L::kGroups + 2, L::kThreads);
  };
  // Rows of a tile, which all warps of this warpgroup have stored their channels to, go out.
  const auto emit = [&](uint32_t tile, int first_row, int rows, T* out) {
    for (int i = threadIdx.x % 128 / 8; i < rows; i += 16) {
      const int row = first_row + i, piece = threadIdx.x % 8;
      if (row < tokens)
        *reinterpret_cast<uint4*>(out + first + static_cast<int64_t>(row) * stride +
                                  kPanelCols * panel + piece * 8) =
            *reinterpret_cast<const uint4*>(memory + PieceAddress(tile - shared, row, piece));
    }
  };
  const bool takes_b = panel == 0, takes_k = panel == L::kPanels - 1;
  if (half == 0) {
    Accumulator<8> z, u, dqrb, dqrk;
    Left rounded[kFrameBlocks];
    Product<false, kBlocks>(warp, z, rows_along(L::kSp), all_along(L::kAt));
    if (const ChunkMarks of_frame = marks(); of_frame.starts != 0) {
      Finish(z);
      KeepTokens<8>(0, 0, of_frame.FirstStart(), z);
    }
    Product<true, kFrameBlocks>(warp, z, Down{own(L::kV)}, Along{at(L::kAak)});
    Finish(z);
    RoundPanel(z, rounded);
    Product<false>(u, rounded, Along{at(L::kM)});
    Finish(u);
    channels(L::kU).template StoreSum<__nv_bfloat16>(0, u);
    PublishOperands();
    wait_for_half();
    if (takes_b) Product<false, kBlocks>(warp, dqrb, all_along(L::kDy), all_along(L::kU));
    if (takes_k) Product<false, kBlocks>(warp, dqrk, all_along(L::kDy), all_along(L::kV));
    WaitForProducts<0>();
    wait_for_all();

    Accumulator<8> daab, daak;
    if (takes_b) {
      Settle(dqrb);
      StoreLower(warp, at(L::kQrb), true, marks(), dqrb);
      Product<false, kBlocks>(warp, daab, all_along(L::kDz), all_along(L::kU));
    }
    if (takes_k) {
      Settle(dqrk);
      StoreLower(warp, at(L::kQrk), true, marks(), dqrk);
      Product<false, kBlocks>(warp, daak, all_along(L::kDz), all_along(L::kV));
    }
    WaitForProducts<0>();
    wait_for_all();  // until dV has gone
    if (takes_b) {
      Settle(daab);
      StoreLower(warp, at(L::kM), false, marks(), daab);
    }
    if (takes_k) {
      Settle(daak);
      StoreLower(warp, at(L::kAak), false, marks(), daak);
    }
  } else {
    Accumulator<8> du, dz, dv;
    Left rounded[kFrameBlocks];
    const auto keep_last = [&](Accumulator<8>& sum) {
      if (const ChunkMarks of_frame = marks(); of_frame.starts != 0) {
        Finish(sum);
        KeepTokens<8>(0, of_frame.LastStart(), kFrame, sum);
      }
    };
    Product<false, kBlocks>(warp, du, rows_along(L::kDs), all_along(L::kBh));
    keep_last(du);
    Product<true, kFrameBlocks>(warp, du, Down{own(L::kDy)}, Down{at(L::kQrb)});
    Finish(du);
    RoundPanel(du, rounded);
    Product<false>(dz, rounded, Down{at(L::kM)});
    Finish(dz);
    channels(L::kDz).template StoreSum<__nv_bfloat16>(0, dz);
    RoundPanel(dz, rounded);
    Product<false, kBlocks>(warp, dv, rows_along(L::kDs), all_along(L::kKh));
    keep_last(dv);
    Product<true, kFrameBlocks>(warp, dv, Down{own(L::kDy)}, Down{at(L::kQrk)});
    Product<true>(dv, rounded, Down{at(L::kAak)});
    Finish(dv);
    wait_for_all();

    const uint32_t stage = at(panel == 0 ? L::kM : L::kAak);
    ChannelTile{stage, warp}.template StoreSum<T>(0, dv);
    wait_for_group();
    emit(stage, 0, kFrame, in.dv);
    wait_for_all();
  }
  PublishOperands();
  __syncthreads();

  // Of the keys of this panel and half of the tokens: dB, dK, then dR, dA, and what they say of the
  // decays.
  const auto half_along = [&](int tile) {
    return Along{at(tile) + half * kHalf * kRowBytes, L::kPanel};
  };
  const auto half_down = [&](int tile) { return Down{at(tile), first_block}; };
  const auto state_of = [&](int tile) { return at(tile) + panel * L::kStatePanel; };
  HalfAccumulator reads = {};         // Rt dRt - Bh dBh - Kh dKh + At dAt
  float written[2] = {};      // dS * S_L, summed over some of the rows of the state
  const auto add_reads = [&](int scaled, float sign, const HalfAccumulator& sum) {
    channels(scaled).ForEachPair(first_block, [&](int tile, int e, float low, float high) {
      reads[tile][e] += sign * low * sum[tile][e];
      reads[tile][e + 1] += sign * high * sum[tile][e + 1];
    });
  };
  const auto add_written = [&](int scaled, const HalfAccumulator& sum) {
    channels(scaled).ForEachPair(first_block, [&](int tile, int e, float low, float high) {
      written[e / 2] += low * sum[tile][e] + high * sum[tile][e + 1];
    });
  };
  const auto stage_and_emit = [&](const HalfAccumulator(&pair)[2], int first_stage, T* first_out,
                                  int second_stage, T* second_out) {
    wait_for_half();  // whose tokens are operands of no other
    channels(first_stage).template StoreSum<T>(first_block, pair[0]);
    channels(second_stage).template StoreSum<T>(first_block, pair[1]);
    wait_for_group();
    emit(own(first_stage), half * kHalf, kHalf, first_out);
    emit(own(second_stage), half * kHalf, kHalf, second_out);
  };
  if (marks().starts == 0) {
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      const int block = half * (kBlocks / 2) + i;
      uint32_t s[4], ds[4];
      ChannelTile{state_of(L::kSp), warp}.Load(block, s);
      ChannelTile{state_of(L::kDs), warp}.Load(block, ds);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        written[j % 2] += Bf16::Low(s[j]) * Bf16::Low(ds[j]) + Bf16::High(s[j]) * Bf16::High(ds[j]);
    }
  }

  // A left operand is loaded while the product before it runs. Of products with a triangle of tokens by
  // tokens half of the tokens have half of the blocks.
  HalfAccumulator pair[2];
  const auto add_triangles = [&](auto blocks, int first, int left, int next_left, auto right,
                                 int right_of_first, int right_of_second, int next_of_first,
                                 int next_of_second, auto meanwhile) {
    constexpr int kCount = decltype(blocks)::value;
    Left x[kCount], next[kCount];
    LoadTransposedTile(own(left), warp, first, x);
    Finish(pair);
    meanwhile();
    ProductPair<true>(pair, x, first, right(right_of_first), right(right_of_second));
    LoadTransposedTile(own(next_left), warp, first, next);
    ProductPair<true>(pair, next, first, right(next_of_first), right(next_of_second));
    Finish(pair);
  };
  constexpr std::integral_constant<int, kFrameBlocks> all_blocks;
  constexpr std::integral_constant<int, kHalfBlocks> half_blocks;
  {
    Left ds[kBlocks];
    LoadTransposedTile(state_of(L::kDs), warp, 0, ds);
    ProductPair<false>(pair, ds, 0, half_along(L::kU), half_along(L::kV));
    const auto add_all = [&](auto blocks, int first_of_blocks) {
      add_triangles(blocks, first_of_blocks, L::kRt, L::kAt, half_down, L::kQrb, L::kQrk, L::kM,
                    L::kAak, [&] {
                      if (const ChunkMarks of_frame = marks(); of_frame.starts != 0)
                        for (HalfAccumulator& sum : pair)
                          KeepTokens<kHalfTiles>(half * kHalf, of_frame.LastStart(), kFrame, sum);
                      add_written(L::kBh, pair[0]);
                      add_written(L::kKh, pair[1]);
                    });
    };
    if (half == 0)
      add_all(all_blocks, 0);
    else
      add_all(half_blocks, kHalfBlocks);
  }
  add_reads(L::kBh, -1.0f, pair[0]);
  add_reads(L::kKh, -1.0f, pair[1]);
  ForEachElement([&](int tile, int e) {
    const float factor = Exp2(after[tile][e]);
    pair[0][tile][e] *= factor, pair[1][tile][e] *= factor;
  });
  stage_and_emit(pair, L::kU, in.db, L::kV, in.dk);

  {
    Left sp[kBlocks];
    LoadTransposedTile(state_of(L::kSp), warp, 0, sp);
    ProductPair<false>(pair, sp, 0, half_along(L::kDy), half_along(L::kDz));
    const auto add_all = [&](auto blocks) {
      add_triangles(blocks, 0, L::kBh, L::kKh, half_along, L::kQrb, L::kM, L::kQrk, L::kAak, [&] {
        if (const ChunkMarks of_frame = marks(); of_frame.starts != 0)
          for (HalfAccumulator& sum : pair)
            KeepTokens<kHalfTiles>(half * kHalf, 0, of_frame.FirstStart(), sum);
      });
    };
    if (half == 0)
      add_all(half_blocks);
    else
      add_all(all_blocks);
  }
  add_reads(L::kRt, 1.0f, pair[0]);
  HalfAccumulator own_reads;  // At dAt, which the decay of its own token does not scale
  channels(L::kAt).ForEachPair(first_block, [&](int tile, int e, float low, float high) {
    own_reads[tile][e] = low * pair[1][tile][e];
    own_reads[tile][e + 1] = high * pair[1][tile][e + 1];
  });
  HalfAccumulator slope;
  ForEachElement([&](int tile, int e) {
    const uint32_t w = raw_w[tile / 2][tile % 2 + e / 2 * 2];
    const float2 log_decay = LogDecayAndSlope(e % 2 ? Pair<T>::High(w) : Pair<T>::Low(w), in.decay);
    slope[tile][e] = log_decay.y;
    pair[0][tile][e] *= Exp2(-after[tile][e]);
    pair[1][tile][e] *= Exp2(-after[tile][e] - kLog2E * log_decay.x);
    reads[tile][e] += own_reads[tile][e];
  });
  stage_and_emit(pair, L::kDy, in.dr, L::kDz, in.da);

  // Sums over the tokens of this half from each on, as far as its segment: a row of a sum is that of
  // four lanes.
  float later_reads[2] = {};
  const auto sum_up = [&](auto same_segment) {
#pragma unroll
    for (int tile = kHalfTiles - 1; tile >= 0; --tile) {
      const int token = half * kHalf + 8 * tile + 2 * (lane % 4), behind = token - 2 * (lane % 4) + 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float(&x)[4] = reads[tile];
        float from_here = x[2 * i];
        if (same_segment(token, token + 1)) from_here += x[2 * i + 1];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const float next = __shfl_down_sync(~0u, from_here, step, 4);
          if (lane % 4 + step < 4 && same_segment(token, token + 2 * step)) from_here += next;
        }
        const float next = __shfl_down_sync(~0u, from_here, 1, 4);
        if (same_segment(token + 1, behind)) x[2 * i + 1] += later_reads[i];
        if (lane % 4 < 3 && same_segment(token + 1, token + 2)) x[2 * i + 1] += next;
        if (same_segment(token, token + 1)) x[2 * i] += x[2 * i + 1];
        later_reads[i] = __shfl_sync(~0u, x[2 * i], 0, 4);
      }
    }
  };
  if (const ChunkMarks of_frame = marks(); of_frame.starts == 0)
    sum_up([](int, int) { return true; });
  else
    sum_up([&](int token, int later) { return of_frame.SegmentEnd(token) > later; });
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
      written[i] += __shfl_xor_sync(~0u, written[i], step);
  // [what is written, in each half; what is read, in the second], by channel
  if (lane % 4 == 0)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[(1 + half) * N + channel + 8 * i] = written[i];
      if (half == 1) sums[3 * N + channel + 8 * i] = later_reads[i];
    }
  __syncthreads();
  float total[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* const sum = sums + channel + 8 * i;
    total[i] = sum[N] + sum[2 * N] + (half == 0 ? sum[3 * N] : 0.0f);
  }
  if (const ChunkMarks of_frame = marks(); (of_frame.starts | of_frame.absent) == 0) {
    ForEachElement([&](int tile, int e) {
      reads[tile][e] = slope[tile][e] * (reads[tile][e] - own_reads[tile][e] + total[e / 2]);
    });
  } else {
    ForEachElement([&](int tile, int e) {
      const int token = half * kHalf + 8 * tile + 2 * (lane % 4) + e % 2;
      const int end = of_frame.SegmentEnd(token);
      const float* const sum = sums + channel + 8 * (e / 2);
      float x = reads[tile][e] - own_reads[tile][e];
      if (half == 0 && end > kHalf) x += sum[3 * N];
      if (end == kFrame) x += sum[N] + sum[2 * N];
      reads[tile][e] = of_frame.absent >> token & 1 ? 0.0f : slope[tile][e] * x;
    });
  }
  channels(L::kAt).template StoreSum<T>(first_block, reads);
  __syncthreads();
  emit(own(L::kAt), half * kHalf, kHalf, in.dw);
}

}  // namespace

int64_t Wkv7GradientSharedMemory(int64_t head_size) {
  return head_size == 64 ? FrameLayout<64>::kBytes : FrameLayout<128>::kBytes;
}

cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7BackwardCall& call, const uint4* gradients,
                          const float* inexact) {
  if (call.dims.tokens == 0) return cudaSuccess;
  const int64_t rows = call.sequences.Given() ? 1 : call.dims.batch;
  const int64_t blocks = rows * call.dims.saved * call.dims.heads;
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    using L = FrameLayout<size()>;
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    const auto out = [](void* x) { return static_cast<T*>(x); };
    const Frames<T> frames{in(call.r),  in(call.w),  in(call.k),  in(call.v),  in(call.a),
                           in(call.b),  in(call.dy), out(call.dr), out(call.dw), out(call.dk),
                           out(call.dv), out(call.da), out(call.db), call.dims.tokens,
                           static_cast<unsigned>(call.dims.heads),
                           static_cast<unsigned>(call.dims.saved), call.decay, call.marks,
                           call.sequences, static_cast<const uint4*>(call.states), gradients,
                           inexact};
    return ForMarks(call.marks, [&](auto marked) {
      return Launch(GradientKernel<T, size(), marked()>,
                    static_cast<unsigned>(blocks), L::kThreads, L::kBytes, stream, frames);
    });
  });
}

}  // namespace rwkv_jax::cuda
