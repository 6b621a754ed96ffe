// WKV4 in runs of tokens side by side, all in float.
//
// The recurrence is the time mixing of RWKV-4 in "RWKV: Reinventing RNNs for the Transformer Era",
// arXiv:2305.13048; its official kernel is RWKV-v4/cuda/wkv_cuda.cu of RWKV-LM. For each channel,
// with the log decay w and the bonus u,
//
//   y_t = (N_t + e^(u + k_t) v_t) / (D_t + e^(u + k_t))
//   N_{t+1} = e^w N_t + e^(k_t) v_t        D_{t+1} = e^w D_t + e^(k_t).
//
// N and D are kept as sums num = N e^-log_max and den = D e^-log_max, as the paper and the official
// kernel do, so that no weight e^(k_t) overflows.
//
// A column is the channels that a warp reads as 128 bytes, of one sequence. A block has a column
// and walks over its chunks of 64 tokens. Each warp has a run of kRun = 8 consecutive tokens of a
// chunk. A warp first finds the sums that its run adds up to by itself. From these sums and the
// state before the chunk, each warp then has the state before its run, and takes its tokens once
// more. The backward pass does the same with the runs that come after.
//
// The weights of a run are near each other if they are not too different in size. Then all of them
// are taken relative to one weight, the gauge, and a token needs only one exponential. The tokens
// of any other run are slow: they are taken one by one, as in the official kernel.
//
// Where segments start inside a run, each segment has a gauge of its own, or is slow, whatever the
// other segments of the run are. Padding has no part in decays: an age is a number of tokens that
// are no padding. Tokens past the end of a row count as padding.
//
// If there are very many sequences or rows, a warp has a column to itself and takes it run by run,
// unless the sequences are long.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "tiles.cuh"
#include "splits.h"
#include "launch.cuh"
#include "marks.cuh"
#include "matrix.cuh"
#include "plan.h"
#include "rwkv_jax/wkv4.h"

namespace rwkv_jax::cuda::wkv4 {

constexpr int kRun = 8;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
static_assert(kRun * kWarps == kChunk, "the runs of all warps are a chunk");

// Weights are near each other if their exponents to base 2 differ by less than this: products of
// three such weights are in the range of float.
constexpr float kNear = 40.0f;

__device__ inline float Exp(float x) { return Exp2(x * kLog2E); }

// The sums num e^log_max and den e^log_max.
struct Sums {
  float num, den, log_max;
};

__device__ inline Sums Nothing() { return {0.0f, 0.0f, -FLT_MAX}; }

// Decays `sums` and adds `more`.
__device__ inline Sums Add(const Sums& sums, float log_decay, const Sums& more) {
  const float decayed = sums.log_max + log_decay;
  const float log_max = fmaxf(decayed, more.log_max);
  const float before = Exp(decayed - log_max), now = Exp(more.log_max - log_max);
  return {fmaf(before, sums.num, now * more.num), fmaf(before, sums.den, now * more.den), log_max};
}

// The parameters of a channel, the same for all tokens.
struct Channel {
  float w;             // the log decay
  float decay, bonus;  // e^w and e^u
};

// The channels of a lane are the elements of one word of 4 bytes.
template <typename T>
constexpr int kWidth = 4 / sizeof(T);

template <typename T>
__device__ void Unpack(uint32_t word, float (&x)[kWidth<T>]) {
  if constexpr (std::is_same_v<T, float>)
    x[0] = __uint_as_float(word);
  else
    x[0] = Pair<T>::Low(word), x[1] = Pair<T>::High(word);
}

template <typename T>
__device__ uint32_t Pack(const float (&x)[kWidth<T>]) {
  if constexpr (std::is_same_v<T, float>)
    return __float_as_uint(x[0]);
  else
    return Pair<T>::Round(x[0], x[1]);
}

// A column of one sequence: where the channels of a lane are in arrays [rows, C].
template <typename T>
class Column {
 public:
  static constexpr int kChannels = 32 * kWidth<T>;  // channels of a column

  static __host__ __device__ unsigned Groups(int64_t channels) {
    return static_cast<unsigned>((channels + kChannels - 1) / kChannels);
  }
  __device__ Column(int64_t channels, const Turn& turn, unsigned group)
      : channels(channels), sequence(turn.sequence), span(turn.span) {
    first_ = int64_t{group} * kChannels + Lane() * kWidth<T>;
    const int64_t left = channels - first_;
    count = left < 0 ? 0 : left < kWidth<T> ? static_cast<int>(left) : kWidth<T>;
    words = count == kWidth<T> && channels % kWidth<T> == 0;
  }

  int64_t channels, sequence;
  Span span;
  int count;   // the number of channels of this lane that exist
  bool words;  // whether these channels are one aligned word in every row

  // The first channel of the column.
  __device__ int64_t First() const { return first_ - Lane() * kWidth<T>; }
  // The first element of the lane in a row. In the next row it is `channels` elements further.
  __device__ int64_t At(int64_t row) const { return row * channels + first_; }

  // Load and store the channels of the lane element by element.
  __device__ void LoadEach(const void* array, int64_t at, float (&x)[kWidth<T>]) const {
    uint32_t word = 0;
    for (int c = 0; c < count; ++c)
      word |= uint32_t{static_cast<const Element*>(array)[at + c]} << 16 * c;
    Unpack<T>(word, x);
  }
  __device__ void StoreEach(void* array, int64_t at, const float (&x)[kWidth<T>]) const {
    const uint32_t word = Pack<T>(x);
    for (int c = 0; c < count; ++c)
      static_cast<Element*>(array)[at + c] = static_cast<Element>(word >> 16 * c);
  }

  template <typename E>
  __device__ void Fetch(const E* array, int64_t at) const {
    if (count > 0) Prefetch(array + at);
  }

  __device__ float LoadFloat(const float* array, int64_t row, int c) const {
    return c < count ? array[At(row) + c] : 0.0f;
  }
  __device__ void StoreFloat(float* array, int64_t row, int c, float x) const {
    if (c < count) array[At(row) + c] = x;
  }

  template <typename Float>
  __device__ Sums LoadState(const Wkv4State<Float>& state, int64_t row, int c) const {
    return {LoadFloat(state.num, row, c), LoadFloat(state.den, row, c),
            LoadFloat(state.log_max, row, c)};
  }
  __device__ void StoreState(const Wkv4State<float>& state, int64_t row, int c,
                             const Sums& sums) const {
    StoreFloat(state.num, row, c, sums.num);
    StoreFloat(state.den, row, c, sums.den);
    StoreFloat(state.log_max, row, c, sums.log_max);
  }
  // u itself, which only slow tokens need.
  __device__ float LoadBonus(const Wkv4Call& call, int c) const {
    return LoadFloat(call.u, sequence, c);
  }
  __device__ Channel LoadChannel(const Wkv4Call& call, int c) const {
    const float w = UnboundedLogDecay(LoadFloat(call.w, sequence, c), call.decay).x;
    return {w, expf(w), expf(LoadBonus(call, c))};
  }

 private:
  using Element = std::conditional_t<kWidth<T> == 1, uint32_t, uint16_t>;

  int64_t first_;
};

// From so many columns on, counted for each multiprocessor, a warp has one to itself, unless there
// are marks. Blocks then only have the columns of sequences with more tokens than kFewTokens, which
// are few if sequences are short on average.
constexpr int64_t kManyColumns = 28;
#ifdef RWKV_JAX_SMALL_TESTS
constexpr int64_t kFewTokens = kChunk;
#else
constexpr int64_t kFewTokens = 16 * kChunk;
#endif

template <typename T>
int64_t Columns(const Wkv4Call& call) {
  return call.dims.batch * Column<T>::Groups(call.dims.channels);
}
template <typename T>
bool ByWarps(const Wkv4Call& call, const Plan& plan, int64_t average) {
  const Sequences& sequences = call.sequences;
  return !call.marks.Given() && plan.splits == 1 &&
         Columns<T>(call) >= kManyColumns * plan.device.multiprocessors &&
         (sequences.Given() ? sequences.tokens <= average * sequences.count
                            : call.dims.tokens <= kFewTokens);
}
// Splits that give a block to each place where a sequence can have more than kFewTokens tokens.
inline Splits LongOnes(const Wkv4Call& call) {
  constexpr int64_t kFewChunks = kFewTokens / kChunk;
  const int64_t places = (Chunks(call.sequences.tokens) + kFewChunks - 1) / kFewChunks;
  return {places > 0 ? places : 1, nullptr, 0, kFewChunks};
}
template <typename T>
int64_t LongColumns(const Wkv4Call& call) {
  return LongOnes(call).HeadsWithTransitions(call.dims.batch,
                                             Column<T>::Groups(call.dims.channels));
}

inline int64_t Blocks(int64_t columns) { return (columns + kWarps - 1) / kWarps; }

// The column of this block; its sequence is -1 if the block has none. If `longs` has chunks, blocks
// have the columns of long sequences only.
template <typename T, bool kMarked>
__device__ Column<T> ColumnOfBlock(const Wkv4Call& call, const Splits& longs) {
  const unsigned groups = Column<T>::Groups(call.dims.channels);
  Turn turn = {{}, -1};
  if (kMarked && longs.chunks > 0) {
    turn.sequence = longs.SequenceWithTransitions(call.sequences, groups);
    if (turn.sequence >= 0) turn.span = call.sequences(turn.sequence, call.dims.tokens);
  } else {
    turn = call.sequences.InTurn(blockIdx.x / groups, call.dims.tokens);
  }
  return Column<T>(call.dims.channels, turn, blockIdx.x % groups);
}

// The column of this warp; its sequence is -1 if the warp has none.
template <typename T>
__device__ Column<T> ColumnOfWarp(const Wkv4Call& call) {
  const unsigned groups = Column<T>::Groups(call.dims.channels);
  const unsigned index = blockIdx.x * kWarps + Warp(), turn = index / groups;
  return Column<T>(
      call.dims.channels,
      turn < call.dims.batch ? call.sequences.InTurn(turn, call.dims.tokens) : Turn{{}, -1},
      index % groups);
}

// The chunks of a sequence are shared out among splits, of which the last is empty only if there
// are no chunks.
struct Division {
  int64_t tokens, splits;
  int64_t chunks;  // chunks of a split; the last `longer` splits have one more
  int64_t longer;

  __device__ Division(const Span& span, int64_t splits)
      : tokens(span.tokens),
        splits(splits),
        chunks(span.Chunks() / splits),
        longer(span.Chunks() % splits) {}

  // The first token of a split. For the number of splits, the result is the number of tokens.
  __device__ int64_t First(int64_t split) const {
    const int64_t shorter = splits - longer;
    const int64_t chunk = split * chunks + (split > shorter ? split - shorter : 0);
    return chunk * kChunk < tokens ? chunk * kChunk : tokens;
  }
  __device__ int64_t Length(int64_t split) const { return First(split + 1) - First(split); }
};

// Consecutive tokens of a sequence: how many of them are no padding, and whether a segment starts
// among them, so that nothing of the state before them is left.
struct Passage {
  float tokens;
  bool starts;

  // The state after these tokens, from the state before them and the sums of these tokens by
  // themselves.
  __device__ Sums Join(const Sums& sums, float w, const Sums& more) const {
    return starts ? more : Add(sums, tokens * w, more);
  }
};

// The passage over split `i` of a sequence. The lanes of a warp find it together.
template <bool kMarked>
__device__ Passage PassageOf(const Division& division, int64_t i, const Marks& marks,
                             int64_t sequence) {
  if constexpr (kMarked)
    if (marks.Given()) {
      const int64_t end = (division.First(i + 1) + kChunk - 1) / kChunk;
      int64_t tokens = 0;
      bool starts = false;
      for (int64_t chunk = division.First(i) / kChunk + Lane(); chunk < end; chunk += 32) {
        const ChunkMarks of_chunk(marks, sequence, chunk);
        tokens += kChunk - __popcll(of_chunk.absent);
        starts = starts || of_chunk.starts != 0;
      }
      float total = tokens;
#pragma unroll
      for (int bit = 1; bit < 32; bit *= 2) total += __shfl_xor_sync(~0u, total, bit);
      return {total, __any_sync(~0u, starts) != 0};
    }
  return {static_cast<float>(division.Length(i)), false};
}

// The number of tokens from `start` to `end` in one chunk; 0 past the end.
__device__ inline int ChunkLength(int64_t start, int64_t end) {
  const int64_t left = end - start;
  return left < 0 ? 0 : left < kChunk ? static_cast<int>(left) : static_cast<int>(kChunk);
}

// The marks of kChunks chunks of a row, in shared memory.
template <bool kMarked>
struct SharedMarks {
  static constexpr unsigned kChunkWords = kChunk / kWordTokens, kChunks = kThreads / kChunkWords;

  uint32_t (&words)[kThreads];

  // Brings the marks of a chunk and of the chunks beside it. All threads of the block have to call
  // it.
  __device__ void Bring(const Marks& marks, int64_t row, int64_t chunk) {
    if constexpr (kMarked) {
      const int64_t word = chunk / kChunks * kThreads + threadIdx.x;
      const bool there = marks.Given() && word < marks.per_row;
      __syncthreads();
      words[threadIdx.x] = there ? marks.words[row * marks.per_row + word] : 0;
      __syncthreads();
    }
  }
  // Whether the marks of a chunk have come with the marks of the chunk before it.
  __device__ bool Follows(unsigned chunk) const { return !kMarked || chunk % kChunks != 0; }
  __device__ const uint32_t* Of(unsigned chunk) const {
    return kMarked ? words + chunk % kChunks * kChunkWords : nullptr;
  }
};

// A chunk of `length` tokens, and what its marks say about its runs.
template <bool kMarked>
struct Runs {
  int length;

  __device__ Runs(int length, const uint32_t*) : length(length) {}

  // The number of tokens that are no padding: in the first runs, in all runs, and after a token.
  __device__ float Tokens(int runs) const { return fminf(kRun * runs, length); }
  __device__ float Tokens() const { return length; }
  __device__ float TokensAfter(int token) const { return length - 1 - token; }
  // The passage over a run that has tokens.
  __device__ Passage Of(int run) const { return {fminf(kRun, length - kRun * run), false}; }
  __device__ bool Start() const { return false; }
  // Whether the sums at an index of ChunkSums, below, reach the start of a run; backwards, its end.
  __device__ auto ReachStart(int run) const {
    return [run](int j) { return j == kWarps || j < run; };
  }
  __device__ auto ReachEnd(int run) const {
    return [run](int j) { return j > run; };
  }
  __device__ TileMarks<false> MarksOf(int) const { return {}; }
};

// With marks. Tokens past the end of the chunk are padding.
template <>
struct Runs<true> {
  int length;
  const uint32_t* words;  // in shared memory
  uint32_t any;           // the bits that any of these words has

  __device__ Runs(int length, const uint32_t* words) : length(length), words(words) {
    const uint4 x = *reinterpret_cast<const uint4*>(words);
    any = x.x | x.y | x.z | x.w;
  }

  __device__ float Tokens(int runs) const {
    return kRun * runs - __popcll(Absent() & Before(runs));
  }
  __device__ float Tokens() const { return Tokens(kWarps); }
  __device__ float TokensAfter(int token) const {
    return kChunk - 1 - token - __popcll(Absent() >> token);
  }
  __device__ Passage Of(int run) const {
    return {Tokens(run + 1) - Tokens(run), MarksOf(run).Starts(0, kRun)};
  }
  __device__ bool Padded() const { return length < kChunk || any >> kWordTokens != 0; }
  __device__ bool Start() const { return (any & 0xffff) != 0; }
  __device__ auto ReachStart(int run) const {
    uint32_t reaching = (1u << run) - 1 | 1u << kWarps;
    if (Start()) {
      const uint64_t starts = Starts() & Before(run);
      if (starts != 0) reaching = (1u << run) - (1u << (63 - __clzll(starts)) / kRun);
    }
    return [reaching](int j) { return reaching >> j & 1; };
  }
  __device__ auto ReachEnd(int run) const {
    uint32_t reaching = (2u << kWarps) - (2u << run);
    if (Start()) {
      const uint64_t starts = Starts() & ~Before(run + 1);
      if (starts != 0) reaching = (2u << (__ffsll(starts) - 1) / kRun) - (2u << run);
    }
    return [reaching](int j) { return reaching >> j & 1; };
  }
  // The marks of a run, which do not say which tokens are past the end.
  __device__ TileMarks<true> MarksOf(int run) const {
    return {words[run / 2] >> run % 2 * kRun & 0xff00ff};
  }

 private:
  static_assert(kWordTokens == 2 * kRun && kWarps == 8);

  __device__ uint64_t Starts() const {
    return words[0] & 0xffff | words[1] << 16 |
           static_cast<uint64_t>(words[2] & 0xffff | words[3] << 16) << 32;
  }
  __device__ uint64_t Absent() const {
    const uint64_t absent = words[0] >> 16 | words[1] & 0xffff0000 |
                            static_cast<uint64_t>(words[2] >> 16 | words[3] & 0xffff0000) << 32;
    return length < kChunk ? absent | ~uint64_t{0} << length : absent;
  }
  static __device__ uint64_t Before(int runs) {
    return runs >= kWarps ? ~uint64_t{0} : (uint64_t{1} << kRun * runs) - 1;
  }
};

// The runs of a chunk without padding, where tokens need not be counted.
struct AllRuns : Runs<true> {
  __device__ float Tokens(int runs) const { return fminf(kRun * runs, length); }
};

// Calls body(runs), with AllRuns for a chunk without padding.
template <bool kMarked, typename Body>
__device__ void WithRuns(const Runs<kMarked>& runs, const Body& body) {
  if constexpr (kMarked)
    if (!runs.Padded()) return body(AllRuns{runs});
  body(runs);
}

// The sums of the channels of a warp, in shared memory.
template <int kChannels>
struct WarpSums {
  alignas(sizeof(float) * kChannels) float parts[3][32][kChannels];

  __device__ void Put(int c, const Sums& sums) {
    parts[0][Lane()][c] = sums.num;
    parts[1][Lane()][c] = sums.den;
    parts[2][Lane()][c] = sums.log_max;
  }
  __device__ Sums Get(int c) const {
    return {parts[0][Lane()][c], parts[1][Lane()][c], parts[2][Lane()][c]};
  }
};

// The sums of each run of a chunk, and last what comes into the chunk.
template <typename T>
using ChunkSums = WarpSums<kWidth<T>>[kWarps + 1];

// Adds up the sums j for which counts(j) holds, each after a decay over age(j) tokens. j is a run,
// or kWarps for what comes into the chunk.
template <typename T, typename Age, typename Counts>
__device__ void Gather(const ChunkSums<T>& by_run, const Channel (&channel)[kWidth<T>],
                       const Age& age, const Counts& counts, Sums (&sums)[kWidth<T>]) {
  const auto exponent = [&](int j, int c) {
    return fmaf(age(j), channel[c].w, by_run[j].parts[2][Lane()][c]);
  };
#pragma unroll
  for (int c = 0; c < kWidth<T>; ++c)
    sums[c] = {0.0f, 0.0f, counts(kWarps) ? exponent(kWarps, c) : -FLT_MAX};
  // Four sums are loaded at a time, also those that do not count, whose results are dropped: with a branch for each,
  // each load would wait for the one before.
  constexpr int kAtOnce = 4;
  const auto for_runs = [&](const auto& body) {
#pragma unroll
    for (int first = 0; first < kWarps; first += kAtOnce) {
      bool some = false;
#pragma unroll
      for (int j = first; j < first + kAtOnce; ++j) some = some || counts(j);
      if (some) body(first);
    }
  };
  for_runs([&](int first) {
    float exponents[kAtOnce][kWidth<T>];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kWidth<T>; ++c) exponents[i][c] = exponent(first + i, c);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < kWidth<T>; ++c) {
        const float more = fmaxf(sums[c].log_max, exponents[i][c]);
        if (counts(first + i)) sums[c].log_max = more;
      }
  });
  const auto add = [&](int j, bool counted) {
#pragma unroll
    for (int c = 0; c < kWidth<T>; ++c) {
      const float scale = Exp(exponent(j, c) - sums[c].log_max);
      const float num = fmaf(scale, by_run[j].parts[0][Lane()][c], sums[c].num);
      const float den = fmaf(scale, by_run[j].parts[1][Lane()][c], sums[c].den);
      if (counted) sums[c].num = num, sums[c].den = den;
    }
  };
  for_runs([&](int first) {
#pragma unroll
    for (int j = first; j < first + kAtOnce; ++j) add(j, counts(j));
  });
  if (counts(kWarps)) add(kWarps, true);
}

// Finds the state before the run of `warp`, or with kWarps the state after the chunk, from the runs
// before. Each run has stored what it adds up to since the last start of a segment in it.
template <typename T, bool kMarked>
__device__ void Before(const ChunkSums<T>& by_run, int warp, const Runs<kMarked>& runs,
                       const Channel (&channel)[kWidth<T>], Sums (&sums)[kWidth<T>]) {
  WithRuns(runs, [&](const auto& runs) {
    const float to = runs.Tokens(warp);
    const auto age = [&](int j) { return j == kWarps ? to : to - runs.Tokens(j + 1); };
    Gather<T>(by_run, channel, age, runs.ReachStart(warp), sums);
  });
}

// Finds the cotangent of the state after the run of `warp`, from the runs after it. Each run has
// stored what comes from its tokens up to the first start of a segment in it.
template <typename T, bool kMarked>
__device__ void After(const ChunkSums<T>& by_run, int warp, const Runs<kMarked>& runs,
                      const Channel (&channel)[kWidth<T>], Sums (&sums)[kWidth<T>]) {
  WithRuns(runs, [&](const auto& runs) {
    const float to = runs.Tokens(warp + 1);
    const auto age = [&](int j) { return runs.Tokens(j) - to; };
    Gather<T>(by_run, channel, age, runs.ReachEnd(warp), sums);
  });
}

// Where the tokens of a run are.
template <typename T, bool kMarked>
struct Place {
  static constexpr int W = kWidth<T>;

  int64_t row;  // of the first token, in arrays [B * T, C]
  int count;
  TileMarks<kMarked> marks;

  __device__ Place(const Column<T>& column, int64_t chunk_row, const Runs<kMarked>& runs, int warp)
      : Place(column, chunk_row, runs.length, warp) {
    marks = runs.MarksOf(warp);
    if (kMarked) marks.bits |= 0xff0000u << count & 0xff0000;
  }
  // Without marks, where `left` tokens of the sequence are left from `row` on.
  static __device__ Place Of(const Column<T>& column, int64_t row, int64_t left) {
    Place place(column, row, left < kRun ? static_cast<int>(left) : kRun, 0);
    if (kMarked) place.marks.bits = 0xff0000u << place.count & 0xff0000;
    return place;
  }
  // Without marks, which the others set.
  __device__ Place(const Column<T>& column, int64_t chunk_row, int chunk_length, int warp)
      : row(chunk_row + kRun * warp) {
    const int left = chunk_length - kRun * warp;
    count = left < 0 || column.count == 0 ? 0 : left < kRun ? left : kRun;
  }

  // Whether a lane can read the run as words: its channels are words, and either there are kRun
  // tokens or the marks say which tokens are missing.
  __device__ bool Whole(const Column<T>& column) const {
    return column.words && (kMarked ? count > 0 : count == kRun);
  }
  // Calls body(marks), with TileMarks<false> for a run of kRun tokens without marks.
  template <typename Body>
  __device__ void WithMarks(const Body& body) const {
    if constexpr (kMarked)
      if (marks.bits != 0) return body(marks);
    body(TileMarks<false>());
  }
  // Whether there is a token t in the row. With TileMarks<false>, a body knows that there is.
  __device__ bool Has(TileMarks<true>, int t) const { return t < count; }
  __device__ bool Has(TileMarks<false>, int) const { return true; }
  // A bit for each token that reads the state before the run.
  __device__ uint32_t Readers() const {
    if (!kMarked) return ~0u;
    const uint32_t starts = marks.bits & ((1u << kRun) - 1);
    return ((starts & -starts) - 1) & ~(marks.bits >> kWordTokens);
  }
  // The passage over this run, for a lane that has channels.
  __device__ Passage Over() const {
    return {static_cast<float>(kMarked ? kRun - __popc(marks.bits >> kWordTokens) : count),
            marks.Starts(0, kRun)};
  }

  // Calls body(t, c, key, value) for slow tokens: one token after another, in little code. The key
  // and the value of padding are 0.
  template <typename Body>
  __device__ void ForEach(const Column<T>& column, const Wkv4Call& call, const Body& body) const {
#pragma unroll 1
    for (int t = 0; t < count; ++t) ForToken(column, call, t, body);
  }
  template <typename Body>
  __device__ void ForEachBackwards(const Column<T>& column, const Wkv4Call& call,
                                   const Body& body) const {
#pragma unroll 1
    for (int t = count - 1; t >= 0; --t) ForToken(column, call, t, body);
  }

 private:
  template <typename Body>
  __device__ void ForToken(const Column<T>& column, const Wkv4Call& call, int t,
                           const Body& body) const {
    float key[W] = {}, value[W] = {};
    if (!marks.Absent(t)) {
      column.LoadEach(call.k, column.At(row + t), key);
      column.LoadEach(call.v, column.At(row + t), value);
    }
#pragma unroll
    for (int c = 0; c < W; ++c) body(t, c, key[c], value[c]);
  }
};

// The words of a run in one of the arrays [B, T, C].
struct Words {
  uint32_t x[kRun];

  template <typename T, bool kMarked>
  __device__ void Load(const Column<T>& column, const void* array, const Place<T, kMarked>& place) {
    const T* at = static_cast<const T*>(array) + column.At(place.row);
    const auto load = [&](int count) {
#pragma unroll
      for (int t = 0; t < kRun; ++t, at += column.channels)
        x[t] = t < count ? *reinterpret_cast<const uint32_t*>(at) : 0;
    };
    if (kMarked && place.count < kRun)
      load(place.count);
    else
      load(kRun);
  }
  __device__ void Load(const uint32_t (&run)[kRun][32]) {
#pragma unroll
    for (int t = 0; t < kRun; ++t) x[t] = run[t][Lane()];
  }
};

// The words of a chunk in shared memory. Each warp copies and reads its own run.
template <int kArrays>
struct alignas(16) ChunkWords {
  uint32_t of[kArrays][kWarps][kRun][32];

  // Starts to copy the run of this warp: `count` tokens from `row` on. Words of its other tokens are cleared; `count`
  // may be negative. Lanes whose channels are not words get nothing.
  template <typename T>
  __device__ void Copy(const Column<T>& column, const void* const (&arrays)[kArrays], int64_t row,
                       int count, int warp) {
    constexpr int kPiece = 16 / sizeof(T);
    const int64_t channels = column.channels;
    if (channels % kPiece != 0) {
      if (column.words)
        for (int i = 0; i < kArrays; ++i)
#pragma unroll 1
          for (int t = 0; t < kRun; ++t)
            CopyWordAsync(SharedAddress(&of[i][warp][t][Lane()]),
                          static_cast<const T*>(arrays[i]) + column.At(row + t), t < count);
      return;
    }
    // The lanes copy for one another.
    const int t = Lane() / 8, piece = Lane() % 8;
    const int64_t channel = column.First() + kPiece * piece, at = (row + t) * channels + channel;
    if (channel >= channels) return;
#pragma unroll
    for (int i = 0; i < kArrays; ++i)
#pragma unroll
      for (int later = 0; later < kRun; later += 4)
        CopyAsync(SharedAddress(&of[i][warp][t + later][4 * piece]),
                  static_cast<const T*>(arrays[i]) + at + later * channels, t + later < count);
  }
};

// Clears the state before token t if a segment starts there; backwards, clears its cotangent.
template <bool kMarked>
__device__ void Enter(TileMarks<kMarked> marks, int t, Sums& state) {
  if (marks.Starts(t)) state = Nothing();
}

// From the state before token t to the state after it.
template <bool kMarked>
__device__ void Take(TileMarks<kMarked> marks, int t, float w, float key, float value,
                     Sums& state) {
  Enter(marks, t, state);
  if (!marks.Absent(t)) state = Add(state, w, {value, 1.0f, key});
}

// The weights e^(k_t) of a run, and their sums.
template <typename T, bool kMarked>
struct Weights {
  static constexpr int W = kWidth<T>;

  // A bit for each token, the same for all tokens of a segment: whether the token is slow, since
  // the run is not whole or the weights of the segment are not near each other.
  uint32_t slow;
  float gauge[W], last_gauge[W];  // of the first and the last segment in the run
  // For each token, its weight times 2^-gauge, and that times v_t; 0 for padding.
  float weight[kRun][W], weighted[kRun][W];
  Sums sums[W];

  static __device__ float Gauge(float key) { return key * kLog2E; }
  static __device__ float Relative(float log_weight, float gauge) {
    return Exp2(fmaf(log_weight, kLog2E, -gauge));
  }

  __device__ Weights(const Column<T>& column, const Wkv4Call& call, const Place<T, kMarked>& place,
                     const Words& k, const Words& v, const Channel (&channel)[W]) {
    slow = ~0u;
    if (place.Whole(column)) place.WithMarks([&](auto marks) { SumNear(marks, k, v, channel); });
    // The sums of the run are the sums of its last segment. If that is slow, they are still to be
    // found.
    if (!(slow >> (kRun - 1) & 1)) return;
#pragma unroll
    for (int c = 0; c < W; ++c) sums[c] = Nothing();
    place.ForEach(column, call, [&](int t, int c, float key, float value) {
      Take(place.marks, t, channel[c].w, key, value, sums[c]);
    });
  }

 private:
  // Sums up as if weights were near each other, and finds only then whether they are.
  template <bool kSome>
  __device__ void SumNear(TileMarks<kSome> marks, const Words& k, const Words& v,
                          const Channel (&channel)[W]) {
    uint32_t first = 0;  // the keys of the first token that is no padding
#pragma unroll
    for (int t = kRun - 1; t >= 0; --t)
      if (!marks.Absent(t)) first = k.x[t];
    float key[W], value[W];
    float now[W], range[W];  // the gauge of the segment, and how far from it its keys are
    Unpack<T>(first, key);
#pragma unroll
    for (int c = 0; c < W; ++c) {
      sums[c] = Nothing();
      gauge[c] = now[c] = Gauge(key[c]);
      range[c] = 0.0f;
    }
    slow = 0;
    uint32_t earlier = 0;  // a bit for each token before the segment
    const auto end_segment = [&](uint32_t upto) {
      bool near = true;
#pragma unroll
      for (int c = 0; c < W;
           ++c)  // the range drops a distance that is NaN, as between keys of -inf
        near = near && range[c] <= kNear && sums[c].den == sums[c].den;
      if (!near) slow |= upto & ~earlier;
      earlier = upto;
    };
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
      Unpack<T>(k.x[t], key);
      Unpack<T>(v.x[t], value);
      if (marks.Starts(t)) {
        end_segment((1u << t) - 1);
#pragma unroll
        for (int c = 0; c < W; ++c) {
          sums[c] = Nothing();
          now[c] = Gauge(key[c]);
          range[c] = 0.0f;
        }
      }
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float relative = fmaf(key[c], kLog2E, -now[c]);
        weight[t][c] = marks.Absent(t) ? 0.0f : Exp2(relative);
        weighted[t][c] = marks.Absent(t) ? 0.0f : weight[t][c] * value[c];
        if (marks.Absent(t)) continue;
        range[c] = fmaxf(range[c], fabsf(relative));
        sums[c].num = fmaf(channel[c].decay, sums[c].num, weighted[t][c]);
        sums[c].den = fmaf(channel[c].decay, sums[c].den, weight[t][c]);
        sums[c].log_max = fmaxf(sums[c].log_max + channel[c].w, key[c]);
      }
    }
    end_segment(~0u);
#pragma unroll
    for (int c = 0; c < W; ++c) {
      last_gauge[c] = now[c];
      if (!(channel[c].bonus >= Exp2(-kNear) && channel[c].bonus <= Exp2(kNear))) slow = ~0u;
      const float scale = Exp2(-fmaf(sums[c].log_max, kLog2E, -now[c]));
      sums[c].num *= scale;
      sums[c].den *= scale;
    }
    if (kSome && marks.bits >> kWordTokens == (1u << kRun) - 1)
#pragma unroll
      for (int c = 0; c < W; ++c) sums[c] = Nothing();
  }
};

// The transitions in scratch [S, Z, X, C]: those of split z of sequence s begin in row (s Z + z) X.
inline Wkv4State<float> Transitions(const Wkv4Call& call, float* scratch) {
  return {scratch, scratch + call.dims.channels, scratch + 2 * call.dims.channels};
}

// As ForMarks. Sequences have the kernels for marks as well, since their last runs can be short.
template <typename Fn>
cudaError_t ForRows(const Wkv4Call& call, Fn&& fn) {
  const bool marked = call.marks.Given() || call.sequences.Given();
  return marked ? fn(std::true_type()) : fn(std::false_type());
}

// Runs a pass on all columns: by `by_warps(blocks)` and then the long ones, if a warp has a column to
// itself, or else by splits, of which launch(bool_constant<transition>(), ...) finds the transitions first.
template <typename T, typename ByWarpsFn, typename LaunchFn>
cudaError_t RunColumns(const Wkv4Call& call, int64_t splits, bool one_for_each_warp,
                       ByWarpsFn&& by_warps, LaunchFn&& launch) {
  const int64_t columns = Columns<T>(call);
  if (one_for_each_warp) {
    const cudaError_t error = by_warps(Blocks(columns));
    const int64_t longs = LongColumns<T>(call);
    if (error != cudaSuccess || longs == 0) return error;
    return launch(std::false_type(), std::true_type(), Grid(longs), LongOnes(call));
  }
  return ForRows(call, [&](auto marked) {
    if (splits > 1) {
      const cudaError_t error =
          launch(std::true_type(), marked, Grid(columns, splits - 1), kOneSplit);
      if (error != cudaSuccess) return error;
    }
    return launch(std::false_type(), marked, Grid(columns, splits), kOneSplit);
  });
}

template <typename Fn>
cudaError_t ForTypes(Dtype dtype, Fn&& fn) {
  switch (dtype) {
    case Dtype::kBF16: return fn(__nv_bfloat16());
    case Dtype::kF16: return fn(__half());
    default: return fn(0.0f);
  }
}

}  // namespace rwkv_jax::cuda::wkv4
