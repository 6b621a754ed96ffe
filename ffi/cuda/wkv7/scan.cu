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
// the former and b the latter, and there is no a; in reverse b is the former and a the latter.
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

// What kernels differ in by their inputs.
enum class Kind {
  kBounded,    // decays have a bound: frames of a chunk
  kUnbounded,  // they have none, or are of floats: frames of a tile or less
  kKeyed,      // a keyed call, with a bound
};

// `kAmple`: a block may have shared memory for long rings.
template <typename T, int N, bool kOutput, Work kWork, Kind kKind, bool kAmple = true>
struct ScanLayout {
  static constexpr int kTerms = kTermsOf<T>;
  static_assert(kTerms == 1 || kKind == Kind::kUnbounded);
  static constexpr bool kKeyed = kKind == Kind::kKeyed, kUnbounded = kKind == Kind::kUnbounded;
  static constexpr int kPanels = N / kPanelCols;
  static constexpr bool kSpecialized = kWork == Work::kSpecialized;
  static constexpr bool kTransition = kWork == Work::kTransition;
  static constexpr int kStateThreads = 2 * N;
  // Warpgroups without a state.
  static constexpr int kHelpers = kSpecialized ? 2 : kWork == Work::kTogether ? kTerms - 1 : 0;
  static constexpr int kThreads = kStateThreads * (kTransition ? 2 : 1) + 128 * kHelpers;
  // On a multiprocessor.
  static constexpr int kBlocks = kThreads > 256 || (kTransition && kTerms > 1) ? 1 : 512 / kThreads;
  static constexpr int kPanelBytes = kTileTokens * kRowBytes;
  static constexpr int kPanelsBytes = kPanels * kPanelBytes;  // of a term of a tile
  static constexpr int kProductTermBytes = 4 * kTileBytes;
  static constexpr int kProductBytes = kTerms * kProductTermBytes;
  static constexpr int kDecayStride = N / 4 + 4;  // so that four lanes read different banks

  // The operands of a tile. At and Rt of 64 columns follow each other, so that they are one operand
  // of 32 rows. Second terms lie behind the first ones of all operands.
  static constexpr int kA = 0;
  static constexpr int kR = kPanelBytes;
  static constexpr int kReadStride = (kOutput ? 2 : 1) * kPanelBytes;
  static constexpr int kB = kPanels * kReadStride;
  static constexpr int kK = kB + kPanels * kPanelBytes;
  static constexpr int kV = kK + kPanels * kPanelBytes;
  static constexpr int kTermBytes = kV + kPanelsBytes;
  static constexpr int kOperandBytes = kTerms * kTermBytes;

  // Rings: tile t has place t % the number of places. There are kStages places for operands,
  // exp(G), copy barriers and marks, kDecayStages for w, which is read two tiles before the rest,
  // and two for token products and for y. Without a bound there are factors in place of a stage. With one, y
  // takes the place of v in short rings: a warp writes it over the values that it alone has read.
  static constexpr bool kShort = kSpecialized && !kAmple;
  static constexpr int kStages = kSpecialized && kAmple                                ? 8
                                 : kShort && kPanels * kTerms == 1                     ? 6
                                 : kUnbounded && (kOutput || kWork == Work::kTogether) ? 3
                                                                                       : 4;
  static constexpr int kDecayStages = kStages == 8 ? 8 : kStages == 6 ? 4 : 2;
  static constexpr bool kOverValues = kOutput && kShort && !kUnbounded;
  static constexpr int kW = kStages * kOperandBytes;
  static constexpr int kY = kW + kDecayStages * kTerms * kPanelsBytes;
  static constexpr int kProducts = kY + (kOutput && !kOverValues ? 2 * kTerms * kPanelsBytes : 0);
  static constexpr int kDecays = kProducts + 2 * kProductBytes;  // exp(G) of the last token
  static constexpr int kDecayBytes = 4 * 4 * kDecayStride;
  static constexpr int kBarriers = kDecays + kStages * kDecayBytes;
  static constexpr int kWords = kBarriers + 8 * kStages;  // of marks
  // Of keyed calls: `inverse` of each token, in a ring as well, and the parameters k_k, k_a and a0.
  static constexpr int kInverses = kWords + 4 * kStages;
  static constexpr int kParameters = kInverses + (kKeyed ? 4 * kTileTokens * kStages : 0);
  static constexpr int kEnd = kParameters + (kKeyed ? 3 * 4 * N : 0);
  // Of decays without a bound, in rings of kFramePlaces tiles: whether a tile is far, and the factors
  // of the state before each frame that a far tile has.
  static constexpr int kFramePlaces = 4;
  static constexpr int kFar = kEnd;
  static constexpr int kFactors = (kFar + 4 * kFramePlaces + 15) / 16 * 16;
  static constexpr int kBytes =
      kUnbounded ? kFactors + kFramePlaces * kFarFrames * kDecayBytes : kEnd;
};

// What a keyed call makes operands of besides the projected k and the rate, in shared memory: the
// parameters [3, N], and `inverse` of the rows of a tile.
struct KeyFactors {
  const float *parameters, *inverses;
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
      const float inverse = factors.inverses[Lane() / 4 + i % 2 * 8];
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

// Stores the exponentials of logs that all lanes with the same columns have, as ScaleState reads them.
template <typename L>
__device__ void StoreFactors(int warp, const float (&log)[2][2], float* factors) {
  if (Lane() >= 28)
    *reinterpret_cast<float4*>(factors + (Lane() & 3) * L::kDecayStride + 4 * warp) = {
        Exp2(log[0][0]), Exp2(log[0][1]), Exp2(log[1][0]), Exp2(log[1][1])};
}

// Counts the sums of a tile from the middle of its frame or, if that goes too far, from the middles of
// four frames. Leaves the factors of S before each of four frames in `factors`, and what follows the
// last one in `carry`. Returns whether the tile is far.
template <typename L>
__device__ bool CentreFrames(int warp, const Ones& inclusive, const Ones& exclusive,
                             const uint32_t (&log_decays)[L::kTerms][4], float* factors,
                             TileSums& sums, Carry& carry) {
  constexpr int kStride = L::kDecayBytes / sizeof(float);
  float half[2][2], log[2][2];
  const auto store = [&](int frame) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        log[i][j] = carry.sum[i][j] + half[i][j], carry.sum[i][j] = half[i][j];
    StoreFactors<L>(warp, log, factors + frame * kStride);
  };
  sums.GetRow(kTileTokens - 1, 0.5f, half);
  bool far = false;
  ForEachElement<1>([&](int, int e) { far = far || half[e / 2][e % 2] < 0.5f * kMinFrameLog2; });
  far = __any_sync(~0u, far);
  if (!far) {
    sums.Subtract([&](int i, int e) { return half[i][e % 2]; });
    store(0);
    const float none[2][2] = {};
#pragma unroll
    for (int frame = 1; frame < kFarFrames; ++frame)
      StoreFactors<L>(warp, none, factors + frame * kStride);
    return false;
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
    sums.GetRow(frame * kFarFrameTokens + kFarFrameTokens - 1, 0.5f, half);
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

// Scales 16 columns of a tile in place, the columns of `warp`. Leaves in `decays` what S is multiplied
// by behind the tile if a chunk ends there, and in `frames` what CentreFrames leaves. Returns whether
// the tile is far.
template <typename T, typename L, bool kReverse, bool kOutput>
__device__ bool ScaleColumns(int warp, uint32_t operands, uint32_t raw_w, float* decays,
                             float* frames, Decay form, uint32_t present, const Ones& inclusive,
                             const Ones& exclusive, bool starts_chunk, const KeyFactors& keys,
                             Carry& carry) {
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
      LogDecays<T, Decay::kExp>(w, form, kLeastLog2, present, log_decays[0]);
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
  const auto exponentials = [&](float sign, const float (&x)[2][4]) {
    if constexpr (kFloat) {
      ForEachElement<2>([&](int i, int j) { factors[i][j] = Exp2(sign * x[i][j]); });
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &x[i / 2][i % 2 * 2];
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
  exponentials(1.0f, sums.before);
  scale_made(a_tile, reads);
  if constexpr (kReverse) {
    exponentials(-1.0f, sums.before);
    scale(k_tile);
  }
  exponentials(1.0f, sums.upto);
  if constexpr (kOutput) scale(r_tile);
  // The state is not rounded at the end of a chunk, so its factors are not rounded.
  StoreFactors<L>(warp, carry.sum, decays);
  exponentials(-1.0f, sums.upto);
  scale_made(b_tile, writes);
  if constexpr (!kReverse) scale_made(k_tile, key);
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t x[4];
    LoadMatrices(v_tile, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ToBf16<T>(x[i]);
    StoreMatrices(v_tile, x);
  }
  if constexpr (kFloat) {
    ForEachElement<2>([&](int i, int j) { factors[i][j] = 1.0f; });
    scale(v_tile);
  }
  return far;
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
// tril(Rt Kh^T).
template <typename L, bool kReverse, bool kOutput>
__device__ void MultiplyTokens(int warp, uint32_t operands, uint32_t products,
                               const RowMarks& marks, bool far) {
  if (warp >= (kOutput ? 4 : 2)) return;
  const bool reads_r = warp >= 2, writes_k = warp % 2 == 1;
  const uint32_t left = operands + (reads_r ? L::kR : L::kA);
  const uint32_t right = operands + (writes_k ? L::kK : L::kB);
  Accumulator<2> m = {};
#pragma unroll
  for (int tile = 0; tile < L::kPanels * 4; ++tile) {
    const int panel = tile / 4;
    Left a[L::kTerms];
    uint32_t b[L::kTerms][4];
#pragma unroll
    for (int term = 0; term < L::kTerms; ++term) {
      const int from = term * L::kTermBytes;
      LoadLeft(left + panel * L::kReadStride + from, 0, tile % 4, a[term]);
      KAlongRows{right + panel * L::kPanelBytes + from, tile % 4}.Load(0, b[term]);
    }
    ForProducts<L::kTerms>([&](int i, int j) {
      WarpMultiply(m[0], a[i], b[j][0], b[j][1]);
      WarpMultiply(m[1], a[i], b[j][2], b[j][3]);
    });
  }
  KeepLower(reads_r || (kReverse && writes_k), m);
  if (marks.clears != 0) KeepSegments(marks, m);
  if (far) KeepFrames(m);
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

// Advances the state by a tile, or by some of its rows if kSomeRows, and leaves y of the tile, of which
// `words` are the part of this lane, in shared memory. By some rows, products wait for each other.
template <typename T, typename L, bool kOutput, bool kSomeRows>
__device__ void AdvanceState(int warp, uint32_t operands, uint32_t products, uint32_t y,
                             bool has_values, const AdvancingRows& rows, uint32_t (&words)[4],
                             float (&s)[L::kPanels][8][4]) {
  constexpr int kReadFragments = kOutput ? 4 : 2, kTerms = L::kTerms;
  const int panel_of_v = warp / 4;
  Left v[kTerms] = {};
  if (has_values)
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadLeftTransposed(operands + L::kV + panel_of_v * L::kPanelBytes + term * L::kTermBytes, 0,
                         warp % 4, v[term]);
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
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    // One panel at a time: there are no registers for the operands of two.
    if (panel > 0) {
      CommitProducts();
      Finish(zy);
    }
    Left before[kPanelTiles][kTerms];
    RoundPanel(s[panel], before);
    BeginProducts();
#pragma unroll
    for (int tile = 0; tile < kPanelTiles; ++tile) {
      const KAlongRows read{operands + panel * L::kReadStride, tile};
      MultiplyOrAdd(panel > 0 || tile > 0, zy, before[tile], read, int{L::kTermBytes});
    }
  }
  if constexpr (kSomeRows) {
    CommitProducts();
    Finish(zy);
#pragma unroll
    for (int half = 0; half < kReadFragments; half += 2)
      KeepTokens<2>(0, rows.begin, rows.read_end, &zy[half]);
    BeginProducts();
  }
  // The operand is Aak and Qrk behind it.
  Multiply<true>(zy, v, PackedTiles{products + kAak * kTileBytes}, L::kProductTermBytes);
  CommitProducts();
  if constexpr (kSomeRows) {
    Finish(zy);
    keep_writing(v);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      ForEachElement<8>([&](int fragment, int e) {
        if (rows.clears) s[panel][fragment][e] = 0.0f;
      });
    BeginProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<kTerms == 1>(sum(panel), v, KDownRows{operands + L::kK + panel * L::kPanelBytes},
                          L::kTermBytes);
  CommitProducts();
  WaitForProducts<1>();
  Settle(zy);

  Left rounded[kTerms];
  Round(zy[0], zy[1], rounded);
  Accumulator<2> u;  // U^T = Z^T M^T
  BeginProducts();
  Multiply<false>(u, rounded, PackedTiles{products + kM * kTileBytes}, L::kProductTermBytes);
  CommitProducts();
  Finish(u);

  Left u_rounded[kTerms];
  Round(u[0], u[1], u_rounded);
  BeginProducts();
  if constexpr (kOutput) {
    // Y += Qrb U. The operand is M and Qrb behind it: M U falls into Z, which is no longer needed.
    Multiply<true>(zy, u_rounded, PackedTiles{products + kM * kTileBytes}, L::kProductTermBytes);
    CommitProducts();
  }
  if constexpr (kSomeRows) {
    WaitForProducts<0>();
    keep_writing(u_rounded);
    BeginProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(sum(panel), u_rounded, KDownRows{operands + L::kB + panel * L::kPanelBytes},
                   L::kTermBytes);
  CommitProducts();
  if constexpr (kOutput) {
    WaitForProducts<1>();
    Settle(zy);
    const auto advances = [&](int row) {
      return !kSomeRows || (row >= rows.begin && row < rows.end);
    };
    const uint32_t y_panel = y + panel_of_v * L::kPanelBytes;
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
          words[i] = Pair<T>::Round(zy[2 + i % 2][i / 2 * 2], zy[2 + i % 2][i / 2 * 2 + 1]);
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
  using L = ScanLayout<T, N, kOutput, kWork, kKind, kAmple>;
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
        copies(L::kTransition ? warpgroup == 2 * L::kPanels - 1 : multiplies),
        for_later(L::kTransition && scan.splits.memory != nullptr) {}

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
    stride = static_cast<int>(scan.dims.heads * kUnit);
    const int piece_column = L::kTerms == 1 ? 8 * Piece() : Piece() / 2 * 16 + Piece() % 2 * 4;
    first = (span.first_token + first_token) * stride +
            (head - sequence * scan.dims.heads) * kUnit + (kFilled ? piece_column : 0);
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
    if constexpr (kOnState) LoadStart(s);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const uint32_t y = OutputOf(tile);
      if constexpr (kForState)
        if (multiplies && tile + 1 < tiles) TokenProducts(tile + 1);
      if constexpr (kOnState) {
        if (!L::kTransition && StartsChunk(tile)) SaveState(tile, s);
        Advance(tile, y, s);
        if (EndsChunk(tile)) ScaleState(DecaysOf(tile), s);
      }
      if constexpr (kForState) {
        if (scales && tile + 2 < tiles) ScaleOperands(tile + 2, scaling);
        if (multiplies || scales) PublishOperands();
      }
      WaitForTile();
      if constexpr (kForState) {
        if (kOutput && multiplies) WriteOutput(tile, y);
        if (copies && tile + L::kStages < tiles) CopyNext(tile + L::kStages);
      }
    }
    if constexpr (kOnState) StoreEnd(s);
  }

  __device__ bool OnState() const { return warpgroup < L::kPanels; }

 private:
  static constexpr int kUnit = kFilled ? N : 1;  // of `first` and `stride`
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
  __device__ int64_t ElementOf(int token, int size) const {
    const int64_t at = first + static_cast<int64_t>(token) * stride;
    return kFilled ? at : at * size + Piece() * 8;
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
  __device__ bool IsFar(int tile) const { return kUnbounded && *FarOf(tile) != 0; }
  __device__ float* FactorsOf(int tile, int frame) const {
    return reinterpret_cast<float*>(memory + L::kFactors +
                                    (tile % L::kFramePlaces * kFarFrames + frame) * L::kDecayBytes);
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
  __device__ float* InversesOf(int tile) const {
    return reinterpret_cast<float*>(memory + L::kInverses) + tile % L::kStages * kTileTokens;
  }
  __device__ void LoadParameters() const {
    const float* const from = scan.parameters + sequence * Wkv7KeysCall::kParameters * stride +
                              (head - sequence * scan.dims.heads) * N;
    for (int i = threadIdx.x; i < 3 * N; i += L::kThreads)
      Parameters()[i] = from[static_cast<int64_t>(i / N) * stride + i % N];
  }

  __device__ bool IsPresent(int token, uint32_t word) const {
    return token < tokens && (word >> (kTileTokens + token % kTileTokens) & 1) == 0;
  }
  // Calls fn(panel, copy) for the panels of a tile, where copy(to, low, x, size) copies the piece of this thread from
  // an array with heads of `size` channels. Of floats it copies two pieces, which lie kFloatPiece elements apart, to
  // where two terms lie, `low` bytes apart.
  template <typename Fn>
  __device__ void ForPanelsOf(int tile, uint32_t word, Fn&& fn) const {
    const int token = TokenOf(tile);
    const bool present = IsPresent(token, word);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      fn(panel, [&](uint32_t to, int low, const void* x, int size) {
#pragma unroll
        for (int i = 0; i < L::kTerms; ++i)
          CopyAsync(to + copy_to + i * low,
                    static_cast<const T*>(x) + ElementOf(token, size) + kPanelCols * panel +
                        i * kFloatPiece,
                    present && Has(panel, size));
      });
  }
  __device__ __forceinline__ void CopyOperands(int tile, uint32_t word) const {
    const uint32_t to = OperandsOf(tile);
    ForPanelsOf(tile, word, [&](int panel, auto copy) {
      const auto operand = [&](int at, const void* x, int size) {
        copy(to + at, L::kTermBytes, x, size);
      };
      if constexpr (!kKeyed || kReverse) operand(L::kA + panel * L::kReadStride, scan.a, KeySize());
      if constexpr (kOutput) operand(L::kR + panel * L::kReadStride, scan.r, KeySize());
      operand(L::kB + panel * L::kPanelBytes, scan.b, KeySize());
      operand(L::kK + panel * L::kPanelBytes, scan.k, KeySize());
      operand(L::kV + panel * L::kPanelBytes, scan.v, ValueSize());
    });
    if constexpr (kKeyed)
      if (const int token = TokenOf(tile); Piece() == 0)
        CopyWordAsync(SharedAddress(InversesOf(tile) + copy_row),
                      scan.inverse + ElementOf(token, N) / N, IsPresent(token, word));
  }
  // The last copies of a tile: after them its CopyBarrier waits for all.
  __device__ __forceinline__ void CopyDecays(int tile) const {
    ForPanelsOf(tile, 0, [&](int panel, auto copy) {
      copy(RawDecaysOf(tile) + panel * L::kPanelBytes, L::kPanelsBytes, scan.w, KeySize());
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
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel) {
      const bool far = ScaleColumns<T, L, kReverse, kOutput>(
          warp % 4 + 4 * panel, OperandsOf(tile), RawDecaysOf(tile), DecaysOf(tile),
          FactorsOf(tile, 0), scan.decay, MarksOf(tile).present, scaling.inclusive,
          scaling.exclusive, StartsChunk(tile), {Parameters(), InversesOf(tile)},
          scaling.carry[panel]);
      if (far) *FarOf(tile) = 1;
    }
  }
  __device__ __forceinline__ void TokenProducts(int tile) const {
    MultiplyTokens<L, kReverse, kOutput>(warp % 4, OperandsOf(tile), ProductsOf(tile),
                                         MarksOf(tile), IsFar(tile));
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
  __device__ __forceinline__ void Advance(int tile, uint32_t y, State& s) const {
    uint32_t words[4] = {};
    const auto advance = [&](auto some_rows, const AdvancingRows& rows) {
      AdvanceState<T, L, kOutput, decltype(some_rows)::value>(
          warp, OperandsOf(tile), ProductsOf(tile), y, !identity, rows, words, s);
    };
    const RowMarks marks = MarksOf(tile);
    if constexpr (kUnbounded) {
      ScaleState(FactorsOf(tile, 0), s);
      // Its place is that of the tile before this one.
      if (threadIdx.x == 0) *FarOf(tile + L::kFramePlaces - 1) = 0;
    }
    const bool far = IsFar(tile);
    if (!far && marks.clears == 0) {
      advance(std::false_type(), AdvancingRows(0, kTileTokens, marks));
    } else if constexpr (kMarked) {
      const int count = far ? kFarFrameTokens : kTileTokens;
#pragma unroll 1
      for (int row = 0; row < kTileTokens; row += count) {
        if (row > 0) ScaleState(FactorsOf(tile, row / count), s);
        advance(std::true_type(), AdvancingRows(row, row + count, marks));
      }
    }
  }
  __device__ __forceinline__ void ScaleState(const float* factors, State& s) const {
    const float* const decays = factors + (threadIdx.x & 3) * L::kDecayStride;
#pragma unroll
    for (int pair = 0; pair < N / 16; ++pair) {
      const float4 d = *reinterpret_cast<const float4*>(decays + 4 * pair);
      float (&left)[4] = s[pair / 4][pair % 4 * 2];
      float (&right)[4] = s[pair / 4][pair % 4 * 2 + 1];
      left[0] *= d.x, left[1] *= d.y, left[2] *= d.x, left[3] *= d.y;
      right[0] *= d.z, right[1] *= d.w, right[2] *= d.z, right[3] *= d.w;
    }
  }
  __device__ __forceinline__ void WriteOutput(int tile, uint32_t y) const {
    const int token = TokenOf(tile);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < L::kTerms; ++i)
        if (token < tokens && Has(panel, ValueSize()))
          *reinterpret_cast<uint4*>(static_cast<T*>(scan.y) + ElementOf(token, ValueSize()) +
                                    kPanelCols * panel + i * kFloatPiece) =
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
  // Roles: advances the state that starts as the identity; computes token products and writes y;
  // scales operands; copies them. `for_later`: the transition goes to the memory of the splits.
  const bool identity, multiplies, scales, copies, for_later;
  int64_t sequence, head;            // the sequence or row b, and b * H + h
  Span span;                         // of the sequence
  int64_t count, order;              // splits of the sequence, and this one in the recurrence
  int64_t first_chunk, first_token;  // of the split in its sequence
  int tokens, tiles;                 // of the split
  int64_t first;                     // the element of this thread's piece in the first token
  int stride;                        // from token to token; unless kFilled, both count heads
  int copy_row;                      // of this thread's piece in a tile
  uint32_t copy_to;                  // its address in a panel
  uint32_t next_word;                // marks of the tile that is copied next
};

// Two warpgroups start with 128 registers a thread. The one without the state gives 24 of them to the one with it.
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
    ScanLayout<T, N, kOutput, kWork, kKind, kAmple>::kThreads,
    ScanLayout<T, N, kOutput, kWork, kKind,
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
      static_assert(kWork != Work::kTogether || Block::L::kThreads * Block::L::kBlocks == 512);
      if constexpr (kWork == Work::kTogether) ShareRegisters<true>();
      block.template MainLoop<true, false>(scaling);
    } else {
      if constexpr (kWork == Work::kTogether) ShareRegisters<false>();
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
  using L = ScanLayout<T, N, kOutput, kWork, kKind, kAmple>;
  const auto launch = [&](auto marked) {
    return Launch(ScanKernel<T, N, kReverse, kOutput, kWork, marked(), kKind, kAmple>, blocks,
                  L::kThreads, L::kBytes, stream, scan);
  };
  // Far tiles are like tiles that clear the state: one kernel does both.
  if constexpr (kKind == Kind::kUnbounded)
    return launch(std::true_type());
  else
    return FillsMatrixHead(scan.dims) ? ForMarks(scan.marks, launch) : launch(std::true_type());
}

// Calls fn with the kind of a call that is not keyed.
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
  constexpr int kWanted = ScanLayout<T, N, kOutput, Work::kSpecialized, kKind>::kBytes;
  return ForSharedMemory<kWanted>(device, [&](auto ample) {
    static_assert(ample() || ScanLayout<T, N, kOutput, Work::kSpecialized, kKind, false>::kBytes <=
                                 kLeastSharedMemory);
    return LaunchScan<T, N, kReverse, kOutput, Work::kSpecialized, kKind, ample()>(stream, scan,
                                                                                   blocks);
  });
}

// Of heads of 64 and a bound that of keyed calls, which need more.
template <typename T, int N, Kind kKind>
int64_t SharedMemory(Pass pass) {
  const int64_t transition = ScanLayout<T, N, false, Work::kTransition, kKind>::kBytes;
  if (pass != Pass::kForward && pass != Pass::kBackward) return transition;
  constexpr Work kLeast = N == kPanelCols ? Work::kTogether : Work::kSpecialized;
  const int64_t scan = pass == Pass::kForward
                           ? ScanLayout<T, N, true, kLeast, kKind, false>::kBytes
                           : ScanLayout<T, N, false, kLeast, kKind, false>::kBytes;
  return std::max({transition, scan, kCombineBytes<N>});
}

Scan ReverseScan(const Wkv7BackwardCall& call, const Splits& splits) {
  Scan scan{call, call.dfinal_state, call.dinitial_state, nullptr, nullptr, splits};
  std::swap(scan.a, scan.b);
  scan.k = call.r, scan.v = call.dy;
  return scan;
}

}  // namespace

int64_t Wkv7ScanSharedMemory(Pass pass, Dtype dtype, int64_t head_size, Decay decay) {
  using Half = __nv_bfloat16;  // float16 takes as much
  if (dtype == Dtype::kF32) return SharedMemory<float, 64, Kind::kUnbounded>(pass);
  if (decay == Decay::kSigmoid)
    return head_size == 64 ? SharedMemory<Half, 64, Kind::kKeyed>(pass)
                           : SharedMemory<Half, 128, Kind::kBounded>(pass);
  return head_size == 64 ? SharedMemory<Half, 64, Kind::kUnbounded>(pass)
                         : SharedMemory<Half, 128, Kind::kUnbounded>(pass);
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
