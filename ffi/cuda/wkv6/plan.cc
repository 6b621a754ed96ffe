// The rules of WKV6 and WKV5.
#include <algorithm>

#include "rules.h"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Splits give few heads more of a large GPU. Splitting costs a pass over the sequence: as measured, it
// pays until each multiprocessor has two blocks.
int64_t MostSplits(const Device& device, int64_t heads, int64_t) {
  return 2 * device.multiprocessors / heads;
}

}  // namespace

Rules Wkv6Rules(const Problem& problem) {
  const int64_t size = problem.head_size;
  const int64_t scan = Wkv6ScanSharedMemory(problem.pass, problem.dtype, size);
  return {size == problem.value_size && (size == 64 || size == 128) ? size : 0,
          size == 64,
          0,  // no decay is too fast for these kernels
          problem.pass == Pass::kBackward
              ? std::max(scan, Wkv6GradientSharedMemory(problem.dtype, size))
              : scan,
          MostSplits,
          Wkv6TransitionSize(size),
          Wkv6ScratchSize,
          problem.op == Op::kWkv5 ? 2 : 1,
          size == 64};  // of heads of 128 a block has half of the keys, and no dV
}

}  // namespace rwkv_jax::cuda
