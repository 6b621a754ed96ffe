// What the plan of an operator depends on: the rules of each operator are beside its kernels.
#pragma once

#include <cstdint>

#include "plan.h"

namespace rwkv_jax::cuda {

// The numbers in the rules were measured on so many multiprocessors, those of an H100 or H200; other
// devices have them in proportion.
constexpr int64_t kMeasuredMultiprocessors = 132;

constexpr int64_t Scaled(int64_t measured, const Device& device) {
  return measured * device.multiprocessors / kMeasuredMultiprocessors;
}

// The rules of an operator that has a state for each head, for one problem.
struct Rules {
  // The head size of its kernels on matrix units for this problem, or 0 if they take no such heads.
  int64_t matrix_head_size;
  // Whether they take float32 too in this pass, with heads of this size.
  bool takes_float32;
  // Those kernels leave gradients of chunks that decay too far for their arithmetic to the kernel that goes
  // token by token, which divides each chunk among at most so many blocks; 0 if there are no such chunks.
  int64_t blocks_per_steep_chunk;
  // The bytes of shared memory that a block of any of those kernels needs.
  int64_t shared_memory;
  // In how many splits at most those kernels run a sequence, where there are `heads` sequences.
  int64_t (*most_splits)(const Device& device, int64_t heads, int64_t head_size);
  // The floats that tell what a split does to a state.
  int64_t transition_floats;
  // The floats that the kernel that goes token by token backwards needs for each split of a head.
  int64_t (*replay_floats)(int64_t head_size);
  // How many inputs are shared by all tokens of a sequence.
  int64_t shared_inputs;
  // Whether those kernels take the chunks of a split one after another in all of the backward pass, so that no
  // gradients of states lie in the scratch, and the gradients of shared inputs are partial sums for each split.
  bool walks_backwards;
};

Rules Wkv6Rules(const Problem& problem);
Rules Wkv7Rules(const Problem& problem);

// WKV4 has no heads, and one kind of kernel.
Plan MakeWkv4Plan(const Device& device, const Problem& problem, int64_t available);

}  // namespace rwkv_jax::cuda
