// WKV6 on matrix units, the gradients of the inputs: one block of threads per head and frame of 64 tokens,
// from the state S before the frame and the gradient dS of the state after it.
//
// A frame is four chunks in the form of wkv6_tiles.cuh. With S before a chunk and dS after it,
//
//   dA = tril_strict(dY V^T)    D = diag(dY V^T)
//   dR = exp(G') (dY S + dA Kb) + D u K
//   dK = exp(G_L - G) (V dS) + exp(-G) (dA^T Rt) + D u R
//   dV = Kh dS^T + A^T dY
//   du = sum of D R K
//
// and S and dS move on by S <- S diag(exp(G_L)) + V^T Kh and dS <- dS diag(exp(G_L)) + dY^T Rt.
//
// The decay of a token t scales what passes it, from a token before to a token after,
//
//   dlog d_t = exp(G_L) sum_v S dS + sum_{j < t} Kh (V dS) + sum_{i > t} Rt (dY S)
//            + sum_{i > t} Rt (dA Kb) - sum_{j >= t} Kb (dA^T Rt),
//
// where of the last two sums the pairs of tokens that both come after t cancel: hence both sides have the
// same rounded factors.
//
// Products are computed transposed, with channels as the rows, so that what one of them gives is a left
// operand of the next in registers, and sums over tokens run along the rows, which one warp has. Each of
// two warpgroups has two chunks; it first moves the states to where those begin.
#include "fragment.cuh"
#include "wkv6/decays.cuh"

namespace rwkv_jax::cuda {
namespace {

// The decay of one token in log2, beyond which the pairs of a chunk are taken singly: what cancels of them
// is rounded, so it would hide what passes a token that keeps so little. And its bits in float16, scaled.
constexpr float kMaxTokenLog2 = 12.0f;
constexpr uint32_t kMaxTokenBits = 0x6a00;
static_assert(kMaxTokenLog2 * kLogScale == 3072.0f, "0x6a00 is 3072");

constexpr int kThreads = 256;
constexpr int kOwnChunks = kFrameChunks / 2;  // of a warpgroup

template <typename T>
struct Frames {
  const T *r, *k, *v, *dy;
  const void* w;
  const float* u;
  T *dr, *dk, *dv;
  void* dw;
  float* du;
  int64_t tokens;
  unsigned heads, frames;
  Decay decay;
  Marks marks;
  Sequences sequences;
  const uint4 *states, *gradients;  // [B, frames, H, V, K] of bfloat16
};

struct GradientLayout {
  static constexpr int kR = 0;             // Rt, then dr
  static constexpr int kKh = kR + kTile;   // first k
  static constexpr int kKb = kKh + kTile;  // k itself in a chunk that decays too far; then dk
  static constexpr int kV = kKb + kTile;
  static constexpr int kDy = kV + kTile;
  static constexpr int kW = kDy + kTile;
  static constexpr int kS = kW + kTile;   // then dw
  static constexpr int kDs = kS + kTile;  // then dv
  // Of tokens by tokens, packed: A^T in two parts, each from half of the channels, dA and dA^T.
  static constexpr int kAt = kDs + kTile;
  static constexpr int kDa = kAt + 2 * kFrameChunks * kTileBytes;
  static constexpr int kDat = kDa + kFrameChunks * kTileBytes;
  static constexpr int kFactors = kDat + kFrameChunks * kTileBytes;
  static constexpr int kD = kFactors + kFrameChunks * kFactorFloats * 4;  // float [64]
  static constexpr int kU = kD + kFrame * 4;
  static constexpr int kConstant = kU + kHeadSize * 4;
  static constexpr int kSums = kConstant + kHeadSize * 4;  // float [2][2][64]
  static constexpr int kFar = kSums + 4 * kHeadSize * 4;   // int [4][2]
  static constexpr int kAfter = kFar + 2 * kFrameChunks * 4;  // dS after each chunk, as its threads have it
  static constexpr int kBytes = kAfter + kFrameChunks * kTile;
};

// Calls fn(i, e) for all elements of two tiles.
template <typename Fn>
__device__ void ForEachElement(Fn&& fn) {
#pragma unroll
  for (int x = 0; x < 8; ++x) fn(x / 4, x % 4);
}

// Calls fn(i, e) for pairs of elements of two tiles as a Left has them, (i, e) and (i, e + 1).
template <typename Fn>
__device__ void ForEachPair(Fn&& fn) {
#pragma unroll
  for (int x = 0; x < 4; ++x) fn(x, x / 2, x % 2 * 2);
}

// Half of the channels of a chunk: scales them, and leaves their part of A^T, exp(G_L), and whether they
// decay too far for Kb.
template <typename T, bool kConstant>
__device__ void PrepareChunk(const FrameDecays<T, kConstant>& decays, int chunk, int half,
                             unsigned char* memory, const RawChunk<T>& raw) {
  using L = GradientLayout;
  const uint32_t shared = SharedAddress(memory);
  float* const factors = reinterpret_cast<float*>(memory + L::kFactors) + chunk * kFactorFloats;
  const float* const u = reinterpret_cast<const float*>(memory + L::kU);
  Accumulator<2> a = {}, bonus = {};
  bool far = false;
  const bool clears = raw.marks.clears != 0;
  DecaySums all_sums[kBlocks / 2];
#pragma unroll
  for (int i = 0; i < kBlocks / 2; ++i) {
    const int block = half * (kBlocks / 2) + i;
    if constexpr (kConstant) {
      SumByToken(decays, chunk, block, raw.marks.present, all_sums[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e)
        far |= decays.constant[16 * block + e / 2 * 8 + 2 * (Lane() % 4) + e % 2] < -kMaxTokenLog2;
    } else {
      uint32_t log_decays[4];
      decays.Load(chunk, block, raw.marks.present, log_decays);
      SumByToken(log_decays, all_sums[i]);
      // Without their signs float16s compare as integers.
#pragma unroll
      for (int e = 0; e < 4; ++e)
        far |= (log_decays[e] & 0x7fffu) > kMaxTokenBits ||
               (log_decays[e] >> 16 & 0x7fffu) > kMaxTokenBits;
      StoreTransposed(TileAddress(decays.w_tile, 16 * chunk, block), log_decays);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) far |= !(all_sums[i].upto[e / 2][2 + e % 2] >= -kMaxTileLog2);
  }
  far = __any_sync(~0u, far);
  if (Lane() == 0) reinterpret_cast<int*>(memory + L::kFar)[2 * chunk + half] = far;
#pragma unroll
  for (int i = 0; i < kBlocks / 2; ++i) {
    const int block = half * (kBlocks / 2) + i;
    const uint32_t here = TileAddress(0, 16 * chunk, block);
    const DecaySums& sums = all_sums[i];
    float total[2][2];
    LastRow(sums, total);
    const float factor[2][2] = {{Exp2(total[0][0]), Exp2(total[0][1])},
                                {Exp2(total[1][0]), Exp2(total[1][1])}};
    StoreFactors(block, factor, clears, factors);
    uint32_t r[4], k[4], e[4], x[4];
    LoadMatrices(shared + L::kR + here, r);
    LoadMatrices(shared + L::kKh + here, k);
    ForEachPair([&](int n, int tile, int) {
      r[n] = ToBf16<T>(r[n]), k[n] = ToBf16<T>(k[n]);
      const float* const pair = u + 16 * block + 8 * tile + 2 * (Lane() % 4);
      x[n] = Bf16::Multiply(r[n], Bf16::Round(pair[0], pair[1]));
    });
    AddTokenProducts(bonus, x, k);
    if (far) {
      Exponentials([&](int i, int j) { return total[i][j % 2] - sums.upto[i][j]; }, e);
      MultiplyPairs(k, e, x);
    } else {
      uint32_t to_end[4];
      ForEachPair([&](int n, int i, int j) {
        const float low = Exp2(-sums.upto[i][j]), high = Exp2(-sums.upto[i][j + 1]);
        e[n] = Bf16::Round(low, high);
        to_end[n] = Bf16::Round(low * factor[i][0], high * factor[i][1]);
      });
      MultiplyPairs(k, to_end, x);
      MultiplyPairs(k, e, k);
    }
    if (clears) KeepRowsBetween(raw.marks.LastCleared(), kTileTokens, x);
    StoreMatrices(shared + L::kKh + here, x);
    StoreMatrices(shared + L::kKb + here, k);
    Exponentials([&](int i, int j) { return sums.before[i][j]; }, e);
    MultiplyPairs(r, e, r);
    StoreMatrices(shared + L::kR + here, r);
    AddTokenProducts(a, r, k);
  }
  if (far) {
    FrameDecays<T, kConstant> converted = decays;
    converted.converted = true;
    MultiplyByHalves(converted, chunk, raw, half * (kBlocks / 2), (half + 1) * (kBlocks / 2), a);
  }
  KeepLower(false, a);
  if (clears) KeepSegments(raw.marks, a);
  SetDiagonal(bonus, a);
  const uint32_t at = shared + L::kAt + (2 * chunk + half) * kTileBytes;
  // Transposed: the upper right block and the lower left one change places.
  StoreTransposed(PackedTileAddress(at),
                  {Bf16::Round(a[0][0], a[0][1]), Bf16::Round(a[1][0], a[1][1]),
                   Bf16::Round(a[0][2], a[0][3]), Bf16::Round(a[1][2], a[1][3])});
}

// dA and D of a chunk, or dA^T and D.
__device__ void PrepareGradient(int chunk, int left, int right, int to, unsigned char* memory,
                                const RowMarks& marks) {
  using L = GradientLayout;
  const uint32_t shared = SharedAddress(memory);
  Accumulator<2> da = {};
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    uint32_t x[4], y[4];
    LoadMatrices(TileAddress(shared + left, 16 * chunk, block), x);
    LoadMatrices(TileAddress(shared + right, 16 * chunk, block), y);
    AddTokenProducts(da, x, y);
  }
  float* const d = reinterpret_cast<float*>(memory + L::kD) + 16 * chunk;
  const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
  for (int e = 0; e < 2; ++e)
    if (to == L::kDa && row == col + e) {
      d[row] = da[0][e];
      d[row + 8] = da[1][2 + e];
    }
  // Of dA what is below the diagonal.
  const bool below = to == L::kDa;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = row + e / 2 * 8, j = col + 8 * tile + e % 2;
      if (below ? i <= j : i >= j) da[tile][e] = 0.0f;
      if (marks.clears != 0 && (below ? j < marks.SegmentBegin(i) : i < marks.SegmentBegin(j)))
        da[tile][e] = 0.0f;
    }
  Left rounded;
  Round(da[0], da[1], rounded);
  StoreMatrices(PackedTileAddress(shared + to + chunk * kTileBytes), rounded);
}

// Adds to each element the sum of x over the tokens, which are the columns, that come later, or sooner. By
// products with ones, of two parts of x that have 10 bits each, so that nothing is lost that counts.
__device__ inline void AddSums(const Accumulator<2>& x, bool later, Accumulator<2>& sum) {
  // Of the columns of a tile an operand has first the even ones, then the odd ones.
  const int row = 2 * (Lane() % 4), col = Lane() / 4;
  const float even = (later ? row > col : row < col) ? 1.0f : 0.0f;
  const float odd = (later ? row + 1 > col : row + 1 < col) ? 1.0f : 0.0f;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    float high[4], low[4];
    constexpr int kOrder[4] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float element = x[tile][kOrder[i]];
      high[i] = __uint_as_float(__float_as_uint(element) & 0xffffe000u);
      low[i] = element - high[i];
    }
    WarpMultiplyFloat(sum[tile], high, even, odd);
    WarpMultiplyFloat(sum[tile], low, even, odd);
    if (later == (tile == 1)) {
      WarpMultiplyFloat(sum[1 - tile], high, 1.0f, 1.0f);
      WarpMultiplyFloat(sum[1 - tile], low, 1.0f, 1.0f);
    }
  }
}

// A Left operand's elements in the tiles of a sum.
__device__ inline void Widen(const Left (&x)[kBlocks], Accumulator<8>& s) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    ForEachPair([&](int n, int i, int e) {
      s[2 * block + i][e] = Bf16::Low(x[block][n]);
      s[2 * block + i][e + 1] = Bf16::High(x[block][n]);
    });
}

// Rows of a sum, of the channels lane / 4 and the next but seven of a warp, scaled by channel.
__device__ inline void ScaleRows(const float (&factors)[2], Accumulator<8>& s) {
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[tile][e] *= factors[e / 2];
}

// Of a chunk that decays too far for Kb, in the tiles of sums with channels as rows: r and k themselves,
// what is read from and written to by pairs of tokens, and what of that passes a token between them.
struct FarPairs {
  float r[2][4], k[2][4], read[2][4], written[2][4], spanning[2][4];
};

template <typename T>
__device__ void AddFarPairs(const unsigned char* da, const RawChunk<T>& raw, int channel,
                            const DecaySums& sums, FarPairs& pairs) {
  const int lane = Lane(), own = 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = 8 * i + own + e % 2;
      const int64_t at = static_cast<int64_t>(token) * raw.stride + channel + e / 2 * 8;
      pairs.r[i][e] = raw.marks.present >> token & 1 ? ToFloat(raw.r[at]) : 0.0f;
      pairs.k[i][e] = raw.marks.present >> token & 1 ? ToFloat(raw.k[at]) : 0.0f;
    }
  // Of another token, in row `half`.
  const auto of = [&](const float(&x)[2][4], int token, int half) {
    const float early = token % 2 ? x[0][2 * half + 1] : x[0][2 * half];
    const float late = token % 2 ? x[1][2 * half + 1] : x[1][2 * half];
    return __shfl_sync(~0u, token < 8 ? early : late, (lane & ~3) | token % 8 / 2);
  };
  // One reading token i after another; a lane has four of the tokens j that have written before it.
#pragma unroll 1
  for (int i = 1; i < kTileTokens; ++i) {
    const unsigned char* const row = da + i / 8 * 256 + i % 8 * 16 + own * 2;
    const uint32_t d[2] = {*reinterpret_cast<const uint32_t*>(row),
                           *reinterpret_cast<const uint32_t*>(row + 128)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float before = of(sums.before, i, half), r = of(pairs.r, i, half);
      float sooner = 0.0f;  // what is read of the tokens of the tiles before
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float read[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 8 * tile + own + e, at = 2 * half + e;
          const float decayed = j < i ? (e ? Bf16::High(d[tile]) : Bf16::Low(d[tile])) *
                                            Exp2(before - sums.upto[tile][at])
                                      : 0.0f;
          pairs.written[tile][at] += decayed * r;
          read[e] = decayed * pairs.k[tile][at];
        }
        float upto = read[0] + read[1];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const float last = __shfl_sync(~0u, upto, lane < step ? 0 : lane - step);
          if (lane % 4 >= step) upto += last;
        }
        const float last = __shfl_sync(~0u, upto, lane == 0 ? 0 : lane - 1);
        const float passed = lane % 4 > 0 ? sooner + last : sooner;
        if (8 * tile + own < i) pairs.spanning[tile][2 * half] += r * passed;
        if (8 * tile + own + 1 < i) pairs.spanning[tile][2 * half + 1] += r * (passed + read[0]);
        sooner += __shfl_sync(~0u, upto, lane | 3);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * (e / 2) + own + e % 2 == i) pairs.read[e / 2][2 * half + e % 2] = sooner;
    }
  }
}

// A frame of no sequence adds nothing to the gradients of parameters.
template <typename T>
__device__ void ClearPartialSums(const Frames<T>& in, bool constant) {
  if (threadIdx.x >= kHeadSize) return;
  const int64_t to = static_cast<int64_t>(blockIdx.x) * kHeadSize + threadIdx.x;
  in.du[to] = 0.0f;
  if (constant) static_cast<float*>(in.dw)[to] = 0.0f;
}

template <typename T, bool kConstant, bool kMarked>
__global__ __launch_bounds__(kThreads, 2) void GradientKernel(const __grid_constant__ Frames<T> in) {
  using L = GradientLayout;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp() % 4, group = Warp() / 4, lane = Lane();
  // Of [B, frames, H]. Divisions of 64 bits would cost more than all copies.
  const unsigned all_frames = blockIdx.x / in.heads, own_head = blockIdx.x - all_frames * in.heads;
  const int batch = in.sequences.Given() ? in.sequences.owners[all_frames]
                                         : static_cast<int>(all_frames / in.frames);
  if (batch < 0) {
    ClearPartialSums(in, kConstant);
    return;
  }
  const int64_t head = static_cast<int64_t>(batch) * in.heads + own_head;
  const Span span = in.sequences.Given()
                        ? in.sequences(batch, 0)
                        : Span{batch * in.tokens, in.tokens, static_cast<int64_t>(batch) * in.frames};
  const int64_t frame = all_frames - span.first_chunk, first_token = frame * kFrame;
  const int64_t left_tokens = span.tokens - first_token;
  const FrameCopier<kThreads> copier{
      ((span.first_token + first_token) * in.heads + own_head) * kHeadSize,
      static_cast<int>(in.heads) * kHeadSize,
      static_cast<int>(left_tokens < kFrame ? left_tokens : kFrame),
      (kMarked ? ChunkMarks(in.marks, batch, frame) : ChunkMarks()).absent};

  if constexpr (!kConstant) copier.Copy(shared + L::kW, static_cast<const T*>(in.w));
  copier.Copy(shared + L::kR, in.r);
  copier.Copy(shared + L::kKh, in.k);
  copier.Copy(shared + L::kV, in.v);
  copier.Copy(shared + L::kDy, in.dy);
  CommitCopies();
  {
    constexpr int kPieces = kHeadSize * kHeadSize / 8;
    const uint4* const states = in.states + static_cast<int64_t>(blockIdx.x) * kPieces;
    const uint4* const gradients = in.gradients + static_cast<int64_t>(blockIdx.x) * kPieces;
    const uint32_t to = PieceAddress(shared, threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kPieces / kThreads; ++i) {
      const uint32_t rows = i * (kThreads / 8) * kRowBytes;
      CopyAsync(to + L::kS + rows, states + threadIdx.x + i * kThreads, true);
      CopyAsync(to + L::kDs + rows, gradients + threadIdx.x + i * kThreads, true);
    }
    CommitCopies();
  }
  const auto floats = [&](int at) { return reinterpret_cast<float*>(memory + at); };
  if constexpr (kConstant)
    LoadConstantDecays(static_cast<const float*>(in.w) + head * kHeadSize, in.decay,
                       floats(L::kConstant));
  if (threadIdx.x < kHeadSize) floats(L::kU)[threadIdx.x] = in.u[head * kHeadSize + threadIdx.x];
  const FrameDecays<T, kConstant> decays{shared + L::kW, floats(L::kConstant), in.decay};
  // Read again wherever they are needed: there are no registers to keep them.
  const auto marks_of = [&](int chunk) {
    const uint32_t word = kMarked ? in.marks.Word(batch, first_token + kTileTokens * chunk) : 0u;
    return RowMarks(word, copier.tokens - kTileTokens * chunk);
  };
  const auto raw_of = [&](int chunk) {
    const int64_t first = copier.first + static_cast<int64_t>(kTileTokens * chunk) * copier.stride;
    return RawChunk<T>{in.r + first, in.k + first, copier.stride, marks_of(chunk)};
  };

  WaitForCopies<1>();
  ConvertOwnPieces<T, kThreads>(memory + L::kV);
  ConvertOwnPieces<T, kThreads>(memory + L::kDy);
  __syncthreads();
  PrepareChunk(decays, warp, group, memory, raw_of(warp));
  if (group == 0)
    PrepareGradient(warp, L::kDy, L::kV, L::kDa, memory, marks_of(warp));
  else
    PrepareGradient(warp, L::kV, L::kDy, L::kDat, memory, marks_of(warp));
  WaitForCopies<0>();
  PublishOperands();
  __syncthreads();

  const auto rows = [&](int tile, int chunk) { return shared + tile + chunk * kChunkRows; };
  const auto block_of = [&](int at, int chunk) { return shared + at + chunk * kTileBytes; };
  const auto factors_of = [&](int chunk) { return floats(L::kFactors) + chunk * kFactorFloats; };
  const int first_chunk = group * kOwnChunks;
  // Of the tokens of a chunk those that see the state before it.
  const auto keep_first = [&](int chunk, Left& tokens) {
    if (const RowMarks marks = marks_of(chunk); marks.clears != 0)
      KeepTokens(0, marks.FirstCleared(), tokens);
  };

  // One warpgroup has dV, with dS by its rows; the other dS by its columns, rounded as it is after each
  // chunk.
  const auto after = [&](int chunk) {
    return reinterpret_cast<uint4*>(memory + L::kAfter + chunk * kTile) + threadIdx.x % 128;
  };
  const auto keep = [&](int chunk, const Left(&x)[kBlocks]) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block)
      after(chunk)[128 * block] = {x[block][0], x[block][1], x[block][2], x[block][3]};
  };
  const auto recall = [&](int chunk, Left(&x)[kBlocks]) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 four = after(chunk)[128 * block];
      x[block][0] = four.x, x[block][1] = four.y, x[block][2] = four.z, x[block][3] = four.w;
    }
  };
  const int channel = 16 * warp + lane / 4;  // and the next but seven
  const auto row_factors = [&](int chunk, float(&f)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      f[i] = factors_of(chunk)[lane / 8 * kFactorStride + 4 * warp + 2 * i + lane / 4 % 2];
  };
  Left x[kBlocks];
  Accumulator<8> state;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    if (group == 0)
      LoadLeft(shared + L::kDs, 16 * warp, block, x[block]);
    else
      LoadLeftTransposed(shared + L::kDs, 16 * block, warp, x[block]);
  Widen(x, state);
  __syncthreads();  // dv goes where dS was
  if (group == 0) {
#pragma unroll 1
    for (int chunk = kFrameChunks - 1; chunk >= 0; --chunk) {
      Left dy;
      LoadLeftTransposed(rows(L::kDy, chunk), 0, warp, dy);
      Accumulator<2> dv;
      Left before[kBlocks], seeing = {dy[0], dy[1], dy[2], dy[3]};
      keep_first(chunk, seeing);
      RoundPanel(state, before);
      ScaleColumns(factors_of(chunk), state);
      BeginProducts();
      Multiply<false>(dv, dy, PackedTiles{block_of(L::kAt, 2 * chunk)});
      Multiply<true>(dv, dy, PackedTiles{block_of(L::kAt, 2 * chunk + 1)});
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        Multiply<true>(dv, before[block], KAlongRows{rows(L::kKh, chunk), block});
      CommitProducts();
      Multiply<true>(state, seeing, KDownRows{rows(L::kR, chunk)});
      CommitProducts();
      WaitForProducts<1>();
      Settle(dv);
      StoreTransposed(TileAddress(rows(L::kDs, chunk), 0, warp),
                      {Pair<T>::Round(dv[0][0], dv[0][1]), Pair<T>::Round(dv[1][0], dv[1][1]),
                       Pair<T>::Round(dv[0][2], dv[0][3]), Pair<T>::Round(dv[1][2], dv[1][3])});
      WaitForProducts<0>();
      Settle(state);
    }
  } else {
    keep(kFrameChunks - 1, x);
#pragma unroll 1
    for (int chunk = kFrameChunks - 1; chunk > 0; --chunk) {
      Left r;
      float f[2];
      LoadLeftTransposed(rows(L::kR, chunk), 0, warp, r);
      keep_first(chunk, r);
      row_factors(chunk, f);
      ScaleRows(f, state);
      BeginProducts();
      Multiply<true>(state, r, KDownRows{rows(L::kDy, chunk)});
      CommitProducts();
      WaitForProducts<0>();
      Settle(state);
      RoundPanel(state, x);
      keep(chunk - 1, x);
    }
  }

  // S by its columns, and all that is by channel.
  Accumulator<8>& s = state;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block)
    LoadLeftTransposed(shared + L::kS, 16 * block, warp, x[block]);
  Widen(x, s);
  const float* const u_of = floats(L::kU) + channel;
  float du[2] = {}, dw_sum[2] = {};
  const auto advance = [&](int chunk) {
    Left k;
    float f[2];
    LoadLeftTransposed(rows(L::kKh, chunk), 0, warp, k);
    row_factors(chunk, f);
    ScaleRows(f, s);
    BeginProducts();
    Multiply<true>(s, k, KDownRows{rows(L::kV, chunk)});
    CommitProducts();
    WaitForProducts<0>();
    Settle(s);
  };
#pragma unroll 1
  for (int chunk = 0; chunk < first_chunk; ++chunk) advance(chunk);
  __syncthreads();  // dr, dk and dw go where other warps have read

  // Adds to what is in place for the gradients of a chunk, channels as rows.
  const auto add_to = [&](int tile, int chunk, const Accumulator<2>& x) {
    const uint32_t at = TileAddressByRows(rows(tile, chunk), 0, warp);
    uint32_t there[4], rounded[4];
    LoadTransposed(at, there);
    ForEachPair([&](int n, int i, int e) {
      rounded[n] = Pair<T>::Round(Pair<T>::Low(there[n]) + x[i][e], Pair<T>::High(there[n]) + x[i][e + 1]);
    });
    StoreTransposed(at, rounded);
  };
  const auto d_of = [&](int chunk) { return floats(L::kD) + 16 * chunk + 2 * (lane % 4); };
  // From the gradient of the log decays that of w: in the form "exp" the slope is the log decay itself.
  const auto scale_by_slope = [&](const DecaySums& sums, Accumulator<2>& dw) {
    if (in.decay != Decay::kExp) return;
    ForEachElement([&](int i, int e) {
      dw[i][e] *= (sums.upto[i][e] - sums.before[i][e]) * (1.0f / kLog2E);
    });
  };
  const auto is_far = [&](int chunk) {
    return reinterpret_cast<const int*>(memory + L::kFar)[2 * chunk + warp / 2] != 0;
  };
  // What a chunk that decays too far lacks: all that needs r, k or pairs of its tokens.
  const auto add_far = [&](int chunk) {
    DecaySums sums;
    SumByChannel(decays, chunk, warp, marks_of(chunk).present, sums);
    FarPairs far = {};
    AddFarPairs(memory + L::kDa + chunk * kTileBytes, raw_of(chunk), channel, sums, far);
    ForEachElement([&](int i, int e) {
      const float d = d_of(chunk)[8 * i + e % 2], bonus = d * u_of[e / 2 * 8];
      du[e / 2] += d * far.r[i][e] * far.k[i][e];
      far.read[i][e] += bonus * far.k[i][e];
      far.written[i][e] += bonus * far.r[i][e];
      if constexpr (kConstant) dw_sum[e / 2] += far.spanning[i][e];
    });
    add_to(L::kR, chunk, far.read);
    add_to(L::kKb, chunk, far.written);
    if constexpr (!kConstant) {
      scale_by_slope(sums, far.spanning);
      add_to(L::kS, chunk, far.spanning);
    }
  };

#pragma unroll 1
  for (int own = 0; own < kOwnChunks; ++own) {
    const int chunk = first_chunk + own;
    const bool far = is_far(chunk);
    Accumulator<2> reads, writes, pairs;  // dY S + dA Kb, V dS and dA^T Rt, transposed
    float passing[2];             // exp(G_L) sum_v S dS
    float f[2];
    row_factors(chunk, f);
    const auto multiply = [&](auto clears) {
      constexpr bool kClears = decltype(clears)::value;
      const RowMarks marks = marks_of(chunk);
      Left before[kBlocks], r, k;
      RoundPanel(s, before);
      LoadLeftTransposed(rows(L::kR, chunk), 0, warp, r);
      LoadLeftTransposed(rows(L::kKb, chunk), 0, warp, k);
      if (far) k[0] = k[1] = k[2] = k[3] = 0u;
      BeginProducts();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block > 0)
          Multiply<true>(reads, before[block], KAlongRows{rows(L::kDy, chunk), block});
        else
          Multiply<false>(reads, before[block], KAlongRows{rows(L::kDy, chunk), block});
      }
      if constexpr (kClears) {
        CommitProducts();
        WaitForProducts<0>();
        Settle(reads);
        KeepTokens<2>(0, 0, marks.FirstCleared(), reads);
        BeginProducts();
      }
      Multiply<false>(pairs, r, PackedTiles{block_of(L::kDat, chunk)});
      Multiply<true>(reads, k, PackedTiles{block_of(L::kDa, chunk)});
      CommitProducts();
      WaitForProducts<0>();
      Settle(reads);
      Settle(pairs);
      Left after[kBlocks];
      recall(chunk, after);
      // Of all products of a channel with a channel the diagonal, which lane / 8 of four has.
      Accumulator<2> products = {};
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        AddTokenProducts(products, before[block], after[block]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float own = lane / 4 % 2 ? products[i][2 * i + 1] : products[i][2 * i];
        passing[i] = f[i] * __shfl_sync(~0u, own, (lane & ~3) | lane / 8);
      }
      BeginProducts();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (block > 0)
          Multiply<true>(writes, after[block], KAlongRows{rows(L::kV, chunk), block});
        else
          Multiply<false>(writes, after[block], KAlongRows{rows(L::kV, chunk), block});
      }
      CommitProducts();
      WaitForProducts<0>();
      Settle(writes);
      if constexpr (kClears) KeepTokens<2>(0, marks.LastCleared(), kTileTokens, writes);
    };
    if (marks_of(chunk).clears == 0)
      multiply(std::false_type());
    else
      multiply(std::true_type());
    if (own + 1 < kOwnChunks) advance(chunk);

    const RowMarks marks = marks_of(chunk);
    const uint32_t there = marks.present;
    const bool by_difference = far || marks.clears != 0;  // f is 0, or exp(-G) infinite
    DecaySums sums;
    SumByChannel(decays, chunk, warp, there, sums);
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = __shfl_sync(~0u, sums.upto[1][2 * i + 1], lane | 3);

    // Kh (V dS); Rt (dY S + dA Kb) - Kb (dA^T Rt), and the last of these.
    float written[2][4], net[2][4], own_pairs[2][4];
    const auto load = [&](int tile, float(&to)[2][4]) {
      uint32_t x[4];
      LoadTransposed(TileAddressByRows(rows(tile, chunk), 0, warp), x);
      ForEachPair([&](int n, int i, int e) {
        to[i][e] = Bf16::Low(x[n]), to[i][e + 1] = Bf16::High(x[n]);
      });
    };
    const auto stage = [&](int tile, const Accumulator<2>& x) {
      uint32_t rounded[4];
      Round<T>(x[0], x[1], rounded);
      StoreTransposed(TileAddressByRows(rows(tile, chunk), 0, warp), rounded);
    };
    load(L::kKh, written);
    float inverse[2][4];  // exp(-G)
    ForEachElement([&](int i, int e) {
      written[i][e] *= writes[i][e];
      inverse[i][e] = Exp2(-sums.upto[i][e]);
      writes[i][e] *= by_difference ? Exp2(total[e / 2] - sums.upto[i][e]) : f[e / 2] * inverse[i][e];
    });
    {
      float r[2][4], k[2][4];
      load(L::kR, r);
      load(L::kKb, k);
      ForEachElement([&](int i, int e) {
        net[i][e] = r[i][e] * reads[i][e];
        own_pairs[i][e] = far ? 0.0f : k[i][e] * pairs[i][e];
        net[i][e] -= own_pairs[i][e];
        reads[i][e] *= Exp2(sums.before[i][e]);
        if (far) return;
        r[i][e] *= Exp2(-sums.before[i][e]);
        k[i][e] *= Exp2(sums.upto[i][e]);
        const float d = d_of(chunk)[8 * i + e % 2], bonus = d * u_of[e / 2 * 8];
        du[e / 2] += d * r[i][e] * k[i][e];
        reads[i][e] += bonus * k[i][e];
        writes[i][e] += inverse[i][e] * pairs[i][e] + bonus * r[i][e];
      });
    }
    stage(L::kR, reads);
    stage(L::kKb, writes);

    Accumulator<2> dw;
    ForEachElement([&](int i, int e) { dw[i][e] = passing[e / 2] - own_pairs[i][e]; });
    AddSums(net, true, dw);
    AddSums(written, false, dw);
    if constexpr (kConstant) {
      ForEachElement([&](int i, int e) {
        if (there >> (8 * i + 2 * (lane % 4) + e % 2) & 1) dw_sum[e / 2] += dw[i][e];
      });
    } else {
      scale_by_slope(sums, dw);
      if (there != kAllRows)
        ForEachElement([&](int i, int e) {
          if ((there >> (8 * i + 2 * (lane % 4) + e % 2) & 1) == 0) dw[i][e] = 0.0f;
        });
      stage(L::kS, dw);
    }
  }
#pragma unroll 1
  for (int chunk = first_chunk; chunk < first_chunk + kOwnChunks; ++chunk) {
    if (is_far(chunk)) add_far(chunk);
  }

  // Sums over tokens: first those of each warpgroup.
  float* const sums = floats(L::kSums);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x[2] = {du[i], dw_sum[i]};
#pragma unroll
    for (int which = 0; which < (kConstant ? 2 : 1); ++which) {
      x[which] += __shfl_xor_sync(~0u, x[which], 1);
      x[which] += __shfl_xor_sync(~0u, x[which], 2);
      if (lane % 4 == 0)
        sums[(2 * group + which) * kHeadSize + channel + 8 * i] = x[which];
    }
  }
  __syncthreads();
  copier.ForEachPiece([&](uint32_t from, int64_t element, int row) {
    if (row >= copier.tokens) return;
    const auto emit = [&](int tile, T* out) {
      *reinterpret_cast<uint4*>(out + element) =
          *reinterpret_cast<const uint4*>(memory + tile + from);
    };
    emit(L::kR, in.dr);
    emit(L::kKb, in.dk);
    emit(L::kDs, in.dv);
    if constexpr (!kConstant) emit(L::kS, static_cast<T*>(in.dw));
  });
  if (threadIdx.x < kHeadSize) {
    // [B, frames, H, K]
    const int64_t to = static_cast<int64_t>(blockIdx.x) * kHeadSize + threadIdx.x;
    in.du[to] = sums[threadIdx.x] + sums[2 * kHeadSize + threadIdx.x];
    if constexpr (kConstant) {
      const float slope =
          in.decay == Decay::kExp ? floats(L::kConstant)[threadIdx.x] * (1.0f / kLog2E) : 1.0f;
      static_cast<float*>(in.dw)[to] =
          slope * (sums[kHeadSize + threadIdx.x] + sums[3 * kHeadSize + threadIdx.x]);
    }
  }
}

}  // namespace

int64_t Wkv6GradientSharedMemory() { return GradientLayout::kBytes; }

cudaError_t Wkv6Gradients(cudaStream_t stream, const Wkv6BackwardCall& call,
                          const uint4* gradients) {
  if (call.dims.tokens == 0) return cudaSuccess;
  const int64_t rows = call.sequences.Given() ? 1 : call.dims.batch;
  const int64_t blocks = rows * call.dims.saved * call.dims.heads;
  return ForHalfTypes<kHeadSize>(call.dtype, call.dims.head_size, [&](auto zero, auto) {
    using T = decltype(zero);
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    const auto out = [](void* x) { return static_cast<T*>(x); };
    const Frames<T> frames{in(call.r), in(call.k), in(call.v), in(call.dy), call.w, call.u,
                           out(call.dr), out(call.dk), out(call.dv), call.dw, call.du,
                           call.dims.tokens, static_cast<unsigned>(call.dims.heads),
                           static_cast<unsigned>(call.dims.saved), call.decay, call.marks,
                           call.sequences,
                           static_cast<const uint4*>(call.states), gradients};
    const auto launch = [&](auto kernel) {
      return Launch(kernel, static_cast<unsigned>(blocks), kThreads, GradientLayout::kBytes, stream,
                    frames);
    };
    return ForMarks(call.marks, [&](auto marked) {
      return call.constant_decay ? launch(GradientKernel<T, true, marked()>)
                                 : launch(GradientKernel<T, false, marked()>);
    });
  });
}

}  // namespace rwkv_jax::cuda
