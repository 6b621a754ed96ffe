// WKV7 on matrix units, the state from token to token: the forward pass, and the gradient of the state
// in the backward pass. One block of threads per head, or per head and split of its tokens.
//
// Tokens are taken in chunks of L = 16 (rows of the matrices below are tokens), in the form
//
//   At = A exp(G')   Rt = R exp(G)   Bh = B exp(-G)   Kh = K exp(-G)
//   M  = (I - tril_strict(At Bh^T))^-1
//   U  = M (At S^T + tril_strict(At Kh^T) V)
//   Y  = Rt S^T + tril(Rt Bh^T) U + tril(Rt Kh^T) V
//   S  = S + U^T Bh + V^T Kh
//
// where G is the sum of the log decays of the frame up to a token and G' that before it, and S is the
// state times exp(-G) of the last token; at the end of a frame it becomes the state itself again.
//
// The gradient of the state follows the same recurrence from the last token to the first: its rows
// read b and write a, and y and its cotangent take the place of v and r that of k,
//
//   dS <- (dS + dy r^T) diag(d) + ((dS + dy r^T) b) a^T,
//
// but a token adds dy r^T before it reads and decays, where the forward pass adds v k^T after it. So r
// is scaled by exp(-G'), and the triangle of products with it keeps its diagonal.
#include <algorithm>
#include <utility>

#include "launch.cuh"
#include "wkv7/kernels.h"
#include "wkv7/inverse.cuh"

namespace rwkv_jax::cuda {
namespace {

// The operands by their role in the recurrence: rows of the state are read by a and r, and written
// with b and k.
template <typename T>
struct Scan {
  const T *a, *r, *b, *k, *v, *w;
  int64_t tokens, heads;
  Decay decay;
  Marks marks;
  Sequences sequences;
  const float* start;
  float* end;
  T* y;
  uint4* states;             // forward: [B, frames, H, V, K] of bfloat16, or null
  uint4* gradients;          // backward: the same
  // If it has no memory, a summary is that of all tokens: D of them goes to `end`, from `start` if that
  // is not null, and M to `factor`, unless that is null.
  Splits splits;
  float* factor;
  float* inexact;
};

// How warpgroups share the work on a chunk: one does it all, so that more blocks fit a multiprocessor
// and hide each other's latency; or each step of it has warpgroups of its own, so that a chunk takes
// less time; or, for the summary of a split, two states advance that start as zero and as the
// identity, and their warpgroups share the rest.
enum class Work { kTogether, kSplit, kSummary };

template <int N, bool kOutput, Work kWork>
struct Layout {
  static constexpr int kPanels = N / kPanelCols;
  static constexpr bool kSplit = kWork == Work::kSplit, kSummary = kWork == Work::kSummary;
  static constexpr int kStateThreads = 2 * N;
  static constexpr int kThreads = kStateThreads * (kSummary ? 2 : 1) + (kSplit ? 256 : 0);
  static constexpr int kBlocks = kThreads > 256 ? 1 : 512 / kThreads;  // on a multiprocessor
  static constexpr int kTile = kTileTokens * kRowBytes;
  static constexpr int kMatrices = 4 * kTileBytes;
  static constexpr int kDecayStride = N / 4 + 4;  // so that four lanes read different banks

  // In a slot. Rt follows At in each panel of 64 columns, so that the two are one operand.
  static constexpr int kA = 0;
  static constexpr int kR = kTile;
  static constexpr int kReadStride = (kOutput ? 2 : 1) * kTile;
  static constexpr int kB = kPanels * kReadStride;
  static constexpr int kK = kB + kPanels * kTile;
  static constexpr int kV = kK + kPanels * kTile;
  static constexpr int kSlot = kV + kPanels * kTile;

  static constexpr int kSlots = kSplit ? 8 : 4;
  static constexpr int kDecaySlots = kSplit ? 8 : 2;  // consumed two chunks before the rest
  static constexpr int kW = kSlots * kSlot;
  static constexpr int kY = kW + kDecaySlots * kPanels * kTile;
  static constexpr int kM = kY + (kOutput ? 2 * kPanels * kTile : 0);
  static constexpr int kDecays = kM + 2 * kMatrices;
  static constexpr int kDecayBytes = 4 * 4 * kDecayStride;
  static constexpr int kBarriers = kDecays + kSlots * kDecayBytes;
  static constexpr int kWords = kBarriers + 8 * kSlots;  // of marks, one for each slot
  static constexpr int kBytes = kWords + 4 * kSlots;
};

// Two sums for each of the columns, as tiles of one warp see them.
struct Carry {
  float sum[2][2];
};

// Scales the 16 columns of a chunk that are `warp`'s in place, and leaves exp(G) of its last token in
// `decays`. Returns whether the sums stay in range.
template <typename T, typename L, bool kReverse, bool kOutput>
__device__ bool ScaleChunk(int warp, uint32_t slot, uint32_t w_tile, float* decays, Decay form,
                           uint32_t there, const Ones& inclusive, const Ones& exclusive,
                           bool new_frame, Carry& carry) {
  const int lane = Lane(), panel = warp / 4;
  const uint32_t here = TileAddress(0, 0, warp % 4);
  const uint32_t a_tile = slot + L::kA + panel * L::kReadStride + here;
  const uint32_t r_tile = slot + L::kR + panel * L::kReadStride + here;
  const uint32_t b_tile = slot + L::kB + panel * L::kTile + here;
  const uint32_t k_tile = slot + L::kK + panel * L::kTile + here;
  const uint32_t v_tile = slot + L::kV + panel * L::kTile + here;

  uint32_t w[4], log_decays[4];
  LoadTransposed(w_tile + panel * L::kTile + here, w);
  LogDecays<T>(w, form, there, log_decays);

  float sum[2][4], before[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = before[i][j] = new_frame ? 0.0f : carry.sum[i][j % 2];
    WarpMultiplyHalf(sum[i], inclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
    WarpMultiplyHalf(before[i], exclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) carry.sum[i][j] = __shfl_sync(~0u, sum[i][2 + j], 28 | lane);
  }

  // Factors are rounded: two products then take one instruction.
  uint32_t e[4];
  const auto exponentials = [&](float sign, const float(&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &x[i / 2][i % 2 * 2];
      e[i] = Bf16::Round(Exp2(sign * pair[0]), Exp2(sign * pair[1]));
    }
  };
  const auto scale = [&](uint32_t tile) {
    uint32_t x[4];
    LoadMatrices(tile, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Bf16::Multiply(ToBf16<T>(x[i]), e[i]);
    StoreMatrices(tile, x);
  };
  exponentials(1.0f, before);
  scale(a_tile);
  if constexpr (kReverse) {
    exponentials(-1.0f, before);
    scale(k_tile);
  }
  exponentials(1.0f, sum);
  if constexpr (kOutput) scale(r_tile);
  // The state is not rounded at the end of a frame, so its factors are not.
  if (lane >= 28)
    *reinterpret_cast<float4*>(decays + (lane & 3) * L::kDecayStride + 4 * warp) = {
        Exp2(sum[0][2]), Exp2(sum[0][3]), Exp2(sum[1][2]), Exp2(sum[1][3])};
  exponentials(-1.0f, sum);
  scale(b_tile);
  if constexpr (!kReverse) scale(k_tile);
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t x[4];
    LoadMatrices(v_tile, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ToBf16<T>(x[i]);
    StoreMatrices(v_tile, x);
  }
  bool in_range = true;
  if (form != Decay::kSigmoid) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) in_range = in_range && fabsf(sum[i][j]) <= kMaxChunkLog2;
  }
  return in_range;
}

// The matrices of 16 x 16 of a chunk, one per warp: tril(At Kh^T), tril(Rt Kh^T), M, tril(Rt Bh^T).
template <typename L, bool kReverse, bool kOutput>
__device__ void MultiplyChunk(int warp, uint32_t slot, uint32_t matrices, const RowMarks& marks) {
  if (warp >= (kOutput ? 4 : 2)) return;
  const bool reads_r = warp >= 2, writes_k = warp % 2 == 1;
  const uint32_t left = slot + (reads_r ? L::kR : L::kA);
  const uint32_t right = slot + (writes_k ? L::kK : L::kB);
  Accumulator<2> m = {};
#pragma unroll
  for (int block = 0; block < L::kPanels * 4; ++block) {
    const int panel = block / 4;
    Left a;
    LoadLeft(left + panel * L::kReadStride, 0, block % 4, a);
    uint32_t b[4];
    KAlongRows{right + panel * L::kTile, block % 4}.Load(0, b);
    WarpMultiply(m[0], a, b[0], b[1]);
    WarpMultiply(m[1], a, b[2], b[3]);
  }
  KeepLower(reads_r || (kReverse && writes_k), m);
  if (marks.clears != 0) KeepSegments(marks, m);
  Left rounded;
  if (warp == 0)
    InvertUnitLower(m, rounded);
  else
    Round(m[0], m[1], rounded);
  const int place = reads_r ? (writes_k ? 1 : 3) : (writes_k ? 0 : 2);
  StoreMatrices(PackedTileAddress(matrices + place * kTileBytes), rounded);
}

constexpr int kPanelBlocks = kPanelCols / kTileTokens;

// One chunk: y, and the state after it from the state before it. If the state is cleared on the way,
// products wait for each other.
template <typename T, typename L, bool kOutput, bool kClears>
__device__ void AdvanceState(int warp, uint32_t slot, uint32_t matrices, uint32_t y_tile,
                             bool has_values, const RowMarks& marks,
                             float (&s)[L::kPanels][8][4]) {
  constexpr int kReadTiles = kOutput ? 4 : 2;
  const int panel_of_v = warp / 4;
  Left v = {};
  if (has_values) LoadLeftTransposed(slot + L::kV + panel_of_v * L::kTile, 0, warp % 4, v);

  Accumulator<kReadTiles> zy;  // [Z | Y]^T = S [At; Rt]^T + V^T [Aak; Qrk]^T
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    // One panel at a time: there are no registers for the operands of two.
    if (panel > 0) {
      CommitProducts();
      WaitForProducts<0>();
      Settle(zy);
    }
    Left before[kPanelBlocks];
    RoundPanel(s[panel], before);
    BeginProducts();
#pragma unroll
    for (int block = 0; block < kPanelBlocks; ++block) {
      const KAlongRows read{slot + panel * L::kReadStride, block};
      if (panel == 0 && block == 0)
        Multiply<false>(zy, before[block], read);
      else
        Multiply<true>(zy, before[block], read);
    }
  }
  if constexpr (kClears) {
    CommitProducts();
    WaitForProducts<0>();
    Settle(zy);
#pragma unroll
    for (int half = 0; half < kReadTiles; half += 2)
      KeepTokens<2>(0, 0, marks.FirstCleared(), &zy[half]);
    BeginProducts();
  }
  Multiply<true>(zy, v, PackedTiles{matrices});
  CommitProducts();
  if constexpr (kClears) {
    WaitForProducts<0>();
    Settle(zy);
    KeepTokens(marks.LastCleared(), kTileTokens, v);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
#pragma unroll
      for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[panel][tile][e] = 0.0f;
    BeginProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(s[panel], v, KDownRows{slot + L::kK + panel * L::kTile});
  CommitProducts();
  WaitForProducts<1>();
  Settle(zy);

  Left rounded;
  Round(zy[0], zy[1], rounded);
  Accumulator<2> u;  // U^T = Z^T M^T
  BeginProducts();
  Multiply<false>(u, rounded, PackedTiles{matrices + 2 * kTileBytes});
  CommitProducts();
  WaitForProducts<0>();
  Settle(u);

  Left u_rounded;
  Round(u[0], u[1], u_rounded);
  BeginProducts();
  if constexpr (kOutput) {
    // Y += Qrb U; the product with M beside it falls into Z, which is no longer needed.
    Multiply<true>(zy, u_rounded, PackedTiles{matrices + 2 * kTileBytes});
    CommitProducts();
  }
  if constexpr (kClears) {
    WaitForProducts<0>();
    KeepTokens(marks.LastCleared(), kTileTokens, u_rounded);
    BeginProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(s[panel], u_rounded, KDownRows{slot + L::kB + panel * L::kTile});
  CommitProducts();
  if constexpr (kOutput) {
    WaitForProducts<1>();
    Settle(zy);
    StoreTransposed(TileAddress(y_tile + panel_of_v * L::kTile, 0, warp % 4),
                    {Pair<T>::Round(zy[2][0], zy[2][1]), Pair<T>::Round(zy[3][0], zy[3][1]),
                     Pair<T>::Round(zy[2][2], zy[2][3]), Pair<T>::Round(zy[3][2], zy[3][3])});
  }
  WaitForProducts<0>();
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) Settle(s[panel]);
}

// The chunks are a pipeline with one barrier per chunk: while chunk c advances the state, the matrices
// of c + 1 are computed, the operands of c + 2 are scaled, and those after it are on their way.
template <typename T, int N, bool kReverse, bool kOutput, Work kWork, bool kMarked>
__global__ __launch_bounds__(Layout<N, kOutput, kWork>::kThreads,
                             Layout<N, kOutput, kWork>::kBlocks)
void ScanKernel(const __grid_constant__ Scan<T> scan) {
  using L = Layout<N, kOutput, kWork>;
  constexpr bool kTogether = kWork == Work::kTogether;
  static_assert(!kTogether || N == kPanelCols, "a warpgroup advances 64 rows of a state");
  using Tiles = StateAccumulator<N>;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t shared = SharedAddress(memory);
  const int warpgroup = kTogether ? 0 : Warp() / 4, warp = Warp() % (4 * L::kPanels);  // of its state
  const bool identity = L::kSummary && warpgroup >= L::kPanels;
  const bool multiplies = warpgroup == (L::kSplit ? L::kPanels : 0);
  const bool scales = warpgroup == (kTogether ? 0 : L::kSplit ? L::kPanels + 1 : 1);
  const bool copies = L::kSummary ? warpgroup == 2 * L::kPanels - 1 : multiplies;
  const Splits& splits = scan.splits;
  const bool for_later = L::kSummary && splits.memory != nullptr;
  const auto [turn, split] =
      splits.WorkOfBlock<kReverse>(scan.sequences, scan.tokens, scan.heads, for_later);
  if (split < 0) return;
  const int64_t head = turn.sequence * scan.heads + blockIdx.x % scan.heads;
  // Another split of the head may give up now, so the threads agree on what they have seen.
  if (scan.inexact != nullptr && !SynchronizeAll(1, L::kThreads, scan.inexact[head] == 0.0f)) return;

  const int64_t batch = turn.sequence;
  const Span& span = turn.span;
  const int64_t in_split = splits.ChunksPerSplit(span.Chunks()), count = splits.Count(span.Chunks());
  const int64_t order = kReverse ? count - 1 - split : split;  // in the recurrence
  const int64_t first_frame = split * in_split, first_token = first_frame * kChunk;
  const int64_t left = span.tokens - first_token, most = in_split * kChunk;
  const int tokens = static_cast<int>(left < most ? left : most);
  const int chunks = tokens > 0 ? (tokens + kTileTokens - 1) / kTileTokens : 0;

  const auto state_at = [&](int64_t order) {
    return splits.Summary<kReverse>(head, scan.heads, span, order);
  };

  // A piece of 16 bytes of a panel. Backwards, the first row of a chunk is its last token.
  const int copy_row = threadIdx.x % 128 / 8, copy_piece = threadIdx.x % 8;
  const uint32_t copy_to = PieceAddress(0, copy_row, copy_piece);
  const auto time_of = [&](int chunk) { return kReverse ? chunks - 1 - chunk : chunk; };
  const auto token_of = [&](int chunk) {
    return time_of(chunk) * kTileTokens + (kReverse ? kTileTokens - 1 - copy_row : copy_row);
  };
  const int stride = static_cast<int>(scan.heads * N);
  const int64_t first = (span.first_token + first_token) * stride +
                        (head - batch * scan.heads) * N + copy_piece * 8;
  const auto element_of = [&](int token) { return first + static_cast<int64_t>(token) * stride; };

  // The marks of a chunk are on their way with its operands.
  uint32_t* const words = reinterpret_cast<uint32_t*>(memory + L::kWords);
  const auto word_of = [&](int chunk) {
    return kMarked ? scan.marks.Word(batch, first_token + time_of(chunk) * kTileTokens) : 0u;
  };
  const auto marks_of = [&](int chunk) {
    return RowMarks(kMarked ? words[chunk % L::kSlots] : 0u, tokens - time_of(chunk) * kTileTokens,
                    kReverse);
  };

  const auto slot_of = [&](int chunk) { return shared + chunk % L::kSlots * L::kSlot; };
  const auto barrier_of = [&](int chunk) {
    return CopyBarrier(shared + L::kBarriers + 8 * (chunk % L::kSlots));
  };
  const auto for_panels_of = [&](int chunk, uint32_t word, auto copy) {
    const int token = token_of(chunk);
    const bool there = token < tokens && (word >> (kTileTokens + token % kTileTokens) & 1) == 0;
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      copy(panel, element_of(token) + kPanelCols * panel, there);
  };
  const auto copy_operands = [&](int chunk, uint32_t word) {
    const uint32_t to = slot_of(chunk) + copy_to;
    for_panels_of(chunk, word, [&](int panel, int64_t from, bool there) {
      CopyAsync(to + L::kA + panel * L::kReadStride, scan.a + from, there);
      if constexpr (kOutput) CopyAsync(to + L::kR + panel * L::kReadStride, scan.r + from, there);
      CopyAsync(to + L::kB + panel * L::kTile, scan.b + from, there);
      CopyAsync(to + L::kK + panel * L::kTile, scan.k + from, there);
      CopyAsync(to + L::kV + panel * L::kTile, scan.v + from, there);
    });
  };
  const auto w_of = [&](int chunk) {
    return shared + L::kW + chunk % L::kDecaySlots * L::kPanels * L::kTile;
  };
  const auto copy_decays = [&](int chunk) {
    for_panels_of(chunk, 0, [&](int panel, int64_t from, bool there) {
      CopyAsync(w_of(chunk) + panel * L::kTile + copy_to, scan.w + from, there);
    });
    barrier_of(chunk).ArriveAfterCopies();
  };

  const Ones inclusive(true, true, false), exclusive(true, false, false);
  Carry carry[L::kPanels] = {};
  bool in_range = true;
  const auto starts_frame = [&](int chunk) {
    return kReverse ? chunk == 0 || time_of(chunk) % 4 == 3 : chunk % 4 == 0;
  };
  const auto ends_frame = [&](int chunk) {
    return kReverse ? time_of(chunk) % 4 == 0 : chunk % 4 == 3 || chunk == chunks - 1;
  };
  const auto decays_of = [&](int chunk) {
    return reinterpret_cast<float*>(memory + L::kDecays) + chunk % L::kSlots * 4 * L::kDecayStride;
  };
  const auto scale = [&](int chunk) {
    barrier_of(chunk).Wait(chunk / L::kSlots % 2);
#pragma unroll
    for (int panel = 0; panel < L::kPanels; ++panel)
      in_range &= ScaleChunk<T, L, kReverse, kOutput>(
          warp % 4 + 4 * panel, slot_of(chunk), w_of(chunk), decays_of(chunk), scan.decay,
          marks_of(chunk).present, inclusive, exclusive, starts_frame(chunk), carry[panel]);
  };
  const auto matrices_of = [&](int chunk) {
    return shared + L::kM + chunk % 2 * L::kMatrices;
  };
  const auto multiply = [&](int chunk) {
    MultiplyChunk<L, kReverse, kOutput>(warp % 4, slot_of(chunk), matrices_of(chunk),
                                        marks_of(chunk));
  };
  // Returns false where the block has to give up.
  const auto synchronize = [&] {
    bool goes_on = true;
    if (scan.inexact == nullptr)
      Synchronize(1, L::kThreads);
    else
      goes_on = SynchronizeAll(1, L::kThreads, in_range);
    if (!goes_on) {
      WaitForCopies<0>();
      if (threadIdx.x == 0) scan.inexact[head] = 1.0f;
    }
    return goes_on;
  };

  if (threadIdx.x < L::kSlots) {
    barrier_of(threadIdx.x).Init(128);
    if (kMarked && static_cast<int>(threadIdx.x) < chunks) words[threadIdx.x] = word_of(threadIdx.x);
  }
  __syncthreads();
  if (copies)
    for (int chunk = 0; chunk < L::kSlots && chunk < chunks; ++chunk) {
      copy_operands(chunk, word_of(chunk));
      if (chunk < L::kDecaySlots) copy_decays(chunk);
    }
  if (scales)
    for (int chunk = 0; chunk < 2 && chunk < chunks; ++chunk) scale(chunk);
  PublishOperands();
  if (!synchronize()) return;
  if (copies)
    for (int chunk = L::kDecaySlots; chunk < L::kSlots && chunk < chunks; ++chunk)
      copy_decays(chunk);
  if (multiplies && chunks > 0) multiply(0);
  PublishOperands();
  __syncthreads();

  uint32_t coming = copies && L::kSlots < chunks ? word_of(L::kSlots) : 0u;

  // The work of a warpgroup: that on the state, that for it, or both.
  const auto run = [&](auto on_state, auto for_state) {
    constexpr bool kOnState = decltype(on_state)::value, kForState = decltype(for_state)::value;
    typename Tiles::State s;
    if constexpr (kOnState) {
      // The start of the first split may be known, and its summary is its end.
      if (L::kSummary && (order > 0 || scan.start == nullptr))
        Tiles::SetDiagonal(identity ? 1.0f : 0.0f, s);
      else
        Tiles::Load(order == 0 ? scan.start + head * N * N
                               : state_at(order - 1), s);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t y_tile = shared + L::kY + chunk % 2 * L::kPanels * L::kTile;
      if constexpr (kForState)
        if (multiplies && chunk + 1 < chunks) multiply(chunk + 1);
      if constexpr (kOnState) {
        if (!L::kSummary && starts_frame(chunk)) {
          // Of [B, frames, H], and head is batch * H + h.
          const int64_t frame = span.first_chunk + first_frame + time_of(chunk) / 4;
          const int64_t index = head + (frame - batch) * scan.heads;
          if constexpr (kReverse) {
            Tiles::StoreRounded(s, scan.gradients + index * (N * N / 8));
          } else if (scan.states != nullptr) {
            Tiles::StoreRounded(s, scan.states + index * (N * N / 8));
          }
        }
        const auto advance = [&](auto clears, const RowMarks& marks) {
          AdvanceState<T, L, kOutput, decltype(clears)::value>(
              warp, slot_of(chunk), matrices_of(chunk), y_tile, !identity, marks, s);
        };
        const RowMarks marks = marks_of(chunk);
        if (marks.clears == 0)
          advance(std::false_type(), marks);
        else
          advance(std::bool_constant<kMarked>(), marks);
        if (ends_frame(chunk)) {
          const float* const decays = decays_of(chunk) + (threadIdx.x & 3) * L::kDecayStride;
#pragma unroll
          for (int pair = 0; pair < N / 16; ++pair) {
            const float4 d = *reinterpret_cast<const float4*>(decays + 4 * pair);
            float(&left_tile)[4] = s[pair / 4][pair % 4 * 2];
            float(&right_tile)[4] = s[pair / 4][pair % 4 * 2 + 1];
            left_tile[0] *= d.x, left_tile[1] *= d.y, left_tile[2] *= d.x, left_tile[3] *= d.y;
            right_tile[0] *= d.z, right_tile[1] *= d.w, right_tile[2] *= d.z, right_tile[3] *= d.w;
          }
        }
      }
      if constexpr (kForState) {
        if (scales && chunk + 2 < chunks) scale(chunk + 2);
        if (multiplies || scales) PublishOperands();
      }
      if (!synchronize()) return;
      if constexpr (kForState) {
        if (kOutput && multiplies) {
          const int token = token_of(chunk);
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel)
            if (token < tokens)
              *reinterpret_cast<uint4*>(scan.y + element_of(token) + kPanelCols * panel) =
                  *reinterpret_cast<const uint4*>(memory + (y_tile - shared) + panel * L::kTile +
                                                  copy_to);
        }
        if (copies && chunk + L::kSlots < chunks) {
          if (kMarked && threadIdx.x % 128 == 0) words[chunk % L::kSlots] = coming;
          copy_operands(chunk + L::kSlots, coming);
          copy_decays(chunk + L::kSlots);
          if (chunk + L::kSlots + 1 < chunks) coming = word_of(chunk + L::kSlots + 1);
        }
      }
    }
    if constexpr (kOnState) {
      if (!L::kSummary) {
        if (order == count - 1) Tiles::Store(s, scan.end + head * N * N);
      } else if (!for_later) {
        float* const to = identity ? scan.factor : scan.end;
        if (to != nullptr) Tiles::Store(s, to + head * N * N);
      } else if (!identity) {
        Tiles::Store(s, state_at(order));
      } else if (order > 0) {
        Tiles::Store(s, state_at(order) + N * N);
      }
    }
  };
  if constexpr (!L::kSplit)
    run(std::true_type(), std::true_type());
  else if (warpgroup < L::kPanels)
    run(std::true_type(), std::false_type());
  else
    run(std::false_type(), std::true_type());
}

// From the summaries of the splits the state at the end of each: S_i = S_{i-1} M_i + D_i, where S_0
// is there already, and D_i becomes S_i. A block has some rows of the state.
constexpr int kCombineThreads = 128;
constexpr int kCombineRows = 8;
template <int N>
constexpr int64_t kCombineBytes = N * N * sizeof(float);

template <int N, bool kReverse>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(Splits splits,
                                                                 Sequences sequences,
                                                                 int64_t tokens, int64_t heads,
                                                                 const float* inexact) {
  constexpr int kCols = kCombineRows * N / kCombineThreads;
  __shared__ float s[kCombineRows][N];
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  float* const factor = reinterpret_cast<float*>(memory);  // [N, N]
  const int64_t sequence = splits.SummarizedSequence(sequences, heads);
  if (sequence < 0) return;
  const int64_t head = sequence * heads + blockIdx.x % heads;
  const int first_row = blockIdx.y * kCombineRows;
  const int row = threadIdx.x * kCols / N, col = threadIdx.x * kCols % N;
  if (inexact != nullptr && inexact[head] != 0.0f) return;

  const Span span = sequences(sequence, tokens);
  const int64_t count = splits.Count(span.Chunks());
  if (count <= 2) return;
  float sum[kCols];
  const auto state_at = [&](int order) {
    return splits.Summary<kReverse>(head, heads, span, order);
  };
  const auto at = [&](int order) { return state_at(order) + (first_row + row) * N + col; };
#pragma unroll
  for (int c = 0; c < kCols; ++c) sum[c] = at(0)[c];
  for (int order = 1; order < count - 1; ++order) {
    const float4* const from = reinterpret_cast<const float4*>(state_at(order) + N * N);
    for (int i = threadIdx.x; i < N * N / 4; i += kCombineThreads)
      reinterpret_cast<float4*>(factor)[i] = from[i];
#pragma unroll
    for (int c = 0; c < kCols; ++c) s[row][col + c] = sum[c];
    float* const to = at(order);
#pragma unroll
    for (int c = 0; c < kCols; ++c) sum[c] = to[c];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        sum[c] = fmaf(s[row][i], factor[i * N + col + c], sum[c]);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kCols; ++c) to[c] = sum[c];
  }
}

template <typename T, int N, bool kReverse, bool kOutput, Work kWork>
cudaError_t LaunchScan(cudaStream_t stream, const Scan<T>& scan, dim3 blocks) {
  using L = Layout<N, kOutput, kWork>;
  return ForMarks(scan.marks, [&](auto marked) {
    return Launch(ScanKernel<T, N, kReverse, kOutput, kWork, marked()>, blocks, L::kThreads,
                  L::kBytes, stream, scan);
  });
}

// The scan of all tokens, in splits if there are several: first what each does to a state, then, from
// the state at the start of each, all of them at once.
template <typename T, int N, bool kReverse>
cudaError_t RunScan(cudaStream_t stream, const Scan<T>& scan, const Device& device, int64_t batch) {
  constexpr bool kOutput = !kReverse;
  const Splits& splits = scan.splits;
  if (splits.count > 1) {
    cudaError_t error = LaunchScan<T, N, kReverse, false, Work::kSummary>(
        stream, scan, splits.SummaryBlocks(batch, scan.heads));
    const dim3 blocks(static_cast<unsigned>(splits.SummarizedHeads(batch, scan.heads)),
                      N / kCombineRows);
    if (error == cudaSuccess)
      error = Launch(CombineKernel<N, kReverse>, blocks, kCombineThreads, kCombineBytes<N>, stream,
                     splits, scan.sequences, scan.tokens, scan.heads, scan.inexact);
    if (error != cudaSuccess) return error;
  }
  const dim3 blocks = splits.Blocks(batch, scan.heads);
  // With up to two blocks on each multiprocessor it is faster that a chunk takes less time; with more,
  // that more of them hide each other's latency.
  if constexpr (N == kPanelCols) {
    const bool few = static_cast<int64_t>(blocks.x) * blocks.y <= 2 * device.multiprocessors;
    if (!few || Layout<N, kOutput, Work::kSplit>::kBytes > device.shared_memory)
      return LaunchScan<T, N, kReverse, kOutput, Work::kTogether>(stream, scan, blocks);
  }
  return LaunchScan<T, N, kReverse, kOutput, Work::kSplit>(stream, scan, blocks);
}

template <int N>
int64_t SharedMemory(Pass pass) {
  const int64_t summary = Layout<N, false, Work::kSummary>::kBytes;
  if (pass != Pass::kForward && pass != Pass::kBackward) return summary;
  constexpr Work kLeast = N == kPanelCols ? Work::kTogether : Work::kSplit;
  const int64_t scan = pass == Pass::kForward ? Layout<N, true, kLeast>::kBytes
                                              : Layout<N, false, kLeast>::kBytes;
  return std::max({summary, scan, kCombineBytes<N>});
}

template <typename T>
Scan<T> ForwardScan(const Wkv7Call& call) {
  const auto in = [](const void* x) { return static_cast<const T*>(x); };
  Scan<T> scan = {};
  scan.a = in(call.a), scan.r = in(call.r), scan.b = in(call.b);
  scan.k = in(call.k), scan.v = in(call.v), scan.w = in(call.w);
  scan.tokens = call.dims.tokens, scan.heads = call.dims.heads, scan.decay = call.decay;
  scan.marks = call.marks, scan.sequences = call.sequences;
  return scan;
}

template <typename T>
Scan<T> ReverseScan(const Wkv7BackwardCall& call) {
  Scan<T> scan = ForwardScan<T>(call);
  std::swap(scan.a, scan.b);
  scan.k = scan.r, scan.r = nullptr, scan.v = static_cast<const T*>(call.dy);
  scan.start = call.dfinal_state, scan.end = call.dinitial_state;
  return scan;
}

dim3 BlockForEachHead(const Wkv7Call& call) {
  return dim3(static_cast<unsigned>(call.dims.batch * call.dims.heads));
}

}  // namespace

int64_t Wkv7ScanSharedMemory(Pass pass, int64_t head_size) {
  return head_size == 64 ? SharedMemory<64>(pass) : SharedMemory<128>(pass);
}

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7ForwardCall& call, const Device& device,
                     const Splits& splits, float* inexact) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    Scan<T> scan = ForwardScan<T>(call);
    scan.start = call.initial_state, scan.end = call.final_state;
    scan.y = static_cast<T*>(call.y), scan.states = static_cast<uint4*>(call.states);
    scan.splits = splits, scan.inexact = inexact;
    return RunScan<T, size(), false>(stream, scan, device, call.dims.batch);
  });
}

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                            const Splits& splits, uint4* gradients, float* inexact) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    Scan<T> scan = ReverseScan<T>(call);
    scan.gradients = gradients, scan.splits = splits, scan.inexact = inexact;
    return RunScan<T, size(), true>(stream, scan, device, call.dims.batch);
  });
}

cudaError_t RunSummary(cudaStream_t stream, const Wkv7SummaryCall& call) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    Scan<T> scan = ForwardScan<T>(call);
    scan.end = call.added, scan.factor = call.factor, scan.splits.count = 1;
    return LaunchScan<T, size(), false, false, Work::kSummary>(stream, scan,
                                                               BlockForEachHead(call));
  });
}

cudaError_t RunReverseSummary(cudaStream_t stream, const Wkv7BackwardCall& call) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    Scan<T> scan = ReverseScan<T>(call);
    scan.splits.count = 1;
    return LaunchScan<T, size(), true, false, Work::kSummary>(stream, scan, BlockForEachHead(call));
  });
}

}  // namespace rwkv_jax::cuda
