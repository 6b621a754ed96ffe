// result[M, N] = epilogue(rows[M, K] weight[N, K]^T) on Hopper: operands of bfloat16, sums in float.
//
// Two blocks of a cluster have 128 rows each of the same 256 columns. One thread of a block copies 64
// columns of both operands at a time into a ring of stages; of the weight's tile, which both blocks need,
// each block copies one half for both. Two warpgroups multiply 64 rows each. They never wait for each
// other, and the copies of the next tile go on during the epilogue.
//
// The rows of the weight lie in shared memory in such an order that the sums of a lane are eight
// neighbouring columns of the result, so that the epilogue reads and writes 16 bytes of a lane without an
// exchange between lanes.
//
// An epilogue has a type of its own:
//
//   struct Epilogue {
//     struct Arguments;                                                  // of the kernel
//     static bool Skips(const Arguments&, int rows);                     // the rows of a cluster's tile
//     Epilogue(const Arguments&, const Place&);                          // of a tile, before its products
//     template <typename Fn> void Multiply(int steps, const Fn& multiply);  // each of the stages in turn
//     void Finish(float (&sums)[kSums]);
//   };
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "hopper.cuh"
#include "launch.cuh"
#include "plan.h"
#include "ptx.cuh"
#include "rwkv_jax/products.h"
#include "tensor_map.h"

namespace rwkv_jax::cuda {

namespace wide_product {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a block's tile, and of a stage
constexpr int kCluster = 2, kStages = 4, kWarpgroup = 128;
constexpr int kClusterRows = kCluster * kRows;
constexpr int kThreads = 3 * kWarpgroup;  // warpgroups 0 and 1 multiply, 2 copies
constexpr int kRowBytes = kRows * kDepth * 2, kWeightBytes = kColumns * kDepth * 2;
constexpr int kTileAlignment = 1024;  // of the swizzle
constexpr int kSharedBytes =
    kStages * (kRowBytes + kWeightBytes) + 2 * 8 * kStages + kTileAlignment;
constexpr int kSums = 128;    // of a lane
constexpr int kVectors = 16;  // of eight columns: the sums of a lane

static_assert(kProductWidthMultiple == kDepth && kProductColumnsMultiple == kColumns);

struct Sizes {
  int m, n, k;
};

struct Tiles {
  int rows, columns;

  __host__ __device__ explicit Tiles(const Sizes& sizes)
      : rows((sizes.m + kClusterRows - 1) / kClusterRows), columns(sizes.n / kColumns) {}
  __host__ __device__ int Count() const { return rows * columns; }
};

// Where the sums of a lane lie. Vector i is in row `row` or, if i is odd, eight below, and begins
// i / 2 * 32 columns after `column`.
struct Place {
  int row, column;
  Sizes sizes;

  __device__ bool Has(int i) const { return row + i % 2 * 8 < sizes.m; }
  __device__ int64_t Offset(int i) const {
    return static_cast<int64_t>(row + i % 2 * 8) * sizes.n + column + i / 2 * 32;
  }
};

// Element j of vector i among the sums.
__host__ __device__ constexpr int SumOf(int i, int j) {
  return i / 2 * 16 + j / 2 * 4 + i % 2 * 2 + j % 2;
}

// What an epilogue does that leaves no tile as it is, and has no work beside the products.
struct PlainEpilogue {
  template <typename Arguments>
  static __device__ bool Skips(const Arguments&, int) {
    return false;
  }
  template <typename Fn>
  __device__ void Multiply(int steps, const Fn& multiply) {
    for (int step = 0; step < steps; ++step) multiply(step, [] {});
  }
};

__device__ inline void StoreOnce(__nv_bfloat16* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kGroup = 8;  // row tiles of a cluster that are walked for each column tile

struct Tile {
  int row, column;  // in units of a cluster's tiles
};

// Groups of row tiles, column by column, so that the operands stay in L2.
__device__ inline Tile TileOf(int number, const Tiles& tiles) {
  const int first = number / (kGroup * tiles.columns) * kGroup;
  const int size = min(kGroup, tiles.rows - first);
  const int within = number - first * tiles.columns, column = within / size;
  return {first + within - column * size, column};
}

// The stages of the ring in turn.
struct Stage {
  uint32_t index = 0, parity = 0;

  __device__ void Next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
  __device__ uint32_t Before() const { return index == 0 ? kStages - 1 : index - 1; }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap rows_map,
                  const __grid_constant__ CUtensorMap weight_map,
                  const typename Epilogue::Arguments arguments, const Sizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  const uint32_t row_tiles = (SharedAddress(memory) + kTileAlignment - 1) & ~(kTileAlignment - 1);
  const uint32_t weight_tiles = row_tiles + kStages * kRowBytes;
  const uint32_t full = weight_tiles + kStages * kWeightBytes, empty = full + 8 * kStages;
  const uint32_t rank = hopper::RankInCluster();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::InitBarrier(full + 8 * i, 1);
      hopper::InitBarrier(empty + 8 * i, 8 * kCluster);  // the warps that multiply
    }
    hopper::PublishBarriers();
  }
  hopper::SynchronizeCluster();

  const Tiles tiles(sizes);
  const int count = tiles.Count(), steps = sizes.k / kDepth;
  const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  Stage stage;

  if (warpgroup == 2) {
    hopper::GiveRegisters<24>();
    if (threadIdx.x == 2 * kWarpgroup) {
      hopper::PrefetchMap(&rows_map), hopper::PrefetchMap(&weight_map);
      for (int number = cluster; number < count; number += clusters) {
        const Tile tile = TileOf(number, tiles);
        if (Epilogue::Skips(arguments, tile.row)) continue;
        const int row = (tile.row * kCluster + rank) * kRows;
        const int weight_row = tile.column * kColumns + rank * (kColumns / kCluster);
        const uint32_t half = weight_tiles + rank * (kWeightBytes / kCluster);
        for (int step = 0; step < steps; ++step) {
          const uint32_t ready = full + 8 * stage.index;
          hopper::AwaitPhase(empty + 8 * stage.index, stage.parity ^ 1);
          hopper::ExpectBytes(ready, kRowBytes + kWeightBytes);
          hopper::CopyBox(row_tiles + stage.index * kRowBytes, &rows_map, ready, step * kDepth,
                          row);
          hopper::CopyGroupsToBoth(half + stage.index * kWeightBytes, &weight_map, ready,
                                   step * kDepth, weight_row / 32);
          stage.Next();
        }
      }
    }
  } else {
    hopper::TakeRegisters<240>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint64_t first_rows = hopper::Descriptor(row_tiles + warpgroup * (kRowBytes / 2));
    const uint64_t first_weight = hopper::Descriptor(weight_tiles);
    float sums[kSums];
    const auto release = [&](uint32_t index) {
      if (lane < kCluster) hopper::ArriveAt(empty + 8 * index, lane);
    };

    for (int number = cluster; number < count; number += clusters) {
      const Tile tile = TileOf(number, tiles);
      if (Epilogue::Skips(arguments, tile.row)) continue;
      const int row = (tile.row * kCluster + rank) * kRows + warpgroup * 64 + warp * 16 + lane / 4;
      Epilogue epilogue(arguments, Place{row, tile.column * kColumns + lane % 4 * 8, sizes});

      // Multiplies a stage. `meanwhile` runs at the same time.
      const auto multiply = [&](int step, auto meanwhile) {
        hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
        const uint64_t a = first_rows + stage.index * (kRowBytes >> 4);
        const uint64_t b = first_weight + stage.index * (kWeightBytes >> 4);
        hopper::FenceProducts();
        hopper::Multiply<256>(sums, a, b, step > 0);
        hopper::Multiply<256>(sums, a + 2, b + 2, true);
        hopper::Multiply<256>(sums, a + 4, b + 4, true);
        hopper::Multiply<256>(sums, a + 6, b + 6, true);
        hopper::CommitProducts();
        meanwhile();
        hopper::AwaitProducts<1>();
        if (step > 0) release(stage.Before());
        stage.Next();
      };
      epilogue.Multiply(steps, multiply);
      hopper::AwaitProducts<0>();
#pragma unroll
      for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
      release(stage.Before());

      epilogue.Finish(sums);
    }
  }
  hopper::SynchronizeCluster();  // the other block may still arrive at a barrier of this one
#else
  __trap();  // HasHopperCode says so before
#endif
}

template <typename Epilogue>
cudaError_t Run(cudaStream_t stream, const Product& product, const Device& device,
                const typename Epilogue::Arguments& arguments) {
  const cuuint64_t k = product.width, row = 2 * k;
  CUtensorMap rows_map, weight_map;
  const bool made =
      MakeMap<2>(rows_map, product.rows, {k, cuuint64_t(product.tokens)}, {row}, {kDepth, kRows}) &&
      // Row 32 g + 8 c + 2 j + e of the weight becomes row 32 g + 8 j + 2 c + e.
      MakeMap<5>(weight_map, product.weight, {k, 2, 4, 4, cuuint64_t(product.columns / 32)},
                 {row, 8 * row, 2 * row, 32 * row}, {kDepth, 2, 4, 4, kColumns / kCluster / 32});
  if (!made) return cudaErrorNotSupported;

  const Sizes sizes = {static_cast<int>(product.tokens), static_cast<int>(product.columns),
                       static_cast<int>(product.width)};
  const int clusters =
      std::min(static_cast<int>(device.multiprocessors) / kCluster, Tiles(sizes).Count());
  return Launch(ProductKernel<Epilogue>, Grid(clusters * kCluster).InClustersOf(kCluster), kThreads,
                kSharedBytes, stream, rows_map, weight_map, arguments, sizes);
}

}  // namespace wide_product
}  // namespace rwkv_jax::cuda
