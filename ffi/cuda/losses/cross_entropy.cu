// The cross entropy of a token from its logits z, with the largest logit z_m and the target y:
//
//   log_sum = log sum_v exp(z_v)
//   loss = scale (log_sum - z_y + z_loss log_sum^2)
//   dz = scale ((1 + 2 z_loss log_sum) exp(z - log_sum) - onehot(y) + l2_wrap z_m onehot(m))
//
// The term of l2_wrap is RWKV-LM's L2Wrap; it is in the gradient alone.
//
// A block has a token. It reads the logits once, with a running maximum and sum, and keeps as many of
// them in shared memory as fit; the others it reads again, from the L2 cache.
#include <algorithm>
#include <cmath>

#include "launch.cuh"
#include "layers/vectors.cuh"
#include "losses/kernels.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kVector = 8;
constexpr int kStep = kThreads * kVector;  // the logits that a block reads at once
constexpr float kLog2E = 1.4426950408889634f;

// The largest of some logits, the first place where it is, and the sum of exp(z - largest).
struct Statistics {
  float largest, sum;
  int at;

  __device__ void Add(const Statistics& other) {
    const bool first = other.largest < largest || (other.largest == largest && at < other.at);
    const Statistics &more = first ? *this : other, &less = first ? other : *this;
    const float rest = less.sum * Exp2((less.largest - more.largest) * kLog2E);
    *this = {more.largest, more.sum + (less.sum == 0.0f ? 0.0f : rest), more.at};
  }

  __device__ Statistics OfLane(int mask) const {
    return {__shfl_xor_sync(0xffffffffu, largest, mask), __shfl_xor_sync(0xffffffffu, sum, mask),
            __shfl_xor_sync(0xffffffffu, at, mask)};
  }
};

template <typename T>
__global__ __launch_bounds__(kThreads) void CrossEntropyKernel(CrossEntropyCall call, int kept) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ Statistics of_warps[kWarps];
  float* const own = reinterpret_cast<float*>(shared);
  const int64_t token = blockIdx.x;
  const int vocabulary = static_cast<int>(call.vocabulary);
  const float* const logits = call.logits + token * vocabulary;
  const int first = threadIdx.x * kVector;

  Statistics found = {-INFINITY, 0.0f, vocabulary};
#pragma unroll 4
  for (int v = first; v < vocabulary; v += kStep) {
    float z[kVector];
    LoadFloats(logits + v, z);
    if (v < kept) StoreFloats(own + v, z);
    Statistics here = {z[0], 0.0f, v};
#pragma unroll
    for (int i = 1; i < kVector; ++i)
      if (z[i] > here.largest) here.largest = z[i], here.at = v + i;
#pragma unroll
    for (int i = 0; i < kVector; ++i) here.sum += Exp2((z[i] - here.largest) * kLog2E);
    found.Add(here);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) found.Add(found.OfLane(mask));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  found = of_warps[threadIdx.x % 32];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) found.Add(found.OfLane(mask));

  const float scale = call.scale[token], z_loss = call.coefficients[0];
  const float log_sum = found.largest + logf(found.sum);
  const int target = call.targets[token];
  if (threadIdx.x == 0) {
    const bool here = target >= 0 && target < vocabulary;
    const float loss = log_sum - (here ? logits[target] : NAN) + z_loss * log_sum * log_sum;
    call.loss[token] = scale == 0.0f ? 0.0f : scale * loss;
  }
  const float of_sum = scale * (1.0f + 2.0f * z_loss * log_sum);
  const float of_largest = scale * call.coefficients[1] * found.largest;
#pragma unroll 4
  for (int v = first; v < vocabulary; v += kStep) {
    float z[kVector];
    LoadFloats(v < kept ? own + v : logits + v, z);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      z[i] = of_sum * Exp2((z[i] - log_sum) * kLog2E);
      if (v + i == target) z[i] -= scale;
      if (v + i == found.at) z[i] += of_largest;
    }
    StoreRounded<T>(call.dlogits, token * vocabulary + v, z);
  }
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const CrossEntropyCall& call, const Device& device) {
  if (call.tokens * call.vocabulary == 0) return cudaSuccess;
  const int64_t most = (device.shared_memory - kWarps * sizeof(Statistics)) / sizeof(float);
  const int64_t rounded = (call.vocabulary + kStep - 1) / kStep;
  const int kept = static_cast<int>(std::min<int64_t>(most / kStep, rounded)) * kStep;
  const auto launch = [&](auto zero) {
    return Launch(CrossEntropyKernel<decltype(zero)>, dim3(static_cast<unsigned>(call.tokens)),
                  kThreads, kept * sizeof(float), stream, call, kept);
  };
  switch (call.dtype) {
    case Dtype::kBF16: return launch(__nv_bfloat16());
    case Dtype::kF16: return launch(__half());
    default: return launch(0.0f);
  }
}

}  // namespace rwkv_jax::cuda
