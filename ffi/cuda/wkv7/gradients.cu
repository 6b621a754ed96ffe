// WKV7 on matrix units, the gradients of the inputs: one block of threads per head and chunk of 64
// tokens. A block starts from the saved state S0 before its chunk and from dS, the gradient of the
// state after its chunk, which the reverse scan of scan.cu has left.
//
// The recurrence (RWKV-7, arXiv:2503.14456, "state evolution"), with d_t = exp(log d_t) made from
// w_t:
//
//   S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T      y_t = S_t r_t
//
// The backward pass of one token is that of `backward_kernel` in RWKV-LM
// (RWKV-v7/train_temp/cuda/rwkv7_clampw.cu). The form for a chunk of tokens is the WY
// representation with the UT transform (section 3 of arXiv:2406.06484), here with decays in the
// operands.
//
// Rows of a matrix are tokens, except that a state is [V, K]. G is the sum of the log2 decays up to a token, and
// G' is that sum without the token itself. Operands are scaled relative to c, which is one number for each channel
// and frame of tokens:
//
//   At = A 2^(G' - c)   Rt = R 2^(G - c)   Bh = B 2^(c - G)   Kh = K 2^(c - G)
//   Sp = S0 2^(c - G' of token 0), c of the first frame   dSh = dS 2^(G of token 63 - c), c of the last frame
//
// Of decays with a bound, those of Decay::kSigmoid, the chunk is one frame, and c is G of its last token. Of others
// a half of the chunk is a frame or, where a half decays too far, a tile, and G is counted from the middle of the
// chunk. c is an even number near the middle of G in the frame, so that the factors stay in range where decays are
// steep. Where a channel decays less in a half, its c is 0 there, and where that is so of all, the chunk is one
// frame. Of tiles, products over channels are those of single warps, and take longer. Of floats and of the delta rule a
// half is never a frame.
//
// Floats are multiplied in terms (matrix.cuh), which ScaleOperands and ScaleState make of them. One kernel takes
// them with any decay and any marks. It needs nearly all shared memory of a multiprocessor of compute capability
// 9.0, and so has no other block to fill its waits: four warpgroups compute different products at a time.
//
//   Aab = tril_strict(At Bh^T)   Aak = tril_strict(At Kh^T)
//   Qrb = tril(Rt Bh^T)          Qrk = tril(Rt Kh^T)
//   M = (I - Aab)^-1   Z = At Sp^T + Aak V   U = M Z   Y = Rt Sp^T + Qrb U + Qrk V
//
// The gradients are
//
//   dU = Qrb^T dY + Bh dSh^T   dZ = M^T dU    dV = Qrk^T dY + Kh dSh^T + Aak^T dZ
//   dQrb = tril(dY U^T)          dQrk = tril(dY V^T)
//   dAab = tril_strict(dZ U^T)   dAak = tril_strict(dZ V^T)
//   dBh = U dSh + dQrb^T Rt + dAab^T At      dRt = dY Sp + dQrb Bh + dQrk Kh
//   dKh = V dSh + dQrk^T Rt + dAak^T At      dAt = dZ Sp + dAab Bh + dAak Kh
//
// In a call of the delta rule with a decay of each channel (Kimi Delta Attention, arXiv:2510.26692), r is scale q, k is
// beta k', a is d k' and b is -beta k'. Then At is k' 2^(G - c), Bh is -Kh, and fewer products are left:
//
//   T = tril_strict(At Kh^T)   Q = tril(Rt Kh^T)   M = (I + T)^-1   W = M (V - At Sp^T)   Y = Rt Sp^T + Q W
//
//   dW = Q^T dY + Kh dSh^T     dV = dZ = M^T dW
//   dQ = tril(dY W^T)          dT = -tril_strict(dZ W^T)
//   dKh = W dSh + dQ^T Rt + dT^T At    dRt = dY Sp + dQ Kh    dAt = dT Kh - dZ Sp
//   dk' = 2^(G - c) dAt + beta 2^(c - G) dKh    dbeta = the sum of k' 2^(c - G) dKh over channels
//
// A term that joins operands of two frames has the factor 2^(c of the later - c of the earlier) besides, where Sp
// belongs to the first frame and dSh to the last. It is a power of two, so that multiplying by it rounds nothing.
// The left operand of a product is multiplied by it in registers, or the sum where all its terms have the same.
// Of halves, products over channels take what they need of the other frame from shared memory: ScaleOperands leaves
// it where U, dZ, Qrb and Qrk will be stored, and a barrier of the half is before each of these stores. Of the delta
// rule there is room for what they need of all frames of tiles, and those with states are of warpgroups again.
//
// A log decay scales what later tokens read and does not scale what later tokens write, so its
// gradient is a sum over the tokens from its own on,
//
//   dlog d_t = sum_v dS * S_L + sum_{s >= t} (Rt dRt - Bh dBh - Kh dKh)_s + sum_{s > t} (At dAt)_s,
//
// where S_L is the state after the chunk, and of the delta rule, whose a has the decay of its own token, the last sum
// begins at t as well. A pair of tokens that both lie in that sum occurs in it
// twice, once as a read and once as a write, and cancels. It cancels only if both sides use the
// same rounded factors, so every phase takes the scaled operands from shared memory.
//
// All products but those of tokens by tokens are computed transposed, with channels as the rows.
// Then one left operand in registers serves two products, the result of a product is the left
// operand of the next, and sums over tokens run along rows, each of which belongs to one warp. The
// traffic of shared memory bounds the speed of the kernel.
//
// K and V may be less than the N of a kernel, as in scan.cu.
//
// Unless kAmple, a block has too little shared memory for Sp and dSh. It makes their tiles from S0 and dS in global
// memory wherever it needs them, rounded in the same way (SavedState).
//
// Phases, and the barrier after each. A panel has 64 channels, a half has 32 tokens. Two warpgroups
// share a panel; in most phases one has the first half of the tokens, the other the second. Of floats
// four warpgroups share the only panel, and a part of the tokens is a tile in place of a half.
//
//   phase              computes             warpgroups          barrier, and what it is for
//   LoadChunk          starts all copies    all                 block: w has been copied
//   SumLogDecays       c - G                panel x part        block: sums of the other parts;
//                                                                 a, b, k, r have been copied
//   ScaleOperands      c, At Rt Bh Kh       panel x part
//   ScaleState         Sp dSh               all
//   RoundValues        v and dY as terms,   all                 block: v and dY have been copied
//                      unless bfloat16                          block: operands are scaled
//
// then, unless they are floats,
//
//   TokenProducts      M Aak Qrb Qrk        M: 0; others: rest
//   UGradients         dU                   half 1              block: products are stored
//   Values             Z U                  half 0              AakRead: Aak has been read
//                                                               half: U of all panels is stored
//   ValueGradients     dZ dV                half 1              DzStored: dZ is stored, and Qrb and M have been read
//                                                               QrkRead: so has Qrk (with one panel)
//                      stages dV in Aak, Qrk                    warpgroup: dV is staged
//                                                               DvOut: dV has left Aak and Qrk
//   TriangleGradients  dQrb dAab dQrk dAak  half 0              block: triangles are stored
//   KeyGradients       dB dK                panel x half        half: U and V have been read
//                                                               warpgroup: dB and dK are staged
//   QueryGradients     dR dA                panel x half        half: dY and dZ have been read
//                                                               warpgroup: dR and dA are staged
//
// where half 1 waits at AakRead before it stages dV, and half 0 in TriangleGradients at the other barriers with a
// name; or, of the delta rule,
//
//   TokenProducts           M Q       M: 0; Q: 1
//   UGradients              dW        half 1              block: products are stored
//   Values                  W         half 0              half: W of all panels is stored
//   DeltaValueGradients     dV        half 1              DzStored: -dZ is stored, and Q and M have been read
//                                                         warpgroup: so are its channels, which are written from there
//   DeltaTriangleGradients  dQ dT     half 0              block: triangles are stored
//   DeltaQueryGradients     dq        panel x half        half: dY and dZ have been read
//                                                         warpgroup: dq is staged
//   DeltaKeyGradients       dk        panel x half        half: W has been read
//                                                         warpgroup: dk is staged
//
// or, of floats, with one product in each warpgroup,
//
//   ValuesByRoles      Aab Aak Qrb Qrk      0, 1, 2, 3          warpgroup: the product is stored
//                      M, Z, dU, dV without 0, 1, 2, 3          values: M is stored
//                        dZ and dQrk
//                      U, dZ                1, 2                values: U and dZ are stored
//                      dAak dQrb dAab dV    0, 1, 2, 3          Aak: dV needs it no longer
//                                                               block: triangles are stored
//   OperandGradients   dBh dKh dRt dAt      0, 1, 2, 3          block: these are staged
//   PartGradients      dB dK dR dA          part                warpgroup: these are staged
//
// and then
//
//   DecayGradient      dw, dbeta            panel x part        block: sums of the other parts
//                                                               block: dw is staged
//   KeysGradients      as wkv7_keys' pass   half of the tokens  block: sums of all warps
//
// Where rows are copied as boxes (RowMaps), a thread waits for copies at the barrier of what it reads in place of that of
// the block.
//
// The last phase is that of a keyed call alone, of one panel. There dK, dB, dR and dA are staged and not
// written: the phase makes of them what the backward pass of wkv7_keys would. In such a call a, b and k are
// not copied either: ScaleOperands makes them, as wkv7_keys does (layers/wkv7_keys.cu), from the projected k
// and the rate.
#include <algorithm>
#include <limits>

#include "fragment.cuh"
#include "kernel_choice.cuh"
#include "launch.cuh"
#include "wkv7/kernels.h"
#ifndef RWKV_JAX_EMULATION
#include "current_device.h"
#include "hopper.cuh"
#include "tensor_map.h"
#endif
#include "wkv7/chunk_products.cuh"
#include "wkv7/keys.cuh"

namespace rwkv_jax::cuda {
namespace {

// The largest sum of log2 decays of a frame, negated; a chunk with a larger one is steep, and is left to another
// kernel. It keeps the factors of operands within 2^88 or, of the delta rule, 2^97.
template <bool kDelta>
constexpr float kMaxFrameLog2 = kDelta ? 192.0f : 174.0f;
// The same for each token of the frame. Where all tokens forget more, the gradients of their decays are as small
// as what rounding leaves of the terms that cancel in them. Of floats less may be left.
template <typename T>
constexpr float kMaxMeanLog2 = std::is_same_v<T, float> ? 6.0f : 16.0f;
constexpr int kCentre = 512;  // more than any c / 2
static_assert(-kLeastLog2 <= kMaxFrameLog2<false>,
              "a token that forgets all leaves its frame in range");

// The warpgroups of a panel share the tokens out: each has a part, which is a half or, of floats, a tile.
template <int kTerms>
struct ChunkParts {
  static constexpr int kParts = kTerms == 1 ? 2 : 4;
  static constexpr int kPartTokens = kChunkTokens / kParts;
  static constexpr int kPartTiles = kPartTokens / kTileTokens;
  static constexpr int kPartFragments = kPartTokens / 8;
};

// Shared memory. Arrays [64 tokens, N] are kPanels panels, one for each 64 channels; states [V, K]
// are kPanels panels, one for each 64 columns; a product of tokens by tokens is one panel. Of floats all these
// are terms (matrix.cuh), and the second terms lie kTermBytes behind the first ones. What an
// array holds changes from phase to phase; its last content is staged there on the way to global
// memory.
template <typename T, int N, bool kAmple, bool kDelta>
struct GradientLayout : ChunkParts<kTermsOf<T>> {
  static constexpr int kTerms = kTermsOf<T>;
  static constexpr int kPanels = N / kPanelCols;
  static constexpr int kGroups = GradientLayout::kParts * kPanels;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kPanelBytes = kChunkTokens * kRowBytes;
  static constexpr int kStatePanelBytes = N * kRowBytes;
  static constexpr int kTokenBytes = kPanels * kPanelBytes;
  static constexpr int kStateBytes = kAmple ? kPanels * kStatePanelBytes : 0;

  static constexpr int kAt = 0;                  // a, At, dw
  static constexpr int kRt = kAt + kTokenBytes;  // r, Rt
  static constexpr int kBh = kRt + kTokenBytes;  // b or the rate, Bh
  static constexpr int kKh = kBh + kTokenBytes;  // k, projected in a keyed call, Kh
  static constexpr int kV = kKh + kTokenBytes;   // v, dk
  static constexpr int kDy = kV + kTokenBytes;   // dy, dr
  static constexpr int kU = kDy + kTokenBytes;   // of halves At in the first frame, U, db
  static constexpr int kDz = kU + kTokenBytes;   // w, of halves LastFrameRows, dZ, da
  static constexpr int kSp = kDz + kTokenBytes;  // Sp
  static constexpr int kDs = kSp + kStateBytes;  // dS or dSh
  // Key factors, Aab, M, dAab.
  static constexpr int kM = kDs + kStateBytes;
  // Aak, dv of the first panel, dAak; Qrb, dQrb; Qrk, dv of the second panel, dQrk.
  static constexpr int kAak = kDelta ? kM : kM + kPanelBytes;
  static constexpr int kQrb = kAak + kPanelBytes;
  static constexpr int kQrk = kDelta ? kQrb : kQrb + kPanelBytes;
  static constexpr int kTermBytes = kQrk + kPanelBytes;
  // If kDelta, kV has v, W and dk, kDz has w, kLastKh, -dZ and TokenSums, kM has M and dT, and kQrb has Q and dQ. kBh has
  // kFirstRt, and kU has At in the first frame of tiles, and then both have KeptKeys.

  // Rt in the first frame: of halves until Qrb and Qrk are stored, of the delta rule with Kh of the second tile in the
  // frame of the third one in place of the first tile. And of the delta rule Kh in the last frame.
  static constexpr int kFirstRt = kDelta ? kBh : kTermBytes - kTokenBytes;
  static constexpr int kLastKh = kDz;
  // float [4, N]: the sums of the log decays of both halves or, of decays without a bound, the factors of S0 and dS,
  // and Centres. Of decays with a bound the factor of S0 comes to row 0 unless kAmple, and at last the other rows
  // have Written and LaterReads. Before that, row 3 has the barriers of LoadBoxes.
  static constexpr int kSums = kTerms * kTermBytes;
  static constexpr int kBeta = kSums + 4 * N * sizeof(float);  // if kDelta: float [64]
  static constexpr int kBytes = kBeta + (kDelta ? kChunkTokens * sizeof(float) : 0);
};

// Named barriers; 0 is __syncthreads. The table of phases says what each is for.
template <typename L>
struct GradientBarriers {
  enum NamedBarrier : int {
    kWarpgroup = 1,                   // + the warpgroup: its 128 threads
    kHalf = kWarpgroup + L::kGroups,  // + the half: its warpgroups of all panels
    // Of 16 bits: at these one half waits for the other, which goes on.
    kDzStored = kHalf + 2,
    kAakRead,
    kQrkRead,
    kDvOut,
    // Of floats: all threads, which wait in different phases, and the warpgroups of dV and of dAak.
    kValues = kHalf + 2,
    kAak,
  };
};

// Adds the chunk of this block to a list behind its length. Inlined, it would cost registers everywhere.
[[gnu::noinline]] __device__ void AddChunk(uint32_t* list) {
  list[1 + atomicAdd(list, 1)] = blockIdx.x;
}

// What the frames of a chunk are. Where the chunk is one, c is 0 in all channels.
enum class Frames { kChunk, kHalves, kTiles };

// The decays of the channels of a warp and the tokens of its part.
template <typename L>
struct PartDecays {
  Accumulator<L::kPartFragments> writes = {};  // c - G
  // Of the two channels of this lane: the sums of the log decays of each tile of the half that has the part, and c
  // where that half is a frame.
  float sums[2][kHalfTiles], centres[2];
  bool in_range = true, in_halves = true, in_chunk = true;  // as far as this thread knows
  // In the order of LoadTransposed; floats are two in place of a pair.
  std::conditional_t<L::kTerms == 1, uint32_t[4], float[4][2]> raw_w[L::kPartTiles];
  Left log_decays[L::kPartTiles]
                 [L::kTerms];  // of float16, scaled; needed until the operands are scaled
};

// What the gradients of keys and queries leave for the gradient of the decays, for the same
// channels and tokens.
template <typename L>
struct DecayTerms {
  using Sum = Accumulator<L::kPartFragments>;
  Sum reads = {};         // Rt dRt - Bh dBh - Kh dKh + At dAt
  Sum own_reads;          // At dAt, which the decay of its own token does not scale
  Sum slope;              // the derivative of the log decay in w
  float written[2] = {};  // dS * S_L, summed over some of the rows of the state
};

// The tensor maps with which code for 9.0a copies the rows of a chunk as boxes. Kernels for 16 bits have them, with a
// bound of decays and ample shared memory, without marks and keys. Threads copy the rows of all others, of other devices
// and of chunks of fewer than 64 tokens, 16 bytes at a time.
struct NoRowMaps {};
#ifdef RWKV_JAX_EMULATION
template <typename T, bool kMarked, bool kFramed, bool kAmple, typename Call>
using RowMapsOf = NoRowMaps;
#else
struct RowMaps {
  bool made;
  CUtensorMap w, r, k, v, a, b, dy, ds;  // boxes of 64 rows, or of all rows of a state
  CUtensorMap pairs[2][2];  // of db and dk, and of dr and da; boxes of the rows of a half
};
template <typename T, bool kMarked, bool kFramed, bool kAmple, typename Call>
using RowMapsOf = std::conditional_t<kTermsOf<T> == 1 && !kMarked && !kFramed && kAmple &&
                                         std::is_same_v<Call, Wkv7BackwardCall>,
                                     RowMaps, NoRowMaps>;
#endif

// The phases, and what a thread knows of its place in the block.
template <typename T, int N, bool kMarked, bool kFramed, bool kAmple, typename Call>
class ChunkGradients {
 public:
  using Maps = RowMapsOf<T, kMarked, kFramed, kAmple, Call>;
  static constexpr bool kHasMaps = RWKV_JAX_WARPGROUP_PRODUCTS && !std::is_same_v<Maps, NoRowMaps>;
  static constexpr bool kKeyed = std::is_same_v<Call, Wkv7KeyedBackwardCall>;
  static constexpr bool kDelta = std::is_same_v<Call, Wkv7DeltaBackwardCall>;
  using L = GradientLayout<T, N, kAmple, kDelta>;
  using B = GradientBarriers<L>;
  using Channels = WarpChannels<L>;
  using Decays = PartDecays<L>;
  using Terms = DecayTerms<L>;
  using PartAccumulator = typename Terms::Sum;  // 64 channels by the tokens of a part
  static constexpr int kTerms = L::kTerms;
  static constexpr bool kFloat = kTerms > 1;
  // Frames of floats and of the delta rule are the chunk or tiles.
  static constexpr bool kHasHalves = kFramed && !kFloat && !kDelta;
  static_assert(!kFloat || (kFramed && kMarked && kAmple), "floats have one kernel");
  // Whether heads have no other K and V than N.
  static constexpr bool kFilled = !kMarked || kKeyed || kFloat;
  static constexpr int kTiles = N / kTileTokens;
  static constexpr bool kOnePanel = L::kPanels == 1;
  static constexpr int kDvThreads = 128 * (L::kPanels + 1);  // that write dV, and wait for it
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  // A piece is 8 columns, 16 bytes of each term.
  static constexpr int kRowPieces = N / 8;
  static constexpr int kStatePieces = N * kRowPieces;
  static constexpr int kStateSteps = kStatePieces / L::kThreads;
  // With kAmple: the pieces of S0 and, with kFramed, of dS that a thread has.
  struct StatePieces {
    uint4 s0[kStateSteps][kTerms], ds[kFramed ? kStateSteps : 1][kTerms];
  };

  __device__ ChunkGradients(const Call& call, const Maps& maps, const uint4* state_gradients,
                            unsigned char* memory)
      : call(call),
        maps(maps),
        state_gradients(state_gradients),
        memory(memory),
        shared(SharedAddress(memory)),
        warp(Warp() % 4),
        group(Warp() / 4),
        panel(L::kPanels == 1 ? 0 : group / L::kParts),
        part(group % L::kParts),
        half(part / (L::kParts / 2)) {}

  // Finds the chunk and the head of this block. Returns false if the block has nothing to do.
  __device__ __forceinline__ bool Find() {
    // Divisions of 64 bits would cost more.
    const unsigned heads = static_cast<unsigned>(call.dims.heads);
    const int64_t all_chunks = blockIdx.x / heads, head = blockIdx.x - all_chunks * heads;
    const int row = call.sequences.Given()
                        ? call.sequences.owners[all_chunks]
                        : static_cast<int>(all_chunks / static_cast<unsigned>(call.dims.saved));
    if (row < 0) return false;
    const Span span = call.sequences(row, call.dims.tokens);
    const int chunk = static_cast<int>(all_chunks - span.first_chunk);
    const int64_t first_token = chunk * kChunk;
    constexpr int kWords = kChunkTokens / kWordTokens;
    marks_index = row * static_cast<int>(call.marks.per_row / kWords) + chunk;
    constexpr int kUnit = kFilled ? N : 1;
    stride = static_cast<int>(heads * kUnit);
    first = (span.first_token + first_token) * stride + head * kUnit;
    // Of a keyed call no heads share keys.
    const unsigned key_head =
        kKeyed ? head : static_cast<unsigned>(head) / static_cast<unsigned>(call.dims.group);
    key_stride = kKeyed ? stride : static_cast<int>(call.dims.key_heads * kUnit);
    first_key = (span.first_token + first_token) * key_stride + key_head * kUnit;
    const int64_t left_tokens = span.tokens - first_token;
    tokens = static_cast<int>(left_tokens < kChunkTokens ? left_tokens : kChunkTokens);
    if constexpr (kHasMaps) {
      map_row = static_cast<int>(span.first_token + first_token);
      map_column = static_cast<int>(head * N), key_column = static_cast<int>(key_head * N);
    }
    return true;
  }

  // Starts the copies of the chunk in three groups: w, then what the decays scale, then the rest.
  // A state comes in registers if it is scaled before it is stored.
  __device__ __forceinline__ void LoadChunk(StatePieces& state) const {
    if constexpr (kHasMaps)
      if (HasBoxes()) {
        LoadBoxes();
        LoadStates(state);
        return;
      }
    const uint64_t absent = LoadMarks().absent;
    const auto copy_from = [&](int to, const void* from, int64_t first, int stride, int size) {
#pragma unroll
      for (int i = 0; i < kChunkTokens * kRowPieces / L::kThreads; ++i) {
        const int index = threadIdx.x + i * L::kThreads;
        const int row = index / kRowPieces, piece = index % kRowPieces;
        const bool present = row < tokens && (absent >> row & 1) == 0 && Has(piece, size);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
          CopyAsync(PieceAddress(shared + to + term * L::kTermBytes + piece / 8 * L::kPanelBytes,
                                 row, piece % 8),
                    static_cast<const T*>(from) + ElementOf(first, stride, row, size) +
                        ColumnOf(piece, term),
                    present);
      }
    };
    const auto copy = [&](int to, const void* from, int size) {
      copy_from(to, from, first, stride, size);
    };
    const auto copy_keys = [&](int to, const void* from) {
      copy_from(to, from, first_key, key_stride, KeySize());
    };
    if constexpr (kDelta)
      copy(L::kDz, call.w, KeySize());
    else
      copy_keys(L::kDz, call.w);
    CommitCopies();
    if constexpr (kKeyed) {
      copy_keys(L::kBh, call.a);  // the rate
      CopyKeyFactors(absent);
    } else if constexpr (kDelta) {
      if (const int row = threadIdx.x; row < kChunkTokens)
        CopyWordAsync(At(L::kBeta) + 4 * row, call.beta + TokenOf(row),
                      row < tokens && (absent >> row & 1) == 0);
    } else {
      copy_keys(L::kAt, call.a);
      copy_keys(L::kBh, call.b);
    }
    copy_keys(L::kKh, call.k);
    copy_keys(L::kRt, call.r);
    CommitCopies();
    copy(L::kV, call.v, ValueSize());
    copy(L::kDy, call.dy, ValueSize());
    LoadStates(state);
    CommitCopies();
  }

  // LoadChunk with boxes: w, what the decays scale, and the rest with dS, each with a barrier of its own.
  __device__ __forceinline__ void LoadBoxes() const {
#if RWKV_JAX_WARPGROUP_PRODUCTS
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 3; ++i) hopper::InitBarrier(BoxBarrier(i), 1);
      hopper::PublishBarriers();
      const auto copy = [&](int barrier, int to, const CUtensorMap& map, int column) {
#pragma unroll
        for (int i = 0; i < L::kPanels; ++i)
          hopper::CopyBox(At(to + i * L::kPanelBytes), &map, BoxBarrier(barrier),
                          column + i * kPanelCols, map_row);
      };
      hopper::ExpectBytes(BoxBarrier(0), L::kTokenBytes);
      copy(0, L::kDz, maps.w, key_column);
      hopper::ExpectBytes(BoxBarrier(1), 4 * L::kTokenBytes);
      copy(1, L::kBh, maps.b, key_column);
      copy(1, L::kKh, maps.k, key_column);
      copy(1, L::kRt, maps.r, key_column);
      copy(1, L::kAt, maps.a, key_column);
      hopper::ExpectBytes(BoxBarrier(2), 2 * L::kTokenBytes + L::kStateBytes);
      copy(2, L::kV, maps.v, map_column);
      copy(2, L::kDy, maps.dy, map_column);
#pragma unroll
      for (int i = 0; i < L::kPanels; ++i)
        hopper::CopyBox(At(L::kDs + i * L::kStatePanelBytes), &maps.ds, BoxBarrier(2),
                        i * kPanelCols, blockIdx.x * N);
    }
    __syncthreads();  // the barriers are there
#endif
  }

  // What LoadChunk does for the states.
  __device__ __forceinline__ void LoadStates(StatePieces& state) const {
    if constexpr (!kAmple) {
      SavedStart().FetchIntoL2();
      SavedGradient().FetchIntoL2();
      return;
    }
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kStatePieces + threadIdx.x;
    const uint4* const states = static_cast<const uint4*>(call.states);
#pragma unroll
    for (int i = 0; i < kStateSteps; ++i) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        const int64_t at = (index + i * L::kThreads) * kTerms + term;
        if constexpr (kFilled) {
          state.s0[i][term] = states[at];
        } else {
          const int row = (threadIdx.x + i * L::kThreads) / kRowPieces;
          const int piece = threadIdx.x % kRowPieces;
          state.s0[i][term] = {};
          if (row < ValueSize() && Has(piece, KeySize()))
            state.s0[i][term] =
                states[(static_cast<int64_t>(blockIdx.x) * ValueSize() + row) * (KeySize() / 8) +
                       piece];
        }
        if constexpr (kFramed) state.ds[i][term] = state_gradients[at];
      }
      if (!kFramed && !HasBoxes())
        CopyAsync(StatePiece(shared + L::kDs, i), state_gradients + index + i * L::kThreads, true);
    }
  }

  // Waits until w has been copied; until the operands that the decays scale have been, by this thread or all; and
  // until all has been.
  __device__ __forceinline__ void WaitForDecays() const {
    if (WaitForBoxes(0)) return;
    WaitForCopies<2>();
    __syncthreads();
  }
  __device__ __forceinline__ void WaitForScaledOperands() const {
    if (!WaitForBoxes(1)) WaitForCopies<1>();
  }
  __device__ __forceinline__ void WaitForChunk() const {
    if (!WaitForBoxes(2)) WaitForCopies<0>();
  }

  // All threads have waited at the barriers of LoadBoxes.
  __device__ __forceinline__ void ForgetBoxBarriers() const {
#if RWKV_JAX_WARPGROUP_PRODUCTS
    if (HasBoxes() && threadIdx.x == 0)
#pragma unroll
      for (int i = 0; i < 3; ++i) hopper::InvalidateBarrier(BoxBarrier(i));
#endif
  }

  // c - G of the tokens of this part, so far without the later half, or without a bound without c and the later
  // tile; and what the first rows of Sums have. Sums are products with ones, in float16.
  __device__ __forceinline__ void SumLogDecays(Decays& decays) const {
    const Ones later(false, false, true), all(true, true, true);
    float total[4] = {}, of_first[4];  // sums over the half and over its first tile
    // The tokens of a tile that are no padding or, if all of them are none, those of the chunk from there on.
    int counted[L::kPartTiles];
#pragma unroll
    for (int tile = 0; tile < L::kPartTiles; ++tile) {
      uint32_t x[kTerms][4];
      const int token = 16 * (FirstTile() + tile);
      const uint32_t present = PresentRows(tokens - token, LoadMarks().Absent(token));
      counted[tile] = present == kAllRows ? tokens - token : __popc(present);
      auto& w = decays.raw_w[tile];
      if constexpr (kFloat) {
        float floats[2][4];
        OwnChannels(L::kDz).LoadFloats(FirstTile() + tile, floats);
        ForEachElement<2>([&](int i, int e) { w[i + e / 2 * 2][e % 2] = floats[i][e]; });
        LogDecays(w, call.decay, kLeastLog2, present, x);
      } else {
        LoadTransposed(TileAddress(OwnPanel(L::kDz), token, warp), w);
        if constexpr (kFramed)
          LogDecays<T, Decay::kExp>(w, kDelta ? Decay::kLog : call.decay, kLeastLog2, present,
                                    x[0]);
        else
          LogDecays<T, Decay::kSigmoid>(w, Decay::kSigmoid, kLeastLog2, present, x[0]);
      }
      Left(&log_decays)[kTerms] = decays.log_decays[tile];
#pragma unroll
      for (int i = 0; i < kTerms * 4; ++i)
        log_decays[i / 4][i % 4] = x[i / 4][i % 2 * 2 + i % 4 / 2];
      AddLogDecays(total, log_decays, all, 0);
      if (tile == 0)
#pragma unroll
        for (int i = 0; i < 4; ++i) of_first[i] = total[i];
#pragma unroll
      for (int i = 0; i < (kFramed ? 0 : 2 * tile); ++i)
        AddLogDecays(decays.writes[i], log_decays, all, i % 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) AddLogDecays(decays.writes[2 * tile + i], log_decays, later, i);
    }
    if constexpr (kFloat) {
      if (Lane() % 4 == 0)
#pragma unroll
        for (int i = 0; i < 2; ++i) TileSums()[part * N + Channel() + 8 * i] = total[2 * i];
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = Channel() + 8 * i;
      float sum = total[2 * i], frame[2] = {of_first[2 * i], sum - of_first[2 * i]};
      if constexpr (!kFramed) {
        if (Lane() % 4 == 0) Sums()[half * N + channel] = sum;
        continue;
      }
      if constexpr (kFloat) {
#pragma unroll
        for (int f = 0; f < 2; ++f) frame[f] = TileSums()[(kHalfTiles * half + f) * N + channel];
        sum = frame[0] + frame[1];
      }
      const bool slow = IsSlow(frame);
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        decays.sums[i][f] = frame[f];
        if (kFloat && f != part % kHalfTiles) continue;
        const float tokens = static_cast<float>(counted[kFloat ? 0 : f]);
        const float most = fminf(kMaxFrameLog2<kDelta>, kMaxMeanLog2<T> * tokens);
        // Between frames c must fall, also where a token does not decay but grows.
        decays.in_range = decays.in_range && fabsf(frame[f]) <= most && (slow || frame[f] <= 0.0f);
      }
      decays.in_halves = decays.in_halves && fabsf(sum) <= kMaxFrameLog2<kDelta>;
      decays.in_chunk = decays.in_chunk && slow;
      decays.centres[i] = StoreStateFactor(Frames::kHalves, frame, i);
      if constexpr (kHasHalves)
#pragma unroll
        for (int f = 0; f < kHalfTiles; ++f)
          StoreCentre(half * kHalfTiles + f, i, decays.centres[i]);
    }
  }

  // The barrier after SumLogDecays. Returns whether the chunk is left to another kernel.
  __device__ __forceinline__ bool IsSteep(const Decays& decays, uint32_t* steep) {
    if constexpr (!kFramed) {
      __syncthreads();
      return false;
    }
    const auto all = [](bool x) { return __syncthreads_and(x) != 0; };
    frames = all(decays.in_range && decays.in_chunk)                  ? Frames::kChunk
             : kHasHalves && all(decays.in_range && decays.in_halves) ? Frames::kHalves
                                                                      : Frames::kTiles;
    if (frames != Frames::kTiles) return false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      StoreStateFactor(Frames::kTiles, decays.sums[i], i);
#pragma unroll
      for (int tile = 0; tile < L::kPartTiles; ++tile)
        StoreCentre(FirstTile() + tile, i,
                    Centre(Frames::kTiles, decays.sums[i], kFloat ? part % kHalfTiles : tile));
    }
    // Without a list no chunk is steep: floats with a bound have this kernel too.
    if (all(decays.in_range) || steep == nullptr) return false;
    if (threadIdx.x == 0) AddChunk(steep);
    WaitForCopies<0>();
    return true;
  }

  // With kFramed: c of the frames of this part, in `decays`.
  __device__ __forceinline__ void SetCentres(Decays& decays) const {
    const auto set = [&](auto centre) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int tile = 0; tile < L::kPartTiles; ++tile) {
          const float (&sums)[kHalfTiles] = decays.sums[i];
          const int f = kFloat ? part % kHalfTiles : tile;
          const float last =
              half == 0 ? (f == 0 ? -sums[1] : 0.0f) : sums[0] + (f == 0 ? 0.0f : sums[1]);
          const float shift = centre(i, f) - last;
#pragma unroll
          for (int j = 0; j < 4; ++j) decays.writes[2 * tile + j / 2][2 * i + j % 2] += shift;
        }
    };
    if (frames != Frames::kTiles)
      set([&](int i, int) { return decays.centres[i]; });
    else
      set([&](int i, int f) { return Centre(Frames::kTiles, decays.sums[i], f); });
  }

  // At, Rt, Bh and Kh of this part, in place; of floats as terms.
  __device__ __forceinline__ void ScaleOperands(Decays& decays) const {
    PartAccumulator& writes = decays.writes;
    if constexpr (kFramed) SetCentres(decays);
    if (!kFramed && half == 0) {
      const float later_half[2] = {Sums()[N + Channel()], Sums()[N + Channel() + 8]};
      ForEachElement<L::kPartFragments>(
          [&](int fragment, int e) { writes[fragment][e] += later_half[e / 2]; });
    }
    const Ones itself(false, true, false);
#pragma unroll
    for (int tile = 0; tile < L::kPartTiles; ++tile) {
      float e[2][4];
      // Those of a tile are loaded before any is scaled. Floats are loaded when they are.
      Left b[kTerms], k[kTerms], r[kTerms], a[kTerms];
      const auto load = [&](int offset, Left(&x)[kTerms]) {
        if constexpr (!kFloat) OwnChannels(offset).Load(FirstTile() + tile, x);
      };
      const auto scale = [&](int offset, Left(&x)[kTerms]) {
        if constexpr (kFloat) {
          float floats[2][4];
          OwnChannels(offset).LoadFloats(FirstTile() + tile, floats);
          ForEachElement<2>([&](int i, int j) { floats[i][j] *= e[i][j]; });
          Round(floats[0], floats[1], x);
          __syncwarp();  // all lanes have read what others overwrite
        } else {
          Scale<T>(e, x[0]);
        }
        OwnChannels(offset).Store(FirstTile() + tile, x);
      };
      const auto set = [&](auto value) {
        ForEachElement<2>([&](int i, int j) { e[i][j] = value(i, j); });
      };
      if constexpr (kDelta) {
        load(L::kKh, k), load(L::kKh, a), load(L::kRt, r);
        const float2 betas[2] = {BetasOf(tile, 0), BetasOf(tile, 1)};
        const float factor = *call.scale;
        set([&](int i, int j) {
          return Exp2(writes[2 * tile + i][j]) * (j % 2 == 0 ? betas[i].x : betas[i].y);
        });
        scale(L::kKh, k);
        set([&](int i, int j) { return Exp2(-writes[2 * tile + i][j]); });
        scale(L::kAt, a);
        set([&](int i, int j) { return e[i][j] * factor; });
        scale(L::kRt, r);
        if (frames == Frames::kTiles) BringToOtherFrames(FirstTile() + tile, k, a, r);
        continue;
      }
      if constexpr (kKeyed)
        MakeTileKeys(tile, k[0], a[0], b[0]);
      else
        load(L::kBh, b), load(L::kKh, k), load(L::kAt, a);
      load(L::kRt, r);
      set([&](int i, int j) { return Exp2(writes[2 * tile + i][j]); });
      scale(L::kBh, b);
      scale(L::kKh, k);
      set([&](int i, int j) { return Exp2(-writes[2 * tile + i][j]); });
      scale(L::kRt, r);
      set([&](int i, int j) { return writes[2 * tile + i][j]; });
#pragma unroll
      for (int i = 0; i < 2; ++i) AddLogDecays(e[i], decays.log_decays[tile], itself, i);
      set([&](int i, int j) { return Exp2(-e[i][j]); });
      scale(L::kAt, a);
    }
    if constexpr (kHasHalves)
      if (frames == Frames::kHalves) BringToOtherFrame();
  }

  // Eight channels, of a 16-bit type or floats, times their factors, as bfloat16 or terms of it.
  template <typename Half, typename Factor>
  static __device__ __forceinline__ void RoundPiece(const uint4 (&piece)[kTerms], Factor&& factor,
                                                    uint4 (&x)[kTerms]) {
    const uint4 first = piece[0], last = piece[kTerms - 1];
    const uint32_t words[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
    uint32_t terms[4][kTerms];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t low = words[kTerms * j], high = words[kTerms * j + kTerms - 1];
      float2 pair;
      if constexpr (kFloat)
        pair = {__uint_as_float(low), __uint_as_float(high)};
      else
        pair = {Pair<Half>::Low(low), Pair<Half>::High(high)};
      Round(pair.x * factor(2 * j), pair.y * factor(2 * j + 1), terms[j]);
    }
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      x[term] = {terms[0][term], terms[1][term], terms[2][term], terms[3][term]};
  }

  // Rounds v and dy, which no decay scales, to bfloat16 or terms of it.
  __device__ __forceinline__ void RoundValues() const {
    if constexpr (kBf16) return;
    __syncthreads();  // until the copies of all threads have come
    constexpr int kPieces = kRowPieces / kTerms, kItems = kChunkTokens * kPieces;
#pragma unroll
    for (int step = 0; step < 2 * kItems / L::kThreads; ++step) {
      const int item = threadIdx.x + step * L::kThreads;
      const int row = item / kPieces % kChunkTokens, piece = item % kPieces * kTerms;
      const int at_panel = (item < kItems ? L::kV : L::kDy) + piece / 8 * L::kPanelBytes;
      const auto at = [&](int i, int term) {
        return reinterpret_cast<uint4*>(
            memory + PieceAddress(at_panel + term * L::kTermBytes, row, piece % 8 + i));
      };
      uint4 x[kTerms][kTerms];
#pragma unroll
      for (int i = 0; i < kTerms * kTerms; ++i)
        x[i / kTerms][i % kTerms] = *at(i % kTerms, i / kTerms);
#pragma unroll
      for (int i = 0; i < kTerms; ++i) {
        uint4 rounded[kTerms];
        RoundPiece<T>(x[i], [](int) { return 1.0f; }, rounded);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) *at(i, term) = rounded[term];
      }
    }
  }

  // Of the delta rule with frames of tiles, from the operands of a tile: what products over channels take of it in
  // other frames.
  __device__ __forceinline__ void BringToOtherFrames(int tile, const Left (&kh)[kTerms],
                                                     const Left (&at)[kTerms],
                                                     const Left (&rt)[kTerms]) const {
    const auto factors_to = [&](int frame, uint32_t (&factors)[2]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) factors[i] = OwnFactors(i, tile, frame);
    };
    const auto bring = [&](const Left(&x)[kTerms], const uint32_t (&factors)[2], int to, int row) {
      Left y[kTerms];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[0][i] = MultiplyTwice(x[0][i], factors[i % 2]);
      OwnChannels(to).Store(row, y);
    };
    uint32_t to_first[2], to_last[2], to_third[2];
    factors_to(0, to_first), factors_to(kChunkTiles - 1, to_last);
    if (tile == 1) factors_to(2, to_third);
    bring(at, to_first, FirstFrame(L::kAt), tile);
    bring(kh, to_last, L::kLastKh, tile);
    if (tile > 0) bring(rt, to_first, FirstFrame(L::kRt), tile);
    if (tile == 1) bring(kh, to_third, FirstFrame(L::kRt), 0);
  }

  // Of halves, from the operands of this half: At and Rt in the first frame, and LastFrameRows.
  __device__ __forceinline__ void BringToOtherFrame() const {
    uint32_t factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) factors[i] = OwnFactors(i, 0, kChunkTiles - 1);
    __syncwarp();
    const auto bring = [&](auto of_half) {
      constexpr bool kFirst = decltype(of_half)::value == 0;
      constexpr int kOffsets[4] = {L::kAt, L::kRt, L::kKh, L::kBh};
      constexpr int kCount = kFirst ? 4 : 2;
      Left x[kCount][kHalfTiles][kTerms];
#pragma unroll
      for (int i = 0; i < kCount * kHalfTiles; ++i)
        OwnChannels(kOffsets[i / kHalfTiles])
            .Load(FirstTile() + i % kHalfTiles, x[i / kHalfTiles][i % kHalfTiles]);
#pragma unroll
      for (int i = 0; i < kCount * kHalfTiles; ++i) {
        const int operand = i / kHalfTiles, offset = kOffsets[operand], tile = i % kHalfTiles;
        Left(&of_tile)[kTerms] = x[operand][tile];
        if (!kFirst || operand >= 2)
#pragma unroll
          for (int j = 0; j < 4; ++j) of_tile[0][j] = MultiplyTwice(of_tile[0][j], factors[j % 2]);
        if (operand < 2)
          OwnChannels(FirstFrame(offset)).Store(FirstTile() + tile, of_tile);
        else
          Channels{LastFrameRows(offset, panel).panel, warp}.Store(tile, of_tile);
      }
    };
    if (half == 0)
      bring(std::integral_constant<int, 0>());
    else
      bring(std::integral_constant<int, 1>());
  }

  // Sp and, with kFramed, dSh from the pieces in registers; or their factors where SavedState needs them.
  __device__ __forceinline__ void ScaleState(const StatePieces& state) const {
    if constexpr (!kAmple) {
      const int i = threadIdx.x;
      if (!kFramed && i < N) Sums()[i] = StartFactor(i);
      return;
    }
    const int col = threadIdx.x % kRowPieces * 8;
    const auto scale = [&](int to, const auto& pieces, auto&& factor) {
      float e[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) e[c] = factor(col + c);
#pragma unroll
      for (int i = 0; i < kStateSteps; ++i) {
        uint4 x[kTerms];
        RoundPiece<__nv_bfloat16>(pieces[i], [&](int c) { return e[c]; }, x);
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
          *reinterpret_cast<uint4*>(memory + StatePiece(to + term * L::kTermBytes, i)) = x[term];
      }
    };
    scale(L::kSp, state.s0, [&](int c) { return StartFactor(c); });
    if constexpr (kFramed) scale(L::kDs, state.ds, [&](int c) { return Sums()[N + c]; });
  }

  // One of M, Aak, Qrb and Qrk, by its number.
  __device__ __forceinline__ void TokenProduct(int i) const {
    const int to = L::kM + i * L::kPanelBytes;
    const bool of_a = i < (kDelta ? 1 : 2);
    const int left = of_a ? L::kAt : L::kRt, right = !kDelta && i % 2 == 0 ? L::kBh : L::kKh;
    Accumulator<8> sum;
    if (kDelta && frames == Frames::kTiles) {
      FramesProduct(sum, left);
    } else {
      ChannelProduct<false>(sum, AllChannels(left), AllChannels(right), warp,
                            AllChannels(FirstFrame(left)), AllChannels(right));
      Finish(sum);
    }
    if (kHasHalves && frames == Frames::kHalves && to >= L::kFirstRt)
      WaitForHalf();  // until Rt in the first frame has been read
    if (kDelta && of_a) Negate(sum);
    StoreLower<L>(warp, At(to), !of_a, LoadMarks(), sum);
  }

  // Of the delta rule with frames of tiles: the lower triangle of left Kh^T, where a warp has the rows of a tile. Those
  // of the first tile are multiplied in its frame, all others in the frame of the rows.
  __device__ __forceinline__ void FramesProduct(Accumulator<8>& sum, int left) const {
    ForEachElement<8>([&](int fragment, int e) { sum[fragment][e] = 0.0f; });
    const Along own = AllChannels(left), first = AllChannels(warp == 0 ? left : FirstFrame(left));
    // In the frame of the third tile only the second one is needed, and lies in the first place.
    const int third = L::kFirstRt - kTileTokens * kRowBytes;
    Along right[kChunkTiles];
#pragma unroll
    for (int column = 0; column < kChunkTiles; ++column) {
      const bool plain = column == 0 || column == warp;
      const int panel = Opaque(At(plain ? L::kKh : warp == 2 ? third : L::kLastKh));
      right[column] = {static_cast<uint32_t>(panel), L::kPanelBytes};
    }
    // Operands of a tile are loaded while those before it are multiplied.
    Left x[2][2];
    uint32_t b[2][kChunkTiles][4];
    const auto load = [&](int tile) {
      first.Tile(tile).LoadLeft(warp, x[tile % 2][0]);
      own.Tile(tile).LoadLeft(warp, x[tile % 2][1]);
#pragma unroll
      for (int column = 0; column < kChunkTiles; ++column)
        if (column <= warp) right[column].Tile(tile).Load(column, b[tile % 2][column]);
    };
    load(0);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile + 1 < kTiles) load(tile + 1);
#pragma unroll
      for (int column = 0; column < kChunkTiles; ++column)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t (&of)[4] = b[tile % 2][column];
          if (column <= warp)
            WarpMultiply(sum[2 * column + i], x[tile % 2][column > 0], of[2 * i], of[2 * i + 1]);
        }
    }
  }

  // M, Aak, Qrb and Qrk, shared out among the warpgroups. The warpgroup that inverts a product has
  // no other product.
  __device__ __forceinline__ void TokenProducts() const {
    if (group > 0) {
      // compute-sanitizer's racecheck orders accesses by the number of barriers that a warp has
      // passed.
      for (int i = 0; i < kInvertBarriers; ++i) WaitForWarpgroup();
    }
    // One copy of a product that has all frames: caches of instructions are small.
#pragma unroll(kFramed ? 1 : 4)
    for (int i = 0; i < (kDelta ? 2 : 4); ++i)
      if (group == (i == 0              ? 0
                    : i == 1 && !kDelta ? L::kPanels
                    : i == 2 || kDelta  ? 1
                                        : L::kGroups - 1))
        TokenProduct(i);
    if (group == 0) {
      __syncwarp();
      InvertPanel<L>(warp, B::kWarpgroup + group, At(L::kM));
    }
  }

  // Z^T and U^T of the channels of this panel; half 0. U is left in shared memory.
  __device__ __forceinline__ void Values() const {
    Accumulator<8> z, u;
    Left rounded[kChunkTiles][kTerms];
    const bool halves = kFramed && frames == Frames::kHalves;
    const bool other = halves || (kDelta && frames == Frames::kTiles);
    const Along at = AllChannels(other ? FirstFrame(L::kAt) : L::kAt);
    ChannelProduct<true>(z, StartRows(), at, 0, StartRows(), at);
    if (const ChunkMarks marks = LoadMarks(); marks.starts != 0) {
      Finish(z);
      KeepTokens<8>(0, 0, marks.FirstStart(), z);
    }
    if constexpr (kDelta) {
      OwnChannels(L::kV).template ForEachPair<kChunkTiles>(
          0, [&](int fragment, int e, float low, float high) {
            z[fragment][e] = low - z[fragment][e];
            z[fragment][e + 1] = high - z[fragment][e + 1];
          });
    } else {
      Product<L, true, kChunkTiles>(warp, z, Down{OwnPanel(L::kV)}, Along{At(L::kAak)});
      Finish(z);
      Arrive(B::kAakRead, L::kThreads);
    }
    RoundPanel(z, rounded);
    Product<L, false>(u, rounded, Along{At(L::kM)});
    Finish(u);
    if (halves) WaitForHalf();  // until At in the first frame has been read
    OwnChannels(kSolved).template StoreSum<__nv_bfloat16>(0, u);
    PublishOperands();
    WaitForHalf();
  }

  // Of the delta rule: dQ and dT in place of Q and M; half 0. The warpgroup of the first panel has dQ, that of the
  // last panel dT.
  __device__ __forceinline__ void DeltaTriangleGradients() const {
    const bool has_q = panel == 0, has_t = panel == L::kPanels - 1;
    Accumulator<8> dq, dt;
    if (has_q) Product<L, false, kTiles>(warp, dq, AllChannels(L::kDy), AllChannels(L::kV));
    WaitForProducts<0>();
    Synchronize(B::kDzStored, L::kThreads);
    if (has_q) {
      Settle(dq);
      StoreLower<L>(warp, At(L::kQrb), true, LoadMarks(), dq);
    }
    if (has_t) {
      Product<L, false, kTiles>(warp, dt, AllChannels(L::kDz), AllChannels(L::kV));
      Finish(dt);
      StoreLower<L>(warp, At(L::kM), false, LoadMarks(), dt);
    }
  }

  // dQrb, dQrk, dAab and dAak in place of Qrb, Qrk, M and Aak; half 0. The warpgroup of the first
  // panel has the products with U, the warpgroup of the last panel the products with V. (With one
  // panel it is the same warpgroup.)
  __device__ __forceinline__ void TriangleGradients() const {
    const bool has_b = panel == 0, has_k = panel == L::kPanels - 1;
    Accumulator<8> dqrb, dqrk;
    if (has_b) Product<L, false, kTiles>(warp, dqrb, AllChannels(L::kDy), AllChannels(L::kU));
    if (has_k) Product<L, false, kTiles>(warp, dqrk, AllChannels(L::kDy), AllChannels(L::kV));
    WaitForProducts<0>();
    Synchronize(B::kDzStored, L::kThreads);

    Accumulator<8> daab, daak;
    if (has_b) {
      Settle(dqrb);
      StoreLower<L>(warp, At(L::kQrb), true, LoadMarks(), dqrb);
      Product<L, false, kTiles>(warp, daab, AllChannels(L::kDz), AllChannels(L::kU));
      Finish(daab);
      StoreLower<L>(warp, At(L::kM), false, LoadMarks(), daab);
    }
    if (has_k) {
      Settle(dqrk);
      Product<L, false, kTiles>(warp, daak, AllChannels(L::kDz), AllChannels(L::kV));
      Synchronize(kOnePanel ? B::kQrkRead : B::kDvOut, kDvThreads);
      StoreLower<L>(warp, At(L::kQrk), true, LoadMarks(), dqrk);
      Finish(daak);
      if (kOnePanel) Synchronize(B::kDvOut, kDvThreads);
      StoreLower<L>(warp, At(L::kAak), false, LoadMarks(), daak);
    } else {
      WaitForWarpgroup();  // as often as the other one, for racecheck
    }
  }

  // Keeps what tokens of the last segment alone have of a product with dS.
  __device__ __forceinline__ void KeepLastSegment(Accumulator<8>& sum) const {
    if (const ChunkMarks marks = LoadMarks(); marks.starts != 0) {
      Finish(sum);
      KeepTokens<8>(0, marks.LastStart(), kChunkTokens, sum);
    }
  }

  // dU^T of the channels of this panel; half 1, which has made Qrb. It takes nothing that half 0 still makes.
  __device__ __forceinline__ void UGradients(Left (&rounded)[kChunkTiles][kTerms]) const {
    Accumulator<8> du;
    PublishOperands();
    WaitForHalf();
    const int writes = !kDelta ? L::kBh : frames == Frames::kTiles ? L::kLastKh : L::kKh;
    ChannelProduct<false>(du, GradientRows(), AllChannels(writes), kChunkTiles - 1, GradientRows(),
                          LastFrameRows(writes, 0));
    KeepLastSegment(du);
    Product<L, true, kChunkTiles>(warp, du, Down{OwnPanel(L::kDy)}, Down{At(L::kQrb)});
    Finish(du);
    RoundPanel(du, rounded);
  }

  // dZ^T and dV^T of the channels of this panel from dU^T; half 1. dZ is left in shared memory, dV goes
  // out by way of the panel of Aak or Qrk.
  __device__ __forceinline__ void ValueGradients(Left (&rounded)[kChunkTiles][kTerms]) const {
    Accumulator<8> dz, dv;
    Product<L, false>(dz, rounded, Down{At(L::kM)});
    Finish(dz);
    const bool halves = kFramed && frames == Frames::kHalves;
    const auto announce = [] {
      PublishOperands();
      Arrive(B::kDzStored, L::kThreads);
    };
    if (!halves) {
      OwnChannels(L::kDz).template StoreSum<__nv_bfloat16>(0, dz);
      announce();
    }
    RoundPanel(dz, rounded);
    ChannelProduct<false>(dv, GradientRows(), AllChannels(L::kKh), kChunkTiles - 1, GradientRows(),
                          LastFrameRows(L::kKh, 0));
    if (halves) {
      WaitForHalf();  // until LastFrameRows have been read
#pragma unroll
      for (int tile = 0; tile < kChunkTiles; ++tile) OwnChannels(L::kDz).Store(tile, rounded[tile]);
      announce();
    }
    KeepLastSegment(dv);
    Product<L, true, kChunkTiles>(warp, dv, Down{OwnPanel(L::kDy)}, Down{At(L::kQrk)});
    Product<L, true>(dv, rounded, Down{At(L::kAak)});
    Finish(dv);
    if (kOnePanel) Arrive(B::kQrkRead, kDvThreads);
    Synchronize(B::kAakRead, L::kThreads);

    const uint32_t staged = At(panel == 0 ? L::kAak : L::kQrk);
    Channels{staged, warp}.template StoreSum<T>(0, dv);
    WaitForWarpgroup();
    WriteRows<kChunkTokens>(staged, 0, call.dv, ValueSize());
    Arrive(B::kDvOut, kDvThreads);
    if (kOnePanel) WaitForWarpgroup();  // as often as half 0, for racecheck
  }

  // Of the delta rule: dZ^T of the channels of this panel, which is dV^T, from dW^T; half 1. It leaves -dZ in shared
  // memory.
  __device__ __forceinline__ void DeltaValueGradients(Left (&rounded)[kChunkTiles][kTerms]) const {
    Accumulator<8> dz;
    Product<L, false>(dz, rounded, Down{At(L::kM)});
    Finish(dz);
    Negate(dz);
    OwnChannels(L::kDz).template StoreSum<__nv_bfloat16>(0, dz);
    PublishOperands();
    Arrive(B::kDzStored, L::kThreads);
    WaitForWarpgroup();
    WriteRows<kChunkTokens, true, true>(OwnPanel(L::kDz), 0, call.dv, ValueSize());
  }

  // Of the delta rule: dq of this panel and half, the terms of the decays, and what dk' has by At.
  __device__ __forceinline__ void DeltaQueryGradients(const Decays& decays, Terms& terms) const {
    HalfAccumulator pair[2];  // dRt, dAt
    Left sp[kTiles][kTerms];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) LoadStart(tile, sp[tile]);
    Products<L, false>(pair, sp, 0, {HalfRows(L::kDy), HalfRows(L::kDz)});
    const auto add_triangles = [&](auto tiles) {
      AddTriangles<Along, decltype(tiles)::value, 1>(
          pair, {{L::kKh, {HalfRows(L::kQrb), HalfRows(L::kM)}}}, [&] {
            if (const ChunkMarks marks = LoadMarks(); marks.starts != 0)
              for (HalfAccumulator& sum : pair)
                KeepTokens<kHalfFragments>(half * kHalfTokens, 0, marks.FirstStart(), sum);
          });
    };
    if (half == 0)
      add_triangles(std::integral_constant<int, kHalfTiles>());
    else
      add_triangles(std::integral_constant<int, kChunkTiles>());
    AddReads(L::kRt, 1.0f, pair[0], terms);
    AddReads(L::kAt, 1.0f, pair[1], terms);
    const float factor = *call.scale;
    ForEachElement<kHalfFragments>([&](int fragment, int e) {
      const float reads = Exp2(-decays.writes[fragment][e]);
      pair[0][fragment][e] *= factor * reads;
      pair[1][fragment][e] *= reads;
    });
    // Not kept in registers, of which the gradients of keys need all.
#pragma unroll
    for (int fragment = 0; fragment < kHalfFragments; ++fragment)
      *KeptKeys(fragment) = Pack(pair[1][fragment]);
    WriteHalf(pair[0], L::kDy, call.dr);
  }

  // Of the delta rule: dk' of this panel and half, the other terms of the decays, and what dbeta has, in TokenSums.
  __device__ __forceinline__ void DeltaKeyGradients(const Decays& decays, Terms& terms) const {
    if (LoadMarks().starts == 0) AddWrittenOfState(half, terms);
    HalfAccumulator sums[1];  // dKh
    Left ds[kTiles][kTerms];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) LoadGradient(tile, ds[tile]);
    Products<L, false>(sums, ds, 0, {HalfRows(L::kV)});
    const auto add_triangles = [&](auto tiles) {
      AddTriangles<Down, decltype(tiles)::value, 2>(
          sums, {{L::kRt, {HalfColumns(L::kQrb)}}, {L::kAt, {HalfColumns(L::kM)}}}, [&] {
            if (const ChunkMarks marks = LoadMarks(); marks.starts != 0)
              KeepTokens<kHalfFragments>(half * kHalfTokens, marks.LastStart(), kChunkTokens,
                                         sums[0]);
            AddWrittenOfHalf({L::kKh}, sums, terms);
          });
    };
    if (half == 0)
      add_triangles(std::integral_constant<int, kChunkTiles>());
    else
      add_triangles(std::integral_constant<int, kHalfTiles>());
    AddReads(L::kKh, -1.0f, sums[0], terms);
    HalfAccumulator keys;
#pragma unroll
    for (int fragment = 0; fragment < kHalfFragments; ++fragment)
      Unpack(*KeptKeys(fragment), keys[fragment]);
    float of_tokens[2 * kHalfFragments];
#pragma unroll
    for (int tile = 0; tile < kHalfTiles; ++tile) {
      Left at[kTerms];
      OwnChannels(L::kAt).Load(FirstTile() + tile, at);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int fragment = 2 * tile + i;
        const float2 betas = BetasOf(tile, i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // At times `writes` is k'.
          const float writes = Exp2(decays.writes[fragment][e]);
          const float2 reads = ValuesOf(at, 2 * i + e / 2);
          const float by_kh = sums[0][fragment][e] * writes;
          const float of_beta = (e % 2 == 0 ? reads.x : reads.y) * writes * by_kh;
          float& sum = of_tokens[2 * fragment + e % 2];
          sum = e < 2 ? of_beta : sum + of_beta;
          keys[fragment][e] += (e % 2 == 0 ? betas.x : betas.y) * by_kh;
        }
      }
    }
    const int i = ReduceScatter<4, 32>(of_tokens, Lane());
    TokenSums(half, 4 * panel + warp)[i / 2 * 8 + 2 * (Lane() % 4) + i % 2] = of_tokens[0];
    WriteHalf(keys, L::kV, call.dk);
  }

  // Stages a result of this panel and half where operands of no other half were, and writes it.
  __device__ __forceinline__ void WriteHalf(const HalfAccumulator& sum, int staged,
                                            void* out) const {
    WaitForHalf();
    OwnChannels(staged).template StoreSum<T>(FirstTile(), sum);
    WaitForWarpgroup();
    WriteRows<kHalfTokens>(OwnPanel(staged), half * kHalfTokens, out, KeySize());
  }

  // dB and dK of this panel and half, and their terms of the decays.
  __device__ __forceinline__ void KeyGradients(const Decays& decays, Terms& terms) const {
    if (LoadMarks().starts == 0) AddWrittenOfState(half, terms);
    HalfAccumulator pair[2];  // dBh, dKh
    Left ds[kTiles][kTerms];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) LoadGradient(tile, ds[tile]);
    Products<L, false>(pair, ds, 0, {HalfRows(L::kU), HalfRows(L::kV)});
    const auto add_triangles = [&](auto tiles) {
      AddTriangles<Down, decltype(tiles)::value, 2>(
          pair,
          {{L::kRt, {HalfColumns(L::kQrb), HalfColumns(L::kQrk)}},
           {L::kAt, {HalfColumns(L::kM), HalfColumns(L::kAak)}}},
          [&] {
            if (const ChunkMarks marks = LoadMarks(); marks.starts != 0)
              for (HalfAccumulator& sum : pair)
                KeepTokens<kHalfFragments>(half * kHalfTokens, marks.LastStart(), kChunkTokens,
                                           sum);
            AddWrittenOfHalf({L::kBh, L::kKh}, pair, terms);
          });
    };
    // Tokens are read by later tokens: the second half by the second half alone.
    if (half == 0)
      add_triangles(std::integral_constant<int, kChunkTiles>());
    else
      add_triangles(std::integral_constant<int, kHalfTiles>());
    FinishKeys(decays, terms, pair);
    WritePair<0>(pair, L::kU, call.db, L::kV, call.dk);
  }

  // dB and dK of this panel and part from dBh and dKh, and their terms of the decays.
  __device__ __forceinline__ void FinishKeys(const Decays& decays, Terms& terms,
                                             PartAccumulator (&pair)[2]) const {
    AddReads(L::kBh, -1.0f, pair[0], terms);
    AddReads(L::kKh, -1.0f, pair[1], terms);
    ForEachElement<L::kPartFragments>([&](int fragment, int e) {
      const float factor = Exp2(decays.writes[fragment][e]);
      pair[0][fragment][e] *= factor, pair[1][fragment][e] *= factor;
    });
  }

  // dR and dA of this panel and half, and their terms of the decays.
  __device__ __forceinline__ void QueryGradients(const Decays& decays, Terms& terms) const {
    HalfAccumulator pair[2];  // dRt, dAt
    Left sp[kTiles][kTerms];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) LoadStart(tile, sp[tile]);
    Products<L, false>(pair, sp, 0, {HalfRows(L::kDy), HalfRows(L::kDz)});
    const auto add_triangles = [&](auto tiles) {
      AddTriangles<Along, decltype(tiles)::value, 2>(
          pair,
          {{L::kBh, {HalfRows(L::kQrb), HalfRows(L::kM)}},
           {L::kKh, {HalfRows(L::kQrk), HalfRows(L::kAak)}}},
          [&] {
            if (const ChunkMarks marks = LoadMarks(); marks.starts != 0)
              for (HalfAccumulator& sum : pair)
                KeepTokens<kHalfFragments>(half * kHalfTokens, 0, marks.FirstStart(), sum);
          });
    };
    // Tokens read earlier tokens: the first half reads the first half alone.
    if (half == 0)
      add_triangles(std::integral_constant<int, kHalfTiles>());
    else
      add_triangles(std::integral_constant<int, kChunkTiles>());
    FinishQueries(decays, terms, pair);
    WritePair<1>(pair, L::kDy, call.dr, L::kDz, call.da);
  }

  // dR and dA of this panel and part from dRt and dAt, and their terms of the decays.
  __device__ __forceinline__ void FinishQueries(const Decays& decays, Terms& terms,
                                                PartAccumulator (&pair)[2]) const {
    AddReads(L::kRt, 1.0f, pair[0], terms);
    OwnChannels(L::kAt).template ForEachPair<L::kPartTiles>(
        FirstTile(), [&](int fragment, int e, float low, float high) {
          terms.own_reads[fragment][e] = low * pair[1][fragment][e];
          terms.own_reads[fragment][e + 1] = high * pair[1][fragment][e + 1];
        });
    // 0, which nvcc does not know. Else it would keep what SumLogDecays has made of w, in more registers.
    const uint32_t zero = stride >> 31;
    const auto scale = [&](auto form) {
      ForEachElement<L::kPartFragments>([&](int fragment, int e) {
        const auto& two = decays.raw_w[fragment / 2][fragment % 2 + e / 2 * 2];
        float w;
        if constexpr (kFloat)
          w = two[e % 2];
        else
          w = e % 2 ? Pair<T>::High(two ^ zero) : Pair<T>::Low(two ^ zero);
        const float2 own = Log2DecayAndSlope<decltype(form)::value>(w, kLeastLog2);
        const float writes = decays.writes[fragment][e];
        terms.slope[fragment][e] = own.y;
        pair[0][fragment][e] *= Exp2(-writes);
        pair[1][fragment][e] *= Exp2(-writes - own.x);
        terms.reads[fragment][e] += terms.own_reads[fragment][e];
      });
    };
    if (!kFramed || (kFloat && call.decay == Decay::kSigmoid))
      scale(std::integral_constant<Decay, Decay::kSigmoid>());
    else if (call.decay == Decay::kExp)
      scale(std::integral_constant<Decay, Decay::kExp>());
    else
      scale(std::integral_constant<Decay, Decay::kLog>());
  }

  // Of floats, whose warpgroups have one product each at a time: from M, Aak, Qrb and Qrk on to dAak, dQrb, dAab and
  // dQrk in their places, U, dZ and dV.
  __device__ __forceinline__ void ValuesByRoles() const {
    TokenProduct(group);
    PublishOperands();
    if (group == 0) {
      __syncwarp();
      InvertPanel<L>(warp, B::kWarpgroup + group, At(L::kM));
      WaitForValues();
    } else {
      // As often as InvertPanel, with the one below.
      for (int i = 1; i < kInvertBarriers; ++i) WaitForWarpgroup();
      Accumulator<8> sum;
      StartValues(sum);
      if (group == 3) {
        FinishValues(sum);
        return;
      }
      Left rounded[kChunkTiles][kTerms];
      RoundPanel(sum, rounded);
      WaitForWarpgroup();
      WaitForValues();  // until M is stored
      if (group == 1)
        Product<L, false>(sum, rounded, Along{At(L::kM)});
      else
        Product<L, false>(sum, rounded, Down{At(L::kM)});
      Finish(sum);
      OwnChannels(group == 1 ? L::kU : L::kDz).template StoreSum<__nv_bfloat16>(0, sum);
    }
    WaitForValues();  // until U and dZ are stored
    Accumulator<8> triangle;
    Product<L, false, kTiles>(warp, triangle, AllChannels(group == 1 ? L::kDy : L::kDz),
                              AllChannels(group == 0 ? L::kV : L::kU));
    Finish(triangle);
    if (group == 0)
      WaitForAak();  // until dV needs it no longer
    else
      WaitForWarpgroup();  // as often as the others, for racecheck
    StoreLower<L>(warp,
                  At(group == 0   ? L::kAak
                     : group == 1 ? L::kQrb
                                  : L::kM),
                  group == 1, LoadMarks(), triangle);
  }

  // Z^T, dU^T or what dV^T has without dZ, in warpgroups 1, 2 and 3.
  __device__ __forceinline__ void StartValues(Accumulator<8>& sum) const {
    const ChunkMarks marks = LoadMarks();
    if (group == 1) {
      const Along at = AllChannels(L::kAt);
      ChannelProduct<true>(sum, StartRows(), at, 0, StartRows(), at);
      if (marks.starts != 0) KeepTokens<8>(0, 0, marks.FirstStart(), sum);
      Product<L, true, kChunkTiles>(warp, sum, Down{At(L::kV)}, Along{At(L::kAak)});
    } else {
      const Along writes = AllChannels(group == 2 ? L::kBh : L::kKh);
      ChannelProduct<false>(sum, GradientRows(), writes, kChunkTiles - 1, GradientRows(), writes);
      if (marks.starts != 0) KeepTokens<8>(0, marks.LastStart(), kChunkTokens, sum);
      Product<L, true, kChunkTiles>(warp, sum, Down{At(L::kDy)},
                                    Down{At(group == 2 ? L::kQrb : L::kQrk)});
    }
    Finish(sum);
  }

  // What warpgroup 3 does besides: dQrk, and dV from what it has without dZ.
  __device__ __forceinline__ void FinishValues(Accumulator<8>& dv) const {
    Accumulator<8> dqrk;
    Product<L, false, kTiles>(warp, dqrk, AllChannels(L::kDy), AllChannels(L::kV));
    Finish(dqrk);
    WaitForWarpgroup();  // until Qrk has been read
    StoreLower<L>(warp, At(L::kQrk), true, LoadMarks(), dqrk);
    WaitForValues();
    WaitForValues();  // until dZ is stored
    Product<L, true, kChunkTiles>(warp, dv, Down{At(L::kDz)}, Down{At(L::kAak)});
    Finish(dv);
    WaitForAak();
    ForEachElement<8>([&](int fragment, int e) {
      const int token = 8 * fragment + 2 * (Lane() % 4) + e % 2;
      if (token < tokens)
        static_cast<T*>(call.dv)[ElementOf(token, N) + Channel() + e / 2 * 8] = dv[fragment][e];
    });
  }

  // Of floats: dBh, dKh, dRt or dAt of all tokens, each in one warpgroup, and terms.written. It is staged in the array
  // that no other warpgroup reads.
  __device__ __forceinline__ void OperandGradients(Terms& terms) const {
    Accumulator<8> sum;
    const ChunkMarks marks = LoadMarks();
    const bool first = group % 2 == 0;
    if (group < 2) {
      Product<L, false, kTiles>(warp, sum, Down{At(L::kDs)}, Along{At(StagedBy(group))});
      AddTriangles(sum, kChunkTiles - 1, OneTriangle<Down>{L::kRt, {At(first ? L::kQrb : L::kQrk)}},
                   OneTriangle<Down>{L::kAt, {At(first ? L::kM : L::kAak)}}, [&] {
                     if (marks.starts != 0) KeepTokens<8>(0, marks.LastStart(), kChunkTokens, sum);
                     AddWritten<8>(first ? L::kBh : L::kKh, 0, sum, terms.written);
                   });
    } else {
      Product<L, false, kTiles>(warp, sum, Down{At(L::kSp)}, Along{At(StagedBy(group))});
      if (marks.starts == 0) AddWrittenOfState(group - 2, terms);
      AddTriangles(sum, 0, OneTriangle<Along>{L::kBh, {At(first ? L::kQrb : L::kM)}},
                   OneTriangle<Along>{L::kKh, {At(first ? L::kQrk : L::kAak)}}, [&] {
                     if (marks.starts != 0) KeepTokens<8>(0, 0, marks.FirstStart(), sum);
                   });
    }
    WaitForWarpgroup();
    OwnChannels(StagedBy(group)).template StoreSum<T>(0, sum);
  }

  // dB, dK, dR and dA of this part from what OperandGradients has staged, and their terms of the decays.
  __device__ __forceinline__ void PartGradients(const Decays& decays, Terms& terms) const {
    PartAccumulator sums[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      OwnChannels(StagedBy(i)).LoadFloats(FirstTile(), sums[i / 2][i % 2]);
    FinishKeys(decays, terms, sums[0]);
    FinishQueries(decays, terms, sums[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      OwnChannels(StagedBy(i)).template StoreSum<T>(FirstTile(), sums[i / 2][i % 2]);
    WaitForWarpgroup();
    void* const outs[4] = {call.db, call.dk, call.dr, call.da};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      WriteRows<L::kPartTokens>(OwnPanel(StagedBy(i)), part * L::kPartTokens, outs[i], N);
  }

  // dw of this panel and part.
  __device__ __forceinline__ void DecayGradient(Terms& terms) const {
    PartAccumulator& reads = terms.reads;
    float part_reads[2] = {};
    if (const ChunkMarks marks = LoadMarks(); marks.starts == 0)
      SumLaterReads(reads, part_reads, [](int, int) { return true; });
    else
      SumLaterReads(reads, part_reads,
                    [&](int token, int later) { return marks.SegmentEnd(token) > later; });
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
        terms.written[i] += __shfl_xor_sync(~0u, terms.written[i], step);
    if (Lane() % 4 == 0)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Written(part)[Channel() + 8 * i] = terms.written[i];
        if (part > 0) LaterReads(part)[Channel() + 8 * i] = part_reads[i];
      }
    __syncthreads();
    if constexpr (kDelta) WriteBetaGradients();
    const auto all_written = [&](int channel) {
      float sum = Written(0)[channel] + Written(1)[channel];
#pragma unroll
      for (int i = 2; i < L::kParts; ++i) sum += Written(i)[channel];
      return sum;
    };
    float total[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = Channel() + 8 * i;
      total[i] = all_written(channel);
#pragma unroll
      for (int later = 1; later < L::kParts; ++later)
        total[i] += part < later ? LaterReads(later)[channel] : 0.0f;
    }
    // The own read of a of the delta rule decays too, as a has that factor.
    const auto with_slope = [&](int fragment, int e, float x) {
      return kDelta ? x : terms.slope[fragment][e] * (x - terms.own_reads[fragment][e]);
    };
    if (const ChunkMarks marks = LoadMarks(); (marks.starts | marks.absent) == 0) {
      ForEachElement<L::kPartFragments>([&](int fragment, int e) {
        reads[fragment][e] = with_slope(fragment, e, reads[fragment][e] + total[e / 2]);
      });
    } else {
      ForEachElement<L::kPartFragments>([&](int fragment, int e) {
        const int token = part * L::kPartTokens + 8 * fragment + 2 * (Lane() % 4) + e % 2;
        const int end = marks.SegmentEnd(token);
        const int channel = Channel() + 8 * (e / 2);
        float x = reads[fragment][e];
#pragma unroll
        for (int later = 1; later < L::kParts; ++later)
          if (part < later && end > later * L::kPartTokens) x += LaterReads(later)[channel];
        if (end == kChunkTokens) x += all_written(channel);
        reads[fragment][e] = marks.absent >> token & 1 ? 0.0f : with_slope(fragment, e, x);
      });
    }
    OwnChannels(L::kAt).template StoreSum<T>(FirstTile(), reads);
    __syncthreads();
    WriteRows<L::kPartTokens>(OwnPanel(L::kAt), part * L::kPartTokens, call.dw, KeySize());
#if RWKV_JAX_WARPGROUP_PRODUCTS
    if constexpr (kHasMaps) hopper::AwaitReads<0>();
#endif
  }

  // dbeta, from TokenSums.
  __device__ __forceinline__ void WriteBetaGradients() const {
    const int row = threadIdx.x;
    if (row >= kChunkTokens || row >= tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * L::kPanels; ++i)
      sum += TokenSums(row / kHalfTokens, i)[row % kHalfTokens];
    call.dbeta[TokenOf(row)] = LoadMarks().absent >> row & 1 ? 0.0f : sum;
  }

  // Lets L2 fetch what KeysGradients will read, of which it may still have k and the rate. Without this, nvcc
  // would move work across, for which there are no registers.
  __device__ __forceinline__ void FetchKeys() const {
    static_assert(kHalfTokens == 32, "a lane has a token");
    const int row = half * kHalfTokens + Lane();
    if (warp > 0 || row >= tokens) return;
    const int64_t at = first + static_cast<int64_t>(row) * stride;
    PrefetchBytes(static_cast<const T*>(call.k) + at, N * sizeof(T));
    PrefetchBytes(static_cast<const T*>(call.a) + at, N * sizeof(T));
    Prefetch(call.dbonus + at / N);
  }

  // The gradients of the inputs of wkv7_keys, from those of K, A, B and R as they are staged. A thread has
  // eight channels of a token in each step, as there.
  __device__ __forceinline__ void KeysGradients() const {
    static_assert(N == kPanelCols, "lanes have all channels of a head");
    constexpr int kLanes = N / kHeadVector, kParameters = Wkv7KeysCall::kParameters;
    constexpr int kRowsPerStep = 128 / kLanes, kSteps = kHalfTokens / kRowsPerStep;
    using Vector = Packed<T, kHeadVector>;
    const int piece = threadIdx.x % kLanes, channel = piece * kHeadVector;
    const auto row_of = [&](int step) {
      return half * kHalfTokens + step * kRowsPerStep +
             static_cast<int>(threadIdx.x) % 128 / kLanes;
    };
    const auto at = [&](int row) { return first + static_cast<int64_t>(row) * stride + channel; };
    const auto staged = [&](int offset, int row) {
      return LoadPacked<kHeadVector, T>(memory + PieceAddress(offset, row, piece), 0);
    };

    Vector k[kSteps] = {}, rate[kSteps] = {}, r[kSteps] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      if (const int row = row_of(step); row < tokens) {
        k[step] = LoadPacked<kHeadVector, T>(call.k, at(row));
        rate[step] = LoadPacked<kHeadVector, T>(call.a, at(row));
        r[step] = LoadPacked<kHeadVector, T>(call.r, at(row));
      }

    const auto load_parameter = [&](int i, HeadVector& x) {
      LoadFloats(KeyParameter(i) + channel, x);
    };
    KeyParameters parameters;
    load_parameter(0, parameters.k_k);
    load_parameter(1, parameters.k_a);
    load_parameter(2, parameters.a0);
    KeyParameterGradients sums;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int row = row_of(step);
      const bool present = row < tokens;
      const auto load = [&](int offset) { return present ? staged(offset, row) : Vector{}; };
      const auto store = [&](void* array, const HeadVector& x) {
        if (present) StoreRounded<T>(array, at(row), x);
      };
      const float dbonus = present ? call.dbonus[at(row) / N] : 0.0f;
      const float inverse = present ? call.inverse[at(row) / N] : 0.0f;
      HeadVector alpha, r_k, dkey, dr, dk, drate;
      load_parameter(3, r_k);
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) alpha[c] = Sigmoid(parameters.a0[c] + rate[step][c]);
      AddBonusGradients(k[step], r[step], alpha, parameters.k_a, r_k, load(L::kV), dbonus,
                        load(L::kDy), dkey, dr, sums.r_k);
      store(call.dr, dr);
      AddKeyGradients<kLanes>(k[step], alpha, dkey, load(L::kDz), load(L::kU), parameters, inverse,
                              dk, drate, sums);
      store(call.dk, dk);
      store(call.da, drate);
    }
    StorePartials(sums, call.partials + Chunk() * kParameters * stride + HeadChannel());
  }

  __device__ bool HasValues() const { return half == 0; }

 private:
  // The marks are read again wherever they are needed: there are no registers to keep them.
  __device__ ChunkMarks LoadMarks() const {
    if (!kMarked || (!kKeyed && !call.marks.Given())) return ChunkMarks();
    return ChunkMarks(reinterpret_cast<const uint4*>(call.marks.words)[marks_index]);
  }
  // K and V.
  __device__ int KeySize() const { return kFilled ? N : static_cast<int>(call.dims.head_size); }
  __device__ int ValueSize() const { return kFilled ? N : static_cast<int>(call.dims.value_size); }
  // Whether a head of `size` channels has a piece, and the first element of the head in a token of the chunk.
  static __device__ bool Has(int piece, int size) { return kFilled || 8 * piece < size; }
  __device__ int64_t ElementOf(int row, int size) const {
    return ElementOf(first, stride, row, size);
  }
  static __device__ int64_t ElementOf(int64_t first, int stride, int row, int size) {
    const int64_t at = first + static_cast<int64_t>(row) * stride;
    return kFilled ? at : at * size;
  }
  // The number of a token of this head in [B, T, H].
  __device__ int64_t TokenOf(int row) const {
    const int64_t at = first + static_cast<int64_t>(row) * stride;
    return kFilled ? at / N : at;
  }
  // With kDelta: beta of the tokens that this lane has in fragment `fragment` of a tile of its part; what dk' has by
  // At, in the order in which threads hold it; and what warp number `i` has of the sums over channels for each token of
  // a half, in the place of the rows of that half of -dZ.
  __device__ float2 BetasOf(int tile, int fragment) const {
    const int token = 16 * (FirstTile() + tile) + 8 * fragment + 2 * (Lane() % 4);
    return reinterpret_cast<const float2*>(memory + L::kBeta)[token / 2];
  }
  __device__ float4* KeptKeys(int fragment) const {
    return reinterpret_cast<float4*>(memory + (fragment < 2 ? L::kBh : L::kU)) +
           fragment % 2 * L::kThreads + threadIdx.x;
  }
  __device__ float* TokenSums(int of_half, int i) const {
    return reinterpret_cast<float*>(memory + L::kDz + of_half * kHalfTokens * kRowBytes) +
           i * kHalfTokens;
  }
  static __device__ void Negate(Accumulator<8>& sum) {
    ForEachElement<8>([&](int fragment, int e) { sum[fragment][e] = -sum[fragment][e]; });
  }
  // Where U or W is.
  static constexpr int kSolved = kDelta ? L::kV : L::kU;
  __device__ float* Sums() const { return reinterpret_cast<float*>(memory + L::kSums); }
  // Whether rows are copied as boxes.
  __device__ bool HasBoxes() const {
    if constexpr (kHasMaps)
      return maps.made && tokens == kChunkTokens;
    else
      return false;
  }
  // The barriers of LoadBoxes, where LaterReads will be.
  __device__ uint32_t BoxBarrier(int i) const {
    return At(L::kSums + 3 * N * static_cast<int>(sizeof(float)) + 8 * i);
  }
  // Returns whether copies are boxes, once those have come that have barrier `i`.
  __device__ __forceinline__ bool WaitForBoxes(int i) const {
#if RWKV_JAX_WARPGROUP_PRODUCTS
    if (HasBoxes()) hopper::AwaitPhase(BoxBarrier(i), 0);
#endif
    return HasBoxes();
  }
  // Of floats: the sums of the log decays of each tile, [tiles, N].
  __device__ float* TileSums() const { return reinterpret_cast<float*>(memory + L::kU); }
  // The factor of S0 in a column.
  __device__ float StartFactor(int column) const {
    return kFramed ? Sums()[column] : Exp2(Sums()[column] + Sums()[N + column]);
  }
  // With kFramed: stores the factor of S0 or, in the later half, of dS for a channel, if such are the frames, and
  // returns c of the frame that has it.
  __device__ float StoreStateFactor(Frames of, const float (&sums)[kHalfTiles], int lower) const {
    const float c = Centre(of, sums, half), sum = sums[0] + sums[1];
    if (Lane() % 4 == 0 && (!kFloat || part % kHalfTiles == 0))
      Sums()[half * N + Channel() + 8 * lower] = Exp2(half == 0 ? c + sum : sum - c);
    return c;
  }
  // Whether a channel decays so little in this half, by the sums of its tiles, that its c is 0.
  static __device__ bool IsSlow(const float (&sums)[kHalfTiles]) {
    return fmaxf(fabsf(sums[0] + sums[1]), fmaxf(fabsf(sums[0]), fabsf(sums[1]))) <=
           0.5f * kMaxFrameLog2<kDelta>;
  }
  // c of the frame with the tile `f` of this half. G ends at 0 in half 0, and begins at 0 in half 1.
  __device__ float Centre(Frames of, const float (&sums)[kHalfTiles], int f) const {
    if (IsSlow(sums)) return 0.0f;
    float middle = 0.5f * (sums[0] + sums[1]);
    if (of == Frames::kTiles) {
      middle = f == 0 ? 0.5f * sums[0] : 0.5f * sums[1];
      if (f == half) middle += f == 0 ? sums[1] : sums[0];
    }
    return 2.0f * rintf(half == 0 ? -0.5f * middle : 0.5f * middle);
  }
  // With kFramed: [tiles, N] of c / 2 + kCentre; of halves only the first and the last row.
  __device__ uint16_t* Centres() const { return reinterpret_cast<uint16_t*>(Sums() + 2 * N); }
  __device__ void StoreCentre(int row, int lower, float c) const {
    if (Lane() % 4 == 0)
      Centres()[row * N + Channel() + 8 * lower] =
          static_cast<uint16_t>(static_cast<int>(0.5f * c) + kCentre);
  }
  // Half of how far c falls between two frames, of a channel and of the one after it, which a word has.
  __device__ uint32_t Fall(int frame, int other, int channel) const {
    const auto at = [&](int f) {
      return *reinterpret_cast<const uint32_t*>(Centres() + f * N + channel);
    };
    return frame < other ? at(frame) - at(other) : at(other) - at(frame);
  }
  // The factor, twice in a word, of the channel of elements 0 and 1 of a fragment, or of that of elements 2 and 3 if
  // `lower` is 1.
  __device__ uint32_t OwnFactors(int lower, int frame, int other) const {
    const uint16_t* const centres = Centres() + Channel() + 8 * lower;
    const int fall =
        centres[(frame < other ? frame : other) * N] - centres[(frame < other ? other : frame) * N];
    return (fall < 127 ? 127 - fall : 0) * 0x00800080u;
  }
  // What the warpgroup of a part has of the sums of dS * S_L, and the sums of the reads of a part but the first, for
  // all channels. With kFramed they have the place of some db or, of the delta rule, dq of the half that have been
  // written or, of floats, of dAab.
  __device__ float* Written(int of_part) const {
    if constexpr (kFloat) return reinterpret_cast<float*>(memory + L::kM) + of_part * N;
    return kFramed ? reinterpret_cast<float*>(memory + (kDelta ? L::kDy : L::kU) +
                                              of_part * kHalfTokens * kRowBytes)
                   : Sums() + (1 + of_part) * N;
  }
  __device__ float* LaterReads(int of_part) const { return Written(L::kParts - 1) + of_part * N; }
  // The channel of elements 0 and 1 of a fragment; elements 2 and 3 have the eighth after it.
  __device__ int Channel() const { return kPanelCols * panel + 16 * warp + Lane() / 4; }
  // The first tile of the tokens of this part.
  __device__ int FirstTile() const { return part * L::kPartTiles; }

  // Addresses and operands from offsets in shared memory.
  __device__ uint32_t At(int offset) const { return shared + offset; }
  __device__ uint32_t OwnPanel(int offset) const {
    return shared + offset + panel * L::kPanelBytes;
  }
  __device__ Channels OwnChannels(int offset) const { return {OwnPanel(offset), warp}; }
  // An array [64 tokens, N] or its transpose; k runs over all channels.
  __device__ Along AllChannels(int offset) const { return {At(offset), L::kPanelBytes}; }
  // S0 and dS, whose tiles are those of Sp and dSh.
  __device__ SavedState SavedStart() const {
    const int64_t size = static_cast<int64_t>(ValueSize()) * KeySize();
    return {static_cast<const uint32_t*>(call.states) + blockIdx.x * (size / 2), Sums(),
            ValueSize(), KeySize()};
  }
  __device__ SavedState SavedGradient() const {
    return {reinterpret_cast<const uint32_t*>(state_gradients) +
                blockIdx.x * static_cast<int64_t>(N * N / 2),
            kFramed ? Sums() + N : nullptr, N, N};
  }
  // Their rows that are this panel's channels; k runs over all columns.
  __device__ auto StartRows() const {
    if constexpr (kAmple)
      return StateRows(L::kSp);
    else
      return SavedRows{SavedStart(), panel * kPanelCols};
  }
  __device__ auto GradientRows() const {
    if constexpr (kAmple)
      return StateRows(L::kDs);
    else
      return SavedRows{SavedGradient(), panel * kPanelCols};
  }
  __device__ Along StateRows(int offset) const {
    return {At(offset) + panel * kPanelCols * kRowBytes, L::kStatePanelBytes};
  }
  // The transpose of a tile of their columns that are the channels of this warp.
  __device__ void LoadStart(int tile, Left (&x)[kTerms]) const {
    if constexpr (kAmple)
      LoadColumns(L::kSp, tile, x);
    else
      SavedStart().LoadTransposed(tile, kChunkTiles * panel + warp, x[0]);
  }
  __device__ void LoadGradient(int tile, Left (&x)[kTerms]) const {
    if constexpr (kAmple)
      LoadColumns(L::kDs, tile, x);
    else
      SavedGradient().LoadTransposed(tile, kChunkTiles * panel + warp, x[0]);
  }
  __device__ void LoadColumns(int offset, int tile, Left (&x)[kTerms]) const {
    Channels{At(offset) + panel * L::kStatePanelBytes, warp}.Load(tile, x);
  }
  // The rows of the tokens of a half; k runs along them.
  static __device__ Along RowsOf(int half, const Along& rows) {
    return {rows.panel + half * kHalfTokens * kRowBytes, rows.panel_bytes};
  }
  __device__ Along HalfRows(int offset) const { return RowsOf(half, AllChannels(offset)); }
  // Of halves, or of tiles and the delta rule: where At or Rt of all tokens lies in the first frame.
  static __device__ int FirstFrame(int offset) { return offset == L::kAt ? L::kU : L::kFirstRt; }
  // Of halves: the rows of Bh or Kh of the first half of the tokens, in the last frame, from a panel on.
  __device__ Along LastFrameRows(int offset, int from_panel) const {
    return RowsOf(offset == L::kKh, {At(L::kDz) + from_panel * L::kPanelBytes, L::kPanelBytes});
  }
  // The array that only the warpgroup of a gradient reads in OperandGradients, which stages it there.
  static __device__ int StagedBy(int of_group) {
    return of_group == 0 ? L::kU : of_group == 1 ? L::kV : of_group == 2 ? L::kDy : L::kDz;
  }
  // The columns of the tokens of this half; k runs down them.
  __device__ Down HalfColumns(int offset) const { return {At(offset), FirstTile()}; }
  // The first column of a piece of a row or, of floats, of the part of it that lies where its term number
  // `term` does, as FloatAddress says.
  static __device__ int ColumnOf(int piece, int term) {
    return kFloat ? piece / 2 * 16 + term * 8 + piece % 2 * 4 : piece * 8;
  }
  // Where piece `step` of this thread lies in a state.
  __device__ uint32_t StatePiece(uint32_t state, int step) const {
    const int index = threadIdx.x + step * L::kThreads;
    const int row = index / kRowPieces, piece = index % kRowPieces;
    return PieceAddress(state + piece / 8 * L::kStatePanelBytes, row, piece % 8);
  }

  __device__ void WaitForWarpgroup() const { Synchronize(B::kWarpgroup + group, 128); }
  __device__ void WaitForHalf() const { Synchronize(B::kHalf + half, 128 * L::kPanels); }
  __device__ void WaitForAak() const { Synchronize(B::kAak, 256); }
  __device__ void WaitForValues() const {
    PublishOperands();
    Synchronize(B::kValues, L::kThreads);
  }

  // Of a keyed call: the chunk of this block among those of all rows, the first channel of its head, and
  // where the parameter number i of wkv7_keys begins.
  __device__ int64_t Chunk() const { return blockIdx.x / static_cast<unsigned>(call.dims.heads); }
  __device__ int64_t HeadChannel() const {
    return blockIdx.x % static_cast<unsigned>(call.dims.heads) * N;
  }
  __device__ const float* KeyParameter(int i) const {
    const int64_t row = static_cast<unsigned>(Chunk()) / static_cast<unsigned>(call.dims.saved);
    return call.parameters + (row * Wkv7KeysCall::kParameters + i) * stride + HeadChannel();
  }

  // What a keyed call makes operands of besides k and the rate, in shared memory: `inverse` of each token,
  // and then the parameters k_k, k_a and a0.
  __device__ __forceinline__ void CopyKeyFactors(uint64_t absent) const {
    constexpr int kPieces = N * sizeof(float) / 16;
    const int i = threadIdx.x;
    if (i < kChunkTokens)
      CopyWordAsync(At(L::kM) + 4 * i,
                    call.inverse + (first + static_cast<int64_t>(i) * stride) / N,
                    i < tokens && (absent >> i & 1) == 0);
    if (i < 3 * kPieces)
      CopyAsync(At(L::kM) + 4 * kChunkTokens + 16 * i, KeyParameter(i / kPieces) + i % kPieces * 4,
                true);
  }
  // k, a and b of the channels of this warp and a tile of the tokens of this half.
  __device__ __forceinline__ void MakeTileKeys(int tile, uint32_t (&key)[4], uint32_t (&a)[4],
                                               uint32_t (&b)[4]) const {
    const float* const inverses = reinterpret_cast<const float*>(memory + L::kM);
    const float* const parameters = inverses + kChunkTokens;
    uint32_t k[4], rate[4];
    LoadTransposed(OwnChannels(L::kKh).Address(FirstTile() + tile), k);
    LoadTransposed(OwnChannels(L::kBh).Address(FirstTile() + tile), rate);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * (FirstTile() + tile) + i / 2 * 8 + 2 * (Lane() % 4);
      const float2 inverse = *reinterpret_cast<const float2*>(inverses + token);
      const auto parameter = [&](int number) {
        const float x = parameters[number * N + Channel() + i % 2 * 8];
        return float2{x, x};
      };
      MakeKeys<T>(k[i], rate[i], parameter(0), parameter(1), parameter(2), inverse, key[i], a[i],
                  b[i]);
    }
  }

  // sum += the log decays of a tile of tokens, summed as `ones` says, for fragment `fragment` of
  // the tile. Ones are the right operand here, so its second fragment has the lower rows of the
  // transpose.
  static __device__ void AddLogDecays(float (&sum)[4], const Left (&log_decays)[kTerms],
                                      const Ones& ones, int fragment) {
    const uint32_t upper = ones.a[fragment], lower = ones.a[fragment + 2];
    AddTerms<kTerms>(sum, [&](int term, float (&to)[4]) {
      WarpMultiplyHalf(to, log_decays[term], upper, lower);
    });
  }

  // Writes kRows rows of a panel to global memory, to an array with heads of `size` channels, after all warps of
  // this warpgroup have stored their channels there. Unless kWhole, the chunk is expected to have fewer. If
  // kNegated, the panel has the negated numbers as bfloat16.
  template <int kRows, bool kWhole = true, bool kNegated = false>
  __device__ __forceinline__ void WriteRows(uint32_t staged, int first_row, void* out,
                                            int size) const {
    const int begin = first_row + threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
    const auto write = [&](int row, T* to) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        uint4 x = *reinterpret_cast<const uint4*>(
            memory + PieceAddress(staged - shared + term * L::kTermBytes, row, piece));
        if constexpr (kNegated)
          for (uint32_t* word : {&x.x, &x.y, &x.z, &x.w}) *word = FromBf16<T>(*word ^ 0x80008000u);
        *reinterpret_cast<uint4*>(to + ColumnOf(piece, term)) = x;
      }
    };
    const auto at = [&](int row) {
      return static_cast<T*>(out) + ElementOf(row, size) + kPanelCols * panel;
    };
    if (kFilled && kWhole && tokens == kChunkTokens) {
      T* const to = at(begin);
#pragma unroll
      for (int i = 0; i < kRows; i += 16) write(begin + i, to + static_cast<int64_t>(i) * stride);
    } else {
#pragma unroll 1
      for (int row = begin; row < first_row + kRows && row < tokens; row += 16)
        if (Has(8 * panel + piece, size)) write(row, at(row));
    }
  }

  // Stages two results of this panel and half where operands of no other half were, and writes them unless
  // the call is keyed.
  template <int kPair>
  __device__ __forceinline__ void WritePair(const HalfAccumulator (&pair)[2], int first_staged,
                                            void* first_out, int second_staged,
                                            void* second_out) const {
    WaitForHalf();
    OwnChannels(first_staged).template StoreSum<T>(FirstTile(), pair[0]);
    OwnChannels(second_staged).template StoreSum<T>(FirstTile(), pair[1]);
    if constexpr (kKeyed) return;
#if RWKV_JAX_WARPGROUP_PRODUCTS
    if constexpr (kHasMaps)
      if (HasBoxes()) {
        hopper::PublishToCopies();
        WaitForWarpgroup();
        if (threadIdx.x % 128 == 0)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            hopper::StoreBox(
                &maps.pairs[kPair][i],
                OwnPanel(i == 0 ? first_staged : second_staged) + half * kHalfTokens * kRowBytes,
                map_column + panel * kPanelCols, map_row + half * kHalfTokens);
        return;
      }
#endif
    WaitForWarpgroup();
    // With maps a whole chunk has been written as boxes, unless none could be made.
    const auto write = [&](int at_panel, void* out) {
      WriteRows<kHalfTokens, !kHasMaps>(OwnPanel(at_panel), half * kHalfTokens, out, KeySize());
    };
    write(first_staged, first_out);
    write(second_staged, second_out);
  }

  // The left operand of one or two products, by its offset, and their right operands.
  template <typename Right, int kSums>
  struct Triangles {
    int left;
    Right of[kSums];
  };

  // sums += the products with triangles, over the kTiles tiles of tokens that this half has terms of; the other tiles of
  // a triangle are zero for it. Frames of tiles are met one after another, from that of the state on: sums are in that
  // of the nearer tile of this half while they get terms of all tiles but the further one of this half, and so
  // `meanwhile` sees them. Then what they have of the latter is brought there.
  template <typename Right, int kTiles, int kLefts, int kSums, typename Fn>
  __device__ __forceinline__ void AddTriangles(HalfAccumulator (&sums)[kSums],
                                               const Triangles<Right, kSums> (&triangles)[kLefts],
                                               Fn&& meanwhile) const {
    constexpr bool kDown = std::is_same_v<Right, Down>, kHasFar = kTiles == kChunkTiles;
    constexpr int kFirst = kDown ? kChunkTiles - kTiles : 0, kFrame = kDown ? kChunkTiles - 1 : 0;
    constexpr int kNear = kDown ? kFirst + 1 : kTiles - 2, kLast = kDown ? kFirst : kTiles - 1;
    constexpr int kFar = kDown ? kHalfTiles : 0;  // the first tile of the other half
    const bool scales = kHasFar && kFramed && frames != Frames::kChunk;
    uint32_t factors[kHalfTiles][2];
    if (scales)
#pragma unroll
      for (int i = 0; i < kHalfTiles * 2; ++i)
        factors[i / 2][i % 2] = OwnFactors(i % 2, kFar + i / 2, kNear);
    Left left[kLefts][kTiles][kTerms];
    const auto load = [&](int i) {
      LoadTransposedPanel<L>(OwnPanel(triangles[i].left), warp, kFirst, left[i]);
      if (scales)
#pragma unroll
        for (int j = 0; j < kHalfTiles * 4; ++j) {
          uint32_t& x = left[i][kFar - kFirst + j / 4][0][j % 4];
          x = MultiplyTwice(x, factors[j / 4][j % 2]);
        }
    };
    const auto multiply = [&](int i, auto first, auto count) {
      constexpr int kTile = decltype(first)::value, kCount = decltype(count)::value;
      Products<L, true>(sums,
                        reinterpret_cast<const Left(&)[kCount][kTerms]>(left[i][kTile - kFirst]),
                        kTile, triangles[i].of);
    };
    const auto scale = [&](int first, int fragments, int from, int to) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor = Bf16::Low(OwnFactors(i, from, to));
        for (HalfAccumulator& sum : sums)
#pragma unroll
          for (int j = 0; j < 2 * fragments; ++j) {
            float& x = sum[first + j / 2][2 * i + j % 2];
            x = x * factor * factor;
          }
      }
    };
    load(0);
    FinishAll(sums);
    if (scales) scale(0, kHalfFragments, kFrame, kNear);
    meanwhile();
    const bool tiles = kFramed && frames == Frames::kTiles;
    if (tiles) {
#pragma unroll
      for (int i = 0; i < kLefts; ++i) {
        if (i > 0) load(i);
        multiply(i, std::integral_constant<int, kFirst + kDown>(),
                 std::integral_constant<int, kTiles - 1>());
        FinishAll(sums);
      }
      scale(kDown ? 0 : 2, 2, kNear, kLast);
#pragma unroll
      for (int i = 0; i < kLefts; ++i)
        multiply(i, std::integral_constant<int, kLast>(), std::integral_constant<int, 1>());
      FinishAll(sums);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLefts; ++i) {
      if (i > 0) load(i);
      multiply(i, std::integral_constant<int, kFirst>(), std::integral_constant<int, kTiles>());
    }
    FinishAll(sums);
  }
  template <int kSums>
  static __device__ void FinishAll(HalfAccumulator (&sums)[kSums]) {
    WaitForProducts<0>();
#pragma unroll
    for (HalfAccumulator& sum : sums) Settle(sum);
  }

  // Starts sum = left right over all channels, whose columns are the tokens of the chunk. Of tiles it brings them
  // from their own frames to `frame`: those of that frame, and those behind it if kLater, or else those before it. Of
  // the delta rule both operands are in the same frame.
  // Of halves `right` is in the first frame if kLater; if not, the sums for the first half are those of
  // first_left and first_right.
  template <bool kLater, typename LeftOperand>
  __device__ __forceinline__ void ChannelProduct(Accumulator<8>& sum, const LeftOperand& left,
                                                 const Along& right, int frame,
                                                 const LeftOperand& first_left,
                                                 const Along& first_right) const {
    constexpr bool kSaved = std::is_same_v<LeftOperand, SavedRows>;
    Left saved[kTiles][kTerms];
    if constexpr (kSaved)
      if (kDelta || !kFramed || frames != Frames::kTiles)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) left.Tile(tile).LoadLeft(warp, saved[tile][0]);
    if (kDelta || !kFramed || frames == Frames::kChunk ||
        (kHasHalves && kLater && frames == Frames::kHalves)) {
      if constexpr (kSaved)
        Product<L, false>(sum, saved, right);
      else
        Product<L, false, kTiles>(warp, sum, left, right);
      if constexpr (kFramed)
        Finish(sum);  // else ptxas serialises products, for the other way is none
      return;
    }
    if (kHasHalves && !kLater && frames == Frames::kHalves) {
      HalfAccumulator sums[2];
      BeginProducts();
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto multiply = [&](HalfAccumulator& to, const LeftOperand& a, const Along& b) {
          if constexpr (kSaved)
            MultiplyOrAdd(tile > 0, to, saved[tile][0], b.Tile(tile));
          else
            MultiplyOrAdd(tile > 0, to, warp, a.Tile(tile), b.Tile(tile));
        };
        multiply(sums[0], first_left, first_right);
        multiply(sums[1], left, RowsOf(1, right));
      }
      CommitProducts();
      Finish(sums[0], sums[1]);
      ForEachElement<8>([&](int fragment, int e) {
        sum[fragment][e] = sums[fragment / kHalfFragments][fragment % kHalfFragments][e];
      });
      return;
    }
    const auto load = [&](int tile, Left(&plain)[kTerms]) {
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
        left.Tile(tile).Behind(term * L::kTermBytes).LoadLeft(warp, plain[term]);
    };
    const auto scale = [&](int tile, int column, const Left(&plain)[kTerms],
                           Left(&scaled)[kTerms]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t factors =
            PowersOfTwo(Fall(column, frame, 16 * tile + 8 * i + 2 * (Lane() % 4)));
#pragma unroll
        for (int term = 0; term < kTerms; ++term)
#pragma unroll
          for (int j = 2 * i; j < 2 * i + 2; ++j)
            scaled[term][j] = MultiplyTwice(plain[term][j], factors);
      }
    };
    ForEachElement<8>([&](int fragment, int e) { sum[fragment][e] = 0.0f; });
#pragma unroll(kPanelTiles)
    for (int tile = 0; tile < kTiles; ++tile) {
      Left plain[kTerms];
      load(tile, plain);
#pragma unroll
      for (int column = 0; column < kChunkTiles; ++column) {
        if (!kLater && column > frame) continue;
        Left scaled[kTerms];
        scale(tile, column, plain, scaled);
        AddFrameProduct<L>(sum, column, scaled, right.Tile(tile));
      }
    }
  }

  // Adds up the gradients of the parameters over the threads that have the same channels, and writes them to
  // rows of `partials`.
  __device__ __forceinline__ void StorePartials(const KeyParameterGradients& sums,
                                                float* partials) const {
    constexpr int kParameters = Wkv7KeysCall::kParameters;
    static_assert(L::kThreads == kParameters * N && 32 / (N / kHeadVector) == kParameters,
                  "a thread has one sum, and a lane those of one parameter");
    // Of the four lanes with the same channels each gets the sums of one parameter, those of its number.
    float two[2][kHeadVector], one[kHeadVector];
    const bool upper = Lane() & 16, odd = Lane() & 8;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const auto add = [](bool second, int mask, float x, float y) {
        return (second ? y : x) + __shfl_xor_sync(~0u, second ? x : y, mask);
      };
      two[0][c] = add(upper, 16, sums.k_k[c], sums.a0[c]);
      two[1][c] = add(upper, 16, sums.k_a[c], sums.r_k[c]);
      one[c] = add(odd, 8, two[0][c], two[1][c]);
    }
    // [warps, parameters, N], where the products of tokens by tokens were.
    float* const of_warps = reinterpret_cast<float*>(memory + L::kM);
    StoreFloats(of_warps + Warp() * kParameters * N + Lane() * kHeadVector, one);
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < L::kThreads / 32; ++i) sum += of_warps[i * kParameters * N + threadIdx.x];
    partials[threadIdx.x / N * static_cast<int64_t>(stride) + threadIdx.x % N] = sum;
  }

  // Adds dS * S_L for what of S_L was in S0, over a half of the rows of the state.
  __device__ __forceinline__ void AddWrittenOfState(int of_half, Terms& terms) const {
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      const int tile = of_half * (kTiles / 2) + i;
      Left s[kTerms], ds[kTerms];
      LoadStart(tile, s);
      LoadGradient(tile, ds);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 of_s = ValuesOf(s, j), of_ds = ValuesOf(ds, j);
        terms.written[j % 2] += of_s.x * of_ds.x + of_s.y * of_ds.y;
      }
    }
    if (kFramed && frames != Frames::kChunk)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        terms.written[i] = InFrame(terms.written[i], i, 0, kChunkTiles - 1);
  }

  // Brings an element for channel `lower` of this lane from one frame to another.
  __device__ __forceinline__ float InFrame(float x, int lower, int from, int to) const {
    const float factor = Bf16::Low(OwnFactors(lower, from, to));
    return x * factor * factor;
  }

  // Adds dS * S_L for what the tokens from a tile on have written to S_L: an operand times its
  // gradient by dS alone.
  template <int kFragments>
  __device__ __forceinline__ void AddWritten(int scaled, int first_tile, const float (*sum)[4],
                                             float (&written)[2]) const {
    OwnChannels(scaled).template ForEachPair<kFragments / 2>(
        first_tile, [&](int fragment, int e, float low, float high) {
          written[e / 2] += low * sum[fragment][e] + high * sum[fragment][e + 1];
        });
  }

  // The same for the tokens of this half, of operands whose sums AddTriangles shows.
  template <int kSums>
  __device__ __forceinline__ void AddWrittenOfHalf(const int (&scaled)[kSums],
                                                   const HalfAccumulator (&sums)[kSums],
                                                   Terms& terms) const {
    float of_first[2] = {};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      AddWritten<2>(scaled[i], FirstTile(), &sums[i][0], of_first);
      AddWritten<2>(scaled[i], FirstTile() + 1, &sums[i][2], terms.written);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      terms.written[i] += kFramed && frames == Frames::kTiles
                              ? InFrame(of_first[i], i, FirstTile() + 1, FirstTile())
                              : of_first[i];
  }

  // Adds a scaled operand times its gradient, times `sign`.
  __device__ __forceinline__ void AddReads(int scaled, float sign, const PartAccumulator& sum,
                                           Terms& terms) const {
    OwnChannels(scaled).template ForEachPair<L::kPartTiles>(
        FirstTile(), [&](int fragment, int e, float low, float high) {
          terms.reads[fragment][e] += sign * low * sum[fragment][e];
          terms.reads[fragment][e + 1] += sign * high * sum[fragment][e + 1];
        });
  }

  // Replaces each element by the sum over the tokens of this part from its own to the last of the
  // same segment; `total` gets the sum from the first token on. Four lanes have a row of an
  // accumulator.
  template <typename SameSegment>
  __device__ __forceinline__ void SumLaterReads(PartAccumulator& reads, float (&total)[2],
                                                SameSegment&& same_segment) const {
#pragma unroll
    for (int fragment = L::kPartFragments - 1; fragment >= 0; --fragment) {
      const int token = part * L::kPartTokens + 8 * fragment + 2 * (Lane() % 4);
      const int behind = token - 2 * (Lane() % 4) + 8;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&x)[4] = reads[fragment];
        float from_here = x[2 * i];
        if (same_segment(token, token + 1)) from_here += x[2 * i + 1];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const float next = __shfl_down_sync(~0u, from_here, step, 4);
          if (Lane() % 4 + step < 4 && same_segment(token, token + 2 * step)) from_here += next;
        }
        const float next = __shfl_down_sync(~0u, from_here, 1, 4);
        if (same_segment(token + 1, behind)) x[2 * i + 1] += total[i];
        if (Lane() % 4 < 3 && same_segment(token + 1, token + 2)) x[2 * i + 1] += next;
        if (same_segment(token, token + 1)) x[2 * i] += x[2 * i + 1];
        total[i] = __shfl_sync(~0u, x[2 * i], 0, 4);
      }
    }
  }

  // The left operand of a product, by its offset, and a triangle.
  template <typename Right>
  struct OneTriangle {
    int left;
    Right right;
  };

  // The same for one sum over all tokens. Right is Down if tokens have terms of later ones, and Along if of earlier
  // ones. The smallest products of terms come first.
  template <typename Right, typename Fn>
  __device__ __forceinline__ void AddTriangles(Accumulator<8>& sum, int frame,
                                               const OneTriangle<Right>& triangle,
                                               const OneTriangle<Right>& next,
                                               Fn&& meanwhile) const {
    Finish(sum);
    if (frames == Frames::kTiles) {
#pragma unroll
      for (int column = 0; column < kChunkTiles; ++column)
        ForEachElement<2>([&](int i, int e) {
          const float factor = Bf16::Low(OwnFactors(e / 2, column, frame));
          float& x = sum[2 * column + i][e];
          x = x * factor * factor;
        });
      meanwhile();
      const auto add = [&](const OneTriangle<Right>& of, int tile) {
        Left plain[1][kTerms], scaled[kTerms];
        LoadTransposedPanel<L>(OwnPanel(of.left), warp, tile, plain);
#pragma unroll
        for (int column = 0; column < kChunkTiles; ++column) {
          if (std::is_same_v<Right, Down> ? column > tile : column < tile) continue;
          uint32_t factors[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) factors[i] = OwnFactors(i, tile, column);
#pragma unroll
          for (int i = 0; i < 4 * kTerms; ++i)
            scaled[i / 4][i % 4] = MultiplyTwice(plain[0][i / 4][i % 4], factors[i % 2]);
          AddFrameProduct<L>(sum, column, scaled, of.right.Tile(tile));
        }
      };
#pragma unroll 1
      for (int tile = 0; tile < kChunkTiles; ++tile) add(triangle, tile), add(next, tile);
      return;
    }
    meanwhile();
    BeginProducts();
    ForProducts<kTerms, true>([&](int i, int j) {
#pragma unroll
      for (int tile = 0; tile < 2 * kChunkTiles; ++tile) {
        const OneTriangle<Right>& of = tile < kChunkTiles ? triangle : next;
        const int row = tile % kChunkTiles;
        Multiply<true>(sum, warp,
                       Down{OwnPanel(of.left)}.Tile(row).Behind((kTerms - 1 - i) * L::kTermBytes),
                       of.right.Tile(row).Behind((kTerms - 1 - j) * L::kTermBytes));
      }
    });
    CommitProducts();
    Finish(sum);
  }

  const Call& call;
  const Maps& maps;
  const uint4* const state_gradients;
  unsigned char* const memory;
  const uint32_t shared;
  const int warp, group;        // the warp in its warpgroup, and the warpgroup
  const int panel, part, half;  // the half has the part
  int marks_index;              // of this chunk among the chunks of all rows
  int64_t first;                // the element of the first token of the chunk
  int stride, tokens;           // elements from token to token; tokens of the chunk
  int64_t first_key;            // the same in an array of keys
  int key_stride;
  // Unless kFilled, all of these count heads.
  Frames frames = Frames::kChunk;
  // With kHasMaps: where the chunk begins in an array, and its column in an array of keys.
  int map_row, map_column, key_column;
};

template <typename Gradients, typename Call>
__device__ __forceinline__ void RunPhases(const Call& call, const typename Gradients::Maps& maps,
                                          const uint4* state_gradients, uint32_t* steep) {
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  Gradients gradients(call, maps, state_gradients, memory);
  if (!gradients.Find()) return;

  typename Gradients::StatePieces state;
  gradients.LoadChunk(state);
  gradients.WaitForDecays();
  typename Gradients::Decays decays;
  gradients.SumLogDecays(decays);
  gradients.WaitForScaledOperands();
  if (gradients.IsSteep(decays, steep)) return;
  gradients.ScaleOperands(decays);
  gradients.ScaleState(state);
  gradients.WaitForChunk();
  gradients.RoundValues();
  PublishOperands();
  __syncthreads();
  gradients.ForgetBoxBarriers();

  typename Gradients::Terms terms;
  if constexpr (Gradients::kFloat) {
    gradients.ValuesByRoles();
    PublishOperands();
    __syncthreads();
    gradients.OperandGradients(terms);
    __syncthreads();
    gradients.PartGradients(decays, terms);
  } else {
    gradients.TokenProducts();
    Left du[kChunkTiles][Gradients::kTerms];
    if (gradients.HasValues())
      PublishOperands();
    else
      gradients.UGradients(du);
    __syncthreads();
    constexpr bool kDelta = Gradients::kDelta;
    if (gradients.HasValues()) {
      gradients.Values();
      if constexpr (kDelta)
        gradients.DeltaTriangleGradients();
      else
        gradients.TriangleGradients();
      PublishOperands();
    } else if constexpr (kDelta) {
      gradients.DeltaValueGradients(du);
    } else {
      gradients.ValueGradients(du);
    }
    __syncthreads();
    if constexpr (kDelta) {
      gradients.DeltaQueryGradients(decays, terms);
      gradients.DeltaKeyGradients(decays, terms);
    } else {
      gradients.KeyGradients(decays, terms);
      if constexpr (Gradients::kKeyed) gradients.FetchKeys();
      gradients.QueryGradients(decays, terms);
    }
  }
  gradients.DecayGradient(terms);
  if constexpr (Gradients::kKeyed) gradients.KeysGradients();
}

// The blocks for which a multiprocessor has shared memory. A single one may have more registers.
template <typename T, int N>
constexpr int kBlocksPerMultiprocessor = kAmpleSharedMemory && N == 64 && kTermsOf<T> == 1 ? 2 : 1;

template <typename T, int N, bool kAmple, typename Call>
using LayoutOf = GradientLayout<T, N, kAmple, std::is_same_v<Call, Wkv7DeltaBackwardCall>>;

template <typename T, int N, bool kMarked, bool kFramed, bool kAmple, typename Call,
          typename Maps = RowMapsOf<T, kMarked, kFramed, kAmple, Call>>
__global__ __launch_bounds__(
    (LayoutOf<T, N, kAmple, Call>::kThreads),
    (kBlocksPerMultiprocessor<T, N>)) void GradientKernel(const __grid_constant__ Call call,
                                                          const __grid_constant__ Maps maps,
                                                          const uint4* state_gradients,
                                                          uint32_t* steep) {
  if constexpr (kAmple || !kNeverLessMemory)
    RunPhases<ChunkGradients<T, N, kMarked, kFramed, kAmple, Call>>(call, maps, state_gradients,
                                                                    steep);
  else
    __trap();
}

template <typename Call>
void MakeRowMaps(NoRowMaps&, const Call&, const uint4*, int64_t) {}

#ifndef RWKV_JAX_EMULATION
void MakeRowMaps(RowMaps& maps, const Wkv7BackwardCall& call, const uint4* gradients,
                 int64_t blocks) {
  const cuuint64_t size = call.dims.head_size;
  const cuuint64_t rows =
      call.sequences.Given() ? call.sequences.tokens : call.dims.batch * call.dims.tokens;
  const cuuint64_t width = call.dims.heads * size, state_rows = blocks * size;
  const cuuint64_t key_width = call.dims.key_heads * size;
  const auto make = [](CUtensorMap& map, const void* x, cuuint64_t rows, cuuint64_t width,
                       cuuint32_t box_rows) {
    return MakeMap<2>(map, x, {width, rows}, {2 * width}, {kPanelCols, box_rows});
  };
  const auto in = [&](CUtensorMap& map, const void* x) {
    return make(map, x, rows, width, kChunkTokens);
  };
  const auto keys = [&](CUtensorMap& map, const void* x) {
    return make(map, x, rows, key_width, kChunkTokens);
  };
  const auto out = [&](CUtensorMap& map, void* x) {
    return make(map, x, rows, width, kHalfTokens);
  };
  constexpr cuuint64_t kMostRows = std::numeric_limits<int>::max();
  maps.made = HasHopperCode() && std::max(rows, state_rows) <= kMostRows && keys(maps.w, call.w) &&
              keys(maps.r, call.r) && keys(maps.k, call.k) && in(maps.v, call.v) &&
              keys(maps.a, call.a) && keys(maps.b, call.b) && in(maps.dy, call.dy) &&
              make(maps.ds, gradients, state_rows, size, size) && out(maps.pairs[0][0], call.db) &&
              out(maps.pairs[0][1], call.dk) && out(maps.pairs[1][0], call.dr) &&
              out(maps.pairs[1][1], call.da);
}
#endif

template <int... kHeadSizes, typename Call>
cudaError_t LaunchGradients(cudaStream_t stream, const Call& call, const Device& device,
                            const uint4* gradients, uint32_t* steep) {
  if (call.dims.tokens == 0) return cudaSuccess;
  const int64_t rows = call.sequences.Given() ? 1 : call.dims.batch;
  const int64_t blocks = rows * call.dims.saved * call.dims.heads;
  constexpr bool kKeyed = std::is_same_v<Call, Wkv7KeyedBackwardCall>;
  constexpr bool kDelta = std::is_same_v<Call, Wkv7DeltaBackwardCall>;
  const auto launch_of = [&](auto zero, auto size, auto marked, auto framed) {
    using T = decltype(zero);
    const auto launch = [&](auto ample) {
      using L = LayoutOf<T, size(), ample(), Call>;
      RowMapsOf<T, marked(), framed(), ample(), Call> maps;
      MakeRowMaps(maps, call, gradients, blocks);
      return Launch(GradientKernel<T, size(), marked(), framed(), ample(), Call>, blocks,
                    L::kThreads, L::kBytes, stream, call, maps, gradients, steep);
    };
    if constexpr (kTermsOf<T> > 1)
      return launch(std::true_type());
    else
      return ForSharedMemory<LayoutOf<T, size(), true, Call>::kBytes>(device, launch);
  };
  if constexpr (!kKeyed && !kDelta)
    if (call.dtype == Dtype::kF32)
      return ForHeadSize<64>(call.dims.head_size, 0.0f, [&](auto zero, auto size) {
        return launch_of(zero, size, std::true_type(), std::true_type());
      });
  const int64_t head_size = MatrixHeadSize(call.dims);
  return ForHalfTypes<kHeadSizes...>(call.dtype, head_size, [&](auto zero, auto size) {
    const auto launch = [&](auto marked, auto framed) {
      return launch_of(zero, size, marked, framed);
    };
    const auto for_marks = [&](auto framed) {
      const auto of_marks = [&](auto marked) { return launch(marked, framed); };
      return FillsMatrixHead(call.dims) ? ForMarks(call.marks, of_marks)
                                        : of_marks(std::true_type());
    };
    if constexpr (kDelta) {
      return for_marks(std::true_type());
    } else {
      if constexpr (!kKeyed)
        if (steep != nullptr) return for_marks(std::true_type());
      return for_marks(std::false_type());
    }
  });
}

}  // namespace

int64_t Wkv7GradientSharedMemory(Dtype dtype, int64_t head_size) {
  using Half = __nv_bfloat16;  // float16 takes as much
  if (dtype == Dtype::kF32) return GradientLayout<float, 64, true, false>::kBytes;
  return head_size == 64 ? GradientLayout<Half, 64, false, false>::kBytes
                         : GradientLayout<Half, 128, false, false>::kBytes;
}

cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                          const uint4* gradients, uint32_t* steep) {
  return LaunchGradients<64, 128>(stream, call, device, gradients, steep);
}

cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7KeyedBackwardCall& call,
                          const Device& device, const uint4* gradients) {
  return LaunchGradients<64>(stream, call, device, gradients, nullptr);
}

cudaError_t Wkv7Gradients(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                          const Device& device, const uint4* gradients, uint32_t* steep) {
  if (call.head_decay) return Wkv7HeadDecayGradients(stream, call, gradients);
  return LaunchGradients<64, 128>(stream, call, device, gradients, steep);
}

}  // namespace rwkv_jax::cuda
