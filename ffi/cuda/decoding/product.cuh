// The products of a few rows with a matrix that is read once.
//
// A block keeps the rows in shared memory, a slice of their inputs at a time, and its warps go over a
// matrix [outputs, inputs]: a warp has kOutputs outputs at once, and its lanes neighbouring vectors of 16
// bytes of their inputs. The next vectors are under way while the last ones are added up, and the first
// ones before the rows are there. Sums are float32. In which order they are added depends neither on the
// number of rows nor on the device. Weights are of the type T of the rows, or of int8, and then a result is
// multiplied by a scale.
#pragma once

#include "fragment.cuh"
#include "launch_chain.cuh"
#include "layers/vectors.cuh"
#include "plan.h"
#include "ptx.cuh"
#include "rwkv_jax/decoding.h"

namespace rwkv_jax::cuda {

constexpr int kProductThreads = 256, kProductWarps = kProductThreads / 32;

// The blocks that share a multiprocessor, which bounds registers and shared memory.
constexpr int kProductBlocks = 2;

// Whether the next kernel may start while this one waits. Blocks of several rows fill the multiprocessors,
// and blocks that wait would take the room of others.
template <int kRows>
constexpr bool kStartsNextEarly = kRows == 1;

template <typename W>
constexpr int kWeightVector = 16 / sizeof(W);

template <typename W>
constexpr bool kQuantised = std::is_same_v<W, int8_t>;

// A lane has kSteps vectors of each output under way while it adds up as many. That is 8 for up to 4 rows,
// so that a multiprocessor with two blocks has 64 KiB under way, and those of one row lie side by side.
// For more rows there are no registers for more than 4. Of int8 two outputs share the inputs that a lane
// reads, which are as many as it has weights.
template <typename W, int kRows>
constexpr int kOutputs = kRows > 4                    ? 4
                         : kRows > 1 || kQuantised<W> ? 2
                                                      : 1;
template <typename W, int kRows>
constexpr int kSteps = kRows > 4 ? 1 : 8 / kOutputs<W, kRows>;

// The inputs that a warp takes at once.
template <typename W, int kRows>
constexpr int kStride = 32 * kWeightVector<W> * kSteps<W, kRows>;

// The outputs that a block takes at once.
template <typename W, int kRows>
constexpr int kBlockOutputs = kProductWarps * kOutputs<W, kRows>;

// How a product is launched.
struct ProductPlan {
  int64_t rounds;  // how often a block takes kBlockOutputs outputs
  int64_t blocks;  // for each matrix
  int64_t slice;   // the inputs in shared memory at once
  int64_t bytes;   // of shared memory
};

// Shared memory that a block has besides its slice: static arrays, and what the device keeps for itself.
constexpr int64_t kProductReserve = 8192;

// `matrices` matrices [outputs, inputs] of W for up to kRows rows of T, beside `others` blocks of the same
// kernel.
// One row waits for memory alone, and all its blocks run at once. More rows have more to compute, which
// more blocks share out better.
template <typename T, typename W, int kRows>
ProductPlan PlanProduct(const Device& device, int64_t matrices, int64_t outputs, int64_t inputs,
                        int64_t others) {
  constexpr int64_t kAtOnce = kStride<W, kRows>;
  const auto count = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  ProductPlan plan;
  const int64_t groups = count(outputs, kBlockOutputs<W, kRows>);
  const int64_t running = device.multiprocessors * kProductBlocks;
  const int64_t left = running > others ? running - others : 1;
  plan.rounds = kRows > 1 ? matrices * groups / running : count(matrices * groups, left);
  if (plan.rounds < 1) plan.rounds = 1;
  plan.blocks = count(groups, plan.rounds);
  const int64_t room = device.shared_memory / kProductBlocks - kProductReserve;
  const int64_t fits = room / (kRows * static_cast<int64_t>(sizeof(T))) / kAtOnce * kAtOnce;
  plan.slice = inputs < fits ? inputs : fits;
  plan.bytes = plan.slice * kRows * sizeof(T);
  return plan;
}

// The rows of a block in shared memory, [kRows, slice].
template <typename T>
struct Slice {
  T* rows;
  int size;

  __device__ T* Row(int row) const { return rows + row * size; }
};

// The inputs of a product as they lie in memory, [rows, inputs]. Rows past the last one are zeros.
template <typename T, int kRows>
struct PlainRows {
  const T* x;
  int rows, inputs;

  __device__ void FetchIntoCache() const {}
  __device__ void Fetch() {}
  __device__ void Prepare() {}
  __device__ void StageFirst(int count, const Slice<T>& slice) const { Stage(0, count, slice); }
  __device__ void Stage(int first, int count, const Slice<T>& slice) const {
    constexpr int kVector = kWeightVector<T>;
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      for (int i = threadIdx.x * kVector; i < count; i += kProductThreads * kVector) {
        Packed<T, kVector> vector = {};
        if (row < rows) vector = LoadPacked<kVector, T>(x, int64_t{row} * inputs + first + i);
        vector.Store(slice.Row(row) + i);
      }
  }
};

// The vectors of a matrix that a lane has under way: of kOutputs outputs from `output` on, at inputs from
// `input` on.
template <typename W, int kRows>
struct WeightVectors {
  static constexpr int kVector = kWeightVector<W>, kCount = kSteps<W, kRows>;
  static constexpr int kOfStep = kOutputs<W, kRows>;
  Packed<W, kVector> of[kCount][kOfStep];

  __device__ void Fetch(const W* matrix, int inputs, int64_t output, int input) {
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      const int at = input + (step * 32 + threadIdx.x % 32) * kVector;
      if (at >= inputs) continue;
#pragma unroll
      for (int o = 0; o < kOfStep; ++o)
        of[step][o] = LoadPacked<kVector, W>(matrix, (output + o) * inputs + at);
    }
  }

  // Adds the products with `count` inputs in shared memory, those from `input` on.
  template <typename T>
  __device__ void AddTo(float (&sums)[kOfStep][kRows], const Slice<T>& slice, int input,
                        int count) const {
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      const int at = input + (step * 32 + threadIdx.x % 32) * kVector;
      if (at >= count) continue;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const auto x = LoadPacked<kVector, T>(slice.Row(row), at);
#pragma unroll
        for (int o = 0; o < kOfStep; ++o)
#pragma unroll
          for (int c = 0; c < kVector; ++c) sums[o][row] = fmaf(of[step][o][c], x[c], sums[o][row]);
      }
    }
  }
};

// Calls fetch(), which reads weights, as early as a kernel may. Afterwards what the kernels before have
// written is there.
template <int kRows, typename Source, typename Fetch>
__device__ void FetchAndWait(ChainPlace place, Source& source, Fetch&& fetch) {
  if (kRows == 1 && place.IsFirst()) source.FetchIntoCache();
  const EarlierKernels kernels(place);
  fetch();
  source.Fetch();
  if (kStartsNextEarly<kRows>) kernels.LetNextStart();
  kernels.Await();
  if (!kStartsNextEarly<kRows>) kernels.LetNextStart();
}

// Puts the first slice of the rows of `source` into shared memory.
template <typename T, typename Source>
__device__ void StageFirst(Source& source, int inputs, const Slice<T>& slice) {
  source.Prepare();
  __syncthreads();
  source.StageFirst(inputs < slice.size ? inputs : slice.size, slice);
  __syncthreads();
}

// Multiplies the rows of `source` with outputs of a matrix: those from `first` on, kBlockOutputs in each
// of `rounds` rounds, as far as the matrix has them, which is a multiple of kOutputs.
// A warp calls epilogue.Begin(output) before it multiplies its outputs from `output` on, and then
// epilogue.Finish(output, o, row, sum) with the result of output + o for each row.
template <typename W, int kRows, typename T, typename Source, typename Epilogue>
__device__ void MultiplyByOutput(const Matrix& matrix, int outputs, int inputs, int first,
                                 int rounds, const Slice<T>& slice, ChainPlace place,
                                 Source& source, Epilogue& epilogue) {
  constexpr int kAtOnce = kStride<W, kRows>, kOutputsAtOnce = kOutputs<W, kRows>;
  const int warp = threadIdx.x / 32;
  const auto output_of = [&](int round) {
    return first + (round * kProductWarps + warp) * kOutputsAtOnce;
  };
  WeightVectors<W, kRows> now, next;
  const auto fetch = [&](int round, int input) {
    if (input >= inputs) ++round, input = 0;
    if (round < rounds && output_of(round) < outputs)
      next.Fetch(static_cast<const W*>(matrix.weight), inputs, output_of(round), input);
  };
  FetchAndWait<kRows>(place, source, [&] { fetch(0, 0); });
  StageFirst(source, inputs, slice);
  for (int round = 0; round < rounds; ++round) {
    float sums[kOutputsAtOnce][kRows] = {}, scales[kOutputsAtOnce];
    if (output_of(round) < outputs) {
      epilogue.Begin(output_of(round));
#pragma unroll
      for (int o = 0; o < kOutputsAtOnce; ++o)
        if constexpr (kQuantised<W>) scales[o] = matrix.scale[output_of(round) + o];
    }
    for (int begin = 0; begin < inputs; begin += slice.size) {
      const int count = inputs - begin < slice.size ? inputs - begin : slice.size;
      // A slice with all inputs stays for all rounds.
      if (slice.size < inputs && round + begin > 0) {
        __syncthreads();
        source.Stage(begin, count, slice);
        __syncthreads();
      }
      for (int input = 0; input < count; input += kAtOnce) {
        now = next;
        fetch(round, begin + input + kAtOnce);
        now.AddTo(sums, slice, input, count);
      }
    }
    if (output_of(round) >= outputs) continue;
#pragma unroll
    for (int o = 0; o < kOutputsAtOnce; ++o) {
      const int row = ReduceScatter<1, 32>(sums[o], threadIdx.x % 32);
      const float sum = kQuantised<W> ? sums[o][0] * scales[o] : sums[o][0];
      if (row >= 0) epilogue.Finish(output_of(round), o, row, sum);
    }
  }
}

// Multiplies the rows of `source` with columns of a matrix [inputs, outputs]: with as many as two vectors
// have, from `first` on. Each pair of lanes has other inputs. epilogue(output, row, sum) gets each
// result once.
template <typename T>
constexpr int kBlockColumns = 2 * kWeightVector<T>;

template <typename T, int kRows, typename Source, typename Epilogue>
__device__ void MultiplyByInput(const T* matrix, int outputs, int inputs, int first,
                                const Slice<T>& slice, ChainPlace place, Source& source,
                                Epilogue&& epilogue) {
  constexpr int kVector = kWeightVector<T>, kPairs = kProductThreads / 2;
  constexpr int kAhead = kRows > 4 ? 4 : 8;
  __shared__ float posted[kProductWarps][kRows][kBlockColumns<T>];
  const int pair = threadIdx.x / 2, lane = threadIdx.x % 32;
  const int column = first + lane % 2 * kVector;
  float sums[kRows][kVector] = {};
  if (kRows == 1) {
    // All blocks of the matrix together fetch it into L2.
    const int blocks = (outputs + kBlockColumns<T> - 1) / kBlockColumns<T>;
    const int share = (inputs + blocks * kProductWarps - 1) / (blocks * kProductWarps);
    const int begin = (first / kBlockColumns<T> * kProductWarps + threadIdx.x / 32) * share;
    const int count = inputs - begin < share ? inputs - begin : share;
    if (lane == 0 && count > 0)
      PrefetchBytes(matrix + int64_t{begin} * outputs, count * outputs * sizeof(T));
  }
  FetchAndWait<kRows>(place, source, [] {});
  StageFirst(source, inputs, slice);
  for (int begin = 0; begin < inputs; begin += slice.size) {
    const int count = inputs - begin < slice.size ? inputs - begin : slice.size;
    if (begin > 0) {
      __syncthreads();
      source.Stage(begin, count, slice);
      __syncthreads();
    }
    for (int input = pair; column < outputs && input < count; input += kAhead * kPairs) {
      Packed<T, kVector> weights[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (input + i * kPairs < count)
          weights[i] = LoadPacked<kVector, T>(
              matrix, static_cast<int64_t>(begin + input + i * kPairs) * outputs + column);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (input + i * kPairs >= count) continue;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const float x = ToFloat(slice.Row(row)[input + i * kPairs]);
#pragma unroll
          for (int c = 0; c < kVector; ++c) sums[row][c] = fmaf(weights[i][c], x, sums[row][c]);
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const int c = ReduceScatter<2, 32>(sums[row], lane);
    if (c >= 0) posted[threadIdx.x / 32][row][lane % 2 * kVector + c] = sums[row][0];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kBlockColumns<T>; i += kProductThreads) {
    const int row = i / kBlockColumns<T>, column = i % kBlockColumns<T>;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kProductWarps; ++warp) sum += posted[warp][row][column];
    if (first + column < outputs) epilogue(first + column, row, sum);
  }
}

}  // namespace rwkv_jax::cuda
