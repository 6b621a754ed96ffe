// What rows of sequences of different lengths need beside the kernels of an operator.
#include "frames.h"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 128;
constexpr int kMaxResults = 6;

struct Results {
  uint4* of[kMaxResults];
};

__global__ __launch_bounds__(kThreads) void ClearKernel(Sequences sequences, int64_t sequences_of_row,
                                                        int64_t tokens, int64_t pieces,
                                                        Results results) {
  const int64_t row = blockIdx.y, start = row * tokens;
  int64_t first = start + tokens, end = first;
  if (sequences_of_row > 0) {
    first = sequences(row * sequences_of_row, 0).first_token;
    const Span last = sequences((row + 1) * sequences_of_row - 1, 0);
    end = last.first_token + last.tokens;
  }
  uint4* const to = results.of[blockIdx.z];
  const auto clear = [&](int64_t from, int64_t upto) {
    for (int64_t i = from * pieces + blockIdx.x * kThreads + threadIdx.x; i < upto * pieces;
         i += kBlocks * kThreads)
      to[i] = {0u, 0u, 0u, 0u};
  };
  clear(start, first);
  clear(end, start + tokens);
}

}  // namespace

cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t bytes,
                         std::initializer_list<void*> results) {
  if (rows == 0 || tokens == 0) return cudaSuccess;
  Results all = {};
  unsigned count = 0;
  for (void* result : results) all.of[count++] = static_cast<uint4*>(result);
  const dim3 blocks(kBlocks, static_cast<unsigned>(rows), count);
  return Launch(ClearKernel, blocks, kThreads, 0, stream, sequences, sequences_of_row, tokens,
                bytes / static_cast<int64_t>(sizeof(uint4)), all);
}

}  // namespace rwkv_jax::cuda
