// WKV6 on matrix units, from the first token of a sequence to the last: the forward pass; and from
// the last to the first: the gradient of the state. A thread block has one head, or one head of one
// split of a sequence, and takes a chunk of 64 tokens at a time. wkv6/decays.cuh has the equations
// and their sources.
//
// If a sequence is split, three kernels run one after another:
//
//   StateKernel    for each split but the last one in the order of the recurrence: its transition, that is
//                  what its tokens do to a state, S <- S diag(F) + D
//   CombineKernel  from the transitions, the state at the end of each of these splits
//   ForwardKernel  for each split: y, the saved states and the final state; or StateKernel again for the
//                  gradient of the state, which needs no other result of the forward pass
//
// Both scans are pipelines with one warpgroup. The prologue starts the copies of the first chunk;
// the main loop copies the next chunk to shared memory while it computes the present one.
#include <algorithm>

#include "wkv6/decays.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 128;  // one warpgroup, which has the 64 rows of a state
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kStateSize = kHeadSize * kHeadSize;

// The head and the split that a thread block has.
template <bool kReverse>
struct SplitOfBlock {
  int64_t sequence, heads;
  unsigned own_head;  // of the sequence
  Span span;          // the tokens of the sequence
  int splits,
      order;  // the number of splits, and the place of this one in the order of the recurrence
  int64_t first_chunk;
  int chunks;

  __device__ SplitOfBlock(const Wkv6Call& call, const Splits& all, bool transition)
      : SplitOfBlock(call, all,
                     all.WorkOfBlock<kReverse>(call.sequences, call.dims.tokens, call.dims.heads,
                                               transition)) {}
  __device__ SplitOfBlock(const Wkv6Call& call, const Splits& all, const BlockWork& work)
      : sequence(work.turn.sequence),
        heads(call.dims.heads),
        own_head(static_cast<unsigned>(blockIdx.x % call.dims.heads)),
        span(work.turn.span),
        splits(static_cast<int>(all.Count(span.Chunks()))),
        order(
            static_cast<int>(kReverse && work.split >= 0 ? splits - 1 - work.split : work.split)) {
    const int64_t most = all.ChunksPerSplit(span.Chunks());
    first_chunk = work.split * most;
    const int64_t left = span.Chunks() - first_chunk;
    chunks = static_cast<int>(left < 0 ? 0 : left < most ? left : most);
  }

  // Whether there is no split for this block.
  __device__ bool None() const { return order < 0; }
  __device__ bool Last() const { return order == splits - 1; }
  // The head in [S, H].
  __device__ int64_t Head() const { return sequence * heads + own_head; }
  // Chunk i of this split in arrays [B, T, H, 64].
  __device__ ChunkCopier<kThreads> Chunk(int i, uint64_t absent = 0) const {
    const int64_t token = (first_chunk + i) * kChunkTokens, left = span.tokens - token;
    return {((span.first_token + token) * heads + own_head) * kHeadSize,
            static_cast<int>(heads) * kHeadSize,
            static_cast<int>(left < kChunkTokens ? left : kChunkTokens), absent};
  }
  // Chunk i of this split in [B, N, H].
  __device__ int64_t SavedState(int i) const {
    return (span.first_chunk + first_chunk + i) * heads + own_head;
  }
  template <bool kMarked>
  __device__ ChunkMarks MarksOf(int i, const Marks& marks) const {
    return kMarked ? ChunkMarks(marks, sequence, first_chunk + i) : ChunkMarks();
  }
};

// Byte offsets in shared memory of the forward pass. r and k have two stages of the pipeline.
struct ForwardLayout {
  static constexpr int kR = 0;                     // r, then Rt
  static constexpr int kK = kR + 2 * kPanelBytes;  // k, then Kh
  static constexpr int kV = kK + 2 * kPanelBytes;  // v, then y
  static constexpr int kW = kV + kPanelBytes;
  static constexpr int kA = kW + kPanelBytes;                     // packed, a matrix for each tile
  static constexpr int kFactors = kA + kChunkTiles * kTileBytes;  // exp(G_L) of each tile
  static constexpr int kU = kFactors + kChunkTiles * kFactorFloats * 4;  // bfloat16 [64 channels]
  static constexpr int kConstant = kU + kHeadSize * 2;                   // float [64 channels]
  static constexpr int kBytes = kConstant + kHeadSize * 4;
};

// The barriers of ForwardKernel for each chunk, each a __syncthreads; the name is for the reader.
//
//   barrier         threads wait until all others have...    because next they...
//   kKeysCopied     copied r, k and w of the chunk           scale tiles that others have copied
//   kScaled         scaled their tiles, and copied v         multiply the scaled operands; start to copy
//                                                            the next w, and r and k to the other stage
//   kOutputsStaged  put y in the place of v, finished with   store y as whole rows; scale the next chunk
//                   Rt, Kh, A and the factors
enum ForwardBarrier { kKeysCopied, kScaled, kOutputsStaged };

// The phases of the forward pass. Each phase runs in the registers of the caller: functions are
// inlined.
template <typename T, bool kConstant, bool kMarked>
struct ForwardPhases {
  using L = ForwardLayout;

  const Wkv6ForwardCall& call;
  const Splits& splits;
  unsigned char* const memory;
  const uint32_t shared;  // the address of `memory`
  const int warp;
  const SplitOfBlock<false> split;

  __device__ float* Floats(int at) const { return reinterpret_cast<float*>(memory + at); }
  // Pairs of bfloat16.
  __device__ uint32_t* Bonus() const { return reinterpret_cast<uint32_t*>(memory + L::kU); }
  __device__ float* FactorsOf(int tile) const { return Floats(L::kFactors) + tile * kFactorFloats; }
  __device__ uint32_t ReceptancePanel(int i) const { return shared + L::kR + i % 2 * kPanelBytes; }
  __device__ uint32_t KeyPanel(int i) const { return shared + L::kK + i % 2 * kPanelBytes; }
  __device__ uint64_t Absent(int i) const {
    return split.template MarksOf<kMarked>(i, call.marks).absent;
  }

  // Start to copy chunk i; each is one group of copies.
  __device__ void LoadKeys(int i, uint64_t absent) const {
    const auto copier = split.Chunk(i, absent);
    if constexpr (!kConstant) copier.Copy(shared + L::kW, call.w);
    copier.Copy(ReceptancePanel(i), call.r);
    copier.Copy(KeyPanel(i), call.k);
    CommitCopies();
  }
  __device__ void LoadValues(int i, uint64_t absent) const {
    split.Chunk(i, absent).Copy(shared + L::kV, call.v);
    CommitCopies();
  }

  // Brings u, and the decay if all tokens have the same.
  __device__ void LoadParameters() const {
    if constexpr (kConstant) LoadConstantDecays(call, split.Head(), Floats(L::kConstant));
    if (threadIdx.x < kHeadSize / 2) {
      const float2 pair =
          reinterpret_cast<const float2*>(call.u + split.Head() * kHeadSize)[threadIdx.x];
      Bonus()[threadIdx.x] = Bf16::Round(pair.x, pair.y);
    }
  }

  __device__ void LoadState(Tiles::State& state) const {
    Tiles::Load(split.order == 0 ? call.initial_state + split.Head() * kStateSize
                                 : splits.Transition<false>(split.Head(), split.heads, split.span,
                                                            split.order - 1),
                state);
  }

  // Replaces r and k of a tile of tokens by Rt and Kh, and leaves A and exp(G_L). Each warp has the
  // tile of its number.
  __device__ void ScaleOperands(int i, const ChunkCopier<kThreads>& chunk, uint32_t word) const {
    const int64_t first = chunk.first + static_cast<int64_t>(kTileTokens * warp) * chunk.stride;
    const RawTile<T> raw{static_cast<const T*>(call.r) + first,
                         static_cast<const T*>(call.k) + first, chunk.stride,
                         RowMarks(word, chunk.tokens - kTileTokens * warp)};
    const ChunkDecays<T, kConstant> decays{shared + L::kW, Floats(L::kConstant), call.decay};
    const uint32_t r_panel = ReceptancePanel(i), k_panel = KeyPanel(i);
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
      StoreFactors(column, factor, clears, FactorsOf(warp));

      uint32_t r[4], k[4], e[4], x[4];
      LoadMatrices(TileAddress(r_panel, 16 * warp, column), r);
      LoadMatrices(TileAddress(k_panel, 16 * warp, column), k);
#pragma unroll
      for (int j = 0; j < 4; ++j) r[j] = ToBf16<T>(r[j]), k[j] = ToBf16<T>(k[j]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[j] = Bf16::Multiply(r[j], Bonus()[8 * column + j / 2 * 4 + Lane() % 4]);
      AddTokenProducts(bonus, x, k);
      Exponentials([&](int i, int j) { return total[i][j % 2] - sums.upto[i][j]; }, e);
      MultiplyPairs(k, e, x);
      if (clears) KeepRowsBetween(raw.marks.LastCleared(), kTileTokens, x);
      StoreMatrices(TileAddress(k_panel, 16 * warp, column), x);
      Exponentials([&](int i, int j) { return -sums.upto[i][j]; }, e);
      MultiplyPairs(k, e, k);
      Exponentials([&](int i, int j) { return sums.before[i][j]; }, e);
      MultiplyPairs(r, e, r);
      AddTokenProducts(a, r, k);
      if (clears) KeepRowsBetween(0, raw.marks.FirstCleared(), r);
      StoreMatrices(TileAddress(r_panel, 16 * warp, column), r);
    }
    if (__any_sync(~0u, far)) MultiplyByHalves(decays, warp, raw, 0, kColumnTiles, a);
    KeepLower(false, a);
    if (clears) KeepSegments(raw.marks, a);
    SetDiagonal(bonus, a);
    Left rounded;
    Round(a[0], a[1], rounded);
    StoreMatrices(PackedTileAddress(shared + L::kA + warp * kTileBytes), rounded);
  }

  // Stages Y = Rt S^T + A V of a tile, transposed, and moves the state on. A warp has 16 values as
  // rows.
  __device__ void OutputsAndState(int i, int tile, Accumulator<8>& s) const {
    const uint32_t values = shared + L::kV + tile * kTileStride;
    Left v, before[kColumnTiles];
    LoadLeftTransposed(values, 0, warp, v);
    RoundPanel(s, before);
    ScaleColumns(FactorsOf(tile), s);
    Accumulator<2> y;
    BeginProducts();
    Multiply<false>(y, v, PackedTiles{shared + L::kA + tile * kTileBytes});
#pragma unroll
    for (int column = 0; column < kColumnTiles; ++column)
      Multiply<true>(y, before[column],
                     KAlongRows{ReceptancePanel(i) + tile * kTileStride, column});
    CommitProducts();
    Multiply<true>(s, v, KDownRows{KeyPanel(i) + tile * kTileStride});
    CommitProducts();
    WaitForProducts<1>();
    Settle(y);
    // No other warp reads the values that y replaces.
    StoreTransposed(TileAddress(values, 0, warp),
                    {Pair<T>::Round(y[0][0], y[0][1]), Pair<T>::Round(y[1][0], y[1][1]),
                     Pair<T>::Round(y[0][2], y[0][3]), Pair<T>::Round(y[1][2], y[1][3])});
    Finish(s);
  }

  // Stores the pieces of y that lie where this thread will copy the values of the next chunk.
  __device__ void StoreOutputs(const ChunkCopier<kThreads>& chunk) const {
    chunk.ForEachPiece([&](uint32_t from, int64_t element, int row) {
      if (row < chunk.tokens)
        *reinterpret_cast<uint4*>(static_cast<T*>(call.y) + element) =
            *reinterpret_cast<const uint4*>(memory + L::kV + from);
    });
  }
};

template <typename T, bool kConstant, bool kMarked>
__global__ __launch_bounds__(kThreads, kBlocksPerMultiprocessor) void ForwardKernel(
    const __grid_constant__ Wkv6ForwardCall call, Splits splits) {
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const auto wait_for_all = [](ForwardBarrier) { __syncthreads(); };
  const int warp = Warp();
  const SplitOfBlock<false> split(call, splits, false);
  if (split.None()) return;
  const ForwardPhases<T, kConstant, kMarked> phases{call, splits, memory, SharedAddress(memory),
                                                    warp, split};

  if (split.chunks > 0) {
    const uint64_t absent = phases.Absent(0);
    phases.LoadKeys(0, absent);
    phases.LoadValues(0, absent);
  }
  phases.LoadParameters();
  Tiles::State state;
  phases.LoadState(state);

#pragma unroll 1
  for (int i = 0; i < split.chunks; ++i) {
    const ChunkCopier<kThreads> chunk = split.Chunk(i);
    const int64_t own_token = (split.first_chunk + i) * kChunkTokens + kTileTokens * phases.warp;
    const uint32_t word = kMarked ? call.marks.Word(split.sequence, own_token) : 0u;
    const uint64_t coming = i + 1 < split.chunks ? phases.Absent(i + 1) : 0u;
    WaitForCopies<1>();
    wait_for_all(kKeysCopied);
    phases.ScaleOperands(i, chunk, word);
    WaitForCopies<0>();
    ConvertOwnPieces<T, kThreads>(memory + ForwardLayout::kV);
    PublishOperands();
    wait_for_all(kScaled);
    if (i + 1 < split.chunks) phases.LoadKeys(i + 1, coming);
    if (call.states != nullptr)
      Tiles::StoreRounded(
          state, static_cast<uint4*>(call.states) + split.SavedState(i) * (kStateSize / 8));
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile) phases.OutputsAndState(i, tile, state[0]);
    wait_for_all(kOutputsStaged);
    phases.StoreOutputs(chunk);
    if (i + 1 < split.chunks) phases.LoadValues(i + 1, coming);
  }
  if (split.Last()) Tiles::Store(state, call.final_state + split.Head() * kStateSize);
}

// A recurrence S <- S diag(d) + x z^T without outputs: forwards it is the recurrence of the state,
// with x = v and z = k; backwards that of its gradient, dS <- dS diag(d) + dy r^T. A chunk is a
// single product, since z is scaled by the decays of the tokens that come after it in the
// recurrence, which are at most 1.
struct StateScan : Wkv6Call {
  const void *x, *z;
  const float* start;  // zeros if null
  float* end;          // if null, the transition of each split is stored in `splits`
  uint4* saved;        // if not null, gets the state before each chunk in bfloat16, [B, N, H, V, K]
  Splits splits;
  float* factor = nullptr;  // [B, H, K], if not null: gets the decay of all tokens together
};

// Byte offsets in shared memory: two stages of the pipeline with a panel each of x, z and w.
struct StateLayout {
  static constexpr int kX = 0;
  static constexpr int kZ = kPanelBytes;  // z, then z scaled
  static constexpr int kW = 2 * kPanelBytes;
  static constexpr int kStageBytes = 3 * kPanelBytes;
  static constexpr int kFactors = 2 * kStageBytes;
  static constexpr int kConstant = kFactors + kFactorFloats * 4;
  static constexpr int kBytes = kConstant + kHeadSize * 4;
};

// The barriers of StateKernel for each chunk, each a __syncthreads; the name is for the reader.
//
//   barrier        threads wait until all others have...    because next they...
//   kCopied        copied the chunk, and finished with      scale what others have copied; start to copy
//                  the chunk before it                      the next chunk to the other stage
//   kChunkScaled   scaled z and stored the factors          multiply x and z
enum StateBarrier { kCopied, kChunkScaled };

template <typename T, bool kConstant, bool kReverse, bool kMarked>
struct StatePhases {
  using L = StateLayout;

  const StateScan& in;
  unsigned char* const memory;
  const uint32_t shared;  // the address of `memory`
  const int warp;
  const SplitOfBlock<kReverse> split;

  __device__ float* Constant() const { return reinterpret_cast<float*>(memory + L::kConstant); }
  __device__ float* Factors() const { return reinterpret_cast<float*>(memory + L::kFactors); }
  // The place in the split of the chunk that is number i in the order of the recurrence.
  __device__ int Place(int i) const { return kReverse ? split.chunks - 1 - i : i; }
  __device__ uint32_t Stage(int i) const { return shared + i % 2 * L::kStageBytes; }
  __device__ ChunkMarks MarksOf(int i) const {
    return split.template MarksOf<kMarked>(Place(i), in.marks);
  }
  __device__ float* TransitionOf(int64_t order) const {
    return in.splits.Transition<kReverse>(split.Head(), split.heads, split.span, order);
  }

  // Starts to copy chunk i.
  __device__ void Load(int i, uint64_t absent) const {
    const auto copier = split.Chunk(Place(i), absent);
    if constexpr (!kConstant) copier.Copy(Stage(i) + L::kW, in.w);
    copier.Copy(Stage(i) + L::kZ, in.z);
    copier.Copy(Stage(i) + L::kX, in.x);
    CommitCopies();
  }

  __device__ void LoadParameters() const {
    if constexpr (kConstant) LoadConstantDecays(in, split.Head(), Constant());
  }

  __device__ void LoadState(bool transition, Tiles::State& state) const {
    if (split.order == 0 && in.start != nullptr)
      Tiles::Load(in.start + split.Head() * kStateSize, state);
    else if (split.order > 0 && !transition)
      Tiles::Load(TransitionOf(split.order - 1), state);
  }

  // Scales z of chunk i by the decays that follow in the recurrence, and stores the decay of the
  // whole chunk. A warp has 16 channels; `total` becomes the sums of their log2 decays. Rows that
  // do not reach the state after the chunk, since a segment starts in between, are cleared.
  __device__ void Scale(int i, const ChunkMarks& marks, float (&total)[2][4]) const {
    const ChunkDecays<T, kConstant> decays{Stage(i) + L::kW, Constant(), in.decay};
    const uint32_t z_panel = Stage(i) + L::kZ;
    const int tokens = split.Chunk(Place(i)).tokens;
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
        uint32_t log_decays[4];
        decays.Load(tile, warp, static_cast<uint32_t>(present >> 16 * tile) & kAllRows, log_decays);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][e] = total[i][e];
          WarpMultiplyHalf(sum[i], sooner.a, log_decays[2 * i], log_decays[2 * i + 1]);
          WarpMultiplyHalf(total[i], all.a, log_decays[2 * i], log_decays[2 * i + 1]);
        }
      }
      uint32_t z[4], e[4];
      LoadMatrices(TileAddress(z_panel, 16 * tile, warp), z);
#pragma unroll
      for (int j = 0; j < 4; ++j) z[j] = ToBf16<T>(z[j]);
      Exponentials([&](int i, int j) { return sum[i][j]; }, e);
      MultiplyPairs(z, e, z);
      if (clears) KeepRowsBetween(begin - 16 * tile, end - 16 * tile, z);
      StoreMatrices(TileAddress(z_panel, 16 * tile, warp), z);
    }
    StoreFactors(warp,
                 {{Exp2(total[0][0]), Exp2(total[0][1])}, {Exp2(total[1][0]), Exp2(total[1][1])}},
                 clears, Factors());
  }

  // S <- S diag(d) + x z^T over chunk i.
  __device__ void Advance(int i, Accumulator<8>& s) const {
    ScaleColumns(Factors(), s);
    BeginProducts();
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
      Multiply<true>(s, warp, KDownRows{Stage(i) + L::kX, tile}, KDownRows{Stage(i) + L::kZ, tile});
    CommitProducts();
    Finish(s);
  }

  // Stores the decay of all tokens of the split, where it is asked for. `all` has its log2.
  __device__ void StoreFactor(bool transition, bool any_start, const float (&all)[2][4]) const {
    float* const factor = transition             ? TransitionOf(split.order) + kStateSize
                          : in.factor != nullptr ? in.factor + split.Head() * kHeadSize
                                                 : nullptr;
    if (factor != nullptr && Lane() < 4)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        factor[16 * warp + e / 2 * 8 + 2 * Lane() + e % 2] =
            any_start ? 0.0f : Exp2(all[e / 2][e % 2]);
  }
};

template <typename T, bool kConstant, bool kReverse, bool kMarked>
__global__ __launch_bounds__(kThreads, kBlocksPerMultiprocessor) void StateKernel(
    const __grid_constant__ StateScan in) {
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const auto wait_for_all = [](StateBarrier) { __syncthreads(); };
  const bool transition = in.end == nullptr;
  const SplitOfBlock<kReverse> split(in, in.splits, transition);
  if (split.None()) return;
  const StatePhases<T, kConstant, kReverse, kMarked> phases{in, memory, SharedAddress(memory),
                                                            Warp(), split};

  ChunkMarks coming;
  if (split.chunks > 0) {
    coming = phases.MarksOf(0);
    phases.Load(0, coming.absent);
  }
  phases.LoadParameters();
  Tiles::State state = {};
  phases.LoadState(transition, state);

  float all[2][4] = {};
  bool any_start = false;
#pragma unroll 1
  for (int i = 0; i < split.chunks; ++i) {
    const bool more = i + 1 < split.chunks;
    const ChunkMarks marks = coming;
    if (more) coming = phases.MarksOf(i + 1);
    WaitForCopies<0>();
    ConvertOwnPieces<T, kThreads>(memory + (phases.Stage(i) - phases.shared) + StateLayout::kX);
    wait_for_all(kCopied);
    if (more) phases.Load(i + 1, coming.absent);
    float total[2][4] = {};
    phases.Scale(i, marks, total);
    any_start |= marks.starts != 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) all[e / 4][e % 4] += total[e / 4][e % 4];
    PublishOperands();
    wait_for_all(kChunkScaled);
    if (in.saved != nullptr)
      Tiles::StoreRounded(state, in.saved + split.SavedState(phases.Place(i)) * (kStateSize / 8));
    phases.Advance(i, state[0]);
  }
  if (transition)
    Tiles::Store(state, phases.TransitionOf(split.order));
  else if (split.Last())
    Tiles::Store(state, in.end + split.Head() * kStateSize);
  phases.StoreFactor(transition, any_start, all);
}

// Turns the transitions of the splits of a head into the states at their ends: S_i = S_{i-1}
// diag(F_i) + D_i, where S_i takes the place of D_i. The first split has started from the initial
// state, so its D_0 is S_0 already. A thread has one element of the state.
constexpr int kCombineThreads = 256;

template <bool kReverse>
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
    sum = fmaf(sum, transition[kStateSize + at % kHeadSize], d);
    d = sum;
  }
}

template <typename T, bool kConstant, bool kReverse>
cudaError_t ScanStates(cudaStream_t stream, const StateScan& scan, const Grid& blocks) {
  return ForMarks(scan.marks, [&](auto marked) {
    return Launch(StateKernel<T, kConstant, kReverse, marked()>, blocks, kThreads,
                  StateLayout::kBytes, stream, scan);
  });
}

// The state at the start of each split.
template <typename T, bool kConstant, bool kReverse>
cudaError_t FindStarts(cudaStream_t stream, StateScan scan) {
  const Splits& splits = scan.splits;
  const int64_t batch = scan.dims.batch, heads = scan.dims.heads;
  if (splits.count == 1) return cudaSuccess;
  scan.end = nullptr;
  scan.saved = nullptr;
  const cudaError_t error =
      ScanStates<T, kConstant, kReverse>(stream, scan, splits.TransitionBlocks(batch, heads));
  if (error != cudaSuccess || splits.count == 2) return error;
  const Grid blocks(splits.HeadsWithTransitions(batch, heads), kStateSize / kCombineThreads);
  return Launch(CombineKernel<kReverse>, blocks, kCombineThreads, 0, stream, splits, scan.sequences,
                scan.dims.tokens, heads);
}

}  // namespace

int64_t Wkv6ScanSharedMemory(Pass pass) {
  const int64_t states = StateLayout::kBytes, forward = ForwardLayout::kBytes;
  return pass == Pass::kForward ? std::max(states, forward) : states;
}

cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Splits& splits) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    const cudaError_t error = FindStarts<T, constant(), false>(
        stream, {call, call.v, call.k, call.initial_state, nullptr, nullptr, splits});
    if (error != cudaSuccess) return error;
    const Grid blocks = splits.Blocks(call.dims.batch, call.dims.heads);
    return ForMarks(call.marks, [&](auto marked) {
      return Launch(ForwardKernel<T, constant(), marked()>, blocks, kThreads, ForwardLayout::kBytes,
                    stream, call, splits);
    });
  });
}

cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call, const Splits& splits,
                            uint4* gradients) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    StateScan scan{call, call.dy, call.r, call.dfinal_state, call.dinitial_state};
    scan.saved = gradients, scan.splits = splits;
    const cudaError_t error = FindStarts<T, constant(), true>(stream, scan);
    if (error != cudaSuccess) return error;
    return ScanStates<T, constant(), true>(stream, scan,
                                           splits.Blocks(call.dims.batch, call.dims.heads));
  });
}

cudaError_t RunTransition(cudaStream_t stream, const Wkv6TransitionCall& call) {
  return ForKinds(call, [&](auto zero, auto constant) {
    return ScanStates<decltype(zero), constant(), false>(
        stream, {call, call.v, call.k, nullptr, call.added, nullptr, kOneSplit, call.factor},
        kOneSplit.Blocks(call.dims.batch, call.dims.heads));
  });
}

cudaError_t RunReverseTransition(cudaStream_t stream, const Wkv6BackwardCall& call) {
  return ForKinds(call, [&](auto zero, auto constant) {
    return ScanStates<decltype(zero), constant(), true>(
        stream, {call, call.dy, call.r, call.dfinal_state, call.dinitial_state, nullptr, kOneSplit},
        kOneSplit.Blocks(call.dims.batch, call.dims.heads));
  });
}

}  // namespace rwkv_jax::cuda
