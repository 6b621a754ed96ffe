// Layer normalisation, token shift and mixing of RWKV, after the formulas of RWKV-LM:
//
//   z[t] = (x[t] - mean) / sqrt(variance + eps),  n[t] = z[t] * weight + bias
//   mixed_i[t] = n[t] + (n[t - 1] - n[t]) * mix_i
//
// Backward, with the sums d[t] = sum_i dmixed_i[t] mix_i that token t gives to what stands before it:
//
//   dn[t] = sum_i dmixed_i[t] (1 - mix_i) + d[t + 1],  g = dn[t] * weight
//   dx[t] = (g - mean(g) - z mean(g z)) / sqrt(variance + eps) + dpassed[t]
//   dmix_i = sum_t dmixed_i[t] (n[t - 1] - n[t])
//
// A block has a run of tokens, and a thread eight channels of all of them, so that it loads and adds up
// parameters once a run. Tokens are copied to shared memory ahead of their use.
#include <algorithm>

#include "launch.cuh"
#include "layers/kernels.h"
#include "layers/vectors.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kVector = 8, kMostThreads = static_cast<int>(kMaxLayerWidth) / kVector;
constexpr int kMostWarps = kMostThreads / 32;

// What stands before token t of a row; `token` counts the tokens of all rows.
__device__ Origin OriginOf(const NormShiftMixCall& call, int64_t token, int64_t t) {
  if (call.origin == nullptr) return t == 0 ? Origin::kState : Origin::kToken;
  const Origin origin = static_cast<Origin>(call.origin[token]);
  return t == 0 && origin == Origin::kToken ? Origin::kNothing : origin;
}

// The forward pass takes so many tokens at once, or fewer where shared memory has no room for twice as
// many.
constexpr int kTokens = 8;

// Few tokens have shorter runs in the forward pass, whose blocks leave no sums, so that they fill the
// device. A run costs one token more, the one before it.
int ForwardRun(const NormShiftMixCall& call, const Device& device) {
  int64_t run = kRun;
  while (run > kTokens && call.rows * call.tokens < 2 * device.multiprocessors * run) run /= 2;
  return static_cast<int>(run);
}

// The mean and 1 / sqrt(variance + eps) of a token in shared memory, for a warp.
template <typename T>
__device__ float2 FindMoments(const T* token, int width) {
  const int lane_channel = static_cast<int>(threadIdx.x % 32) * kVector;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
  for (int channel = lane_channel; channel < width; channel += 32 * kVector) {
    const auto x = LoadPacked<kVector, T>(token, channel);
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum += x[c];
  }
  const float share = 1.0f / width, mean = SumOverLanes<32>(sum) * share;
#pragma unroll 4
  for (int channel = lane_channel; channel < width; channel += 32 * kVector) {
    const auto x = LoadPacked<kVector, T>(token, channel);
#pragma unroll
    for (int c = 0; c < kVector; ++c) squares += (x[c] - mean) * (x[c] - mean);
  }
  return {mean, rsqrtf(SumOverLanes<32>(squares) * share + kLayerNormEps)};
}

// While a block works on `together` tokens, the next ones are copied: first each warp finds the moments
// of some tokens, then each thread mixes its channels of all of them.
template <typename T, int kMixes>
__global__ __launch_bounds__(kMostThreads) void ForwardKernel(NormShiftMixForwardCall call, int run,
                                                              int together) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ float2 moments[kTokens];
  const int64_t row = blockIdx.y, begin = int64_t{blockIdx.x} * run;
  const int64_t first = row * call.tokens + begin;
  const int count = static_cast<int>(call.tokens - begin < run ? call.tokens - begin : run);
  const int width = static_cast<int>(call.width), channel = threadIdx.x * kVector;
  const int warp = threadIdx.x / 32, warps = (width + 32 * kVector - 1) / (32 * kVector);
  const bool active = channel < width;
  const auto at = [&](int t) { return (first + t) * width + channel; };  // token t of the run
  const auto copy = [&](T* to, int t) {
    for (int j = 0; active && j < together && t + j < count; ++j)
      CopyPacked<kVector>(to + j * width + channel, static_cast<const T*>(call.x) + at(t + j));
  };

  // The token before the run, if the first one needs it, is one more to normalise.
  const bool goes_on = begin > 0 && OriginOf(call, first, begin) == Origin::kToken;
  T *tokens = reinterpret_cast<T*>(shared), *next = tokens + together * width;
  copy(tokens, -goes_on);
  float weight[kVector] = {}, bias[kVector] = {}, mix[kMixes][kVector] = {}, earlier[kVector] = {};
  if (active) {
    const float* const parameters = call.parameters + row * (kMixes + 2) * width + channel;
    LoadFloats(parameters, weight);
    LoadFloats(parameters + width, bias);
#pragma unroll
    for (int i = 0; i < kMixes; ++i) LoadFloats(parameters + (i + 2) * width, mix[i]);
  }
  for (int t = -goes_on; t < count; t += together) {
    const int here = count - t < together ? count - t : together;
    WaitForCopies<0>();
    __syncthreads();
    copy(next, t + together);
    for (int j = warp; j < here; j += warps) {
      const float2 found = FindMoments(tokens + j * width, width);
      if (threadIdx.x % 32 != 0) continue;
      moments[j] = found;
      if (t + j >= 0) reinterpret_cast<float2*>(call.moments)[first + t + j] = found;
    }
    __syncthreads();
    for (int j = 0; active && j < here; ++j) {
      const auto x = LoadPacked<kVector, T>(tokens, j * width + channel);
      const float2 of_x = moments[j];
      float n[kVector];
#pragma unroll
      for (int c = 0; c < kVector; ++c) n[c] = (x[c] - of_x.x) * of_x.y * weight[c] + bias[c];
      if (t + j >= 0) {
        const Origin origin = OriginOf(call, first + t + j, begin + t + j);
        if (origin != Origin::kToken) {
          Packed<T, kVector> state = {};
          if (origin == Origin::kState)
            state = LoadPacked<kVector, T>(call.before, row * width + channel);
#pragma unroll
          for (int c = 0; c < kVector; ++c) earlier[c] = state[c];
        }
#pragma unroll
        for (int i = 0; i < kMixes; ++i) {
          float mixed[kVector];
#pragma unroll
          for (int c = 0; c < kVector; ++c) mixed[c] = n[c] + (earlier[c] - n[c]) * mix[i][c];
          StoreRounded<T>(call.mixed[i], at(t + j), mixed);
        }
      }
#pragma unroll
      for (int c = 0; c < kVector; ++c) earlier[c] = n[c];
    }
    T* const done = tokens;
    tokens = next, next = done;
  }
}

// Adds up kCount numbers of each thread of a block. posted[warp][number] is written before the barrier
// and must not be overwritten before the next one.
template <int kCount>
class BlockSums {
 public:
  using Posted = float[kMostWarps][kCount];

  // Each step halves the numbers of a lane: a lane keeps one half and gives the other away.
  __device__ static void Post(Posted& posted, float (&x)[kCount]) {
    const int lane = threadIdx.x % 32;
    int mask = 16;
#pragma unroll
    for (int count = kCount / 2; count > 0; count /= 2, mask /= 2)
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const bool upper = lane & mask;
        const float kept = upper ? x[i + count] : x[i], given = upper ? x[i] : x[i + count];
        x[i] = kept + __shfl_xor_sync(0xffffffffu, given, mask);
      }
    x[0] = SumOverLanes<kShare>(x[0]);
    if (lane % kShare == 0) posted[threadIdx.x / 32][lane / kShare] = x[0];
  }

  __device__ static void Collect(const Posted& posted, int warps, float (&sums)[kCount]) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int warp = lane % kShare; warp < warps; warp += kShare) sum += posted[warp][lane / kShare];
    sum = SumOverLanes<kShare>(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = __shfl_sync(0xffffffffu, sum, i * kShare);
  }

 private:
  static constexpr int kShare = 32 / kCount;  // the lanes that share a number
};

// The arrays that a token's gradient needs: those of the mixed results, the one of x, and the token
// before.
template <int kMixes>
constexpr int kArrays = kMixes + 2;

// Goes from the last token of the run to the first. A thread copies its channels of kAhead tokens ahead;
// with kAhead = 0 it reads global memory.
template <typename T, int kMixes, int kAhead>
__global__ __launch_bounds__(kMostThreads) void BackwardKernel(NormShiftMixBackwardCall call) {
  using Sums = BlockSums<2>;
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ typename Sums::Posted posted[2];
  __shared__ float2 moments[kRun + 1];  // from the token before the run on
  __shared__ int8_t origins[kRun];
  const int64_t row = blockIdx.y, begin = blockIdx.x * kRun, first = row * call.tokens + begin;
  const int count = static_cast<int>(call.tokens - begin < kRun ? call.tokens - begin : kRun);
  const int width = static_cast<int>(call.width), channel = threadIdx.x * kVector;
  const int warps = (width + 32 * kVector - 1) / (32 * kVector);
  const bool active = channel < width;
  const float share = 1.0f / width;

  for (int t = threadIdx.x; t <= count; t += 32 * warps) {
    moments[t] = {};
    if (t > 0 || begin > 0)
      moments[t] = reinterpret_cast<const float2*>(call.moments)[first + t - 1];
    if (t < count) origins[t] = static_cast<int8_t>(OriginOf(call, first + t, begin + t));
  }
  // Array i of token t, where the last one is x of the token before it. The first token of a row reads
  // itself in its place, and does not use it.
  const auto array = [&](int i, int64_t at, bool is_first) {
    if (i == kMixes + 1) return static_cast<const T*>(call.x) + (is_first ? at : at - width);
    return static_cast<const T*>(i < kMixes ? call.dmixed[i] : call.dpassed) + at;
  };
  // A thread reads what it has written or copied itself. The two halves of its channels of a mix are
  // apart, so that neighbouring threads use neighbouring banks.
  float* const mixes = reinterpret_cast<float*>(shared) + channel / 2;
  const auto load_mix = [&](int i, float (&mix)[kVector]) {
    for (int half = 0; half < 2; ++half) {
      const float4 four = *reinterpret_cast<const float4*>(mixes + (2 * i + half) * (width / 2));
      mix[4 * half] = four.x, mix[4 * half + 1] = four.y;
      mix[4 * half + 2] = four.z, mix[4 * half + 3] = four.w;
    }
  };
  T* const ahead = reinterpret_cast<T*>(shared + kMixes * width * sizeof(float)) + channel;
  const auto stage = [&](int t) {
    return ahead + t % (kAhead > 0 ? kAhead : 1) * (kArrays<kMixes> * width);
  };
  const auto copy = [&](int t, int64_t at) {
    if (t >= 0 && active) {
      T* const to = stage(t);
#pragma unroll
      for (int i = 0; i < kArrays<kMixes>; ++i)
        CopyPacked<kVector>(to + i * width, array(i, at, t == 0 && begin == 0));
    }
    CommitCopies();
  };
  int64_t at = (first + count - 1) * width + channel;  // where token t is
  float z[kVector] = {};                               // of token t
  float dmix[kMixes][kVector] = {}, dweight[kVector] = {}, dbias[kVector] = {};
  float later[kVector] = {};  // d[t + 1]
#pragma unroll
  for (int j = 0; j < kAhead; ++j) copy(count - 1 - j, at - j * width);
  __syncthreads();
  const int64_t end = begin + count;
  const bool goes_on = end < call.tokens && OriginOf(call, first + count, end) == Origin::kToken;
  const auto parameter = [&](int i) {
    return call.parameters + (row * (kMixes + 2) + i) * width + channel;
  };
  if (active) {
    const auto x = LoadPacked<kVector, T>(call.x, at);
#pragma unroll
    for (int c = 0; c < kVector; ++c) z[c] = (x[c] - moments[count].x) * moments[count].y;
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      float mix[kVector];
      LoadFloats(parameter(i + 2), mix);
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float4*>(mixes + (2 * i + half) * (width / 2)) = {
            mix[4 * half], mix[4 * half + 1], mix[4 * half + 2], mix[4 * half + 3]};
      if (!goes_on) continue;
      const auto dmixed = LoadPacked<kVector, T>(call.dmixed[i], at + width);
#pragma unroll
      for (int c = 0; c < kVector; ++c) later[c] += dmixed[c] * mix[c];
    }
  }

  const float* const weights = parameter(0);
  for (int t = count - 1; t >= 0; --t, at -= width) {
    if constexpr (kAhead > 0) WaitForCopies<kAhead - 1>();
    const T* const copied = stage(t);
    const auto load = [&](int i) {
      if constexpr (kAhead > 0) return LoadPacked<kVector, T>(copied, i * width);
      return LoadPacked<kVector, T>(array(i, at, t == 0 && begin == 0), 0);
    };
    const Origin origin = static_cast<Origin>(origins[t]);
    const float2 of_before = moments[t];
    float g[kVector], sums[2] = {};  // g is dn, and then dn * weight
    if (active) {
      float weight[kVector], difference[kVector], d[kVector] = {};
      LoadFloats(weights, weight);
      const auto before = load(kMixes + 1);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        difference[c] = ((before[c] - of_before.x) * of_before.y - z[c]) * weight[c];
        g[c] = later[c];
      }
      if (origin != Origin::kToken) {
        Packed<T, kVector> state = {};
        float bias[kVector];
        LoadFloats(parameter(1), bias);
        if (origin == Origin::kState)
          state = LoadPacked<kVector, T>(call.before, row * width + channel);
#pragma unroll
        for (int c = 0; c < kVector; ++c) difference[c] = state[c] - (z[c] * weight[c] + bias[c]);
      }
#pragma unroll
      for (int i = 0; i < kMixes; ++i) {
        const auto dmixed = load(i);
        float mix[kVector];
        load_mix(i, mix);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          g[c] += dmixed[c];
          d[c] += dmixed[c] * mix[c];
          dmix[i][c] += dmixed[c] * difference[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        g[c] -= d[c];
        dweight[c] += g[c] * z[c], dbias[c] += g[c];
        g[c] *= weight[c];
        sums[0] += g[c], sums[1] += g[c] * z[c];
        later[c] = d[c];
      }
      if (origin != Origin::kToken) {
        if (origin == Origin::kState) StoreRounded<T>(call.dbefore, row * width + channel, d);
#pragma unroll
        for (float& x : later) x = 0.0f;
      }
    }
    Sums::Post(posted[t % 2], sums);
    __syncthreads();
    Sums::Collect(posted[t % 2], warps, sums);
    if (active) {
      const float scale = moments[t + 1].y;
      const float mean = sums[0] * share * scale, product = sums[1] * share * scale;
      const auto dpassed = load(kMixes), before = load(kMixes + 1);
      float dx[kVector];
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        dx[c] = g[c] * scale + (dpassed[c] - mean - z[c] * product);
        z[c] = (before[c] - of_before.x) * of_before.y;
      }
      StoreRounded<T>(call.dx, at, dx);
    }
    if constexpr (kAhead > 0) copy(t - kAhead, at - kAhead * width);
  }

  if (!active) return;
  float* const partials =
      call.partials + (row * gridDim.x + blockIdx.x) * (kMixes + 2) * width + channel;
  StoreFloats(partials, dweight);
  StoreFloats(partials + width, dbias);
#pragma unroll
  for (int i = 0; i < kMixes; ++i) StoreFloats(partials + (i + 2) * width, dmix[i]);
}

// Calls fn(T(), integral_constant<kMixes>()).
template <typename Fn>
cudaError_t ForTypesAndMixes(const NormShiftMixCall& call, Fn&& fn) {
  const auto for_mixes = [&](auto zero) {
    switch (call.mixes) {
      case 1: return fn(zero, std::integral_constant<int, 1>());
      case 6: return fn(zero, std::integral_constant<int, 6>());
      default: return cudaErrorInvalidValue;
    }
  };
  switch (call.dtype) {
    case Dtype::kBF16: return for_mixes(__nv_bfloat16());
    case Dtype::kF16: return for_mixes(__half());
    default: return for_mixes(0.0f);
  }
}

dim3 Blocks(const NormShiftMixCall& call, int64_t run) {
  return dim3(static_cast<unsigned>((call.tokens + run - 1) / run),
              static_cast<unsigned>(call.rows));
}

int Threads(const NormShiftMixCall& call) {
  return static_cast<int>((call.width + 32 * kVector - 1) / (32 * kVector)) * 32;
}

// The dynamic and the static shared memory of the backward kernel.
template <typename T, int kMixes>
int64_t BackwardBytes(int64_t width, int ahead) {
  return width * (kMixes * sizeof(float) + ahead * kArrays<kMixes> * sizeof(T));
}
constexpr int64_t kBackwardStatic =
    2 * sizeof(BlockSums<2>::Posted) + (kRun + 1) * sizeof(float2) + kRun;

}  // namespace

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call, const Device& device) {
  if (call.rows * call.tokens == 0) return cudaSuccess;
  return ForTypesAndMixes(call, [&](auto zero, auto mixes) {
    // Room for two blocks on a multiprocessor.
    const int64_t token = call.width * sizeof(zero);
    const int64_t together = std::clamp<int64_t>(device.shared_memory / 4 / token, 1, kTokens);
    const int run = ForwardRun(call, device);
    return Launch(ForwardKernel<decltype(zero), mixes()>, Blocks(call, run), Threads(call),
                  2 * together * token, stream, call, run, static_cast<int>(together));
  });
}

cudaError_t Run(cudaStream_t stream, const NormShiftMixBackwardCall& call, const Device& device) {
  // Without `origin` the first token of each row writes all of dbefore.
  if (call.origin != nullptr || call.tokens == 0) {
    const int64_t bytes = call.rows * call.width * (call.dtype == Dtype::kF32 ? 4 : 2);
    const cudaError_t error = cudaMemsetAsync(call.dbefore, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  if (call.rows * call.tokens == 0) return cudaSuccess;
  return ForTypesAndMixes(call, [&](auto zero, auto mixes) {
    using T = decltype(zero);
    constexpr int kMixes = mixes(), kAhead = kMixes > 1 ? 2 : 4;
    const auto launch = [&](auto ahead) {
      const int64_t bytes = BackwardBytes<T, kMixes>(call.width, ahead());
      return Launch(BackwardKernel<T, kMixes, ahead()>, Blocks(call, kRun), Threads(call), bytes,
                    stream, call);
    };
    if (BackwardBytes<T, kMixes>(call.width, kAhead) <= device.shared_memory - kBackwardStatic)
      return launch(std::integral_constant<int, kAhead>());
    return launch(std::integral_constant<int, 0>());
  });
}

}  // namespace rwkv_jax::cuda
