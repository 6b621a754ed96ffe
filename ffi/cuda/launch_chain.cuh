// Launches of one call whose kernels may start while the kernels before them still run (programmatic dependent
// launches). The rule of what such a kernel may read when is here and nowhere else:
//
//   - A kernel has all that was written before it only after Await(), and writes nothing before that.
//   - The first kernel of a chain has it from the beginning: it waits before it reads or writes memory, and before
//     it lets the next kernel start. (A prefetch into L2 is neither.) Hence every later kernel may read at once
//     what no kernel of its chain writes, such as weights, however late the kernels before the chain wrote them.
//
// PTX promises the latter only to a kernel that waits itself. GPUs keep it for a later kernel of the chain as well,
// since the kernels before the chain have ended then; the tests on a GPU have operands that are written late.
#pragma once

#include "launch.cuh"
#include "ptx.cuh"

namespace rwkv_jax::cuda {

// Whether a kernel is the first one of its chain. Only LaunchChain makes one, so that a kernel with this
// parameter is launched by nothing else.
class ChainPlace {
 public:
  __device__ bool IsFirst() const { return first_; }

 private:
  friend class LaunchChain;
  explicit ChainPlace(bool first) : first_(first) {}

  bool first_;
};

// The kernels of a call, one after another on a stream.
class LaunchChain {
 public:
  explicit LaunchChain(cudaStream_t stream) : stream_(stream) {}
  LaunchChain(const LaunchChain&) = delete;

  template <typename... Parameters, typename... Arguments>
  cudaError_t Launch(void (*kernel)(ChainPlace, Parameters...), const Grid& grid, int threads,
                     int64_t shared_bytes, const Arguments&... arguments) {
    const ChainPlace place(first_);
    first_ = false;
    return LaunchAs(true, kernel, grid, threads, shared_bytes, stream_, place, arguments...);
  }

 private:
  const cudaStream_t stream_;
  bool first_ = true;
};

// In each thread of a kernel of a chain: the kernels before it, those before the chain included.
class EarlierKernels {
 public:
  __device__ explicit EarlierKernels(ChainPlace place) : first_(place.IsFirst()) {
    if (first_) WaitForKernelsBefore();
  }

  // Lets the next kernel start once all blocks of this one have called it or ended.
  __device__ void LetNextStart() const { LetNextKernelStart(); }

  // Returns when the kernels before this one have ended and what they have written is there.
  __device__ void Await() const {
    if (!first_) WaitForKernelsBefore();
  }

 private:
  const bool first_;
};

}  // namespace rwkv_jax::cuda
