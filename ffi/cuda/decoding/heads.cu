// What a block of RWKV-7 computes for one token of each row between its projections and its output
// product, for a head of a row in each block of threads. `hidden` are the results of the first products of
// the low-rank maps:
//
//   w = w0 + hidden_w w2,  rate = hidden_a a2,  gate = hidden_g g2
//   v = v + (first - v) sigmoid(v0 + hidden_v v2)          but in the first layer
//   the keys (layers/wkv7_keys.cu), wkv7 (wkv7/token.cuh), and what is read out (layers/read_out.cu)
//
// Before the kernels before it have ended, a block copies the state, the parameters of its head and, for one
// row, the second matrices of the low-rank maps into shared memory. Then all threads multiply with these
// matrices, unless the matrix units have done so before, four warps prepare the vectors of the token, all
// threads take the step, and one warp reads out.
//
// Where tokens wait (Rwkv7BlockCall::waiting), the state is updated only now and then. Until then it is read
// alone. With the factors G_t = diag(w_t) + a_t b_t^T of wkv7, S being the state and j the tokens that wait,
//
//   y_t = S_t r_t = S u_0 + sum_j v_j (k_j . u_j),   u_t = r_t,   u_{j-1} = G_j u_j,   token t among the j
//
// and the vectors of the token join those that wait.
//
// A block with matrices must not run beside a product: the more of a multiprocessor's memory is shared
// memory, the less is its L1, through which a product has its loads under way. So it asks for so much shared
// memory that it waits for a free multiprocessor (kAloneBytes).
#include <algorithm>
#include <type_traits>

#include "decoding/kernels.h"
#include "launch.cuh"
#include "layers/formulas.cuh"
#include "wkv7/token.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kBlockHeadSize;
constexpr int kHeadLanes = N / kHeadVector;

// How a block computes a head: whether the matrix units have made the sums of the low-rank maps, and whether
// tokens wait.
enum class HeadMode { kMultiplies, kSummed, kPostpones };

template <HeadMode kMode>
using InMode = std::integral_constant<HeadMode, kMode>;

// A block that multiplies has many threads for it, and one that does not has few, so that many heads are
// copied at once.
template <HeadMode kMode>
using HeadPartition = StatePartition<N, kMode == HeadMode::kMultiplies ? 2 : 4>;

// So many blocks share the registers of a multiprocessor. Beside those that multiply, blocks of the next
// product find room, too.
template <HeadMode kMode>
constexpr int kHeadBlocks = kMode == HeadMode::kMultiplies ? 4 : 8;

// Groups of kHeadLanes threads of a block that multiplies, each of which has all channels of a head.
constexpr int kHeadWarps = HeadPartition<HeadMode::kMultiplies>::kWarps;
constexpr int kGroups = 32 * kHeadWarps / kHeadLanes;

// Where a multiprocessor of Hopper has 132 KiB of shared memory, such a block leaves too little of it for a
// product.
constexpr int64_t kAloneBytes = 127 << 10;

// The vectors of a token in shared memory, after those of `Vector`.
enum HeadRow { kRawKey = kR + 1, kRawValue, kGate, kHeadRows };

enum Parameter { kW0, kKk, kKa, kA0, kV0, kFirst, kRk, kNormWeight, kNormBias, kParameters };

struct HeadArguments {
  Rwkv7BlockCall call;
  const void *projected, *normalised;
  void* read;
  int projected_width;
  int ranks;
  int copied;  // how many inputs of all low-rank maps are copied into shared memory
};

// What the projections give for a head: the first rows of HeadShared::projected.
enum Projected { kProjectedR, kProjectedK, kProjectedV, kProjectedMaps };

// The sums of the low-rank maps are those of each warp, unless the matrix units have made them.
template <typename T, HeadMode kMode>
struct HeadShared {
  static constexpr bool kSummed = kMode != HeadMode::kMultiplies;
  static constexpr int kWaits = kMode == HeadMode::kPostpones ? kMostWaiting : 0;
  T projected[kSummed ? kProjectedMaps + kLowRankMaps : 0][N];
  float sums[kLowRankMaps][kSummed ? 0 : kHeadWarps][N];
  float token[kHeadRows][N];
  float u[N], y[N];
  T parameters[kParameters][N];
  float state[N * N];
  float waiting[kWaits][kWaitingVectors][N];
};

static_assert(kW == 0 && kB == kWaitingVectors - 1);

// The first channel of a lane in its head.
__device__ inline int OwnChannel() { return threadIdx.x % kHeadLanes * kHeadVector; }

// The second matrices of the low-rank maps, one after the other, in the columns of a head: the first
// `copied` inputs in shared memory, and the others where they lie.
template <typename T>
struct SecondMatrices {
  const Rwkv7BlockCall& call;
  T* shared;
  int copied;
  int64_t channel;

  // The inputs that a group of lanes loads before it multiplies with them.
  static constexpr int kAtOnce = 4;

  // Calls fn(map, its rank, its first input of all, its matrix).
  template <typename Fn>
  __device__ void ForMaps(Fn&& fn) const {
    int offset = 0;
#pragma unroll
    for (int i = 0; i < kLowRankMaps; ++i) {
      const int rank = static_cast<int>(call.maps[i].rank);
      fn(i, rank, offset, static_cast<const T*>(call.maps[i].second) + channel);
      offset += rank;
    }
  }

  __device__ void Copy() const {
    const int group = threadIdx.x / kHeadLanes;
    ForMaps([&](int, int rank, int offset, const T* matrix) {
      const int count = rank < copied - offset ? rank : copied - offset;
      for (int i = group; i < count; i += kGroups)
        CopyPacked<kHeadVector>(shared + (offset + i) * N + OwnChannel(),
                                matrix + i * call.width + OwnChannel());
    });
  }

  // The sums of each warp's share of the products with `hidden`, for each map.
  __device__ void Multiply(const float* hidden, float (&sums)[kLowRankMaps][kHeadWarps][N]) const {
    const int group = threadIdx.x / kHeadLanes, warp = threadIdx.x / 32;
    ForMaps([&](int map, int rank, int offset, const T* matrix) {
      HeadVector products = {};
      const int there = rank < copied - offset ? rank : copied - offset;
      for (int first = group; first < rank; first += kAtOnce * kGroups) {
        Packed<T, kHeadVector> weights[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = first + j * kGroups;
          if (i < there)
            weights[j].Load(shared + (offset + i) * N + OwnChannel());
          else if (i < rank)
            weights[j].Load(matrix + i * call.width + OwnChannel());
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = first + j * kGroups;
          if (i >= rank) continue;
          const float x = hidden[offset + i];
#pragma unroll
          for (int c = 0; c < kHeadVector; ++c) products[c] = fmaf(weights[j][c], x, products[c]);
        }
      }
      constexpr int kLeft = kHeadVector / (32 / kHeadLanes);
      const int found = ReduceScatter<kHeadLanes, 32>(products, threadIdx.x % 32);
#pragma unroll
      for (int c = 0; c < kLeft; ++c) sums[map][warp][OwnChannel() + found + c] = products[c];
    });
  }
};

// The channels of a lane, from `channel` on.
template <typename T>
__device__ void LoadWide(const T* parameter, int channel, HeadVector& x) {
  const auto packed = LoadPacked<kHeadVector, T>(parameter, channel);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) x[c] = packed[c];
}

// Starts to copy the parameters of the head that begins at a channel, and the first layer's value.
template <typename T, HeadMode kMode>
__device__ void CopyParameters(const Rwkv7BlockCall& call, int64_t channel, int64_t row,
                               HeadShared<T, kMode>& shared) {
  constexpr int kCopies = N * sizeof(T) / 16, kEach = N / kCopies;
  const void* const parameters[kParameters] = {call.w0,
                                               call.k_k,
                                               call.k_a,
                                               call.a0,
                                               call.v0,
                                               call.first,
                                               call.r_k,
                                               call.head_norm.weight,
                                               call.head_norm.bias};
#pragma unroll
  for (int i = 0; i < kParameters; ++i) {
    const int turn = static_cast<int>(threadIdx.x) - i * kCopies;
    if (turn < 0 || turn >= kCopies || parameters[i] == nullptr) continue;
    const int64_t at = (i == kFirst ? row * call.width : 0) + channel + turn * kEach;
    CopyPacked<kEach>(shared.parameters[i] + turn * kEach,
                      static_cast<const T*>(parameters[i]) + at);
  }
}

// Copies `count` floats, a multiple of 4, by threads from `first` on.
template <int kThreads>
__device__ void CopyFloats(const float* from, int count, int first, float* to) {
  for (int i = 4 * (static_cast<int>(threadIdx.x) - first); i < count; i += 4 * kThreads)
    if (i >= 0) CopyPacked<4>(to + i, from + i);
}

// Four warps make the vectors of the token: of the decay, of the keys, of the value, and of the gate. The
// groups of lanes of a warp share out the sums of the low-rank maps, and then compute the same.
template <typename T, HeadMode kMode>
__device__ void PrepareToken(const Rwkv7BlockCall& call, int64_t at, HeadShared<T, kMode>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = OwnChannel();
  const auto projected = [&](Projected row, HeadVector& x) {
    if constexpr (shared.kSummed)
      LoadWide(shared.projected[row], channel, x);
    else
      LoadFloats(shared.token[kR + row] + channel, x);
  };
  const auto low_rank = [&](LowRankMap map, HeadVector& x) {
    if constexpr (shared.kSummed)
      return LoadWide(shared.projected[kProjectedMaps + map], channel, x);
    constexpr int kEach = kHeadWarps / (32 / kHeadLanes);
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) x[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      HeadVector sums;
      LoadFloats(shared.sums[map][lane / kHeadLanes * kEach + i] + channel, sums);
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) x[c] += sums[c];
    }
    AllReduce<kHeadLanes, 32>(x);
  };
  const auto load = [&](Parameter parameter, HeadVector& x) {
    LoadWide(shared.parameters[parameter], channel, x);
  };
  const auto store = [&](int row, const HeadVector& x) {
    if (lane < kHeadLanes) StoreFloats(shared.token[row] + channel, x);
  };
  if (warp == 0) {
    HeadVector k, rate, k_k, k_a, a0, key, a, b;
    low_rank(kRateMap, rate);
    projected(kProjectedK, k);
    load(kKk, k_k), load(kKa, k_a), load(kA0, a0);
    MakeKeys(k, rate, k_k, k_a, a0, InverseLength<kHeadLanes>(k, k_k), key, a, b);
    store(kK, key), store(kA, a), store(kB, b);
  } else if (warp == 1) {
    HeadVector w, w0;
    low_rank(kDecayMap, w);
    load(kW0, w0);
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) w[c] = DecayAndSlope(w0[c] + w[c], Decay::kSigmoid).x;
    store(kW, w);
  } else if (warp == 2) {
    HeadVector v;
    projected(kProjectedV, v);
    if (call.first != nullptr) {
      HeadVector share, first, v0;
      low_rank(kShareMap, share);
      load(kFirst, first), load(kV0, v0);
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) v[c] += (first[c] - v[c]) * Sigmoid(v0[c] + share[c]);
    } else if (lane < kHeadLanes) {
      StoreRounded<T>(call.made_first, at + channel, v);
    }
    store(kV, v);
  } else if (warp == 3) {
    HeadVector gate, r;
    low_rank(kGateMap, gate);
    store(kGate, gate);
    if constexpr (shared.kSummed) projected(kProjectedR, r), store(kR, r);
  }
}

// What a warp reads out of y + `more`.
template <typename T, HeadMode kMode>
__device__ void ReadOut(const HeadShared<T, kMode>& shared, int64_t at, const HeadVector& more,
                        void* read) {
  const int channel = OwnChannel();
  HeadVector out, r, key, v, gate, weight, bias, r_k;
  LoadFloats(shared.y + channel, out);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) out[c] += more[c];
  LoadFloats(shared.token[kR] + channel, r), LoadFloats(shared.token[kK] + channel, key);
  LoadFloats(shared.token[kV] + channel, v), LoadFloats(shared.token[kGate] + channel, gate);
  LoadWide(shared.parameters[kNormWeight], channel, weight);
  LoadWide(shared.parameters[kNormBias], channel, bias);
  LoadWide(shared.parameters[kRk], channel, r_k);
  const float bonus = Bonus<kHeadLanes>(r, key, r_k);
  const Normalised<kHeadLanes> normal(out);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c)
    out[c] = (normal.z[c] * weight[c] + bias[c] + bonus * v[c]) * gate[c];
  if (threadIdx.x < kHeadLanes) StoreRounded<T>(read, at + channel, out);
}

using Token = TokenView<N, 1>;

// Whether a token that waits is there. NaN is one that is.
__device__ inline bool IsThere(const Token& token) { return !(*token.Row(kW) < 0.0f); }

// u_j becomes u_{j-1}, and what the token adds to y is added to `added`, for a warp.
__device__ inline void ReadThrough(const Token& token, HeadVector& u, HeadVector& added) {
  const int channel = OwnChannel();
  HeadVector w, k, v, a, b;
  LoadFloats(token.Row(kW) + channel, w), LoadFloats(token.Row(kK) + channel, k);
  LoadFloats(token.Row(kV) + channel, v), LoadFloats(token.Row(kA) + channel, a);
  LoadFloats(token.Row(kB) + channel, b);
  float sums[2] = {};
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    sums[0] = fmaf(k[c], u[c], sums[0]);
    sums[1] = fmaf(b[c], u[c], sums[1]);
  }
  AllReduce<1, kHeadLanes>(sums);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    added[c] = fmaf(v[c], sums[0], added[c]);
    u[c] = fmaf(w[c], u[c], a[c] * sums[1]);
  }
}

template <typename Partition>
__device__ void Step(const Partition& partition, const Token& token, Fragment<Partition>& s) {
  float sa[Partition::kRows];
  ReadFromState(partition, token, s, sa);
  UpdateState(partition, token, sa, s);
}

// y = s x, with x in shared memory.
template <typename Partition>
__device__ void Read(const Partition& partition, const Fragment<Partition>& s, const float* x,
                     float* y) {
  float columns[Partition::kCols], sums[Partition::kRows];
  LoadCols(partition, x, columns);
  PartialDot<Partition>(s, columns, sums);
  const int found = ReduceScatter<1, Partition::kColGroups>(sums, partition.lane);
  if (found >= 0) y[partition.first_row + found] = sums[0];
}

template <typename T, HeadMode kMode>
__global__ __launch_bounds__(HeadPartition<kMode>::kThreads, kHeadBlocks<kMode>) void HeadKernel(
    const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  using Shared = HeadShared<T, kMode>;
  constexpr bool kSummed = Shared::kSummed, kPostpones = kMode == HeadMode::kPostpones;
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* const hidden = reinterpret_cast<float*>(memory + sizeof(shared));
  const Rwkv7BlockCall& call = own.call;
  using Partition = HeadPartition<kMode>;
  constexpr int kThreads = Partition::kThreads;
  const Partition partition;
  const int64_t head = blockIdx.x, row = blockIdx.y, width = call.width;
  const int64_t state = (row * call.heads + head) * N * N, channel = head * N;
  const int64_t at = row * width + channel;
  const SecondMatrices<T> matrices{call, reinterpret_cast<T*>(hidden + own.ranks), own.copied,
                                   channel};

  // The block's first kernel waited before this one could start, and no kernel between has written the
  // state, the tokens that wait, a parameter, or the first layer's value.
  if constexpr (!kSummed) matrices.Copy();
  CopyFloats<kThreads>(call.state + state, N * N, 0, shared.state);
  CopyParameters(call, channel, row, shared);
  // The vectors of the tokens that wait, for this head of this row.
  constexpr int kWaitingFloats = kWaitingVectors * N;
  const auto waiting = [&](int token) {
    return call.waiting +
           (token * call.rows * call.heads + row * call.heads + head) * kWaitingFloats;
  };
  int waiting_count = 0;
  bool updates = true;
  if constexpr (kPostpones) {
    const int given = call.schedule[kWaiting];
    waiting_count = given < 0 ? 0 : given < Shared::kWaits ? given : Shared::kWaits;
    updates = call.schedule[kUpdates] != 0 || waiting_count == Shared::kWaits;
    for (int i = 0; i < waiting_count; ++i)
      CopyFloats<kThreads>(waiting(i), kWaitingFloats, 0, shared.waiting[i][0]);
  }
  // Blocks that multiply fill the multiprocessors, and blocks that wait would take the room of others.
  const bool early = kSummed || call.rows == 1;
  if (early) LetNextKernelStart();
  WaitForKernelsBefore();
  if (!early) LetNextKernelStart();
  const int64_t begin = row * own.projected_width;
  if constexpr (kSummed) {
    constexpr int kEach = 16 / sizeof(T), kCopies = N / kEach;
    const int i = static_cast<int>(threadIdx.x) / kCopies, turn = threadIdx.x % kCopies * kEach;
    if (i < kProjectedMaps ||
        (i < kProjectedMaps + kLowRankMaps && call.maps[i - kProjectedMaps].rank > 0))
      CopyPacked<kEach>(shared.projected[i] + turn,
                        static_cast<const T*>(own.projected) + begin + i * width + channel + turn);
  } else {
    const float* const projected = static_cast<const float*>(own.projected) + begin;
    constexpr int kCopies = N / 4, kLast = kThreads - 3 * kCopies;
    CopyFloats<kThreads>(projected + 3 * width, own.ranks, 0, hidden);
    for (int i = 0; i < kProjectedMaps; ++i)
      CopyFloats<kThreads>(projected + i * width + channel, N, kLast + i * kCopies,
                           shared.token[kR + i]);
  }
  WaitForCopies<0>();
  __syncthreads();
  if constexpr (!kSummed) {
    matrices.Multiply(hidden, shared.sums);
    __syncthreads();
  }
  PrepareToken(call, at, shared);
  __syncthreads();

  // A row without a token keeps its states, and what is read out means nothing.
  const bool idle = call.segment_ids[row] == 0;
  const Token token{shared.token[0], 0};
  HeadVector added = {};
  Fragment<Partition> s;
  if (updates) {
    LoadState(partition, shared.state, s);
    for (int i = 0; i < waiting_count; ++i) {
      const Token before{shared.waiting[i][0], 0};
      if (IsThere(before)) Step(partition, before, s);
    }
    if (!idle) Step(partition, token, s);
    StoreState(partition, call.state_after + state, s);
    Read(partition, s, token.Row(kR), shared.y);
  } else {
    const int turn = 4 * static_cast<int>(threadIdx.x);
    if (turn < kWaitingFloats) {
      float4 vectors = *reinterpret_cast<const float4*>(shared.token[0] + turn);
      if (idle) vectors.x = -1.0f;
      *reinterpret_cast<float4*>(waiting(waiting_count) + turn) = vectors;
    }
    if (threadIdx.x < 32) {
      HeadVector u;
      LoadFloats(token.Row(kR) + OwnChannel(), u);
      ReadThrough(token, u, added);
      for (int i = waiting_count - 1; i >= 0; --i) {
        const Token before{shared.waiting[i][0], 0};
        if (IsThere(before)) ReadThrough(before, u, added);
      }
      if (threadIdx.x < kHeadLanes) StoreFloats(shared.u + OwnChannel(), u);
    }
    __syncthreads();
    LoadState(partition, shared.state, s);
    Read(partition, s, shared.u, shared.y);
  }
  __syncthreads();
  if (threadIdx.x < 32) ReadOut(shared, at, added, own.read);
  if (!kSummed && threadIdx.x / 32 == 1 && partition.lane < kHeadLanes) {
    const int64_t from = at + partition.lane * kHeadVector;
    LoadPacked<kHeadVector, T>(idle ? call.time_before : own.normalised, from)
        .Store(static_cast<T*>(call.time_after) + from);
  }
}

}  // namespace

cudaError_t StepHeads(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  HeadArguments own{call,
                    call.scratch + scratch.projected,
                    call.scratch + scratch.normalised,
                    call.scratch + scratch.read,
                    static_cast<int>(scratch.projected_width),
                    static_cast<int>(call.Ranks())};
  const dim3 blocks(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.rows));
  const auto launch = [&](auto zero, auto in_mode, int64_t bytes) {
    constexpr HeadMode kMode = in_mode();
    return LaunchEarly(HeadKernel<decltype(zero), kMode>, blocks, HeadPartition<kMode>::kThreads,
                       sizeof(HeadShared<decltype(zero), kMode>) + bytes, stream, own);
  };
  if (call.OnMatrixUnits())
    return ForHalfTypes<kBlockHeadSize>(call.dtype, kBlockHeadSize, [&](auto zero, auto) {
      return call.Postpones() ? launch(zero, InMode<HeadMode::kPostpones>(), 0)
                              : launch(zero, InMode<HeadMode::kSummed>(), 0);
    });
  return ForAllTypes<kBlockHeadSize>(call.dtype, kBlockHeadSize, [&](auto zero, auto) {
    using T = decltype(zero);
    constexpr int64_t kShared = sizeof(HeadShared<T, HeadMode::kMultiplies>);
    const int64_t hidden = own.ranks * sizeof(float);
    const int64_t fits =
        (device.shared_memory - kShared - hidden) / static_cast<int64_t>(N * sizeof(T));
    // Blocks of several rows would take each other's room in shared memory.
    own.copied = static_cast<int>(call.rows > 1 ? 0 : own.ranks < fits ? own.ranks : fits);
    int64_t more = hidden + own.copied * N * static_cast<int64_t>(sizeof(T));
    if (call.rows == 1)
      more = std::max(more, std::min(kAloneBytes, device.shared_memory) - kShared);
    return launch(zero, InMode<HeadMode::kMultiplies>(), more);
  });
}

namespace {

// The call of float32 for `count` rows from `begin` on, with the same scratch.
Rwkv7BlockCall RowsOf(Rwkv7BlockCall call, int64_t begin, int64_t count) {
  for (const void** array : {&call.x, &call.first, &call.time_before, &call.channel_before})
    if (*array != nullptr) *array = static_cast<const float*>(*array) + begin * call.width;
  for (void** array : {&call.out, &call.made_first, &call.time_after, &call.channel_after})
    if (*array != nullptr) *array = static_cast<float*>(*array) + begin * call.width;
  call.state += begin * call.heads * N * N, call.state_after += begin * call.heads * N * N;
  call.segment_ids += begin;
  call.rows = count;
  return call;
}

cudaError_t RunRows(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  cudaError_t error = ProjectTokens(stream, call, device);
  if (error == cudaSuccess) error = StepHeads(stream, call, device);
  if (error == cudaSuccess) error = ReadTokens(stream, call, device);
  if (error == cudaSuccess) error = ProjectChannels(stream, call, device);
  if (error == cudaSuccess) error = ReadChannels(stream, call, device);
  return error;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  if (call.OnMatrixUnits()) return RunOnMatrixUnits(stream, call, device);
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < call.rows && error == cudaSuccess; row += kRowsAtOnce)
    error = RunRows(stream, RowsOf(call, row, std::min(call.rows - row, kRowsAtOnce)), device);
  return error;
}

}  // namespace rwkv_jax::cuda
