// The products of many rows with matrices of bfloat16, on Hopper.
//
// A block has a tile of 128 rows and 128 or 256 outputs. One thread copies 64 inputs of both operands at a
// time into a ring of stages, the first weights before the kernels before this one have ended. Two
// warpgroups multiply 64 rows each. With more than 128 rows, the two blocks of a cluster have the same
// outputs, and each copies one half of the weights for both.
//
// Where a product has few tiles, several blocks share out its inputs. They write their sums to scratch, and
// another kernel adds them up in the order of the inputs.
#include "decoding/tiled_products.h"

#include "decoding/kernels.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

bool HasTiledProducts() { return false; }
cudaError_t LaunchTiledProducts(cudaStream_t, const MatrixProducts&, int*) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include <algorithm>
#include <cstdint>
#include <limits>

#include "hopper.cuh"
#include "hopper_code.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "tensor_map.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kWarpgroup = 128, kMultipliers = 2 * kWarpgroup;
constexpr int kThreads = kMultipliers + kWarpgroup;  // the third warpgroup copies

// What is copied at once is a box of 64 x 64 elements. A stage has those of the rows, then those of the
// weights.
constexpr int kBox = kStepInputs, kBoxBytes = kBox * kBox * 2, kRowBoxes = kTileRows / kBox;

constexpr int kTileAlignment = 1024;  // of the swizzle

// The tile of a block, and how many tiles of rows a cluster has.
template <int kOutputs_, int kRowTiles_>
struct Tile {
  static constexpr int kOutputs = kOutputs_, kRowTiles = kRowTiles_;
  static constexpr int kSums = kOutputs / 2;  // of a thread
  static constexpr int kWeightBoxes = kOutputs / kBox;
  static constexpr int kStageBytes = (kRowBoxes + kWeightBoxes) * kBoxBytes;
  static constexpr int kStages = kOutputs == 128 ? 6 : 4;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 2 * 8) + kTileAlignment;
  // Those of a thread when the block starts, and when it multiplies. A narrow tile leaves registers to the
  // blocks of the kernels before and after this one.
  static constexpr int kRegisters = kOutputs == 128 ? 128 : 168;
  static constexpr int kOfMultiplier = kOutputs == 128 ? 168 : 232, kOfCopier = 40;
  static_assert(kMultipliers * kOfMultiplier + kWarpgroup * kOfCopier <= kThreads * kRegisters);
};

struct TiledProduct {
  CUtensorMap x, matrix;
  MatrixProduct product;
};

struct TiledProducts {
  TiledProduct of[kMaxProducts];
  int count, rows;
  int splits;   // of the inputs; several for one product alone
  float* sums;  // [splits, rows, outputs], if there are several
};

// The clusters' tiles of products.
template <typename Tile>
struct Tiles {
  const TiledProducts& own;

  __host__ __device__ int Rows() const {
    constexpr int kRows = Tile::kRowTiles * static_cast<int>(kTileRows);
    return (own.rows + kRows - 1) / kRows;
  }
  __host__ __device__ int Of(int product) const {
    return (own.of[product].product.outputs + Tile::kOutputs - 1) / Tile::kOutputs * Rows();
  }
  __host__ __device__ int Count() const {
    int count = 0;
    for (int i = 0; i < own.count; ++i) count += Of(i);
    return count;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// What a cluster computes at a time: some steps of one of its tiles.
template <typename Tile>
struct Part {
  int product = 0, split;
  int output, row;  // the first ones of this block
  int begin, steps;

  __device__ Part(const TiledProducts& own, int number, int row_tile) : split(number % own.splits) {
    const Tiles<Tile> tiles{own};
    int tile = number / own.splits;
    for (; tile >= tiles.Of(product); ++product) tile -= tiles.Of(product);
    output = tile / tiles.Rows() * Tile::kOutputs;
    row = (tile % tiles.Rows() * Tile::kRowTiles + row_tile) * kTileRows;
    const int all = own.of[product].product.StepsOfGroup();
    begin = all * split / own.splits, steps = all * (split + 1) / own.splits - begin;
  }
};

template <typename Tile>
struct Stage {
  uint32_t index = 0, parity = 0;

  __device__ void Next() {
    if (++index == Tile::kStages) index = 0, parity ^= 1;
  }
  __device__ uint32_t Before() const { return index == 0 ? Tile::kStages - 1 : index - 1; }
};

// What the thread of a block that copies does for a stage.
template <typename Tile>
struct Copies {
  const TiledProducts& own;
  uint32_t tiles, full, row_tile;

  __device__ uint32_t Ready(uint32_t stage) const { return full + 8 * stage; }

  __device__ void Announce(uint32_t stage) const {
    hopper::ExpectBytes(Ready(stage), Tile::kStageBytes);
  }

  __device__ void CopyRows(const Part<Tile>& part, int step, uint32_t stage) const {
#pragma unroll
    for (int box = 0; box < kRowBoxes; ++box)
      hopper::CopyBox(tiles + stage * Tile::kStageBytes + box * kBoxBytes, &own.of[part.product].x,
                      Ready(stage), (part.begin + step) * kBox, part.row + box * kBox);
  }

  __device__ void CopyWeights(const Part<Tile>& part, int step, uint32_t stage) const {
    constexpr uint32_t kEveryRow = (1 << Tile::kRowTiles) - 1;
    const TiledProduct& from = own.of[part.product];
    const int input = (part.begin + step) * kBox;
#pragma unroll
    for (int i = 0; i < Tile::kWeightBoxes; i += Tile::kRowTiles) {
      const int box = i + row_tile, output = part.output + box * kBox;
      hopper::CopyBoxTo(kEveryRow,
                        tiles + stage * Tile::kStageBytes + (kRowBoxes + box) * kBoxBytes,
                        &from.matrix, Ready(stage), from.product.by_input ? output : input,
                        from.product.by_input ? input : output);
    }
  }
};

// What writes registers of products stays before this, and what reads them after it.
template <int kSums>
__device__ void Pin(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Multiplies the steps of a part. `ready` waits for a stage, `release` gives one back.
template <typename Tile, bool kByInput, typename Ready, typename Release>
__device__ void MultiplySteps(int steps, uint64_t rows, uint64_t weights, Stage<Tile>& stage,
                              const Ready& ready, const Release& release,
                              float (&sums)[Tile::kSums]) {
  constexpr int kNext = (kByInput ? 16 * 128 : 32) >> 4;  // 16 inputs on
#pragma unroll
  for (int i = 0; i < Tile::kSums; ++i) sums[i] = 0.0f;
  Pin(sums);
  for (int step = 0; step < steps; ++step) {
    ready(stage);
    const uint64_t a = rows + stage.index * (Tile::kStageBytes >> 4);
    const uint64_t b = weights + stage.index * (Tile::kStageBytes >> 4);
    hopper::FenceProducts();
    hopper::Multiply<Tile::kOutputs, kByInput>(sums, a, b, true);
    hopper::Multiply<Tile::kOutputs, kByInput>(sums, a + 2, b + kNext, true);
    hopper::Multiply<Tile::kOutputs, kByInput>(sums, a + 4, b + 2 * kNext, true);
    hopper::Multiply<Tile::kOutputs, kByInput>(sums, a + 6, b + 3 * kNext, true);
    hopper::CommitProducts();
    hopper::AwaitProducts<1>();
    if (step > 0) release(stage.Before());
    stage.Next();
  }
  hopper::AwaitProducts<0>();
  Pin(sums);
  release(stage.Before());
}

// Four lanes that have a row exchange pairs of neighbouring outputs: word k of lane l becomes word l of
// lane k. Then a lane has eight outputs in a row, or no longer has them.
__device__ void Exchange(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & distance) continue;
      const bool upper = lane & distance;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[k] : words[k + distance], distance);
      (upper ? words[k] : words[k + distance]) = got;
    }
  }
}

// The sums of a thread: 8 i + 2 (lane % 4) and the output after it for each i, in a row and in the one eight
// below.
template <typename Tile>
struct Results {
  static constexpr int kSums = Tile::kSums;
  const MatrixProduct& product;
  int rows, row, output;  // the first ones
  float (&sums)[kSums];

  __device__ void PutFloats(float* y, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      const int own_row = row + i / 2 % 2 * 8, own_output = output + i / 4 * 8 + OwnPair();
      if (own_row < rows && own_output < product.outputs)
        *reinterpret_cast<float2*>(y + own_row * stride + own_output) = {sums[i], sums[i + 1]};
    }
  }

  __device__ void Change(Result result) const {
    // Most tiles have another result: its instructions are not fetched then.
    if (product.result != result) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = ResultOf(result, sums[i], 0.0f);
  }

  __device__ void Put() const {
    if (product.result == Result::kFloat)
      return PutFloats(static_cast<float*>(product.y), product.stride);
    Change(Result::kTanh), Change(Result::kSigmoid), Change(Result::kSquaredRelu);
    if (product.result == Result::kAdded) {
      ForVectors([&](int i, bool present, int64_t at) {
        uint4 x = {};
        if (present)
          x = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(product.residual) +
                                              at);
        uint32_t words[4] = {x.x, x.y, x.z, x.w};
        Exchange(words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sums[i + 4 * k] += __uint_as_float(words[k] << 16);
          sums[i + 4 * k + 1] += __uint_as_float(words[k] & 0xffff0000u);
        }
      });
    }
    ForVectors([&](int i, bool present, int64_t at) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = RoundToBf16(sums[i + 4 * k], sums[i + 4 * k + 1]);
      Exchange(words);
      if (present)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(product.y) + at) = {
            words[0], words[1], words[2], words[3]};
    });
  }

 private:
  __device__ static int OwnPair() { return threadIdx.x % 4 * 2; }

  // Calls fn(the first of the sums of four pairs, whether there is a vector of eight outputs that this lane
  // has of them once they are exchanged, where it is).
  template <typename Fn>
  __device__ void ForVectors(Fn&& fn) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 16) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int own_row = row + below * 8;
        const int own_output = output + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 8;
        fn(i + 2 * below, own_row < rows && own_output < product.outputs,
           int64_t{own_row} * product.stride + own_output);
      }
    }
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Tile>
__global__ void __launch_bounds__(65536 / Tile::kRegisters / 32 * 32, 1)
    TiledProductKernel(const __grid_constant__ TiledProducts own) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  const uint32_t tiles = (SharedAddress(memory) + kTileAlignment - 1) & ~(kTileAlignment - 1);
  const uint32_t full = tiles + Tile::kStages * Tile::kStageBytes, empty = full + 8 * Tile::kStages;
  const int row_tile = hopper::RankInCluster();

  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      hopper::InitBarrier(full + 8 * i, 1);
      // The warps that multiply, of all blocks of the cluster.
      hopper::InitBarrier(empty + 8 * i, kMultipliers / 32 * Tile::kRowTiles);
    }
    hopper::PublishBarriers();
  }
  hopper::SynchronizeCluster();
  LetNextKernelStart();

  const int clusters = gridDim.x / Tile::kRowTiles, cluster = blockIdx.x / Tile::kRowTiles;
  const int count = Tiles<Tile>{own}.Count() * own.splits;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  Stage<Tile> stage;

  if (warpgroup == 2) {
    hopper::GiveRegisters<Tile::kOfCopier>();
    if (threadIdx.x == kMultipliers) {
      const Copies<Tile> copies{own, tiles, full, static_cast<uint32_t>(row_tile)};
      int early = 0;
      for (const Part<Tile> part(own, cluster, row_tile);
           early < part.steps && early < Tile::kStages; ++early)
        copies.Announce(early), copies.CopyWeights(part, early, early);
      WaitForKernelsBefore();
      for (int number = cluster; number < count; number += clusters) {
        const Part<Tile> part(own, number, row_tile);
        for (int step = 0; step < part.steps; ++step, stage.Next()) {
          if (early > 0) {
            --early;
          } else {
            hopper::AwaitPhase(empty + 8 * stage.index, stage.parity ^ 1);
            copies.Announce(stage.index), copies.CopyWeights(part, step, stage.index);
          }
          copies.CopyRows(part, step, stage.index);
        }
      }
    }
  } else {
    hopper::TakeRegisters<Tile::kOfMultiplier>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint64_t rows = hopper::Descriptor(tiles + warpgroup * kBoxBytes);
    const uint32_t weights = tiles + kRowBoxes * kBoxBytes;
    const auto ready = [&](const Stage<Tile>& stage) {
      hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
    };
    const auto release = [&](uint32_t index) {
      if (lane < Tile::kRowTiles) hopper::ArriveAt(empty + 8 * index, lane);
    };
    float sums[Tile::kSums];
    WaitForKernelsBefore();
    for (int number = cluster; number < count; number += clusters) {
      const Part<Tile> part(own, number, row_tile);
      const MatrixProduct& product = own.of[part.product].product;
      if (product.by_input)
        MultiplySteps<Tile, true>(part.steps, rows, hopper::Descriptor(weights, kBoxBytes), stage,
                                  ready, release, sums);
      else
        MultiplySteps<Tile, false>(part.steps, rows, hopper::Descriptor(weights), stage, ready,
                                   release, sums);
      const int row = part.row + warpgroup * kBox + warp * 16 + lane / 4;
      const Results<Tile> results{product, own.rows, row, part.output, sums};
      if (own.splits == 1)
        results.Put();
      else
        results.PutFloats(own.sums + int64_t{part.split} * own.rows * product.outputs,
                          product.outputs);
    }
  }
  hopper::SynchronizeCluster();  // the other block may still arrive at a barrier of this one
#else
  __trap();  // HasTiledProducts says so before
#endif
}

constexpr int kAddThreads = 256, kAddVector = 4;

// Adds up the sums of splits, and makes results of them.
__global__ __launch_bounds__(kAddThreads) void AddUpKernel(const MatrixProduct product,
                                                           const float* sums, int splits,
                                                           int rows) {
  const int64_t count = int64_t{rows} * product.outputs;
  const int64_t i = kAddVector * (int64_t{blockIdx.x} * kAddThreads + threadIdx.x);
  LetNextKernelStart();
  WaitForKernelsBefore();
  if (i >= count) return;
  const int64_t at = i / product.outputs * product.stride + i % product.outputs;
  Packed<__nv_bfloat16, kAddVector> residual = {};
  if (product.result == Result::kAdded)
    residual.Load(static_cast<const __nv_bfloat16*>(product.residual) + at);
  float total[kAddVector] = {};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(sums + split * count + i));
    total[0] += x.x, total[1] += x.y, total[2] += x.z, total[3] += x.w;
  }
  if (product.result == Result::kFloat) {
    *reinterpret_cast<float4*>(static_cast<float*>(product.y) + at) = {total[0], total[1], total[2],
                                                                       total[3]};
    return;
  }
#pragma unroll
  for (int c = 0; c < kAddVector; ++c) total[c] = ResultOf(product.result, total[c], residual[c]);
  StoreRounded<__nv_bfloat16>(product.y, at, total);
}

bool MakeMaps(TiledProduct& own, int rows) {
  const MatrixProduct& product = own.product;
  const auto make = [](CUtensorMap& map, const void* x, cuuint64_t rows, cuuint64_t columns) {
    return MakeMap<2>(map, x, {columns, rows}, {2 * columns}, {kBox, kBox});
  };
  const int outputs = product.outputs, inputs = product.inputs;
  return make(own.x, product.x, rows, inputs) &&
         (product.by_input ? make(own.matrix, product.matrix, inputs, outputs)
                           : make(own.matrix, product.matrix, outputs, inputs));
}

// How many clusters the device runs at once.
template <typename Tile>
cudaError_t ActiveClusters(int& count) {
  const auto kernel = TiledProductKernel<Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Tile::kRowTiles, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = Tile::kRowTiles, config.blockDim = kThreads;
  config.dynamicSmemBytes = Tile::kSharedBytes, config.attrs = &cluster, config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(&count, kernel, &config);
}

// How products are shared out among the clusters of the device, and what it takes: a step of 128 outputs
// takes kNarrow, one of 256 outputs kWide, and to add up splits so much for each, and at all.
struct Choice {
  static constexpr int64_t kNarrow = 9, kWide = 16, kEachSplit = 15, kAddUp = 120;
  int64_t cost = std::numeric_limits<int64_t>::max();
  int splits = 1, clusters = 1;
};

template <typename Tile>
cudaError_t Choose(const TiledProducts& own, Choice& best) {
  int clusters = 0;
  if (const cudaError_t error = ActiveClusters<Tile>(clusters); error != cudaSuccess) return error;
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  const int tiles = Tiles<Tile>{own}.Count();
  int steps = 0;
  for (int i = 0; i < own.count; ++i) steps = std::max(steps, own.of[i].product.StepsOfGroup());
  const int most = own.count > 1 ? 1 : std::max(std::min(clusters / tiles, steps), 1);
  for (int splits = 1; splits <= most; ++splits) {
    const int64_t waves = (int64_t{tiles} * splits + clusters - 1) / clusters;
    const int64_t cost = waves * ((steps + splits - 1) / splits) *
                             (Tile::kOutputs == 128 ? Choice::kNarrow : Choice::kWide) +
                         (splits > 1 ? Choice::kAddUp + splits * Choice::kEachSplit : 0);
    if (cost < best.cost) best = {cost, splits, std::min(clusters, tiles * splits)};
  }
  return cudaSuccess;
}

template <typename Tile>
cudaError_t LaunchTiles(cudaStream_t stream, const Choice& choice, TiledProducts own, int* splits) {
  own.splits = choice.splits;
  const Grid grid(choice.clusters * Tile::kRowTiles, Tile::kRowTiles);
  const cudaError_t error =
      LaunchEarly(TiledProductKernel<Tile>, grid, kThreads, Tile::kSharedBytes, stream, own);
  if (error != cudaSuccess || own.splits == 1) return error;
  if (splits != nullptr) {
    *splits = own.splits;
    return error;
  }
  const MatrixProduct& product = own.of[0].product;
  const int64_t vectors = int64_t{own.rows} * product.outputs / kAddVector;
  return LaunchEarly(AddUpKernel, static_cast<unsigned>((vectors + kAddThreads - 1) / kAddThreads),
                     kAddThreads, 0, stream, product, own.sums, own.splits, own.rows);
}

template <int kRowTiles>
cudaError_t LaunchBest(cudaStream_t stream, const TiledProducts& own, int* splits) {
  using Narrow = Tile<128, kRowTiles>;
  using Wide = Tile<kMaxTileOutputs, kRowTiles>;
  Choice narrow, wide;
  cudaError_t error = Choose<Narrow>(own, narrow);
  if (error == cudaSuccess) error = Choose<Wide>(own, wide);
  if (error != cudaSuccess) return error;
  return narrow.cost <= wide.cost ? LaunchTiles<Narrow>(stream, narrow, own, splits)
                                  : LaunchTiles<Wide>(stream, wide, own, splits);
}

}  // namespace

bool HasTiledProducts() { return IsCompiledForHopper(TiledProductKernel<Tile<128, 1>>); }

cudaError_t LaunchTiledProducts(cudaStream_t stream, const MatrixProducts& products, int* splits) {
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  TiledProducts own = {};
  own.count = products.count, own.rows = products.rows, own.sums = products.sums;
  for (int i = 0; i < own.count; ++i) {
    own.of[i].product = products.of[i];
    if (!MakeMaps(own.of[i], own.rows)) return cudaErrorInvalidValue;
  }
  return own.rows <= kTileRows ? LaunchBest<1>(stream, own, splits)
                               : LaunchBest<2>(stream, own, splits);
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
