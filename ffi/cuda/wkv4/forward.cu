// The forward pass of WKV4, and its step. wkv4/runs.cuh has the recurrence and its sources.
#include "fragment.cuh"
#include "wkv4/runs.cuh"
#include "wkv4/kernels.h"

namespace rwkv_jax::cuda {
namespace wkv4 {
namespace {

// y of one token, from the state before it.
__device__ float Read(const Sums& state, float u, float key, float value) {
  const float own = u + key;
  const float log_max = fmaxf(state.log_max, own);
  const float before = Exp(state.log_max - log_max), now = Exp(own - log_max);
  return fmaf(before, state.num, now * value) * Reciprocal(fmaf(before, state.den, now));
}

// Stores y of the tokens of a run, from the state before the run.
template <typename T, bool kMarked>
__device__ void Write(const Column<T>& column, const Wkv4ForwardCall& call,
                      const Place<T, kMarked>& place, const Weights<T, kMarked>& weights,
                      const Channel (&channel)[kWidth<T>], Sums (&state)[kWidth<T>]) {
  constexpr int W = kWidth<T>;
  uint32_t slow = weights.slow;
#pragma unroll
  for (int c = 0; c < W; ++c)
    if (!(fmaf(state[c].log_max, kLog2E, -weights.gauge[c]) <= kNear)) slow |= place.Readers();
  float y[W];
  if (kMarked ? slow != ~0u : slow == 0) {
    place.WithMarks([&](auto marks) {
      float num[W], den[W];
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const float scale = weights.Relative(state[c].log_max, weights.gauge[c]);
        num[c] = state[c].num * scale;
        den[c] = state[c].den * scale;
      }
      T* to = static_cast<T*>(call.y) + column.At(place.row);
#pragma unroll
      for (int t = 0; t < kRun; ++t, to += column.channels) {
#pragma unroll
        for (int c = 0; c < W; ++c) {
          if (marks.Starts(t)) num[c] = den[c] = 0.0f;
          const float weight = weights.weight[t][c], weighted = weights.weighted[t][c];
          y[c] = fmaf(channel[c].bonus, weighted, num[c]) *
                 Reciprocal(fmaf(channel[c].bonus, weight, den[c]));
          if (marks.Absent(t)) {
            y[c] = 0.0f;
            continue;
          }
          num[c] = fmaf(channel[c].decay, num[c], weighted);
          den[c] = fmaf(channel[c].decay, den[c], weight);
        }
        if (place.Has(marks, t)) *reinterpret_cast<uint32_t*>(to) = Pack<T>(y);
      }
    });
    if (!kMarked || slow == 0) return;
  }
  place.ForEach(column, call, [&](int t, int c, float key, float value) {
    if (kMarked && !(slow >> t & 1)) return;
    Enter(place.marks, t, state[c]);
    y[c] = place.marks.Absent(t) ? 0.0f : Read(state[c], column.LoadBonus(call, c), key, value);
    Take(place.marks, t, channel[c].w, key, value, state[c]);
    if (c == W - 1) column.StoreEach(call.y, column.At(place.row + t), y);
  });
}

// A block has a split of a column. If there are several splits, the kernel first runs with kTransition
// for all splits but the last one, and stores what the tokens of a split add up to by themselves.
//
// Each chunk has one barrier, a __syncthreads: a warp waits there until all warps have stored the
// sums of their runs, and then finds the state before its run. ChunkSums have two stages, so a warp
// that is ahead stores the next chunk's sums beside the present ones. The words of a
// run belong to one warp, which copies those of two chunks later in their place once it has read them.
template <typename T, bool kTransition, bool kMarked>
__global__ __launch_bounds__(kThreads, kWidth<T> == 1 ? 3 : 2) void ForwardKernel(
    const __grid_constant__ Wkv4ForwardCall call, int64_t splits, Wkv4State<float> transitions,
    Splits longs) {
  constexpr int W = kWidth<T>;
  __shared__ ChunkSums<T> by_run[2];
  __shared__ ChunkWords<2> chunk_words[2];
  __shared__ __align__(16) uint32_t words[kThreads];
  SharedMarks<kMarked> marks{words};
  const int warp = Warp();
  const bool last_warp = warp == kWarps - 1;
  const Column<T> column = ColumnOfBlock<T, kMarked>(call, longs);
  if (kMarked && column.sequence < 0) return;
  const int64_t split = blockIdx.y;
  const Span& span = column.span;
  const Division division(span, splits);
  const int64_t begin = division.First(split), end = division.First(split + 1);
  const int64_t transition_row = column.sequence * (splits - 1) * kWkv4ForwardTransition;
  const auto copy = [&](int64_t start, int stage) {
    if (start < end)
      chunk_words[stage].Copy(column, {call.k, call.v}, span.first_token + start + kRun * warp,
                              ChunkLength(start, end) - kRun * warp, warp);
    CommitCopies();
  };
  copy(begin, 0);
  copy(begin + kChunk, 1);
  Channel channel[W];
#pragma unroll
  for (int c = 0; c < W; ++c) {
    channel[c] = column.LoadChannel(call, c);
    Sums state = kTransition ? Nothing() : column.LoadState(call.initial_state, column.sequence, c);
#pragma unroll 1
    for (int64_t i = 0; i < split && !kTransition; ++i)
      state =
          PassageOf<kMarked>(division, i, call.marks, column.sequence)
              .Join(state, channel[c].w,
                    column.LoadState(transitions, transition_row + i * kWkv4ForwardTransition, c));
    // The last warp keeps track of the state before the chunk.
    if (last_warp) by_run[0][kWarps].Put(c, state);
  }

  marks.Bring(call.marks, column.sequence, begin / kChunk);
  int stage = 0;
  for (int64_t start = begin; start < end; start += kChunk, stage ^= 1) {
    const Runs<kMarked> runs(ChunkLength(start, end), marks.Of(start / kChunk));
    const Place<T, kMarked> place(column, span.first_token + start, runs, warp);
    Words k, v;
    WaitForCopies<1>();
    __syncwarp();
    k.Load(chunk_words[stage].of[0][warp]);
    v.Load(chunk_words[stage].of[1][warp]);
    const Weights<T, kMarked> weights(column, call, place, k, v, channel);
#pragma unroll
    for (int c = 0; c < W; ++c) by_run[stage][warp].Put(c, weights.sums[c]);
    __syncthreads();
    copy(start + 2 * kChunk, stage);
    Sums before[W];
    Before<T>(by_run[stage], warp, runs, channel, before);
#pragma unroll
    for (int c = 0; c < W; ++c)
      if (last_warp)
        by_run[stage ^ 1][kWarps].Put(c,
                                      place.Over().Join(before[c], channel[c].w, weights.sums[c]));
    if (!kTransition && warp == 0 && call.states.num != nullptr)
#pragma unroll
      for (int c = 0; c < W; ++c)
        column.StoreState(call.states, span.first_chunk + start / kChunk, c, before[c]);
    if constexpr (!kTransition) Write(column, call, place, weights, channel, before);
    const int64_t next = start / kChunk + 1;
    if (!marks.Follows(next)) marks.Bring(call.marks, column.sequence, next);
  }

#pragma unroll
  for (int c = 0; c < W; ++c) {
    if (!last_warp) continue;
    const Sums state = by_run[stage][kWarps].Get(c);
    if constexpr (kTransition)
      column.StoreState(transitions, transition_row + split * kWkv4ForwardTransition, c, state);
    else if (split == splits - 1)
      column.StoreState(call.final_state, column.sequence, c, state);
  }
}

// A warp has a column, and takes it run by run.
template <typename T>
__global__ __launch_bounds__(kThreads, kWidth<T> == 1 ? 3 : 2) void ForwardByWarpsKernel(
    const __grid_constant__ Wkv4ForwardCall call) {
  constexpr int W = kWidth<T>;
  using Place = Place<T, true>;
  const Column<T> column = ColumnOfWarp<T>(call);
  const Span& span = column.span;
  if (column.sequence < 0 || span.tokens > kFewTokens) return;
  Words k, v;
  const auto place_at = [&](int64_t start) {
    return Place::Of(column, span.first_token + start, span.tokens - start);
  };
  const auto load = [&](int64_t start) {
    const Place place = place_at(start);
    if (!place.Whole(column)) return;
    k.Load(column, call.k, place);
    v.Load(column, call.v, place);
  };
  load(0);
  Channel channel[W];
  Sums state[W], before[W];
#pragma unroll
  for (int c = 0; c < W; ++c) {
    channel[c] = column.LoadChannel(call, c);
    state[c] = column.LoadState(call.initial_state, column.sequence, c);
  }
#pragma unroll 1
  for (int64_t start = 0; start < span.tokens; start += kRun) {
    const Place place = place_at(start);
    const Weights<T, true> weights(column, call, place, k, v, channel);
    load(start + kRun);
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (start % kChunk == 0 && call.states.num != nullptr)
        column.StoreState(call.states, span.first_chunk + start / kChunk, c, state[c]);
      before[c] = state[c];
      state[c] = place.Over().Join(state[c], channel[c].w, weights.sums[c]);
    }
    Write(column, call, place, weights, channel, before);
  }
#pragma unroll
  for (int c = 0; c < W; ++c) column.StoreState(call.final_state, column.sequence, c, state[c]);
}

// One token. A thread has one channel of one sequence.
template <typename T>
__global__ __launch_bounds__(kThreads) void StepKernel(
    const __grid_constant__ Wkv4ForwardCall call) {
  const int64_t channels = call.dims.batch * call.dims.channels;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= channels) return;
  const float key = ToFloat(static_cast<const T*>(call.k)[i]);
  const float value = ToFloat(static_cast<const T*>(call.v)[i]);
  const Sums state{call.initial_state.num[i], call.initial_state.den[i],
                   call.initial_state.log_max[i]};
  static_cast<T*>(call.y)[i] = FromFloat<T>(Read(state, call.u[i], key, value));
  const Sums after = Add(state, UnboundedLogDecay(call.w[i], call.decay).x, {value, 1.0f, key});
  call.final_state.num[i] = after.num;
  call.final_state.den[i] = after.den;
  call.final_state.log_max[i] = after.log_max;
}

}  // namespace
}  // namespace wkv4

cudaError_t Run(cudaStream_t stream, const Wkv4ForwardCall& call, const Plan& plan,
                float* scratch) {
  return wkv4::ForTypes(call.dtype, [&](auto zero) -> cudaError_t {
    using T = decltype(zero);
    if (call.dims.tokens == 1 && call.states.num == nullptr && !call.marks.Given() &&
        !call.sequences.Given()) {
      const int64_t channels = call.dims.batch * call.dims.channels;
      return Launch(wkv4::StepKernel<T>, (channels + wkv4::kThreads - 1) / wkv4::kThreads,
                    wkv4::kThreads, 0, stream, call);
    }
    const Wkv4State<float> transitions = wkv4::Transitions(call, scratch);
    return wkv4::RunColumns<T>(
        call, plan.splits, wkv4::ByWarps<T>(call, plan, 4 * kChunk),
        [&](int64_t blocks) {
          return Launch(wkv4::ForwardByWarpsKernel<T>, blocks, wkv4::kThreads, 0, stream, call);
        },
        [&](auto transition, auto marked, const Grid& blocks, const Splits& longs) {
          return Launch(wkv4::ForwardKernel<T, transition(), marked()>, blocks, wkv4::kThreads, 0,
                        stream, call, plan.splits, transitions, longs);
        });
  });
}

}  // namespace rwkv_jax::cuda
