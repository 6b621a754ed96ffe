// The products of up to 32 rows with matrices of 16-bit elements, on the matrix units. Those of bfloat16 on
// Hopper are in tiled_products.cu.
//
// A step is 64 inputs of a group of 128 outputs. The steps of all products of a launch, those of a group
// one after another, are shared out evenly: each of the blocks that the device runs at once has as many
// consecutive ones. It copies the weights and the inputs of a step into a stage of shared memory,
// kStages - 1 steps ahead, and the first weights before the kernels before it have ended. A warp
// multiplies 16 outputs with all rows.
//
// Where the steps of a group are shared by several blocks, each writes its sums to scratch. The last one of
// them to arrive adds up all of them, in the order of their steps. So the order of all sums depends on the
// sizes of the matrices and on the device, and not on the number of rows.
#pragma once

#include "decoding/last_block.cuh"
#include "fragment.cuh"
#include "kernel_choice.cuh"
#include "launch_chain.cuh"
#include "matrix.cuh"
#include "plan.h"
#include "products/matrix_products.cuh"
#include "rwkv_jax/decoding.h"

namespace rwkv_jax::cuda {

constexpr int kGroupWarps = kGroupOutputs / 16, kGroupThreads = 32 * kGroupWarps;

static_assert(kStepInputs == kPanelCols);

// The weights of a step are 128 rows of a panel: of as many outputs, or, of a matrix by input, of 64 inputs
// for the first and then for the second 64 outputs.
constexpr int kWeightBytes = kGroupOutputs * kRowBytes;

template <int kFragments>
constexpr int kStageBytes = kWeightBytes + kFragments * kFragmentRows * kRowBytes;

// The blocks that share a multiprocessor: one of them multiplies while another waits at a barrier. Each has
// kManyStages stages where all have room for them, and kFewStages otherwise.
constexpr int64_t kMatrixBlocks = 2;
constexpr int kManyStages = 5, kFewStages = 4;
static_assert(kMaxSumBlocks == kMatrixBlocks * kMaxMultiprocessors);

// The shared memory that blocks with so many stages and any number of rows need together. The device keeps
// kReservedBytes for each of them, and a multiprocessor has kReservedBytes more than one block may have.
constexpr int64_t kReservedBytes = 1024;
constexpr int64_t SharedMemoryOf(int64_t blocks, int stages) {
  constexpr int kMaxFragments = kMaxBlockRows / kFragmentRows;
  return blocks * (stages * kStageBytes<kMaxFragments> + kReservedBytes) - kReservedBytes;
}
static_assert(SharedMemoryOf(1, kFewStages) <= kLeastSharedMemory);

struct SharedProducts : MatrixProducts {
  int steps, steps_of_block;  // `sums` are two of each block, [kFragments, threads, 4]
};

// The place of a step.
struct Step {
  int product = 0, group = 0, at = 0;  // the step `at` of a group of a product
  int ticket = 0;                      // the groups before it, those of other products included

  __device__ Step(const MatrixProducts& products, int number) {
    for (;; ++product) {
      const MatrixProduct& here = products.of[product];
      const int steps = here.StepsOfGroup();
      if (number < here.Groups() * steps) {
        group = number / steps, at = number % steps;
        ticket += group;
        return;
      }
      number -= here.Groups() * steps;
      ticket += here.Groups();
    }
  }

  __device__ void Advance(const MatrixProducts& products) {
    if (++at < products.of[product].StepsOfGroup()) return;
    at = 0, ++ticket;
    if (++group < products.of[product].Groups()) return;
    group = 0, ++product;
  }
};

// Starts to copy kCount rows of a panel, from a row and a column of x [rows, cols] on. What x does not have
// is cleared.
template <int kCount, typename T>
__device__ void CopyPanel(uint32_t panel, const T* x, int rows, int cols, int first_row,
                          int first_col) {
  constexpr int kPiece = 16 / sizeof(T), kPieces = kPanelCols / kPiece;
  const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const int col = first_col + piece * kPiece;
#pragma unroll
  for (int i = 0; i < kCount; i += kGroupThreads / kPieces) {
    if (kCount < kGroupThreads / kPieces && row >= kCount) break;
    const bool present = first_row + row + i < rows && col < cols;
    const T* const from = present ? x + int64_t{first_row + row + i} * cols + col : x;
    CopyAsync(PieceAddress(panel, row + i, piece), from, present);
  }
}

template <typename T>
__device__ void CopyWeights(uint32_t stage, const MatrixProduct& product, const Step& step) {
  const T* const matrix = static_cast<const T*>(product.matrix);
  const int output = step.group * kGroupOutputs, input = step.at * kStepInputs;
  if (!product.by_input)
    return CopyPanel<kGroupOutputs>(stage, matrix, product.outputs, product.inputs, output, input);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    CopyPanel<kStepInputs>(stage + half * kWeightBytes / 2, matrix, product.inputs, product.outputs,
                           input, output + half * kPanelCols);
}

template <int kFragments, typename T>
__device__ void CopyInputs(uint32_t stage, const MatrixProduct& product, const Step& step,
                           int rows) {
  CopyPanel<kFragments * kFragmentRows>(stage + kWeightBytes, static_cast<const T*>(product.x),
                                        rows, product.inputs, 0, step.at * kStepInputs);
}

// Adds the products of a step to the sums of this warp.
template <typename T, int kFragments>
__device__ void AddStep(uint32_t stage, bool by_input, Accumulator<kFragments>& sums) {
  const int warp = Warp(), lane = Lane();
  const uint32_t inputs = stage + kWeightBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t x[kFragments][4];  // two tiles
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      LoadMatrices(PieceAddress(inputs, i * kFragmentRows + lane % 8, 4 * half + lane / 8), x[i]);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Left weights;
      if (by_input)
        LoadLeftTransposed(stage + warp / 4 * (kWeightBytes / 2), 16 * (2 * half + tile), warp % 4,
                           weights);
      else
        LoadLeft(stage, 16 * warp, 2 * half + tile, weights);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        if constexpr (std::is_same_v<T, __nv_bfloat16>)
          WarpMultiply(sums[i], weights, x[i][2 * tile], x[i][2 * tile + 1]);
        else
          WarpMultiplyHalf(sums[i], weights, x[i][2 * tile], x[i][2 * tile + 1]);
      }
    }
  }
}

// Adds up the sums of the blocks that share the group of a step, whose number is given. Returns whether
// this is the block that has them all.
template <int kFragments>
__device__ bool AddUpBlocks(const SharedProducts& own, const Step& step, int number,
                            Accumulator<kFragments>& sums) {
  const int begin = number - step.at, end = begin + own.of[step.product].StepsOfGroup();
  const int first = begin / own.steps_of_block, last = (end - 1) / own.steps_of_block;
  if (first == last) return true;
  // Of the two groups that a block shares, the second one begins behind its first step.
  const auto sums_of = [&](int block) {
    const int which = 2 * block + (block * own.steps_of_block < begin);
    return reinterpret_cast<float4*>(own.sums) + which * kFragments * kGroupThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < kFragments; ++i) sums_of(blockIdx.x)[i * kGroupThreads] = Pack(sums[i]);
  if (!ArrivesLast(own.tickets + step.ticket, last - first + 1)) return false;
  ForEachElement<kFragments>([&](int fragment, int e) { sums[fragment][e] = 0.0f; });
  // What several blocks have is loaded at once, since the kernel ends only behind these loads.
  constexpr int kBlocksAtOnce = 4;
#pragma unroll 1
  for (int block = first; block <= last; block += kBlocksAtOnce) {
    float4 more[kBlocksAtOnce][kFragments];
#pragma unroll
    for (int j = 0; j < kBlocksAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < kFragments; ++i)
        more[j][i] = block + j <= last ? __ldcg(sums_of(block + j) + i * kGroupThreads) : float4{};
#pragma unroll
    for (int j = 0; j < kBlocksAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        sums[i][0] += more[j][i].x, sums[i][1] += more[j][i].y;
        sums[i][2] += more[j][i].z, sums[i][3] += more[j][i].w;
      }
  }
  return true;
}

// `residual` is for Result::kAdded.
template <typename T>
__device__ void PutResult(const MatrixProduct& product, int64_t at, float sum, T residual) {
  static_cast<T*>(product.y)[at] = FromFloat<T>(ResultOf(product.result, sum, ToFloat(residual)));
}

template <typename T, int kFragments, int kStages>
__global__ __launch_bounds__(kGroupThreads, kMatrixBlocks) void MatrixProductKernel(
    ChainPlace place, const __grid_constant__ SharedProducts own) {
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  const uint32_t stages = SharedAddress(memory);
  const auto stage = [&](int number) {
    return stages + number % kStages * kStageBytes<kFragments>;
  };
  const int begin = static_cast<int>(blockIdx.x) * own.steps_of_block;
  const int end = own.steps < begin + own.steps_of_block ? own.steps : begin + own.steps_of_block;
  const int count = end - begin;
  Step step(own, begin), ahead = step;

  const EarlierKernels kernels(place);
  kernels.LetNextStart();
#pragma unroll 1
  for (int i = 0; i < kStages - 1 && i < count; ++i, ahead.Advance(own))
    CopyWeights<T>(stage(i), own.of[ahead.product], ahead);
  kernels.Await();
  ahead = step;
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < count) {
      CopyInputs<kFragments, T>(stage(i), own.of[ahead.product], ahead, own.rows);
      ahead.Advance(own);
    }
    CommitCopies();
  }

  Accumulator<kFragments> sums = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i, step.Advance(own)) {
    WaitForCopies<kStages - 2>();
    __syncthreads();
    if (const int next = i + kStages - 1; next < count) {
      const MatrixProduct& product = own.of[ahead.product];
      CopyWeights<T>(stage(next), product, ahead);
      CopyInputs<kFragments, T>(stage(next), product, ahead, own.rows);
      ahead.Advance(own);
    }
    CommitCopies();
    const MatrixProduct& product = own.of[step.product];
    AddStep<T>(stage(i), product.by_input, sums);
    if (step.at + 1 < product.StepsOfGroup() && i + 1 < count) continue;
    // Calls fn(fragment, element, where its result is) for the elements that there are.
    const auto for_results = [&](auto&& fn) {
      const int first = step.group * kGroupOutputs + 16 * Warp() + Lane() / 4;
      ForEachElement<kFragments>([&](int fragment, int e) {
        const int output = first + e / 2 * 8;
        const int row = fragment * kFragmentRows + 2 * (Lane() % 4) + e % 2;
        if (output < product.outputs && row < own.rows)
          fn(fragment, e, int64_t{row} * product.stride + output);
      });
    };
    T residual[kFragments][4];
    if (product.result == Result::kAdded)
      for_results([&](int fragment, int e, int64_t at) {
        residual[fragment][e] = static_cast<const T*>(product.residual)[at];
      });
    if (AddUpBlocks(own, step, begin + i, sums))
      for_results([&](int fragment, int e, int64_t at) {
        PutResult<T>(product, at, sums[fragment][e], residual[fragment][e]);
      });
    ForEachElement<kFragments>([&](int fragment, int e) { sums[fragment][e] = 0.0f; });
  }
}

template <typename T, int kFragments>
cudaError_t LaunchProducts(LaunchChain& chain, const Device& device,
                           const MatrixProducts& products) {
  SharedProducts own = {products};
  for (int i = 0; i < own.count; ++i) own.steps += own.of[i].Groups() * own.of[i].StepsOfGroup();
  return ForSharedMemory<SharedMemoryOf(kMatrixBlocks, kManyStages)>(device, [&](auto many) {
    constexpr int kStages = many() ? kManyStages : kFewStages;
    int64_t most = device.multiprocessors;
    if (SharedMemoryOf(kMatrixBlocks, kStages) <= device.shared_memory) most *= kMatrixBlocks;
    if (most > kMaxSumBlocks) most = kMaxSumBlocks;
    own.steps_of_block = static_cast<int>((own.steps + most - 1) / most);
    const int blocks = (own.steps + own.steps_of_block - 1) / own.steps_of_block;
    if (own.sum_floats < SumFloats(blocks, kFragments)) return cudaErrorInvalidValue;
    return chain.Launch(MatrixProductKernel<T, kFragments, kStages>, blocks, kGroupThreads,
                        kStages * kStageBytes<kFragments>, own);
  });
}

}  // namespace rwkv_jax::cuda
