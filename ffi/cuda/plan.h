// How a call runs on a device: which kernels, in how many splits, and what lies where in its scratch. A
// plan follows from the device and the problem alone, so it can be asked for without a GPU.
#pragma once

#include <cstdint>
#include <limits>

#include "rwkv_jax/description.h"
#include "rwkv_jax/problem.h"
#include "splits.h"

namespace rwkv_jax::cuda {

// What a plan has to know of a device.
struct Device {
  int64_t multiprocessors;
  int64_t shared_memory;  // bytes that one block may have
};

// Every device that the kernels are compiled for has at least as much, that is 99 KiB.
constexpr int64_t kLeastSharedMemory = 101376;

struct Plan {
  Device device;
  bool matrix_units = false;  // or else token by token in float32
  // Why no device runs it on matrix units; null if only this one does not, for want of shared memory.
  const char* why_by_token = nullptr;
  // The bytes of shared memory that a block of the kernels on matrix units needs, also where they are
  // not taken for lack of it; 0 where they do not suit the problem.
  int64_t shared_memory = 0;

  bool few_heads = false;  // a multiprocessor has little more than one

  // Splits of a sequence. Where sequences have different lengths and there are several splits, each has
  // `split_chunks` chunks, and `splits` are those of all tokens as if they were one sequence.
  int64_t splits = 1, split_chunks = 0;
  int64_t transition_floats = 0;  // of what a split does to a state
  // The gradient of an input that all tokens share is `partials` sums for each sequence, or, where
  // sequences have different lengths, one for every `chunks_per_partial` chunks. If there are several, they are
  // added up.
  int64_t partials = 1, chunks_per_partial = 1;
  bool adds_up = false;
  // The kernel that goes token by token backwards takes so many heads at a time, counted over all
  // sequences, or has so many blocks for steep chunks, and needs `replay_floats` of scratch for each of these
  // or for each split of a head.
  int64_t replay_heads = 0, replay_floats = 0;

  // Where the parts of the scratch begin, and how many floats it has.
  int64_t steep = 0;        // [1 + chunks * H]: a count, and numbers of chunks
  int64_t sums = 0;         // partial sums of the gradients of shared parameters
  int64_t transitions = 0;  // what splits do to a state
  int64_t gradients = 0;    // of the states at the ends of chunks
  int64_t replay = 0;
  int64_t scratch = 0;

  Splits SplitsIn(float* memory) const {
    return {splits, memory + transitions, transition_floats, split_chunks};
  }
  ReplayScratch Replay(float* memory, int64_t splits) const {
    return {memory + replay, replay_heads, splits, splits * replay_floats};
  }
};

constexpr int64_t kMaxHeadSize = 128;

// No device has more multiprocessors, or else those beyond them are left out of a plan.
constexpr int64_t kMaxMultiprocessors = 192;

// The plan that needs at most `available` floats of scratch, or, if there is none, the one that needs
// least.
Plan MakePlan(const Device& device, const Problem& problem,
              int64_t available = std::numeric_limits<int64_t>::max());

// The floats of scratch with which a call runs well on any device.
int64_t ScratchFloats(const Problem& problem);

// Whether the targets `transition` and `reverse_transition` take a problem.
bool HasTransition(const Problem& problem);

// A plan for Python.
Description Describe(const Plan& plan);

}  // namespace rwkv_jax::cuda
