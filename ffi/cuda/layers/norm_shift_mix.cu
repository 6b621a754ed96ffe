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
// Forward, a warp has all channels of some tokens of a row, so that no thread waits for another warp.
// Backward, the sums over tokens need a thread for each few channels: a block has a run of tokens and goes
// from the last to the first, some tokens at once for each barrier.
#include "layers/kernels.h"
#include "layers/vectors.cuh"
#include "launch.cuh"

namespace rwkv_jax::cuda {
namespace {

// What stands before token t of a row; `token` counts the tokens of all rows.
__device__ Origin OriginOf(const NormShiftMixCall& call, int64_t token, int64_t t) {
  if (call.origin == nullptr) return t == 0 ? Origin::kState : Origin::kToken;
  const Origin origin = static_cast<Origin>(call.origin[token]);
  return t == 0 && origin == Origin::kToken ? Origin::kNothing : origin;
}

constexpr int kForwardWarps = 8, kVector = 8;

// The tokens of a warp: fewer where the parameters take more registers.
template <int kMixes>
constexpr int kForwardTokensOf = kMixes > 1 ? 4 : 8;

// The mean and 1 / sqrt(variance + eps) of a token, whose channels the lanes of a warp share.
template <typename T>
__device__ float2 FindMoments(const void* array, int64_t at, int width) {
  const int lane_channel = static_cast<int>(threadIdx.x % 32) * kVector;
  float sum = 0.0f, squares = 0.0f;
#pragma unroll 8
  for (int channel = lane_channel; channel < width; channel += 32 * kVector) {
    const auto x = LoadPacked<kVector, T>(array, at + channel);
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum += x[c];
  }
  const float share = 1.0f / width, mean = SumOverLanes<32>(sum) * share;
#pragma unroll 4
  for (int channel = lane_channel; channel < width; channel += 32 * kVector) {
    const auto x = LoadPacked<kVector, T>(array, at + channel);
#pragma unroll
    for (int c = 0; c < kVector; ++c) squares += (x[c] - mean) * (x[c] - mean);
  }
  return {mean, rsqrtf(SumOverLanes<32>(squares) * share + kLayerNormEps)};
}

// A warp finds the moments of its tokens. Then it takes the channels vector by vector, each for all of its
// tokens, so that it loads the parameters once; the tokens come from the cache this time.
template <typename T, int kMixes>
__global__ __launch_bounds__(32 * kForwardWarps,
                             2) void ForwardKernel(NormShiftMixForwardCall call) {
  constexpr int kForwardTokens = kForwardTokensOf<kMixes>;
  const int64_t row = blockIdx.y, first = row * call.tokens;
  const int width = static_cast<int>(call.width);
  const int64_t begin =
      (static_cast<int64_t>(blockIdx.x) * kForwardWarps + threadIdx.x / 32) * kForwardTokens;
  if (begin >= call.tokens) return;
  const int count =
      call.tokens - begin < kForwardTokens ? static_cast<int>(call.tokens - begin) : kForwardTokens;
  const int64_t start = (first + begin) * width;
  const Origin origin = OriginOf(call, first + begin, begin);

  float2 moments[kForwardTokens], before = {};  // of the tokens, and of the one before them
  if (origin == Origin::kToken) before = FindMoments<T>(call.x, start - width, width);
#pragma unroll
  for (int j = 0; j < kForwardTokens; ++j) {
    if (j >= count) continue;
    moments[j] = FindMoments<T>(call.x, start + j * width, width);
    if (threadIdx.x % 32 == 0)
      reinterpret_cast<float2*>(call.moments)[first + begin + j] = moments[j];
  }

  for (int channel = threadIdx.x % 32 * kVector; channel < width; channel += 32 * kVector) {
    float weight[kVector], bias[kVector], mix[kMixes][kVector], earlier[kVector];
    LoadFloats(call.weight + row * width + channel, weight);
    LoadFloats(call.bias + row * width + channel, bias);
#pragma unroll
    for (int i = 0; i < kMixes; ++i)
      LoadFloats(call.mix + (row * kMixes + i) * width + channel, mix[i]);
    Packed<T, kVector> x[kForwardTokens], previous = {};
    if (origin == Origin::kToken)
      previous = LoadPacked<kVector, T>(call.x, start - width + channel);
#pragma unroll
    for (int j = 0; j < kForwardTokens; ++j)
      if (j < count) x[j] = LoadPacked<kVector, T>(call.x, start + j * width + channel);
#pragma unroll
    for (int c = 0; c < kVector; ++c)
      earlier[c] = (previous[c] - before.x) * before.y * weight[c] + bias[c];
#pragma unroll
    for (int j = 0; j < kForwardTokens; ++j) {
      if (j >= count) continue;
      const Origin from = j == 0 ? origin : OriginOf(call, first + begin + j, begin + j);
      if (from != Origin::kToken) {
        Packed<T, kVector> state = {};
        if (from == Origin::kState)
          state = LoadPacked<kVector, T>(call.before, row * width + channel);
#pragma unroll
        for (int c = 0; c < kVector; ++c) earlier[c] = state[c];
      }
      float n[kVector];
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        n[c] = (x[j][c] - moments[j].x) * moments[j].y * weight[c] + bias[c];
        earlier[c] -= n[c];
      }
#pragma unroll
      for (int i = 0; i < kMixes; ++i) {
        float mixed[kVector];
#pragma unroll
        for (int c = 0; c < kVector; ++c) mixed[c] = n[c] + earlier[c] * mix[i][c];
        StoreRounded<T>(call.mixed[i], start + j * width + channel, mixed);
      }
#pragma unroll
      for (int c = 0; c < kVector; ++c) earlier[c] = n[c];
    }
  }
}

constexpr int kBackwardThreads = 512, kBackwardWarps = kBackwardThreads / 32;

// Adds up kCount numbers of each thread of a block. posted[warp][number] is written before the barrier
// and must not be overwritten before the next one.
template <int kCount>
class BlockSums {
 public:
  using Posted = float[kBackwardWarps][kCount];

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

// A thread has N consecutive channels and takes kTokens tokens for each barrier.
template <typename T, int N, int kTokens, int kMixes>
__global__ __launch_bounds__(kBackwardThreads) void BackwardKernel(NormShiftMixBackwardCall call) {
  using Sums = BlockSums<2 * kTokens>;
  __shared__ typename Sums::Posted posted[2];
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  const int64_t row = blockIdx.y, first = row * call.tokens, begin = blockIdx.x * kRun;
  const int64_t end = begin + kRun < call.tokens ? begin + kRun : call.tokens;
  const int width = static_cast<int>(call.width), channel = threadIdx.x * N;
  const int warps = (width + 32 * N - 1) / (32 * N);
  const bool active = channel < width;
  const float share = 1.0f / width;

  // A thread reads what it has written itself.
  float* const mixes = reinterpret_cast<float*>(shared) + channel;
  if (active) {
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      float mix[N];
      LoadFloats(call.mix + (row * kMixes + i) * width + channel, mix);
      StoreFloats(mixes + i * width, mix);
    }
  }
  const auto load_mix = [&](int i, float (&mix)[N]) {
#pragma unroll
    for (int c = 0; c < N; ++c) mix[c] = 0.0f;
    if (active) LoadFloats(mixes + i * width, mix);
  };
  const auto at = [&](int64_t t) { return (first + t) * width + channel; };
  const auto load = [&](const void* array, int64_t t) {
    return active ? LoadPacked<N, T>(array, at(t)) : Packed<T, N>{};
  };

  float dmix[kMixes][N] = {}, dweight[N] = {}, dbias[N] = {};
  float later[N] = {};  // d[t + 1]
  if (end < call.tokens && OriginOf(call, first + end, end) == Origin::kToken) {
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      const auto dmixed = load(call.dmixed[i], end);
      float mix[N];
      load_mix(i, mix);
#pragma unroll
      for (int c = 0; c < N; ++c) later[c] += dmixed[c] * mix[c];
    }
  }

  Packed<T, N> x = load(call.x, end - 1);  // of token t
  int turn = 0;
  for (int64_t t = end - 1; t >= begin; t -= kTokens) {
    const int count = t - begin + 1 < kTokens ? static_cast<int>(t - begin + 1) : kTokens;
    // All loads are under way before the first one is waited for.
    Packed<T, N> dmixed[kTokens][kMixes], dpassed[kTokens], xs[kTokens + 1];
    float2 moments[kTokens + 1];
    Origin origins[kTokens];
    xs[0] = x, moments[0] = reinterpret_cast<const float2*>(call.moments)[first + t];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      xs[j + 1] = {}, moments[j + 1] = {};
      if (j >= count) continue;
      const int64_t token = t - j;
      origins[j] = OriginOf(call, first + token, token);
#pragma unroll
      for (int i = 0; i < kMixes; ++i) dmixed[j][i] = load(call.dmixed[i], token);
      dpassed[j] = load(call.dpassed, token);
      if (token > begin || origins[j] == Origin::kToken) {
        xs[j + 1] = load(call.x, token - 1);
        moments[j + 1] = reinterpret_cast<const float2*>(call.moments)[first + token - 1];
      }
    }
    float weight[N] = {}, bias[N] = {};
    if (active) {
      LoadFloats(call.weight + row * width + channel, weight);
      LoadFloats(call.bias + row * width + channel, bias);
    }

    float g[kTokens][N], sums[2 * kTokens];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      sums[2 * j] = sums[2 * j + 1] = 0.0f;
      if (j >= count) continue;
      Packed<T, N> state = {};
      if (origins[j] == Origin::kState && active)
        state = LoadPacked<N, T>(call.before, row * width + channel);
      float z[N], difference[N], d[N] = {};
#pragma unroll
      for (int c = 0; c < N; ++c) {
        z[c] = (xs[j][c] - moments[j].x) * moments[j].y;
        float before = (xs[j + 1][c] - moments[j + 1].x) * moments[j + 1].y * weight[c] + bias[c];
        if (origins[j] != Origin::kToken) before = state[c];
        difference[c] = before - (z[c] * weight[c] + bias[c]);
        g[j][c] = later[c];
      }
#pragma unroll
      for (int i = 0; i < kMixes; ++i) {
        float mix[N];
        load_mix(i, mix);
#pragma unroll
        for (int c = 0; c < N; ++c) {
          g[j][c] += dmixed[j][i][c];
          d[c] += dmixed[j][i][c] * mix[c];
          dmix[i][c] += dmixed[j][i][c] * difference[c];
        }
      }
#pragma unroll
      for (int c = 0; c < N; ++c) {
        g[j][c] -= d[c];  // now dn
        dweight[c] += g[j][c] * z[c], dbias[c] += g[j][c];
        g[j][c] *= weight[c];
        sums[2 * j] += g[j][c], sums[2 * j + 1] += g[j][c] * z[c];
        later[c] = origins[j] == Origin::kToken ? d[c] : 0.0f;
      }
      if (origins[j] == Origin::kState && active)
        StoreRounded<T>(call.dbefore, row * width + channel, d);
    }
    x = xs[kTokens];  // not used where there are fewer tokens: then the run is at its end

    Sums::Post(posted[turn], sums);
    __syncthreads();
    Sums::Collect(posted[turn], warps, sums);
    turn ^= 1;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (j >= count) continue;
      const float mean = sums[2 * j] * share, product = sums[2 * j + 1] * share;
      float dx[N];
#pragma unroll
      for (int c = 0; c < N; ++c) {
        const float z = (xs[j][c] - moments[j].x) * moments[j].y;
        dx[c] = (g[j][c] - mean - z * product) * moments[j].y + dpassed[j][c];
      }
      if (active) StoreRounded<T>(call.dx, at(t - j), dx);
    }
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

dim3 Blocks(const NormShiftMixCall& call, int64_t tokens) {
  return dim3(static_cast<unsigned>((call.tokens + tokens - 1) / tokens),
              static_cast<unsigned>(call.rows));
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call) {
  if (call.rows * call.tokens == 0) return cudaSuccess;
  return ForTypesAndMixes(call, [&](auto zero, auto mixes) {
    return Launch(ForwardKernel<decltype(zero), mixes()>,
                  Blocks(call, kForwardWarps * kForwardTokensOf<mixes()>), 32 * kForwardWarps, 0,
                  stream, call);
  });
}

cudaError_t Run(cudaStream_t stream, const NormShiftMixBackwardCall& call) {
  const int64_t bytes = call.rows * call.width * (call.dtype == Dtype::kF32 ? 4 : 2);
  const cudaError_t error = cudaMemsetAsync(call.dbefore, 0, bytes, stream);
  if (error != cudaSuccess || call.rows * call.tokens == 0) return error;
  return ForTypesAndMixes(call, [&](auto zero, auto mixes) {
    const auto launch = [&](auto channels, auto tokens) {
      constexpr int N = channels();
      const int threads = static_cast<int>((call.width + 32 * N - 1) / (32 * N) * 32);
      return Launch(BackwardKernel<decltype(zero), N, tokens(), mixes()>, Blocks(call, kRun),
                    threads, call.mixes * call.width * sizeof(float), stream, call);
    };
    // As many tokens as leave registers for their loads. With one mix, threads of eight channels leave
    // room for two blocks of 2048 channels, one of which computes while the other one loads.
    if constexpr (mixes() == 1)
      return launch(std::integral_constant<int, 8>(), std::integral_constant<int, 2>());
    else if (call.width <= 4 * kBackwardThreads)
      return launch(std::integral_constant<int, 4>(), std::integral_constant<int, 2>());
    else
      return launch(std::integral_constant<int, 8>(), std::integral_constant<int, 1>());
  });
}

}  // namespace rwkv_jax::cuda
