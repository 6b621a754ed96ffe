// The backward pass of WKV4. wkv4/runs.cuh has the recurrence and its sources; the official
// backward kernel is kernel_backward in RWKV-v4/cuda/wkv_cuda.cu of RWKV-LM.
//
// N = num e^log_max and D = den e^log_max are linear in what came before:
//   y_t = (N_t + o_t v_t) / (D_t + o_t), o_t = e^(u + k_t)
//   N_{t+1} = e^w N_t + e^(k_t) v_t, D_{t+1} = e^w D_t + e^(k_t)
// So their cotangents A and B are sums that decay backwards, and are added up as the state itself
// is:
//   A_t = e^w A_{t+1} + a_t, a_t = dy_t / (D_t + o_t);  B_t = e^w B_{t+1} + b_t, b_t = -a_t y_t
// where the cotangents of the final num and den are A_T and B_T times e^log_max. What num and den
// leave of the cotangent of the final log_max goes to the token, or to the initial state, that
// log_max is from.
#include "wkv4/runs.cuh"
#include "wkv4/kernels.h"

namespace rwkv_jax::cuda {
namespace wkv4 {
namespace {

// The scale of a weight times a cotangent. The weight is one of the summands in the denominators of
// the cotangent, so the scale is at most 1. It can be more where a run takes it relative to a
// gauge, and where the rounding errors of huge exponents would make it infinite; hence the bound.
__device__ float Weigh(float weight_log, float cotangent_log_max) {
  return Exp2(fminf((weight_log + cotangent_log_max) * kLog2E, 2.0f * kNear));
}

template <typename T>
struct KeptStates {
  static constexpr int W = kWidth<T>;

  // For each token of a run, the state before it: num, den and, for a slow token, log_max. Where weights are
  // near, the third is the weight of the token.
  alignas(sizeof(float) * W) float kept[kRun][3][kThreads][W];

  __device__ float& Kept(int t, int part, int c) { return kept[t][part][threadIdx.x][c]; }
  // Both channels of a lane in one access.
  __device__ void Keep(int t, int part, const float (&x)[W]) {
    Vector& to = *reinterpret_cast<Vector*>(kept[t][part][threadIdx.x]);
    if constexpr (W == 1)
      to = x[0];
    else
      to = {x[0], x[1]};
  }
  __device__ void Load(int t, int part, float (&x)[W]) const {
    const Vector from = *reinterpret_cast<const Vector*>(kept[t][part][threadIdx.x]);
    if constexpr (W == 1)
      x[0] = from;
    else
      x[0] = from.x, x[1] = from.y;
  }

 private:
  using Vector = std::conditional_t<W == 1, float, float2>;
};

template <typename T>
struct BackwardShared : KeptStates<T> {
  ChunkWords<3> words;
  ChunkSums<T> runs, cotangents[2];
  float dlog_max[kWidth<T>][32];
};
static_assert(sizeof(BackwardShared<__half>) + 4 * kThreads <= kLeastSharedMemory);

// The backward pass of one run: Replay, and then Write.
template <typename T, bool kMarked>
struct BackwardRun {
  static constexpr int W = kWidth<T>;

  const Column<T>& column;
  const Wkv4BackwardCall& call;
  const Channel (&channel)[W];
  KeptStates<T>& shared;
  const Place<T, kMarked>& place;
  const Weights<T, kMarked>& weights;
  const Words &v, &dy;
  uint32_t slow;

  // Keeps the weights, where they are near. Has to come before Replay.
  __device__ void KeepWeights() {
    if (weights.slow == ~0u) return;
#pragma unroll
    for (int t = 0; t < kRun; ++t) shared.Keep(t, 2, weights.weight[t]);
  }

  struct Own {
    Sums cotangent;  // a_t and b_t
    float weight;    // o_t
    float lead;      // v_t - y_t, which is exactly 0 where there is nothing before
  };
  // Token t in the general way, for slow tokens.
  __device__ Own OwnCotangent(const Sums& state, int t, int c, float key, float value) const {
    float dys[W];
    column.LoadEach(call.dy, column.At(place.row + t), dys);
    const float own = column.LoadBonus(call, c) + key;
    const float log_max = fmaxf(state.log_max, own);
    const float before = Exp(state.log_max - log_max), now = Exp(own - log_max);
    const float scale = Reciprocal(fmaf(before, state.den, now));
    const float lead = before * fmaf(state.den, value, -state.num) * scale;
    const float num = dys[c] * scale;
    return {{num, -num * (value - lead), -log_max}, now, lead};
  }

  // Token t where weights are near: a_t, b_t and v_t - y_t, from N_t and D_t.
  struct Near {
    float a, b, lead;
  };
  __device__ Near NearToken(int c, float weight, float num, float den, float value,
                            float dy) const {
    const float own = channel[c].bonus * weight;
    const float scale = Reciprocal(den + own), a = dy * scale;
    const float lead = fmaf(den, value, -num) * scale;
    return {a, -a * (value - lead), lead};
  }
  __device__ bool Fast() const { return kMarked ? slow != ~0u : slow == 0; }
  __device__ bool Slow(int t) const { return !kMarked || slow >> t & 1; }

  // Keeps the state before each token, and finds what the cotangents of y add to the cotangent of
  // the state before the run.
  __device__ void Replay(const Sums (&before)[W], Sums (&cotangents)[W]) {
    slow = weights.slow;
#pragma unroll
    for (int c = 0; c < W; ++c)
      if (!(fmaf(before[c].log_max, kLog2E, -weights.gauge[c]) <= kNear)) slow |= place.Readers();
#pragma unroll
    for (int c = 0; c < W; ++c) cotangents[c] = Nothing();
    if (Fast()) {
      place.WithMarks([&](auto marks) { ReplayNear(marks, before, cotangents); });
      if (!kMarked || slow == 0) return;
    }
    Sums state[W], rest[W];
#pragma unroll
    for (int c = 0; c < W; ++c) state[c] = before[c], rest[c] = Nothing();
    place.ForEach(column, call, [&](int t, int c, float key, float value) {
      if (!Slow(t)) return;
      Enter(place.marks, t, state[c]);
      shared.Kept(t, 0, c) = state[c].num;
      shared.Kept(t, 1, c) = state[c].den;
      shared.Kept(t, 2, c) = state[c].log_max;
      Take(place.marks, t, channel[c].w, key, value, state[c]);
    });
    place.ForEachBackwards(column, call, [&](int t, int c, float key, float value) {
      if (place.marks.Absent(t)) return;
      if (Slow(t)) {
        const Own own = OwnCotangent(Kept(t, c), t, c, key, value);
        rest[c] = Add(rest[c], channel[c].w, own.cotangent);
      }
      Enter(place.marks, t, rest[c]);
    });
    if (!kMarked || slow & place.Readers())
#pragma unroll
      for (int c = 0; c < W; ++c) cotangents[c] = rest[c];
  }

  template <bool kSome>
  __device__ void ReplayNear(TileMarks<kSome> marks, const Sums (&before)[W],
                             Sums (&cotangents)[W]) {
    float num[W], den[W], decays[W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float scale = weights.Relative(before[c].log_max, weights.gauge[c]);
      num[c] = before[c].num * scale;
      den[c] = before[c].den * scale;
      // The cotangents are relative to a key, which is the gauge but for rounding.
      cotangents[c].log_max = -weights.gauge[c] * (1.0f / kLog2E);
      decays[c] = weights.Relative(-cotangents[c].log_max, weights.gauge[c]);
    }
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
      float value[W], dys[W], weight[W];
      Unpack<T>(v.x[t], value);
      Unpack<T>(dy.x[t], dys);
      shared.Load(t, 2, weight);
#pragma unroll
      for (int c = 0; c < W; ++c)
        if (marks.Starts(t)) num[c] = den[c] = 0.0f;
      shared.Keep(t, 0, num);
      shared.Keep(t, 1, den);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        if (marks.Absent(t)) continue;
        const Near near = NearToken(c, weight[c], num[c], den[c], value[c], dys[c]);
        if (!marks.Starts(0, t + 1)) {
          cotangents[c].num = fmaf(decays[c], near.a, cotangents[c].num);
          cotangents[c].den = fmaf(decays[c], near.b, cotangents[c].den);
          decays[c] *= channel[c].decay;
        }
        num[c] = fmaf(channel[c].decay, num[c], weight[c] * value[c]);
        den[c] = fmaf(channel[c].decay, den[c], weight[c]);
      }
    }
    if (kSome && place.Readers() == 0)
#pragma unroll
      for (int c = 0; c < W; ++c) cotangents[c] = Nothing();
  }

  __device__ Sums Kept(int t, int c) const {
    return {shared.Kept(t, 0, c), shared.Kept(t, 1, c), shared.Kept(t, 2, c)};
  }

  // The token of the run that log_max after the run is from.
  __device__ int LargestToken(int own) const {
    float log_max = -FLT_MAX;
    int token = 0;
    place.ForEach(column, call, [&](int t, int c, float key, float) {
      if (c != own || place.marks.Absent(t)) return;
      if (place.marks.Starts(t)) log_max = -FLT_MAX;
      log_max += channel[own].w;
      if (key > log_max) log_max = key, token = t;
    });
    return token;
  }

  // Stores dk and dv, from the cotangent of the state after the run, and adds to dw and du. The dk
  // of token at[c] gets dlog_max as well.
  __device__ void Write(const Sums (&after)[W], const int (&at)[W], const float (&dlog_max)[W],
                        float (&dw)[W], float (&du)[W]) {
    if (Fast()) {
      place.WithMarks([&](auto marks) { WriteNear(marks, after, at, dlog_max, dw, du); });
      if (!kMarked || slow == 0) return;
    }
    float dk[W], dv[W];
    Sums rest[W];
#pragma unroll
    for (int c = 0; c < W; ++c) rest[c] = after[c];
    place.ForEachBackwards(column, call, [&](int t, int c, float key, float value) {
      if (!Slow(t)) {
        Enter(place.marks, t, rest[c]);
        return;
      }
      dv[c] = dk[c] = 0.0f;
      if (!place.marks.Absent(t)) {
        const Sums state = Kept(t, c);
        const Own own = OwnCotangent(state, t, c, key, value);
        const float past = Weigh(state.log_max + channel[c].w, rest[c].log_max);
        dw[c] = fmaf(past, fmaf(rest[c].num, state.num, rest[c].den * state.den), dw[c]);
        const float to_own = own.weight * own.cotangent.num * own.lead;
        du[c] += to_own;
        const float weight = Weigh(key, rest[c].log_max);
        dv[c] = fmaf(weight, rest[c].num, own.weight * own.cotangent.num);
        dk[c] = fmaf(weight, fmaf(rest[c].num, value, rest[c].den), to_own);
        if (t == at[c]) dk[c] += dlog_max[c];
        rest[c] = Add(rest[c], channel[c].w, own.cotangent);
        Enter(place.marks, t, rest[c]);
      }
      if (c == W - 1) {
        column.StoreEach(call.dk, column.At(place.row + t), dk);
        column.StoreEach(call.dv, column.At(place.row + t), dv);
      }
    });
  }

  template <bool kSome>
  __device__ void WriteNear(TileMarks<kSome> marks, const Sums (&after)[W], const int (&at)[W],
                            const float (&dlog_max)[W], float (&dw)[W], float (&du)[W]) {
    float dk[W], dv[W], num[W], den[W], to_w[W] = {}, to_u[W] = {};
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float scale =
          Exp2(fminf(fmaf(after[c].log_max, kLog2E, weights.last_gauge[c]), 2.0f * kNear));
      num[c] = after[c].num * scale;
      den[c] = after[c].den * scale;
    }
    const int64_t last = column.At(place.row + kRun - 1);
    T *dk_to = static_cast<T*>(call.dk) + last, *dv_to = static_cast<T*>(call.dv) + last;
#pragma unroll
    for (int t = kRun - 1; t >= 0; --t, dk_to -= column.channels, dv_to -= column.channels) {
      float value[W], dys[W], kept_num[W], kept_den[W], weight[W];
      Unpack<T>(v.x[t], value);
      Unpack<T>(dy.x[t], dys);
      shared.Load(t, 0, kept_num);
      shared.Load(t, 1, kept_den);
      shared.Load(t, 2, weight);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        dk[c] = dv[c] = 0.0f;
        if (marks.Absent(t)) continue;
        const Near near = NearToken(c, weight[c], kept_num[c], kept_den[c], value[c], dys[c]);
        const float to_own = near.a * near.lead;
        if (!kSome || !Slow(t)) {
          to_w[c] = fmaf(num[c], kept_num[c], fmaf(den[c], kept_den[c], to_w[c]));
          to_u[c] = fmaf(weight[c], to_own, to_u[c]);
        }
        dv[c] = weight[c] * fmaf(channel[c].bonus, near.a, num[c]);
        dk[c] = fmaf(weight[c], fmaf(channel[c].bonus, to_own, fmaf(num[c], value[c], den[c])),
                     t == at[c] ? dlog_max[c] : 0.0f);
        num[c] = fmaf(channel[c].decay, num[c], near.a);
        den[c] = fmaf(channel[c].decay, den[c], near.b);
        if (marks.Starts(t)) num[c] = den[c] = 0.0f;
      }
      if (place.Has(marks, t)) {
        *reinterpret_cast<uint32_t*>(dk_to) = Pack<T>(dk);
        *reinterpret_cast<uint32_t*>(dv_to) = Pack<T>(dv);
      }
    }
#pragma unroll
    for (int c = 0; c < W; ++c) {
      dw[c] = fmaf(channel[c].decay, to_w[c], dw[c]);
      du[c] = fmaf(channel[c].bonus, to_u[c], du[c]);
    }
  }
};

// The run that log_max after a chunk is from, or -1 if it is from the state before the chunk.
template <typename T, bool kMarked>
__device__ int LargestRun(const ChunkSums<T>& by_run, const Runs<kMarked>& runs, float w, int c) {
  const auto log_max = [&](int j) { return by_run[j].parts[2][Lane()][c]; };
  float largest = log_max(0);
  int run = 0;
  for (int j = 1; kRun * j < runs.length; ++j) {
    const Passage passage = runs.Of(j);
    largest = fmaf(passage.tokens, w, largest);
    if (passage.starts || log_max(j) > largest) largest = log_max(j), run = j;
  }
  if (runs.Start()) return run;
  return fmaf(runs.Tokens(), w, log_max(kWarps)) >= largest ? -1 : run;
}

// Has L2 fetch what a run needs.
template <typename T>
__device__ void FetchRun(const Column<T>& column, const Wkv4BackwardCall& call, int64_t row,
                         int count) {
  int64_t at = column.At(row);
#pragma unroll
  for (int t = 0; t < kRun && t < count; ++t, at += column.channels)
    for (const void* array : {call.k, call.v, call.dy})
      column.Fetch(static_cast<const T*>(array), at);
}

template <typename T>
__device__ void FetchState(const Column<T>& column, const Wkv4BackwardCall& call, int64_t row) {
  for (const float* array : {call.states.num, call.states.den, call.states.log_max})
    column.Fetch(array, column.At(row));
}

template <typename T>
__device__ void StoreSums(const Column<T>& column, const Wkv4BackwardCall& call, int64_t row, int c,
                          float dw, float du) {
  const float slope = UnboundedLogDecay(column.LoadFloat(call.w, column.sequence, c), call.decay).y;
  column.StoreFloat(call.dw, row, c, dw * slope);
  column.StoreFloat(call.du, row, c, du);
}

// Stores the cotangent of the initial state, from the cotangent of the state before the first
// token.
template <typename T>
__device__ void StoreInitial(const Column<T>& column, const Wkv4BackwardCall& call, int c,
                             const Sums& state, const Sums& cotangent, float dlog_max) {
  const float scale = Weigh(state.log_max, cotangent.log_max);
  const float dnum = cotangent.num * scale, dden = cotangent.den * scale;
  const float rest = fmaf(dnum, state.num, fmaf(dden, state.den, dlog_max));
  column.StoreState(call.dinitial_state, column.sequence, c, {dnum, dden, rest});
}

// A block has a split of a column and takes its chunks from the last to the first. If there are
// several splits, the kernel first runs with kTransition for all splits but the first one. It then
// stores the cotangent of the state before the split, as far as it comes from tokens of the split,
// and the share of the cotangent of log_max after the split that reaches the state before it. For
// the last split, these are the cotangents themselves.
//
// Who waits for whom. Each chunk has two barriers, each a __syncthreads:
//
//   barrier   threads wait until all warps have...               because next they...
//   first     stored the sums of their runs                      find the states before their runs
//   second    stored what their runs add to the cotangents,      find the cotangents after their runs, and store
//             and read the sums of all runs                      the sums of the next chunk
//
// Cotangents have two stages: behind the second barrier warp 0 stores what comes into the next chunk, while other
// warps still read those of this one. The words of a run belong to one warp, which copies the next ones once it has
// read them.
template <typename T, bool kTransition, bool kMarked>
__global__ __launch_bounds__(kThreads,
                             2) void BackwardKernel(const __grid_constant__ Wkv4BackwardCall call,
                                                    int64_t splits, Wkv4State<float> transitions,
                                                    Splits longs) {
  constexpr int W = kWidth<T>;
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<BackwardShared<T>*>(memory);
  __shared__ __align__(16) uint32_t words[kThreads];
  SharedMarks<kMarked> marks{words};
  const int warp = Warp();
  const Column<T> column = ColumnOfBlock<T, kMarked>(call, longs);
  if (kMarked && column.sequence < 0) return;
  const Span& span = column.span;
  const Division division(span, splits);
  const int64_t split = blockIdx.y + (kTransition ? 1 : 0);
  const int64_t begin = division.First(split), end = division.First(split + 1);
  const auto transition_row = [&](int64_t i) {
    return (column.sequence * (splits - 1) + i - 1) * kWkv4BackwardTransition;
  };
  float* const transition_dlog_max = transitions.num + 3 * call.dims.channels;

  Channel channel[W];
  float dlog_max[W];  // what is left of the cotangent of the final log_max
  float dw[W] = {}, du[W] = {};
#pragma unroll
  for (int c = 0; c < W; ++c) {
    channel[c] = column.LoadChannel(call, c);
    Sums cotangent = Nothing();  // of the state at the end of the split
    dlog_max[c] = 1.0f;
    if (split == splits - 1) {
      // log_max is 0 only if there are no tokens; else it is found with the first chunk that is
      // taken.
      cotangent = column.LoadState(call.dfinal_state, column.sequence, c);
      dlog_max[c] = cotangent.log_max;
      cotangent.log_max = 0.0f;
    } else if (!kTransition) {
#pragma unroll 1
      for (int64_t i = splits - 1; i > split; --i) {
        cotangent =
            PassageOf<kMarked>(division, i, call.marks, column.sequence)
                .Join(cotangent, channel[c].w, column.LoadState(transitions, transition_row(i), c));
        dlog_max[c] *= column.LoadFloat(transition_dlog_max, transition_row(i), c);
      }
    }
    if (warp == 0) shared.cotangents[0][kWarps].Put(c, cotangent);
  }

  bool final = split == splits - 1;  // whether the chunk is the last one of the sequence
  int64_t chunk = (end + kChunk - 1) / kChunk;
  const int64_t first_chunk = begin / kChunk, last_length = end - (chunk - 1) * kChunk;
  const auto copy = [&](int64_t chunk, int length) {
    shared.words.Copy(column, {call.k, call.v, call.dy},
                      span.first_token + chunk * kChunk + kRun * warp, length - kRun * warp, warp);
  };
  if (begin < end) copy(chunk - 1, static_cast<int>(last_length));
  if (begin < end) marks.Bring(call.marks, column.sequence, chunk - 1);
  int stage = 0;
  for (; begin < end && chunk > first_chunk; final = false, stage ^= 1) {
    --chunk;
    const int length = final ? static_cast<int>(last_length) : static_cast<int>(kChunk);
    const Runs<kMarked> runs(length, marks.Of(chunk));
    const Place<T, kMarked> place(column, span.first_token + chunk * kChunk, runs, warp);
    if (chunk > first_chunk && warp == 0) FetchState(column, call, span.first_chunk + chunk - 1);
    ChunkSums<T>&sums = shared.runs, &cotangents = shared.cotangents[stage];
    Sums before[W], added[W], after[W];
    if (warp == 0)
#pragma unroll
      for (int c = 0; c < W; ++c)
        before[c] = column.LoadState(call.states, span.first_chunk + chunk, c);
    Words k, v, dy;
    WaitForCopies<0>();
    __syncwarp();
    k.Load(shared.words.of[0][warp]);
    v.Load(shared.words.of[1][warp]);
    const Weights<T, kMarked> weights(column, call, place, k, v, channel);
    BackwardRun<T, kMarked> run{column, call, channel, shared, place, weights, v, dy};
    run.KeepWeights();
#pragma unroll
    for (int c = 0; c < W; ++c) {
      sums[warp].Put(c, weights.sums[c]);
      if (warp == 0) sums[kWarps].Put(c, before[c]);
    }
    __syncthreads();
    dy.Load(shared.words.of[2][warp]);
    __syncwarp();
    if (chunk > first_chunk) copy(chunk - 1, kChunk);

    if (final && warp == 0) {
      Before<T>(sums, kWarps, runs, channel, before);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        const Sums dlast = column.LoadState(call.dfinal_state, column.sequence, c);
        shared.dlog_max[c][Lane()] =
            dlast.log_max - fmaf(dlast.num, before[c].num, dlast.den * before[c].den);
        cotangents[kWarps].Put(c, {dlast.num, dlast.den, -before[c].log_max});
      }
    }
    Before<T>(sums, warp, runs, channel, before);
    run.Replay(before, added);
    int largest[W];  // the run that the final log_max is from
#pragma unroll
    for (int c = 0; c < W; ++c) {
      cotangents[warp].Put(c, added[c]);
      if (final || dlog_max[c] != 0.0f) largest[c] = LargestRun<T>(sums, runs, channel[c].w, c);
    }
    __syncthreads();

    After<T>(cotangents, warp, runs, channel, after);
    // The token of this run that gets dlog_max; kRun if a token of another run gets it; -1 if none
    // does.
    int at[W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (warp == 0)
        shared.cotangents[stage ^ 1][kWarps].Put(
            c, place.Over().Join(after[c], channel[c].w, cotangents[0].Get(c)));
      if (final) dlog_max[c] = shared.dlog_max[c][Lane()];
      at[c] = -1;
      if (dlog_max[c] == 0.0f) continue;
      if (largest[c] == warp) {
        at[c] = run.LargestToken(c);
        dw[c] = fmaf(runs.TokensAfter(kRun * warp + at[c]), dlog_max[c], dw[c]);
      } else if (largest[c] >= 0) {
        at[c] = kRun;
      } else if (warp == 0) {
        dw[c] = fmaf(runs.Tokens(), dlog_max[c], dw[c]);
      }
    }
    if constexpr (!kTransition) run.Write(after, at, dlog_max, dw, du);
#pragma unroll
    for (int c = 0; c < W; ++c)
      if (at[c] >= 0) dlog_max[c] = 0.0f;
    if (chunk > first_chunk && !marks.Follows(chunk))
      marks.Bring(call.marks, column.sequence, chunk - 1);
  }

  // The sums of each warp for dw and du take the place of cotangents that no warp reads any more.
  ChunkSums<T>& last = shared.cotangents[stage];
#pragma unroll
  for (int c = 0; c < W; ++c) last[warp].Put(c, {dw[c], du[c], 0.0f});
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int c = 0; c < W; ++c) {
    const Sums cotangent = last[kWarps].Get(c);
    if constexpr (kTransition) {
      column.StoreState(transitions, transition_row(split), c, cotangent);
      column.StoreFloat(transition_dlog_max, transition_row(split), c, dlog_max[c]);
    } else {
      for (int j = 1; j < kWarps; ++j) {
        dw[c] += last[j].Get(c).num;
        du[c] += last[j].Get(c).den;
      }
      StoreSums(column, call, column.sequence * splits + split, c, dw[c], du[c]);
      if (split > 0) continue;
      // An initial state that no token reads gets a cotangent of 0, whatever the state is.
      const bool unread = kMarked && cotangent.log_max <= -FLT_MAX;
      const Sums state =
          span.tokens > 0 && !unread ? column.LoadState(call.states, span.first_chunk, c) : Sums{};
      StoreInitial(column, call, c, state, cotangent, dlog_max[c]);
    }
  }
}

template <typename T>
struct ByWarpsShared : KeptStates<T> {
  WarpSums<kWidth<T>> before[kWarps]
                            [kWarps];  // for each warp, the state before each run of a chunk
};

// A warp has a column. It takes the runs of a chunk forwards, which gives the state before each
// run, and then backwards.
template <typename T>
__global__ __launch_bounds__(kThreads, 2) void BackwardByWarpsKernel(
    const __grid_constant__ Wkv4BackwardCall call) {
  constexpr int W = kWidth<T>;
  using Place = Place<T, true>;
  using Weights = Weights<T, true>;
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<ByWarpsShared<T>*>(memory);
  WarpSums<W>(&by_run)[kWarps] = shared.before[Warp()];
  const Column<T> column = ColumnOfWarp<T>(call);
  const Span& span = column.span;
  if (column.sequence < 0 || span.tokens > kFewTokens) return;
  const auto fetch = [&](int64_t chunk) {
    const int length = ChunkLength(chunk * kChunk, span.tokens);
    for (int j = 0; kRun * j < length; ++j)
      FetchRun(column, call, span.first_token + chunk * kChunk + kRun * j, length - kRun * j);
    FetchState(column, call, span.first_chunk + chunk);
  };
  int64_t chunk = span.Chunks();
  if (chunk > 0) fetch(chunk - 1);
  Channel channel[W];
  Sums state[W] = {}, cotangent[W];
  float dlog_max[W], dw[W] = {}, du[W] = {};
#pragma unroll
  for (int c = 0; c < W; ++c) {
    channel[c] = column.LoadChannel(call, c);
    cotangent[c] = column.LoadState(call.dfinal_state, column.sequence, c);
    dlog_max[c] = cotangent[c].log_max;
    cotangent[c].log_max = 0.0f;
  }
  Words k, v, dy;
#pragma unroll 1
  for (bool final = true; chunk > 0; final = false) {
    --chunk;
    const int64_t start = chunk * kChunk;
    const auto place_at = [&](int j) {
      const Place place =
          Place::Of(column, span.first_token + start + kRun * j, span.tokens - start - kRun * j);
      if (!place.Whole(column)) return place;
      k.Load(column, call.k, place);
      v.Load(column, call.v, place);
      dy.Load(column, call.dy, place);
      return place;
    };
    const int length = ChunkLength(start, span.tokens);
    if (chunk > 0) fetch(chunk - 1);
#pragma unroll
    for (int c = 0; c < W; ++c)
      state[c] = column.LoadState(call.states, span.first_chunk + chunk, c);
    int j = 0;
#pragma unroll 1
    for (; kRun * j < length; ++j) {
      const Place place = place_at(j);
      const Weights weights(column, call, place, k, v, channel);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        by_run[j].Put(c, state[c]);
        state[c] = place.Over().Join(state[c], channel[c].w, weights.sums[c]);
      }
    }
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (!final) continue;
      // The cotangent of log_max, less the part of it that num and den have.
      dlog_max[c] -= fmaf(cotangent[c].num, state[c].num, cotangent[c].den * state[c].den);
      cotangent[c].log_max = -state[c].log_max;
    }
#pragma unroll 1
    while (j-- > 0) {
      const Place place = place_at(j);
      const Weights weights(column, call, place, k, v, channel);
      Sums added[W];
      int at[W];
#pragma unroll
      for (int c = 0; c < W; ++c) state[c] = by_run[j].Get(c);
      BackwardRun<T, true> run{column, call, channel, shared, place, weights, v, dy};
      run.KeepWeights();
      run.Replay(state, added);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        at[c] = -1;
        if (dlog_max[c] == 0.0f) continue;
        float tokens = place.Over().tokens;
        if (fmaf(tokens, channel[c].w, state[c].log_max) < weights.sums[c].log_max) {
          at[c] = run.LargestToken(c);
          tokens -= 1 + at[c];
        }
        dw[c] = fmaf(tokens, dlog_max[c], dw[c]);
      }
      run.Write(cotangent, at, dlog_max, dw, du);
#pragma unroll
      for (int c = 0; c < W; ++c) {
        cotangent[c] = place.Over().Join(cotangent[c], channel[c].w, added[c]);
        if (at[c] >= 0) dlog_max[c] = 0.0f;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < W; ++c) {
    StoreSums(column, call, column.sequence, c, dw[c], du[c]);
    StoreInitial(column, call, c, state[c], cotangent[c], dlog_max[c]);
  }
}

}  // namespace
}  // namespace wkv4

namespace {

// dw and du are partial sums, one for each split.
cudaError_t FindGradients(cudaStream_t stream, const Wkv4BackwardCall& call, const Plan& plan,
                          float* scratch) {
  return wkv4::ForTypes(call.dtype, [&](auto zero) -> cudaError_t {
    using T = decltype(zero);
    const Wkv4State<float> transitions = wkv4::Transitions(call, scratch);
    // With rows of equal lengths a warp for each column takes longer.
    return wkv4::RunColumns<T>(
        call, plan.splits, call.sequences.Given() && wkv4::ByWarps<T>(call, plan, 3 * kChunk),
        [&](int64_t blocks) {
          return Launch(wkv4::BackwardByWarpsKernel<T>, blocks, wkv4::kThreads,
                        sizeof(wkv4::ByWarpsShared<T>), stream, call);
        },
        [&](auto transition, auto marked, const Grid& blocks, const Splits& longs) {
          return Launch(wkv4::BackwardKernel<T, transition(), marked()>, blocks, wkv4::kThreads,
                        sizeof(wkv4::BackwardShared<T>), stream, call, plan.splits, transitions,
                        longs);
        });
  });
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv4BackwardCall& call, const Plan& plan,
                float* scratch) {
  if (!plan.adds_up) return FindGradients(stream, call, plan, scratch);
  const int64_t batch = call.dims.batch, channels = call.dims.channels;
  Wkv4BackwardCall partial = call;
  partial.dw = scratch + plan.sums;
  partial.du = partial.dw + batch * plan.splits * channels;
  const cudaError_t error = FindGradients(stream, partial, plan, scratch);
  if (error != cudaSuccess) return error;
  return SumPartials(stream, batch, {}, plan.splits, channels,
                     {{partial.dw, call.dw}, {partial.du, call.du}});
}

}  // namespace rwkv_jax::cuda
