// The cross entropy of a token from its logits z, with the largest logit z_m and the target y:
//
//   log_sum = log sum_v exp(z_v)
//   loss = scale (log_sum - z_y + z_loss log_sum^2)
//   dz = scale ((1 + 2 z_loss log_sum) exp(z - log_sum) - onehot(y) + l2_wrap z_m onehot(m))
//
// The term of l2_wrap is RWKV-LM's L2Wrap; it is in the gradient alone.
//
// A block takes one token after another, and a thread every kThreads-th vector of logits. It copies them
// to shared memory, where as many as fit stay until the gradient is computed, and each vector that is
// done makes room for one of the next token. Logits that do not fit are read twice.
#include <algorithm>
#include <cmath>
#include <limits>

#include "launch.cuh"
#include "layers/vectors.cuh"
#include "losses/kernels.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kVector = 4;
constexpr int kStep = kThreads * kVector;  // the logits that a block has at once
constexpr int kGroups = 4;                 // of steps in shared memory, which are waited for apart
constexpr float kLog2E = 1.4426950408889634f;

// The largest of some logits, the first vector that has it, and the sum of exp(z - largest).
struct Statistics {
  float largest = -INFINITY, sum = 0.0f;
  int at = std::numeric_limits<int>::max();

  __device__ void Add(const float (&z)[kVector], int v) {
    const float before = largest, here = fmaxf(fmaxf(z[0], z[1]), fmaxf(z[2], z[3]));
    if (here > largest) at = v;
    largest = fmaxf(largest, here);
    // Any base will do where all logits are -infinity.
    const float base = largest == -INFINITY ? 0.0f : largest;
    sum *= Exp2((before - base) * kLog2E);
#pragma unroll
    for (float x : z) sum += Exp2((x - base) * kLog2E);
  }

  __device__ void Add(const Statistics& other) {
    const float both = fmaxf(largest, other.largest);
    const float base = both == -INFINITY ? 0.0f : both;
    sum = sum * Exp2((largest - base) * kLog2E) + other.sum * Exp2((other.largest - base) * kLog2E);
    if (other.largest > largest || (other.largest == largest && other.at < at)) at = other.at;
    largest = both;
  }

  __device__ Statistics OfLane(int mask) const {
    return {__shfl_xor_sync(0xffffffffu, largest, mask), __shfl_xor_sync(0xffffffffu, sum, mask),
            __shfl_xor_sync(0xffffffffu, at, mask)};
  }
};

// `kept` are the steps of a token that shared memory has room for.
template <typename T>
__global__ __launch_bounds__(kThreads) void CrossEntropyKernel(CrossEntropyCall call, int kept) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ Statistics of_warps[2][kWarps];
  float* const own = reinterpret_cast<float*>(shared) + threadIdx.x * kVector;
  const int vocabulary = static_cast<int>(call.vocabulary), first = threadIdx.x * kVector;
  const int together = (kept + kGroups - 1) / kGroups;  // the steps of a group
  const float z_loss = call.coefficients[0], l2_wrap = call.coefficients[1];
  // Calls fn(step, its logit of this thread) for the steps of a group.
  const auto for_steps = [&](int group, auto&& fn) {
    for (int step = group * together; step < kept && step < (group + 1) * together; ++step)
      if (step * kStep + first < vocabulary) fn(step * kStep, step * kStep + first);
  };
  const auto copy = [&](int64_t token, int step, int v) {
    if (token < call.tokens) CopyPacked<kVector>(own + step, call.logits + token * vocabulary + v);
  };

#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    for_steps(group, [&](int step, int v) { copy(blockIdx.x, step, v); });
    CommitCopies();
  }
  int turn = 0;
  for (int64_t token = blockIdx.x; token < call.tokens; token += gridDim.x, turn ^= 1) {
    const float* const logits = call.logits + token * vocabulary;
    const float scale = call.scale[token];
    const int target = call.targets[token];

    Statistics found;
    float z[kVector];
    const auto add = [&](int step, int v) {
      LoadFloats(own + step, z);
      found.Add(z, v);
    };
    WaitForCopies<3>();
    for_steps(0, add);
    WaitForCopies<2>();
    for_steps(1, add);
    WaitForCopies<1>();
    for_steps(2, add);
#pragma unroll 2
    for (int v = kept * kStep + first; v < vocabulary; v += kStep) {
      LoadFloats(logits + v, z);
      found.Add(z, v);
    }
    WaitForCopies<0>();
    for_steps(3, add);

#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) found.Add(found.OfLane(mask));
    // No warp writes these again before all have come to the barrier of the next token.
    if (threadIdx.x % 32 == 0) of_warps[turn][threadIdx.x / 32] = found;
    __syncthreads();
    found = of_warps[turn][threadIdx.x % 32];
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) found.Add(found.OfLane(mask));

    const float log_sum = found.largest + logf(found.sum);
    const float of_sum = scale * (1.0f + 2.0f * z_loss * log_sum);
    const auto give_loss = [&](float z) {
      const float loss = log_sum - z + z_loss * log_sum * log_sum;
      call.loss[token] = scale == 0.0f ? 0.0f : scale * loss;
    };
    if (threadIdx.x == 0 && (target < 0 || target >= vocabulary)) give_loss(NAN);
    const auto finish = [&](int v) {
      const bool has_target = target >= v && target < v + kVector;
      bool has_largest = v == found.at;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float logit = z[i];
        z[i] = of_sum * Exp2((logit - log_sum) * kLog2E);
        if (has_target && v + i == target) {
          give_loss(logit);
          z[i] -= scale;
        }
        if (has_largest && logit == found.largest) {
          z[i] += scale * l2_wrap * logit;
          has_largest = false;
        }
      }
      StoreRounded<T>(call.dlogits, token * vocabulary + v, z);
    };
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      for_steps(group, [&](int step, int v) {
        LoadFloats(own + step, z);
        copy(token + gridDim.x, step, v);
        finish(v);
      });
      CommitCopies();
    }
    for (int v = kept * kStep + first; v < vocabulary; v += kStep) {
      LoadFloats(logits + v, z);
      finish(v);
    }
  }
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const CrossEntropyCall& call, const Device& device) {
  if (call.tokens * call.vocabulary == 0) return cudaSuccess;
  const int64_t most = (device.shared_memory - 2 * kWarps * sizeof(Statistics)) / sizeof(float);
  const int64_t steps = (call.vocabulary + kStep - 1) / kStep;
  const int kept = static_cast<int>(std::min<int64_t>(most / kStep, steps));
  const int64_t blocks = std::min<int64_t>(call.tokens, device.multiprocessors);
  const auto launch = [&](auto zero) {
    return Launch(CrossEntropyKernel<decltype(zero)>, dim3(static_cast<unsigned>(blocks)), kThreads,
                  kept * kStep * sizeof(float), stream, call, kept);
  };
  switch (call.dtype) {
    case Dtype::kBF16: return launch(__nv_bfloat16());
    case Dtype::kF16: return launch(__half());
    default: return launch(0.0f);
  }
}

}  // namespace rwkv_jax::cuda
