// What a block of RWKV-7 computes for one token of each row between its projections and its output
// product, for a head of a row in each block of threads. `hidden` are the results of the first products of
// the low-rank maps:
//
//   w = w0 + hidden_w w2,  rate = hidden_a a2,  gate = hidden_g g2
//   v = v + (first - v) sigmoid(v0 + hidden_v v2)          but in the first layer
//   the keys (layers/wkv7_keys.cu), wkv7 (wkv7/token.cuh), and what is read out (layers/read_out.cu)
//
// All threads hold the state in registers from the start, and first share out the products of the
// low-rank maps. Then one warp prepares the vectors of the token, all take the step, and that warp reads
// out.
#include "decoding/kernels.h"
#include "launch.cuh"
#include "layers/formulas.cuh"
#include "wkv7/token.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int N = kBlockHeadSize;

using Partition = StatePartition<N, 4>;

constexpr int kHeadWarps = Partition::kWarps, kHeadLanes = N / kHeadVector;
constexpr int kTokenVectors = 6;

struct HeadArguments {
  Rwkv7BlockCall call;
  const float* projected;
  const void* normalised;
  void* read;
  int ranks;
};

struct HeadShared {
  float sums[kLowRankMaps][kHeadWarps][N];
  float token[kTokenVectors * N];
  float y[N];
};

// The products of a warp's share of the inputs of a low-rank map's second matrix with the columns of a
// head, from `channel` on.
template <typename T>
__device__ void MultiplyLowRank(const LowRank& map, const float* hidden, int64_t width,
                                int64_t channel, float (&sums)[N]) {
  constexpr int kInputLanes = Partition::kThreads / kHeadLanes, kAhead = 8;
  const int input = threadIdx.x / kHeadLanes, column = threadIdx.x % kHeadLanes * kHeadVector;
  const int rank = static_cast<int>(map.rank);
  HeadVector products = {};
  for (int first = input; first < rank; first += kAhead * kInputLanes) {
    Packed<T, kHeadVector> weights[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i * kInputLanes < rank)
        weights[i] = LoadPacked<kHeadVector, T>(
            map.second, (first + i * kInputLanes) * width + channel + column);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kInputLanes >= rank) continue;
      const float x = hidden[first + i * kInputLanes];
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) products[c] = fmaf(weights[i][c], x, products[c]);
    }
  }
  constexpr int kLeft = kHeadVector / (32 / kHeadLanes);
  const int found = ReduceScatter<kHeadLanes, 32>(products, threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kLeft; ++i) sums[column + found + i] = products[i];
}

// A lane's channels of an array of T.
template <typename T>
__device__ void LoadWide(const void* array, int64_t at, HeadVector& x) {
  const auto packed = LoadPacked<kHeadVector, T>(array, at);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) x[c] = packed[c];
}

template <typename T>
__global__ __launch_bounds__(Partition::kThreads) void HeadKernel(
    const __grid_constant__ HeadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  __shared__ __align__(16) HeadShared shared;
  float* const hidden = reinterpret_cast<float*>(memory);
  const Rwkv7BlockCall& call = own.call;
  const Partition partition;
  const int64_t head = blockIdx.x, row = blockIdx.y, width = call.width;
  const int64_t state = (row * call.heads + head) * N * N, first_channel = head * N;
  const float* const projected = own.projected + row * (3 * width + own.ranks);

  Fragment<Partition> s;
  // The kernel before this one writes no state.
  LoadState(partition, call.state + state, s);
  WaitForKernelsBefore();
  LetNextKernelStart();
  for (int i = threadIdx.x; i < own.ranks; i += Partition::kThreads)
    hidden[i] = projected[3 * width + i];
  __syncthreads();
  int offset = 0;
#pragma unroll 1
  for (int i = 0; i < kLowRankMaps; ++i) {
    MultiplyLowRank<T>(call.maps[i], hidden + offset, width, first_channel,
                       shared.sums[i][threadIdx.x / 32]);
    offset += static_cast<int>(call.maps[i].rank);
  }
  __syncthreads();

  // Each group of kHeadLanes lanes of the first warp computes the same.
  const bool prepares = threadIdx.x < 32, stores = threadIdx.x < kHeadLanes;
  const int own_channel = threadIdx.x % kHeadLanes * kHeadVector;
  const int64_t channel = first_channel + own_channel, at = row * width + channel;
  HeadVector r, key, v, gate = {};
  if (prepares) {
    const auto low_rank = [&](LowRankMap map, HeadVector& x) {
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) {
        x[c] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kHeadWarps; ++warp)
          x[c] += shared.sums[map][warp][own_channel + c];
      }
    };
    HeadVector k, rate, w, w0, k_k, k_a, a0, a, b;
    LoadFloats(projected + channel, r);
    LoadFloats(projected + width + channel, k);
    LoadFloats(projected + 2 * width + channel, v);
    LoadWide<T>(call.w0, channel, w0);
    LoadWide<T>(call.k_k, channel, k_k);
    LoadWide<T>(call.k_a, channel, k_a);
    LoadWide<T>(call.a0, channel, a0);
    low_rank(kDecayMap, w);
    low_rank(kRateMap, rate);
    low_rank(kGateMap, gate);
    if (call.first != nullptr) {
      HeadVector share, first, v0;
      low_rank(kShareMap, share);
      LoadWide<T>(call.first, at, first);
      LoadWide<T>(call.v0, channel, v0);
#pragma unroll
      for (int c = 0; c < kHeadVector; ++c) v[c] += (first[c] - v[c]) * Sigmoid(v0[c] + share[c]);
    } else if (stores) {
      StoreRounded<T>(call.made_first, at, v);
    }
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) w[c] = DecayAndSlope(w0[c] + w[c], Decay::kSigmoid).x;
    MakeKeys<kHeadLanes>(k, rate, k_k, k_a, a0, key, a, b);
    if (stores) {
      const auto store = [&](Vector vector, const HeadVector& x) {
        StoreFloats(shared.token + vector * N + own_channel, x);
      };
      store(kW, w), store(kK, key), store(kV, v), store(kA, a), store(kB, b), store(kR, r);
    }
  }
  __syncthreads();

  const TokenView<N, 1> token{shared.token, 0};
  float sa[Partition::kRows], y[Partition::kRows], columns[Partition::kCols];
  ReadFromState(partition, token, s, sa);
  UpdateState(partition, token, sa, s);
  LoadCols(partition, token.Row(kR), columns);
  PartialDot<Partition>(s, columns, y);
  const int found = ReduceScatter<1, Partition::kColGroups>(y, partition.lane);
  if (found >= 0) shared.y[partition.first_row + found] = y[0];
  StoreState(partition, call.state_after + state, s);
  __syncthreads();

  if (!prepares) return;
  HeadVector out, weight, bias, r_k;
  LoadFloats(shared.y + own_channel, out);
  LoadWide<T>(call.head_norm.weight, channel, weight);
  LoadWide<T>(call.head_norm.bias, channel, bias);
  LoadWide<T>(call.r_k, channel, r_k);
  const Normalised<kHeadLanes> normal(out, r, key, r_k);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c)
    out[c] = (normal.z[c] * weight[c] + bias[c] + normal.s * v[c]) * gate[c];
  if (!stores) return;
  StoreRounded<T>(own.read, at, out);
  LoadPacked<kHeadVector, T>(own.normalised, at).Store(static_cast<T*>(call.time_after) + at);
}

}  // namespace

cudaError_t StepHeads(cudaStream_t stream, const Rwkv7BlockCall& call) {
  const int64_t ranks = call.Ranks();
  const BlockScratch scratch(call.rows, call.width, call.hidden, ranks);
  const HeadArguments own{call, call.scratch + scratch.projected, call.scratch + scratch.normalised,
                          call.scratch + scratch.read, static_cast<int>(ranks)};
  const dim3 blocks(static_cast<unsigned>(call.heads), static_cast<unsigned>(call.rows));
  return ForAllTypes<kBlockHeadSize>(call.dtype, kBlockHeadSize, [&](auto zero, auto) {
    return LaunchEarly(HeadKernel<decltype(zero)>, blocks, Partition::kThreads,
                       ranks * sizeof(float), stream, own);
  });
}

cudaError_t Run(cudaStream_t stream, const Rwkv7BlockCall& call, const Device& device) {
  if (call.rows == 0) return cudaSuccess;
  cudaError_t error = ProjectTokens(stream, call, device);
  if (error == cudaSuccess) error = StepHeads(stream, call);
  if (error == cudaSuccess) error = ReadTokens(stream, call, device);
  if (error == cudaSuccess) error = ProjectChannels(stream, call, device);
  if (error == cudaSuccess) error = ReadChannels(stream, call, device);
  return error;
}

}  // namespace rwkv_jax::cuda
