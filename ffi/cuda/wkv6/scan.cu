// WKV6 on matrix units, from the first token of a sequence to the last: the forward pass; and from
// the last to the first, of heads of 128: the gradients of the state and of v. A thread block has one
// head, or one head of one split of a sequence, and takes a chunk of 64 tokens at a time.
// wkv6/decays.cuh has the equations and their sources.
//
// If a sequence is split, three kernels run one after another:
//
//   StateKernel    for each split but the last one in the order of the recurrence: its transition, that is
//                  what its tokens do to a state, S <- S diag(F) + D
//   CombineKernel  from the transitions, the state at the end of each of these splits
//   OutputKernel   for each split: y, the saved states and the final state; or dv and the gradients of
//                  the states. Of heads of 64 these are left to the kernel in gradients.cu
//
// Both scans are pipelines with a warpgroup for every 64 rows of a state. The prologue starts the
// copies of the first chunk; the main loop copies the next chunk to shared memory while it computes the
// present one. A warpgroup copies and scales 64 of the channels, and multiplies the scaled operands of
// all channels.
#include <algorithm>

#include "wkv6/decays.cuh"

namespace rwkv_jax::cuda {
namespace {

template <int N>
constexpr int kThreads = kPanels<N> * kPanelThreads;
template <typename T, int N>
constexpr int kBlocksPerMultiprocessor = 4 / kPanels<N> / kTermsOf<T>;
template <int N>
constexpr int kStateSize = N * N;

// A recurrence S <- S diag(d) + x z^T: forwards that of the state, with x = v and z = k; backwards that
// of its gradient, dS <- dS diag(d) + dy r^T.
struct Scan : Wkv6Call {
  const void *x, *z;
  const float* start;  // StateKernel takes null for zeros
  float* end;          // if null, the transition of each split is stored in `splits`
  void* saved;         // only of OutputKernel, if not null: gets the state before each chunk in
                       // bfloat16 or, of floats, in float, [B, N, H, V, K]
  Splits splits;
  void* y = nullptr;        // the outputs, only of OutputKernel: y, or backwards dv
  int key_stride = 0;       // of OutputKernel, which may have it: from one stage of k to the other
  float* factor = nullptr;  // [B, H, K], if not null: gets the decay of all tokens together
};

// The panel of rows of a state that the warpgroup of this thread has, and of channels that it copies and
// scales.
template <int N>
__device__ int PanelOfThread() {
  return kPanels<N> == 1 ? 0 : Warp() / 4;
}

// This warp in its warpgroup.
template <int N>
__device__ int WarpOfPanel() {
  return kPanels<N> == 1 ? Warp() : Warp() % 4;
}

// Byte offsets in shared memory of OutputKernel. r and k have two stages of the pipeline, but forwards k has one
// where a block cannot have kBytes. What is there for each panel is there for one panel after another, within a
// stage or a tile.
template <typename T, int N>
struct OutputLayout {
  static constexpr int kArrayBytes = kPanels<N> * kPanelTermsBytes<T>;
  static constexpr int kR = 0;                     // r, then Rt
  static constexpr int kX = kR + 2 * kArrayBytes;  // x, then the outputs
  static constexpr int kW = kX + kArrayBytes;
  static constexpr int kK = kW + kArrayBytes;  // k, then Kh
  // A^T if the recurrence runs backwards. Packed; A is the sum of a matrix for each panel of channels.
  static constexpr int kA = kK + kArrayBytes;
  static constexpr int kFactors = kA + kChunkTiles * kPanels<N> * kTileTermsBytes<T>;  // exp(G_L)
  static constexpr int kU =
      kFactors + kChunkTiles * kPanels<N> * kFactorFloats * 4;   // bfloat16, or of floats float [N]
  static constexpr int kConstant = kU + N / 2 * sizeof(Two<T>);  // float [N]
  static constexpr int kEnd = kConstant + N * 4;
  static constexpr int kNextK = (kEnd + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
  static constexpr int kBytes = kNextK + kArrayBytes;
  static constexpr bool kFits = kBytes <= kLeastSharedMemory;
  static constexpr int kLeastBytes = kFits ? kBytes : kEnd;
  static_assert(kLeastBytes <= kLeastSharedMemory);
};

// The barriers of OutputKernel for each chunk, each a __syncthreads; the name is for the reader.
//
//   barrier         threads wait until all others have...    because next they...
//   kKeysCopied     copied r, k and w of the chunk           scale tiles that others have copied
//   kScaled         scaled their tiles, and copied x         multiply the scaled operands; start to copy
//                                                            the next w, and r and k to the other stage
//   kOutputsStaged  put outputs in the place of x, finished  store them as whole rows; copy x, and k of one
//                   with Rt, Kh, A and the factors           stage; scale the next chunk
enum OutputBarrier { kKeysCopied, kScaled, kOutputsStaged };

// The phases of OutputKernel. Each phase runs in the registers of the caller: functions are inlined.
// Backwards Rt and Kh change their parts, and so do v and dy:
//
//   dV = Kh dS^T + A^T dY     dS <- dS diag(exp(G_L)) + dY^T Rt.
template <typename T, int N, bool kConstant, bool kReverse, bool kMarked>
struct OutputPhases {
  using L = OutputLayout<T, N>;
  static constexpr int kTerms = kTermsOf<T>;
  using Tiles = StateAccumulator<N>;
  using State = typename Tiles::State;

  const Scan& in;
  unsigned char* const memory;
  const uint32_t shared;  // the address of `memory`
  const int warp, panel;
  const SplitOfBlock<N, kReverse> split;

  __device__ float* Floats(int at) const { return reinterpret_cast<float*>(memory + at); }
  __device__ Two<T>* Bonus() const { return reinterpret_cast<Two<T>*>(memory + L::kU); }
  __device__ float* FactorsOf(int tile, int panel) const {
    return Floats(L::kFactors) + (tile * kPanels<N> + panel) * kFactorFloats;
  }
  // The A of a tile over a panel of channels.
  __device__ uint32_t Scores(int tile, int panel) const {
    return shared + L::kA + (tile * kPanels<N> + panel) * kTileTermsBytes<T>;
  }
  __device__ uint32_t ReceptancePanel(int i, int panel) const {
    return shared + L::kR + i % 2 * L::kArrayBytes + panel * kPanelTermsBytes<T>;
  }
  __device__ uint32_t KeyPanel(int i, int panel) const {
    return shared + L::kK + i % 2 * KeyStride() + panel * kPanelTermsBytes<T>;
  }
  // 0 if k has one stage.
  __device__ int KeyStride() const {
    return L::kFits || kReverse ? L::kNextK - L::kK : in.key_stride;
  }
  // What reads the state for the outputs, and what the state takes up.
  __device__ uint32_t ReadPanel(int i, int panel) const {
    return kReverse ? KeyPanel(i, panel) : ReceptancePanel(i, panel);
  }
  __device__ uint32_t WrittenPanel(int i, int panel) const {
    return kReverse ? ReceptancePanel(i, panel) : KeyPanel(i, panel);
  }
  __device__ ChunkCopier<kPanelThreads> Chunk(int i, uint64_t absent = 0) const {
    return split.Chunk(i, panel, absent);
  }
  __device__ uint64_t Absent(int i) const {
    return split.template MarksOf<T, kMarked>(i, in.marks).absent;
  }

  // Start to copy chunk i: what has two stages, and then the rest, of which x is the last group of copies.
  __device__ void LoadKeys(int i, uint64_t absent) const {
    const auto copier = Chunk(i, absent);
    if constexpr (!kConstant)
      copier.Copy(shared + L::kW + panel * kPanelTermsBytes<T>, static_cast<const T*>(in.w));
    copier.Copy(ReceptancePanel(i, panel), static_cast<const T*>(in.r));
    if (KeyStride() != 0) copier.Copy(KeyPanel(i, panel), static_cast<const T*>(in.k));
    CommitCopies();
  }
  __device__ void LoadValues(int i, uint64_t absent) const {
    const auto copier = Chunk(i, absent);
    if (KeyStride() == 0) {
      copier.Copy(KeyPanel(i, panel), static_cast<const T*>(in.k));
      CommitCopies();
    }
    copier.Copy(shared + L::kX + panel * kPanelTermsBytes<T>, static_cast<const T*>(in.x));
    CommitCopies();
  }
  // Each thread converts the pieces of x that it has copied: x is used as it is.
  __device__ void ConvertValues() const {
    ConvertOwnPieces<T, kPanelThreads>(memory + L::kX + panel * kPanelTermsBytes<T>);
  }

  // Brings u, and the decay if all tokens have the same.
  __device__ void LoadParameters() const {
    if constexpr (kConstant) LoadConstantDecays<N>(in, split.Head() * N, Floats(L::kConstant));
    if (threadIdx.x < N / 2) {
      const float2 pair = reinterpret_cast<const float2*>(in.u + split.Head() * N)[threadIdx.x];
      if constexpr (kTerms > 1)
        Bonus()[threadIdx.x] = pair;
      else
        Bonus()[threadIdx.x] = Bf16::Round(pair.x, pair.y);
    }
  }

  __device__ void LoadState(State& state) const {
    Tiles::Load(split.order == 0 ? in.start + split.Head() * kStateSize<N>
                                 : in.splits.template Transition<kReverse>(
                                       split.Head(), split.heads, split.span, split.order - 1),
                state);
  }

  // Replaces r and k of a tile of tokens by Rt and Kh, and leaves A and exp(G_L). Each warp has the
  // tile of its number, and the panel of its warpgroup.
  __device__ void ScaleOperands(int i, const ChunkCopier<kPanelThreads>& chunk,
                                uint32_t word) const {
    const int64_t first = chunk.first + static_cast<int64_t>(kTileTokens * warp) * chunk.stride;
    const RawTile<T> raw{static_cast<const T*>(in.r) + first, static_cast<const T*>(in.k) + first,
                         chunk.stride, RowMarks(word, chunk.tokens - kTileTokens * warp)};
    const ChunkDecays<T, kConstant> decays{shared + L::kW + panel * kPanelTermsBytes<T>,
                                           Floats(L::kConstant) + panel * kPanelCols, in.decay};
    const Two<T>* const bonuses = Bonus() + panel * (kPanelCols / 2);
    const uint32_t r_panel = ReceptancePanel(i, panel), k_panel = KeyPanel(i, panel);
    Accumulator<2> a = {}, bonus = {};
    bool far = false;
    const bool clears = raw.marks.clears != 0;
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column) {
      DecaySums sums;
      SumByToken(decays, warp, column, raw.marks.present, sums);
      float total[2][2];
      LastRow(sums, total);
#pragma unroll
      for (int j = 0; j < 4; ++j) far |= !(total[j / 2][j % 2] >= -kMaxTileLog2);
      const float factor[2][2] = {{Exp2(total[0][0]), Exp2(total[0][1])},
                                  {Exp2(total[1][0]), Exp2(total[1][1])}};
      StoreFactors(column, factor, clears, FactorsOf(warp, panel));

      Two<T> r[4], k[4];
      LoadTile<T>(r_panel, warp, column, r);
      LoadTile<T>(k_panel, warp, column, k);
      AddBonus<T>(r, k, [&](int j) { return bonuses[8 * column + j / 2 * 4 + Lane() % 4]; }, bonus);
      Left scaled_r[kTerms], scaled_k[kTerms], x[kTerms];
      ScaleTile<T>(k, [&](int i, int j) { return Exp2(-sums.upto[i][j]); }, scaled_k);
      ScaleTile<T>(r, [&](int i, int j) { return Exp2(sums.before[i][j]); }, scaled_r);
      AddTokenProducts(a, scaled_r, scaled_k);
      if (clears) KeepRowsBetween(0, raw.marks.FirstCleared(), scaled_r);
      StoreTile(r_panel, warp, column, scaled_r);
      // Kh comes last, when there are registers for it.
      ScaleTile<T>(k, [&](int i, int j) { return Exp2(sums.ToEnd<T>(i, j, total[i][j % 2])); }, x);
      if (clears) KeepRowsBetween(raw.marks.LastCleared(), kTileTokens, x);
      StoreTile(k_panel, warp, column, x);
    }
    if (__any_sync(~0u, far)) MultiplyByHalves(decays, warp, raw, 0, kColumnTiles, a);
    StoreScores<T, kReverse>(raw.marks, bonus, a, Scores(warp, panel));
  }

  // Saves the state before chunk i, if that is asked for.
  __device__ void SaveState(int i, const State& state) const {
    if (in.saved == nullptr) return;
    const int64_t to = split.SavedState(i) * kStateSize<N>;
    if constexpr (kTerms > 1)
      Tiles::Store(state, static_cast<float*>(in.saved) + to);
    else
      Tiles::StoreRounded(state, static_cast<uint4*>(in.saved) + to / 8);
  }

  // Stages the outputs Y = Rt S^T + A V of a tile, transposed, and moves the state on. A warp has 16
  // values as rows.
  __device__ void OutputsAndState(int i, int tile, State& s) const {
    const uint32_t values = shared + L::kX + panel * kPanelTermsBytes<T> + tile * kTileStride;
    Left x[kTerms];
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      LoadLeftTransposed(values + term * kPanelBytes, 0, warp, x[term]);
    // Matrix units cut sums off instead of rounding them, which would pile up in the state. So what a tile of
    // floats adds is summed apart.
    State of_tile;
    State& sum = kTerms > 1 ? of_tile : s;
    Accumulator<2> y;
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p) {
      Left before[kColumnTiles][kTerms];
      RoundPanel(s[p], before);
      ScaleColumns(FactorsOf(tile, p), s[p]);
      BeginProducts();
      ForProducts<kTerms>([&](int i, int j) {
        MultiplyOrAdd(p + i + j > 0, y, x[i], PackedTiles{Scores(tile, p) + j * kTileBytes});
      });
#pragma unroll
      for (int column = 0; column < kColumnTiles; ++column)
        Multiply<true>(y, before[column], KAlongRows{ReadPanel(i, p) + tile * kTileStride, column},
                       kPanelBytes);
      CommitProducts();
      Multiply<kTerms == 1>(sum[p], x, KDownRows{WrittenPanel(i, p) + tile * kTileStride},
                            kPanelBytes);
      CommitProducts();
      WaitForProducts<1>();
      Settle(y);
    }
    // No other warp reads the values that y replaces.
    if constexpr (kTerms > 1)
      StoreFloats(values, 0, warp, y);
    else
      StoreTransposed(TileAddress(values, 0, warp),
                      {Pair<T>::Round(y[0][0], y[0][1]), Pair<T>::Round(y[1][0], y[1][1]),
                       Pair<T>::Round(y[0][2], y[0][3]), Pair<T>::Round(y[1][2], y[1][3])});
    WaitForProducts<0>();
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p) {
      Settle(sum[p]);
      if constexpr (kTerms > 1)
        ForEachElement<8>([&](int fragment, int e) { s[p][fragment][e] += sum[p][fragment][e]; });
    }
  }

  // Stores the pieces of outputs that lie where this thread will copy the values of the next chunk.
  __device__ void StoreOutputs(const ChunkCopier<kPanelThreads>& chunk) const {
    chunk.template ForEachPiece<T>([&](uint32_t from, int64_t element, int row) {
      if (row < chunk.tokens)
        *reinterpret_cast<uint4*>(static_cast<T*>(in.y) + element) =
            *reinterpret_cast<const uint4*>(memory + L::kX + panel * kPanelTermsBytes<T> + from);
    });
  }
};

template <typename T, int N, bool kConstant, bool kReverse, bool kMarked>
__global__ __launch_bounds__(kThreads<N>, kBlocksPerMultiprocessor<T, N>) void OutputKernel(
    const __grid_constant__ Scan in) {
  using Tiles = StateAccumulator<N>;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const auto wait_for_all = [](OutputBarrier) { __syncthreads(); };
  const int warp = WarpOfPanel<N>(), panel = PanelOfThread<N>();
  const SplitOfBlock<N, kReverse> split(in, in.splits, false);
  if (split.None()) return;
  const OutputPhases<T, N, kConstant, kReverse, kMarked> phases{in,   memory, SharedAddress(memory),
                                                                warp, panel,  split};

  if (split.chunks > 0) {
    const uint64_t absent = phases.Absent(0);
    phases.LoadKeys(0, absent);
    phases.LoadValues(0, absent);
  }
  phases.LoadParameters();
  typename Tiles::State state;
  phases.LoadState(state);

#pragma unroll 1
  for (int i = 0; i < split.chunks; ++i) {
    const ChunkCopier<kPanelThreads> chunk = phases.Chunk(i);
    const int64_t own_token = split.Place(i) * kChunkTokens + kTileTokens * phases.warp;
    const uint32_t word =
        HasMarks<T, kMarked>(in.marks) ? in.marks.Word(split.sequence, own_token) : 0u;
    const uint64_t coming = i + 1 < split.chunks ? phases.Absent(i + 1) : 0u;
    WaitForCopies<1>();
    wait_for_all(kKeysCopied);
    phases.ScaleOperands(i, chunk, word);
    WaitForCopies<0>();
    phases.ConvertValues();
    PublishOperands();
    wait_for_all(kScaled);
    if (i + 1 < split.chunks) phases.LoadKeys(i + 1, coming);
    phases.SaveState(i, state);
    // Large states leave no registers for more than one tile at a time.
#pragma unroll(kPanels<N> == 1 ? kChunkTiles : 1)
    for (int step = 0; step < kChunkTiles; ++step)
      phases.OutputsAndState(i, kReverse ? kChunkTiles - 1 - step : step, state);
    wait_for_all(kOutputsStaged);
    phases.StoreOutputs(chunk);
    if (i + 1 < split.chunks) phases.LoadValues(i + 1, coming);
  }
  if (split.Last()) Tiles::Store(state, in.end + split.Head() * kStateSize<N>);
}

// StateKernel has no outputs. A chunk is a single product, since z is scaled by the decays of the tokens
// that come after it in the recurrence, which are at most 1.
//
// Byte offsets in shared memory: two stages of the pipeline with x, z and w, and what is there for each
// panel of channels.
template <typename T, int N>
struct StateLayout {
  static constexpr int kX = 0;
  static constexpr int kZ = kPanels<N> * kPanelTermsBytes<T>;  // z, then z scaled
  static constexpr int kW = 2 * kZ;
  static constexpr int kStageBytes = 3 * kZ;
  static constexpr int kFactors = 2 * kStageBytes;
  static constexpr int kConstant = kFactors + kPanels<N> * kFactorFloats * 4;
  static constexpr int kBytes = kConstant + N * 4;
};
static_assert(StateLayout<__nv_bfloat16, 128>::kBytes <= kLeastSharedMemory &&
                  StateLayout<float, 64>::kBytes <= kLeastSharedMemory,
              "a transition runs on any device");

// The barriers of StateKernel for each chunk, each a __syncthreads; the name is for the reader.
//
//   barrier        threads wait until all others have...    because next they...
//   kCopied        copied the chunk, and finished with      scale what others have copied; start to copy
//                  the chunk before it                      the next chunk to the other stage
//   kChunkScaled   scaled z and stored the factors          multiply x and z
enum StateBarrier { kCopied, kChunkScaled };

template <typename T, int N, bool kConstant, bool kReverse, bool kMarked>
struct StatePhases {
  using L = StateLayout<T, N>;
  static constexpr int kTerms = kTermsOf<T>;
  using Tiles = StateAccumulator<N>;
  using State = typename Tiles::State;

  const Scan& in;
  unsigned char* const memory;
  const uint32_t shared;  // the address of `memory`
  const int warp, panel;
  const SplitOfBlock<N, kReverse> split;

  // The decays of the channels of this warpgroup.
  __device__ float* Constant() const {
    return reinterpret_cast<float*>(memory + L::kConstant) + panel * kPanelCols;
  }
  __device__ float* FactorsOf(int panel) const {
    return reinterpret_cast<float*>(memory + L::kFactors) + panel * kFactorFloats;
  }
  __device__ uint32_t Stage(int i) const { return shared + i % 2 * L::kStageBytes; }
  // The panel of this warpgroup of one of the arrays.
  __device__ uint32_t OwnPanel(int i, int array) const {
    return Stage(i) + array + panel * kPanelTermsBytes<T>;
  }
  __device__ ChunkMarks MarksOf(int i) const {
    return split.template MarksOf<T, kMarked>(i, in.marks);
  }
  __device__ float* TransitionOf(int64_t order) const {
    return in.splits.template Transition<kReverse>(split.Head(), split.heads, split.span, order);
  }

  // Starts to copy chunk i.
  __device__ void Load(int i, uint64_t absent) const {
    const auto copier = split.Chunk(i, panel, absent);
    if constexpr (!kConstant) copier.Copy(OwnPanel(i, L::kW), static_cast<const T*>(in.w));
    copier.Copy(OwnPanel(i, L::kZ), static_cast<const T*>(in.z));
    copier.Copy(OwnPanel(i, L::kX), static_cast<const T*>(in.x));
    CommitCopies();
  }
  // Each thread converts the pieces of x that it has copied: x is used as it is.
  __device__ void ConvertValues(int i) const {
    ConvertOwnPieces<T, kPanelThreads>(memory + (OwnPanel(i, L::kX) - shared));
  }

  __device__ void LoadParameters() const {
    if constexpr (kConstant)
      LoadConstantDecays<N>(in, split.Head() * N, reinterpret_cast<float*>(memory + L::kConstant));
  }

  __device__ void LoadState(State& state) const {
    if (split.order == 0 && in.start != nullptr)
      Tiles::Load(in.start + split.Head() * kStateSize<N>, state);
  }

  // Scales z of chunk i by the decays that follow in the recurrence, and stores the decay of the
  // whole chunk. A warp has 16 channels; `total` becomes the sums of their log2 decays. Rows that
  // do not reach the state after the chunk, since a segment starts in between, are cleared.
  __device__ void Scale(int i, const ChunkMarks& marks, float (&total)[2][4]) const {
    const ChunkDecays<T, kConstant> decays{OwnPanel(i, L::kW), Constant(), in.decay};
    const uint32_t z_panel = OwnPanel(i, L::kZ);
    const int tokens = split.Chunk(i, panel).tokens;
    const Ones sooner(kReverse, false, !kReverse), all(true, true, true);
    const bool clears = marks.starts != 0;
    const int begin = clears && !kReverse ? marks.LastStart() : 0;
    const int end = clears && kReverse ? marks.FirstStart() : kChunkTokens;
    const uint64_t present =
        (tokens < kChunkTokens ? (uint64_t{1} << tokens) - 1 : ~uint64_t{0}) & ~marks.absent;
#pragma unroll
    for (int step = 0; step < kChunkTiles; ++step) {
      const int tile = kReverse ? step : kChunkTiles - 1 - step;
      float sum[2][4];
      if constexpr (kConstant) {
        ForEachElement<2>([&](int i, int e) {
          const int token = 16 * tile + Lane() / 4 + e / 2 * 8;
          const float d = Constant()[16 * warp + 8 * i + 2 * (Lane() % 4) + e % 2];
          const uint64_t upto = (uint64_t{2} << token) - 1;
          sum[i][e] = d * static_cast<float>(__popcll(present & (kReverse ? upto >> 1 : ~upto)));
          total[i][e] = d * static_cast<float>(__popcll(present));
        });
      } else {
        uint32_t log_decays[kTerms][4];
        decays.Load(tile, warp, static_cast<uint32_t>(present >> 16 * tile) & kAllRows, log_decays);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][e] = total[i][e];
          const auto add = [&](float (&to)[4], const Ones& ones) {
            AddTerms<kTerms>(to, [&](int term, float (&of_term)[4]) {
              WarpMultiplyHalf(of_term, ones.a, log_decays[term][2 * i],
                               log_decays[term][2 * i + 1]);
            });
          };
          add(sum[i], sooner);
          add(total[i], all);
        }
      }
      Two<T> z[4];
      Left scaled[kTerms];
      LoadTile<T>(z_panel, tile, warp, z);
      ScaleTile<T>(z, [&](int i, int j) { return Exp2(sum[i][j]); }, scaled);
      if (clears) KeepRowsBetween(begin - 16 * tile, end - 16 * tile, scaled);
      StoreTile(z_panel, tile, warp, scaled);
    }
    StoreFactors(warp,
                 {{Exp2(total[0][0]), Exp2(total[0][1])}, {Exp2(total[1][0]), Exp2(total[1][1])}},
                 clears, FactorsOf(panel));
  }

  // S <- S diag(d) + x z^T over chunk i.
  __device__ void Advance(int i, State& s) const {
    State of_chunk;  // as of_tile
    State& sum = kTerms > 1 ? of_chunk : s;
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p) ScaleColumns(FactorsOf(p), s[p]);
    BeginProducts();
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p)
#pragma unroll
      for (int tile = 0; tile < kChunkTiles; ++tile)
        ForProducts<kTerms>([&](int a, int b) {
          MultiplyOrAdd(
              kTerms == 1 || tile + a + b > 0, sum[p], warp,
              KDownRows{OwnPanel(i, L::kX) + a * kPanelBytes, tile},
              KDownRows{Stage(i) + L::kZ + p * kPanelTermsBytes<T> + b * kPanelBytes, tile});
        });
    CommitProducts();
    WaitForProducts<0>();
#pragma unroll
    for (int p = 0; p < kPanels<N>; ++p) {
      Settle(sum[p]);
      if constexpr (kTerms > 1)
        ForEachElement<8>([&](int fragment, int e) { s[p][fragment][e] += sum[p][fragment][e]; });
    }
  }

  // Stores the decay of all tokens of the split, where it is asked for. `all` has its log2.
  __device__ void StoreFactor(bool transition, bool any_start, const float (&all)[2][4]) const {
    float* const factor = transition             ? TransitionOf(split.order) + kStateSize<N>
                          : in.factor != nullptr ? in.factor + split.Head() * N
                                                 : nullptr;
    if (factor != nullptr && Lane() < 4)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        factor[panel * kPanelCols + 16 * warp + e / 2 * 8 + 2 * Lane() + e % 2] =
            any_start ? 0.0f : Exp2(all[e / 2][e % 2]);
  }
};

template <typename T, int N, bool kConstant, bool kReverse, bool kMarked>
__global__ __launch_bounds__(kThreads<N>, kBlocksPerMultiprocessor<T, N>) void StateKernel(
    const __grid_constant__ Scan in) {
  using Tiles = StateAccumulator<N>;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const auto wait_for_all = [](StateBarrier) { __syncthreads(); };
  const bool transition = in.end == nullptr;
  const SplitOfBlock<N, kReverse> split(in, in.splits, transition);
  if (split.None()) return;
  const StatePhases<T, N, kConstant, kReverse, kMarked> phases{
      in, memory, SharedAddress(memory), WarpOfPanel<N>(), PanelOfThread<N>(), split};

  ChunkMarks coming;
  if (split.chunks > 0) {
    coming = phases.MarksOf(0);
    phases.Load(0, coming.absent);
  }
  phases.LoadParameters();
  typename Tiles::State state = {};
  phases.LoadState(state);

  float all[2][4] = {};
  bool any_start = false;
#pragma unroll 1
  for (int i = 0; i < split.chunks; ++i) {
    const bool more = i + 1 < split.chunks;
    const ChunkMarks marks = coming;
    if (more) coming = phases.MarksOf(i + 1);
    WaitForCopies<0>();
    phases.ConvertValues(i);
    wait_for_all(kCopied);
    if (more) phases.Load(i + 1, coming.absent);
    float total[2][4] = {};
    phases.Scale(i, marks, total);
    any_start |= marks.starts != 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) all[e / 4][e % 4] += total[e / 4][e % 4];
    PublishOperands();
    wait_for_all(kChunkScaled);
    phases.Advance(i, state);
  }
  Tiles::Store(
      state, transition ? phases.TransitionOf(split.order) : in.end + split.Head() * kStateSize<N>);
  phases.StoreFactor(transition, any_start, all);
}

// Turns the transitions of the splits of a head into the states at their ends: S_i = S_{i-1}
// diag(F_i) + D_i, where S_i takes the place of D_i. The first split has started from the initial
// state, so its D_0 is S_0 already. A thread has one element of the state.
constexpr int kCombineThreads = 256;

template <int N, bool kReverse>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(Splits splits, Sequences sequences,
                                                                 int64_t tokens, int64_t heads) {
  const int64_t sequence = splits.SequenceWithTransitions(sequences, heads);
  if (sequence < 0) return;
  const int64_t head = sequence * heads + blockIdx.x % heads;
  const Span span = sequences(sequence, tokens);
  const auto transition_of = [&](int64_t order) {
    return splits.Transition<kReverse>(head, heads, span, order);
  };
  const int64_t count = splits.Count(span.Chunks());
  if (count <= 2) return;
  const int at = blockIdx.y * kCombineThreads + threadIdx.x;
  float sum = transition_of(0)[at];
#pragma unroll 4
  for (int order = 1; order < count - 1; ++order) {
    float* const transition = transition_of(order);
    float& d = transition[at];
    sum = fmaf(sum, transition[kStateSize<N> + at % N], d);
    d = sum;
  }
}

template <typename T, int N, bool kConstant, bool kReverse>
cudaError_t ScanStates(cudaStream_t stream, const Scan& scan, const Grid& blocks) {
  return ForMarksOf<T>(scan.marks, [&](auto marked) {
    return Launch(StateKernel<T, N, kConstant, kReverse, marked()>, blocks, kThreads<N>,
                  StateLayout<T, N>::kBytes, stream, scan);
  });
}

template <typename T, int N, bool kConstant, bool kReverse>
cudaError_t ScanOutputs(cudaStream_t stream, Scan scan, bool one_stage = false) {
  using L = OutputLayout<T, N>;
  scan.key_stride = one_stage ? 0 : L::kNextK - L::kK;
  return ForMarksOf<T>(scan.marks, [&](auto marked) {
    return Launch(OutputKernel<T, N, kConstant, kReverse, marked()>,
                  scan.splits.Blocks(scan.dims.batch, scan.dims.heads), kThreads<N>,
                  one_stage ? L::kLeastBytes : L::kBytes, stream, scan);
  });
}

// The state at the start of each split.
template <typename T, int N, bool kConstant, bool kReverse>
cudaError_t FindStarts(cudaStream_t stream, Scan scan) {
  const Splits& splits = scan.splits;
  const int64_t batch = scan.dims.batch, heads = scan.dims.heads;
  if (splits.count == 1) return cudaSuccess;
  scan.end = nullptr;
  const cudaError_t error =
      ScanStates<T, N, kConstant, kReverse>(stream, scan, splits.TransitionBlocks(batch, heads));
  if (error != cudaSuccess || splits.count == 2) return error;
  const Grid blocks(splits.HeadsWithTransitions(batch, heads), kStateSize<N> / kCombineThreads);
  return Launch(CombineKernel<N, kReverse>, blocks, kCombineThreads, 0, stream, splits,
                scan.sequences, scan.dims.tokens, heads);
}

template <typename T, int N>
int64_t SharedMemoryOf(Pass pass) {
  using L = OutputLayout<T, N>;
  const int64_t states = StateLayout<T, N>::kBytes;
  if (pass == Pass::kForward) return std::max<int64_t>(states, L::kLeastBytes);
  return pass == Pass::kBackward && kPanels<N> > 1 ? std::max<int64_t>(states, L::kBytes) : states;
}

}  // namespace

int64_t Wkv6ScanSharedMemory(Pass pass, Dtype dtype, int64_t head_size) {
  using Half = __nv_bfloat16;  // float16 takes as much
  if (dtype == Dtype::kF32) return SharedMemoryOf<float, 64>(pass);
  return head_size == 64 ? SharedMemoryOf<Half, 64>(pass) : SharedMemoryOf<Half, 128>(pass);
}

cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Splits& splits,
                     const Device& device) {
  return ForKinds(call, [&](auto zero, auto size, auto constant) {
    using T = decltype(zero);
    Scan scan{call, call.v, call.k, call.initial_state, call.final_state};
    scan.saved = call.states, scan.splits = splits, scan.y = call.y;
    const cudaError_t error = FindStarts<T, size(), constant(), false>(stream, scan);
    if (error != cudaSuccess) return error;
    const bool one_stage = OutputLayout<T, size()>::kBytes > device.shared_memory;
    return ScanOutputs<T, size(), constant(), false>(stream, scan, one_stage);
  });
}

cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call, const Splits& splits,
                            uint4* gradients) {
  return ForKinds(call, [&](auto zero, auto size, auto constant) {
    using T = decltype(zero);
    Scan scan{call, call.dy, call.r, call.dfinal_state, call.dinitial_state};
    scan.saved = gradients, scan.splits = splits, scan.y = call.dv;
    cudaError_t error = FindStarts<T, size(), constant(), true>(stream, scan);
    if constexpr (kPanels<size()> > 1)
      if (error == cudaSuccess) error = ScanOutputs<T, size(), constant(), true>(stream, scan);
    return error;
  });
}

cudaError_t RunTransition(cudaStream_t stream, const Wkv6TransitionCall& call) {
  return ForKinds(call, [&](auto zero, auto size, auto constant) {
    Scan scan{call, call.v, call.k, nullptr, call.added, nullptr, kOneSplit};
    scan.factor = call.factor;
    return ScanStates<decltype(zero), size(), constant(), false>(
        stream, scan, kOneSplit.Blocks(call.dims.batch, call.dims.heads));
  });
}

cudaError_t RunReverseTransition(cudaStream_t stream, const Wkv6BackwardCall& call) {
  return ForKinds(call, [&](auto zero, auto size, auto constant) {
    return ScanStates<decltype(zero), size(), constant(), true>(
        stream, {call, call.dy, call.r, call.dfinal_state, call.dinitial_state, nullptr, kOneSplit},
        kOneSplit.Blocks(call.dims.batch, call.dims.heads));
  });
}

}  // namespace rwkv_jax::cuda
