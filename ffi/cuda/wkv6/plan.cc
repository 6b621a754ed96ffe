// The rules of WKV6 and WKV5.
#include <algorithm>

#include "rules.h"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Splits give few heads more of a large GPU. Splitting costs a pass over the sequence: as measured, it
// pays until each multiprocessor has two blocks.
int64_t CountSplits(const Device& device, int64_t heads, int64_t, int64_t chunks) {
  if (heads == 0) return 1;
  return std::max<int64_t>(1, std::min(chunks, 2 * device.multiprocessors / heads));
}

}  // namespace

Rules Wkv6Rules(const Problem& problem) {
  const int64_t scan = Wkv6ScanSharedMemory(problem.pass);
  return {problem.head_size == kMatrixHeadSize,
          false,  // no decay is too fast for these kernels
          problem.pass == Pass::kBackward ? std::max(scan, Wkv6GradientSharedMemory()) : scan,
          CountSplits,
          kWkv6TransitionSize,
          Wkv6ScratchSize(problem.head_size),
          problem.op == Op::kWkv5 ? 2 : 1};
}

}  // namespace rwkv_jax::cuda
