// WKV7 on matrix units, the state from token to token: the forward pass, and the gradient of the
// state in the backward pass. One block of threads per head, or per head and split of its tokens.
//
// The recurrence (RWKV-7, arXiv:2503.14456, "state evolution"), with d_t = exp(log d_t) made from
// w_t:
//
//   S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T      y_t = S_t r_t
//
// Tokens are taken in tiles of 16 tokens, in the WY representation with the UT transform (section 3
// of arXiv:2406.06484), here with decays in the operands. Rows of a matrix are tokens, except that
// a state is [V, K]:
//
//   At = A exp(G')   Rt = R exp(G)   Bh = B exp(-G)   Kh = K exp(-G)
//   M  = (I - tril_strict(At Bh^T))^-1
//   Z  = At S^T + tril_strict(At Kh^T) V      U = M Z
//   Y  = Rt S^T + tril(Rt Bh^T) U + tril(Rt Kh^T) V
//   S <- S + U^T Bh + V^T Kh
//
// G is the sum of the log decays from the start of a frame to a token, and G' is that sum without
// the token itself. Inside a frame S is the state times exp(-G) of the last token; at its end S is
// multiplied by exp(G) and becomes the state itself again.
//
// Decays with a bound, those of Decay::kSigmoid, have frames of a chunk (64 tokens). With others a
// tile is a frame, and G and G' are counted from half of the sum of the whole frame. So factors are
// from 2^-63 to 2^63 for a sum of log2 decays down to kMinFrameLog2. Where a channel goes further, the
// tile is far: it has four frames of four tokens, which advance the state one after another. Between
// two frames S is multiplied once, for the later half of the one and the earlier half of the other.
//
// The gradient of the state follows the same recurrence from the last token to the first. There b
// reads from the rows and a is written to them, dy takes the place of v, and r that of k:
//
//   dS <- (dS + dy r^T) diag(d) + ((dS + dy r^T) b) a^T
//
// (`backward_kernel` in RWKV-LM, RWKV-v7/train_temp/cuda/rwkv7_clampw.cu, has this as one step.)
// But a token adds dy r^T before it reads and decays, where the forward pass adds v k^T after it.
// So r is scaled by exp(-G'), and the triangle of products with it keeps its diagonal.
//
// The tiles are a pipeline of four stages with one barrier for each tile. In iteration t of the
// main loop
//
//   stage          tile               work                               by the warpgroups that
//   Advance        t                  Z, U, Y and S                      have the state
//   TokenProducts  t + 1              M and the three other products     `multiplies`
//   ScaleOperands  t + 2              At Rt Bh Kh, in place              `scales`
//   CopyTile       t + kStages        copies from global memory          `copies`
//
// run side by side, or one after another where one warpgroup has all roles (see Work). The tile
// barrier at the end of the iteration lets each stage have what the stage before has made: products
// of t + 1, operands of t + 2. Behind it y of tile t is written to global memory, and the copies of
// tile t + kStages take the place of tile t. Only ScaleOperands waits for copies, at the
// CopyBarrier of their place in shared memory.
//
// There are kernels for heads of N = 64 and N = 128. K and V may be less: operands and states are then filled
// up with zeros where they are loaded, and results are stored as far as the head has them. A channel of zeros
// changes nothing, whatever its decay. Such heads have the kernels that are compiled for marks.
//
// Floats are multiplied in terms (matrix.cuh), which ScaleOperands puts in their place. One kernel takes them
// with any decay: that for decays without a bound. Their K and V are 64.
//
// In a keyed call ScaleOperands first makes k, a and b, as wkv7_keys does (layers/wkv7_keys.cu), from the
// projected k and the rate, which are copied to two of their three places.
//
// In a call of the delta rule (k = beta k', a = exp(g) k', b = -beta k') At is K' exp(G), and Bh is -Kh. So
// U and v are written with the same keys, and with W = U + V and one triangle of products fewer a tile is
//
//   M = (I + tril_strict(At Kh^T))^-1      W = M (V - At S^T)
//   Y = scale (Rt S^T + tril(Rt Kh^T) W)   S <- S + W^T Kh
//
// In reverse the three arrays At = -beta K' exp(G'), Bh = K' exp(-G') and Kh = scale Q exp(-G') differ, but are
// made from two.
//
// A tile of such a call counts from less than half of its sum where else one normal factor would not bring S from the
// tile before to this one. It is far where then more than 2^kLeastRestLog2 would be left for what is after that place,
// and advances the state at once. In its far channels G is counted from the start of the tile for what reads S, and
// from the end of the tile for what is written, and S is multiplied by exp(G) of the whole tile after it has been read:
// no factor is above 1. Products of two tokens of these operands would have other factors, so the warps that scale far
// channels multiply their tokens too (MultiplyFarTokens), and TokenProducts adds up what these warps have, always in
// the same order.
//
// Where such a call has one decay for a head, its exponentials are factors of tokens. They multiply rows and
// columns of sums instead of operands: those of the products of two tokens, exp(G_t - G_s), those of At S^T and
// Rt S^T, and those of W and V before they are written. So no operand is scaled and no decay is too far, and S
// is multiplied by the decays of several tiles at once (OwedDecay).
#include <algorithm>
#include <utility>

#ifndef RWKV_JAX_EMULATION
#include "hopper.cuh"
#endif
#include "kernel_choice.cuh"
#include "launch.cuh"
#include "wkv7/kernels.h"
#include "wkv7/inverse.cuh"
#include "wkv7/keys.cuh"

namespace rwkv_jax::cuda {
namespace {

// A call with the operands by their role in the recurrence: a and r read from the rows of the state,
// b and k are written to them. A keyed call has the projected k and the rate in their places: forwards k is
// the former and b the latter, and there is no a; in reverse b is the former and a the latter. A call of the
// delta rule has k' as a and q as r, or in reverse as k, and no others.
struct Scan : Wkv7Call {
  const float* start;
  float* end;
  void* y;
  void* saved;  // gets states before chunks, or gradients after them; forwards it may be null
  // A transition S -> S M + D of a split goes to the memory of `splits`. If that is null, the transition
  // is of all tokens: D goes to `end`, and starts from `start` if that is not null; M goes to
  // `factor` if that is not null.
  Splits splits;
  float* factor;
  // Of a keyed call: the parameters of wkv7_keys and 1 / max(|u|, eps) of its formulas.
  const float *parameters, *inverse;
  const float *scale, *beta;  // of a call of the delta rule
};

// How the warpgroups of a block share the work on a tile.
enum class Work {
  // One warpgroup does all, so that more blocks fit a multiprocessor and hide each other's latency. Of floats
  // fewer blocks fit, and a second warpgroup does what is not the state's.
  kTogether,
  // The state, the products and the operands have warpgroups of their own, so that a tile takes
  // less time.
  kSpecialized,
  // Two states advance, from zero and from the identity, and their warpgroups share the rest.
  kTransition,
};

// Named barriers; 0 is __syncthreads, which only the prologue uses. Warpgroups come to the tile
// barrier from different loops.
enum NamedBarrier : int { kTileBarrier = 1 };

// The frames of a far tile.
constexpr int kFarFrames = 4, kFarFrameTokens = kTileTokens / kFarFrames;

// The least sum of log2 decays of a frame, for which a factor between two frames is a normal float. If a
// frame of a far tile has less, its tokens have at least their share of it each.
constexpr float kMinFrameLog2 = -126.0f, kLeastInFrame = kMinFrameLog2 / kFarFrameTokens;
static_assert(2 * kLeastLog2 > kMinFrameLog2, "two tokens that forget all leave a frame as it is");
// Of the delta rule: the least sum of log2 decays of a tile behind the place from which it counts, unless it is far.
constexpr float kLeastRestLog2 = -87.0f;

// What kernels differ in by their inputs.
enum class Kind {
  kBounded,    // decays have a bound: frames of a chunk
  kUnbounded,  // they have none, or are of floats: frames of a tile or less
  kKeyed,      // a keyed call, with a bound
  kDelta,      // the delta rule, with frames as kUnbounded
  kHeadDelta,  // the delta rule with decays of heads, without frames
};

// What the tokens of a tile are multiplied by where decays are of heads.
struct alignas(8) TokenFactors {  // pairs of them are read at once
  // g and beta are copied to their places; `log` then is G, or in reverse G', to base 2.
  float log[kTileTokens], beta[kTileTokens];
  // Of the sums that have read S and of what is written to it, each up to the scale of the delta rule.
  float read[kTileTokens], write[kTileTokens];
  float state;  // of S
};

// The elements of a lower triangular Accumulator<2> of each lane, but for those that are 0.
struct FarSum {
  float2 pairs[3][32];
};

// `kAmple`: a block may have shared memory for long rings.
template <typename T, int N, bool kReverse, bool kOutput, Work kWork, Kind kKind,
          bool kAmple = true>
struct ScanLayout {
  static constexpr int kTerms = kTermsOf<T>;
  static_assert(kTerms == 1 || kKind == Kind::kUnbounded);
  static constexpr bool kKeyed = kKind == Kind::kKeyed, kHeadDecay = kKind == Kind::kHeadDelta;
  static constexpr bool kDelta = kKind == Kind::kDelta || kHeadDecay;
  static constexpr bool kUnbounded = kKind == Kind::kUnbounded || kKind == Kind::kDelta;
  // Whether W is written in place of U and V.
  static constexpr bool kJoined = kDelta && !kReverse;
  // Whether a far tile advances the state at once, and how many products of its tokens there are then.
  static constexpr bool kFarAtOnce = kKind == Kind::kDelta;
  static constexpr int kFarProducts = kOutput || kReverse ? 2 : 1;
  static constexpr int kPanels = N / kPanelCols;
  static constexpr bool kSpecialized = kWork == Work::kSpecialized;
  static constexpr bool kTransition = kWork == Work::kTransition;
  static constexpr int kStateThreads = 2 * N;
  // Warpgroups without a state.
  static constexpr int kHelpers = kSpecialized ? 2 : kWork == Work::kTogether ? kTerms - 1 : 0;
  static constexpr int kThreads = kStateThreads * (kTransition ? 2 : 1) + 128 * kHelpers;
  // On a multiprocessor.
  static constexpr int kBlocks = kThreads > 256 || (kTransition && kTerms > 1) ? 1 : 512 / kThreads;
  // Whether each warpgroup with a state has registers of another one.
  static constexpr bool kSharesRegisters =
      RWKV_JAX_WARPGROUP_PRODUCTS && kHelpers == kPanels && (kWork == Work::kTogether || kDelta);
  static_assert(!kSharesRegisters || kThreads * kBlocks == 512);
  static constexpr int kPanelBytes = kTileTokens * kRowBytes;
  static constexpr int kPanelsBytes = kPanels * kPanelBytes;  // of a term of a tile
  static constexpr int kProductTermBytes = 4 * kTileBytes;
  static constexpr int kProductBytes = kTerms * kProductTermBytes;
  static constexpr int kDecayStride = N / 4 + 4;  // so that four lanes read different banks

  // The operands of a tile. At and Rt of 64 columns follow each other, so that they are one operand
  // of 32 rows. Second terms lie behind the first ones of all operands. Kh that W is written with has the place
  // of Bh; with decays of heads At and Bh are one array, the keys.
  static constexpr int kA = 0;
  static constexpr int kR = kPanelBytes;
  static constexpr int kReadStride = (kOutput ? 2 : 1) * kPanelBytes;
  static constexpr int kB = kHeadDecay ? kA : kPanels * kReadStride;
  static constexpr int kWriteStride = kHeadDecay ? kReadStride : kPanelBytes;
  static constexpr int kK = kPanels * kReadStride + (kHeadDecay ? 0 : kPanelsBytes);
  static constexpr int kV = kK + (kJoined ? 0 : kPanelsBytes);
  static constexpr int kTermBytes = kV + kPanelsBytes;
  static constexpr int kOperandBytes = kTerms * kTermBytes;

  // Rings: tile t has place t % the number of places. There are kStages places for operands,
  // exp(G), copy barriers and marks, kDecayStages for w, which is read two tiles before the rest,
  // and two for token products and for y. Without a bound there are factors in place of a stage. With one, y
  // takes the place of v in short rings: a warp writes it over the values that it alone has read.
  static constexpr bool kShort = kSpecialized && !kAmple;
  static constexpr int kStages = kHeadDecay                        ? (kSpecialized ? 6 : 4)
                                 : kSpecialized && kAmple          ? 8
                                 : kShort && kPanels * kTerms == 1 ? 6
                                 : kUnbounded && (kOutput || kWork == Work::kTogether) ? 3
                                                                                       : 4;
  static constexpr int kDecayStages = kHeadDecay     ? kStages
                                      : kStages == 8 ? 8
                                      : kStages == 6 ? 4
                                                     : 2;
  static constexpr bool kOverValues = kOutput && kShort && !kUnbounded && !kDelta;
  static constexpr int kW = kStages * kOperandBytes;
  static constexpr int kY = kW + (kHeadDecay ? 0 : kDecayStages * kTerms * kPanelsBytes);
  static constexpr int kProducts = kY + (kOutput && !kOverValues ? 2 * kTerms * kPanelsBytes : 0);
  static constexpr int kDecays = kProducts + 2 * kProductBytes;  // exp(G) of the last token
  static constexpr int kDecayBytes = 4 * 4 * kDecayStride;
  static constexpr int kBarriers = kDecays + (kHeadDecay ? 0 : kStages * kDecayBytes);
  static constexpr int kWords = kBarriers + 8 * kStages;  // of marks
  // In a ring as well, floats of tokens: of keyed calls `inverse`, of the delta rule beta or TokenFactors. Of
  // keyed calls the parameters k_k, k_a and a0.
  static constexpr int kFloats = kWords + 4 * kStages;
  static constexpr int kFloatBytes = kHeadDecay         ? sizeof(TokenFactors)
                                     : kKeyed || kDelta ? 4 * kTileTokens
                                                        : 0;
  static_assert(!kHeadDecay || kFloats % alignof(TokenFactors) == 0);
  static constexpr int kParameters = kFloats + kStages * kFloatBytes;
  static constexpr int kEnd = kParameters + (kKeyed ? 3 * 4 * N : 0);
  // Of decays without a bound, in rings of kFramePlaces tiles: whether a tile is far, or a bit for each 16
  // channels that are, and the factors of the state before each frame that a far tile has, or before and in it.
  static constexpr int kFramePlaces = 4;
  static constexpr int kFar = kEnd;
  static constexpr int kFactors = (kFar + 4 * kFramePlaces + 15) / 16 * 16;
  static constexpr int kStateFactors = kFarAtOnce ? 2 : kFarFrames;
  // In a ring of two tiles, what each warp that scales adds to the products of far tokens.
  static constexpr int kFarSums = kFactors + kFramePlaces * kStateFactors * kDecayBytes;
  static constexpr int kFarSumBytes = kFarProducts * sizeof(FarSum);
  static constexpr int kBytes =
      kUnbounded ? kFarSums + (kFarAtOnce ? 2 * 4 * kFarSumBytes : 0) : kEnd;
};

// What operands are made of besides those of the call: of a keyed call the parameters [3, N] and `inverse` of
// the rows of a tile, of the delta rule beta of the rows, all in shared memory, and the scale.
struct KeyFactors {
  const float *parameters, *of_rows;
  float scale;
};

// The operands that a lane has of a tile, as LoadMatrices gives them. `col` is the first column of the tile.
template <typename T, int N>
struct TileKeys {
  uint32_t key[4], a[4], b[4];

  __device__ TileKeys(const KeyFactors& factors, int col, const uint32_t (&k)[4],
                      const uint32_t (&rate)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const at = factors.parameters + col + i / 2 * 8 + 2 * (Lane() % 4);
      const auto parameter = [&](int number) {
        return *reinterpret_cast<const float2*>(at + number * N);
      };
      const float inverse = factors.of_rows[Lane() / 4 + i % 2 * 8];
      MakeKeys<T>(k[i], rate[i], parameter(0), parameter(1), parameter(2), {inverse, inverse},
                  key[i], a[i], b[i]);
    }
  }
};

// The places of the token products of a tile.
enum ProductPlace { kAak, kQrk, kM, kQrb };

// What the next tile counts from, for four columns of each lane: of decays with a bound, the sums up to
// the last token of a tile; of others, the log of what S has yet to be multiplied by after it.
struct Carry {
  float sum[2][2];
};

// G and G' of 16 tokens and 16 channels, each where it lies in an Accumulator<2>.
struct TileSums {
  float upto[2][4], before[2][4];

  template <typename Value>
  __device__ void Set(Value&& value) {
    ForEachElement<2>([&](int i, int e) { upto[i][e] = before[i][e] = value(i, e); });
  }
  template <int kTerms>
  __device__ void Add(const Left& inclusive, const Left& exclusive,
                      const uint32_t (&log_decays)[kTerms][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto add = [&](float (&sum)[4], const Left& ones) {
        AddTerms<kTerms>(sum, [&](int term, float (&to)[4]) {
          WarpMultiplyHalf(to, ones, log_decays[term][2 * i], log_decays[term][2 * i + 1]);
        });
      };
      add(upto[i], inclusive);
      add(before[i], exclusive);
    }
  }
  template <typename Value>
  __device__ void Subtract(Value&& value) {
    ForEachElement<2>([&](int i, int e) {
      const float x = value(i, e);
      upto[i][e] -= x, before[i][e] -= x;
    });
  }
  // G of a row, for the columns of this lane, times a factor.
  __device__ void GetRow(int row, float factor, float (&x)[2][2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        x[i][j] = factor * __shfl_sync(~0u, upto[i][row / 8 * 2 + j], row % 8 * 4 | (Lane() & 3));
  }
};

// Stores factors of columns that all lanes with the same columns have, as ScaleState reads them, ...
template <typename L>
__device__ void StoreFactors(int warp, const float4& of_columns, float* factors) {
  if (Lane() >= 28)
    *reinterpret_cast<float4*>(factors + (Lane() & 3) * L::kDecayStride + 4 * warp) = of_columns;
}
// ... or those of such logs.
template <typename L>
__device__ void StoreExponentials(int warp, const float (&log)[2][2], float* factors) {
  StoreFactors<L>(warp, {Exp2(log[0][0]), Exp2(log[0][1]), Exp2(log[1][0]), Exp2(log[1][1])},
                  factors);
}

// Counts the sums of a tile from the middle of its frame or, if that goes too far, from the middles of
// four frames or from its start. Leaves the factors of S before each frame, or before and in the tile, in
// `factors`, and what follows the tile in `carry`. Returns whether the tile is far.
template <typename L>
__device__ bool CentreFrames(int warp, const Ones& inclusive, const Ones& exclusive,
                             const uint32_t (&log_decays)[L::kTerms][4], float* factors,
                             TileSums& sums, Carry& carry) {
  constexpr int kStride = L::kDecayBytes / sizeof(float);
  // Of the sum of a frame: S is multiplied by the first part before the frame, and by the rest after it.
  float half[2][2], rest[2][2], log[2][2];
  const auto for_columns = [](auto&& fn) {
    ForEachElement<1>([&](int, int e) { fn(e / 2, e % 2); });
  };
  const auto store = [&](int frame) {
    for_columns([&](int i, int j) {
      log[i][j] = carry.sum[i][j] + half[i][j], carry.sum[i][j] = rest[i][j];
    });
    StoreExponentials<L>(warp, log, factors + frame * kStride);
  };
  const auto halve = [&](int row) {
    sums.GetRow(row, 0.5f, half);
    for_columns([&](int i, int j) { rest[i][j] = half[i][j]; });
  };
  halve(kTileTokens - 1);
  bool far = false;
  for_columns([&](int i, int j) {
    if constexpr (L::kFarAtOnce) {
      const float all = half[i][j] + rest[i][j];
      // So that S has a normal factor, however that is rounded.
      half[i][j] = fmaxf(half[i][j], kMinFrameLog2 + 1.0f - carry.sum[i][j]);
      rest[i][j] = all - half[i][j];
      far = far || rest[i][j] < kLeastRestLog2;
    } else {
      far = far || half[i][j] < 0.5f * kMinFrameLog2;
    }
  });
  far = __any_sync(~0u, far);
  if (!far) {
    sums.Subtract([&](int i, int e) { return half[i][e % 2]; });
    store(0);
    // Other columns may be far.
#pragma unroll
    for (int frame = 1; frame < L::kStateFactors; ++frame)
      StoreFactors<L>(warp, {1.0f, 1.0f, 1.0f, 1.0f}, factors + frame * kStride);
    return false;
  }
  if constexpr (L::kFarAtOnce) {
    StoreExponentials<L>(warp, carry.sum, factors);
    for_columns([&](int i, int j) { log[i][j] = half[i][j] + rest[i][j]; });
    StoreExponentials<L>(warp, log, factors + kStride);
    carry = {};
    return true;
  }
  // A register of ones has a row and two columns, which are of the same frame or not.
  const uint32_t same = Lane() / 16 == Lane() % 4 / 2 ? ~0u : 0u;
  const auto in_frames = [&](Ones ones) {
    ones.a[0] &= same, ones.a[1] = ones.a[2] = 0u, ones.a[3] &= same;
    return ones;
  };
  // A lane has two tokens of a channel, and the lane beside it the other two of the frame.
  uint32_t floored[L::kTerms][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = Pair<__half>::Low(log_decays[0][i]), high = Pair<__half>::High(log_decays[0][i]);
    if constexpr (L::kTerms > 1) {
      low += Pair<__half>::Low(log_decays[1][i]);
      high += Pair<__half>::High(log_decays[1][i]);
    }
    const float own = low + high, frame = own + __shfl_xor_sync(~0u, own, 1);
    const float least =
        (frame < kMinFrameLog2 * kLogScale ? kLeastInFrame : kLeastLog2) * kLogScale;
    uint32_t terms[L::kTerms];
    Round<__half>(low < least ? least : low, high < least ? least : high, terms);
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) floored[term][i] = terms[term];
  }
  sums.Set([](int, int) { return 0.0f; });
  sums.Add(in_frames(inclusive).a, in_frames(exclusive).a, floored);
#pragma unroll
  for (int frame = 0; frame < kFarFrames; ++frame) {
    halve(frame * kFarFrameTokens + kFarFrameTokens - 1);
    store(frame);
  }
  float own[2][4];  // the sums of the frames of the rows of this lane
  ForEachElement<2>(
      [&](int i, int e) { own[i][e] = __shfl_sync(~0u, sums.upto[i][e], (Lane() & 19) | 12); });
  sums.Subtract([&](int i, int e) { return 0.5f * own[i][e]; });
  return true;
}

// Multiplies 16 columns of floats of a tile, from column 16 * col on, by factors, and puts the terms of the
// products in their place. The second terms lie `low` bytes behind the first ones.
__device__ inline void ScaleFloats(uint32_t panel, int low, int col, const float (&factors)[2][4]) {
  float x[2][4];
  ForEachElement<2>([&](int i, int e) {
    const uint32_t at = FloatAddress(panel, low, Lane() / 4 + e / 2 * 8,
                                     16 * col + 8 * i + 2 * (Lane() % 4) + e % 2);
    x[i][e] = factors[i][e] * __uint_as_float(LoadWord(at));
  });
  Left terms[2];
  Round(x[0], x[1], terms);
  __syncwarp();  // all lanes have read what others overwrite
#pragma unroll
  for (int term = 0; term < 2; ++term)
    StoreMatrices(TileAddress(panel + term * low, 0, col), terms[term]);
}

// Converts a tile to bfloat16, in its place.
template <typename T>
__device__ void ConvertMatrices(uint32_t tile) {
  uint32_t x[4];
  LoadMatrices(tile, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = ToBf16<T>(x[i]);
  StoreMatrices(tile, x);
}

// The products of the tokens of a far tile of the delta rule, M and that with q, of 16 channels. They go to
// `far`, or are added to what is there.
//
// Levels halve runs of tokens, from the whole tile on. At each of them the tokens of the later half of a run are
// multiplied by those of its earlier half, and all are scaled by the decays between them and the middle of the
// run, which are at most 1. At the last level a token is multiplied by itself.
template <typename T, typename L, bool kReverse>
__device__ void MultiplyFarTokens(const uint32_t (&k)[4], const uint32_t (&q)[4],
                                  const uint32_t (&log_decays)[4], const KeyFactors& keys, bool add,
                                  FarSum* far) {
  // Of both 8 x 8 on the diagonal. What is made of them takes no registers from tile to tile.
  const int lane = Opaque(Lane()), row = lane / 4, col = 2 * (lane % 4);
  Accumulator<2> sums[L::kFarProducts] = {};
  // Beside a state there are no registers for several levels at once.
#pragma unroll(L::kHelpers > 0 ? 5 : 1)
  for (int level = 0; level < 5; ++level) {
    const int size = 8 >> level;  // at last the tokens themselves
    uint32_t scaled[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled[0][i] = ToBf16<T>(k[i]), scaled[1][i] = ToBf16<T>(q[i]);
    if (size > 0) {
      const auto ones = [&](bool later) {
        const auto has = [&](int col) {
          return (row ^ col) < size && (col < row + !kReverse) == later;
        };
        return kInverseLogScale & ((has(col) ? 0xffffu : 0u) | (has(col + 1) ? 0xffff0000u : 0u));
      };
      const bool later = (row & size) != 0;
      const Left between = {ones(later), 0u, 0u, ones(later || size == 8)};
      float logs[2][4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        WarpMultiplyHalf(logs[i], between, log_decays[2 * i], log_decays[2 * i + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &logs[i / 2][i % 2 * 2];
        const uint32_t e = Bf16::Round(Exp2(pair[0]), Exp2(pair[1]));
        scaled[0][i] = Bf16::Multiply(scaled[0][i], e);
        scaled[1][i] = Bf16::Multiply(scaled[1][i], e);
      }
    }
#pragma unroll
    for (int product = 0; product < L::kFarProducts; ++product) {
      if (size == 0 && product == 0) continue;
      const uint32_t (&later)[4] = scaled[kReverse ? 0 : product];
      const uint32_t (&earlier)[4] = scaled[kReverse ? product : 0];
      Accumulator<2>& sum = sums[product];
      if (size == 8) {
        WarpMultiply(sum[0], {0u, later[1], 0u, later[3]}, earlier[0], earlier[2]);
        continue;
      }
      float of_level[4] = {};
      WarpMultiply(of_level, {later[0], 0u, later[2], 0u}, earlier[0], earlier[2]);
      WarpMultiply(of_level, {0u, later[1], 0u, later[3]}, earlier[1], earlier[3]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int differing = row ^ (col + e % 2);
        if (differing >= size && differing < (size > 0 ? 2 * size : 1)) sum[e / 2][e] = of_level[e];
      }
    }
  }
#pragma unroll
  for (int product = 0; product < L::kFarProducts; ++product)
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float* const pair = &sums[product][i / 2][(i + 1) / 2 * 2];
      float2 factors;
      if constexpr (kReverse) {
        factors.x = -keys.of_rows[row + (i > 0 ? 8 : 0)] * (product > 0 ? keys.scale : 1.0f);
        factors.y = factors.x;
      } else {
        const float* const of_pair = keys.of_rows + col + i / 2 * 8;
        factors = {of_pair[0], of_pair[1]};
      }
      float2& to = far[product].pairs[i][Lane()];
      const float2 before = add ? to : float2{0.0f, 0.0f};
      to = {fmaf(factors.x, pair[0], before.x), fmaf(factors.y, pair[1], before.y)};
    }
}

// Scales 16 columns of a tile in place, the columns of `warp`. Leaves in `decays` what S is multiplied
// by behind the tile if a chunk ends there, in `frames` what CentreFrames leaves, and in `far_sums` what
// MultiplyFarTokens leaves. Returns whether the tile is far.
template <typename T, typename L, bool kReverse, bool kOutput>
__device__ bool ScaleColumns(int warp, uint32_t operands, uint32_t raw_w, float* decays,
                             float* frames, Decay form, uint32_t present, const Ones& inclusive,
                             const Ones& exclusive, bool starts_chunk, bool ends_chunk,
                             const KeyFactors& keys, bool add, FarSum* far_sums, Carry& carry) {
  const int panel = warp / 4;
  const uint32_t here = TileAddress(0, 0, warp % 4);
  const uint32_t a_tile = operands + L::kA + panel * L::kReadStride + here;
  const uint32_t r_tile = operands + L::kR + panel * L::kReadStride + here;
  const uint32_t b_tile = operands + L::kB + panel * L::kPanelBytes + here;
  const uint32_t k_tile = operands + L::kK + panel * L::kPanelBytes + here;
  const uint32_t v_tile = operands + L::kV + panel * L::kPanelBytes + here;

  constexpr bool kFloat = L::kTerms > 1;
  uint32_t log_decays[L::kTerms][4];
  if constexpr (kFloat) {
    float w[4][2];
    ForEachElement<2>([&](int i, int e) {
      const uint32_t at =
          FloatAddress(raw_w + panel * L::kPanelBytes, L::kPanelsBytes,
                       e / 2 * 8 + 2 * (Lane() % 4) + e % 2, warp % 4 * 16 + 8 * i + Lane() / 4);
      w[2 * i + e / 2][e % 2] = __uint_as_float(LoadWord(at));
    });
    LogDecays(w, form, kLeastLog2, present, log_decays);
  } else {
    uint32_t w[4];
    LoadTransposed(raw_w + panel * L::kPanelBytes + here, w);
    if constexpr (L::kUnbounded)
      LogDecays<T, Decay::kExp>(w, L::kDelta ? Decay::kLog : form, kLeastLog2, present,
                                log_decays[0]);
    else
      LogDecays<T, Decay::kSigmoid>(w, Decay::kSigmoid, kLeastLog2, present, log_decays[0]);
  }

  if (starts_chunk) carry = {};
  TileSums sums;
  sums.Set([&](int i, int e) { return L::kUnbounded ? 0.0f : carry.sum[i][e % 2]; });
  sums.Add(inclusive.a, exclusive.a, log_decays);
  bool far = false;
  if constexpr (L::kUnbounded)
    far = CentreFrames<L>(warp, inclusive, exclusive, log_decays, frames, sums, carry);
  else
    sums.GetRow(kTileTokens - 1, 1.0f, carry.sum);

  // Factors of 16-bit operands are rounded to bfloat16: two products then take one instruction.
  uint32_t e[4];
  float factors[2][4];
  const auto round_factors = [&](float upper, float lower) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = &factors[i / 2][i % 2 * 2];
      const float of_row = i % 2 == 0 ? upper : lower;
      e[i] = Bf16::Round(of_row * pair[0], of_row * pair[1]);
    }
  };
  const auto exponentials = [&](float sign, const float (&x)[2][4]) {
    if constexpr (kFloat || L::kDelta) {
      ForEachElement<2>([&](int i, int j) { factors[i][j] = Exp2(sign * x[i][j]); });
      if constexpr (!kFloat) round_factors(1.0f, 1.0f);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &x[i / 2][i % 2 * 2];
        e[i] = Bf16::Round(Exp2(sign * pair[0]), Exp2(sign * pair[1]));
      }
    }
  };
  const auto store_scaled = [&](uint32_t tile, uint32_t (&x)[4]) {
    if constexpr (!kFloat)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = Bf16::Multiply(ToBf16<T>(x[i]), e[i]);
    StoreMatrices(tile, x);
  };
  const auto scale = [&](uint32_t tile) {
    if constexpr (kFloat) {
      ScaleFloats(tile - here, L::kTermBytes, warp % 4, factors);
    } else {
      uint32_t x[4];
      LoadMatrices(tile, x);
      store_scaled(tile, x);
    }
  };
  uint32_t key[4], reads[4], writes[4];  // of a keyed call
  if constexpr (L::kKeyed) {
    uint32_t rate[4];
    LoadMatrices(kReverse ? b_tile : k_tile, key);
    LoadMatrices(kReverse ? a_tile : b_tile, rate);
    const TileKeys<T, kPanelCols> made(keys, 16 * warp, key, rate);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      key[i] = made.key[i];
      reads[i] = kReverse ? made.b[i] : made.a[i], writes[i] = kReverse ? made.a[i] : made.b[i];
    }
  }
  const auto scale_made = [&](uint32_t tile, uint32_t (&made)[4]) {
    if constexpr (L::kKeyed)
      store_scaled(tile, made);
    else
      scale(tile);
  };
  // The state is not rounded at the end of a chunk, so its factors are not rounded.
  const auto store_decays = [&] {
    if (!L::kDelta || ends_chunk) StoreExponentials<L>(warp, carry.sum, decays);
  };
  if constexpr (L::kDelta) {
    store_decays();
    uint32_t k[4], q[4] = {};
    const auto store = [&](uint32_t tile, const uint32_t (&from)[4]) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = from[i];
      store_scaled(tile, x);
    };
    LoadMatrices(a_tile, k);
    if constexpr (kReverse || kOutput) LoadMatrices(kReverse ? k_tile : r_tile, q);
    const float upper = keys.of_rows[Lane() / 4], lower = keys.of_rows[Lane() / 4 + 8];
    exponentials(1.0f, kReverse ? sums.before : sums.upto);
    if constexpr (kReverse) round_factors(-upper, -lower);
    store(a_tile, k);
    if constexpr (kOutput) store(r_tile, q);
    if (far) {  // what is written is counted from the end of the tile
      float all[2][2];
      sums.GetRow(kTileTokens - 1, 1.0f, all);
      sums.Subtract([&](int i, int e) { return all[i][e % 2]; });
    }
    exponentials(-1.0f, kReverse ? sums.before : sums.upto);
    if constexpr (!kReverse) round_factors(upper, lower);
    store(b_tile, k);
    if constexpr (kReverse) {
      round_factors(keys.scale, keys.scale);
      store(k_tile, q);
    }
    if (far) MultiplyFarTokens<T, L, kReverse>(k, q, log_decays[0], keys, add, far_sums);
  } else {
    exponentials(1.0f, sums.before);
    scale_made(a_tile, reads);
    if constexpr (kReverse) {
      exponentials(-1.0f, sums.before);
      scale(k_tile);
    }
    exponentials(1.0f, sums.upto);
    if constexpr (kOutput) scale(r_tile);
    store_decays();
    exponentials(-1.0f, sums.upto);
    scale_made(b_tile, writes);
    if constexpr (!kReverse) scale_made(k_tile, key);
  }
  if constexpr (std::is_same_v<T, __half>) ConvertMatrices<T>(v_tile);
  if constexpr (kFloat) {
    ForEachElement<2>([&](int i, int j) { factors[i][j] = 1.0f; });
    scale(v_tile);
  }
  return far;
}

// Makes TokenFactors of g and beta, in their place.
template <bool kReverse>
__device__ void MakeFactors(TokenFactors& factors) {
  const int row = Lane() % kTileTokens;
  const float beta = factors.beta[row], log = kLog2E * factors.log[row];
  float upto = log < kVanishedLog2 ? kVanishedLog2 : log;
#pragma unroll
  for (int step = 1; step < kTileTokens; step *= 2) {
    const float earlier = __shfl_sync(~0u, upto, Lane() - step & 31);
    if (row >= step) upto += earlier;
  }
  const float all = __shfl_sync(~0u, upto, kTileTokens - 1);
  const float before = __shfl_sync(~0u, upto, Lane() - 1 & 31);
  const float sum = !kReverse ? upto : row > 0 ? before : 0.0f;
  __syncwarp();  // two lanes have read what one of them writes
  if (Lane() >= kTileTokens) return;
  factors.log[row] = sum;
  factors.read[row] = (kReverse ? -beta : 1.0f) * Exp2(sum);
  factors.write[row] = (kReverse ? 1.0f : beta) * Exp2(all - sum);
  if (row == 0) factors.state = Exp2(all);
}

// Clears the elements of a tile of tokens by tokens whose two tokens are of different frames of a far
// tile.
__device__ inline void KeepFrames(Accumulator<2>& m) {
  const bool same = Lane() / 16 == Lane() % 4 / 2;
  ForEachElement<2>([&](int i, int e) {
    if (!same || i != e / 2) m[i][e] = 0.0f;
  });
}

// The products of a tile of tokens by tokens, one per warp: M, tril(At Kh^T), tril(Rt Bh^T) and
// tril(Rt Kh^T). `factors` are those of decays of heads. Where channels are far at once, `far` has a bit for each
// 16 of them, and `far_sums` what each warp that scales has for M and for the other product.
template <typename L, bool kReverse, bool kOutput>
__device__ void MultiplyTokens(int warp, uint32_t operands, uint32_t products,
                               const TokenFactors& factors, float scale, const RowMarks& marks,
                               uint32_t far, const FarSum* far_sums) {
  const bool reads_r = warp >= 2, writes_k = warp % 2 == 1;
  if (warp >= (kOutput ? 4 : 2) || (L::kJoined && writes_k)) return;
  const uint32_t left = operands + (reads_r ? L::kR : L::kA);
  const uint32_t right = operands + (writes_k ? L::kK : L::kB);
  const int right_stride = writes_k ? L::kPanelBytes : L::kWriteStride;
  constexpr int kSums = L::kSpecialized && L::kDelta ? L::kPanels : 1;
  Accumulator<2> sums[kSums] = {};  // so that fewer products wait for each other
  const auto multiply = [&](int panel, int tile, Accumulator<2>& sum) {
    Left a[L::kTerms];
    uint32_t b[L::kTerms][4];
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) {
      const int from = term * L::kTermBytes;
      LoadLeft(left + panel * L::kReadStride + from, 0, tile, a[term]);
      KAlongRows{right + panel * right_stride + from, tile}.Load(0, b[term]);
    }
    ForProducts<L::kTerms>([&](int i, int j) {
      WarpMultiply(sum[0], a[i], b[j][0], b[j][1]);
      WarpMultiply(sum[1], a[i], b[j][2], b[j][3]);
    });
  };
  Accumulator<2>& m = sums[0];
  if (!L::kFarAtOnce || far == 0) {
#pragma unroll
    for (int i = 0; i < L::kPanels * 4; ++i)
      if constexpr (kSums > 1)
        multiply(i % kSums, i / kSums, sums[i % kSums]);
      else
        multiply(i / 4, i % 4, m);
  } else {
#pragma unroll 1
    for (uint32_t near = far ^ ((1u << 4 * L::kPanels) - 1); near != 0; near &= near - 1) {
      const int tile = __ffs(near) - 1;
      multiply(tile / 4, tile % 4, m);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const FarSum& sum = far_sums[i * L::kFarProducts + (warp > 0)];
      const bool has = (far & 0x11u << i) != 0;  // in a panel
#pragma unroll
      for (int pair = 0; pair < 3; ++pair) {
        const float2 x = has ? sum.pairs[pair][Lane()] : float2{0.0f, 0.0f};
        float* const to = &m[pair / 2][(pair + 1) / 2 * 2];
        to[0] += x.x, to[1] += x.y;
      }
    }
  }
#pragma unroll
  for (int sum = 1; sum < kSums; ++sum)
    ForEachElement<2>([&](int i, int e) { m[i][e] += sums[sum][i][e]; });
  if constexpr (L::kHeadDecay) {
    ForEachElement<2>([&](int i, int e) {
      const int row = Lane() / 4 + e / 2 * 8, col = 8 * i + 2 * (Lane() % 4) + e % 2;
      const float of_pair =
          factors.beta[kReverse ? row : col] * Exp2(factors.log[row] - factors.log[col]);
      m[i][e] *= writes_k ? -scale * of_pair : reads_r ? of_pair : -of_pair;
    });
  } else if constexpr (L::kJoined) {
    ForEachElement<2>([&](int i, int e) { m[i][e] = reads_r ? m[i][e] : -m[i][e]; });
  }
  KeepLower(reads_r || (kReverse && writes_k), m);
  if (marks.clears != 0) KeepSegments(marks, m);
  if (!L::kFarAtOnce && far) KeepFrames(m);
  Left rounded[L::kTerms];
  if (warp == 0)
    InvertUnitLower(m, rounded);
  else
    Round(m[0], m[1], rounded);
  const int place = reads_r ? (writes_k ? kQrk : kQrb) : (writes_k ? kAak : kM);
  const uint32_t to = PackedTileAddress(products + place * kTileBytes);
#pragma unroll
  for (int term = 0; term < L::kTerms; ++term)
    StoreMatrices(to + term * L::kProductTermBytes, rounded[term]);
}

// The rows of a tile by which the state advances: those before `read_end` read the state before them,
// and those from `write_begin` on write to the state after them. If `clears`, the state is cleared.
struct AdvancingRows {
  int begin, end, read_end, write_begin;
  bool clears;

  // A clearing before the first row is of these rows, one behind the last row only at the end of the
  // tile.
  __device__ AdvancingRows(int begin, int end, const RowMarks& marks) : begin(begin), end(end) {
    const uint32_t upto = end == kTileTokens ? ~0u : (1u << end) - 1;
    RowMarks own = marks;
    own.clears &= upto & ~((1u << begin) - 1);
    clears = own.clears != 0;
    read_end = clears ? own.FirstCleared() : end;
    write_begin = clears ? own.LastCleared() : begin;
  }
};

// What S owes of the decays of its head: what it has yet to be multiplied by before and after a tile. It pays
// where it is stored, or before the rest is too small.
struct OwedDecay {
  static constexpr float kLeast = 0x1p-60f;
  float before, after;
  bool pays;

  __device__ OwedDecay(float before, float of_tile, bool stored)
      : before(before), after(before * of_tile), pays(stored || after < kLeast) {}
  __device__ float Rest() const { return pays ? 1.0f : after; }
  // By what is written to S is multiplied.
  __device__ float Unpaid() const { return Reciprocal(Rest()); }
};

// Factors of the tokens that are the columns of sums of this lane, if there are any.
template <bool kAny>
struct ColumnFactors {
  float2 of_pairs[2];

  __device__ ColumnFactors(const float* factors, float also) {
#pragma unroll
    for (int i = 0; kAny && i < 2; ++i) {
      of_pairs[i] = *reinterpret_cast<const float2*>(factors + 8 * i + 2 * (Lane() % 4));
      of_pairs[i].x *= also, of_pairs[i].y *= also;
    }
  }
  __device__ void Scale(float (*sum)[4]) const {
    ForEachElement<2>(
        [&](int i, int e) { sum[i][e] *= e % 2 == 0 ? of_pairs[i].x : of_pairs[i].y; });
  }
};

// Undoes Round of two fragments.
__device__ inline void Unround(const Left& x, Accumulator<2>& sum) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i / 2][i % 2 * 2] = Bf16::Low(x[i]);
    sum[i / 2][i % 2 * 2 + 1] = Bf16::High(x[i]);
  }
}

// Multiplies 64 columns of S by factors that StoreFactors has stored.
template <typename L>
__device__ void ScalePanel(const float* factors, int panel, float (&s)[8][4]) {
  const float* const decays = factors + (threadIdx.x & 3) * L::kDecayStride + 16 * panel;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const float4 d = *reinterpret_cast<const float4*>(decays + 4 * pair);
    float (&left)[4] = s[2 * pair], (&right)[4] = s[2 * pair + 1];
    left[0] *= d.x, left[1] *= d.y, left[2] *= d.x, left[3] *= d.y;
    right[0] *= d.z, right[1] *= d.w, right[2] *= d.z, right[3] *= d.w;
  }
}

// Advances the state by a tile, or by some of its rows if kSomeRows, and leaves y of the tile, of which
// `words` are the part of this lane, in shared memory. By some rows, products wait for each other. If kFar, S is
// multiplied by `in_tile` after it is read.
template <typename T, typename L, bool kOutput, bool kSomeRows, bool kFar>
__device__ void AdvanceState(int warp, uint32_t operands, uint32_t products, uint32_t y,
                             bool has_values, const TokenFactors& factors, const OwedDecay& decay,
                             float scale, const AdvancingRows& rows, const float* in_tile,
                             uint32_t (&words)[4], float (&s)[L::kPanels][8][4]) {
  constexpr int kReadFragments = kOutput ? 4 : 2, kTerms = L::kTerms;
  const int panel_of_v = warp / 4;
  Left v[kTerms] = {};
  if (has_values)
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadLeftTransposed(operands + L::kV + panel_of_v * L::kPanelBytes + term * L::kTermBytes, 0,
                         warp % 4, v[term]);
  // Loaded here, and not where sums wait for them.
  const ColumnFactors<L::kHeadDecay> reads(factors.read, decay.before);
  const ColumnFactors<L::kHeadDecay> writes(factors.write, decay.Unpaid());
  Left v_written[kTerms];
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int i = 0; i < 4; ++i) v_written[term][i] = v[term][i];
  const auto keep_writing = [&](Left(&x)[kTerms]) {
#pragma unroll
    for (Left& term : x) KeepTokens(rows.write_begin, rows.end, term);
  };
  // Matrix units cut sums off instead of rounding them, which would pile up in S. So what a tile of floats
  // adds is summed apart.
  float of_tile[L::kPanels][8][4];
  const auto sum = [&](int panel) -> float (&)[8][4] {
    if constexpr (kTerms > 1)
      return of_tile[panel];
    else
      return s[panel];
  };

  // An Accumulator<kReadFragments>, on which nvcc 12.4 fails.
  float zy[kReadFragments][4];  // [Z | Y]^T = S [At; Rt]^T + V^T [Aak; Qrk]^T
  // ptxas lets no sums of products be read while other products run.
  Left before[L::kPanels][kPanelTiles][kTerms];
  constexpr bool kRoundsFirst =
      L::kSharesRegisters && L::kPanels > 1 && (!L::kUnbounded || kSomeRows || kFar);
  const auto round = [&](int panel) {
    RoundPanel(s[panel], before[panel]);
    if constexpr (kFar) ScalePanel<L>(in_tile, panel, s[panel]);
    if constexpr (L::kHeadDecay)
      if (decay.pays) ForEachElement<8>([&](int i, int e) { s[panel][i][e] *= decay.after; });
  };
  if constexpr (kRoundsFirst)
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel) round(panel);
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    if (panel > 0 && !L::kSharesRegisters) {  // there are none for the operands of two panels
      CommitProducts();
      Finish(zy);
    }
    if constexpr (!kRoundsFirst) round(panel);
    BeginProducts();
#pragma unroll
    for (int tile = 0; tile < kPanelTiles; ++tile) {
      const KAlongRows read{operands + panel * L::kReadStride, tile};
      MultiplyOrAdd(panel > 0 || tile > 0, zy, before[panel][tile], read, int{L::kTermBytes});
    }
  }
  // What is done to sums before products are added to them.
  if constexpr (kSomeRows || L::kJoined || L::kHeadDecay) {
    CommitProducts();
    if constexpr (L::kHeadDecay) {
      if constexpr (!L::kJoined) {
        Accumulator<2> values;
        Unround(v[0], values);
        writes.Scale(values);
        ForEachElement<2>([&](int i, int e) { values[i][e] *= scale; });
        Round(values[0], values[1], v_written);
      }
    }
    Finish(zy);
#pragma unroll
    for (int half = 0; half < kReadFragments; half += 2) {
      if constexpr (L::kHeadDecay) reads.Scale(&zy[half]);
      if constexpr (kSomeRows) KeepTokens<2>(0, rows.begin, rows.read_end, &zy[half]);
    }
    if constexpr (kSomeRows)
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel)
        ForEachElement<8>([&](int fragment, int e) {
          if (rows.clears) s[panel][fragment][e] = 0.0f;
        });
  }
  if constexpr (L::kJoined) {
    Accumulator<2> values;
    Unround(v[0], values);
    ForEachElement<2>([&](int i, int e) { zy[i][e] = values[i][e] - zy[i][e]; });
  } else {
    if constexpr (kSomeRows || L::kHeadDecay) BeginProducts();
    // The operand is Aak and Qrk behind it.
    Multiply<true>(zy, v, PackedTiles{products + kAak * kTileBytes}, L::kProductTermBytes);
    CommitProducts();
    if constexpr (kSomeRows) {
      Finish(zy);
      keep_writing(v_written);
      BeginProducts();
    }
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      Multiply<kTerms == 1>(sum(panel), v_written,
                            KDownRows{operands + L::kK + panel * L::kPanelBytes}, L::kTermBytes);
    CommitProducts();
    WaitForProducts<1>();
    Settle(zy);
  }

  Left rounded[kTerms];
  Round(zy[0], zy[1], rounded);
  Accumulator<2> u;  // U^T = Z^T M^T
  BeginProducts();
  Multiply<false>(u, rounded, PackedTiles{products + kM * kTileBytes}, L::kProductTermBytes);
  CommitProducts();
  Finish(u);

  Left u_rounded[kTerms], u_written[kTerms];
  Round(u[0], u[1], u_rounded);
  if constexpr (L::kHeadDecay) writes.Scale(u);
  Round(u[0], u[1], u_written);
  BeginProducts();
  if constexpr (kOutput) {
    // Y += Qrb U. The operand is M and Qrb behind it: M U falls into Z, which is no longer needed.
    Multiply<true>(zy, u_rounded, PackedTiles{products + kM * kTileBytes}, L::kProductTermBytes);
    CommitProducts();
  }
  if constexpr (kSomeRows) {
    WaitForProducts<0>();
    keep_writing(u_written);
    BeginProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(sum(panel), u_written, KDownRows{operands + L::kB + panel * L::kWriteStride},
                   L::kTermBytes);
  CommitProducts();
  if constexpr (kOutput) {
    WaitForProducts<1>();
    Settle(zy);
    const auto advances = [&](int row) {
      return !kSomeRows || (row >= rows.begin && row < rows.end);
    };
    const uint32_t y_panel = y + panel_of_v * L::kPanelBytes;
    const float of_y = L::kDelta ? scale : 1.0f;
    if constexpr (kTerms > 1) {
      ForEachElement<2>([&](int i, int e) {
        const int row = 8 * i + 2 * (Lane() % 4) + e % 2;
        const int col = warp % 4 * 16 + Lane() / 4 + e / 2 * 8;
        if (advances(row))
          StoreWord(FloatAddress(y_panel, L::kPanelsBytes, row, col),
                    __float_as_uint(zy[2 + i][e]));
      });
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (advances(i % 2 * 8 + 2 * (Lane() % 4)))
          words[i] =
              Pair<T>::Round(of_y * zy[2 + i % 2][i / 2 * 2], of_y * zy[2 + i % 2][i / 2 * 2 + 1]);
      StoreTransposed(TileAddress(y_panel, 0, warp % 4), words);
    }
  }
  WaitForProducts<0>();
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    Settle(sum(panel));
    if constexpr (kTerms > 1)
      ForEachElement<8>(
          [&](int fragment, int e) { s[panel][fragment][e] += of_tile[panel][fragment][e]; });
  }
}

// What a block does, and what a thread knows of its place in it. `tile` counts in the order of the
// recurrence; in reverse, tile 0 has the last tokens, and the first row of a tile is its last
// token.
template <typename T, int N, bool kReverse, bool kOutput, Work kWork, bool kMarked, Kind kKind,
          bool kAmple>
class ScanBlock {
 public:
  using L = ScanLayout<T, N, kReverse, kOutput, kWork, kKind, kAmple>;
  static constexpr bool kKeyed = L::kKeyed, kUnbounded = L::kUnbounded;
  // Whether heads have no other K and V than N.
  static constexpr bool kFilled = !kMarked || kKeyed || L::kTerms > 1;
  static constexpr bool kTogether = kWork == Work::kTogether;
  static_assert(!kTogether || N == kPanelCols, "a warpgroup advances 64 rows of a state");
  static_assert(!kKeyed || N == kPanelCols, "a keyed call has heads of 64");

  __device__ ScanBlock(const Scan& scan, unsigned char* memory)
      : scan(scan),
        memory(memory),
        shared(SharedAddress(memory)),
        warpgroup(L::kThreads == 128 ? 0 : Warp() / 4),
        warp(Warp() % (4 * L::kPanels)),
        identity(L::kTransition && warpgroup >= L::kPanels),
        multiplies(warpgroup == (L::kHelpers > 0 ? L::kPanels : 0)),
        scales(warpgroup == (L::kHelpers > 0  ? L::kPanels + L::kHelpers - 1
                             : L::kTransition ? 1
                                              : 0)),
        copies(L::kTransition  ? warpgroup == 2 * L::kPanels - 1
               : L::kHeadDecay ? scales
                               : multiplies),
        for_later(L::kTransition && scan.splits.memory != nullptr),
        scale(L::kDelta ? *scan.scale : 1.0f) {}

  // What the warpgroups that scale operands keep from tile to tile. It is no member, since the
  // compiler keeps a member array from being optimized with the other members until late.
  struct Scaling {
    const Ones inclusive{true, true, false}, exclusive{true, false, false};
    Carry carry[L::kPanels] = {};
  };

  // Finds the head and the split of this block. Returns false if the block has nothing to do.
  __device__ __forceinline__ bool Find() {
    const Splits& splits = scan.splits;
    const auto [turn, split] =
        splits.WorkOfBlock<kReverse>(scan.sequences, scan.dims.tokens, scan.dims.heads, for_later);
    if (split < 0) return false;
    sequence = turn.sequence, span = turn.span;
    head = sequence * scan.dims.heads + blockIdx.x % scan.dims.heads;

    const int64_t in_split = splits.ChunksPerSplit(span.Chunks());
    count = splits.Count(span.Chunks());
    order = kReverse ? count - 1 - split : split;
    first_chunk = split * in_split, first_token = first_chunk * kChunk;
    const int64_t left = span.tokens - first_token, most = in_split * kChunk;
    tokens = static_cast<int>(left < most ? left : most);
    tiles = tokens > 0 ? (tokens + kTileTokens - 1) / kTileTokens : 0;

    copy_row = threadIdx.x % 128 / 8;
    copy_to = PieceAddress(0, copy_row, Piece());
    first = static_cast<unsigned>(span.first_token + first_token);
    const unsigned own = static_cast<unsigned>(head - sequence * scan.dims.heads);
    const unsigned of_keys = kKeyed ? own : own / static_cast<unsigned>(scan.dims.group);
    const int piece_column = L::kTerms == 1 ? 8 * Piece() : Piece() / 2 * 16 + Piece() % 2 * 4;
    const auto place = [&](unsigned head) { return head * kUnit + (kFilled ? piece_column : 0); };
    in_heads = place(own), in_keys = place(of_keys);
    return true;
  }

  // Fills the pipeline: starts the copies of kStages tiles, scales two of them and multiplies one.
  __device__ __forceinline__ void Prologue(Scaling& scaling) {
    if (threadIdx.x < L::kStages) {
      CopyBarrierOf(threadIdx.x).Init(128);
      if (kMarked && static_cast<int>(threadIdx.x) < tiles)
        Words()[threadIdx.x] = WordOf(threadIdx.x);
    }
    if constexpr (kKeyed) LoadParameters();
    if (kUnbounded && threadIdx.x < L::kFramePlaces) *FarOf(threadIdx.x) = 0;
    __syncthreads();
    if (copies)
      for (int tile = 0; tile < L::kStages && tile < tiles; ++tile) {
        CopyOperands(tile, WordOf(tile));
        if (tile < L::kDecayStages) CopyDecays(tile);
      }
    if (scales)
      for (int tile = 0; tile < 2 && tile < tiles; ++tile) ScaleOperands(tile, scaling);
    PublishOperands();
    WaitForTile();
    if (copies)
      for (int tile = L::kDecayStages; tile < L::kStages && tile < tiles; ++tile) CopyDecays(tile);
    if (multiplies && tiles > 0) TokenProducts(0);
    PublishOperands();
    __syncthreads();
    next_word = copies && L::kStages < tiles ? WordOf(L::kStages) : 0u;
  }

  // The main loop of a warpgroup: its work on the state, its work for the state, or both. The
  // epilogue stores the state.
  template <bool kOnState, bool kForState>
  __device__ __forceinline__ void MainLoop(Scaling& scaling) {
    State s;
    float owed = 1.0f;
    if constexpr (kOnState) LoadStart(s);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t y = OutputOf(tile);
      if constexpr (kForState)
        if (multiplies && tile + 1 < tiles) TokenProducts(tile + 1);
      if constexpr (kOnState) {
        if (!L::kTransition && StartsChunk(tile)) SaveState(tile, s);
        const float rest = Advance(tile, y, owed, s);
        if constexpr (L::kHeadDecay) owed = rest;
        if (!L::kHeadDecay && EndsChunk(tile)) ScaleState(DecaysOf(tile), s);
      }
      if constexpr (kForState) {
        if (scales && tile + 2 < tiles) ScaleOperands(tile + 2, scaling);
        if (multiplies || scales) PublishOperands();
      }
      WaitForTile();
      if constexpr (kForState) {
        if (kOutput && copies) WriteOutput(tile, y);
        if (copies && tile + L::kStages < tiles) CopyNext(tile + L::kStages);
      }
    }
    if constexpr (kOnState) StoreEnd(s);
  }

  __device__ bool OnState() const { return warpgroup < L::kPanels; }

 private:
  static constexpr int kUnit = kFilled ? N : 1;  // elements, or heads
  using Accumulators = StateAccumulator<N>;
  using State = typename Accumulators::State;
  static constexpr int kFloatPiece = 8;

  // The number of a tile in time, and the token of a tile whose pieces this thread copies.
  __device__ int TimeOf(int tile) const { return kReverse ? tiles - 1 - tile : tile; }
  __device__ int TokenOf(int tile) const {
    return TimeOf(tile) * kTileTokens + (kReverse ? kTileTokens - 1 - copy_row : copy_row);
  }
  // K and V.
  __device__ int KeySize() const { return kFilled ? N : static_cast<int>(scan.dims.head_size); }
  __device__ int ValueSize() const { return kFilled ? N : static_cast<int>(scan.dims.value_size); }
  // The piece of a row of a panel that this thread copies, whether a head of `size` channels has it, and its
  // element in a token.
  static __device__ int Piece() { return threadIdx.x % 8; }
  static __device__ bool Has(int panel, int size) {
    return kFilled || kPanelCols * panel + 8 * Piece() < size;
  }
  // Where this thread's piece of a token lies in arrays of heads and of keys, counted in what kUnit says.
  __device__ int64_t InHeads(int token) const { return At(token, scan.dims.heads, in_heads); }
  __device__ int64_t InKeys(int token) const {
    return kKeyed ? InHeads(token) : At(token, scan.dims.key_heads, in_keys);
  }
  __device__ int64_t At(int token, int64_t heads, unsigned in_token) const {
    return static_cast<int64_t>(first + token) * static_cast<unsigned>(heads * kUnit) + in_token;
  }
  // The element that lies there, of heads of `size` channels.
  static __device__ int64_t ElementOf(int64_t at, int size) {
    return kFilled ? at : at * size + 8 * Piece();
  }
  __device__ bool StartsChunk(int tile) const {
    return kReverse ? tile == 0 || TimeOf(tile) % 4 == 3 : tile % 4 == 0;
  }
  __device__ bool EndsChunk(int tile) const {
    return kReverse ? TimeOf(tile) % 4 == 0 : tile % 4 == 3 || tile == tiles - 1;
  }

  // The marks of a tile come with its operands.
  __device__ uint32_t* Words() const { return reinterpret_cast<uint32_t*>(memory + L::kWords); }
  __device__ uint32_t WordOf(int tile) const {
    if (!kMarked || (!kKeyed && !scan.marks.Given())) return 0u;
    return scan.marks.Word(sequence, first_token + TimeOf(tile) * kTileTokens);
  }
  __device__ RowMarks MarksOf(int tile) const {
    return RowMarks(kMarked ? Words()[tile % L::kStages] : 0u, tokens - TimeOf(tile) * kTileTokens,
                    kReverse);
  }

  // Where a tile lies in the rings.
  __device__ uint32_t OperandsOf(int tile) const {
    return shared + tile % L::kStages * L::kOperandBytes;
  }
  __device__ CopyBarrier CopyBarrierOf(int tile) const {
    return CopyBarrier(shared + L::kBarriers + 8 * (tile % L::kStages));
  }
  __device__ uint32_t RawDecaysOf(int tile) const {
    return shared + L::kW + tile % L::kDecayStages * L::kTerms * L::kPanelsBytes;
  }
  __device__ float* DecaysOf(int tile) const {
    return reinterpret_cast<float*>(memory + L::kDecays) + tile % L::kStages * 4 * L::kDecayStride;
  }
  // Of decays without a bound.
  __device__ uint32_t* FarOf(int tile) const {
    return reinterpret_cast<uint32_t*>(memory + L::kFar) + tile % L::kFramePlaces;
  }
  __device__ uint32_t IsFar(int tile) const { return kUnbounded ? *FarOf(tile) : 0u; }
  __device__ float* FactorsOf(int tile, int frame) const {
    return reinterpret_cast<float*>(memory + L::kFactors +
                                    (tile % L::kFramePlaces * L::kStateFactors + frame) *
                                        L::kDecayBytes);
  }
  __device__ FarSum* FarSumsOf(int tile) const {
    return reinterpret_cast<FarSum*>(memory + L::kFarSums + tile % 2 * 4 * L::kFarSumBytes);
  }
  __device__ uint32_t ProductsOf(int tile) const {
    return shared + L::kProducts + tile % 2 * L::kProductBytes;
  }
  __device__ uint32_t OutputOf(int tile) const {
    return L::kOverValues ? OperandsOf(tile) + L::kV
                          : shared + L::kY + tile % 2 * L::kTerms * L::kPanelsBytes;
  }

  // Of a keyed call.
  __device__ float* Parameters() const { return reinterpret_cast<float*>(memory + L::kParameters); }
  // Of a keyed call `inverse`, of the delta rule beta or what has it.
  __device__ float* FloatsOf(int tile) const {
    return reinterpret_cast<float*>(memory + L::kFloats + tile % L::kStages * L::kFloatBytes);
  }
  __device__ TokenFactors& TokenFactorsOf(int tile) const {
    return *reinterpret_cast<TokenFactors*>(FloatsOf(tile));
  }
  __device__ void LoadParameters() const {
    const int stride = static_cast<int>(scan.dims.heads * N);
    const float* const from = scan.parameters + sequence * Wkv7KeysCall::kParameters * stride +
                              (head - sequence * scan.dims.heads) * N;
    for (int i = threadIdx.x; i < 3 * N; i += L::kThreads)
      Parameters()[i] = from[static_cast<int64_t>(i / N) * stride + i % N];
  }

  __device__ bool IsPresent(int token, uint32_t word) const {
    return token < tokens && (word >> (kTileTokens + token % kTileTokens) & 1) == 0;
  }
  // Calls fn(panel, copy) for the panels of a tile, where copy(to, low, x, at, size) copies the piece of this thread
  // that lies at `at` in an array with heads of `size` channels. Of floats it copies two pieces, which lie kFloatPiece
  // elements apart, to where two terms lie, `low` bytes apart.
  template <typename Fn>
  __device__ void ForPanelsOf(int tile, uint32_t word, Fn&& fn) const {
    const int token = TokenOf(tile);
    const bool present = IsPresent(token, word);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      fn(panel, [&](uint32_t to, int low, const void* x, int64_t at, int size) {
#pragma unroll
        for (int i = 0; i < L::kTerms; ++i)
          CopyAsync(
              to + copy_to + i * low,
              static_cast<const T*>(x) + ElementOf(at, size) + kPanelCols * panel + i * kFloatPiece,
              present && Has(panel, size));
      });
  }
  __device__ __forceinline__ void CopyOperands(int tile, uint32_t word) const {
    const uint32_t to = OperandsOf(tile);
    const int token = TokenOf(tile);
    ForPanelsOf(tile, word, [&](int panel, auto copy) {
      const auto keys = [&](int at, const void* x) {
        copy(to + at, L::kTermBytes, x, InKeys(token), KeySize());
      };
      if constexpr (!kKeyed || kReverse) keys(L::kA + panel * L::kReadStride, scan.a);
      if constexpr (kOutput) keys(L::kR + panel * L::kReadStride, scan.r);
      if constexpr (!L::kDelta) keys(L::kB + panel * L::kPanelBytes, scan.b);
      if constexpr (!L::kJoined) keys(L::kK + panel * L::kPanelBytes, scan.k);
      copy(to + L::kV + panel * L::kPanelBytes, L::kTermBytes, scan.v, InHeads(token), ValueSize());
    });
    if constexpr (L::kFloatBytes > 0) {
      // In float [B, T, H].
      const auto copy_float = [&](float* to, const void* from) {
        CopyWordAsync(SharedAddress(to + copy_row),
                      static_cast<const float*>(from) + InHeads(token) / kUnit,
                      IsPresent(token, word));
      };
      if (Piece() == 0) {
        if constexpr (L::kHeadDecay) {
          copy_float(TokenFactorsOf(tile).log, scan.w);
          copy_float(TokenFactorsOf(tile).beta, scan.beta);
        } else {
          copy_float(FloatsOf(tile), kKeyed ? scan.inverse : scan.beta);
        }
      }
    }
  }
  // The last copies of a tile: after them its CopyBarrier waits for all.
  __device__ __forceinline__ void CopyDecays(int tile) const {
    if constexpr (!L::kHeadDecay)
      ForPanelsOf(tile, 0, [&](int panel, auto copy) {
        copy(RawDecaysOf(tile) + panel * L::kPanelBytes, L::kPanelsBytes, scan.w,
             L::kDelta ? InHeads(TokenOf(tile)) : InKeys(TokenOf(tile)), KeySize());
      });
    CopyBarrierOf(tile).ArriveAfterCopies();
  }
  // Starts the copies of a tile in the main loop. The word of its marks was loaded an iteration
  // ago.
  __device__ __forceinline__ void CopyNext(int tile) {
    if (kMarked && threadIdx.x % 128 == 0) Words()[tile % L::kStages] = next_word;
    CopyOperands(tile, next_word);
    CopyDecays(tile);
    if (tile + 1 < tiles) next_word = WordOf(tile + 1);
  }

  __device__ __forceinline__ void ScaleOperands(int tile, Scaling& scaling) const {
    CopyBarrierOf(tile).Wait(tile / L::kStages % 2);
    if constexpr (L::kHeadDecay) {
      if (warp % 4 == 1) MakeFactors<kReverse>(TokenFactorsOf(tile));
      if constexpr (std::is_same_v<T, __half>) ConvertOperands(tile);
    } else {
      uint32_t far = 0;
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel) {
        const bool is_far = ScaleColumns<T, L, kReverse, kOutput>(
            warp % 4 + 4 * panel, OperandsOf(tile), RawDecaysOf(tile), DecaysOf(tile),
            FactorsOf(tile, 0), scan.decay, MarksOf(tile).present, scaling.inclusive,
            scaling.exclusive, StartsChunk(tile), EndsChunk(tile),
            {Parameters(), FloatsOf(tile), scale}, far != 0,
            FarSumsOf(tile) + warp % 4 * L::kFarProducts, scaling.carry[panel]);
        if constexpr (L::kFarAtOnce)
          far |= is_far ? 1u << (warp % 4 + 4 * panel) : 0u;
        else if (is_far)
          *FarOf(tile) = 1;
      }
      if (far != 0 && Lane() == 0) atomicAdd(FarOf(tile), far);
    }
  }
  // Of decays of heads nothing else is done to the operands.
  __device__ __forceinline__ void ConvertOperands(int tile) const {
    const uint32_t here = TileAddress(OperandsOf(tile), 0, warp % 4);
#pragma unroll
    for (int panel = 0; panel < L::kOperandBytes / L::kPanelBytes; ++panel)
      ConvertMatrices<T>(here + panel * L::kPanelBytes);
  }
  __device__ __forceinline__ void TokenProducts(int tile) const {
    MultiplyTokens<L, kReverse, kOutput>(warp % 4, OperandsOf(tile), ProductsOf(tile),
                                         TokenFactorsOf(tile), scale, MarksOf(tile), IsFar(tile),
                                         FarSumsOf(tile));
  }

  // The tile barrier. What is read behind the barrier of a tile is written again only behind the next
  // one.
  __device__ __forceinline__ void WaitForTile() const { Synchronize(kTileBarrier, L::kThreads); }

  // Splits are numbered by their order in the recurrence. The transition of a split has become the
  // state at its end.
  __device__ float* TransitionOf(int64_t order) const {
    return scan.splits.Transition<kReverse>(head, scan.dims.heads, span, order);
  }
  __device__ __forceinline__ void LoadStart(State& s) const {
    // The start of the first split may be known. Then its transition is the state at its end.
    if (L::kTransition && (order > 0 || scan.start == nullptr))
      Accumulators::SetDiagonal(identity ? 1.0f : 0.0f, s);
    else if constexpr (kFilled)
      Accumulators::Load(order == 0 ? scan.start + head * N * N : TransitionOf(order - 1), s);
    else
      LoadPart(order == 0, s);
  }
  __device__ __forceinline__ void LoadPart(bool first, State& s) const {
    const int rows = first ? ValueSize() : N, cols = first ? KeySize() : N;
    Accumulators::LoadPart(first ? scan.start + head * rows * cols : TransitionOf(order - 1), rows,
                           cols, s);
  }
  // Saves the state before a chunk in [B, N, H, V, K], or its gradient after it in the scratch, where V and K are N:
  // of bfloat16 unless the operands are floats. `head` is b * H + h.
  __device__ __forceinline__ void SaveState(int tile, const State& s) const {
    const int64_t chunk = span.first_chunk + first_chunk + TimeOf(tile) / 4;
    const int64_t index = head + (chunk - sequence) * scan.dims.heads;
    if (!kReverse && scan.saved == nullptr) return;
    if constexpr (L::kTerms > 1)
      Accumulators::Store(s, static_cast<float*>(scan.saved) + index * N * N);
    else if constexpr (kFilled || kReverse)
      Accumulators::StoreRounded(s, static_cast<uint4*>(scan.saved) + index * (N * N / 8));
    else
      Accumulators::StorePartRounded(
          s, ValueSize(), KeySize(),
          static_cast<uint4*>(scan.saved) + index * (ValueSize() * KeySize() / 8));
  }
  // Returns what S then owes of the decays of its head.
  __device__ __forceinline__ float Advance(int tile, uint32_t y, float owed, State& s) const {
    uint32_t words[4] = {};
    const OwedDecay decay(owed, L::kHeadDecay ? TokenFactorsOf(tile).state : 1.0f, EndsChunk(tile));
    const auto advance = [&](auto some_rows, auto far, const AdvancingRows& rows) {
      AdvanceState<T, L, kOutput, decltype(some_rows)::value, decltype(far)::value>(
          warp, OperandsOf(tile), ProductsOf(tile), y, !identity, TokenFactorsOf(tile), decay,
          scale, rows, FactorsOf(tile, 1), words, s);
    };
    const RowMarks marks = MarksOf(tile);
    if constexpr (kUnbounded) {
      ScaleState(FactorsOf(tile, 0), s);
      // Its place is that of the tile before this one.
      if (threadIdx.x == 0) *FarOf(tile + L::kFramePlaces - 1) = 0;
    }
    const bool far = IsFar(tile) != 0;
    if (!far && marks.clears == 0) {
      advance(std::false_type(), std::false_type(), AdvancingRows(0, kTileTokens, marks));
    } else if constexpr (L::kFarAtOnce) {
      const AdvancingRows rows(0, kTileTokens, marks);
      if (marks.clears == 0)
        advance(std::false_type(), std::true_type(), rows);
      else
        advance(std::true_type(), std::true_type(), rows);
    } else if constexpr (kMarked) {
      const int count = far ? kFarFrameTokens : kTileTokens;
#pragma unroll 1
      for (int row = 0; row < kTileTokens; row += count) {
        if (row > 0) ScaleState(FactorsOf(tile, row / count), s);
        advance(std::true_type(), std::false_type(), AdvancingRows(row, row + count, marks));
      }
    }
    return decay.Rest();
  }
  __device__ __forceinline__ void ScaleState(const float* factors, State& s) const {
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel) ScalePanel<L>(factors, panel, s[panel]);
  }
  __device__ __forceinline__ void WriteOutput(int tile, uint32_t y) const {
    const int token = TokenOf(tile);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < L::kTerms; ++i)
        if (token < tokens && Has(panel, ValueSize()))
          *reinterpret_cast<uint4*>(static_cast<T*>(scan.y) +
                                    ElementOf(InHeads(token), ValueSize()) + kPanelCols * panel +
                                    i * kFloatPiece) =
              *reinterpret_cast<const uint4*>(memory + (y - shared) + panel * L::kPanelBytes +
                                              i * L::kPanelsBytes + copy_to);
  }
  __device__ __forceinline__ void StoreEnd(const State& s) const {
    const auto store = [&](float* to, int rows) {
      if constexpr (kFilled)
        Accumulators::Store(s, to + head * N * N);
      else
        Accumulators::StorePart(s, rows, KeySize(), to + head * rows * KeySize());
    };
    if (!L::kTransition) {
      if (order == count - 1) store(scan.end, ValueSize());
    } else if (!for_later) {
      float* const to = identity ? scan.factor : scan.end;
      if (to != nullptr) store(to, identity ? KeySize() : ValueSize());
    } else if (!identity) {
      Accumulators::Store(s, TransitionOf(order));
    } else if (order > 0) {
      Accumulators::Store(s, TransitionOf(order) + N * N);
    }
  }

  const Scan& scan;
  unsigned char* const memory;
  const uint32_t shared;
  const int warpgroup, warp;  // the warp among the warps of its state
  // Roles: advances the state that starts as the identity; computes token products; scales operands;
  // copies them and writes y. `for_later`: the transition goes to the memory of the splits.
  const bool identity, multiplies, scales, copies, for_later;
  const float scale;                 // of a call of the delta rule
  int64_t sequence, head;            // the sequence or row b, and b * H + h
  Span span;                         // of the sequence
  int64_t count, order;              // splits of the sequence, and this one in the recurrence
  int64_t first_chunk, first_token;  // of the split in its sequence
  int tokens, tiles;                 // of the split
  unsigned first;                    // the number of the first token in [B, T]
  unsigned in_heads, in_keys;        // where this thread's piece lies in a token
  int copy_row;                      // of this thread's piece in a tile
  uint32_t copy_to;                  // its address in a panel
  uint32_t next_word;                // marks of the tile that is copied next
};

// Warpgroups start with 128 registers a thread. Each one without a state gives 24 of them to one that has one.
template <bool kOnState>
__device__ void ShareRegisters() {
#if RWKV_JAX_WARPGROUP_PRODUCTS
  if constexpr (kOnState)
    hopper::TakeRegisters<152>();
  else
    hopper::GiveRegisters<104>();
#endif
}

template <typename T, int N, bool kReverse, bool kOutput, Work kWork, bool kMarked, Kind kKind,
          bool kAmple>
__global__ __launch_bounds__(
    ScanLayout<T, N, kReverse, kOutput, kWork, kKind, kAmple>::kThreads,
    ScanLayout<T, N, kReverse, kOutput, kWork, kKind,
               kAmple>::kBlocks) void ScanKernel(const __grid_constant__ Scan scan) {
  if constexpr (kNeverLessMemory && !kAmple) {
    __trap();  // ForSharedMemory chooses the other one
  } else {
    using Block = ScanBlock<T, N, kReverse, kOutput, kWork, kMarked, kKind, kAmple>;
    RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
    Block block(scan, memory);
    if (!block.Find()) return;
    typename Block::Scaling scaling;
    block.Prologue(scaling);
    if constexpr (Block::L::kHelpers == 0)
      block.template MainLoop<true, true>(scaling);
    else if (block.OnState()) {
      if constexpr (Block::L::kSharesRegisters) ShareRegisters<true>();
      block.template MainLoop<true, false>(scaling);
    } else {
      if constexpr (Block::L::kSharesRegisters) ShareRegisters<false>();
      block.template MainLoop<false, true>(scaling);
    }
  }
}

// Makes of the transitions of the splits the state at the end of each split: S_i = S_{i-1} M_i + D_i.
// S_0 is there already, and S_i takes the place of D_i. A block computes kCombineRows rows of the
// states.
constexpr int kCombineThreads = 128;
constexpr int kCombineRows = 8;
// Where there is room, the transitions of so many splits are copied ahead of their use. Of each, a block has
// the factor M and its rows of D.
template <int N>
constexpr int kCombineAhead = N == 64 ? 1 : 0;
template <int N>
constexpr int kTransitionPart = (N + kCombineRows) * N;
template <int N>
constexpr int64_t kCombineBytes = (kCombineAhead<N> + 1) * kTransitionPart<N> * sizeof(float);

// A thread multiplies four rows by four columns, for a slice of the sum. Then it adds up the slices of some
// rows of one column.
template <int N, bool kReverse>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(Splits splits, Sequences sequences,
                                                                 int64_t tokens, int64_t heads) {
  constexpr int kAhead = kCombineAhead<N>, kEach = 4;
  constexpr int kTiles = kCombineRows / kEach * N / kEach, kSlices = kCombineThreads / kTiles;
  constexpr int kOwnRows = kCombineRows * N / kCombineThreads;
  __shared__ float4 state[N][kCombineRows / kEach];  // [column][rows]
  __shared__ __align__(16) float shares[kSlices][kCombineRows][N];
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  float* const parts = reinterpret_cast<float*>(memory);  // [kAhead + 1, N + kCombineRows, N]
  const int64_t sequence = splits.SequenceWithTransitions(sequences, heads);
  if (sequence < 0) return;
  const int64_t head = sequence * heads + blockIdx.x % heads;
  const int first_row = blockIdx.y * kCombineRows;

  const Span span = sequences(sequence, tokens);
  const int64_t count = splits.Count(span.Chunks());
  if (count <= 2) return;
  const int last = static_cast<int>(count) - 2;
  const auto rows_at = [&](int order) {
    return splits.Transition<kReverse>(head, heads, span, order) + first_row * N;
  };
  const auto part_of = [&](int order) { return parts + order % (kAhead + 1) * kTransitionPart<N>; };
  const auto copy = [&](int order) {
    if (order > last) return;
    const uint32_t to = SharedAddress(part_of(order));
    const float *const d = rows_at(order), *const factor = d - first_row * N + N * N;
    for (int i = threadIdx.x * 4; i < kTransitionPart<N>; i += kCombineThreads * 4)
      CopyAsync(to + i * sizeof(float), i < N * N ? factor + i : d + i - N * N, true);
  };
  const int own_col = threadIdx.x % N, own_row = threadIdx.x / N * kOwnRows;
  const auto post = [&](const float (&x)[kOwnRows]) {
#pragma unroll
    for (int r = 0; r < kOwnRows; r += kEach)
      state[own_col][(own_row + r) / kEach] = {x[r], x[r + 1], x[r + 2], x[r + 3]};
  };

  if constexpr (kAhead > 0) copy(1);
  float own[kOwnRows];
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) own[r] = rows_at(0)[(own_row + r) * N + own_col];
  post(own);
  const int slice = threadIdx.x / kTiles, tile = threadIdx.x % kTiles;
  const int rows = tile / (N / kEach), col = tile % (N / kEach) * kEach;
  for (int order = 1; order <= last; ++order) {
    if constexpr (kAhead == 0) copy(order);
    WaitForCopies<0>();
    __syncthreads();
    if constexpr (kAhead > 0) copy(order + 1);
    const float* const part = part_of(order);
    float sums[kEach][kEach] = {};
#pragma unroll 8
    for (int j = 0; j < N / kSlices; ++j) {
      const int i = slice * (N / kSlices) + j;
      const float4 s = state[i][rows], m = *reinterpret_cast<const float4*>(part + i * N + col);
      const float of_rows[kEach] = {s.x, s.y, s.z, s.w}, of_cols[kEach] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int r = 0; r < kEach; ++r)
#pragma unroll
        for (int c = 0; c < kEach; ++c) sums[r][c] = fmaf(of_rows[r], of_cols[c], sums[r][c]);
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r) StoreFloats(&shares[slice][rows * kEach + r][col], sums[r]);
    __syncthreads();
    float* const to = rows_at(order) + own_col;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const int row = own_row + r;
      own[r] = part[(N + row) * N + own_col];
#pragma unroll
      for (int j = 0; j < kSlices; ++j) own[r] += shares[j][row][own_col];
      to[row * N] = own[r];
    }
    post(own);
    if constexpr (kAhead == 0) __syncthreads();  // all have used the part
  }
}

template <typename T, int N, bool kReverse, bool kOutput, Work kWork, Kind kKind,
          bool kAmple = true>
cudaError_t LaunchScan(cudaStream_t stream, const Scan& scan, const Grid& blocks) {
  using L = ScanLayout<T, N, kReverse, kOutput, kWork, kKind, kAmple>;
  const auto launch = [&](auto marked) {
    return Launch(ScanKernel<T, N, kReverse, kOutput, kWork, marked(), kKind, kAmple>, blocks,
                  L::kThreads, L::kBytes, stream, scan);
  };
  // Far tiles are like tiles that clear the state: one kernel does both.
  if constexpr (L::kUnbounded)
    return launch(std::true_type());
  else
    return FillsMatrixHead(scan.dims) ? ForMarks(scan.marks, launch) : launch(std::true_type());
}

// Calls fn with the kind of a call that is of no form.
template <typename Fn>
cudaError_t ForKind(const Scan& scan, Fn&& fn) {
  return scan.decay == Decay::kSigmoid ? fn(std::integral_constant<Kind, Kind::kBounded>())
                                       : fn(std::integral_constant<Kind, Kind::kUnbounded>());
}

// The scan of all tokens, in splits if there are several: first what each does to a state, then,
// from the state at the start of each, all of them at once.
template <typename T, int N, bool kReverse, Kind kKind>
cudaError_t RunScan(cudaStream_t stream, const Scan& scan, const Device& device) {
  constexpr bool kOutput = !kReverse;
  const Splits& splits = scan.splits;
  const int64_t batch = scan.dims.batch, heads = scan.dims.heads;
  if (splits.count > 1) {
    cudaError_t error = LaunchScan<T, N, kReverse, false, Work::kTransition, kKind>(
        stream, scan, splits.TransitionBlocks(batch, heads));
    const Grid blocks(splits.HeadsWithTransitions(batch, heads), N / kCombineRows);
    if (error == cudaSuccess)
      error = Launch(CombineKernel<N, kReverse>, blocks, kCombineThreads, kCombineBytes<N>, stream,
                     splits, scan.sequences, scan.dims.tokens, heads);
    if (error != cudaSuccess) return error;
  }
  const Grid blocks = splits.Blocks(batch, heads);
  // With up to two blocks on each multiprocessor it is faster that a chunk takes less time; with
  // more, that more of them hide each other's latency.
  if constexpr (N == kPanelCols)
    if (blocks.x * blocks.y > 2 * device.multiprocessors)
      return LaunchScan<T, N, kReverse, kOutput, Work::kTogether, kKind>(stream, scan, blocks);
  constexpr int kWanted = ScanLayout<T, N, kReverse, kOutput, Work::kSpecialized, kKind>::kBytes;
  return ForSharedMemory<kWanted>(device, [&](auto ample) {
    static_assert(ample() ||
                  ScanLayout<T, N, kReverse, kOutput, Work::kSpecialized, kKind, false>::kBytes <=
                      kLeastSharedMemory);
    return LaunchScan<T, N, kReverse, kOutput, Work::kSpecialized, kKind, ample()>(stream, scan,
                                                                                   blocks);
  });
}

// Of heads of 64 and a bound that of keyed calls, which need more.
template <typename T, int N, Kind kKind>
int64_t SharedMemory(Pass pass) {
  const int64_t transition =
      std::max(ScanLayout<T, N, false, false, Work::kTransition, kKind>::kBytes,
               ScanLayout<T, N, true, false, Work::kTransition, kKind>::kBytes);
  if (pass != Pass::kForward && pass != Pass::kBackward) return transition;
  constexpr Work kLeast = N == kPanelCols ? Work::kTogether : Work::kSpecialized;
  const int64_t scan = pass == Pass::kForward
                           ? ScanLayout<T, N, false, true, kLeast, kKind, false>::kBytes
                           : ScanLayout<T, N, true, false, kLeast, kKind, false>::kBytes;
  return std::max({transition, scan, kCombineBytes<N>});
}

Scan ReverseScan(const Wkv7BackwardCall& call, const Splits& splits) {
  Scan scan{call, call.dfinal_state, call.dinitial_state, nullptr, nullptr, splits};
  std::swap(scan.a, scan.b);
  scan.k = call.r, scan.v = call.dy;
  return scan;
}

// The scan of a call of the delta rule.
template <bool kReverse, typename Call>
cudaError_t RunDelta(cudaStream_t stream, const Call& call, Scan scan, const Device& device) {
  scan.a = call.k, scan.scale = call.scale, scan.beta = call.beta;
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    using T = decltype(zero);
    return call.head_decay ? RunScan<T, size(), kReverse, Kind::kHeadDelta>(stream, scan, device)
                           : RunScan<T, size(), kReverse, Kind::kDelta>(stream, scan, device);
  });
}

}  // namespace

int64_t Wkv7ScanSharedMemory(Pass pass, Dtype dtype, int64_t head_size, Decay decay) {
  using Half = __nv_bfloat16;  // float16 takes as much
  if (dtype == Dtype::kF32) return SharedMemory<float, 64, Kind::kUnbounded>(pass);
  if (decay == Decay::kSigmoid)
    return head_size == 64 ? SharedMemory<Half, 64, Kind::kKeyed>(pass)
                           : SharedMemory<Half, 128, Kind::kBounded>(pass);
  return head_size == 64 ? std::max(SharedMemory<Half, 64, Kind::kUnbounded>(pass),
                                    SharedMemory<Half, 64, Kind::kDelta>(pass))
                         : std::max(SharedMemory<Half, 128, Kind::kUnbounded>(pass),
                                    SharedMemory<Half, 128, Kind::kDelta>(pass));
}

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7ForwardCall& call, const Device& device,
                     const Splits& splits) {
  const Scan scan{call, call.initial_state, call.final_state, call.y, call.states, splits};
  if (call.dtype == Dtype::kF32)
    return ForHeadSize<64>(call.dims.head_size, 0.0f, [&](auto zero, auto size) {
      return RunScan<float, size(), false, Kind::kUnbounded>(stream, scan, device);
    });
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    return ForKind(scan, [&](auto kind) {
      return RunScan<decltype(zero), size(), false, kind()>(stream, scan, device);
    });
  });
}

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7KeyedForwardCall& call, const Device& device,
                     const Splits& splits) {
  return ForHalfTypes<64>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    Scan scan{call, call.initial_state, call.final_state, call.y, call.states, splits};
    scan.b = call.a, scan.parameters = call.parameters, scan.inverse = call.inverse;
    return RunScan<decltype(zero), size(), false, Kind::kKeyed>(stream, scan, device);
  });
}

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                            const Splits& splits, uint4* gradients) {
  Scan scan = ReverseScan(call, splits);
  scan.saved = gradients;
  if (call.dtype == Dtype::kF32)
    return ForHeadSize<64>(call.dims.head_size, 0.0f, [&](auto zero, auto size) {
      return RunScan<float, size(), true, Kind::kUnbounded>(stream, scan, device);
    });
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    return ForKind(scan, [&](auto kind) {
      return RunScan<decltype(zero), size(), true, kind()>(stream, scan, device);
    });
  });
}

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7KeyedBackwardCall& call,
                            const Device& device, const Splits& splits, uint4* gradients) {
  return ForHalfTypes<64>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    Scan scan = ReverseScan(call, splits);
    scan.a = call.a, scan.b = call.k, scan.saved = gradients;
    scan.parameters = call.parameters, scan.inverse = call.inverse;
    return RunScan<decltype(zero), size(), true, Kind::kKeyed>(stream, scan, device);
  });
}

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7DeltaForwardCall& call, const Device& device,
                     const Splits& splits) {
  const Scan scan{call, call.initial_state, call.final_state, call.y, call.states, splits};
  return RunDelta<false>(stream, call, scan, device);
}

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                            const Device& device, const Splits& splits, uint4* gradients) {
  Scan scan = ReverseScan(call, splits);
  scan.saved = gradients;
  return RunDelta<true>(stream, call, scan, device);
}

cudaError_t RunTransition(cudaStream_t stream, const Wkv7TransitionCall& call) {
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    const Scan scan{call, nullptr, call.added, nullptr, nullptr, kOneSplit, call.factor};
    return ForKind(scan, [&](auto kind) {
      return LaunchScan<decltype(zero), size(), false, false, Work::kTransition, kind()>(
          stream, scan, kOneSplit.Blocks(call.dims.batch, call.dims.heads));
    });
  });
}

cudaError_t RunReverseTransition(cudaStream_t stream, const Wkv7BackwardCall& call) {
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    const Scan scan = ReverseScan(call, kOneSplit);
    return ForKind(scan, [&](auto kind) {
      return LaunchScan<decltype(zero), size(), true, false, Work::kTransition, kind()>(
          stream, scan, kOneSplit.Blocks(call.dims.batch, call.dims.heads));
    });
  });
}

}  // namespace rwkv_jax::cuda
