// Layer normalisation, token shift and mixing of RWKV, after the formulas of RWKV-LM:
//
//   n[t] = (x[t] - mean) / sqrt(variance + eps) * weight + bias
//   mixed_i[t] = n[t] + (n[t - 1] - n[t]) * mix_i
//
// Backward, with the sums d[t] = sum_i dmixed_i[t] mix_i that token t gives to what stands before it:
//
//   dn[t] = sum_i dmixed_i[t] (1 - mix_i) + d[t + 1]
//   dx[t] = (g - mean(g) - z mean(g z)) / sqrt(variance + eps) + dpassed[t],  g = dn[t] * weight,
//   where z is n[t] before weight and bias
//   dmix_i = sum_t dmixed_i[t] (n[t - 1] - n[t])
//
// A block has a run of tokens of a row and all of their channels, N consecutive ones a thread. Forward it
// keeps n[t - 1] in registers. Backward it goes from the last token to the first, keeps d[t + 1], and has
// the moments of token t - 1 summed together with the sums over g: one barrier for each token. What the
// warps post alternates between two buffers, so that nothing is overwritten before all have read it.
#include "layers/kernels.h"
#include "layers/vectors.cuh"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int kMaxThreads = 512, kMaxWarps = kMaxThreads / 32;

struct Moments {
  float mean, scale;  // scale is 1 / sqrt(variance + eps)
};

// The channels of a thread, and sums over the channels of the block.
template <typename T, int N>
class Channels {
 public:
  explicit __device__ Channels(int width)
      : first(threadIdx.x * N),
        active(first < width),
        width_(width),
        warps_((width + 32 * N - 1) / (32 * N)),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {}

  int first;
  bool active;

  // The sum of the channels of a warp, and of the squares of their differences from its mean.
  __device__ float2 OfWarp(const float (&x)[N]) const {
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += x[i];
    sum = SumOverLanes<32>(active ? sum : 0.0f);
    const float mean = sum / Count(warp_);
#pragma unroll
    for (int i = 0; i < N; ++i) squares += (x[i] - mean) * (x[i] - mean);
    return {sum, SumOverLanes<32>(active ? squares : 0.0f)};
  }

  // The mean over all channels of two numbers that each thread has.
  __device__ float2 SumsOfWarp(float a, float b) const {
    return {SumOverLanes<32>(active ? a : 0.0f), SumOverLanes<32>(active ? b : 0.0f)};
  }

  // The moments of all channels from what the warps have posted.
  __device__ Moments Merged(const float2* posted) const {
    const bool mine = lane_ < warps_;
    const float2 part = mine ? posted[lane_] : float2{0.0f, 0.0f};
    const float count = mine ? Count(lane_) : 1.0f;
    const float mean = SumOverLanes<32>(part.x) / width_;
    const float distance = part.x / count - mean;
    const float squares = SumOverLanes<32>(mine ? part.y + count * distance * distance : 0.0f);
    return {mean, 1.0f / sqrtf(squares / width_ + kLayerNormEps)};
  }

  __device__ float2 MeansOf(const float2* posted) const {
    const float2 part = lane_ < warps_ ? posted[lane_] : float2{0.0f, 0.0f};
    return {SumOverLanes<32>(part.x) / width_, SumOverLanes<32>(part.y) / width_};
  }

  __device__ void Post(float2* posted, float2 part) const {
    if (lane_ == 0) posted[warp_] = part;
  }

 private:
  // How many channels a warp has.
  __device__ float Count(int warp) const {
    const int rest = width_ - warp * 32 * N;
    return rest < 32 * N ? rest : 32 * N;
  }

  int width_, warps_, lane_, warp_;
};

__device__ Origin OriginOf(const NormShiftMixCall& call, int64_t token, int64_t place) {
  if (call.origin == nullptr) return place == 0 ? Origin::kState : Origin::kToken;
  const Origin origin = static_cast<Origin>(call.origin[token]);
  return place == 0 && origin == Origin::kToken ? Origin::kNothing : origin;
}

template <typename T, int N, int kMixes>
__global__ __launch_bounds__(kMaxThreads) void ForwardKernel(NormShiftMixForwardCall call) {
  __shared__ float2 posted[2][kMaxWarps];
  const Channels<T, N> channels(call.width);
  const int64_t row = blockIdx.y, first = row * call.tokens, begin = blockIdx.x * kRun;
  const int64_t end = begin + kRun < call.tokens ? begin + kRun : call.tokens;
  float weight[N] = {}, bias[N] = {}, mix[kMixes][N] = {}, before[N] = {};
  if (channels.active) {
    LoadFloats(call.weight + row * call.width + channels.first, weight);
    LoadFloats(call.bias + row * call.width + channels.first, bias);
#pragma unroll
    for (int i = 0; i < kMixes; ++i)
      LoadFloats(call.mix + (row * kMixes + i) * call.width + channels.first, mix[i]);
  }

  int turn = 0;
  const auto normalised = [&](int64_t t, float (&n)[N]) {
    Packed<T, N> packed = {};
    if (channels.active)
      packed = LoadPacked<N, T>(call.x, (first + t) * call.width + channels.first);
#pragma unroll
    for (int c = 0; c < N; ++c) n[c] = packed[c];
    channels.Post(posted[turn], channels.OfWarp(n));
    __syncthreads();
    const Moments moments = channels.Merged(posted[turn]);
    turn ^= 1;
#pragma unroll
    for (int c = 0; c < N; ++c) n[c] = (n[c] - moments.mean) * moments.scale * weight[c] + bias[c];
  };

  if (OriginOf(call, first + begin, begin) == Origin::kToken) normalised(begin - 1, before);
#pragma unroll 2
  for (int64_t t = begin; t < end; ++t) {
    float n[N];
    normalised(t, n);
    const Origin origin = OriginOf(call, first + t, t);
    if (origin == Origin::kState && channels.active) {
      const auto state = LoadPacked<N, T>(call.before, row * call.width + channels.first);
#pragma unroll
      for (int c = 0; c < N; ++c) before[c] = state[c];
    }
    const bool nothing = origin == Origin::kNothing;
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      float mixed[N];
#pragma unroll
      for (int c = 0; c < N; ++c)
        mixed[c] = n[c] + ((nothing ? 0.0f : before[c]) - n[c]) * mix[i][c];
      if (channels.active)
        StoreRounded<T>(call.mixed[i], (first + t) * call.width + channels.first, mixed);
    }
#pragma unroll
    for (int c = 0; c < N; ++c) before[c] = n[c];
  }
}

template <typename T, int N, int kMixes>
__global__ __launch_bounds__(kMaxThreads) void BackwardKernel(NormShiftMixBackwardCall call) {
  __shared__ float2 posted[2][2][kMaxWarps];
  const Channels<T, N> channels(call.width);
  const int64_t row = blockIdx.y, first = row * call.tokens, begin = blockIdx.x * kRun;
  const int64_t end = begin + kRun < call.tokens ? begin + kRun : call.tokens;
  float weight[N] = {}, bias[N] = {}, mix[kMixes][N] = {};
  if (channels.active) {
    LoadFloats(call.weight + row * call.width + channels.first, weight);
    LoadFloats(call.bias + row * call.width + channels.first, bias);
#pragma unroll
    for (int i = 0; i < kMixes; ++i)
      LoadFloats(call.mix + (row * kMixes + i) * call.width + channels.first, mix[i]);
  }
  const auto at = [&](int64_t t) { return (first + t) * call.width + channels.first; };
  const auto load = [&](const void* array, int64_t t) {
    return channels.active ? LoadPacked<N, T>(array, at(t)) : Packed<T, N>{};
  };

  float dmix[kMixes][N] = {}, dweight[N] = {}, dbias[N] = {};
  float later[N] = {};  // d[t + 1]
  if (end < call.tokens && OriginOf(call, first + end, end) == Origin::kToken) {
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      const auto dmixed = load(call.dmixed[i], end);
#pragma unroll
      for (int c = 0; c < N; ++c) later[c] += dmixed[c] * mix[i][c];
    }
  }

  float z[N];  // token t, normalised
  float scale;
  {
    const auto x = load(call.x, end - 1);
#pragma unroll
    for (int c = 0; c < N; ++c) z[c] = x[c];
    channels.Post(posted[0][0], channels.OfWarp(z));
    __syncthreads();
    const Moments moments = channels.Merged(posted[0][0]);
    scale = moments.scale;
#pragma unroll
    for (int c = 0; c < N; ++c) z[c] = (z[c] - moments.mean) * scale;
  }

  int turn = 1;
  for (int64_t t = end - 1; t >= begin; --t) {
    const Origin origin = OriginOf(call, first + t, t);
    const bool reads = t > begin || origin == Origin::kToken;  // token t - 1
    Packed<T, N> dmixed[kMixes];
#pragma unroll
    for (int i = 0; i < kMixes; ++i) dmixed[i] = load(call.dmixed[i], t);
    const auto dpassed = load(call.dpassed, t);
    float earlier[N] = {};
    if (reads) {
      const auto x = load(call.x, t - 1);
#pragma unroll
      for (int c = 0; c < N; ++c) earlier[c] = x[c];
    }

    float dn[N], d[N] = {}, sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int c = 0; c < N; ++c) dn[c] = later[c];
#pragma unroll
    for (int i = 0; i < kMixes; ++i)
#pragma unroll
      for (int c = 0; c < N; ++c) {
        const float part = dmixed[i][c] * mix[i][c];
        dn[c] += dmixed[i][c] - part, d[c] += part;
      }
#pragma unroll
    for (int c = 0; c < N; ++c)
      sum += dn[c] * weight[c], product += dn[c] * weight[c] * z[c];

    channels.Post(posted[turn][0], channels.OfWarp(earlier));
    channels.Post(posted[turn][1], channels.SumsOfWarp(sum, product));
    __syncthreads();
    const Moments moments = channels.Merged(posted[turn][0]);
    const float2 means = channels.MeansOf(posted[turn][1]);
    turn ^= 1;

    float dx[N];
#pragma unroll
    for (int c = 0; c < N; ++c) {
      dx[c] = (dn[c] * weight[c] - means.x - z[c] * means.y) * scale + dpassed[c];
      dweight[c] += dn[c] * z[c], dbias[c] += dn[c];
      earlier[c] = (earlier[c] - moments.mean) * moments.scale;
    }
    if (channels.active) StoreRounded<T>(call.dx, at(t), dx);

    Packed<T, N> state = {};
    if (origin == Origin::kState && channels.active) {
      state = LoadPacked<N, T>(call.before, row * call.width + channels.first);
      StoreRounded<T>(call.dbefore, row * call.width + channels.first, d);
    }
#pragma unroll
    for (int c = 0; c < N; ++c) {
      float before = earlier[c] * weight[c] + bias[c];
      if (origin != Origin::kToken) before = origin == Origin::kState ? state[c] : 0.0f;
      const float difference = before - (z[c] * weight[c] + bias[c]);
#pragma unroll
      for (int i = 0; i < kMixes; ++i) dmix[i][c] += dmixed[i][c] * difference;
      later[c] = origin == Origin::kToken ? d[c] : 0.0f;
      z[c] = earlier[c];
    }
    scale = moments.scale;
  }

  if (!channels.active) return;
  float* const partials =
      call.partials + (row * gridDim.x + blockIdx.x) * (kMixes + 2) * call.width + channels.first;
  StoreFloats(partials, dweight);
  StoreFloats(partials + call.width, dbias);
#pragma unroll
  for (int i = 0; i < kMixes; ++i) StoreFloats(partials + (i + 2) * call.width, dmix[i]);
}

// Calls fn(T(), integral_constant<N>(), integral_constant<kMixes>()) with N channels for each thread.
template <typename Fn>
cudaError_t ForKernel(const NormShiftMixCall& call, Fn&& fn) {
  const auto for_mixes = [&](auto zero, auto channels) {
    switch (call.mixes) {
      case 1: return fn(zero, channels, std::integral_constant<int, 1>());
      case 6: return fn(zero, channels, std::integral_constant<int, 6>());
      default: return cudaErrorInvalidValue;
    }
  };
  const auto for_channels = [&](auto zero) {
    if (call.width <= 4 * kMaxThreads)
      return for_mixes(zero, std::integral_constant<int, 4>());
    if (call.width <= 8 * kMaxThreads)
      return for_mixes(zero, std::integral_constant<int, 8>());
    return for_mixes(zero, std::integral_constant<int, 16>());
  };
  switch (call.dtype) {
    case Dtype::kBF16: return for_channels(__nv_bfloat16());
    case Dtype::kF16: return for_channels(__half());
    default: return for_channels(0.0f);
  }
}

template <typename Call>
dim3 BlocksOf(const Call& call) {
  return dim3(static_cast<unsigned>(Runs(call.tokens)), static_cast<unsigned>(call.rows));
}

template <int N>
int ThreadsOf(const NormShiftMixCall& call) {
  return static_cast<int>((call.width + 32 * N - 1) / (32 * N) * 32);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call) {
  if (call.rows * call.tokens == 0) return cudaSuccess;
  return ForKernel(call, [&](auto zero, auto channels, auto mixes) {
    return Launch(ForwardKernel<decltype(zero), channels(), mixes()>, BlocksOf(call),
                  ThreadsOf<channels()>(call), 0, stream, call);
  });
}

cudaError_t Run(cudaStream_t stream, const NormShiftMixBackwardCall& call) {
  const int64_t bytes = call.rows * call.width * (call.dtype == Dtype::kF32 ? 4 : 2);
  const cudaError_t error = cudaMemsetAsync(call.dbefore, 0, bytes, stream);
  if (error != cudaSuccess || call.rows * call.tokens == 0) return error;
  return ForKernel(call, [&](auto zero, auto channels, auto mixes) {
    return Launch(BackwardKernel<decltype(zero), channels(), mixes()>, BlocksOf(call),
                  ThreadsOf<channels()>(call), 0, stream, call);
  });
}

}  // namespace rwkv_jax::cuda
