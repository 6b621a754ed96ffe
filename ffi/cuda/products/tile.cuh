// A block's tile of a product on Hopper: its copies to shared memory, and its steps on the tensor cores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "hopper.cuh"
#include "products/matrix_products.cuh"

namespace rwkv_jax::cuda {

constexpr int kWarpgroup = 128, kMultipliers = 2 * kWarpgroup;

// A stage has the box of the rows, or two of them, then those of the weights. A box of weights has 64 x 64
// elements.
constexpr int kBox = kStepInputs, kBoxBytes = kBox * kBox * 2;

constexpr int kTileAlignment = 1024;  // of the swizzle

// The tile of a block, and how many tiles of rows a cluster has. With few rows, the weights are the left
// operand of the product. Each of two warpgroups has one half of the left operand.
template <int kRows_, int kOutputs_, int kRowTiles_ = 1>
struct Tile {
  static constexpr int kRows = kRows_, kOutputs = kOutputs_, kRowTiles = kRowTiles_;
  static constexpr bool kFew = kRows <= kBox;
  static constexpr int kSums = kRows * kOutputs / kMultipliers;  // of a thread
  static constexpr int kBoxRows = kFew ? kRows : kBox;
  static constexpr int kRowBoxes = kRows / kBoxRows, kWeightBoxes = (kOutputs + kBox - 1) / kBox;
  static_assert(kWeightBoxes % kRowTiles == 0);  // each block of a cluster copies as many
  static constexpr int kRowBoxBytes = kBoxRows * kBox * 2;
  static constexpr int kRowsBytes = kRowBoxes * kRowBoxBytes;
  static constexpr int kStageBytes = kRowsBytes + kWeightBoxes * kBoxBytes;
  static constexpr int kStages = 192 * 1024 / kStageBytes;
  static constexpr int kSharedBytes = kStages * (kStageBytes + 2 * 8) + kTileAlignment;

  // Behind the threads that multiply is a warp that copies; in a warpgroup of its own it gives registers to
  // them.
  static constexpr int kThreads = kMultipliers + (kFew ? 32 : kWarpgroup);
  // The registers of a thread when the block starts, and when it multiplies or copies. A narrow tile leaves
  // registers to the blocks of the kernels before and after this one.
  static constexpr int kRegisters = kOutputs == 128 ? 128 : 168;
  static constexpr int kOfMultiplier = kOutputs == 128 ? 168 : 232, kOfCopier = 40;
  static_assert(kMultipliers * kOfMultiplier + kWarpgroup * kOfCopier <=
                (kMultipliers + kWarpgroup) * kRegisters);
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
  int64_t sum_floats;
};

// The clusters' tiles of products.
template <typename Tile>
struct Tiles {
  const TiledProducts& own;

  __host__ __device__ int Rows() const {
    constexpr int kRows = Tile::kRowTiles * Tile::kRows;
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
    row = (tile % tiles.Rows() * Tile::kRowTiles + row_tile) * Tile::kRows;
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
    for (int box = 0; box < Tile::kRowBoxes; ++box)
      hopper::CopyBox(tiles + stage * Tile::kStageBytes + box * Tile::kRowBoxBytes,
                      &own.of[part.product].x, Ready(stage), (part.begin + step) * kBox,
                      part.row + box * kBox);
  }

  __device__ void CopyWeights(const Part<Tile>& part, int step, uint32_t stage) const {
    constexpr uint32_t kEveryRow = (1 << Tile::kRowTiles) - 1;
    const TiledProduct& from = own.of[part.product];
    const int input = (part.begin + step) * kBox;
#pragma unroll
    for (int i = 0; i < Tile::kWeightBoxes; i += Tile::kRowTiles) {
      const int box = i + row_tile, output = part.output + box * kBox;
      hopper::CopyBoxTo(kEveryRow,
                        tiles + stage * Tile::kStageBytes + Tile::kRowsBytes + box * kBoxBytes,
                        &from.matrix, Ready(stage), from.product.by_input ? output : input,
                        from.product.by_input ? input : output);
    }
  }
};

// Waits for the blocks of the cluster.
template <typename Tile>
__device__ void SynchronizeTiles() {
  if constexpr (Tile::kRowTiles > 1)
    hopper::SynchronizeCluster();
  else
    __syncthreads();
}

// What writes registers of products stays before this, and what reads them after it.
template <int kSums>
__device__ void Pin(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Adds the products of 16 inputs. The descriptors are those of the rows and of the weights.
template <typename Tile, bool kByInput>
__device__ void MultiplyInputs(float (&sums)[Tile::kSums], uint64_t rows, uint64_t weights) {
  if constexpr (Tile::kFew)
    hopper::Multiply<Tile::kRows, false, kByInput>(sums, weights, rows, true);
  else
    hopper::Multiply<Tile::kOutputs, kByInput>(sums, rows, weights, true);
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
    const uint64_t at = stage.index * (Tile::kStageBytes >> 4);
    hopper::FenceProducts();
#pragma unroll
    for (int i = 0; i < kBox / 16; ++i)
      MultiplyInputs<Tile, kByInput>(sums, rows + at + 2 * i, weights + at + kNext * i);
    hopper::CommitProducts();
    hopper::AwaitProducts<1>();
    if (step > 0) release(stage.Before());
    stage.Next();
  }
  hopper::AwaitProducts<0>();
  Pin(sums);
  release(stage.Before());
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace rwkv_jax::cuda
