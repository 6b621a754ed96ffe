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
// matrices, four warps prepare the vectors of the token, all threads take the step, and one warp reads out.
//
// A block must not run beside a product: the more of a multiprocessor's memory is shared memory, the less is
// its L1, through which a product has its loads under way. So it asks for so much shared memory that it
// waits for a free multiprocessor (kAloneBytes).
#include <algorithm>

#include "decoding/head.cuh"
#include "kernel_choice.cuh"
#include "launch_chain.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kBlockHeadSize;
constexpr int kHeadLanes = N / kHeadVector;

using Partition = StatePartition<N, 2>;
constexpr int kHeadThreads = Partition::kThreads, kHeadWarps = Partition::kWarps;

// So many blocks share the registers of a multiprocessor, with room for blocks of the next product.
constexpr int kHeadBlocks = 4;

// Groups of kHeadLanes threads of a block, each of which has all channels of a head.
constexpr int kGroups = kHeadThreads / kHeadLanes;

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

// What the projections give for a head.
enum Projected { kProjectedR, kProjectedK, kProjectedV, kProjected };

template <typename T>
struct HeadShared {
  float sums[kLowRankMaps][kHeadWarps][N];  // of the low-rank maps, of each warp's share
  float token[kHeadRows][N];
  float y[N];
  T parameters[kParameters][N];
  float state[N * N];
};

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

// Starts to copy the parameters of the head that begins at a channel, and the first layer's value.
template <typename T>
__device__ void CopyParameters(const Rwkv7BlockCall& call, int64_t channel, int64_t row,
                               HeadShared<T>& shared) {
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
__device__ void CopyFloats(const float* from, int count, int first, float* to) {
  for (int i = 4 * (static_cast<int>(threadIdx.x) - first); i < count; i += 4 * kHeadThreads)
    if (i >= 0) CopyPacked<4>(to + i, from + i);
}

// Four warps make the vectors of the token: of the decay, of the keys, of the value, and of the gate. The
// groups of lanes of a warp share out the sums of the low-rank maps, and then compute the same.
template <typename T>
__device__ void PrepareToken(const Rwkv7BlockCall& call, int64_t at, HeadShared<T>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int channel = OwnChannel();
  const auto projected = [&](Projected row, HeadVector& x) {
    LoadFloats(shared.token[kR + row] + channel, x);
  };
  const auto low_rank = [&](LowRankMap map, HeadVector& x) {
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
    LoadWide<T>(shared.parameters[parameter], channel, x);
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
    MakeFactors(w0, w);
    store(kW, w);
  } else if (warp == 2) {
    HeadVector v;
    projected(kProjectedV, v);
    if (call.first != nullptr) {
      HeadVector share, first, v0;
      low_rank(kShareMap, share);
      load(kFirst, first), load(kV0, v0);
      AddShare(first, v0, share, v);
    } else if (lane < kHeadLanes) {
      StoreRounded<T>(call.made_first, at + channel, v);
    }
    store(kV, v);
  } else if (warp == 3) {
    HeadVector gate;
    low_rank(kGateMap, gate);
    store(kGate, gate);
  }
}

// What a warp reads out.
template <typename T>
__device__ void ReadOut(const HeadShared<T>& shared, int64_t at, void* read) {
  const int channel = OwnChannel();
  const auto load = [&](int row, HeadVector& x) { LoadFloats(shared.token[row] + channel, x); };
  HeadVector y, r, key, v, gate, weight, bias, r_k;
  LoadFloats(shared.y + channel, y);
  load(kR, r), load(kK, key), load(kV, v), load(kGate, gate);
  LoadWide<T>(shared.parameters[kNormWeight], channel, weight);
  LoadWide<T>(shared.parameters[kNormBias], channel, bias);
  LoadWide<T>(shared.parameters[kRk], channel, r_k);
  NormaliseAndGate<kHeadLanes>(Bonus<kHeadLanes>(r, key, r_k), v, gate, weight, bias, y);
  if (threadIdx.x < kHeadLanes) StoreRounded<T>(read, at + channel, y);
}

template <typename T>
__global__ __launch_bounds__(kHeadThreads, kHeadBlocks) void HeadKernel(
    ChainPlace place, const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  HeadShared<T>& shared = *reinterpret_cast<HeadShared<T>*>(memory);
  float* const hidden = reinterpret_cast<float*>(memory + sizeof(shared));
  const Rwkv7BlockCall& call = own.call;
  const Partition partition;
  const int64_t head = blockIdx.x, row = blockIdx.y, width = call.width;
  const int64_t state = (row * call.heads + head) * N * N, channel = head * N;
  const int64_t at = row * width + channel;
  const SecondMatrices<T> matrices{call, reinterpret_cast<T*>(hidden + own.ranks), own.copied,
                                   channel};

  // No kernel of the block before this one writes the state, a parameter, or the first layer's value.
  const EarlierKernels kernels(place);
  matrices.Copy();
  CopyFloats(call.state + state, N * N, 0, shared.state);
  CopyParameters(call, channel, row, shared);
  // Blocks fill the multiprocessors, and blocks that wait would take the room of others.
  const bool early = call.rows == 1;
  if (early) kernels.LetNextStart();
  kernels.Await();
  if (!early) kernels.LetNextStart();
  const float* const projected =
      static_cast<const float*>(own.projected) + row * own.projected_width;
  constexpr int kCopies = N / 4, kLast = kHeadThreads - kProjected * kCopies;
  CopyFloats(projected + kProjected * width, own.ranks, 0, hidden);
  for (int i = 0; i < kProjected; ++i)
    CopyFloats(projected + i * width + channel, N, kLast + i * kCopies, shared.token[kR + i]);
  WaitForCopies<0>();
  __syncthreads();
  matrices.Multiply(hidden, shared.sums);
  __syncthreads();
  PrepareToken(call, at, shared);
  __syncthreads();

  // A row without a token keeps its states, and what is read out means nothing.
  const bool idle = call.segment_ids[row] == 0;
  const Token token{shared.token[0], 0};
  Fragment<Partition> s;
  LoadState(partition, shared.state, s);
  if (!idle) Step(partition, token, s);
  StoreState(partition, call.state_after + state, s);
  float r[Partition::kCols];
  LoadCols(partition, token.Row(kR), r);
  Read(partition, s, r, shared.y);
  __syncthreads();
  if (threadIdx.x < 32) ReadOut(shared, at, own.read);
  if (threadIdx.x / 32 == 1 && partition.lane < kHeadLanes) {
    const int64_t from = at + partition.lane * kHeadVector;
    LoadPacked<kHeadVector, T>(idle ? call.time_before : own.normalised, from)
        .Store(static_cast<T*>(call.time_after) + from);
  }
}

}  // namespace

cudaError_t StepHeads(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  HeadArguments own{call,
                    call.scratch + scratch.projected,
                    call.scratch + scratch.normalised,
                    call.scratch + scratch.read,
                    static_cast<int>(scratch.projected_width),
                    static_cast<int>(call.Ranks())};
  const Grid blocks(call.heads, call.rows);
  return ForAllTypes<kBlockHeadSize>(call.dtype, kBlockHeadSize, [&](auto zero, auto) {
    using T = decltype(zero);
    constexpr int64_t kShared = sizeof(HeadShared<T>);
    const int64_t hidden = own.ranks * sizeof(float);
    const int64_t fits =
        (device.shared_memory - kShared - hidden) / static_cast<int64_t>(N * sizeof(T));
    // Blocks of several rows would take each other's room in shared memory.
    own.copied = static_cast<int>(call.rows > 1 ? 0 : own.ranks < fits ? own.ranks : fits);
    int64_t more = hidden + own.copied * N * static_cast<int64_t>(sizeof(T));
    if (call.rows == 1)
      more = std::max(more, std::min(kAloneBytes, device.shared_memory) - kShared);
    return chain.Launch(HeadKernel<T>, blocks, kHeadThreads, kShared + more, own);
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
  call.all_rows = call.rows, call.rows = count;
  return call;
}

cudaError_t RunRows(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  cudaError_t error = ProjectTokens(chain, call, device);
  if (error == cudaSuccess) error = StepHeads(chain, call, device);
  if (error == cudaSuccess) error = ReadTokens(chain, call, device);
  if (error == cudaSuccess) error = ProjectChannels(chain, call, device);
  if (error == cudaSuccess) error = ReadChannels(chain, call, device);
  return error;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  LaunchChain chain(stream);
  if (call.OnMatrixUnits()) return RunOnMatrixUnits(chain, call, device);
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < call.rows && error == cudaSuccess; row += kRowsAtOnce)
    error = RunRows(chain, RowsOf(call, row, std::min(call.rows - row, kRowsAtOnce)), device);
  return error;
}

}  // namespace rwkv_jax::cuda
