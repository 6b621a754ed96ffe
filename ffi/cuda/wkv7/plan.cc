// The rules of WKV7.
#include <algorithm>

#include "rules.h"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

bool TakesHeadSize(int64_t head_size) { return head_size == 64 || head_size == 128; }

bool MayBeInexact(const Problem& problem) { return problem.decay != Decay::kSigmoid; }

int64_t SharedMemory(Pass pass, int64_t head_size) {
  const int64_t scan = Wkv7ScanSharedMemory(pass, head_size);
  return pass == Pass::kBackward ? std::max(scan, Wkv7GradientSharedMemory(head_size)) : scan;
}

// Splits give few heads more of a large GPU. Splitting costs a pass over the sequence and shortens two.
// As measured, heads of 64, of which a multiprocessor holds two blocks in the first pass, need at least
// 8 splits for it to pay, and must be few; a head of 128 takes a multiprocessor to itself, and 3 splits
// pay.
int64_t CountSplits(const Device& device, int64_t heads, int64_t head_size, int64_t chunks) {
  if (heads == 0) return 1;
  int64_t splits;
  if (head_size == 64) {
    if (heads > Scaled(64, device)) return 1;
    splits = std::max<int64_t>(8, 2 * device.multiprocessors / heads + 1);
  } else {
    splits = Scaled(128, device) / heads;
    if (splits < 3) return 1;
  }
  return std::max<int64_t>(1, std::min(chunks, splits));
}

int64_t SharedInputs(Op) { return 0; }

}  // namespace

const Rules kWkv7Rules = {TakesHeadSize, MayBeInexact, SharedMemory, CountSplits,
                          SummarySize,   ScratchSize,  SharedInputs};

}  // namespace rwkv_jax::cuda
