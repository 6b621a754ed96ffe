// The plan of WKV4.
#include <algorithm>

#include "rules.h"
#include "rwkv_jax/scratch.h"
#include "wkv4/kernels.h"

namespace rwkv_jax::cuda {

// Splits fill a GPU with few channels; they cost a pass over the sequence. A block takes as many channels
// as 128 bytes have elements, and a multiprocessor has two blocks.
Plan MakeWkv4Plan(const Device& device, const Problem& problem, int64_t available) {
  Plan plan;
  plan.device = device;
  const bool backward = problem.pass == Pass::kBackward;
  if (!backward && problem.pass != Pass::kForward) return plan;
  const int64_t row_bytes = problem.heads * (problem.dtype == Dtype::kF32 ? 4 : 2);
  const int64_t blocks = problem.sequences * ((row_bytes + 127) / 128);
  if (blocks > 0 && blocks <= device.multiprocessors)
    plan.splits = std::clamp<int64_t>(2 * device.multiprocessors / blocks, 1,
                                      std::max<int64_t>(1, Chunks(problem.tokens)));
  const int64_t channels = problem.AllHeads();
  for (;; --plan.splits) {
    plan.partials = plan.splits;
    plan.adds_up = backward && plan.splits > 1;
    const int64_t transition = backward ? kWkv4BackwardTransition : kWkv4ForwardTransition;
    plan.scratch = 0;
    plan.transitions = TakePart(channels * (plan.splits - 1) * transition, plan.scratch);
    plan.sums = TakePart(plan.adds_up ? 2 * channels * plan.splits : 0, plan.scratch);
    if (plan.splits == 1 || plan.scratch <= available) return plan;
  }
}

}  // namespace rwkv_jax::cuda
