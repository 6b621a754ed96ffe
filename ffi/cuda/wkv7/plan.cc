// The rules of WKV7.
#include <algorithm>

#include "rules.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Splits give few heads more of a large GPU. Splitting costs a pass over the sequence and shortens two.
// As measured, heads of 64, of which a multiprocessor holds two blocks in the first pass, need at least
// 8 splits for it to pay, and must be few; a head of 128 takes a multiprocessor to itself, and 3 splits
// pay.
int64_t MostSplits(const Device& device, int64_t heads, int64_t head_size) {
  if (head_size == 64) {
    if (heads > Scaled(64, device)) return 1;
    return std::max<int64_t>(8, 2 * device.multiprocessors / heads + 1);
  }
  const int64_t splits = Scaled(128, device) / heads;
  return splits < 3 ? 1 : splits;
}

}  // namespace

Rules Wkv7Rules(const Problem& problem) {
  const int64_t keys = problem.head_size, values = problem.value_size;
  const bool suits = keys % kHeadPiece == 0 && values % kHeadPiece == 0 &&
                     std::min(keys, values) >= kMinHeadSize &&
                     std::max(keys, values) <= kMaxHeadSize;
  const int64_t size = MatrixHeadSize(keys, values);
  const int64_t scan = Wkv7ScanSharedMemory(problem.pass, problem.dtype, size, problem.decay);
  const int64_t gradients = Wkv7GradientSharedMemory(problem.dtype, size);
  const bool whole = problem.pass == Pass::kForward || problem.pass == Pass::kBackward;
  return {suits ? size : 0,
          keys == 64 && values == 64 && whole,
          problem.decay == Decay::kSigmoid ? 0 : kChunkQuads,
          problem.pass == Pass::kBackward ? std::max(scan, gradients) : scan,
          MostSplits,
          TransitionSize(size),
          ScratchSize,
          0,  // no input is shared by tokens
          false};
}

}  // namespace rwkv_jax::cuda
