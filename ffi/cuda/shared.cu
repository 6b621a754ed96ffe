// The kernels that all operators share besides their own.
#include "splits.h"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 128;  // of each row and result
constexpr int kMaxResults = 6;

struct Results {
  TokenResult of[kMaxResults];
};

__global__ __launch_bounds__(kThreads) void ClearKernel(Sequences sequences,
                                                        int64_t sequences_of_row, int64_t tokens,
                                                        int64_t halves, Results results) {
  const int64_t row = blockIdx.x, start = row * tokens;
  const Span span = sequences.OfRow(row, sequences_of_row, tokens);
  uint16_t* const to = static_cast<uint16_t*>(results.of[blockIdx.z].data);
  const int64_t size = results.of[blockIdx.z].size * halves;
  const auto clear = [&](int64_t from, int64_t upto) {
    for (int64_t i = from * size + blockIdx.y * kThreads + threadIdx.x; i < upto * size;
         i += kBlocks * kThreads)
      to[i] = 0;
  };
  clear(start, span.first_token);
  clear(span.first_token + span.tokens, start + tokens);
}

constexpr int kSumColumns = 32;
constexpr int kSumWarps = 16;
constexpr int kSumThreads = kSumColumns * kSumWarps;
constexpr int kMaxInputs = 2;

struct Inputs {
  PartialSums of[kMaxInputs];
};

// A warp has kSumColumns columns. kWarps of them share a sequence: each adds up every kWarps-th partial
// sum, and the first then adds up what they have.
template <int kWarps>
__global__ __launch_bounds__(kSumThreads) void SumKernel(Sequences sequences, int64_t count,
                                                         int64_t partials, int64_t chunks,
                                                         int64_t columns, Inputs inputs) {
  __shared__ float sums[kSumWarps][kSumColumns];
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const int lane = threadIdx.x % kSumColumns, warp = threadIdx.x / kSumColumns;
  const int64_t sequence = blockIdx.x / groups * (kSumWarps / kWarps) + warp / kWarps;
  const int64_t column = blockIdx.x % groups * kSumColumns + lane;
  const bool active = sequence < count && column < columns;
  const PartialSums& input = inputs.of[blockIdx.y];
  float sum = 0.0f;
  if (active) {
    int64_t first = sequence * partials, stride = 1;
    if (sequences.Given()) {
      const Span span = sequences(sequence, 0);
      first = span.first_chunk, stride = chunks, partials = (span.Chunks() + chunks - 1) / chunks;
    }
#pragma unroll 8
    for (int64_t i = warp % kWarps; i < partials; i += kWarps)
      sum += input.from[(first + i * stride) * columns + column];
  }
  if constexpr (kWarps > 1) {
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp % kWarps > 0) return;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += sums[warp + i][lane];
  }
  if (active) input.to[sequence * columns + column] = sum;
}

}  // namespace

cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t halves,
                         const std::vector<TokenResult>& results) {
  if (rows == 0 || tokens == 0) return cudaSuccess;
  Results all = {};
  unsigned count = 0;
  for (const TokenResult& result : results) all.of[count++] = result;
  return Launch(ClearKernel, {rows, kBlocks, count}, kThreads, 0, stream, sequences,
                sequences_of_row, tokens, halves, all);
}

cudaError_t SumPartials(cudaStream_t stream, int64_t count, const Sequences& sequences,
                        int64_t partials, int64_t columns,
                        std::initializer_list<PartialSums> inputs, int64_t chunks) {
  if (count * columns == 0) return cudaSuccess;
  Inputs all = {};
  unsigned number = 0;
  for (const PartialSums& input : inputs) all.of[number++] = input;
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const auto launch = [&](auto warps) {
    constexpr int kSequences = kSumWarps / warps();
    const int64_t blocks = (count + kSequences - 1) / kSequences * groups;
    return Launch(SumKernel<warps()>, {blocks, number}, kSumThreads, 0, stream, sequences, count,
                  partials, chunks, columns, all);
  };
  // Many short sequences have too few partial sums each to keep a block busy.
  const bool short_ones = sequences.Given() && partials < kSumWarps * count;
  return short_ones ? launch(std::integral_constant<int, 1>())
                    : launch(std::integral_constant<int, kSumWarps>());
}

}  // namespace rwkv_jax::cuda
