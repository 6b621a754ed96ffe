// The rules of WKV6 and WKV5.
#include <algorithm>

#include "rules.h"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {
namespace {

bool TakesHeadSize(int64_t head_size) { return head_size == kMatrixHeadSize; }

bool MayBeInexact(const Problem&) { return false; }

int64_t SharedMemory(Pass pass, int64_t) {
  const int64_t scan = Wkv6ScanSharedMemory(pass);
  return pass == Pass::kBackward ? std::max(scan, Wkv6GradientSharedMemory()) : scan;
}

// Splits give few heads more of a large GPU. Splitting costs a pass over the sequence: as measured, it
// pays until each multiprocessor has two blocks.
int64_t CountSplits(const Device& device, int64_t heads, int64_t, int64_t chunks) {
  if (heads == 0) return 1;
  return std::max<int64_t>(1, std::min(chunks, 2 * device.multiprocessors / heads));
}

int64_t SummaryFloats(int64_t) { return kWkv6SummarySize; }

int64_t SharedInputs(Op op) { return op == Op::kWkv5 ? 2 : 1; }

}  // namespace

const Rules kWkv6Rules = {TakesHeadSize, MayBeInexact,    SharedMemory, CountSplits,
                          SummaryFloats, Wkv6ScratchSize, SharedInputs};

}  // namespace rwkv_jax::cuda
