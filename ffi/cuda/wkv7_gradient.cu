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
#include "launch.cuh"
#include "wkv7.h"
#include "wkv7_chunk.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kFrame = static_cast<int>(kChunk);
static_assert(kFrame == 64, "a frame is the rows of a warpgroup and the columns of a tile");
constexpr int kFrameBlocks = kFrame / kSub;

template <typename T>
struct Frames {
  const T *r, *w, *k, *v, *a, *b, *dy;
  T *dr, *dw, *dk, *dv, *da, *db;
  int64_t tokens, heads;
  Decay decay;
  const float* states;
  FrameGradients gradients;
  const float* inexact;
};

// Tiles of tokens have kPanels panels of 64 channels, states [V, K] as many panels of 64 columns.
template <int N>
struct FrameLayout {
  static constexpr int kPanels = N / kTileCols;
  static constexpr int kThreads = 2 * N;
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
  static constexpr int kZ = kDy + kTokens;  // w, then Z, dU, dZ
  static constexpr int kU = kZ + kTokens;
  static constexpr int kSp = kU + kTokens;
  static constexpr int kDs = kSp + kState;
  // Of tokens by tokens, first the products themselves, then their gradients; M is first Aab.
  static constexpr int kQrb = kDs + kState;
  static constexpr int kQrk = kQrb + kPanel;
  static constexpr int kAak = kQrk + kPanel;
  static constexpr int kM = kAak + kPanel;
  static constexpr int kSums = kM + kPanel;  // float [4, N]: sums over the 16 tokens of each warp
  static constexpr int kBytes = kSums + 4 * N * sizeof(float);
};

// Left operands of 16-token blocks: the rows of this warp in a tile, or in its transpose.
struct RowsOf {
  uint32_t tile;
  int panel_bytes = 0;

  __device__ void Load(int warp, int block, Left& a) const {
    LoadLeft(tile + block / 4 * panel_bytes, 16 * warp, block % 4, a);
  }
};

struct ColumnsOf {
  uint32_t tile;

  __device__ void Load(int warp, int block, Left& a) const {
    LoadLeftTransposed(tile, 16 * block, warp, a);
  }
};

// Right operands: a tile as it is, its rows being summed over, or transposed.
struct Plain {
  uint32_t tile;

  __device__ RowsAreRows Block(int block) const { return {tile, block}; }
};

struct Transpose {
  uint32_t tile;
  int panel_bytes = 0;

  __device__ RowsAreColumns Block(int block) const {
    return {tile + block / 4 * panel_bytes, block % 4};
  }
};

// sum = left right, or sum += left right, over kBlocks blocks of 16; to be waited for.
template <bool kAdd, int kBlocks, typename LeftTile, typename RightTile>
__device__ void Product(int warp, Sum<8>& sum, const LeftTile& left, const RightTile& right) {
  Left a[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) left.Load(warp, block, a[block]);
  BeginProducts();
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if (kAdd || block > 0)
      Multiply<true>(sum, a[block], right.Block(block));
    else
      Multiply<false>(sum, a[block], right.Block(block));
  }
  CommitProducts();
}

__device__ void Finish(Sum<8>& sum) {
  WaitForProducts<0>();
  Settle(sum);
}

// The rows of this warp, rounded, into a tile.
template <typename T = __nv_bfloat16>
__device__ void StoreSum(int warp, uint32_t tile, const Sum<8>& sum) {
#pragma unroll
  for (int block = 0; block < kFrameBlocks; ++block) {
    const auto& left = sum[2 * block];
    const auto& right = sum[2 * block + 1];
    StoreMatrices(BlockAddress(tile, 16 * warp, block),
                  {Pair<T>::Round(left[0], left[1]), Pair<T>::Round(left[2], left[3]),
                   Pair<T>::Round(right[0], right[1]), Pair<T>::Round(right[2], right[3])});
  }
}

// Calls fn(block, x) with each block of the rows of this warp, in the order of a Left.
template <typename Fn>
__device__ void ForEachBlock(int warp, uint32_t tile, Fn&& fn) {
#pragma unroll
  for (int block = 0; block < kFrameBlocks; ++block) {
    uint32_t x[4];
    LoadMatrices(BlockAddress(tile, 16 * warp, block), x);
    fn(block, x);
  }
}

// Clears what lies above the diagonal of 64 x 64, and the diagonal unless it is kept.
__device__ void KeepLower(int warp, bool diagonal, Sum<8>& sum) {
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int below = 16 * warp + Lane() / 4 + diagonal - 2 * (Lane() % 4);
      if (below <= 8 * tile + e % 2 - 8 * (e / 2)) sum[tile][e] = 0.0f;
    }
}

// Waits for the four warps of this warpgroup.
__device__ void SynchronizeGroup(int group) {
  PublishOperands();
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// 16 x 16 blocks of a tile of tokens by tokens.
struct SquareTile {
  uint32_t tile;

  __device__ void LoadRows(int row, int col, Left& a) const { LoadLeft(tile, 16 * row, col, a); }
  __device__ void Store(int row, int col, const Left& a) const {
    StoreMatrices(BlockAddress(tile, 16 * row, col), a);
  }
  // sum += a [row, col]
  __device__ void AddProduct(Sum<2>& sum, const Left& a, int row, int col) const {
    uint32_t b[4];
    LoadTransposed(BlockAddress(tile, 16 * row, col), b);
    WarpMultiply(sum[0], a, b[0], b[1]);
    WarpMultiply(sum[1], a, b[2], b[3]);
  }
};

// A strictly lower triangular tile becomes (I - tile)^-1. As in InvertUnitLower inverses of diagonal
// blocks grow, here from those of 16 x 16, one per warp: D + D L D.
__device__ void InvertTile(int warp, int group, uint32_t address) {
  const SquareTile tile{address};
  Left x, own;
  Sum<2> sum = {};
  tile.LoadRows(warp, warp, x);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i][0] = Bf16::Low(x[2 * i]), sum[i][1] = Bf16::High(x[2 * i]);
    sum[i][2] = Bf16::Low(x[2 * i + 1]), sum[i][3] = Bf16::High(x[2 * i + 1]);
  }
  InvertUnitLower(sum, own);
  tile.Store(warp, warp, own);
  SynchronizeGroup(group);

  // Blocks of 32: the lower left one is D_w A_{w, w-1} D_{w-1}.
  if (warp % 2 == 1) {
    Sum<2> left = {}, corner = {};
    tile.LoadRows(warp, warp - 1, x);
    tile.AddProduct(left, x, warp - 1, warp - 1);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      WarpMultiply(corner[i], own, Transposed(Bf16::Round(left[i][0], left[i][1])),
                   Transposed(Bf16::Round(left[i][2], left[i][3])));
    Round(corner[0], corner[1], x);
    tile.Store(warp, warp - 1, x);
  }
  SynchronizeGroup(group);

  // All 64: W = A D of the upper half, in place, then D of the lower half times W.
  Left w[2];
  if (warp >= 2) {
    Left a[2];
    tile.LoadRows(warp, 0, a[0]);
    tile.LoadRows(warp, 1, a[1]);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Sum<2> left = {};
#pragma unroll
      for (int i = col; i < 2; ++i) tile.AddProduct(left, a[i], i, col);
      Round(left[0], left[1], w[col]);
    }
    tile.Store(warp, 0, w[0]);
    tile.Store(warp, 1, w[1]);
  }
  SynchronizeGroup(group);
  if (warp >= 2) {
    tile.LoadRows(warp, 2, x);
#pragma unroll
    for (int col = 0; col < 2; ++col) {
      Sum<2> corner = {};
      tile.AddProduct(corner, warp == 2 ? own : x, 2, col);
      if (warp == 3) tile.AddProduct(corner, own, 3, col);
      Round(corner[0], corner[1], w[col]);
    }
  }
  SynchronizeGroup(group);
  if (warp >= 2) {
    tile.Store(warp, 0, w[0]);
    tile.Store(warp, 1, w[1]);
  }
}

// The log decay of w and its derivative in w.
__device__ inline float2 LogDecayAndSlope(float w, Decay form) {
  if (form == Decay::kSigmoid) {
    const float exponent = -kLog2E * w;
    const float e = Exp2(exponent > 126.0f ? 126.0f : exponent), s = Reciprocal(1.0f + e);
    return {-kSigmoidScale * s, -kSigmoidScale * s * s * e};
  }
  const float x = form == Decay::kExp ? -Exp2(kLog2E * w) : w;
  return {x, form == Decay::kExp ? x : 1.0f};
}

template <typename T, int N>
__global__ __launch_bounds__(2 * N, N == 64 ? 2 : 1) void GradientKernel(
    const __grid_constant__ Frames<T> in) {
  using L = FrameLayout<N>;
  constexpr int kBlocks = N / kSub;
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp() % 4, group = Warp() / 4, lane = Lane();
  const int64_t head = blockIdx.x, frame = blockIdx.y, frames = gridDim.y;
  if (in.inexact != nullptr && in.inexact[head] != 0.0f) return;

  const int64_t batch = head / in.heads, first_token = frame * kFrame;
  const int64_t stride = in.heads * N;
  const int64_t first = (batch * in.tokens + first_token) * stride + (head - batch * in.heads) * N;
  const int64_t left_tokens = in.tokens - first_token;
  const int tokens = static_cast<int>(left_tokens < kFrame ? left_tokens : kFrame);

  // A piece of 16 bytes of each tile per step.
  constexpr int kRowPieces = N / 8;
  const auto copy = [&](int tile, const T* from) {
#pragma unroll
    for (int i = 0; i < kFrame * kRowPieces / L::kThreads; ++i) {
      const int index = threadIdx.x + i * L::kThreads;
      const int row = index / kRowPieces, piece = index % kRowPieces;
      const bool there = row < tokens;
      CopyAsync(PieceAddress(shared + tile + piece / 8 * L::kPanel, row, piece % 8),
                from + (there ? first + row * stride + piece * 8 : 0), there);
    }
  };
  copy(L::kZ, in.w);
  copy(L::kAt, in.a);
  copy(L::kBh, in.b);
  copy(L::kKh, in.k);
  copy(L::kRt, in.r);
  copy(L::kV, in.v);
  copy(L::kDy, in.dy);

  // dS comes as the blocks of the warps that have its rows.
  const uint4* const gradient =
      in.gradients.memory + head * in.gradients.stride + frame * kBlocks * L::kThreads + threadIdx.x;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const uint4 x = gradient[block * L::kThreads];
    StoreMatrices(BlockAddress(shared + L::kDs + block / 4 * L::kStatePanel,
                               kFrame * group + 16 * warp, block % 4),
                  {x.x, x.y, x.z, x.w});
  }
  constexpr int kStateSteps = N * kRowPieces / L::kThreads;
  const int state_piece = threadIdx.x % kRowPieces;
  float4 state[kStateSteps][2];
  {
    const int64_t index = head + (batch * (frames - 1) + frame) * in.heads;  // [B, frames, H]
    const float4* const from =
        reinterpret_cast<const float4*>(in.states + index * N * N) + 2 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < kStateSteps; ++i)
      state[i][0] = from[2 * i * L::kThreads], state[i][1] = from[2 * i * L::kThreads + 1];
  }
  WaitForCopies();
  __syncthreads();

  // In this warpgroup's panel: sums of log2 decays over the tokens after each token, those of a warp
  // first, then with the sums of the warps after it.
  const uint32_t own_panel = group * L::kPanel;
  float* const sums = reinterpret_cast<float*>(memory + L::kSums);
  const auto sums_of = [&](int of_warp, int tile) {
    return reinterpret_cast<float2*>(sums + of_warp * N + kTileCols * group + 8 * tile +
                                     2 * (lane % 4));
  };
  Sum<8> after = {};
  uint32_t raw_w[kFrameBlocks][4];
  {
    const Ones later(false, false, true), from(false, true, true), itself(false, true, false);
    const Rows rows{0, tokens - 16 * warp};
    uint32_t log_decays[kFrameBlocks][4];
#pragma unroll
    for (int block = 0; block < kFrameBlocks; ++block) {
      const uint32_t tile = shared + L::kZ + own_panel;
      uint32_t w[4];
      LoadTransposed(BlockAddress(tile, 16 * warp, block), w);
      LogDecays<T>(w, in.decay, rows, log_decays[block]);
      LoadMatrices(BlockAddress(tile, 16 * warp, block), raw_w[block]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t upper = log_decays[block][2 * i], lower = log_decays[block][2 * i + 1];
        WarpMultiplyHalf(after[2 * block + i], later.a, upper, lower);
        float all[4] = {};  // of its first row
        WarpMultiplyHalf(all, from.a, upper, lower);
        if (lane < 4) *sums_of(warp, 2 * block + i) = {all[0], all[1]};
      }
    }
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
      for (int of_warp = warp + 1; of_warp < 4; ++of_warp) {
        const float2 sum = *sums_of(of_warp, tile);
        after[tile][0] += sum.x, after[tile][1] += sum.y;
        after[tile][2] += sum.x, after[tile][3] += sum.y;
      }

    const auto scale = [&](uint32_t tile, int block, const float(&e)[2][4]) {
      uint32_t x[4];
      const uint32_t address = BlockAddress(tile + own_panel, 16 * warp, block);
      LoadMatrices(address, x);
      Scale<T>(e, x);
      StoreMatrices(address, x);
    };
#pragma unroll
    for (int block = 0; block < kFrameBlocks; ++block) {
      float e[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) e[i][j] = Exp2(after[2 * block + i][j]);
      scale(shared + L::kBh, block, e);
      scale(shared + L::kKh, block, e);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) e[i][j] = Exp2(-after[2 * block + i][j]);
      scale(shared + L::kRt, block, e);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float from_here[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) from_here[j] = after[2 * block + i][j];
        WarpMultiplyHalf(from_here, itself.a, log_decays[block][2 * i],
                         log_decays[block][2 * i + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) e[i][j] = Exp2(-from_here[j]);
      }
      scale(shared + L::kAt, block, e);
      if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) e[i][j] = 1.0f;
        scale(shared + L::kV, block, e);
        scale(shared + L::kDy, block, e);
      }
    }
  }

  {
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float total = 0.0f;
#pragma unroll
      for (int of_warp = 0; of_warp < 4; ++of_warp) total += sums[of_warp * N + state_piece * 8 + i];
      e[i] = Exp2(total);
    }
#pragma unroll
    for (int i = 0; i < kStateSteps; ++i) {
      const float4 x = state[i][0], y = state[i][1];
      const int row = threadIdx.x / kRowPieces + i * L::kThreads / kRowPieces;
      const int panel = L::kSp + state_piece / 8 * L::kStatePanel;
      *reinterpret_cast<uint4*>(memory + PieceAddress(panel, row, state_piece % 8)) = {
          Bf16::Round(x.x * e[0], x.y * e[1]), Bf16::Round(x.z * e[2], x.w * e[3]),
          Bf16::Round(y.x * e[4], y.y * e[5]), Bf16::Round(y.z * e[6], y.w * e[7])};
    }
  }
  PublishOperands();
  __syncthreads();

  const auto at = [&](int tile) { return shared + tile; };
  const auto own = [&](int tile) { return shared + tile + own_panel; };
  const auto own_state = [&](int tile) { return shared + tile + group * L::kStatePanel; };
  const auto own_values = [&](int tile) { return shared + tile + group * kFrame * kRowBytes; };
  const auto rows = [&](int tile) { return RowsOf{shared + tile, L::kPanel}; };
  Sum<8> sum;

  // The products of tokens by tokens, shared out among the warpgroups.
  const auto square = [&](int to, int left, int right, bool diagonal) {
    Product<false, kBlocks>(warp, sum, rows(left), Transpose{at(right), L::kPanel});
    Finish(sum);
    KeepLower(warp, diagonal, sum);
    StoreSum(warp, at(to), sum);
  };
  if (group == 0) {
    square(L::kM, L::kAt, L::kBh, false);
    square(L::kAak, L::kAt, L::kKh, false);
  }
  if (group == L::kPanels - 1) {
    square(L::kQrb, L::kRt, L::kBh, true);
    square(L::kQrk, L::kRt, L::kKh, true);
  }
  if (group == 0) {
    __syncwarp();
    InvertTile(warp, group, at(L::kM));
  }
  PublishOperands();
  __syncthreads();

  // Of the values of this warpgroup: Z, U, dU, dZ, dV.
  Product<false, kBlocks>(warp, sum, rows(L::kAt), Transpose{own_values(L::kSp), L::kStatePanel});
  Product<true, kFrameBlocks>(warp, sum, RowsOf{at(L::kAak)}, Plain{own(L::kV)});
  Finish(sum);
  StoreSum(warp, own(L::kZ), sum);
  SynchronizeGroup(group);
  Product<false, kFrameBlocks>(warp, sum, RowsOf{at(L::kM)}, Plain{own(L::kZ)});
  Finish(sum);
  StoreSum(warp, own(L::kU), sum);
  Product<false, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kQrb)}, Plain{own(L::kDy)});
  Product<true, kBlocks>(warp, sum, rows(L::kBh), Transpose{own_values(L::kDs), L::kStatePanel});
  Finish(sum);
  SynchronizeGroup(group);
  StoreSum(warp, own(L::kZ), sum);
  SynchronizeGroup(group);
  Product<false, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kM)}, Plain{own(L::kZ)});
  Finish(sum);
  SynchronizeGroup(group);
  StoreSum(warp, own(L::kZ), sum);
  SynchronizeGroup(group);
  Product<false, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kQrk)}, Plain{own(L::kDy)});
  Product<true, kBlocks>(warp, sum, rows(L::kKh), Transpose{own_values(L::kDs), L::kStatePanel});
  Product<true, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kAak)}, Plain{own(L::kZ)});
  Finish(sum);
  __syncthreads();

  // The rows of this warp go out by way of a tile that they have to themselves.
  const auto emit = [&](uint32_t tile, T* out) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * warp + 4 * i + lane / 8, piece = lane % 8;
      const uint4 x =
          *reinterpret_cast<const uint4*>(memory + (PieceAddress(tile, row, piece) - shared));
      if (row < tokens)
        *reinterpret_cast<uint4*>(out + first + row * stride + kTileCols * group + piece * 8) = x;
    }
    __syncwarp();
  };
  {
    const uint32_t tile = at(group == 0 ? L::kQrb : L::kM);
    StoreSum<T>(warp, tile, sum);
    emit(tile, in.dv);
  }
  __syncthreads();

  // The gradients of the products of tokens by tokens.
  if (group == 0) {
    square(L::kQrb, L::kDy, L::kU, true);
    square(L::kQrk, L::kDy, L::kV, true);
  }
  if (group == L::kPanels - 1) {
    square(L::kM, L::kZ, L::kU, false);
    square(L::kAak, L::kZ, L::kV, false);
  }
  PublishOperands();
  __syncthreads();

  // Of the keys of this warpgroup: dB, dK, dR, dA and what they say of the decays.
  Sum<8> reads = {};          // Rt dRt - Bh dBh - Kh dKh + At dAt
  float written[8][2] = {};   // columns of dS * S_L, summed over the rows of this thread
  // The columns of `sum` are the gradient of a scaled operand: what it says of the decays, and out.
  const auto gradient_of = [&](int scaled, float sign, uint32_t stage, T* out, auto factor) {
    ForEachBlock(warp, own(scaled), [&](int block, const uint32_t(&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = 2 * block + i / 2, e = i % 2 * 2;
        reads[tile][e] += sign * Bf16::Low(x[i]) * sum[tile][e];
        reads[tile][e + 1] += sign * Bf16::High(x[i]) * sum[tile][e + 1];
      }
    });
#pragma unroll
    for (int tile = 0; tile < 8; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[tile][e] *= factor(tile, e);
    // Rows of the operand that becomes the stage are read by the same warp of each warpgroup.
    if (L::kPanels > 1) __syncthreads();
    StoreSum<T>(warp, stage, sum);
    emit(stage, out);
  };
  const auto up = [&](int tile, int e) { return Exp2(-after[tile][e]); };
  const auto down = [&](int tile, int e) { return Exp2(after[tile][e]); };
  const auto add_written = [&](int scaled) {
    ForEachBlock(warp, own(scaled), [&](int block, const uint32_t(&x)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = 2 * block + i / 2, e = i % 2 * 2;
        written[tile][0] += Bf16::Low(x[i]) * sum[tile][e];
        written[tile][1] += Bf16::High(x[i]) * sum[tile][e + 1];
      }
    });
  };

  // dS * Sp, of rows of the state that this warp takes.
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    const int offset = panel * kFrame * kRowBytes;
    ForEachBlock(warp, own_state(L::kDs) + offset, [&](int block, const uint32_t(&x)[4]) {
      uint32_t s[4];
      LoadMatrices(BlockAddress(own_state(L::kSp) + offset, 16 * warp, block), s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        written[2 * block + i / 2][0] += Bf16::Low(x[i]) * Bf16::Low(s[i]);
        written[2 * block + i / 2][1] += Bf16::High(x[i]) * Bf16::High(s[i]);
      }
    });
  }

  Product<false, kBlocks>(warp, sum, rows(L::kU), Plain{own_state(L::kDs)});
  Finish(sum);
  add_written(L::kBh);
  Product<true, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kQrb)}, Plain{own(L::kRt)});
  Product<true, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kM)}, Plain{own(L::kAt)});
  Finish(sum);
  gradient_of(L::kBh, -1.0f, own(L::kU), in.db, down);

  Product<false, kBlocks>(warp, sum, rows(L::kV), Plain{own_state(L::kDs)});
  Finish(sum);
  add_written(L::kKh);
  Product<true, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kQrk)}, Plain{own(L::kRt)});
  Product<true, kFrameBlocks>(warp, sum, ColumnsOf{at(L::kAak)}, Plain{own(L::kAt)});
  Finish(sum);
  gradient_of(L::kKh, -1.0f, own(L::kV), in.dk, down);

  Product<false, kBlocks>(warp, sum, rows(L::kDy), Plain{own_state(L::kSp)});
  Product<true, kFrameBlocks>(warp, sum, RowsOf{at(L::kQrb)}, Plain{own(L::kBh)});
  Product<true, kFrameBlocks>(warp, sum, RowsOf{at(L::kQrk)}, Plain{own(L::kKh)});
  Finish(sum);
  gradient_of(L::kRt, 1.0f, own(L::kDy), in.dr, up);

  Product<false, kBlocks>(warp, sum, rows(L::kZ), Plain{own_state(L::kSp)});
  Product<true, kFrameBlocks>(warp, sum, RowsOf{at(L::kM)}, Plain{own(L::kBh)});
  Product<true, kFrameBlocks>(warp, sum, RowsOf{at(L::kAak)}, Plain{own(L::kKh)});
  Finish(sum);
  Sum<8> own_reads;  // At dAt, which a token's own decay does not scale
  ForEachBlock(warp, own(L::kAt), [&](int block, const uint32_t(&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = 2 * block + i / 2, e = i % 2 * 2;
      own_reads[tile][e] = Bf16::Low(x[i]) * sum[tile][e];
      own_reads[tile][e + 1] = Bf16::High(x[i]) * sum[tile][e + 1];
    }
  });
  Sum<8> slope;
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t pair = raw_w[tile / 2][tile % 2 * 2 + e / 2];
      const float2 log_decay =
          LogDecayAndSlope(e % 2 ? Pair<T>::High(pair) : Pair<T>::Low(pair), in.decay);
      slope[tile][e] = log_decay.y;
      sum[tile][e] *= Exp2(-after[tile][e] - kLog2E * log_decay.x);
      reads[tile][e] += own_reads[tile][e];
    }
  __syncthreads();
  StoreSum<T>(warp, own(L::kZ), sum);
  emit(own(L::kZ), in.da);

  // Sums over the tokens from each on, and over all of what is written; first inside a warp.
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float lower = reads[tile][2 + j], upper = reads[tile][j];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float from_lower = __shfl_down_sync(~0u, lower, step);
        const float from_upper = __shfl_down_sync(~0u, upper, step);
        if (lane + step < 32) lower += from_lower, upper += from_upper;
        written[tile][j] += __shfl_xor_sync(~0u, written[tile][j], step);
      }
      upper += __shfl_sync(~0u, lower, lane % 4);
      reads[tile][j] = upper, reads[tile][2 + j] = lower;
    }
  // The tiles of tokens by tokens have served their purpose.
  float* const written_sums = reinterpret_cast<float*>(memory + L::kQrb);
  const auto written_of = [&](int of_warp, int tile) {
    return reinterpret_cast<float2*>(written_sums + of_warp * N + kTileCols * group + 8 * tile +
                                     2 * (lane % 4));
  };
  if (lane < 4)
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      *sums_of(warp, tile) = {reads[tile][0], reads[tile][1]};
      *written_of(warp, tile) = {written[tile][0], written[tile][1]};
    }
  __syncthreads();
#pragma unroll
  for (int tile = 0; tile < 8; ++tile) {
    float2 total = {0.0f, 0.0f};
#pragma unroll
    for (int of_warp = 0; of_warp < 4; ++of_warp) {
      const float2 x = *written_of(of_warp, tile);
      total.x += x.x, total.y += x.y;
      if (of_warp > warp) {
        const float2 later = *sums_of(of_warp, tile);
        total.x += later.x, total.y += later.y;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sum[tile][e] = slope[tile][e] * (reads[tile][e] - own_reads[tile][e] +
                                       (e % 2 ? total.y : total.x));
  }
  StoreSum<T>(warp, own(L::kAt), sum);
  emit(own(L::kAt), in.dw);
}

}  // namespace

cudaError_t Wkv7FrameBackward(cudaStream_t stream, const Wkv7BackwardCall& call,
                              const FrameGradients& gradients, const float* inexact) {
  if (call.dims.tokens == 0) return cudaSuccess;
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    using L = FrameLayout<size()>;
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    const auto out = [](void* x) { return static_cast<T*>(x); };
    const Frames<T> frames{in(call.r),  in(call.w),  in(call.k),  in(call.v),  in(call.a),
                           in(call.b),  in(call.dy), out(call.dr), out(call.dw), out(call.dk),
                           out(call.dv), out(call.da), out(call.db), call.dims.tokens,
                           call.dims.heads, call.decay, call.states, gradients, inexact};
    const dim3 blocks(static_cast<unsigned>(call.dims.batch * call.dims.heads),
                      static_cast<unsigned>(call.dims.saved));
    return Launch(GradientKernel<T, size()>, blocks, L::kThreads, L::kBytes, stream, frames);
  });
}

}  // namespace rwkv_jax::cuda
