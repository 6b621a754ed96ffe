// The cross entropy of a token from its logits z, with the largest logit z_m and the target y:
//
//   log_sum = log sum_v exp(z_v)
//   loss = scale (log_sum - z_y + z_loss log_sum^2)
//   dz = scale ((1 + 2 z_loss log_sum) exp(z - log_sum) - onehot(y) + l2_wrap z_m onehot(m))
//
// The term of l2_wrap is RWKV-LM's L2Wrap; it is in the gradient alone.
//
// A block takes one token after another, and a thread every kThreads-th vector of logits. It copies them
// to shared memory, where as many as fit become exp(z - base) and stay until log_sum is known. Each
// vector that is done makes room for one of the next token. Logits that do not fit are read twice.
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
// Steps in shared memory are waited for by groups. No GPU has room for more than there are here.
constexpr int kGroups = 4, kGroupSteps = 4;
constexpr float kLog2E = 1.4426950408889634f;

// exp(z - base), where the largest number so far may be -infinity.
__device__ float Exp(float z, float base) {
  return Exp2((z - (base == -INFINITY ? 0.0f : base)) * kLog2E);
}

// The largest of some logits, the first vector that has it, and the sum of exp(z - largest).
struct Statistics {
  float largest = -INFINITY, sum = 0.0f;
  int at = std::numeric_limits<int>::max();

  // Adds vectors of logits, each kStep after the one before, from the logit v on. The logits become
  // exp(z - largest), with the largest one so far.
  template <int kCount>
  __device__ void Add(float (&z)[kCount][kVector], int v) {
    const float before = largest;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float here = fmaxf(fmaxf(z[i][0], z[i][1]), fmaxf(z[i][2], z[i][3]));
      if (here > largest) at = v + i * kStep;
      largest = fmaxf(largest, here);
    }
    sum *= Exp(before, largest);
#pragma unroll
    for (auto& vector : z)
#pragma unroll
      for (float& x : vector) sum += x = Exp(x, largest);
  }

  __device__ void Add(const Statistics& other) {
    const float both = fmaxf(largest, other.largest);
    sum = sum * Exp(largest, both) + other.sum * Exp(other.largest, both);
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
  const float z_loss = call.coefficients[0], l2_wrap = call.coefficients[1];
  const auto has = [&](int step) { return step < kept && step * kStep + first < vocabulary; };
  const auto copy = [&](int64_t token, int step) {
    if (token >= call.tokens || !has(step)) return;
    const float* const from = call.logits + token * vocabulary + first;
    CopyPacked<kVector>(own + step * kStep, from + step * kStep);
  };

#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    for (int i = 0; i < kGroupSteps; ++i) copy(blockIdx.x, group * kGroupSteps + i);
    CommitCopies();
  }
  int turn = 0;
  for (int64_t token = blockIdx.x; token < call.tokens; token += gridDim.x, turn ^= 1) {
    const float* const logits = call.logits + token * vocabulary;
    const float scale = call.scale[token];
    const int target = call.targets[token];
    float of_target = NAN;
    if (threadIdx.x == 0 && target >= 0 && target < vocabulary) of_target = logits[target];

    Statistics found;
    float bases[kGroups];
    const auto add = [&](int group) {
      float z[kGroupSteps][kVector];
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group * kGroupSteps + i;
#pragma unroll
        for (float& x : z[i]) x = -INFINITY;
        if (has(step)) LoadFloats(own + step * kStep, z[i]);
      }
      found.Add(z, group * kGroupSteps * kStep + first);
      bases[group] = found.largest;
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group * kGroupSteps + i;
        if (has(step)) StoreFloats(own + step * kStep, z[i]);
      }
    };
    WaitForCopies<3>();
    add(0);
    WaitForCopies<2>();
    add(1);
    WaitForCopies<1>();
    add(2);
#pragma unroll 2
    for (int v = kept * kStep + first; v < vocabulary; v += kStep) {
      float z[1][kVector];
      LoadFloats(logits + v, z[0]);
      found.Add(z, v);
    }
    WaitForCopies<0>();
    add(3);

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
    if (threadIdx.x == 0) {
      const float loss = log_sum - of_target + z_loss * log_sum * log_sum;
      call.loss[token] = scale == 0.0f ? 0.0f : scale * loss;
    }
    int largest_at = -1;
    if (found.at % kStep == first) {  // this thread has it
      for (largest_at = found.at; logits[largest_at] != found.largest;) ++largest_at;
    }
    // x[i] * factor is of_sum * exp(z - log_sum).
    const auto finish = [&](float (&x)[kVector], float factor, int v) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[i] *= factor;
        if (v + i == target) x[i] -= scale;
        if (v + i == largest_at) x[i] += scale * l2_wrap * found.largest;
      }
      StoreRounded<T>(call.dlogits, token * vocabulary + v, x);
    };
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const float factor = of_sum * Exp(bases[group], log_sum);
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        const int step = group * kGroupSteps + i;
        if (!has(step)) continue;
        float x[kVector];
        LoadFloats(own + step * kStep, x);
        copy(token + gridDim.x, step);
        finish(x, factor, step * kStep + first);
      }
      CommitCopies();
    }
    for (int v = kept * kStep + first; v < vocabulary; v += kStep) {
      float x[kVector];
      LoadFloats(logits + v, x);
#pragma unroll
      for (float& z : x) z = Exp(z, log_sum);
      finish(x, of_sum, v);
    }
  }
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const CrossEntropyCall& call, const Device& device) {
  if (call.tokens * call.vocabulary == 0) return cudaSuccess;
  const int64_t most = (device.shared_memory - 2 * kWarps * sizeof(Statistics)) / sizeof(float);
  const int64_t steps = (call.vocabulary + kStep - 1) / kStep;
  const int kept =
      static_cast<int>(std::min({most / kStep, steps, int64_t{kGroups * kGroupSteps}}));
  const int64_t blocks = std::min<int64_t>(call.tokens, device.multiprocessors);
  const auto launch = [&](auto zero) {
    return Launch(CrossEntropyKernel<decltype(zero)>, blocks, kThreads,
                  kept * kStep * sizeof(float), stream, call, kept);
  };
  switch (call.dtype) {
    case Dtype::kBF16: return launch(__nv_bfloat16());
    case Dtype::kF16: return launch(__half());
    default: return launch(0.0f);
  }
}

}  // namespace rwkv_jax::cuda
