// WKV6 and WKV5 in float, exact for every decay: one thread block per head, or in the backward pass
// per head and split. wkv6/groups.cuh has the equations of a group of L tokens, and their sources.
//
// All three kernels are pipelines over stages of a few groups of tokens. While the threads compute
// one stage from shared memory, the tokens of the next stage travel to registers; then they go to
// the other buffer of shared memory, converted and scaled. The two views of the work alternate:
//
//   by state      a lane has a rectangle of S or dS (StatePartition): products with S, moving S on
//   by channel    a thread has one channel of one group (Channel): everything that does not involve S
//
// A __syncthreads between the two views orders the stores of one view before the loads of the other
// one.
#include "wkv6/groups.cuh"

namespace rwkv_jax::cuda {
namespace {

template <int N>
using ForwardPartition = StatePartition<N, N == 32 ? 2 : 4>;

template <int N, int L, int kGroups>
struct ForwardShared {
  TokenGroup<N, L> groups[2][kGroups];
  float y[2][kGroups][L][N];  // S (D(0, t) r_t)
};

template <typename T, int N, int L>
using ForwardChannel = Channel<T, N, L, ForwardPartition<N>::kThreads>;

template <typename T, int N, int L>
using ForwardMemory = ForwardShared<N, L, ForwardChannel<T, N, L>::kGroups>;

// One channel of one group of tokens on its way from global to shared memory.
template <typename T, int N, int L, bool kMarked>
struct ForwardTokens {
  T w[L], r[L], k[L], v[L];
  TileMarks<kMarked> marks;  // of the stage

  __device__ void Fetch(const ForwardChannel<T, N, L>& own, const Wkv6Call& call,
                        const Head<N>& head, int64_t first) {
    own.FetchDecay(first, w);
    own.Fetch(call.r, first, r);
    own.Fetch(call.k, first, k);
    own.Fetch(call.v, first, v);
    marks = LoadMarks<kMarked>(call.marks, head.sequence, first);
  }
  __device__ void Put(const ForwardChannel<T, N, L>& own, const Wkv6Call& call, const Head<N>& head,
                      int64_t first, TokenGroup<N, L>& group) const {
    float d[L], slope[L], reads[L], keys[L], values[L], scores[L * L];
    WithMarks<ForwardChannel<T, N, L>::kStageTokens>(marks, [&](auto marks) {
      own.ConvertDecay(w, first, own.Own(marks), d, slope);
      own.Convert(r, first, own.Own(marks), reads);
      own.Convert(k, first, own.Own(marks), keys);
      own.Convert(v, first, own.Own(marks), values);
    });
    PutDecay(d, own.channel, group);
    PutReads(d, reads, own.channel, group);
    PutWrites(d, keys, values, own.channel, group);
    Scores(d, keys, reads, call.u[head.index * N + own.channel], scores);
    PutSums<N>(scores, own.channel, group.scores);
  }
};

// By state: stores S (D(0, t) r_t) for each token of a group, and moves S on.
template <typename G, int L, bool kMarked>
__device__ void ReadState(const G& partition, const TokenGroup<G::N, L>& group,
                          TileMarks<kMarked> marks, Fragment<G>& s, float (*y)[G::N]) {
  float out[L * G::kRows];
#pragma unroll
  for (int t = 0; t < L; ++t) {
    float r[G::kCols], sums[G::kRows];
    LoadCols(partition, group.r[t], r);
    PartialDot<G>(s, r, sums);
#pragma unroll
    for (int i = 0; i < G::kRows; ++i) out[t * G::kRows + i] = sums[i];
  }
  AdvanceState(partition, group, marks, s);
  ReduceAndPut<1, G::kColGroups>(out, partition.lane, [&](int i, float sum) {
    y[i / G::kRows][partition.first_row + i % G::kRows] = sum;
  });
}

template <typename T, int N, int L, bool kMarked>
__global__ __launch_bounds__(ForwardPartition<N>::kThreads, N == 128 ? 1 : 4) void ForwardKernel(
    const __grid_constant__ Wkv6ForwardCall call) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<ForwardMemory<T, N, L>*>(memory);
  using G = ForwardPartition<N>;
  const G partition;
  const Head<N> head(blockIdx.x, call.dims.tokens, call.dims.heads, call.sequences);
  const int64_t tokens = head.span.tokens;

  Fragment<G> s;
  LoadState(partition, call.initial_state + head.State(), s);

  const ForwardChannel<T, N, L> own(call, head);
  constexpr int kStageTokens = own.kStageTokens;
  ForwardTokens<T, N, L, kMarked> coming;
  const auto put = [&](int64_t first) {
    coming.Put(own, call, head, first, shared.groups[first / kStageTokens % 2][own.group]);
  };
  if (tokens > 0) {
    coming.Fetch(own, call, head, 0);
    put(0);
  }
  __syncthreads();

  int64_t saved = head.SavedState(0);
  for (int64_t first = 0; first < tokens; first += kStageTokens) {
    const int stage = first / kStageTokens % 2;
    const bool more = first + kStageTokens < tokens;
    const TileMarks<kMarked> marks = coming.marks;
    if (more) coming.Fetch(own, call, head, first + kStageTokens);
    if (call.states != nullptr && first % kChunk == 0) {
      StatesOf(call).Store(partition, saved, s);
      saved += head.heads * N * N;
    }

    WithMarks<kStageTokens>(marks, [&](auto marks) {
#pragma unroll 1
      for (int g = 0; g < own.kGroups && first + g * L < tokens; ++g)
        ReadState(partition, shared.groups[stage][g], marks.From(g * L), s, shared.y[stage][g]);
    });

    if (more) put(first + kStageTokens);
    // By channel: what tokens read of each other, and then, after the barrier, what they read of S.
    WithMarks<kStageTokens>(marks, [&](auto marks) {
      const auto& group = shared.groups[stage][own.group];
      const auto own_marks = own.Own(marks);
      float scores[L * L], out[L] = {};
      AddSums(group.scores, scores);
#pragma unroll
      for (int i = 0; i < L; ++i)
#pragma unroll
        for (int t = i; t < L; ++t)
          if (!own_marks.Starts(i + 1, t + 1))
            out[t] = fmaf(scores[i * L + t], group.v[i][own.channel], out[t]);
      __syncthreads();
#pragma unroll
      for (int t = 0; t < L; ++t)
        if (!own_marks.Starts(0, t + 1)) out[t] += shared.y[stage][own.group][t][own.channel];
      own.Write(out, first, own_marks, call.y);
    });
  }
  StoreState(partition, call.final_state + head.State(), s);
}

// What a group of tokens does to the gradient of the state.
template <int kHeadSize>
struct alignas(16) GradientGroup {
  static constexpr int N = kHeadSize;
  static constexpr int L = kGroupTokens;

  float decay[N], r[L][N], dy[L][N];
};

// Finds the gradient of the state at the end of each split but the last one, so that splits can run
// side by side in BackwardKernel. The gradient does not depend on the state.
template <typename T, int N>
__global__ __launch_bounds__(ForwardPartition<N>::kThreads) void SplitKernel(
    const __grid_constant__ Wkv6BackwardCall call, ReplayLot lot) {
  using G = ForwardPartition<N>;
  constexpr int L = kGroupTokens;
  const G partition;
  const Head<N> head(lot.first_head + blockIdx.x, call.dims.tokens, call.dims.heads,
                     call.sequences);
  const int64_t tokens = head.span.tokens;
  if (tokens == 0) return;
  const ForwardChannel<T, N, L> own(call, head);
  constexpr int kStageTokens = own.kStageTokens;
  __shared__ GradientGroup<N> shared[own.kGroups];
  const int64_t length = lot.Length(head.span.Chunks()) * kChunk;

  Fragment<G> ds;
  LoadState(partition, call.dfinal_state + head.State(), ds);
  T raw_w[L], raw_r[L], raw_dy[L];
  TileMarks<true> next_marks;
  const auto fetch = [&](int64_t first) {
    own.FetchDecay(first, raw_w);
    own.Fetch(call.r, first, raw_r);
    own.Fetch(call.dy, first, raw_dy);
    next_marks = LoadMarks<true>(call.marks, head.sequence, first);
  };
  int64_t first = (tokens - 1) / kStageTokens * kStageTokens;
  fetch(first);
  for (; first >= length; first -= kStageTokens) {
    const TileMarks<true> marks = next_marks;
    float d[L], slope[L], r[L], dy[L];
    WithMarks<kStageTokens>(marks, [&](auto marks) {
      own.ConvertDecay(raw_w, first, own.Own(marks), d, slope);
      own.Convert(raw_r, first, own.Own(marks), r);
      own.Convert(raw_dy, first, own.Own(marks), dy);
    });
    __syncthreads();
    PutDecay(d, own.channel, shared[own.group]);
    PutReads(d, r, own.channel, shared[own.group]);
#pragma unroll
    for (int t = 0; t < L; ++t) shared[own.group].dy[t][own.channel] = dy[t];
    __syncthreads();
    if (first > length) fetch(first - kStageTokens);
    WithMarks<kStageTokens>(marks, [&](auto marks) {
#pragma unroll 1
      for (int g = own.kGroups - 1; g >= 0; --g)
        AdvanceGradient(partition, shared[g], marks.From(g * L), ds);
    });
    if (first % length == 0)
      StoreState(partition, lot.Scratch(head.turn, first / length - 1, Wkv6ScratchSize(N)), ds);
  }
}

// A lane of a large head has more rows: registers and shared memory admit no more warps.
template <int N>
using BackwardPartition = StatePartition<N, N == 128  ? 8
                                            : N == 32 ? 2
                                                      : 4>;

// Sums over the rows of a state, for each column: S^T dy_t, then dS^T v_t, then sum_v(dS * S).
enum ColumnSum {
  kReadSums = 0,
  kWriteSums = kGroupTokens,
  kStateSum = 2 * kGroupTokens,
  kColumnSums
};

// With both parts, a stage comes in while another one is computed, and both groups of a stage have memory for
// what they need of the states. Where a block has memory for one part alone, the groups take turns.
template <typename G>
struct BackwardShared {
  static constexpr int kGroups = G::kThreads / G::N;
  static_assert(kGroups == 2);
  struct Part {
    BackwardGroup<G::N> groups[kGroups];  // of a stage
    // Of one group: the sums of each warp over its own rows, and dS (D(t+1, L) k_t).
    float columns[G::kWarps][kColumnSums][G::N], dv[kGroupTokens][G::N];
  };

  float du[kGroups][G::N], dw[kGroups][G::N];  // sums over all tokens
  Part parts[2];
};

// One channel of one group of tokens on its way from global to shared memory. "Writes" are what a
// token does to the state: w, k and v.
template <typename T, int N>
struct BackwardTokens {
  static constexpr int L = kGroupTokens;
  using Own = Channel<T, N, L, BackwardPartition<N>::kThreads>;

  const Own& own;
  const Wkv6BackwardCall& call;
  const Head<N>& head;
  T w[L], r[L], k[L], v[L], dy[L];
  TileMarks<true> marks;  // of the stage

  __device__ void FetchWrites(int64_t first) {
    marks = LoadMarks<true>(call.marks, head.sequence, first);
    own.FetchDecay(first, w);
    own.Fetch(call.k, first, k);
    own.Fetch(call.v, first, v);
  }
  __device__ void Fetch(int64_t first) {
    FetchWrites(first);
    own.Fetch(call.r, first, r);
    own.Fetch(call.dy, first, dy);
  }
  __device__ void PutWrites(int64_t first, BackwardGroup<N>& group, float (&d)[L],
                            float (&slope)[L], float (&keys)[L], float (&values)[L]) const {
    WithMarks<Own::kStageTokens>(marks, [&](auto marks) {
      own.ConvertDecay(w, first, own.Own(marks), d, slope);
      own.Convert(k, first, own.Own(marks), keys);
      own.Convert(v, first, own.Own(marks), values);
    });
    PutDecay(d, own.channel, group);
    cuda::PutWrites(d, keys, values, own.channel, group);
  }
  __device__ void PutWrites(int64_t first, BackwardGroup<N>& group) const {
    float d[L], slope[L], keys[L], values[L];
    PutWrites(first, group, d, slope, keys, values);
  }
  __device__ void Put(int64_t first, BackwardGroup<N>& group) const {
    float d[L], slope[L], reads[L], keys[L], values[L], dys[L];
    PutWrites(first, group, d, slope, keys, values);
    WithMarks<Own::kStageTokens>(marks, [&](auto marks) {
      own.Convert(r, first, own.Own(marks), reads);
      own.Convert(dy, first, own.Own(marks), dys);
    });
    PutReads(d, reads, own.channel, group);
#pragma unroll
    for (int t = 0; t < L; ++t) {
      group.dy[t][own.channel] = dys[t];
      group.own[t][own.channel] = {d[t], slope[t], reads[t], keys[t]};
    }
    float sums[L * L];
    Scores(d, keys, reads, call.u[head.index * N + own.channel], sums);
    PutSums<N>(sums, own.channel, group.scores);
#pragma unroll
    for (int t = 0; t < L; ++t)
#pragma unroll
      for (int j = 0; j < L; ++j) sums[t * L + j] = j < t ? 0.0f : values[t] * dys[j];
    PutSums<N>(sums, own.channel, group.products);
  }
};

// By state: stores what the gradients of a group need of S and dS, and moves dS back to before the
// group.
template <typename G, bool kMarked>
__device__ void ReadStates(const G& partition, const BackwardGroup<G::N>& group,
                           TileMarks<kMarked> marks, const Fragment<G>& s, Fragment<G>& ds,
                           float (*columns)[G::N], float (*dv)[G::N]) {
  constexpr int kLeft = G::kCols > G::kRowGroups ? G::kCols / G::kRowGroups : 1;
  float column[G::kCols], row[G::kRows];

  // The sums are stored together: a store in between would hold back the loads behind it.
  const auto put_columns = [&](auto& sums, int which, int first) {
    if (first >= 0)
#pragma unroll
      for (auto& sum : sums) {
#pragma unroll
        for (int i = 0; i < kLeft; ++i) columns[which][partition.Col(first + i)] = sum[i];
        ++which;
      }
  };
  const auto reduce = [&](float (&sum)[kLeft]) {
    const int first = ShareOut<G::kColGroups, 32, G::kCols>(column, partition.lane);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) sum[i] = column[i];
    return first;
  };
  float out[kGroupTokens * G::kRows];
#pragma unroll
  for (int t = 0; t < kGroupTokens; ++t) {
    LoadCols(partition, group.k[t], column);
    PartialDot<G>(ds, column, row);
#pragma unroll
    for (int i = 0; i < G::kRows; ++i) out[t * G::kRows + i] = row[i];
  }
  ReduceAndPut<1, G::kColGroups>(out, partition.lane, [&](int i, float sum) {
    dv[i / G::kRows][partition.first_row + i % G::kRows] = sum;
  });

  float reads[kGroupTokens][kLeft], writes[kGroupTokens + 1][kLeft];
  int first;
#pragma unroll
  for (int t = 0; t < kGroupTokens; ++t) {
    LoadRows(partition, group.dy[t], row);
    TransposedDot<G>(row, s, column);
    first = reduce(reads[t]);
  }
  put_columns(reads, kReadSums, first);
#pragma unroll
  for (int t = 0; t < kGroupTokens; ++t) {
    LoadRows(partition, group.v[t], row);
    TransposedDot<G>(row, ds, column);
    first = reduce(writes[t]);
  }
#pragma unroll
  for (int c = 0; c < G::kCols; ++c) {
    column[c] = s[0][c] * ds[0][c];
#pragma unroll
    for (int i = 1; i < G::kRows; ++i) column[c] = fmaf(s[i][c], ds[i][c], column[c]);
  }
  first = reduce(writes[kGroupTokens]);
  put_columns(writes, kWriteSums, first);

  AdvanceGradient(partition, group, marks, ds);
}

// By channel: dv of a group. dv_t is what S gives, and what the tokens from t on read of token t.
template <int L, typename Own, typename Marks, int N>
__device__ void WriteValueGradients(const Own& own, const BackwardGroup<N>& group,
                                    const float (&from_state)[L][N], int64_t first, Marks marks,
                                    void* dv) {
  float scores[L * L], x[L];
  AddSums(group.scores, scores);
#pragma unroll
  for (int t = 0; t < L; ++t) {
    x[t] = marks.Starts(t + 1, L) ? 0.0f : from_state[t][own.channel];
#pragma unroll
    for (int j = t; j < L; ++j)
      if (!marks.Starts(t + 1, j + 1))
        x[t] = fmaf(scores[t * L + j], group.dy[j][own.channel], x[t]);
  }
  own.Write(x, first, marks, dv);
}

// By channel: dr, dw and dk of a group, and its share of du and of the sum of dw. In one channel,
// the products of S_{t-1} and of dS_t with dy_j, v_j and each other follow the recurrences of S and
// dS, and are cleared where S and dS are.
template <int L, typename Own, typename Marks, int N, int kWarps>
__device__ void WriteChannelGradients(const Own& own, const Wkv6BackwardCall& call, float u,
                                      const BackwardGroup<N>& group,
                                      const float (&from_states)[kWarps][kColumnSums][N],
                                      int64_t first, Marks marks, float& du_total,
                                      float& dw_total) {
  float products[L * L], columns[kColumnSums];
  AddSums(group.products, products);
#pragma unroll
  for (int which = 0; which < kColumnSums; ++which) {
    columns[which] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp)
      columns[which] += from_states[warp][which][own.channel];
  }
  float d[L], slope[L], r[L], k[L];
#pragma unroll
  for (int t = 0; t < L; ++t) {
    const float4 x = group.own[t][own.channel];
    d[t] = x.x, slope[t] = x.y, r[t] = x.z, k[t] = x.w;
  }
  float* const reads = columns + kReadSums;
  float* const writes = columns + kWriteSums;
  float state = columns[kStateSum], dr[L], dw[L], dk[L], dw_sum = 0.0f, du_sum = 0.0f;
#pragma unroll
  for (int t = 0; t < L; ++t) {
    if (marks.Starts(t)) {
      state = 0.0f;
#pragma unroll
      for (int j = t; j < L; ++j) reads[j] = 0.0f;
    }
    dr[t] = fmaf(products[t * L + t], u * k[t], reads[t]);
    float x = state;
#pragma unroll
    for (int j = L - 1; j > t; --j) x = marks.Starts(j) ? 0.0f : fmaf(x, d[j], r[j] * reads[j]);
    dw[t] = marks.Absent(t) ? 0.0f : slope[t] * x;
    dw_sum += dw[t];
#pragma unroll
    for (int j = t + 1; j < L; ++j) reads[j] = fmaf(reads[j], d[t], k[t] * products[t * L + j]);
    state = fmaf(state, d[t], k[t] * writes[t]);
  }
  own.Write(dr, first, marks, call.dr);
  if (!call.constant_decay) own.Write(dw, first, marks, call.dw);
#pragma unroll
  for (int t = L - 1; t >= 0; --t) {
    dk[t] = fmaf(products[t * L + t], u * r[t], writes[t]);
    du_sum = fmaf(products[t * L + t], r[t] * k[t], du_sum);
#pragma unroll
    for (int j = 0; j < t; ++j)
      writes[j] = marks.Starts(t) ? 0.0f : fmaf(writes[j], d[t], r[t] * products[j * L + t]);
  }
  own.Write(dk, first, marks, call.dk);
  du_total += du_sum;
  dw_total += dw_sum;
}

// The chunks of a split run from the last to the first. In each chunk the tokens are first replayed
// from the saved state, which leaves the state before each stage in scratch; then the stages run
// from the last to the first. Only what depends on S before a group or on dS after it is summed
// over rows (ReadStates); each channel finds its gradients from that alone.
template <typename T, int N>
__global__ __launch_bounds__(BackwardPartition<N>::kThreads, N == 128 ? 1 : 3) void BackwardKernel(
    const __grid_constant__ Wkv6BackwardCall call, bool both_fit, ReplayLot lot) {
  using G = BackwardPartition<N>;
  constexpr int L = kGroupTokens;
  using Own = Channel<T, N, L, G::kThreads>;
  constexpr int kStageTokens = Own::kStageTokens, kGroups = Own::kGroups;
  static_assert(kStageTokens == kWkv6ReplayTokens);
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  using Shared = BackwardShared<G>;
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const bool both = sizeof(Shared) <= kLeastSharedMemory || both_fit;
  const auto part_of = [&](int i) -> auto& { return shared.parts[both ? i % 2 : 0]; };
  const G partition;
  const Head<N> head(lot.Turn(), call.dims.tokens, call.dims.heads, call.sequences);
  const int64_t tokens = head.span.tokens, chunks = head.span.Chunks();
  const int64_t split = lot.Split(), length = lot.Length(chunks);
  const int64_t first_chunk = split * length;
  const int64_t last_chunk = first_chunk + length < chunks ? first_chunk + length : chunks;
  float* const ds_end = lot.Scratch(head.turn, split, Wkv6ScratchSize(N));

  Fragment<G> ds, s;
  LoadState(partition, last_chunk == chunks ? call.dfinal_state + head.State() : ds_end, ds);

  const Own own(call, head);
  float& du_total = shared.du[own.group][own.channel];
  float& dw_total = shared.dw[own.group][own.channel];
  du_total = dw_total = 0.0f;

  for (int64_t chunk = last_chunk - 1; chunk >= first_chunk; --chunk) {
    const int64_t start = chunk * kChunk;
    const int in_chunk = static_cast<int>(tokens - start < kChunk ? tokens - start : kChunk);
    const int stages = (in_chunk + kStageTokens - 1) / kStageTokens;
    const auto load_state = [&](int i) {
      if (i > 0)
        LoadState(partition, ds_end + i * N * N, s);
      else
        StatesOf(call).Load(partition, head.SavedState(chunk), s);
    };
    BackwardTokens<T, N> coming{own, call, head};
    const auto first_of = [&](int i) { return start + i * kStageTokens; };
    const auto own_group = [&](int i) -> BackwardGroup<N>& { return part_of(i).groups[own.group]; };
    // Before the next stage or group comes: all threads are done with the one whose memory it takes.
    const auto wait_for_memory = [&] {
      if (!both) __syncthreads();
    };

    // Replay the chunk.
    load_state(0);
    if (stages > 1) {
      coming.FetchWrites(first_of(0));
      coming.PutWrites(first_of(0), own_group(0));
      __syncthreads();
      for (int i = 0; i + 1 < stages; ++i) {
        const bool more = i + 2 < stages;
        const TileMarks<true> marks = coming.marks;
        if (more) coming.FetchWrites(first_of(i + 1));
        WithMarks<kStageTokens>(marks, [&](auto marks) {
#pragma unroll 1
          for (int g = 0; g < kGroups; ++g)
            AdvanceState(partition, part_of(i).groups[g], marks.From(g * L), s);
        });
        StoreState(partition, ds_end + (i + 1) * N * N, s);
        wait_for_memory();
        if (more) coming.PutWrites(first_of(i + 1), own_group(i + 1));
        __syncthreads();
      }
    }

    coming.Fetch(first_of(stages - 1));
    coming.Put(first_of(stages - 1), own_group(stages - 1));
    __syncthreads();
    for (int i = stages - 1; i >= 0; --i) {
      const TileMarks<true> marks = coming.marks;
      if (i > 0) coming.Fetch(first_of(i - 1));
      const auto& groups = part_of(i).groups;
      const auto write = [&](const auto& part) {
        WithMarks<kStageTokens>(marks, [&](auto marks) {
          const auto own_marks = own.Own(marks);
          WriteValueGradients<L>(own, groups[own.group], part.dv, first_of(i), own_marks, call.dv);
          WriteChannelGradients<L>(own, call, call.u[head.index * N + own.channel],
                                   groups[own.group], part.columns, first_of(i), own_marks,
                                   du_total, dw_total);
        });
      };
#pragma unroll 1
      for (int g = kGroups - 1; g >= 0; --g) {
        if (g + 1 < kGroups) load_state(i);
#pragma unroll 1
        for (int before = 0; before < g; ++before)
          AdvanceState(partition, groups[before], marks.From(before * L), s);
        ReadStates(partition, groups[g], marks.From(g * L), s, ds,
                   part_of(g).columns[threadIdx.x / 32], part_of(g).dv);
        if (g == 0 && i > 0) load_state(i - 1);
        if (both && g > 0) continue;
        __syncthreads();
        if (both || own.group == g) write(part_of(own.group));
        wait_for_memory();
      }
      if (i > 0) coming.Put(first_of(i - 1), own_group(i - 1));
      __syncthreads();
    }
  }

  // The groups of a stage have the same channels.
  __syncthreads();
  if (own.group == 0) {
#pragma unroll
    for (int g = 1; g < kGroups; ++g) {
      du_total += shared.du[g][own.channel];
      dw_total += shared.dw[g][own.channel];
    }
    const int64_t sum = head.sequence * lot.scratch.splits + split;
    const int64_t at = (sum * head.heads + head.head) * N + own.channel;
    call.du[at] = du_total;
    if (call.constant_decay) static_cast<float*>(call.dw)[at] = dw_total;
  }
  if (split == 0) StoreState(partition, call.dinitial_state + head.State(), ds);
}

}  // namespace

cudaError_t Wkv6Forward(cudaStream_t stream, const Wkv6ForwardCall& call) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  return ForFloatOrHalf(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    const auto launch = [&](auto tokens, auto marked) {
      constexpr int L = tokens();
      return Launch(ForwardKernel<T, N, L, marked()>, heads, ForwardPartition<N>::kThreads,
                    sizeof(ForwardMemory<T, N, L>), stream, call);
    };
    if (call.dims.tokens == 1 && !call.marks.Given() && !call.sequences.Given())
      return launch(std::integral_constant<int, 1>(), std::false_type());
    return ForMarks(call.marks, [&](auto marked) {
      return launch(std::integral_constant<int, kGroupTokens>(), marked);
    });
  });
}

cudaError_t Wkv6Backward(cudaStream_t stream, const Wkv6BackwardCall& call, const Device& device,
                         const ReplayScratch& scratch) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  return ForFloatOrHalf(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    return ForHeads(heads, scratch, [&](const ReplayLot& lot, int64_t count) {
      if (scratch.splits > 1 && call.dims.tokens > 0) {
        const cudaError_t error =
            Launch(SplitKernel<T, N>, count, ForwardPartition<N>::kThreads, 0, stream, call, lot);
        if (error != cudaSuccess) return error;
      }
      using Shared = BackwardShared<BackwardPartition<N>>;
      const bool both = static_cast<int64_t>(sizeof(Shared)) <= device.shared_memory;
      return Launch(BackwardKernel<T, N>, count * scratch.splits, BackwardPartition<N>::kThreads,
                    sizeof(Shared) - (both ? 0 : sizeof(typename Shared::Part)), stream, call, both,
                    lot);
    });
  });
}

}  // namespace rwkv_jax::cuda
