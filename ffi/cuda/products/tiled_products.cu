// The products of several rows with matrices of bfloat16, on Hopper.
//
// A block has a tile: up to 64 rows and 128 outputs, or 128 rows and 128 to 256 outputs. One thread copies 64
// inputs of both operands at a time into a ring of stages, the first weights before the kernels before this
// one have ended, unless it is the first of its chain. Two warpgroups multiply. With more than 128 rows, the two blocks of a cluster have the same
// outputs, and each copies one half of the weights for both.
//
// Where a product has few tiles, several blocks share out its inputs. They write their sums to scratch, and
// another kernel adds them up in the order of the inputs. Up to 64 rows, the order of all sums depends on the
// sizes of the matrices and on the device, and not on the number of rows.
#include "products/tiled_products.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

cudaError_t LaunchTiledProducts(LaunchChain&, const Device&, const MatrixProducts&, int*) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include <algorithm>
#include <cstdint>
#include <limits>

#include "products/tile.cuh"
#include "products/tile_results.cuh"
#include "hopper.cuh"
#include "asked_once.h"
#include "launch_chain.cuh"
#include "ptx.cuh"
#include "tensor_map.h"

namespace rwkv_jax::cuda {
namespace {

template <typename Tile>
__global__ void __launch_bounds__(65536 / Tile::kRegisters / 32 * 32, 1)
    TiledProductKernel(ChainPlace place, const __grid_constant__ TiledProducts own) {
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
  SynchronizeTiles<Tile>();
  const EarlierKernels kernels(place);
  kernels.LetNextStart();

  const int clusters = gridDim.x / Tile::kRowTiles, cluster = blockIdx.x / Tile::kRowTiles;
  const int count = Tiles<Tile>{own}.Count() * own.splits;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  Stage<Tile> stage;

  if (warpgroup == 2) {
    if constexpr (!Tile::kFew) hopper::GiveRegisters<Tile::kOfCopier>();
    if (threadIdx.x == kMultipliers) {
      const Copies<Tile> copies{own, tiles, full, static_cast<uint32_t>(row_tile)};
      int early = 0;
      for (const Part<Tile> part(own, cluster, row_tile);
           early < part.steps && early < Tile::kStages; ++early)
        copies.Announce(early), copies.CopyWeights(part, early, early);
      kernels.Await();
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
    if constexpr (!Tile::kFew) hopper::TakeRegisters<Tile::kOfMultiplier>();
    const int lane = threadIdx.x % 32;
    const uint32_t left = warpgroup * kBoxBytes;
    const uint64_t rows = hopper::Descriptor(tiles + (Tile::kFew ? 0 : left));
    const uint32_t weights = tiles + Tile::kRowsBytes + (Tile::kFew ? left : 0);
    const auto ready = [&](const Stage<Tile>& stage) {
      hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
    };
    const auto release = [&](uint32_t index) {
      if (lane < Tile::kRowTiles) hopper::ArriveAt(empty + 8 * index, lane);
    };
    float sums[Tile::kSums];
    kernels.Await();
    for (int number = cluster; number < count; number += clusters) {
      const Part<Tile> part(own, number, row_tile);
      const MatrixProduct& product = own.of[part.product].product;
      if (product.by_input)
        MultiplySteps<Tile, true>(part.steps, rows, hopper::Descriptor(weights, kBoxBytes), stage,
                                  ready, release, sums);
      else
        MultiplySteps<Tile, false>(part.steps, rows, hopper::Descriptor(weights), stage, ready,
                                   release, sums);
      const auto results = ResultsOf<Tile>(product, own.rows, part, sums);
      if (own.splits == 1)
        results.Put();
      else
        results.PutFloats(own.sums + int64_t{part.split} * own.rows * product.outputs,
                          product.outputs);
    }
  }
  SynchronizeTiles<Tile>();  // the other block may still arrive at a barrier of this one
#else
  __trap();  // HasHopperCode says so before
#endif
}

constexpr int kAddThreads = 256, kAddVector = 4;

// Adds up the sums of splits, and makes results of them.
__global__ __launch_bounds__(kAddThreads) void AddUpKernel(ChainPlace place,
                                                           const MatrixProduct product,
                                                           const float* sums, int splits,
                                                           int rows) {
  const int64_t count = int64_t{rows} * product.outputs;
  const int64_t i = kAddVector * (int64_t{blockIdx.x} * kAddThreads + threadIdx.x);
  const EarlierKernels kernels(place);
  kernels.LetNextStart();
  kernels.Await();
  if (i >= count) return;
  const int row = static_cast<int>(i / product.outputs),
            output = static_cast<int>(i % product.outputs);
  const int64_t at = product.Place(row, output);
  Packed<__nv_bfloat16, kAddVector> residual = {};
  if (product.result == Result::kAdded)
    residual.Load(static_cast<const __nv_bfloat16*>(product.residual) +
                  product.PlaceOfResidual(row, output));
  float total[kAddVector] = {};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(sums + split * count + i));
    total[0] += x.x, total[1] += x.y, total[2] += x.z, total[3] += x.w;
  }
#pragma unroll
  for (int c = 0; c < kAddVector; ++c) total[c] = ResultOf(product.result, total[c], residual[c]);
  StoreRounded<__nv_bfloat16>(product.y, at, total);
}

// A box of the rows has `box_rows` of them.
bool MakeMaps(TiledProduct& own, int rows, unsigned box_rows) {
  const MatrixProduct& product = own.product;
  const auto make = [](CUtensorMap& map, const void* x, cuuint64_t rows, cuuint64_t columns,
                       unsigned box_rows) {
    return MakeMap<2>(map, x, {columns, rows}, {2 * columns}, {kBox, box_rows});
  };
  const int outputs = product.outputs, inputs = product.inputs;
  return make(own.x, product.x, rows, inputs, box_rows) &&
         (product.by_input ? make(own.matrix, product.matrix, inputs, outputs, kBox)
                           : make(own.matrix, product.matrix, outputs, inputs, kBox));
}

// How many clusters the device runs at once.
template <typename Tile>
cudaError_t ActiveClusters(int& count) {
  static auto& known = *new AskedOnce<const void*, int>;
  const auto kernel = TiledProductKernel<Tile>;
  return known.Get(reinterpret_cast<const void*>(kernel), count, [kernel](int& answer, int) {
    KernelOnDevice prepared;
    const cudaError_t error = Prepare(reinterpret_cast<const void*>(kernel), prepared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {Tile::kRowTiles, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = Tile::kRowTiles, config.blockDim = Tile::kThreads;
    config.dynamicSmemBytes = Tile::kSharedBytes, config.attrs = &cluster, config.numAttrs = 1;
    return cudaOccupancyMaxActiveClusters(&answer, kernel, &config);
  });
}

// How products are shared out among the clusters of the device, and what it takes: a step of a tile takes
// kEachStep, and kEachOutputs for every 32 of its outputs. To add up splits takes kAddUp, and kEachSplit for
// each of them, or, if that is more, 1 for every kSumsAtOnce numbers that are written and read.
struct Choice {
  static constexpr int64_t kEachStep = 8, kEachOutputs = 7;
  static constexpr int64_t kEachSplit = 60, kAddUp = 480, kSumsAtOnce = 3500;
  int64_t cost = std::numeric_limits<int64_t>::max();
  int splits = 1, clusters = 1;
  // LaunchTiles of the tile that takes so little.
  cudaError_t (*launch)(LaunchChain&, const Choice&, TiledProducts, int* splits) = nullptr;
};

template <typename Tile>
cudaError_t LaunchTiles(LaunchChain& chain, const Choice& choice, TiledProducts own, int* splits);

// Makes `best` the choice with this tile, if that takes less.
template <typename Tile>
cudaError_t Choose(const Device& device, const TiledProducts& own, Choice& best) {
  int clusters = 0;
  if (const cudaError_t error = ActiveClusters<Tile>(clusters); error != cudaSuccess) return error;
  const int64_t blocks = std::min(device.multiprocessors, kMaxTileBlocks);
  clusters = std::min(clusters, static_cast<int>(blocks) / Tile::kRowTiles);
  if (clusters == 0) return cudaErrorInvalidConfiguration;
  const int tiles = Tiles<Tile>{own}.Count();
  int steps = 0;
  for (int i = 0; i < own.count; ++i) steps = std::max(steps, own.of[i].product.StepsOfGroup());
  const bool may_split = own.count == 1 && own.sums != nullptr;
  const int most = may_split ? std::max(std::min(clusters / tiles, steps), 1) : 1;
  // Up to kBox rows, the number of splits must not depend on the number of rows.
  const int64_t results = int64_t{std::max(own.rows, kBox)} * own.of[0].product.outputs;
  for (int splits = 1; splits <= most; ++splits) {
    const int64_t waves = (int64_t{tiles} * splits + clusters - 1) / clusters;
    int64_t cost = waves * ((steps + splits - 1) / splits) *
                   (Choice::kEachStep + Tile::kOutputs / 32 * Choice::kEachOutputs);
    if (splits > 1)
      cost += std::max(Choice::kAddUp + splits * Choice::kEachSplit,
                       splits * results / Choice::kSumsAtOnce);
    if (cost < best.cost)
      best = {cost, splits, std::min(clusters, tiles * splits), LaunchTiles<Tile>};
  }
  return cudaSuccess;
}

template <typename Tile>
cudaError_t LaunchTiles(LaunchChain& chain, const Choice& choice, TiledProducts own, int* splits) {
  own.splits = choice.splits;
  if (own.splits > 1 && own.sum_floats < int64_t{own.splits} * own.rows * own.of[0].product.outputs)
    return cudaErrorInvalidValue;
  const Grid grid = Grid(choice.clusters * Tile::kRowTiles).InClustersOf(Tile::kRowTiles);
  const cudaError_t error =
      chain.Launch(TiledProductKernel<Tile>, grid, Tile::kThreads, Tile::kSharedBytes, own);
  if (error != cudaSuccess || own.splits == 1) return error;
  if (splits != nullptr) {
    *splits = own.splits;
    return error;
  }
  const MatrixProduct& product = own.of[0].product;
  const int64_t vectors = int64_t{own.rows} * product.outputs / kAddVector;
  return chain.Launch(AddUpKernel, (vectors + kAddThreads - 1) / kAddThreads, kAddThreads, 0,
                      product, own.sums, own.splits, own.rows);
}

// Of these tiles the one that takes least.
template <typename... Candidates>
cudaError_t LaunchBest(LaunchChain& chain, const Device& device, const TiledProducts& own,
                       int* splits) {
  Choice best;
  cudaError_t error = cudaSuccess;
  ((error = error == cudaSuccess ? Choose<Candidates>(device, own, best) : error), ...);
  return error == cudaSuccess ? best.launch(chain, best, own, splits) : error;
}

// The same for more rows than a box has.
template <int kRowTiles>
cudaError_t LaunchManyRows(LaunchChain& chain, const Device& device, const TiledProducts& own,
                           int* splits) {
  return LaunchBest<Tile<kTileRows, 128, kRowTiles>, Tile<kTileRows, 224, kRowTiles>,
                    Tile<kTileRows, kMaxTileOutputs, kRowTiles>>(chain, device, own, splits);
}

}  // namespace

cudaError_t LaunchTiledProducts(LaunchChain& chain, const Device& device,
                                const MatrixProducts& products, int* splits) {
  TiledProducts own = {};
  own.count = products.count, own.rows = products.rows;
  own.sums = products.sums, own.sum_floats = products.sum_floats;
  // The rows of a tile, and those of a box.
  int rows = kTileRows;
  if (own.rows <= kBox)
    for (rows = 8; rows < own.rows;) rows *= 2;
  for (int i = 0; i < own.count; ++i) {
    own.of[i].product = products.of[i];
    if (!MakeMaps(own.of[i], own.rows, std::min(rows, kBox))) return cudaErrorNotSupported;
  }
  switch (rows) {
    case 8: return LaunchBest<Tile<8, 128>>(chain, device, own, splits);
    case 16: return LaunchBest<Tile<16, 128>>(chain, device, own, splits);
    case 32: return LaunchBest<Tile<32, 128>>(chain, device, own, splits);
    case 64: return LaunchBest<Tile<64, 128>>(chain, device, own, splits);
  }
  return own.rows <= kTileRows ? LaunchManyRows<1>(chain, device, own, splits)
                               : LaunchManyRows<2>(chain, device, own, splits);
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
