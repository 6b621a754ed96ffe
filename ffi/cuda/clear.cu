// What rows of sequences of different lengths need beside the kernels of an operator.
#include "splits.h"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 128;
constexpr int kMaxResults = 6;

struct Results {
  uint16_t* of[kMaxResults];
};

__global__ __launch_bounds__(kThreads) void ClearKernel(Sequences sequences, int64_t sequences_of_row,
                                                        int64_t tokens, int64_t size,
                                                        Results results) {
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

}  // namespace

cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t size,
                         std::initializer_list<void*> results) {
  if (rows == 0 || tokens == 0) return cudaSuccess;
  Results all = {};
  unsigned count = 0;
  for (void* result : results) all.of[count++] = static_cast<uint16_t*>(result);
  const dim3 blocks(static_cast<unsigned>(rows), kBlocks, count);
  return Launch(ClearKernel, blocks, kThreads, 0, stream, sequences, sequences_of_row, tokens,
                size, all);
}

}  // namespace rwkv_jax::cuda
