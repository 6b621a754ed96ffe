// WKV6 on matrix units: the gradients of the inputs, from the state S before each chunk of 64 tokens,
// which the forward pass has saved, and the gradient dS of the state after it.
//
// Of heads of 64 a thread block has one head, or one head of one split of a sequence, and takes its
// chunks from the last to the first. It carries dS from chunk to chunk, in float.
//
// Of heads of 128 a block has 64 of the channels (keys) of one head of one chunk, since dR, dK, dlog d
// and du of other channels are independent of theirs. dV, which is a sum over keys, and dS after the
// chunk then come from the reverse scan (scan.cu). So all chunks run side by side.
//
// wkv6/decays.cuh has the recurrence, its sources, and the notation G, Rt, Kh, Kb and A of a tile
// of 16 tokens. The official backward kernel, kernel_backward_111 and kernel_backward_222 in
// RWKV-v5/cuda/wkv6_cuda.cu of RWKV-LM, computes the same gradients token by token.
//
// The equations. A chunk is four tiles. With S before a tile and dS after it,
//
//   dA  = tril_strict(dY V^T)      D = diag(dY V^T)
//   dRt = dY S + dA Kb             dR = exp(G') dRt + D u K
//   dKh = V dS    dKb = dA^T Rt    dK = exp(G_L - G) dKh + exp(-G) dKb + D u R
//   dV  = Kh dS^T + A^T dY         du = sum over tokens of D R K
//
// and from tile to tile S <- S diag(exp(G_L)) + V^T Kh and dS <- dS diag(exp(G_L)) + dY^T Rt.
//
// The decay of token t scales everything that passes token t, from a token before it to a token
// after it:
//
//   dlog d_t = exp(G_L) sum_v S dS + sum_{j < t} Kh dKh + sum_{i > t} Rt dRt - sum_{j >= t} Kb dKb.
//
// A pair of tokens that both come after t is in the third sum (by dA Kb) and in the fourth, and has
// to cancel. So both sums are computed from the same rounded factors.
//
// A tile that decays too far for Kb takes its products of tokens by tokens without it: A by halves
// (MultiplyByHalves), and the pairs of tokens in dR, dK, dlog d and du one by one (AddFarTile).
//
// Who does what. Most products are computed transposed, with channels as the rows. Then the result
// of one product is in registers as the left operand of the next one, and a sum over tokens runs
// along the rows, which are all in one warp. A warp has 16 rows of such a product, which are 16
// channels.
//
//   phase               warpgroup 0                      warpgroup 1
//   LoadOperands        all threads copy r, k, v, dy, w and S of the chunk to shared memory, and dS of
//                       heads of 128
//   ScaleOperands       Rt, Kh, Kb and A^T: each warp has    the same for the other half of the
//                       one tile and half the channels       channels
//   TokenProducts       dA and D: a tile for each warp       dA^T: a tile for each warp
//   ShareCarried        dS after the chunk, rounded          -
//   ValueGradients      dV of all tiles, from dS, and dS     -
//                       before the chunk
//   KeepStateGradients  -                                    dS after each tile, for both groups
//   AdvanceState        -                                    S before tile 2
//   main loop           dR, dK, dW and du of tiles 0, 1      dR, dK, dW and du of tiles 2, 3
//   AddFarTile          what far tiles lack, tiles 0, 1      what far tiles lack, tiles 2, 3
//   epilogue            all threads store the gradients to global memory
//
// Of heads of 128 there is no A, no ShareCarried and no ValueGradients. The states have 128 values, in two
// panels of 64, which are taken one after another from KeepStateGradients on: the main loop only adds up
// what each panel gives (AddStateProducts), and the gradients of the tiles follow.
//
// A multiprocessor has one block of floats. So that more warps hide each other's latency, that has a third
// warpgroup. It copies v and dy, and has TokenProducts of all tiles while the others scale operands, and then
// ValueGradients. It carries dS in its registers, and shares it with warpgroup 1 as floats.
//
// Who waits for whom. All threads meet at these barriers; there are no others. Of floats the third warpgroup is
// not at kCopied and kStateKept, and alone at kValuesCopied.
//
//   barrier           threads wait until all others have...   because next they...
//   kCopied           copied r, k, v, dy and w, and stored    scale tiles that others copied; put dS in
//                     the gradients of the last chunk         the place of dV (warpgroup 0)
//   kScaled           scaled tiles, and copied S and put      multiply the scaled operands; load dS
//                     dS in place
//   kStateTaken       loaded dS into registers (heads of 64)  put dV in its place (warpgroup 0)
//   kPanelDone        finished with dS of the first panel of  load dS of the second one; copy its S to
//                     values, and copied that of the second   the place of the dS before it
//   kStateCopied      copied S of the second panel            load it
//   kOperandsTaken    finished with Rt of all tiles and S,    put dR, dK and dW in the place of
//                     and kept dS after each tile; put dV     Rt, Kb and S; copy the next dS there;
//                     in place (floats)                       store dV as whole rows (floats)
//   kGradientsStaged  put gradients and sums in place, and    store them as whole rows, and copy the
//                     finished with the chunk                 chunk before it
//   kValuesCopied     copied v and dy (floats)                multiply them by each other
//   kStateKept        kept dS after each tile, and loaded S   load dS, and put dW in the place of S
//                     (floats)
#include "fragment.cuh"
#include "wkv6/decays.cuh"

namespace rwkv_jax::cuda {
namespace {

// A tile is also far if the tokens of a channel decay further than this on average, in log2. Where all of them
// forget so much, the gradients of their decays are as small as what rounding leaves of the pairs of tokens that
// cancel in them. Of floats less may be left.
template <typename T>
constexpr float kMaxMeanLog2 = std::is_same_v<T, float> ? 3.0f : 12.0f;
// With Decay::kExp floats may have no token that decays further than this, by whose slope the rest is multiplied. The
// second constant is the first one as a scaled log decay in float16.
constexpr float kMaxTokenLog2 = 6.0f;
constexpr uint32_t kMaxTokenBits = 0x6600;
static_assert(kMaxTokenLog2 * kLogScale == 1536.0f, "0x6600 is 1536");

constexpr int kThreads = 256;  // two warpgroups, to which floats add a third one
constexpr int kValueThreads = 128;
template <typename T>
constexpr int kAllThreads = kThreads + (kTermsOf<T> > 1 ? kValueThreads : 0);
constexpr int kTilesPerWarpgroup = kChunkTiles / 2;
// Whether dV is computed here, or by the reverse scan.
template <int N>
constexpr bool kHasValues = kPanels<N> == 1;
static_assert(kWordTokens == kTileTokens, "a word of marks says all about a tile");
// The pieces of 16 bytes in which a thread keeps its part of a state of 64 x 64 floats.
constexpr int kKeptPieces = 8;
// The blocks for which a multiprocessor has shared memory. A single one may have more registers.
constexpr int kBlocksPerMultiprocessor = kAmpleSharedMemory ? 2 : 1;

// In 32 bits, since divisions of 64 bits would cost more than all copies.
__device__ inline unsigned HeadsOf(const Wkv6Call& call) {
  return static_cast<unsigned>(call.dims.heads);
}

// Byte offsets in shared memory. Names say what is there in the main loop; a comment says what
// else. Floats have terms, but S and dS are floats as they come, and gradients as they are staged.
template <typename T, int N>
struct GradientLayout {
  static constexpr int kPanelBytes = kPanelTermsBytes<T>, kTileBytes = kTileTermsBytes<T>;
  // Panels of 64 tokens by 64 channels, or of a state.
  static constexpr int kR = 0;                               // r, then Rt, then dr
  static constexpr int kKh = kR + kPanelBytes;               // k, then Kh
  static constexpr int kKb = kKh + kPanelBytes;              // Kb, or k in a far tile; then dk
  static constexpr int kV = kKb + kPanelBytes;               // a panel for each panel of values
  static constexpr int kDy = kV + kPanels<N> * kPanelBytes;  // likewise
  static constexpr int kW = kDy + kPanels<N> * kPanelBytes;  // w, then scaled log decays
  // S and dS of a panel of values; those of the next panel change places.
  static constexpr int kS = kW + kPanelBytes;
  static constexpr int kDs = kS + kPanelBytes;          // then dv, where it is computed here
  static constexpr int kDw = kHasValues<N> ? kS : kDs;  // staged where S was last
  // Packed matrices of tokens by tokens, one for each tile. A^T, which only dv needs, is the sum of two
  // matrices, each over half of the channels.
  static constexpr int kAt = kDs + kPanelBytes;
  static constexpr int kDa = kAt + (kHasValues<N> ? 2 * kChunkTiles * kTileBytes : 0);
  static constexpr int kDat = kDa + kChunkTiles * kTileBytes;
  static constexpr int kFactors = kDat + kChunkTiles * kTileBytes;       // exp(G_L) of each tile
  static constexpr int kD = kFactors + kChunkTiles * kFactorFloats * 4;  // float [64 tokens]
  static constexpr int kU = kD + kChunkTokens * 4;                       // float [64 channels]
  static constexpr int kConstant = kU + kPanelCols * 4;                  // float [64 channels]
  static constexpr int kSums =
      kConstant + kPanelCols * 4;  // float [warpgroup][du, dw][64 channels]
  // dS after each tile, as left operands: a uint4 for each column tile and thread of a warpgroup. dS
  // after the last tile is the panel of dS, unless dv takes its place.
  static constexpr int kDsAfter = kSums + 4 * kPanelCols * 4;
  static constexpr int kBytes = kDsAfter + (kChunkTiles - !kHasValues<N>)*kPanelBytes;
  // Where a block cannot have so much, dS after the last tile goes to local memory.
  static constexpr int kLeastBytes =
      kHasValues<N> && kTermsOf<T> == 1 ? kBytes - kPanelBytes : kBytes;
};
static_assert(GradientLayout<__half, 64>::kLeastBytes <= kLeastSharedMemory);

// The barriers of the kernels in the order in which threads pass them; the table above says who
// waits for what. All are barrier 0, at which the warpgroups wait in different places: the name is for
// the reader.
enum Barrier {
  kCopied,
  kScaled,
  kStateTaken,
  kPanelDone,
  kStateCopied,
  kStateKept,
  kOperandsTaken,
  kGradientsStaged,
  kValuesCopied
};

template <typename T>
__device__ void WaitForAll(Barrier) {
  Synchronize(0, kAllThreads<T>);
}
// The first two warpgroups.
template <typename T>
__device__ void WaitForTwo(Barrier) {
  Synchronize(kTermsOf<T> > 1 ? 1 : 0, kThreads);
}
// The third warpgroup.
__device__ inline void WaitForValues(Barrier) { Synchronize(2, kValueThreads); }

// Calls fn(n, i, e) for each register n of a left operand, which has the elements (i, e) and (i, e
// + 1) of an Accumulator<2>.
template <typename Fn>
__device__ void ForEachPair(Fn&& fn) {
#pragma unroll
  for (int x = 0; x < 4; ++x) fn(x, x / 2, x % 2 * 2);
}

// Adds to each element the sum of x over the tokens, which are the columns, that come later, or
// sooner. The sums are products of x with ones. x is split into kParts of 10 bits each, as much
// as a product sees of an operand, so that nothing is lost that counts.
template <int kParts>
__device__ void AddSums(const Accumulator<2>& x, bool later, Accumulator<2>& sum) {
  // A left operand has the 8 columns of a half in another order: the even ones, and then the odd
  // ones.
  const int row = 2 * (Lane() % 4), col = Lane() / 4;
  const float even = (later ? row > col : row < col) ? 1.0f : 0.0f;
  const float odd = (later ? row + 1 > col : row + 1 < col) ? 1.0f : 0.0f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float parts[kParts][4];
    constexpr int kOrder[4] = {0, 2, 1, 3};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float rest = x[half][kOrder[i]];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        parts[part][i] =
            part + 1 < kParts ? __uint_as_float(__float_as_uint(rest) & 0xffffe000u) : rest;
        rest -= parts[part][i];
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      WarpMultiplyFloat(sum[half], parts[part], even, odd);
      if (later == (half == 1)) WarpMultiplyFloat(sum[1 - half], parts[part], 1.0f, 1.0f);
    }
  }
}

// 64 columns of a state as left operands.
template <typename T>
using StateOperand = Left[kColumnTiles][kTermsOf<T>];

// Widens them to the elements of an accumulator.
__device__ inline void Widen(const Left (&x)[kColumnTiles][1], Accumulator<8>& s) {
#pragma unroll
  for (int column = 0; column < kColumnTiles; ++column)
    ForEachPair([&](int n, int i, int e) {
      s[2 * column + i][e] = Bf16::Low(x[column][0][n]);
      s[2 * column + i][e + 1] = Bf16::High(x[column][0][n]);
    });
}

// s <- diag(factors) s, for the two rows that a lane has.
__device__ inline void ScaleRows(const float (&factors)[2], Accumulator<8>& s) {
  ForEachElement<8>([&](int half, int e) { s[half][e] *= factors[e / 2]; });
}

// The pairs of tokens of a far tile, which replace its products with Kb. Channels are rows, as in
// an Accumulator<2>.
struct FarPairs {
  float r[2][4], k[2][4];  // r and k themselves
  float passed[2][4];      // the log2 decays between a token and the token that reads
  float dr[2][4];          // sum over earlier tokens j of dA_ij k_j times the decay between i and j
  float dk[2][4];          // sum over later tokens i of dA_ij r_i times the decay between i and j
  float dlog[2][4];  // sum over the pairs of tokens j < t < i of r_i dA_ij k_j times that decay
};

// Loads r and k of a far tile and adds up its pairs of tokens, for the channels `channel` and
// channel + 8, whose log2 decays are `own_decays`. `da` points to the packed dA of the tile.
template <typename T>
__device__ void AddFarPairs(const unsigned char* da, const RawTile<T>& raw, int channel,
                            const float (&own_decays)[2][4], FarPairs& pairs) {
  // Opaque as in GoBack.
  const int lane = Opaque(Lane()), own = 2 * (lane % 4);
  ForEachElement<2>([&](int i, int e) {
    const int token = 8 * i + own + e % 2;
    const int64_t at = static_cast<int64_t>(token) * raw.stride + channel + e / 2 * 8;
    pairs.r[i][e] = raw.marks.present >> token & 1 ? ToFloat(raw.r[at]) : 0.0f;
    pairs.k[i][e] = raw.marks.present >> token & 1 ? ToFloat(raw.k[at]) : 0.0f;
  });
  // The element of any token in the row of this lane that `row` names, from the lane that has it.
  const auto of = [&](const float (&x)[2][4], int token, int row) {
    const float early = token % 2 ? x[0][2 * row + 1] : x[0][2 * row];
    const float late = token % 2 ? x[1][2 * row + 1] : x[1][2 * row];
    return __shfl_sync(~0u, token < 8 ? early : late, (lane & ~3) | token % 8 / 2);
  };
  // The loop takes one reading token i after another. A lane has four of the tokens j that have
  // written before token i.
#pragma unroll 1
  for (int i = 1; i < kTileTokens; ++i) {
    const unsigned char* const row_of_da = da + i / 8 * 256 + i % 8 * 16 + own * 2;
    float d[2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int term = 0; term < kTermsOf<T>; ++term) {
        const uint32_t pair =
            *reinterpret_cast<const uint32_t*>(row_of_da + 128 * half + kTileBytes * term);
        d[half][0] += Bf16::Low(pair), d[half][1] += Bf16::High(pair);
      }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float own_decay = of(own_decays, i, row), r = of(pairs.r, i, row);
      float sooner = 0.0f;  // what token i reads of the tokens in the halves before this one
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float read[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 8 * half + own + e, at = 2 * row + e;
          const float decayed = j < i ? d[half][e] * Exp2(pairs.passed[half][at]) : 0.0f;
          if (j < i) pairs.passed[half][at] += own_decay;
          pairs.dk[half][at] += decayed * r;
          read[e] = decayed * pairs.k[half][at];
        }
        float upto = read[0] + read[1];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const float last = __shfl_sync(~0u, upto, lane < step ? 0 : lane - step);
          if (lane % 4 >= step) upto += last;
        }
        const float last = __shfl_sync(~0u, upto, lane == 0 ? 0 : lane - 1);
        const float passed = lane % 4 > 0 ? sooner + last : sooner;
        if (8 * half + own < i) pairs.dlog[half][2 * row] += r * passed;
        if (8 * half + own + 1 < i) pairs.dlog[half][2 * row + 1] += r * (passed + read[0]);
        sooner += __shfl_sync(~0u, upto, lane | 3);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (8 * (e / 2) + own + e % 2 == i) pairs.dr[e / 2][2 * row + e % 2] = sooner;
    }
  }
}

// One tile, with channels as rows.
struct TileGradients {
  Accumulator<2> drt, dkh, dkb;
  float crossing[2];  // exp(G_L) sum_v S dS of the two channels of a lane
};

// One tile, with channels as rows: Rt and Kb, or k in place of Kb if the tile is far.
struct TileInputs {
  float r[2][4], k[2][4];
};

// The products of which dlog d is a sum over tokens.
struct DecayTerms {
  Accumulator<2> kh_dkh, net, kb_dkb;  // net = Rt dRt - Kb dKb
};

// Sums over the tokens of a thread for its two channels.
struct ParameterSums {
  float du[2] = {}, dw[2] = {};
};

// The phases of the kernel, and what a thread keeps through all of them. Each phase runs in the
// registers of the caller: functions are inlined, and a thread has 128 registers, all of which are
// in use.
template <typename T, int N, bool kConstant, bool kMarked>
struct ChunkGradients {
  using L = GradientLayout<T, N>;
  static constexpr int kTerms = kTermsOf<T>;
  using StateOperand = cuda::StateOperand<T>;

  const Wkv6BackwardCall& call;
  // Of heads of 128, dS after each chunk in global memory; of 64, kKeptPieces of the local memory of
  // this thread, where dS after the last tile is, too, if there is too little shared memory.
  uint4* const ds_memory;
  const bool keeps_last_ds_there;
  unsigned char* const memory;
  const uint32_t shared;  // the address of `memory`
  const int warp, warpgroup;
  int lane;
  const int64_t head;  // in [S, H]
  unsigned saved;      // of heads of 64, the chunk in [B, N, H]
  ChunkCopier<kThreads> copier;
  const uint32_t* marks;  // a word for each tile, in global memory
  const ChunkDecays<T, kConstant> decays;
  const int
      channel;  // the first channel of a lane in products with channels as rows; + 8 is the second

  // `index` counts the chunks of the sequence, which starts at `span`.
  __device__ ChunkGradients(const Wkv6BackwardCall& call, uint4* ds_memory,
                            bool keeps_last_ds_there, unsigned char* memory, int sequence,
                            unsigned own_head, const Span& span, int64_t index)
      : call(call),
        ds_memory(ds_memory),
        keeps_last_ds_there(keeps_last_ds_there),
        memory(memory),
        shared(SharedAddress(memory)),
        warp(Warp() % 4),
        warpgroup(Warp() / 4),
        lane(Lane()),
        head(static_cast<int64_t>(sequence) * HeadsOf(call) + own_head),
        saved(static_cast<unsigned>(span.first_chunk + index) * HeadsOf(call) + own_head),
        copier(CopierOf(call, sequence, own_head, span, index)),
        marks(kMarked ? call.marks.words + sequence * call.marks.per_row + index * kChunkTiles
                      : nullptr),
        decays{shared + L::kW, Floats(L::kConstant), call.decay},
        channel(16 * warp + lane / 4) {}

  static __device__ ChunkCopier<kThreads> CopierOf(const Wkv6BackwardCall& call, int sequence,
                                                   unsigned own_head, const Span& span,
                                                   int64_t index) {
    const int64_t first_token = index * kChunkTokens, left = span.tokens - first_token;
    return {
        ((span.first_token + first_token) * HeadsOf(call) + own_head) * N + FirstChannel(),
        static_cast<int>(HeadsOf(call)) * N,
        static_cast<int>(left < kChunkTokens ? left : kChunkTokens),
        (HasMarks<T, kMarked>(call.marks) ? ChunkMarks(call.marks, sequence, index) : ChunkMarks())
            .absent};
  }

  // Goes on to the chunk before this one. Opaque, or else what follows from the lane would be computed once
  // for all chunks, and there are no registers to keep it.
  __device__ void GoBack() {
    lane = Opaque(lane);
    saved -= HeadsOf(call);
    copier.first -= static_cast<int64_t>(kChunkTokens) * copier.stride;
    copier.tokens = kChunkTokens;
    if (HasMarks<T, kMarked>(call.marks)) {
      marks -= kChunkTiles;
      copier.absent = ChunkMarks(*reinterpret_cast<const uint4*>(marks)).absent;
    }
  }

  // --- Where things are.

  // The first of the 64 channels (keys) of the head that this block has.
  static __device__ int FirstChannel() {
    return kPanels<N> == 1 ? 0 : static_cast<int>(blockIdx.x % kPanels<N>) * kPanelCols;
  }
  static constexpr int kStateRowPieces = kTerms * N / 8;
  // The state of the chunk, in pieces of 16 bytes.
  __device__ int64_t ChunkState() const {
    return (kHasValues<N> ? saved : blockIdx.x / kPanels<N>)*int64_t{N * kStateRowPieces};
  }
  __device__ float* Floats(int at) const { return reinterpret_cast<float*>(memory + at); }
  // The rows of a panel that are the tokens of a tile.
  __device__ uint32_t Rows(int panel, int tile) const {
    return shared + panel + tile * kTileStride;
  }
  // Matrix number `index` of an array of packed matrices of tokens by tokens.
  __device__ uint32_t Packed(int at, int index) const {
    return shared + at + index * L::kTileBytes;
  }
  __device__ float* FactorsOf(int tile) const { return Floats(L::kFactors) + tile * kFactorFloats; }
  __device__ int FirstTile() const { return warpgroup * kTilesPerWarpgroup; }
  __device__ ChunkCopier<kValueThreads> ValueCopier() const {
    return {copier.first, copier.stride, copier.tokens, copier.absent};
  }
  // D of the tokens that a lane has as columns of an accumulator.
  __device__ const float* DOf(int tile) const {
    return Floats(L::kD) + kTileTokens * tile + 2 * (lane % 4);
  }
  // u of the two channels of a lane, the second one at [8].
  __device__ const float* BonusOf() const { return Floats(L::kU) + channel; }
  // Whether the tile is far by half of its channels: where its factors leave room.
  __device__ float& FarByHalf(int tile, int half) const {
    return FactorsOf(tile)[kFactorStride - 1 - half];
  }
  __device__ bool IsFar(int tile) const { return FarByHalf(tile, warp / 2) != 0.0f; }
  // Marks are read again wherever they are needed: there are no registers to keep them.
  __device__ RowMarks MarksOf(int tile) const {
    return RowMarks(HasMarks<T, kMarked>(call.marks) ? marks[tile] : 0u,
                    copier.tokens - kTileTokens * tile);
  }
  // Opaque for the same reason as in GoBack: far tiles alone need rows of the stride.
  __device__ RawTile<T> RawTileOf(int tile) const {
    const int64_t first = copier.first + static_cast<int64_t>(kTileTokens * tile) * copier.stride;
    return {static_cast<const T*>(call.r) + first, static_cast<const T*>(call.k) + first,
            Opaque(copier.stride), MarksOf(tile)};
  }
  // exp(G_L) of the two channels of a lane.
  __device__ void LoadRowFactors(int tile, float (&factors)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      factors[i] = FactorsOf(tile)[lane / 8 * kFactorStride + 4 * warp + 2 * i + lane / 4 % 2];
  }
  // Clears the tokens of a left operand that do not see the state before the tile.
  __device__ void KeepReadersOfState(int tile, Left (&tokens)[kTerms]) const {
    if (const RowMarks marks = MarksOf(tile); marks.clears != 0)
#pragma unroll
      for (Left& term : tokens) KeepTokens(0, marks.FirstCleared(), term);
  }
  // Local memory that the compiler cannot put into registers.
  __device__ uint4* Kept() const { return ds_memory + Opaque(0); }
  // Calls fn(at, stride) with the place of dS after a tile, as this thread and the thread of the other
  // warpgroup at the same place have it: shared memory or, of the last tile, which warpgroup 1 alone
  // needs, perhaps local memory.
  template <typename Fn>
  __device__ void WithStateGradientAfter(int tile, Fn&& fn) const {
    if (kHasValues<N> && tile == kChunkTiles - 1 && keeps_last_ds_there)
      fn(Kept(), 1);
    else
      fn(reinterpret_cast<uint4*>(memory + L::kDsAfter + tile * L::kPanelBytes) + threadIdx.x % 128,
         128);
  }
  __device__ void KeepStateGradient(int tile, const StateOperand& x) const {
    WithStateGradientAfter(tile, [&](uint4* at, int stride) {
#pragma unroll
      for (int i = 0; i < kColumnTiles * kTerms; ++i) {
        const Left& four = x[i / kTerms][i % kTerms];
        at[stride * i] = {four[0], four[1], four[2], four[3]};
      }
    });
  }
  __device__ void RecallStateGradient(int tile, StateOperand& x) const {
    WithStateGradientAfter(tile, [&](const uint4* at, int stride) {
#pragma unroll
      for (int i = 0; i < kColumnTiles * kTerms; ++i) {
        const uint4 four = at[stride * i];
        Left& to = x[i / kTerms][i % kTerms];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
      }
    });
  }
  // The tokens of a tile by the 16 channels of a warp: where a lane points, for matrices with
  // channels as rows.
  __device__ uint32_t ByChannel(int panel, int tile) const {
    return TileAddressByRows(Rows(panel, tile), 0, warp);
  }
  __device__ void LoadByChannel(int panel, int tile, float (&to)[2][4]) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      uint32_t x[4];
      LoadTransposed(ByChannel(panel, tile) + term * kPanelBytes, x);
      ForEachPair([&](int n, int i, int e) {
        const float low = Bf16::Low(x[n]), high = Bf16::High(x[n]);
        to[i][e] = term == 0 ? low : to[i][e] + low;
        to[i][e + 1] = term == 0 ? high : to[i][e + 1] + high;
      });
    }
  }
  // Loads the 16 channels of a warp of a tile as a left operand.
  __device__ void LoadLeftByChannel(int panel, int tile, Left (&x)[kTerms]) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadLeftTransposed(Rows(panel, tile) + term * kPanelBytes, 0, warp, x[term]);
  }
  // Rounds gradients of a tile and puts them where the epilogue takes them from.
  __device__ void Stage(int panel, int tile, const Accumulator<2>& x) const {
    if constexpr (kTerms > 1) {
      StoreFloats(shared + panel, tile, warp, x);
    } else {
      uint32_t rounded[4];
      Round<T>(x[0], x[1], rounded);
      StoreTransposed(ByChannel(panel, tile), rounded);
    }
  }
  // Adds to gradients that are staged already.
  __device__ void AddToStaged(int panel, int tile, const Accumulator<2>& x) const {
    if constexpr (kTerms > 1) {
      Accumulator<2> sum;
      LoadFloats(shared + panel, tile, warp, sum);
      ForEachElement<2>([&](int i, int e) { sum[i][e] += x[i][e]; });
      StoreFloats(shared + panel, tile, warp, sum);
    } else {
      uint32_t staged[4], rounded[4];
      LoadTransposed(ByChannel(panel, tile), staged);
      ForEachPair([&](int n, int i, int e) {
        rounded[n] = Pair<T>::Round(Pair<T>::Low(staged[n]) + x[i][e],
                                    Pair<T>::High(staged[n]) + x[i][e + 1]);
      });
      StoreTransposed(ByChannel(panel, tile), rounded);
    }
  }

  // --- Prologue.

  // All threads start to copy the operands of the chunk, and then S, and dS of heads of 128, in two
  // groups of copies.
  __device__ void LoadOperands() const {
    if constexpr (!kConstant) copier.Copy(shared + L::kW, static_cast<const T*>(call.w));
    copier.Copy(shared + L::kR, static_cast<const T*>(call.r));
    copier.Copy(shared + L::kKh, static_cast<const T*>(call.k));
#pragma unroll
    for (int p = 0; p < (kTerms > 1 ? 0 : kPanels<N>); ++p) {
      const int offset = kPanels<N> == 1 ? 0 : p * kPanelCols - FirstChannel();
      copier.Copy(shared + L::kV + p * L::kPanelBytes, static_cast<const T*>(call.v), offset);
      copier.Copy(shared + L::kDy + p * L::kPanelBytes, static_cast<const T*>(call.dy), offset);
    }
    CommitCopies();
    CopyStates(0, [&](uint32_t to, int64_t from) {
      CopyAsync(to + L::kS, static_cast<const uint4*>(call.states) + from, true);
      if constexpr (!kHasValues<N>) CopyAsync(to + L::kDs, ds_memory + from, true);
    });
  }

  // The third warpgroup of floats copies v and dy.
  __device__ void LoadValues() const {
    ValueCopier().Copy(shared + L::kV, static_cast<const T*>(call.v));
    ValueCopier().Copy(shared + L::kDy, static_cast<const T*>(call.dy));
    CommitCopies();
  }

  // Lets L2 fetch what will be copied of the chunk before this one: a thread has 32 bytes of each array, or of
  // floats 64.
  __device__ void FetchChunkBefore() const {
    static_assert(kThreads * 32 == kPanelBytes && kHasValues<N>);
    const int row = threadIdx.x / 4 - kChunkTokens, col = threadIdx.x % 4 * 16;
    const int64_t at = copier.first + static_cast<int64_t>(row) * copier.stride + col;
    const uint4* const states = static_cast<const uint4*>(call.states) + ChunkState() -
                                HeadsOf(call) * int64_t{N * kStateRowPieces};
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const int64_t own = at + 16 / kTerms * term;
      for (const void* const array : {call.r, call.k, call.v, call.dy})
        Prefetch(static_cast<const T*>(array) + own);
      if constexpr (!kConstant) Prefetch(static_cast<const T*>(call.w) + own);
      Prefetch(states + 2 * (kTerms * threadIdx.x + term));
    }
  }

  // Starts to copy the rows of the states of a panel of values, and the columns of this block, as a group
  // of copies. Calls copy(bytes from the start of a panel, piece of an array) for each piece of this
  // thread.
  template <typename Copy>
  __device__ void CopyStates(int panel, Copy&& copy) const {
    constexpr int kRows = kThreads / 8;
    const int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    const uint32_t to = PieceAddress(shared, row, piece);
    const int64_t from = ChunkState() + panel * kPanelCols * kStateRowPieces + FirstChannel() / 8 +
                         threadIdx.x + row * (kStateRowPieces - 8);
#pragma unroll
    for (int i = 0; i < kPanelCols / kRows; ++i)
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        // Of floats as ForEachPiece.
        const int behind = kTerms == 1 ? 0 : piece / 2 * 2 + 2 * term;
        copy(to + i * kRows * kRowBytes + term * kPanelBytes,
             from + i * kRows * kStateRowPieces + behind);
      }
    CommitCopies();
  }

  // Start to copy dS, and then S, of the next panel of values, each to where the other was.
  __device__ void LoadNextStateGradient(int panel) const {
    CopyStates(panel, [&](uint32_t to, int64_t from) {
      CopyAsync(to + GradientPanel(panel), ds_memory + from, true);
    });
  }
  __device__ void LoadNextState(int panel) const {
    CopyStates(panel, [&](uint32_t to, int64_t from) {
      CopyAsync(to + StatePanel(panel), static_cast<const uint4*>(call.states) + from, true);
    });
  }

  // One thread for each channel brings u, and the decay if all tokens have the same, and clears the sums
  // over tokens.
  __device__ void LoadParameters() const {
    const int64_t first = head * N + FirstChannel();
    if constexpr (kConstant) LoadConstantDecays<kPanelCols>(call, first, Floats(L::kConstant));
    if (threadIdx.x >= kPanelCols) return;
    Floats(L::kU)[threadIdx.x] = call.u[first + threadIdx.x];
#pragma unroll
    for (int i = 0; i < 4; ++i) Floats(L::kSums)[i * kPanelCols + threadIdx.x] = 0.0f;
  }

  // Each thread waits for the operands that it has copied. v and dy are used as they are, so they
  // have to be bfloat16.
  __device__ void WaitForOperands() const {
    WaitForCopies<1>();
    if constexpr (kTerms == 1) ConvertValues<kThreads>();
  }
  template <int kCopyThreads>
  __device__ void ConvertValues() const {
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p) {
      ConvertOwnPieces<T, kCopyThreads>(memory + L::kV + p * L::kPanelBytes);
      ConvertOwnPieces<T, kCopyThreads>(memory + L::kDy + p * L::kPanelBytes);
    }
  }

  // Each thread waits for what it has copied of S and dS, and lets products see all that it has
  // stored.
  __device__ void WaitForStates() const {
    WaitForCopies<0>();
    PublishOperands();
  }

  // --- Scaling: each warp has the tile of its number, and its warpgroup half of the channels.

  static constexpr int kHalfColumns = kColumnTiles / 2;

  // Sums the log decays of the tile (G and G'), stores scaled log decays in place of w, and returns
  // whether the tile is far.
  __device__ bool SumDecays(int tile, uint32_t present, DecaySums (&sums)[kHalfColumns]) const {
    bool far = false;
    const float most = fminf(kMaxTileLog2, kMaxMeanLog2<T> * static_cast<float>(__popc(present)));
#pragma unroll
    for (int i = 0; i < kHalfColumns; ++i) {
      const int column = warpgroup * kHalfColumns + i;
      if constexpr (kConstant) {
        SumByToken(decays, tile, column, present, sums[i]);
      } else {
        uint32_t log_decays[kTerms][4];
        decays.Load(tile, column, present, log_decays);
        SumByToken(log_decays, sums[i]);
        if constexpr (kTerms > 1) {
          // Without their signs float16s compare as integers.
#pragma unroll
          for (int e = 0; e < 4; ++e)
            far |=
                call.decay == Decay::kExp && ((log_decays[0][e] & 0x7fffu) > kMaxTokenBits ||
                                              (log_decays[0][e] >> 16 & 0x7fffu) > kMaxTokenBits);
          __syncwarp();  // all lanes have read what others overwrite
        }
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
          StoreTransposed(TileAddress(decays.w_panel + term * kPanelBytes, 16 * tile, column),
                          log_decays[term]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) far |= !(sums[i].upto[e / 2][2 + e % 2] >= -most);
    }
    return __any_sync(~0u, far);
  }

  // Stores exp(G_L), Rt, Kh and Kb of 16 channels, and adds their share of Rt Kb^T to `a` and of R
  // (u K)^T to `bonus`, which only dV needs. In a far tile k itself is stored in place of Kb, and `a`
  // gets nothing useful.
  __device__ void ScaleColumn(int tile, int column, bool far, const RowMarks& marks,
                              const DecaySums& sums, Accumulator<2>& a,
                              Accumulator<2>& bonus) const {
    const bool clears = marks.clears != 0;
    const float* const u = Floats(L::kU);
    float total[2][2];
    LastRow(sums, total);
    const float factor[2][2] = {{Exp2(total[0][0]), Exp2(total[0][1])},
                                {Exp2(total[1][0]), Exp2(total[1][1])}};
    StoreFactors(column, factor, clears, FactorsOf(tile));
    Two<T> r[4], k[4];
    LoadTile<T>(shared + L::kR, tile, column, r);
    LoadTile<T>(shared + L::kKh, tile, column, k);
    if constexpr (kHasValues<N>) {
      const auto u_of = [&](int n) {
        const float* const pair = u + 16 * column + n / 2 * 8 + 2 * (Lane() % 4);
        if constexpr (kTerms > 1)
          return float2{pair[0], pair[1]};
        else
          return Bf16::Round(pair[0], pair[1]);
      };
      AddBonus<T>(r, k, u_of, bonus);
    }
    Left rt[kTerms], kh[kTerms], kb[kTerms];
    if (far) {
      ScaleTile<T>(k, [&](int i, int j) { return Exp2(sums.ToEnd<T>(i, j, total[i][j % 2])); }, kh);
      ScaleTile<T>(k, [](int, int) { return 1.0f; }, kb);
    } else {
      ScaleTile<T>(k, [&](int i, int j) { return Exp2(-sums.upto[i][j]) * factor[i][j % 2]; }, kh);
      ScaleTile<T>(k, [&](int i, int j) { return Exp2(-sums.upto[i][j]); }, kb);
    }
    if (clears) KeepRowsBetween(marks.LastCleared(), kTileTokens, kh);
    StoreTile(shared + L::kKh, tile, column, kh);
    StoreTile(shared + L::kKb, tile, column, kb);
    ScaleTile<T>(r, [&](int i, int j) { return Exp2(sums.before[i][j]); }, rt);
    StoreTile(shared + L::kR, tile, column, rt);
    if constexpr (kHasValues<N>) AddTokenProducts(a, rt, kb);
  }

  // Leaves exp(G_L), Rt, Kh, Kb, whether the tile is far, and the share of A^T that these channels
  // have. Needs the copied r, k and w.
  __device__ void ScaleOperands() const {
    const int tile = warp, first_column = warpgroup * kHalfColumns;
    const RawTile<T> raw = RawTileOf(tile);
    DecaySums sums[kHalfColumns];
    const bool far = SumDecays(tile, raw.marks.present, sums);
    if (Lane() == 0) FarByHalf(tile, warpgroup) = far ? 1.0f : 0.0f;
    Accumulator<2> a = {}, bonus = {};
#pragma unroll
    for (int i = 0; i < kHalfColumns; ++i)
      ScaleColumn(tile, first_column + i, far, raw.marks, sums[i], a, bonus);
    if constexpr (!kHasValues<N>) return;
    if (far) {
      ChunkDecays<T, kConstant> converted = decays;
      converted.converted = true;
      MultiplyByHalves(converted, tile, raw, first_column, first_column + kHalfColumns, a);
    }
    StoreScores<T, true>(raw.marks, bonus, a, Packed(L::kAt, 2 * tile + warpgroup));
  }

  // Leaves dA and D of the tile (left is dY, right is V), or dA^T (left is V, right is dY). Needs the
  // copied v and dy.
  __device__ void TokenProducts(int left, int right, int to) const {
    const int tile = warp;
    const RowMarks marks = MarksOf(tile);
    const bool below = to == L::kDa;  // dA is below the diagonal, and dA^T above it
    Accumulator<2> da = {};
#pragma unroll
    for (int i = 0; i < kPanels<N> * kColumnTiles; ++i) {
      const int at = i / kColumnTiles * L::kPanelBytes, column = i % kColumnTiles;
      Left x[kTerms], y[kTerms];
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const int from = at + term * kPanelBytes;
        LoadMatrices(TileAddress(shared + left + from, 16 * tile, column), x[term]);
        LoadMatrices(TileAddressByRows(shared + right + from, 16 * tile, column), y[term]);
      }
      const auto add = [&](const Left& x, const uint32_t (&y)[4]) {
        WarpMultiply(da[0], x, y[0], y[1]);
        WarpMultiply(da[1], x, y[2], y[3]);
      };
      // In the same order: where pairs of tokens cancel, dA and dA^T have to be the same.
      ForProducts<kTerms>([&](int i, int j) {
        if (below)
          add(x[i], y[j]);
        else
          add(x[j], y[i]);
      });
    }
    float* const d = Floats(L::kD) + kTileTokens * tile;
    const int row = Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (below && row == col + e) {
        d[row] = da[0][e];
        d[row + 8] = da[1][2 + e];
      }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = row + e / 2 * 8, j = col + 8 * half + e % 2;
        if (below ? i <= j : i >= j) da[half][e] = 0.0f;
        if (marks.clears != 0 && (below ? j < marks.SegmentBegin(i) : i < marks.SegmentBegin(j)))
          da[half][e] = 0.0f;
      }
    Left rounded[kTerms];
    Round(da[0], da[1], rounded);
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      StoreMatrices(PackedTileAddress(Packed(to, tile) + term * kTileBytes), rounded[term]);
  }

  // --- The gradient of the state, from the last tile to the first.

  // The panels of S and dS of a panel of values.
  static __device__ int StatePanel(int panel) { return panel % 2 == 0 ? L::kS : L::kDs; }
  static __device__ int GradientPanel(int panel) { return panel % 2 == 0 ? L::kDs : L::kS; }

  // Loads a panel of a state of bfloat16 with its columns (keys) as rows.
  __device__ void LoadPanelTransposed(int at, StateOperand& x) const {
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      LoadLeftTransposed(shared + at, 16 * column, warp, x[column][0]);
  }
  // The same, also of floats, and rounded.
  __device__ void LoadStatePanel(int at, StateOperand& x, Accumulator<8>& s) const {
    if constexpr (kTerms > 1) {
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column)
        LoadFloats(shared + at, column, warp, &s[2 * column]);
      RoundPanel(s, x);
    } else {
      LoadPanelTransposed(at, x);
      Widen(x, s);
    }
  }

  // Warpgroup 0 keeps dS with its rows (values) as rows from chunk to chunk, for there are no registers
  // to carry it.
  __device__ void KeepCarried(const Accumulator<8>& ds) const {
    uint4* const at = Kept();
#pragma unroll
    for (int i = 0; i < kKeptPieces; ++i)
      at[i] = {__float_as_uint(ds[i][0]), __float_as_uint(ds[i][1]), __float_as_uint(ds[i][2]),
               __float_as_uint(ds[i][3])};
  }
  __device__ void RecallCarried(Accumulator<8>& ds) const {
    const uint4* const at = Kept();
#pragma unroll
    for (int i = 0; i < kKeptPieces; ++i) {
      const uint4 four = at[i];
      ds[i][0] = __uint_as_float(four.x), ds[i][1] = __uint_as_float(four.y);
      ds[i][2] = __uint_as_float(four.z), ds[i][3] = __uint_as_float(four.w);
    }
  }
  // Leaves dS after the chunk, rounded or as floats, to warpgroup 1, which has its columns (keys) as rows.
  __device__ void ShareCarried(const Accumulator<8>& ds) const {
    if constexpr (kTerms > 1) {
      ForEachElement<8>([&](int fragment, int e) {
        const uint32_t at = FloatOfTile(shared + L::kDs, warp, fragment / 2, lane / 4 + e / 2 * 8,
                                        fragment % 2 * 8 + 2 * (lane % 4) + e % 2);
        StoreWord(at, __float_as_uint(ds[fragment][e]));
      });
    } else {
      StateOperand x;
      RoundPanel(ds, x);
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column)
        StoreMatrices(TileAddress(shared + L::kDs, 16 * warp, column), x[column][0]);
    }
  }

  __device__ void LoadStateGradient(int panel, StateOperand& x, Accumulator<8>& ds) const {
    LoadStatePanel(GradientPanel(panel), x, ds);
  }

  // Stages dV = Kh dS^T + A^T dY of each tile, and moves dS on. Computes dV^T, in
  // which the values are rows.
  __device__ void ValueGradients(Accumulator<8>& ds) const {
#pragma unroll 1
    for (int tile = kChunkTiles - 1; tile >= 0; --tile) {
      Left dy[kTerms], seeing[kTerms];
      LoadLeftByChannel(L::kDy, tile, dy);
#pragma unroll
      for (int i = 0; i < 4 * kTerms; ++i) seeing[i / 4][i % 4] = dy[i / 4][i % 4];
      Accumulator<2> dv;
      StateOperand after;
      KeepReadersOfState(tile, seeing);
      RoundPanel(ds, after);
      ScaleColumns(FactorsOf(tile), ds);
      constexpr bool kApart = kTerms > 1 || !kMarked;  // marks leave too few registers
      Accumulator<8> of_tile;
      Accumulator<8>& sum = kApart ? of_tile : ds;
      BeginProducts();
      Multiply<false>(dv, dy, PackedTiles{Packed(L::kAt, 2 * tile)}, kTileBytes);
      Multiply<true>(dv, dy, PackedTiles{Packed(L::kAt, 2 * tile + 1)}, kTileBytes);
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column)
        Multiply<true>(dv, after[column], KAlongRows{Rows(L::kKh, tile), column}, kPanelBytes);
      CommitProducts();
      Multiply<!kApart>(sum, seeing, KDownRows{Rows(L::kR, tile)}, kPanelBytes);
      CommitProducts();
      WaitForProducts<1>();
      Settle(dv);
      Stage(L::kDs, tile, dv);
      Finish(sum);
      if constexpr (kApart) AddTile(of_tile, ds);
    }
  }

  // What a tile adds to a state is summed apart, where registers allow it: to add it while the state is scaled takes
  // fewer instructions than to bring the state to where the product has its sum, and back.
  __device__ void AddTile(const Accumulator<8>& of_tile, Accumulator<8>& s) const {
    ForEachElement<8>([&](int fragment, int e) { s[fragment][e] += of_tile[fragment][e]; });
  }
  // s += x y over the tokens of a tile, at once.
  __device__ void AddProduct(const Left (&x)[kTerms], const KDownRows& y, Accumulator<8>& s) const {
    constexpr bool kApart = kTerms > 1 || kHasValues<N>;
    Accumulator<8> of_tile;
    Accumulator<8>& sum = kApart ? of_tile : s;
    BeginProducts();
    Multiply<!kApart>(sum, x, y, kPanelBytes);
    CommitProducts();
    Finish(sum);
    if constexpr (kApart) AddTile(of_tile, s);
  }

  // Warpgroup 1: keeps dS^T after each tile in shared memory, rounded, and moves dS on. `rounded`
  // is dS after the chunk.
  __device__ void KeepStateGradients(int panel, StateOperand& rounded, Accumulator<8>& ds) const {
    if constexpr (kHasValues<N>) KeepStateGradient(kChunkTiles - 1, rounded);
#pragma unroll 1
    for (int tile = kChunkTiles - 1; tile > 0; --tile) {
      Left r[kTerms];
      float factors[2];
      LoadLeftByChannel(L::kR, tile, r);
      KeepReadersOfState(tile, r);
      LoadRowFactors(tile, factors);
      ScaleRows(factors, ds);
      AddProduct(r, KDownRows{Rows(L::kDy + panel * L::kPanelBytes, tile)}, ds);
      RoundPanel(ds, rounded);
      KeepStateGradient(tile - 1, rounded);
    }
  }

  // --- The state, from the first tile to the last. Both warpgroups have S^T, with keys as rows.

  __device__ void LoadState(int panel, StateOperand& x, Accumulator<8>& s) const {
    LoadStatePanel(StatePanel(panel), x, s);
  }

  // S <- S diag(exp(G_L)) + V^T Kh: from the state before a tile to that after it.
  __device__ void AdvanceState(int panel, int tile, Accumulator<8>& s) const {
    Left k[kTerms];
    float factors[2];
    LoadLeftByChannel(L::kKh, tile, k);
    LoadRowFactors(tile, factors);
    ScaleRows(factors, s);
    AddProduct(k, KDownRows{Rows(L::kV + panel * L::kPanelBytes, tile)}, s);
  }

  // --- Main loop: the gradients of one tile. A warp has 16 channels, and its warpgroup has all.

  // exp(G_L) sum_v S dS, of the two channels of a lane.
  __device__ void Crossing(const StateOperand& before, const StateOperand& after,
                           const float (&factors)[2], float (&crossing)[2]) const {
    // Only the diagonal is needed of the products of all channels with all channels. Lane / 8 of
    // the four lanes of a row has it.
    Accumulator<2> products = {};
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      AddTokenProducts<true>(products, before[column], after[column]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float own = lane / 4 % 2 ? products[i][2 * i + 1] : products[i][2 * i];
      crossing[i] = factors[i] * __shfl_sync(~0u, own, (lane & ~3) | lane / 8);
    }
  }

  // Rt and Kb of a tile as left operands, Kb as 0 if the tile is far.
  __device__ void LoadTokenOperands(int tile, bool far, Left (&r)[kTerms],
                                    Left (&k)[kTerms]) const {
    LoadLeftByChannel(L::kR, tile, r);
    LoadLeftByChannel(L::kKb, tile, k);
    if (far)
#pragma unroll
      for (Left& term : k) term[0] = term[1] = term[2] = term[3] = 0u;
  }
  // dKb = dA^T Rt and dRt = dA Kb, or dRt += dA Kb if kAdd. The terms of floats have all their products here: with
  // fewer of them, pairs of tokens would not cancel in dlog d.
  template <bool kAdd>
  __device__ void MultiplyTokens(int tile, const Left (&r)[kTerms], const Left (&k)[kTerms],
                                 TileGradients& d) const {
    ForProducts<kTerms, true>([&](int i, int j) {
      MultiplyOrAdd(i + j > 0, d.dkb, r[i], PackedTiles{Packed(L::kDat, tile) + j * kTileBytes});
    });
    ForProducts<kTerms, true>([&](int i, int j) {
      MultiplyOrAdd(kAdd || i + j > 0, d.drt, k[i],
                    PackedTiles{Packed(L::kDa, tile) + j * kTileBytes});
    });
  }

  // dRt, dKh, dKb and exp(G_L) sum_v S dS, from S before the tile and dS after it. kClears: the
  // tile has starts of segments, at which the state is cleared, or of floats it may have. Floats have one function
  // for both, with dY S apart, since nvcc serializes the products of two.
  template <bool kClears>
  __device__ void StateProducts(int tile, bool far, const float (&factors)[2],
                                const Accumulator<8>& s, TileGradients& d) const {
    constexpr bool kApart = kTerms > 1;
    const RowMarks marks = MarksOf(tile);
    StateOperand before, after;
    Left r[kTerms], k[kTerms];
    Accumulator<2> apart;
    Accumulator<2>& of_state = kApart ? apart : d.drt;
    RoundPanel(s, before);
    LoadTokenOperands(tile, far, r, k);
    if constexpr (!kApart) RecallStateGradient(tile, after);
    BeginProducts();
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      MultiplyOrAdd(column > 0, of_state, before[column], KAlongRows{Rows(L::kDy, tile), column},
                    int{kPanelBytes});
    if constexpr (kClears && !kApart) {
      CommitProducts();
      Finish(d.drt);
      KeepTokens<2>(0, 0, marks.FirstCleared(), d.drt);
      BeginProducts();
    }
    MultiplyTokens<!kApart>(tile, r, k, d);
    if constexpr (kApart) {
      CommitProducts();
      Finish(of_state, d.drt, d.dkb);
      if (marks.clears != 0) KeepTokens<2>(0, 0, marks.FirstCleared(), of_state);
      ForEachElement<2>([&](int i, int e) { d.drt[i][e] += of_state[i][e]; });
      RecallStateGradient(tile, after);
      Crossing(before, after, factors, d.crossing);
      BeginProducts();
    }
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      MultiplyOrAdd(column > 0, d.dkh, after[column], KAlongRows{Rows(L::kV, tile), column},
                    int{kPanelBytes});
    CommitProducts();
    if constexpr (!kApart) Crossing(before, after, factors, d.crossing);
    Finish(d.drt, d.dkb, d.dkh);
    if constexpr (kClears)
      if (!kApart || marks.clears != 0) KeepTokens<2>(0, marks.LastCleared(), kTileTokens, d.dkh);
  }

  // What a panel of values adds to dY S, V dS and exp(G_L) sum_v S dS, also of tokens that do not see
  // those states. All of these are kept as sums over the panels.
  __device__ void AddStateProducts(int panel, int tile, const float (&factors)[2],
                                   const Accumulator<8>& s, TileGradients& d) const {
    const int at = panel * kPanelBytes;
    StateOperand before, after;
    RoundPanel(s, before);
    BeginProducts();
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      Multiply<true>(d.drt, before[column][0], KAlongRows{Rows(L::kDy + at, tile), column});
    CommitProducts();
    if (tile == kChunkTiles - 1)
      LoadPanelTransposed(GradientPanel(panel), after);
    else
      RecallStateGradient(tile, after);
    BeginProducts();
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      Multiply<true>(d.dkh, after[column][0], KAlongRows{Rows(L::kV + at, tile), column});
    CommitProducts();
    float crossing[2];
    Crossing(before, after, factors, crossing);
    d.crossing[0] += crossing[0], d.crossing[1] += crossing[1];
    Finish(d.drt, d.dkh);
  }

  // Clears what AddStateProducts has added for tokens that do not see the states, and adds the products
  // of tokens by tokens.
  __device__ void AddTokenGradients(int tile, bool far, TileGradients& d) const {
    if (const RowMarks marks = MarksOf(tile); marks.clears != 0) {
      KeepTokens<2>(0, 0, marks.FirstCleared(), d.drt);
      KeepTokens<2>(0, marks.LastCleared(), kTileTokens, d.dkh);
    }
    Left r[kTerms], k[kTerms];
    LoadTokenOperands(tile, far, r, k);
    BeginProducts();
    MultiplyTokens<true>(tile, r, k, d);
    CommitProducts();
    Finish(d.drt, d.dkb);
  }

  // Kh dKh, Rt dRt - Kb dKb and Kb dKb. Loads Rt and Kb into `x`.
  __device__ void DecayProducts(int tile, bool far, const TileGradients& d, TileInputs& x,
                                DecayTerms& terms) const {
    LoadByChannel(L::kKh, tile, terms.kh_dkh);
    LoadByChannel(L::kR, tile, x.r);
    LoadByChannel(L::kKb, tile, x.k);
    ForEachElement<2>([&](int i, int e) {
      terms.kh_dkh[i][e] *= d.dkh[i][e];
      terms.kb_dkb[i][e] = far ? 0.0f : x.k[i][e] * d.dkb[i][e];
      terms.net[i][e] = x.r[i][e] * d.drt[i][e];
      terms.net[i][e] -= terms.kb_dkb[i][e];
    });
  }

  // Stages dR = exp(G') dRt + D u K and dK = exp(G_L - G) dKh + exp(-G) dKb + D u R, and adds D R K
  // to du. In a far tile all that needs R, K or dKb is left to AddFarTile.
  __device__ void InputGradients(int tile, bool far, const RowMarks& marks,
                                 const float (&factors)[2], const DecaySums& sums,
                                 const TileInputs& x, TileGradients& d,
                                 ParameterSums& parameters) const {
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) total[i] = __shfl_sync(~0u, sums.upto[1][2 * i + 1], lane | 3);
    const auto to_end = [&](int i, int e) { return Exp2(sums.ToEnd<T>(i, e, total[e / 2])); };
    // Where exp(-G) may be infinite, or the factor is 0, exp(G_L - G) is not their product.
    if (far) {
      ForEachElement<2>([&](int i, int e) {
        d.dkh[i][e] *= to_end(i, e);
        d.drt[i][e] *= Exp2(sums.before[i][e]);
      });
    } else {
      const float* const of_tokens = DOf(tile);
      const float u[2] = {BonusOf()[0], BonusOf()[8]};
      ForEachElement<2>([&](int i, int e) {
        const float inverse = Exp2(-sums.upto[i][e]);
        const float r = x.r[i][e] * Exp2(-sums.before[i][e]);
        const float k = x.k[i][e] * Exp2(sums.upto[i][e]);
        const float own = of_tokens[8 * i + e % 2], bonus = own * u[e / 2];
        d.dkh[i][e] *= marks.clears != 0 ? to_end(i, e) : factors[e / 2] * inverse;
        d.dkh[i][e] += inverse * d.dkb[i][e] + bonus * r;
        d.drt[i][e] = d.drt[i][e] * Exp2(sums.before[i][e]) + bonus * k;
        parameters.du[e / 2] += own * r * k;
      });
    }
    Stage(L::kR, tile, d.drt);
    Stage(L::kKb, tile, d.dkh);
  }

  // Turns the gradient of the log decays into the gradient of w. In the form "exp" the slope is the
  // log decay itself; of floats it comes from w, since float16 has no log decays that are very small.
  __device__ void ScaleBySlope(int tile, const DecaySums& sums, Accumulator<2>& dw) const {
    if (call.decay != Decay::kExp) return;
    const uint32_t present = kTerms > 1 ? MarksOf(tile).present : 0u;
    ForEachElement<2>([&](int i, int e) {
      if constexpr (kTerms > 1) {
        const int token = 8 * i + 2 * (lane % 4) + e % 2;
        const int64_t row = (kTileTokens * tile + token) * static_cast<int64_t>(copier.stride);
        const float* const w = static_cast<const float*>(call.w) + copier.first + channel;
        if (present >> token & 1)
          dw[i][e] *= Log2DecayAndSlope<Decay::kExp>(w[row + e / 2 * 8], kMinLog2Decay).y;
      } else {
        dw[i][e] *= (sums.upto[i][e] - sums.before[i][e]) * (1.0f / kLog2E);
      }
    });
  }

  // dlog d: sums its terms over the tokens of the tile.
  __device__ void DecayGradients(const float (&crossing)[2], const DecayTerms& terms,
                                 Accumulator<2>& dw) const {
    ForEachElement<2>([&](int i, int e) { dw[i][e] = crossing[e / 2] - terms.kb_dkb[i][e]; });
    constexpr int kParts = 1 + kTerms;  // as many bits as x has
    AddSums<kParts>(terms.net, true, dw);
    AddSums<kParts>(terms.kh_dkh, false, dw);
  }

  // Stages dW or adds it up.
  __device__ void StageDecayGradients(int tile, uint32_t present, const DecaySums& sums,
                                      Accumulator<2>& dw, ParameterSums& parameters) const {
    const auto padding = [&](int i, int e) {
      return (present >> (8 * i + 2 * (lane % 4) + e % 2) & 1) == 0;
    };
    if constexpr (kConstant) {
      ForEachElement<2>([&](int i, int e) {
        if (!padding(i, e)) parameters.dw[e / 2] += dw[i][e];
      });
    } else {
      ScaleBySlope(tile, sums, dw);
      if (present != kAllRows)
        ForEachElement<2>([&](int i, int e) {
          if (padding(i, e)) dw[i][e] = 0.0f;
        });
      Stage(L::kDw, tile, dw);
    }
  }

  // --- After the main loop.

  // Adds what the staged gradients of a far tile lack: all that needs r, k or pairs of its tokens.
  __device__ void AddFarTile(int tile, ParameterSums& parameters) const {
    DecaySums sums;
    SumByChannel(decays, tile, warp, MarksOf(tile).present, sums);
    FarPairs far = {};
    float own_decays[2][4];
    OwnByChannel(decays, tile, warp, sums, own_decays);
    AddFarPairs(memory + L::kDa + tile * L::kTileBytes, RawTileOf(tile), channel, own_decays, far);
    ForEachElement<2>([&](int i, int e) {
      const float own = DOf(tile)[8 * i + e % 2], bonus = own * BonusOf()[e / 2 * 8];
      parameters.du[e / 2] += own * far.r[i][e] * far.k[i][e];
      far.dr[i][e] += bonus * far.k[i][e];
      far.dk[i][e] += bonus * far.r[i][e];
      if constexpr (kConstant) parameters.dw[e / 2] += far.dlog[i][e];
    });
    AddToStaged(L::kR, tile, far.dr);
    AddToStaged(L::kKb, tile, far.dk);
    if constexpr (!kConstant) {
      ScaleBySlope(tile, sums, far.dlog);
      AddToStaged(L::kDw, tile, far.dlog);
    }
  }

  // Adds to the sums of du, and of dw if all tokens have the same decay, over the tokens of each
  // warpgroup.
  __device__ void AddParameterSums(const ParameterSums& parameters) const {
    float* const sums = Floats(L::kSums);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[2] = {parameters.du[i], parameters.dw[i]};
#pragma unroll
      for (int which = 0; which < (kConstant ? 2 : 1); ++which) {
        x[which] += __shfl_xor_sync(~0u, x[which], 1);
        x[which] += __shfl_xor_sync(~0u, x[which], 2);
        if (lane % 4 == 0) sums[(2 * warpgroup + which) * kPanelCols + channel + 8 * i] += x[which];
      }
    }
  }

  // --- Epilogue: all threads store what is staged.

  // Calls go_on() in between, which may copy to where gradients were: this thread copies to the pieces that it stores.
  template <typename Fn>
  __device__ void StoreInputGradients(Fn&& go_on) const {
    const auto from = copier;
    uint4 staged[kChunkTokens * 8 * kTerms / kThreads][4];
    // Calls fn(piece, panel, array) for each gradient.
    const auto for_each = [&](uint4(&pieces)[4], auto&& fn) {
      fn(pieces[0], L::kR, call.dr);
      fn(pieces[1], L::kKb, call.dk);
      if constexpr (kHasValues<N> && kTerms == 1) fn(pieces[2], L::kDs, call.dv);
      if constexpr (!kConstant) fn(pieces[3], L::kDw, call.dw);
    };
    int index = 0;
    from.template ForEachPiece<T>([&](uint32_t at, int64_t, int) {
      for_each(staged[index++], [&](uint4& piece, int panel, void*) {
        piece = *reinterpret_cast<const uint4*>(memory + panel + at);
      });
    });
    go_on();
    index = 0;
    from.template ForEachPiece<T>([&](uint32_t, int64_t element, int row) {
      uint4(&pieces)[4] = staged[index++];
      if (row < from.tokens)
        for_each(pieces, [&](const uint4& piece, int, void* to) {
          // An array of uint4, or else nvcc would store word by word.
          static_cast<uint4*>(to)[element * sizeof(T) / sizeof(uint4)] = piece;
        });
    });
  }

  // The third warpgroup of floats stores dV.
  __device__ void StoreValueGradients() const {
    ValueCopier().template ForEachPiece<T>([&](uint32_t from, int64_t element, int row) {
      if (row < copier.tokens)
        *reinterpret_cast<uint4*>(static_cast<T*>(call.dv) + element) =
            *reinterpret_cast<const uint4*>(memory + L::kDs + from);
    });
  }

  // The gradients of a tile from the sums of state and token products. That of the log decays comes first: there are
  // no registers for its terms while there are sums of log decays.
  __device__ void FinishTile(int tile, bool far, const float (&factors)[2],
                             TileGradients& gradients, ParameterSums& parameters) const {
    const RowMarks marks = MarksOf(tile);
    DecaySums sums;
    TileInputs inputs;
    Accumulator<2> dw;
    DecayTerms terms;
    DecayProducts(tile, far, gradients, inputs, terms);
    DecayGradients(gradients.crossing, terms, dw);
    SumByChannel(decays, tile, warp, marks.present, sums);
    StageDecayGradients(tile, marks.present, sums, dw, parameters);
    InputGradients(tile, far, marks, factors, sums, inputs, gradients, parameters);
  }

  // Stores a partial sum as number `index` of those of 64 channels.
  __device__ void StoreParameterGradients(int64_t index) const {
    if (threadIdx.x >= kPanelCols) return;
    const float* const sums = Floats(L::kSums);
    const int64_t to = index * kPanelCols + threadIdx.x;
    call.du[to] = sums[threadIdx.x] + sums[2 * kPanelCols + threadIdx.x];
    if constexpr (kConstant) {
      const float slope =
          call.decay == Decay::kExp ? Floats(L::kConstant)[threadIdx.x] * (1.0f / kLog2E) : 1.0f;
      static_cast<float*>(call.dw)[to] =
          slope * (sums[kPanelCols + threadIdx.x] + sums[3 * kPanelCols + threadIdx.x]);
    }
  }
};

// From the gradients of near tiles to the stored gradients of the inputs. Calls go_on() as StoreInputGradients.
template <typename T, int N, bool kConstant, bool kMarked, typename Fn>
__device__ void FinishChunk(const ChunkGradients<T, N, kConstant, kMarked>& phases,
                            ParameterSums& parameters, Fn&& go_on) {
  const int first_tile = phases.FirstTile();
#pragma unroll 1
  for (int tile = first_tile; tile < first_tile + kTilesPerWarpgroup; ++tile)
    if (phases.IsFar(tile)) phases.AddFarTile(tile, parameters);

  phases.AddParameterSums(parameters);
  WaitForAll<T>(kGradientsStaged);
  phases.StoreInputGradients(go_on);
}

// Heads of 64: the gradients of a chunk whose operands are on their way, and dS before it. If there are more chunks,
// goes on to the one before this one.
template <typename T, bool kConstant, bool kMarked>
__device__ __forceinline__ void GoThroughChunk(ChunkGradients<T, 64, kConstant, kMarked>& phases,
                                               bool more) {
  using L = GradientLayout<T, 64>;
  constexpr bool kThree = kTermsOf<T> > 1;
  phases.WaitForOperands();
  WaitForTwo<T>(kCopied);
  if (more) phases.FetchChunkBefore();
  phases.ScaleOperands();
  if constexpr (kThree) {
    phases.WaitForStates();
    WaitForAll<T>(kScaled);
    if (phases.warpgroup == 1) {
      StateOperand<T> rounded;
      Accumulator<8> ds;
      phases.LoadStateGradient(0, rounded, ds);
      WaitForAll<T>(kStateTaken);
      phases.KeepStateGradients(0, rounded, ds);
    } else {
      WaitForAll<T>(kStateTaken);
    }
  } else if (phases.warpgroup == 0) {
    Accumulator<8> ds;
    phases.RecallCarried(ds);
    phases.TokenProducts(L::kDy, L::kV, L::kDa);
    phases.ShareCarried(ds);
    phases.WaitForStates();
    WaitForAll<T>(kScaled);
    WaitForAll<T>(kStateTaken);
    phases.ValueGradients(ds);
    phases.KeepCarried(ds);
  } else {
    phases.TokenProducts(L::kV, L::kDy, L::kDat);
    phases.WaitForStates();
    WaitForAll<T>(kScaled);
    StateOperand<T> rounded;
    Accumulator<8> ds;
    phases.LoadPanelTransposed(L::kDs, rounded);
    WaitForAll<T>(kStateTaken);
    Widen(rounded, ds);
    phases.KeepStateGradients(0, rounded, ds);
  }

  const int first_tile = phases.FirstTile();
  StateOperand<T> rounded;
  Accumulator<8> state;
  ParameterSums parameters;
  phases.LoadState(0, rounded, state);
#pragma unroll 1
  for (int tile = 0; tile < first_tile; ++tile) phases.AdvanceState(0, tile, state);
  WaitForTwo<T>(kThree ? kStateKept : kOperandsTaken);

#pragma unroll 1
  for (int own = 0; own < kTilesPerWarpgroup; ++own) {
    const int tile = first_tile + own;
    const bool far = phases.IsFar(tile);
    float factors[2];
    TileGradients gradients;
    phases.LoadRowFactors(tile, factors);
    if (!kThree && phases.MarksOf(tile).clears == 0)
      phases.template StateProducts<false>(tile, far, factors, state, gradients);
    else
      phases.template StateProducts<true>(tile, far, factors, state, gradients);
    if (own + 1 < kTilesPerWarpgroup) phases.AdvanceState(0, tile, state);
    if (kThree && own == 0) WaitForAll<T>(kOperandsTaken);
    phases.FinishTile(tile, far, factors, gradients, parameters);
  }
  FinishChunk(phases, parameters, [&] {
    if (!more) return;
    phases.GoBack();
    phases.LoadOperands();
  });
}

// dS after a split, and dS before all tokens.
template <typename T, bool kConstant, bool kMarked>
__device__ void LoadStart(const ChunkGradients<T, 64, kConstant, kMarked>& phases,
                          const SplitOfBlock<64, true>& split, const Splits& splits,
                          StateAccumulator<64>::State& ds) {
  StateAccumulator<64>::Load(
      split.order == 0
          ? phases.call.dfinal_state + split.Head() * (64 * 64)
          : splits.Transition<true>(split.Head(), split.heads, split.span, split.order - 1),
      ds);
}
template <typename T, bool kConstant, bool kMarked>
__device__ void StoreEnd(const ChunkGradients<T, 64, kConstant, kMarked>& phases,
                         const SplitOfBlock<64, true>& split,
                         const StateAccumulator<64>::State& ds) {
  if (split.Last())
    StateAccumulator<64>::Store(ds, phases.call.dinitial_state + split.Head() * (64 * 64));
}

// All that the third warpgroup of floats does.
template <typename T, bool kConstant, bool kMarked>
__device__ __forceinline__ void RunValues(ChunkGradients<T, 64, kConstant, kMarked>& phases,
                                          const SplitOfBlock<64, true>& split,
                                          const Splits& splits) {
  using L = GradientLayout<T, 64>;
  if (split.chunks > 0) phases.LoadValues();
  StateAccumulator<64>::State ds;
  LoadStart(phases, split, splits, ds);
#pragma unroll 1
  for (int left = split.chunks; left > 0; --left) {
    WaitForCopies<0>();
    phases.template ConvertValues<kValueThreads>();
    phases.ShareCarried(ds[0]);
    WaitForValues(kValuesCopied);
    phases.TokenProducts(L::kDy, L::kV, L::kDa);
    phases.TokenProducts(L::kV, L::kDy, L::kDat);
    PublishOperands();
    WaitForAll<T>(kScaled);
    WaitForAll<T>(kStateTaken);
    phases.ValueGradients(ds[0]);
    WaitForAll<T>(kOperandsTaken);
    phases.StoreValueGradients();
    WaitForAll<T>(kGradientsStaged);
    if (left == 1) break;
    phases.GoBack();
    phases.LoadValues();
  }
  StoreEnd(phases, split, ds);
}

template <typename T, bool kConstant, bool kMarked>
__global__ __launch_bounds__(
    kAllThreads<T>,
    kTermsOf<T> > 1
        ? 1
        : kBlocksPerMultiprocessor) void SplitGradientKernel(const __grid_constant__
                                                                 Wkv6BackwardCall call,
                                                             const __grid_constant__ Splits splits,
                                                             bool keeps_last_ds_there) {
  constexpr int N = 64;
  constexpr bool kThree = kTermsOf<T> > 1;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const SplitOfBlock<N, true> split(call, splits, false);
  if (split.None()) return;
  uint4 kept[kKeptPieces];
  ChunkGradients<T, N, kConstant, kMarked> phases(call, kept, keeps_last_ds_there, memory,
                                                  static_cast<int>(split.sequence), split.own_head,
                                                  split.span, split.Place(0));
  if constexpr (kThree)
    if (phases.warpgroup == 2) return RunValues(phases, split, splits);
  if (split.chunks > 0) phases.LoadOperands();
  phases.LoadParameters();
  if (!kThree && phases.warpgroup == 0) {
    StateAccumulator<N>::State start;
    LoadStart(phases, split, splits, start);
    phases.KeepCarried(start[0]);
  }
#pragma unroll 1
  for (int left = split.chunks; left > 0; --left) GoThroughChunk(phases, left > 1);

  if (!kThree && phases.warpgroup == 0 && split.Last()) {
    StateAccumulator<N>::State end;
    phases.RecallCarried(end[0]);
    StoreEnd(phases, split, end);
  }
  // Partial sums are [S, splits, H, K] or, if sequences of different lengths are split, at the first
  // chunk of a split in [N, H, K].
  const int64_t sum = splits.chunks == 0 ? split.sequence * splits.count + split.order
                                         : split.span.first_chunk + split.first_chunk;
  if (splits.chunks == 0 || split.chunks > 0)
    phases.StoreParameterGradients(sum * split.heads + split.own_head);
}

// Heads of 128.
template <typename T, bool kConstant, bool kMarked>
__global__ __launch_bounds__(kThreads, 2) void ChunkGradientKernel(
    const __grid_constant__ Wkv6BackwardCall call, uint4* state_gradients) {
  constexpr int N = 128;
  using L = GradientLayout<T, N>;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  // Blocks are [B, N, H, panels of keys].
  const unsigned index = blockIdx.x / kPanels<N>;
  const unsigned chunk = index / HeadsOf(call), own_head = index - chunk * HeadsOf(call);
  const int sequence = call.sequences.Given()
                           ? call.sequences.owners[chunk]
                           : static_cast<int>(chunk / static_cast<unsigned>(call.dims.saved));
  if (sequence < 0) return;  // no sequence has this chunk, and nothing reads its partial sums
  const Span span = call.sequences(sequence, call.dims.tokens);
  const ChunkGradients<T, N, kConstant, kMarked> phases(
      call, state_gradients, false, memory, sequence, own_head, span, chunk - span.first_chunk);
  StateOperand<T> rounded;
  Accumulator<8> state;  // first dS, then S
  ParameterSums parameters;
  const int first_tile = phases.FirstTile();
  phases.LoadOperands();
  phases.LoadParameters();
  phases.WaitForOperands();
  WaitForAll<T>(kCopied);
  phases.ScaleOperands();
  if (phases.warpgroup == 0)
    phases.TokenProducts(L::kDy, L::kV, L::kDa);
  else
    phases.TokenProducts(L::kV, L::kDy, L::kDat);
  phases.WaitForStates();
  WaitForAll<T>(kScaled);

  TileGradients gradients[kTilesPerWarpgroup] = {};
#pragma unroll 1
  for (int panel = 0; panel < kPanels<N>; ++panel) {
    if (panel > 0) {
      phases.WaitForStates();
      WaitForAll<T>(kPanelDone);
      phases.LoadNextState(panel);
    }
    if (phases.warpgroup == 1) {
      phases.LoadStateGradient(panel, rounded, state);
      phases.KeepStateGradients(panel, rounded, state);
    }
    if (panel > 0) {
      phases.WaitForStates();
      WaitForAll<T>(kStateCopied);
    }
    phases.LoadState(panel, rounded, state);
#pragma unroll 1
    for (int tile = 0; tile < first_tile; ++tile) phases.AdvanceState(panel, tile, state);
    WaitForAll<T>(kOperandsTaken);
    if (panel + 1 < kPanels<N>) phases.LoadNextStateGradient(panel + 1);
#pragma unroll
    for (int own = 0; own < kTilesPerWarpgroup; ++own) {
      float factors[2];
      phases.LoadRowFactors(first_tile + own, factors);
      phases.AddStateProducts(panel, first_tile + own, factors, state, gradients[own]);
      if (own + 1 < kTilesPerWarpgroup) phases.AdvanceState(panel, first_tile + own, state);
    }
  }
#pragma unroll
  for (int own = 0; own < kTilesPerWarpgroup; ++own) {
    const int tile = first_tile + own;
    const bool far = phases.IsFar(tile);
    float factors[2];
    phases.LoadRowFactors(tile, factors);
    phases.AddTokenGradients(tile, far, gradients[own]);
    phases.FinishTile(tile, far, factors, gradients[own], parameters);
  }
  FinishChunk(phases, parameters, [] {});
  phases.StoreParameterGradients(blockIdx.x);
}

}  // namespace

int64_t Wkv6GradientSharedMemory(Dtype dtype, int64_t head_size) {
  using Half = __nv_bfloat16;  // float16 takes as much
  if (dtype == Dtype::kF32) return GradientLayout<float, 64>::kLeastBytes;
  return head_size == 64 ? GradientLayout<Half, 64>::kLeastBytes
                         : GradientLayout<Half, 128>::kLeastBytes;
}

cudaError_t Wkv6Gradients(cudaStream_t stream, const Wkv6BackwardCall& call, const Splits& splits,
                          const Device& device, uint4* gradients) {
  return ForKinds(call, [&](auto zero, auto size, auto constant) {
    using T = decltype(zero);
    using L = GradientLayout<T, size()>;
    return ForMarksOf<T>(call.marks, [&](auto marked) {
      if constexpr (kHasValues<size()>) {
        const bool fits = device.shared_memory >= L::kBytes;
        return Launch(SplitGradientKernel<T, constant(), marked()>,
                      splits.Blocks(call.dims.batch, call.dims.heads), kAllThreads<T>,
                      fits ? L::kBytes : L::kLeastBytes, stream, call, splits, !fits);
      } else {
        const int64_t rows = call.sequences.Given() ? 1 : call.dims.batch;
        const int64_t blocks = rows * call.dims.saved * call.dims.heads * kPanels<size()>;
        return Launch(ChunkGradientKernel<T, constant(), marked()>, blocks, kThreads, L::kBytes,
                      stream, call, gradients);
      }
    });
  });
}

}  // namespace rwkv_jax::cuda
