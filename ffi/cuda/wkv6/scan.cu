// WKV6 on matrix units, from token to token: the forward pass, and the gradient of the state. One block of
// threads per head, or per head and split of its tokens; a frame of 64 tokens at a time.
#include <algorithm>

#include "wkv6/decays.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 128;  // a warpgroup has the 64 rows of a state
constexpr int kBlocksPerMultiprocessor = 4;

template <typename T>
struct Forward {
  const T *r, *k, *v;
  const void* w;
  const float* u;
  int64_t tokens, heads;
  Decay decay;
  Marks marks;
  Sequences sequences;
  const float* start;
  float* end;
  T* y;
  uint4* states;  // [B, frames, H, V, K] of bfloat16, or null
  Splits splits;
};

// The frames of a split.
template <bool kReverse>
struct Run {
  int64_t head, heads, batch;
  Span span;
  int splits, order;  // of the sequence, and which this is, as they come in the recurrence
  int64_t first_frame;
  int count;  // frames

  // Of this block.
  template <typename Scan>
  __device__ explicit Run(const Scan& in, bool summary = false)
      : Run(in, in.splits.template WorkOfBlock<kReverse>(in.sequences, in.tokens, in.heads,
                                                            summary)) {}
  template <typename Scan>
  __device__ Run(const Scan& in, const Piece& piece)
      : head(piece.turn.sequence * in.heads + blockIdx.x % in.heads),
        heads(in.heads),
        batch(piece.turn.sequence),
        span(piece.turn.span),
        splits(static_cast<int>(in.splits.Count(span.Chunks()))),
        order(static_cast<int>(kReverse && piece.split >= 0 ? splits - 1 - piece.split
                                                              : piece.split)) {
    const int64_t most = in.splits.ChunksPerSplit(span.Chunks());
    first_frame = piece.split * most;
    const int64_t left = span.Chunks() - first_frame;
    count = static_cast<int>(left < 0 ? 0 : left < most ? left : most);
  }

  // Of frame i of this split.
  __device__ ChunkCopier<kThreads> Frame(int i, uint64_t absent = 0) const {
    const int64_t token = (first_frame + i) * kChunkTokens, left = span.tokens - token;
    return {((span.first_token + token) * heads + head - batch * heads) * kHeadSize,
            static_cast<int>(heads) * kHeadSize, static_cast<int>(left < kChunkTokens ? left : kChunkTokens),
            absent};
  }
  // Its place in [B, frames, H].
  __device__ int64_t Place(int i) const {
    return head + (span.first_chunk + first_frame + i - batch) * heads;
  }
  template <bool kMarked>
  __device__ ChunkMarks MarksOf(int i, const Marks& marks) const {
    return kMarked ? ChunkMarks(marks, batch, first_frame + i) : ChunkMarks();
  }
};

struct ForwardLayout {
  // r becomes Rt, k becomes Kh, and v becomes y.
  static constexpr int kR = 0;
  static constexpr int kK = kR + 2 * kPanelBytes;
  static constexpr int kV = kK + 2 * kPanelBytes;
  static constexpr int kW = kV + kPanelBytes;
  static constexpr int kA = kW + kPanelBytes;
  static constexpr int kFactors = kA + kChunkTiles * kTileBytes;
  static constexpr int kU = kFactors + kChunkTiles * kFactorFloats * 4;
  static constexpr int kConstant = kU + kHeadSize * 2;
  static constexpr int kBytes = kConstant + kHeadSize * 4;
};

// Scales the operands of a chunk in place, and leaves A and exp(G_L).
template <typename T, bool kConstant>
__device__ void PrepareChunk(const ChunkDecays<T, kConstant>& decays, int chunk, uint32_t r_tile,
                             uint32_t k_tile, const uint32_t* u, const RawTile<T>& raw,
                             uint32_t a_block, float* factors) {
  Accumulator<2> a = {}, bonus = {};
  bool far = false;
  const bool clears = raw.marks.clears != 0;
#pragma unroll
  for (int block = 0; block < kColumnTiles; ++block) {
    DecaySums sums;
    SumByToken(decays, chunk, block, raw.marks.present, sums);
    float total[2][2];
    LastRow(sums, total);
#pragma unroll
    for (int i = 0; i < 4; ++i) far |= !(total[i / 2][i % 2] >= -kMaxTileLog2);
    const float factor[2][2] = {{Exp2(total[0][0]), Exp2(total[0][1])},
                                {Exp2(total[1][0]), Exp2(total[1][1])}};
    StoreFactors(block, factor, clears, factors);

    uint32_t r[4], k[4], e[4], x[4];
    LoadMatrices(TileAddress(r_tile, 16 * chunk, block), r);
    LoadMatrices(TileAddress(k_tile, 16 * chunk, block), k);
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = ToBf16<T>(r[i]), k[i] = ToBf16<T>(k[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = Bf16::Multiply(r[i], u[8 * block + i / 2 * 4 + Lane() % 4]);
    AddTokenProducts(bonus, x, k);
    Exponentials([&](int i, int j) { return total[i][j % 2] - sums.upto[i][j]; }, e);
    MultiplyPairs(k, e, x);
    if (clears) KeepRowsBetween(raw.marks.LastCleared(), kTileTokens, x);
    StoreMatrices(TileAddress(k_tile, 16 * chunk, block), x);
    Exponentials([&](int i, int j) { return -sums.upto[i][j]; }, e);
    MultiplyPairs(k, e, k);
    Exponentials([&](int i, int j) { return sums.before[i][j]; }, e);
    MultiplyPairs(r, e, r);
    AddTokenProducts(a, r, k);
    if (clears) KeepRowsBetween(0, raw.marks.FirstCleared(), r);
    StoreMatrices(TileAddress(r_tile, 16 * chunk, block), r);
  }
  if (__any_sync(~0u, far)) MultiplyByHalves(decays, chunk, raw, 0, kColumnTiles, a);
  KeepLower(false, a);
  if (clears) KeepSegments(raw.marks, a);
  SetDiagonal(bonus, a);
  Left rounded;
  Round(a[0], a[1], rounded);
  StoreMatrices(PackedTileAddress(a_block), rounded);
}

template <typename T, bool kConstant, bool kMarked>
__global__ __launch_bounds__(kThreads, kBlocksPerMultiprocessor) void ForwardKernel(
    const __grid_constant__ Forward<T> in) {
  using L = ForwardLayout;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp();
  const Run<false> run(in);
  if (run.order < 0) return;
  const auto frame = [&](int i, uint64_t absent = 0) { return run.Frame(i, absent); };
  const auto r_tile = [&](int i) { return shared + L::kR + i % 2 * kPanelBytes; };
  const auto k_tile = [&](int i) { return shared + L::kK + i % 2 * kPanelBytes; };
  const auto copy_keys = [&](int i, uint64_t absent) {
    const auto copier = frame(i, absent);
    if constexpr (!kConstant) copier.Copy(shared + L::kW, static_cast<const T*>(in.w));
    copier.Copy(r_tile(i), in.r);
    copier.Copy(k_tile(i), in.k);
    CommitCopies();
  };
  const auto copy_values = [&](int i, uint64_t absent) {
    frame(i, absent).Copy(shared + L::kV, in.v);
    CommitCopies();
  };
  if (run.count > 0) {
    const uint64_t absent = run.template MarksOf<kMarked>(0, in.marks).absent;
    copy_keys(0, absent);
    copy_values(0, absent);
  }

  float* const constant = reinterpret_cast<float*>(memory + L::kConstant);
  uint32_t* const u = reinterpret_cast<uint32_t*>(memory + L::kU);
  if constexpr (kConstant)
    LoadConstantDecays(static_cast<const float*>(in.w) + run.head * kHeadSize, in.decay, constant);
  if (threadIdx.x < kHeadSize / 2) {
    const float2 pair = reinterpret_cast<const float2*>(in.u + run.head * kHeadSize)[threadIdx.x];
    u[threadIdx.x] = Bf16::Round(pair.x, pair.y);
  }
  float* const factors = reinterpret_cast<float*>(memory + L::kFactors);
  const ChunkDecays<T, kConstant> decays{shared + L::kW, constant, in.decay};

  Tiles::State state;
  Accumulator<8>& s = state[0];
  constexpr int kState = kHeadSize * kHeadSize;
  Tiles::Load(run.order == 0 ? in.start + run.head * kState
                             : in.splits.template Summary<false>(run.head, in.heads, run.span,
                                                                   run.order - 1),
              state);
#pragma unroll 1
  for (int i = 0; i < run.count; ++i) {
    const ChunkCopier<kThreads> now = frame(i);
    const int64_t own_token = (run.first_frame + i) * kChunkTokens + kTileTokens * warp;
    const uint32_t word = kMarked ? in.marks.Word(run.batch, own_token) : 0u;
    const uint64_t coming =
        i + 1 < run.count ? run.template MarksOf<kMarked>(i + 1, in.marks).absent : 0u;
    WaitForCopies<1>();
    __syncthreads();
    {
      const int64_t first = now.first + static_cast<int64_t>(kTileTokens * warp) * now.stride;
      const RawTile<T> raw{in.r + first, in.k + first, now.stride,
                            RowMarks(word, now.tokens - kTileTokens * warp)};
      PrepareChunk(decays, warp, r_tile(i), k_tile(i), u, raw, shared + L::kA + warp * kTileBytes,
                   factors + warp * kFactorFloats);
    }
    WaitForCopies<0>();
    ConvertOwnPieces<T, kThreads>(memory + L::kV);
    PublishOperands();
    __syncthreads();
    if (i + 1 < run.count) copy_keys(i + 1, coming);

    if (in.states != nullptr) Tiles::StoreRounded(state, in.states + run.Place(i) * (kState / 8));
#pragma unroll
    for (int chunk = 0; chunk < kChunkTiles; ++chunk) {
      const uint32_t values = shared + L::kV + chunk * kTileStride;
      Left v, before[kColumnTiles];
      LoadLeftTransposed(values, 0, warp, v);
      RoundPanel(s, before);
      ScaleColumns(factors + chunk * kFactorFloats, s);
      Accumulator<2> y;
      BeginProducts();
      Multiply<false>(y, v, PackedTiles{shared + L::kA + chunk * kTileBytes});
#pragma unroll
      for (int block = 0; block < kColumnTiles; ++block)
        Multiply<true>(y, before[block], KAlongRows{r_tile(i) + chunk * kTileStride, block});
      CommitProducts();
      Multiply<true>(s, v, KDownRows{k_tile(i) + chunk * kTileStride});
      CommitProducts();
      WaitForProducts<1>();
      Settle(y);
      // To where this warp alone has read.
      StoreTransposed(TileAddress(values, 0, warp),
                      {Pair<T>::Round(y[0][0], y[0][1]), Pair<T>::Round(y[1][0], y[1][1]),
                       Pair<T>::Round(y[0][2], y[0][3]), Pair<T>::Round(y[1][2], y[1][3])});
      WaitForProducts<0>();
      Settle(s);
    }
    __syncthreads();
    now.ForEachPiece([&](uint32_t from, int64_t element, int row) {
      if (row < now.tokens)
        *reinterpret_cast<uint4*>(in.y + element) =
            *reinterpret_cast<const uint4*>(memory + L::kV + from);
    });
    if (i + 1 < run.count) copy_values(i + 1, coming);
  }
  if (run.order == run.splits - 1) Tiles::Store(state, in.end + run.head * kState);
}

// Of a recurrence S <- S diag(d) + x z^T without outputs: forwards that of the state, backwards that of
// its gradient, dS <- dS diag(d) + dy r^T. A frame is a single step, since z is scaled by the decays of
// the tokens that come after it in the recurrence, which are at most 1.
template <typename T>
struct StateScan {
  const T *x, *z;
  const void* w;
  int64_t tokens, heads;
  Decay decay;
  Marks marks;
  Sequences sequences;
  const float* start;  // zeros if null
  float* end;          // null: `splits` get what each does to a state
  uint4* gradients;    // if not null, get the state before each frame, as the saved states
  Splits splits;
  float* factor = nullptr;  // [B, H, K], if not null: the decay of all tokens together
};

struct StateLayout {
  static constexpr int kX = 0;
  static constexpr int kZ = kPanelBytes;
  static constexpr int kW = 2 * kPanelBytes;
  static constexpr int kSlot = 3 * kPanelBytes;
  static constexpr int kFactors = 2 * kSlot;
  static constexpr int kConstant = kFactors + kFactorFloats * 4;
  static constexpr int kBytes = kConstant + kHeadSize * 4;
};

// Scales the 16 channels of a frame that are `warp`'s; `total` becomes the sums of their log2 decays. Rows
// that are cut off from the state after the frame in the recurrence are cleared.
template <typename T, bool kConstant, bool kReverse>
__device__ void ScaleFrame(const ChunkDecays<T, kConstant>& decays, int warp, uint32_t z_tile,
                           int tokens, const ChunkMarks& marks, float (&total)[2][4]) {
  const Ones sooner(kReverse, false, !kReverse), all(true, true, true);
  const bool clears = marks.starts != 0;
  const int begin = clears && !kReverse ? marks.LastStart() : 0;
  const int end = clears && kReverse ? marks.FirstStart() : kChunkTokens;
  const uint64_t there =
      (tokens < kChunkTokens ? (uint64_t{1} << tokens) - 1 : ~uint64_t{0}) & ~marks.absent;
#pragma unroll
  for (int step = 0; step < kChunkTiles; ++step) {
    const int chunk = kReverse ? step : kChunkTiles - 1 - step;
    float sum[2][4];
    if constexpr (kConstant) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int token = 16 * chunk + Lane() / 4 + e / 2 * 8;
          const float d = decays.constant[16 * warp + 8 * i + 2 * (Lane() % 4) + e % 2];
          const uint64_t upto = (uint64_t{2} << token) - 1;
          sum[i][e] = d * static_cast<float>(__popcll(there & (kReverse ? upto >> 1 : ~upto)));
          total[i][e] = d * static_cast<float>(__popcll(there));
        }
    } else {
      uint32_t log_decays[4];
      decays.Load(chunk, warp, static_cast<uint32_t>(there >> 16 * chunk) & kAllRows, log_decays);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][e] = total[i][e];
        WarpMultiplyHalf(sum[i], sooner.a, log_decays[2 * i], log_decays[2 * i + 1]);
        WarpMultiplyHalf(total[i], all.a, log_decays[2 * i], log_decays[2 * i + 1]);
      }
    }
    uint32_t z[4], e[4];
    LoadMatrices(TileAddress(z_tile, 16 * chunk, warp), z);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = ToBf16<T>(z[i]);
    Exponentials([&](int i, int j) { return sum[i][j]; }, e);
    MultiplyPairs(z, e, z);
    if (clears) KeepRowsBetween(begin - 16 * chunk, end - 16 * chunk, z);
    StoreMatrices(TileAddress(z_tile, 16 * chunk, warp), z);
  }
}

template <typename T, bool kConstant, bool kReverse, bool kMarked>
__global__ __launch_bounds__(kThreads, kBlocksPerMultiprocessor) void StateKernel(
    const __grid_constant__ StateScan<T> in) {
  using L = StateLayout;
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp();
  const bool summary = in.end == nullptr;
  const Run<kReverse> run(in, summary);
  if (run.order < 0) return;
  // Frame i as it comes in the recurrence.
  const auto place = [&](int i) { return kReverse ? run.count - 1 - i : i; };
  const auto marks_of = [&](int i) { return run.template MarksOf<kMarked>(place(i), in.marks); };
  const auto frame = [&](int i, uint64_t absent = 0) {
    return run.Frame(place(i), absent);
  };
  const auto slot = [&](int i) { return shared + i % 2 * L::kSlot; };
  const auto copy = [&](int i, uint64_t absent) {
    const auto copier = frame(i, absent);
    if constexpr (!kConstant) copier.Copy(slot(i) + L::kW, static_cast<const T*>(in.w));
    copier.Copy(slot(i) + L::kZ, in.z);
    copier.Copy(slot(i) + L::kX, in.x);
    CommitCopies();
  };
  ChunkMarks coming;
  if (run.count > 0) {
    coming = marks_of(0);
    copy(0, coming.absent);
  }
  float* const constant = reinterpret_cast<float*>(memory + L::kConstant);
  if constexpr (kConstant)
    LoadConstantDecays(static_cast<const float*>(in.w) + run.head * kHeadSize, in.decay, constant);
  float* const factors = reinterpret_cast<float*>(memory + L::kFactors);

  Tiles::State state = {};
  Accumulator<8>& s = state[0];
  constexpr int kState = kHeadSize * kHeadSize;
  const auto summary_of = [&](int64_t order) {
    return in.splits.template Summary<kReverse>(run.head, in.heads, run.span, order);
  };
  if (run.order == 0 && in.start != nullptr)
    Tiles::Load(in.start + run.head * kState, state);
  else if (run.order > 0 && !summary)
    Tiles::Load(summary_of(run.order - 1), state);
  float all[2][4] = {};
  bool any_start = false;
#pragma unroll 1
  for (int i = 0; i < run.count; ++i) {
    const ChunkMarks marks = coming;
    if (i + 1 < run.count) coming = marks_of(i + 1);
    WaitForCopies<0>();
    ConvertOwnPieces<T, kThreads>(memory + (slot(i) - shared) + L::kX);
    __syncthreads();
    if (i + 1 < run.count) copy(i + 1, coming.absent);
    float total[2][4] = {};
    ScaleFrame<T, kConstant, kReverse>({slot(i) + L::kW, constant, in.decay}, warp,
                                       slot(i) + L::kZ, frame(i).tokens, marks, total);
    any_start |= marks.starts != 0;
    StoreFactors(warp, {{Exp2(total[0][0]), Exp2(total[0][1])}, {Exp2(total[1][0]), Exp2(total[1][1])}},
                 marks.starts != 0, factors);
#pragma unroll
    for (int e = 0; e < 8; ++e) all[e / 4][e % 4] += total[e / 4][e % 4];
    PublishOperands();
    __syncthreads();
    if (in.gradients != nullptr)
      Tiles::StoreRounded(state, in.gradients + run.Place(place(i)) * (kState / 8));
    ScaleColumns(factors, s);
    BeginProducts();
#pragma unroll
    for (int chunk = 0; chunk < kChunkTiles; ++chunk)
      Multiply<true>(s, warp, KDownRows{slot(i) + L::kX, chunk}, KDownRows{slot(i) + L::kZ, chunk});
    CommitProducts();
    WaitForProducts<0>();
    Settle(s);
  }
  if (summary)
    Tiles::Store(state, summary_of(run.order));
  else if (run.order == run.splits - 1)
    Tiles::Store(state, in.end + run.head * kState);
  float* const factor = summary               ? summary_of(run.order) + kState
                        : in.factor != nullptr ? in.factor + run.head * kHeadSize
                                               : nullptr;
  if (factor != nullptr && Lane() < 4)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      factor[16 * warp + e / 2 * 8 + 2 * Lane() + e % 2] =
          any_start ? 0.0f : Exp2(all[e / 2][e % 2]);
}

// From what the splits do to a state the state at the end of each: S_i = S_{i-1} diag(F_i) + D_i, where
// S_0 is there already, and D_i becomes S_i.
constexpr int kCombineThreads = 256;

template <bool kReverse>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(Splits splits,
                                                                 Sequences sequences,
                                                                 int64_t tokens, int64_t heads) {
  const int64_t sequence = splits.SummarizedSequence(sequences, heads);
  if (sequence < 0) return;
  const int64_t head = sequence * heads + blockIdx.x % heads;
  const Span span = sequences(sequence, tokens);
  const auto summary_of = [&](int64_t order) {
    return splits.Summary<kReverse>(head, heads, span, order);
  };
  const int64_t count = splits.Count(span.Chunks());
  if (count <= 2) return;
  const int at = blockIdx.y * kCombineThreads + threadIdx.x;
  float sum = summary_of(0)[at];
#pragma unroll 4
  for (int order = 1; order < count - 1; ++order) {
    float* const summary = summary_of(order);
    float& d = summary[at];
    sum = fmaf(sum, summary[kHeadSize * kHeadSize + at % kHeadSize], d);
    d = sum;
  }
}

template <typename T, bool kConstant, bool kReverse>
cudaError_t ScanStates(cudaStream_t stream, const StateScan<T>& scan, dim3 blocks) {
  return ForMarks(scan.marks, [&](auto marked) {
    return Launch(StateKernel<T, kConstant, kReverse, marked()>, blocks, kThreads,
                  StateLayout::kBytes, stream, scan);
  });
}

// The state at the start of each split.
template <typename T, bool kConstant, bool kReverse>
cudaError_t FindStarts(cudaStream_t stream, StateScan<T> scan, int64_t batch) {
  const Splits& splits = scan.splits;
  if (splits.count == 1) return cudaSuccess;
  scan.end = nullptr;
  scan.gradients = nullptr;
  cudaError_t error = ScanStates<T, kConstant, kReverse>(
      stream, scan, splits.SummaryBlocks(batch, scan.heads));
  if (error != cudaSuccess || splits.count == 2) return error;
  const dim3 blocks(static_cast<unsigned>(splits.SummarizedHeads(batch, scan.heads)),
                    kHeadSize * kHeadSize / kCombineThreads);
  return Launch(CombineKernel<kReverse>, blocks, kCombineThreads, 0, stream, splits,
                scan.sequences, scan.tokens, scan.heads);
}

// Calls fn(T(), bool_constant<constant decay>()).
template <typename Fn>
cudaError_t ForKinds(const Wkv6Call& call, Fn&& fn) {
  return ForHalfTypes<kHeadSize>(call.dtype, call.dims.head_size, [&](auto zero, auto) {
    return call.constant_decay ? fn(zero, std::true_type()) : fn(zero, std::false_type());
  });
}

dim3 BlockForEachHead(const Wkv6Call& call) {
  return dim3(static_cast<unsigned>(call.dims.batch * call.dims.heads));
}

template <typename T>
StateScan<T> ScanOf(const Wkv6Call& call, const void* x, const void* z, const float* start, float* end,
                    uint4* gradients, const Splits& splits) {
  return {static_cast<const T*>(x), static_cast<const T*>(z), call.w, call.dims.tokens,
          call.dims.heads, call.decay, call.marks, call.sequences, start, end, gradients, splits};
}

}  // namespace

int64_t Wkv6ScanSharedMemory(Pass pass) {
  const int64_t states = StateLayout::kBytes, forward = ForwardLayout::kBytes;
  return pass == Pass::kForward ? std::max(states, forward) : states;
}

cudaError_t Wkv6Scan(cudaStream_t stream, const Wkv6ForwardCall& call, const Splits& splits) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    const cudaError_t error = FindStarts<T, constant(), false>(
        stream,
        ScanOf<T>(call, call.v, call.k, call.initial_state, call.final_state, nullptr, splits),
        call.dims.batch);
    if (error != cudaSuccess) return error;
    const Forward<T> forward{in(call.r), in(call.k), in(call.v), call.w, call.u, call.dims.tokens,
                             call.dims.heads, call.decay, call.marks, call.sequences,
                             call.initial_state, call.final_state,
                             static_cast<T*>(call.y), static_cast<uint4*>(call.states), splits};
    const dim3 blocks = splits.Blocks(call.dims.batch, call.dims.heads);
    return ForMarks(call.marks, [&](auto marked) {
      return Launch(ForwardKernel<T, constant(), marked()>, blocks, kThreads,
                    ForwardLayout::kBytes, stream, forward);
    });
  });
}

cudaError_t Wkv6ReverseScan(cudaStream_t stream, const Wkv6BackwardCall& call,
                            const Splits& splits, uint4* gradients) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    const StateScan<T> scan = ScanOf<T>(call, call.dy, call.r, call.dfinal_state,
                                        call.dinitial_state, gradients, splits);
    const cudaError_t error = FindStarts<T, constant(), true>(stream, scan, call.dims.batch);
    if (error != cudaSuccess) return error;
    return ScanStates<T, constant(), true>(stream, scan,
                                           splits.Blocks(call.dims.batch, call.dims.heads));
  });
}

cudaError_t RunSummary(cudaStream_t stream, const Wkv6SummaryCall& call) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    StateScan<T> scan = ScanOf<T>(call, call.v, call.k, nullptr, call.added, nullptr, kOneSplit);
    scan.factor = call.factor;
    return ScanStates<T, constant(), false>(stream, scan, BlockForEachHead(call));
  });
}

cudaError_t RunReverseSummary(cudaStream_t stream, const Wkv6BackwardCall& call) {
  return ForKinds(call, [&](auto zero, auto constant) {
    using T = decltype(zero);
    return ScanStates<T, constant(), true>(
        stream,
        ScanOf<T>(call, call.dy, call.r, call.dfinal_state, call.dinitial_state, nullptr,
                  kOneSplit),
        BlockForEachHead(call));
  });
}

}  // namespace rwkv_jax::cuda
