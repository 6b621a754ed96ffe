// The kernels that all operators share besides their own.
#include "splits.h"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 128;  // of each row and result
constexpr int kMaxResults = 6;

struct Results {
  uint16_t* of[kMaxResults];
};

__global__ __launch_bounds__(kThreads) void ClearKernel(Sequences sequences,
                                                        int64_t sequences_of_row, int64_t tokens,
                                                        int64_t size, Results results) {
  const int64_t row = blockIdx.x, start = row * tokens;
  const Span span = sequences.OfRow(row, sequences_of_row, tokens);
  uint16_t* const to = results.of[blockIdx.z];
  const auto clear = [&](int64_t from, int64_t upto) {
    for (int64_t i = from * size + blockIdx.y * kThreads + threadIdx.x; i < upto * size;
         i += kBlocks * kThreads)
      to[i] = 0;
  };
  clear(start, span.first_token);
  clear(span.first_token + span.tokens, start + tokens);
}

constexpr int kSumColumns = 32;
constexpr int kSumRows = 16;
constexpr int kSumThreads = kSumColumns * kSumRows;
constexpr int kMaxInputs = 2;

struct Inputs {
  PartialSums of[kMaxInputs];
};

// A block has kSumColumns columns of a sequence. Each of its warps adds up every kSumRows-th partial sum,
// and the first warp then adds up what they have.
__global__ __launch_bounds__(kSumThreads) void SumKernel(Sequences sequences, int64_t partials,
                                                         int64_t columns, Inputs inputs) {
  __shared__ float sums[kSumRows][kSumColumns];
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const int64_t sequence = blockIdx.x / groups, group = blockIdx.x % groups;
  const int lane = threadIdx.x % kSumColumns, row = threadIdx.x / kSumColumns;
  const int64_t column = group * kSumColumns + lane;
  int64_t first = sequence * partials;
  if (sequences.Given()) {
    const Span span = sequences(sequence, 0);
    first = span.first_chunk, partials = span.Chunks();
  }
  const PartialSums& input = inputs.of[blockIdx.y];
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t i = row; i < partials; i += kSumRows)
      sum += input.from[(first + i) * columns + column];
  }
  sums[row][lane] = sum;
  __syncthreads();
  if (row > 0 || column >= columns) return;
#pragma unroll
  for (int i = 1; i < kSumRows; ++i) sum += sums[i][lane];
  input.to[sequence * columns + column] = sum;
}

}  // namespace

cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t size,
                         const std::vector<void*>& results) {
  if (rows == 0 || tokens == 0) return cudaSuccess;
  Results all = {};
  unsigned count = 0;
  for (void* result : results) all.of[count++] = static_cast<uint16_t*>(result);
  const dim3 blocks(static_cast<unsigned>(rows), kBlocks, count);
  return Launch(ClearKernel, blocks, kThreads, 0, stream, sequences, sequences_of_row, tokens, size,
                all);
}

cudaError_t SumPartials(cudaStream_t stream, int64_t count, const Sequences& sequences,
                        int64_t partials, int64_t columns,
                        std::initializer_list<PartialSums> inputs) {
  if (count * columns == 0) return cudaSuccess;
  Inputs all = {};
  unsigned number = 0;
  for (const PartialSums& input : inputs) all.of[number++] = input;
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const dim3 blocks(static_cast<unsigned>(count * groups), number);
  return Launch(SumKernel, blocks, kSumThreads, 0, stream, sequences, partials, columns, all);
}

}  // namespace rwkv_jax::cuda
