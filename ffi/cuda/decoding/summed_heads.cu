// The heads of a block of RWKV-7 for several rows, where the matrix units have made r, k, v and the sums of
// the low-rank maps (decoding/head.cuh has the formulas). `StepHeads` computes the same for one row, but that
// here the vectors k, v, a and b of wkv7 are rounded as those of the model are.
//
// A warp has a head of a row, so that it waits for no other warp, and many heads are on their way at once;
// where there are few heads, four warps share the rows of a state, and the first one does all else. The state
// is copied into shared memory before the kernels before this one have ended. Lanes have two channels each of
// the vectors of the token, and rows and columns of the state as in fragment.cuh, some of the rows at a time.
//
// Where tokens wait (Rwkv7BlockCall::waiting), the state is updated only now and then. Until then it is read
// alone. With the factors G_t = diag(w_t) + a_t b_t^T of wkv7, S being the state and j the tokens that wait,
//
//   y_t = S_t r_t = S u_0 + sum_j v_j (k_j . u_j),   u_t = r_t,   u_{j-1} = G_j u_j,   token t among the j
//
// and the vectors of the token join those that wait. The state lies in halves (Schedule), of which only the
// upper ones are read then: S is rounded as r is. With them alone in shared memory, more heads are on their way.
#include <type_traits>

#include "decoding/halves.cuh"
#include "kernel_choice.cuh"
#include "launch_chain.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kHeadChannels;

template <int kWarps>
using Partition = StatePartition<N, kWarps == 1 ? 8 : 4>;

// So many warps share the rows of a state where heads are few.
constexpr int kWarpsOfFew = Partition<0>::kWarps;

// Where heads are many, so many of one warp share the memory of a multiprocessor; where they are few, so many
// of kWarpsOfFew warps share its registers.
constexpr int kManyHeads = 9, kManyDeferred = 14, kFewHeads = 8;

constexpr int BlocksOfHeads(int warps, bool defers) {
  return warps > 1 ? kFewHeads : defers ? kManyDeferred : kManyHeads;
}

struct HeadArguments {
  Rwkv7BlockCall call;
  const void* projected;
  void* read;
  int projected_width;
};

// The tokens with which a state is not up to date, that of the call last.
template <typename T, bool kDefers>
struct HeadShared {
  static constexpr int kTokens = kDefers ? kMostWaiting + 1 : 1;
  float state[kDefers ? N * N / 2 : N * N];
  float factors[kTokens][N], r[N], y[N];
  __nv_bfloat16 u[kParts][N];
  // As they wait; where none does, the vectors that are rounded, as floats.
  using Element = std::conditional_t<kDefers, T, float>;
  Element tokens[kTokens][kWaitingVectors][N];
};

// One token of wkv7, whose vectors are in shared memory.
template <typename Element, typename G>
__device__ void StepRounded(const G& partition, const Element (&token)[kWaitingVectors][N],
                            const float (&factors)[N], Fragment<G>& s) {
  float d[G::kCols], x[G::kCols], sa[G::kRows], v[G::kRows];
  const auto load = [&](Vector vector) {
#pragma unroll
    for (int c = 0; c < G::kCols; c += 4) {
      const auto four = LoadPacked<4, Element>(token[vector], partition.Col(c));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[c + i] = four[i];
    }
  };
  load(kA);
  Dot<G>(s, x, sa);
  LoadCols(partition, factors, d);
  load(kB);
  DecayAndAdd<G>(s, d, sa, x);
  LoadWide<Element>(token[kV], partition.first_row, v);
  load(kK);
  Add<G>(s, v, x);
}

// What Schedule has for a step, or where no token waits.
struct HeadSchedule {
  int count = 0;  // of the tokens that wait
  bool updates = true, in_halves = false, into_halves = false;

  __device__ explicit HeadSchedule(const int32_t* schedule) {
    if (schedule == nullptr) return;
    constexpr int kMost = kMostWaiting;
    const int waiting = schedule[kWaiting];
    count = waiting < 0 ? 0 : waiting < kMost ? waiting : kMost;
    in_halves = schedule[kInHalves] != 0, into_halves = schedule[kIntoHalves] != 0;
    updates = schedule[kUpdates] != 0 || waiting >= kMost || !in_halves;
  }
};

// Where few instructions copy, and all that does not depend on another load is loaded first, a warp takes
// half as long as otherwise; but where a whole state is copied, the vectors of the token must not queue behind
// all of it.
template <typename T, int kWarps, bool kDefers>
__global__ __launch_bounds__(32 * kWarps, BlocksOfHeads(kWarps, kDefers)) void SummedHeadKernel(
    ChainPlace place, const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  using Shared = HeadShared<T, kDefers>;
  using G = Partition<kWarps>;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kThreads = 32 * kWarps, kToken = kWaitingVectors * N, kFirstHalf = N * N / 2;
  const Rwkv7BlockCall& call = own.call;
  const int64_t row = blockIdx.y, number = row * call.heads + blockIdx.x;
  const int64_t channel = int64_t{blockIdx.x} * N + OwnChannel(), at = row * call.width + channel;
  const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const float* const state = call.state + number * (N * N);
  float* const state_after = call.state_after + number * (N * N);
  auto* const upper = reinterpret_cast<uint16_t*>(shared.state);  // if it is in halves
  const auto waiting = [&](int token) {
    return static_cast<T*>(call.waiting) + (number * kMostWaiting + token) * kToken;
  };

  // No kernel of the block before this one writes the state, the tokens that wait, a parameter, or the first
  // layer's value.
  const EarlierKernels kernels(place);
  if constexpr (kDefers)
    CopyUpper<G, kThreads>(state, upper);
  else
    CopyElements<kFirstHalf, kThreads>(state, shared.state);
  const HeadSchedule schedule(kDefers ? call.schedule : nullptr);
  // A row without a token keeps its states, and what is read out means nothing.
  const bool idle = call.segment_ids[row] == 0;
  // The first warp has the vectors of the token.
  LaneParameters<T> parameters;
  if (warp == 0) parameters.Load(call, channel, at);
  kernels.LetNextStart();
  kernels.Await();
  LaneProjections<T> given;
  if (warp == 0)
    given.Load(call, static_cast<const T*>(own.projected) + row * own.projected_width, channel);
  if constexpr (kDefers) {
    constexpr int kEach = 16 / sizeof(T);
    for (int i = kEach * threadIdx.x; i < schedule.count * kToken; i += kEach * kThreads)
      CopyPacked<kEach>(shared.tokens[0][0] + i, waiting(0) + i);
    if (schedule.updates && schedule.in_halves) PrefetchLower<G>(state);
  } else {
    CopyElements<N * N - kFirstHalf, kThreads>(state + kFirstHalf, shared.state + kFirstHalf);
  }

  LaneVector r, gate;
  float bonus;
  LaneToken<T> token;
  if (warp == 0) {
    Widen(given.r, r), Widen(given.maps[kGateMap], gate);
    token.Make(call, parameters, given, at, r, bonus);
    if (idle) token.packed[kW].words[0] = kNoToken;
    StoreFloats(shared.r + OwnChannel(), r);
    if (schedule.updates) {
      token.Store(shared.tokens[schedule.count][0]);
      StoreFloats(shared.factors[schedule.count] + OwnChannel(), token.w);
    }
  }
  WaitForCopies<0>();
  __syncthreads();

  constexpr int kTurns = G::kWarps / kWarps, kNextRows = kWarps * kRowsOfWarp<G>;
  LaneVector added = {};
  G partition;
  float x[G::kCols];
  if (schedule.updates) {
    if constexpr (kDefers) {
      if (warp == 0)
        for (int i = 0; i < schedule.count; ++i) {
          LaneToken<T> earlier;
          earlier.Load(shared.tokens[i][0], parameters.w0);
          StoreFloats(shared.factors[i] + OwnChannel(), earlier.w);
        }
      __syncthreads();
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn, partition.first_row += kNextRows) {
      const int first = FirstOfWarp(partition);
      Fragment<G> s;
      if constexpr (!kDefers) {
        LoadState(partition, shared.state, s);
      } else {
        if (schedule.in_halves)
          LoadHalves(partition, upper + first * N, LowerOf<G>(state + first * N), s);
        else
          LoadState(partition, state, s);
        __syncwarp();  // lanes write what others read
      }
      for (int i = 0; i <= schedule.count; ++i)
        if (i < schedule.count ? IsThere(shared.tokens[i]) : !idle)
          StepRounded(partition, shared.tokens[i], shared.factors[i], s);
      if (schedule.into_halves)
        StoreHalves(partition, state_after + first * N, s);
      else
        StoreState(partition, state_after, s);
      LoadCols(partition, shared.r, x);
      Read(partition, s, x, shared.y);
    }
  } else if constexpr (kDefers) {
    if (warp == 0) {
      LaneVector u;
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) u[c] = r[c];
      ReadThrough(token, u, added);
      for (int i = schedule.count - 1; i >= 0; --i) {
        if (!IsThere(shared.tokens[i])) continue;
        LaneToken<T> earlier;
        earlier.Load(shared.tokens[i][0], parameters.w0);
        ReadThrough(earlier, u, added);
      }
      CutIntoParts(u, shared.u);
      token.Store(waiting(schedule.count));
    }
    __syncthreads();
    ReadUpper<kWarps>(reinterpret_cast<const __nv_bfloat16*>(upper), shared.u, shared.y);
  }
  __syncthreads();
  if (warp > 0) return;
  LaneVector y;
  LoadFloats(shared.y + OwnChannel(), y);
#pragma unroll
  for (int c = 0; c < kLaneChannels; ++c) y[c] += added[c];
  NormaliseAndGate<32>(bonus, token.v, gate, parameters.weight, parameters.bias, y);
  StoreRounded<T>(own.read, at, y);
}

}  // namespace

cudaError_t StepSummedHeads(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  const HeadArguments own{call, call.scratch + scratch.projected, call.scratch + scratch.read,
                          static_cast<int>(scratch.projected_width)};
  const Grid blocks(call.heads, call.rows);
  const auto launch = [&](auto zero, auto warps, auto defers) {
    return chain.Launch(SummedHeadKernel<decltype(zero), warps(), defers()>, blocks, 32 * warps(),
                        sizeof(HeadShared<decltype(zero), defers()>), own);
  };
  const bool few = call.rows * call.heads <= kFewHeads * device.multiprocessors;
  return ForHalfTypes<1, kWarpsOfFew>(call.dtype, few ? kWarpsOfFew : 1,
                                      [&](auto zero, auto warps) {
                                        using T = decltype(zero);
                                        if constexpr (std::is_same_v<T, __nv_bfloat16>)
                                          if (call.Defers())
                                            return launch(zero, warps, std::true_type());
                                        return launch(zero, warps, std::false_type());
                                      });
}

}  // namespace rwkv_jax::cuda
