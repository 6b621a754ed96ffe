// The heads of a block of RWKV-7 for several rows, where the matrix units have made r, k, v and the sums of
// the low-rank maps (decoding/head.cuh has the formulas). `StepHeads` computes the same for one row.
//
// A warp has a head of a row, so that it waits for no other warp, and many heads are on their way at once;
// where there are few heads, four warps share the rows of a state, and the first one does all else. The state
// is copied into shared memory before the kernels before this one have ended. Lanes have two channels each of
// the vectors of the token, and rows and columns of the state as in fragment.cuh, 16 rows at a time.
//
// Where tokens wait (Rwkv7BlockCall::waiting), the state is updated only now and then. Until then it is read
// alone. With the factors G_t = diag(w_t) + a_t b_t^T of wkv7, S being the state and j the tokens that wait,
//
//   y_t = S_t r_t = S u_0 + sum_j v_j (k_j . u_j),   u_t = r_t,   u_{j-1} = G_j u_j,   token t among the j
//
// and the vectors of the token join those that wait. Of a state in halves (Schedule), which
// those of bfloat16 alone take, only the upper ones are read then: S is rounded as r is.
#include <type_traits>

#include "decoding/head.cuh"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kBlockHeadSize;
constexpr int kChannels = N / 32;

using LaneVector = float[kChannels];
using Partition = StatePartition<N, 4>;

// Where heads are many, so many of one warp share the memory of a multiprocessor; where they are few, so many
// of Partition::kWarps warps share its registers.
constexpr int kManyHeads = 9, kFewHeads = 8;

struct HeadArguments {
  Rwkv7BlockCall call;
  const void* projected;
  void* read;
  int projected_width;
};

struct HeadShared {
  float token[kR + 1][N];
  float waiting[kMostWaiting][kWaitingVectors][N];
  float state[N * N];
  float u[N], y[N];
};

static_assert(kW == 0 && kB == kWaitingVectors - 1);

__device__ inline int OwnChannel() { return threadIdx.x % 32 * kChannels; }

// What a lane has of the parameters of a head, and of the first layer's value.
template <typename T>
struct LaneParameters {
  LaneVector w0, k_k, k_a, a0, v0, first, r_k, weight, bias;

  // `channel` is the lane's first one of all, and `at` that of its row.
  __device__ void Load(const Rwkv7BlockCall& call, int64_t channel, int64_t at) {
    LoadWide<T>(call.w0, channel, w0), LoadWide<T>(call.k_k, channel, k_k);
    LoadWide<T>(call.k_a, channel, k_a), LoadWide<T>(call.a0, channel, a0);
    LoadWide<T>(call.r_k, channel, r_k), LoadWide<T>(call.head_norm.weight, channel, weight);
    LoadWide<T>(call.head_norm.bias, channel, bias);
    if (call.first == nullptr) return;
    LoadWide<T>(call.v0, channel, v0), LoadWide<T>(call.first, at, first);
  }
};

// What a lane has of what the projections give for a head, as it is in memory.
template <typename T>
struct LaneProjections {
  Packed<T, kChannels> r, k, v, maps[kLowRankMaps];

  // `row` is the first number of the row.
  __device__ void Load(const Rwkv7BlockCall& call, const T* row, int64_t channel) {
    const T* const from = row + channel;
    r.Load(from), k.Load(from + call.width), v.Load(from + 2 * call.width);
#pragma unroll
    for (int i = 0; i < kLowRankMaps; ++i)
      if (i != kShareMap || call.first != nullptr) maps[i].Load(from + (3 + i) * call.width);
  }
};

// What a lane has of the vectors of a token.
struct LaneToken {
  LaneVector w, k, v, a, b, r, gate;
  float bonus;

  template <typename T>
  __device__ void Make(const Rwkv7BlockCall& call, const LaneParameters<T>& own,
                       const LaneProjections<T>& given, int64_t at) {
    LaneVector projected, rate, share;
    const auto widen = [](const Packed<T, kChannels>& from, LaneVector& to) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) to[c] = from[c];
    };
    widen(given.r, r), widen(given.k, projected), widen(given.v, v);
    widen(given.maps[kDecayMap], w), widen(given.maps[kRateMap], rate);
    widen(given.maps[kGateMap], gate);
    if (call.first != nullptr) {
      widen(given.maps[kShareMap], share);
      AddShare(own.first, own.v0, share, v);
    } else {
      StoreRounded<T>(call.made_first, at, v);
    }
    MakeFactors(own.w0, w);
    const float inverse = InverseLength<32>(projected, own.k_k);
    MakeKeys(projected, rate, own.k_k, own.k_a, own.a0, inverse, k, a, b);
    bonus = Bonus<32>(r, k, own.r_k);
  }

  // Calls fn(vector, its channels) for what a step takes but r.
  template <typename Fn>
  __device__ void ForVectors(Fn&& fn) {
    fn(kW, w), fn(kK, k), fn(kV, v), fn(kA, a), fn(kB, b);
  }
};

// Whether a token that waits is there. NaN is one that is.
__device__ inline bool IsThere(const Token& token) { return !(*token.Row(kW) < 0.0f); }

// u_j becomes u_{j-1}, and what the token adds to y is added to `added`.
__device__ inline void ReadThrough(const LaneToken& token, LaneVector& u, LaneVector& added) {
  float sums[2] = {};
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    sums[0] = fmaf(token.k[c], u[c], sums[0]);
    sums[1] = fmaf(token.b[c], u[c], sums[1]);
  }
  AllReduce<1, 32>(sums);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    added[c] = fmaf(token.v[c], sums[0], added[c]);
    u[c] = fmaf(token.w[c], u[c], token.a[c] * sums[1]);
  }
}

// Where the columns of a lane lie in each half of a state in halves: side by side, so that a lane reads and
// writes 16 bytes of a row.
__device__ inline int PlaceInHalf(const Partition& partition, int row) {
  return (partition.first_row + row) * N + partition.col_group * Partition::kCols;
}

// The upper halves alone, from shared memory.
__device__ inline void LoadUpper(const Partition& partition, const uint16_t* state,
                                 Fragment<Partition>& s) {
#pragma unroll
  for (int i = 0; i < Partition::kRows; ++i)
    LoadWide<__nv_bfloat16>(state, PlaceInHalf(partition, i), s[i]);
}

__device__ inline void LoadHalves(const Partition& partition, const uint16_t* state,
                                  Fragment<Partition>& s) {
  LoadUpper(partition, state, s);
#pragma unroll
  for (int i = 0; i < Partition::kRows; ++i) {
    const uint4 lower = *reinterpret_cast<const uint4*>(state + N * N + PlaceInHalf(partition, i));
    const uint32_t pairs[] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
    for (int c = 0; c < Partition::kCols; ++c) {
      const int32_t rest = static_cast<int32_t>(c % 2 ? pairs[c / 2] : pairs[c / 2] << 16) >> 16;
      s[i][c] = __uint_as_float(__float_as_uint(s[i][c]) + static_cast<uint32_t>(rest));
    }
  }
}

__device__ inline void StoreHalves(const Partition& partition, uint16_t* state,
                                   const Fragment<Partition>& s) {
  // NaN has many forms, and the upper halves of some are numbers.
  const auto bits = [](float x) { return x != x ? 0x7fc00000u : __float_as_uint(x); };
#pragma unroll
  for (int i = 0; i < Partition::kRows; ++i) {
    uint32_t upper[Partition::kCols / 2], lower[Partition::kCols / 2];
#pragma unroll
    for (int c = 0; c < Partition::kCols; c += 2) {
      const uint32_t even = bits(s[i][c]), odd = bits(s[i][c + 1]);
      upper[c / 2] = __byte_perm(even + 0x8000u, odd + 0x8000u, 0x7632);
      lower[c / 2] = __byte_perm(even, odd, 0x5410);
    }
    uint16_t* const at = state + PlaceInHalf(partition, i);
    *reinterpret_cast<uint4*>(at) = {upper[0], upper[1], upper[2], upper[3]};
    *reinterpret_cast<uint4*>(at + N * N) = {lower[0], lower[1], lower[2], lower[3]};
  }
}

// Copies kFloats floats, with all threads of a block.
template <int kFloats, int kThreads>
__device__ void CopyFloats(const float* from, float* to) {
  const int first = 4 * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kFloats; i += 4 * kThreads)
    if (i + 4 * kThreads <= kFloats || i + first < kFloats)
      CopyPacked<4>(to + first + i, from + first + i);
}

// Where few instructions copy, and all that does not depend on another load is loaded first, a warp takes
// half as long as otherwise.
template <typename T, int kWarps, bool kPostpones>
__global__ __launch_bounds__(
    32 * kWarps, kWarps == 1
                     ? kManyHeads
                     : kFewHeads) void SummedHeadKernel(const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  HeadShared& shared = *reinterpret_cast<HeadShared*>(memory);
  constexpr int kThreads = 32 * kWarps, kUpper = N * N / 2, kMost = kPostpones ? kMostWaiting : 0;
  const Rwkv7BlockCall& call = own.call;
  const int64_t row = blockIdx.y, number = row * call.heads + blockIdx.x;
  const int64_t channel = int64_t{blockIdx.x} * N + OwnChannel(), at = row * call.width + channel;
  const int warp = kWarps == 1 ? 0 : threadIdx.x / 32;
  const float* const state = call.state + number * (N * N);
  float* const state_after = call.state_after + number * (N * N);

  // The block's first kernel waited before this one could start, and no kernel between has written the
  // state, the tokens that wait, a parameter, or the first layer's value.
  CopyFloats<kUpper, kThreads>(state, shared.state);
  int schedule[kScheduleNumbers] = {0, 1, 0, 0};
  if constexpr (kPostpones) {
#pragma unroll
    for (int i = 0; i < kScheduleNumbers; ++i) schedule[i] = call.schedule[i];
  }
  // A row without a token keeps its states, and what is read out means nothing.
  const bool idle = call.segment_ids[row] == 0;
  // The first warp has the vectors of the token.
  LaneParameters<T> parameters;
  if (warp == 0) parameters.Load(call, channel, at);
  LetNextKernelStart();
  WaitForKernelsBefore();
  LaneProjections<T> given;
  if (warp == 0)
    given.Load(call, static_cast<const T*>(own.projected) + row * own.projected_width, channel);
  const int count = schedule[kWaiting] < 0       ? 0
                    : schedule[kWaiting] < kMost ? schedule[kWaiting]
                                                 : kMost;
  const bool updates = schedule[kUpdates] != 0 || schedule[kWaiting] >= kMost;
  // A bfloat16 is too coarse for float16.
  constexpr bool kHalves = std::is_same_v<T, __nv_bfloat16>;
  const bool in_halves = kHalves && schedule[kInHalves] != 0;
  // The vectors of the tokens that wait, for this head of this row.
  const auto waiting = [&](int token) {
    return call.waiting + (token * call.rows * call.heads + number) * (kWaitingVectors * N);
  };
#pragma unroll
  for (int i = 0; i < kMost; ++i)
    if (i < count) CopyFloats<kWaitingVectors * N, kThreads>(waiting(i), shared.waiting[i][0]);
  if (updates || !in_halves)
    CopyFloats<N * N - kUpper, kThreads>(state + kUpper, shared.state + kUpper);

  LaneToken token;
  if (warp == 0) {
    token.Make(call, parameters, given, at);
    const auto store = [&](Vector vector, const LaneVector& x) {
      StoreFloats(shared.token[vector] + OwnChannel(), x);
    };
    token.ForVectors(store);
    store(kR, token.r);
  }
  WaitForCopies<0>();
  __syncthreads();

  const auto before = [&](int i) { return Token{shared.waiting[i][0], 0}; };
  const auto* const halves = reinterpret_cast<const uint16_t*>(shared.state);
  constexpr int kTurns = Partition::kWarps / kWarps;
  constexpr int kNextRows = kWarps * Partition::kRowGroups * Partition::kRows;
  LaneVector added = {};
  Partition partition;
  float x[Partition::kCols];
  if (updates) {
    const Token here{shared.token[0], 0};
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn, partition.first_row += kNextRows) {
      Fragment<Partition> s;
      if (in_halves)
        LoadHalves(partition, halves, s);
      else
        LoadState(partition, shared.state, s);
      for (int i = 0; i < count; ++i)
        if (IsThere(before(i))) Step(partition, before(i), s);
      if (!idle) Step(partition, here, s);
      if (kHalves && schedule[kIntoHalves] != 0)
        StoreHalves(partition, reinterpret_cast<uint16_t*>(state_after), s);
      else
        StoreState(partition, state_after, s);
      LoadCols(partition, here.Row(kR), x);
      Read(partition, s, x, shared.y);
    }
  } else {
    if (warp == 0) {
      LaneVector u;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) u[c] = token.r[c];
      ReadThrough(token, u, added);
      for (int i = count - 1; i >= 0; --i) {
        if (!IsThere(before(i))) continue;
        LaneToken earlier;
        earlier.ForVectors([&](Vector vector, LaneVector& x) {
          LoadFloats(before(i).Row(vector) + OwnChannel(), x);
        });
        ReadThrough(earlier, u, added);
      }
      StoreFloats(shared.u + OwnChannel(), u);
      if (idle && threadIdx.x == 0) token.w[0] = -1.0f;
      float* const to = waiting(count) + OwnChannel();
      token.ForVectors(
          [&](Vector vector, const LaneVector& x) { StoreFloats(to + vector * N, x); });
    }
    __syncthreads();
    LoadCols(partition, shared.u, x);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn, partition.first_row += kNextRows) {
      Fragment<Partition> s;
      if (in_halves)
        LoadUpper(partition, halves, s);
      else
        LoadState(partition, shared.state, s);
      Read(partition, s, x, shared.y);
    }
  }
  __syncthreads();
  if (warp > 0) return;
  LaneVector y;
  LoadFloats(shared.y + OwnChannel(), y);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) y[c] += added[c];
  NormaliseAndGate<32>(token.bonus, token.v, token.gate, parameters.weight, parameters.bias, y);
  StoreRounded<T>(own.read, at, y);
}

}  // namespace

cudaError_t StepSummedHeads(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  const HeadArguments own{call, call.scratch + scratch.projected, call.scratch + scratch.read,
                          static_cast<int>(scratch.projected_width)};
  const dim3 blocks(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.rows));
  const auto launch = [&](auto zero, auto warps, auto postpones) {
    return LaunchEarly(SummedHeadKernel<decltype(zero), warps(), postpones()>, blocks, 32 * warps(),
                       sizeof(HeadShared), stream, own);
  };
  const bool few = call.rows * call.heads <= kFewHeads * device.multiprocessors;
  return ForHalfTypes<1, Partition::kWarps>(
      call.dtype, few ? Partition::kWarps : 1, [&](auto zero, auto warps) {
        return call.Postpones() ? launch(zero, warps, std::true_type())
                                : launch(zero, warps, std::false_type());
      });
}

}  // namespace rwkv_jax::cuda
