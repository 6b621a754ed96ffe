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

#include "decoding/head.cuh"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kBlockHeadSize;
constexpr int kChannels = N / 32;

using LaneVector = float[kChannels];

template <int kWarps>
using Partition = StatePartition<N, kWarps == 1 ? 8 : 4>;

// So many warps share the rows of a state where heads are few.
constexpr int kWarpsOfFew = Partition<0>::kWarps;

// Where heads are many, so many of one warp share the memory of a multiprocessor; where they are few, so many
// of kWarpsOfFew warps share its registers.
constexpr int kManyHeads = 9, kManyPostponed = 14, kFewHeads = 8;

constexpr int BlocksOfHeads(int warps, bool postpones) {
  return warps > 1 ? kFewHeads : postpones ? kManyPostponed : kManyHeads;
}

struct HeadArguments {
  Rwkv7BlockCall call;
  const void* projected;
  void* read;
  int projected_width;
};

// A float is a sum of so many numbers of bfloat16.
constexpr int kParts = 3;

// The tokens with which a state is not up to date, that of the call last.
template <typename T, bool kPostpones>
struct HeadShared {
  static constexpr int kTokens = kPostpones ? kMostWaiting + 1 : 1;
  float state[kPostpones ? N * N / 2 : N * N];
  float factors[kTokens][N], r[N], y[N];
  __nv_bfloat16 u[kParts][N];
  // As they wait; where none does, the vectors that are rounded, as floats.
  using Element = std::conditional_t<kPostpones, T, float>;
  Element tokens[kTokens][kWaitingVectors][N];
};

// The first two elements of w of a row without a token: a NaN that CUDA does not make.
constexpr uint32_t kNoToken = ~0u;

// What is added to the bits of a float before it is cut in halves, so that the upper one is rounded.
constexpr uint32_t kHalfOfLower = 0x8000u;

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

template <typename T>
__device__ void Widen(const Packed<T, kChannels>& from, LaneVector& to) {
#pragma unroll
  for (int c = 0; c < kChannels; ++c) to[c] = from[c];
}

// What a lane has of the vectors of a token.
template <typename T>
struct LaneToken {
  using Pair = Packed<T, kChannels>;

  LaneVector w, k, v, a, b;
  Pair packed[kWaitingVectors];  // the same as they wait

  // `bonus` is that of the read-out.
  __device__ void Make(const Rwkv7BlockCall& call, const LaneParameters<T>& own,
                       const LaneProjections<T>& given, int64_t at, const LaneVector& r,
                       float& bonus) {
    LaneVector projected, rate, share;
    packed[kW] = given.maps[kDecayMap];
    MakeFactor(own.w0);
    Widen(given.k, projected), Widen(given.v, v), Widen(given.maps[kRateMap], rate);
    if (call.first != nullptr) {
      Widen(given.maps[kShareMap], share);
      AddShare(own.first, own.v0, share, v);
    } else {
      StoreRounded<T>(call.made_first, at, v);
    }
    const float inverse = InverseLength<32>(projected, own.k_k);
    MakeKeys(projected, rate, own.k_k, own.k_a, own.a0, inverse, k, a, b);
    bonus = Bonus<32>(r, k, own.r_k);
    ForRounded([&](Vector vector, LaneVector& x) {
      packed[vector].Set(x);
      Widen(packed[vector], x);
    });
  }

  // Loads a token that waits.
  __device__ void Load(const T* token, const LaneVector& w0) {
#pragma unroll
    for (int i = 0; i < kWaitingVectors; ++i) packed[i].Load(token + i * N + OwnChannel());
    MakeFactor(w0);
    ForRounded([&](Vector vector, LaneVector& x) { Widen(packed[vector], x); });
  }

  __device__ void Store(float* token) {
    ForRounded([&](Vector vector, const LaneVector& x) {
      StoreFloats(token + vector * N + OwnChannel(), x);
    });
  }

  __device__ void Store(T* token) const {
#pragma unroll
    for (int i = 0; i < kWaitingVectors; ++i) packed[i].Store(token + i * N + OwnChannel());
  }

 private:
  __device__ void MakeFactor(const LaneVector& w0) { Widen(packed[kW], w), MakeFactors(w0, w); }

  template <typename Fn>
  __device__ void ForRounded(Fn&& fn) {
    fn(kK, k), fn(kV, v), fn(kA, a), fn(kB, b);
  }
};

// Whether a token that waits is there.
template <typename T>
__device__ bool IsThere(const T (&token)[kWaitingVectors][N]) {
  return *reinterpret_cast<const uint32_t*>(token[kW]) != kNoToken;
}

// u_j becomes u_{j-1}, and what the token adds to y is added to `added`.
template <typename T>
__device__ void ReadThrough(const LaneToken<T>& token, LaneVector& u, LaneVector& added) {
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

// Copies kCount elements, with all threads of a block.
template <int kCount, int kThreads, typename T>
__device__ void CopyElements(const T* from, T* to) {
  constexpr int kEach = 16 / sizeof(T);
  const int first = kEach * threadIdx.x;
#pragma unroll
  for (int i = 0; i < kCount; i += kEach * kThreads)
    if (i + kEach * kThreads <= kCount || i + first < kCount)
      CopyPacked<kEach>(to + first + i, from + first + i);
}

// A state in halves has them in turn for the rows that a warp has at once: the upper ones of these rows, then
// the lower ones. So each warp changes the form of its rows in place.
template <typename G>
constexpr int kRowsOfWarp = G::kRowGroups * G::kRows;

// The first of these rows.
template <typename G>
__device__ int FirstOfWarp(const G& partition) {
  return partition.first_row / kRowsOfWarp<G> * kRowsOfWarp<G>;
}

// Where the columns of a lane lie in one half of these rows: side by side, so that it reads and writes 16 bytes
// of a row.
template <typename G>
__device__ int PlaceInHalf(const G& partition, int row) {
  return (partition.first_row % kRowsOfWarp<G> + row) * N + partition.col_group * G::kCols;
}

// Starts to copy all upper halves to shared memory, where they lie one after the other.
template <typename G, int kThreads>
__device__ void CopyUpper(const float* state, uint16_t* upper) {
#pragma unroll
  for (int row = 0; row < N; row += kRowsOfWarp<G>)
    CopyElements<kRowsOfWarp<G> * N, kThreads>(reinterpret_cast<const uint16_t*>(state + row * N),
                                               upper + row * N);
}

// The lower halves of a warp's rows.
template <typename G>
__device__ const uint16_t* LowerOf(const float* rows) {
  return reinterpret_cast<const uint16_t*>(rows) + kRowsOfWarp<G> * N;
}

// Fetches all lower halves into L2.
template <typename G>
__device__ void PrefetchLower(const float* state) {
  const int row = threadIdx.x * kRowsOfWarp<G>;
  if (row < N) PrefetchBytes(LowerOf<G>(state + row * N), kRowsOfWarp<G> * N * sizeof(uint16_t));
}

// Where PlaceInHalf puts a column, the inverse of StatePartition::Col.
__device__ inline int PlaceOfColumn(int column) {
  return column % (N / 2) / 4 * 8 + column / (N / 2) * 4 + column % 4;
}

// Cuts the vector of a warp into parts, the largest first, that together have all bits of its floats. They are
// in the order of the halves. Of the vector, the last rest is left.
__device__ inline void CutIntoParts(LaneVector& x, __nv_bfloat16 (&parts)[kParts][N]) {
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    Packed<__nv_bfloat16, kChannels> rounded;
    rounded.Set(x);
    rounded.Store(parts[i] + PlaceOfColumn(OwnChannel()));
#pragma unroll
    for (int c = 0; c < kChannels; ++c) x[c] -= rounded[c];
  }
}

// y = S u on the matrix units, with the upper halves of S and with u in parts, which are columns of the right
// operand. A fragment's inputs are in another order than in memory, the same in both operands, so that a lane
// has eight neighbouring ones.
template <int kWarps>
__device__ void ReadUpper(const __nv_bfloat16* upper, const __nv_bfloat16 (&u)[kParts][N],
                          float (&y)[N]) {
  constexpr int kRows = 16, kInputs = 32;
  const int lane = threadIdx.x % 32, own = lane / 4, input = lane % 4 * 8;
  using Vector = Packed<__nv_bfloat16, 8>;
  Vector right[N / kInputs] = {};
#pragma unroll
  for (int i = 0; i < N / kInputs; ++i)
    if (own < kParts) right[i].Load(u[own] + i * kInputs + input);
#pragma unroll
  for (int turn = 0; turn < N / kRows / kWarps; ++turn) {
    const int row = (turn * kWarps + threadIdx.x / 32) * kRows + own;
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < N / kInputs; ++i) {
      Vector left[2];
      left[0].Load(upper + row * N + i * kInputs + input);
      left[1].Load(upper + (row + 8) * N + i * kInputs + input);
#pragma unroll
      for (int w = 0; w < Vector::kWords; w += 2)
        WarpMultiply(
            sums, {left[0].words[w], left[1].words[w], left[0].words[w + 1], left[1].words[w + 1]},
            right[i].words[w], right[i].words[w + 1]);
    }
    // Of the first lane's two columns and of the next one's.
    float rows[2] = {sums[0] + sums[1], sums[2] + sums[3]};
    AllReduce<1, 2>(rows);
    if (lane % 4 == 0) y[row] = rows[0], y[row + 8] = rows[1];
  }
}

template <typename G>
__device__ void LoadHalves(const G& partition, const uint16_t* upper, const uint16_t* lower,
                           Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i) {
    const int place = PlaceInHalf(partition, i);
    const auto uppers = LoadPacked<G::kCols, uint16_t>(upper, place);
    const auto lowers = LoadPacked<G::kCols, uint16_t>(lower, place);
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) {
      const uint32_t bits =
          __byte_perm(lowers.words[c / 2], uppers.words[c / 2], c % 2 ? 0x7632 : 0x5410);
      s[i][c] = __uint_as_float(bits - kHalfOfLower);
    }
  }
}

template <typename G>
__device__ void StoreHalves(const G& partition, float* rows, const Fragment<G>& s) {
  auto* const upper = reinterpret_cast<uint16_t*>(rows);
  // NaN has many forms, and the upper halves of some are numbers.
  const auto bits = [](float x) {
    return (x != x ? 0x7fc00000u : __float_as_uint(x)) + kHalfOfLower;
  };
#pragma unroll
  for (int i = 0; i < G::kRows; ++i) {
    Packed<uint16_t, G::kCols> uppers, lowers;
#pragma unroll
    for (int c = 0; c < G::kCols; c += 2) {
      const uint32_t even = bits(s[i][c]), odd = bits(s[i][c + 1]);
      uppers.words[c / 2] = __byte_perm(even, odd, 0x7632);
      lowers.words[c / 2] = __byte_perm(even, odd, 0x5410);
    }
    const int place = PlaceInHalf(partition, i);
    uppers.Store(upper + place), lowers.Store(upper + kRowsOfWarp<G> * N + place);
  }
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
template <typename T, int kWarps, bool kPostpones>
__global__ __launch_bounds__(32 * kWarps, BlocksOfHeads(kWarps, kPostpones)) void SummedHeadKernel(
    const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  using Shared = HeadShared<T, kPostpones>;
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

  // The block's first kernel waited before this one could start, and no kernel between has written the
  // state, the tokens that wait, a parameter, or the first layer's value.
  if constexpr (kPostpones)
    CopyUpper<G, kThreads>(state, upper);
  else
    CopyElements<kFirstHalf, kThreads>(state, shared.state);
  const HeadSchedule schedule(kPostpones ? call.schedule : nullptr);
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
  if constexpr (kPostpones) {
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
    if constexpr (kPostpones) {
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
      if constexpr (!kPostpones) {
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
  } else if constexpr (kPostpones) {
    if (warp == 0) {
      LaneVector u;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) u[c] = r[c];
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
  for (int c = 0; c < kChannels; ++c) y[c] += added[c];
  NormaliseAndGate<32>(bonus, token.v, gate, parameters.weight, parameters.bias, y);
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
                       sizeof(HeadShared<decltype(zero), postpones()>), stream, own);
  };
  const bool few = call.rows * call.heads <= kFewHeads * device.multiprocessors;
  return ForHalfTypes<1, kWarpsOfFew>(call.dtype, few ? kWarpsOfFew : 1,
                                      [&](auto zero, auto warps) {
                                        using T = decltype(zero);
                                        if constexpr (std::is_same_v<T, __nv_bfloat16>)
                                          if (call.Postpones())
                                            return launch(zero, warps, std::true_type());
                                        return launch(zero, warps, std::false_type());
                                      });
}

}  // namespace rwkv_jax::cuda
