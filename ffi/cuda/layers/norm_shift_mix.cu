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
// A block has a run of tokens, and a thread four or eight channels of all of them, so that it loads and
// adds up parameters once a run. Tokens are copied to shared memory ahead of their use.
#include <algorithm>

#include "launch.cuh"
#include "layers/kernels.h"
#include "layers/token_run.cuh"
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
  const TokenRun own(call.tokens, run);
  const int64_t row = own.row, begin = own.begin, first = row * call.tokens + begin;
  const int count = static_cast<int>(own.end - begin);
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
#pragma unroll
    for (int i = 0; i < kMostWarps; i += kShare) {
      const int warp = i + lane % kShare;
      if (warp < warps) sum += posted[warp][lane / kShare];
    }
    sum = SumOverLanes<kShare>(sum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = __shfl_sync(0xffffffffu, sum, i * kShare);
  }

 private:
  static constexpr int kShare = 32 / kCount;  // the lanes that share a number
};

// A thread of the backward pass has four channels and holds their mixes in registers; or it has eight, whose
// mixes are in shared memory, so that a block has more channels. It has two tokens at once if there are
// registers for them, and then waits for the other threads half as often.
template <typename T, int kMixes, int kChannels>
struct Backward {
  static constexpr bool kHeld = kChannels == 4;
  static constexpr int kTogether = kHeld || kMixes == 1 ? 2 : 1;
  // What the gradient of a token needs: those of the mixed results and of x, and the token before.
  static constexpr int kArrays = kMixes + 2;
  // How many times kTogether tokens are copied ahead of their use.
  static constexpr int kAhead = kHeld && kMixes == 1 ? 4 : 2;
  // A thread copies 16 bytes or more of an array.
  static constexpr int kCopied = kChannels * sizeof(T) < 16 ? 16 / sizeof(T) : kChannels;
  using Sums = BlockSums<2 * kTogether>;

  static constexpr int64_t kStaticBytes =
      2 * sizeof(typename Sums::Posted) + (kRun + 1) * sizeof(float2) + kRun;
  // The dynamic shared memory.
  static int64_t Bytes(int64_t width, bool copies) {
    return width * ((kHeld ? 0 : kMixes * sizeof(float)) +
                    (copies ? kAhead * kTogether * kArrays * sizeof(T) : 0));
  }
  static bool Suits(int64_t width, const Device& device) {
    return width <= kMostThreads * kChannels &&
           Bytes(width, true) <= device.shared_memory - kStaticBytes;
  }
};

// Goes from the last token of the run to the first, kTogether of them at once. If not kCopies, threads read
// global memory.
template <typename T, int kMixes, int kChannels, bool kCopies>
__global__ __launch_bounds__(kMostThreads) void BackwardKernel(NormShiftMixBackwardCall call) {
  using B = Backward<T, kMixes, kChannels>;
  using Sums = typename B::Sums;
  constexpr int kTogether = B::kTogether, kArrays = B::kArrays, kAhead = B::kAhead;
  constexpr int kCopied = B::kCopied, kSharers = kCopied / kChannels;
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ typename Sums::Posted posted[2];
  __shared__ float2 moments[kRun + 1];  // from the token before the run on
  __shared__ int8_t origins[kRun];
  const TokenRun own(call.tokens, kRun);
  const int64_t row = own.row, begin = own.begin, first = row * call.tokens + begin;
  const int count = static_cast<int>(own.end - begin);
  const int width = static_cast<int>(call.width), channel = threadIdx.x * kChannels;
  const int warps = (width + 32 * kChannels - 1) / (32 * kChannels);
  const bool active = channel < width;
  const float share = 1.0f / width;

  for (int t = threadIdx.x; t <= count; t += 32 * warps) {
    moments[t] = {};
    if (t > 0 || begin > 0)
      moments[t] = reinterpret_cast<const float2*>(call.moments)[first + t - 1];
    if (t < count) origins[t] = static_cast<int8_t>(OriginOf(call, first + t, begin + t));
  }
  // Array i from an element of token t on, where the last one is x of the token before it. The first
  // token of a row reads itself in its place, and does not use it.
  const auto array = [&](int i, int64_t at, bool is_first) {
    if (i == kMixes + 1) return static_cast<const T*>(call.x) + (is_first ? at : at - width);
    return static_cast<const T*>(i < kMixes ? call.dmixed[i] : call.dpassed) + at;
  };
  // A thread reads the mixes that it has written itself. The two halves of its channels are apart in
  // shared memory, so that neighbouring threads use neighbouring banks.
  float held[kMixes][kChannels], held_weight[kChannels];
  float* const mixes = reinterpret_cast<float*>(shared) + channel / 2;
  const auto keep_mix = [&](int i, const float (&mix)[kChannels]) {
    if constexpr (B::kHeld) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) held[i][c] = mix[c];
    } else {
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<float4*>(mixes + (2 * i + half) * (width / 2)) = {
            mix[4 * half], mix[4 * half + 1], mix[4 * half + 2], mix[4 * half + 3]};
    }
  };
  const auto load_mix = [&](int i, float (&mix)[kChannels]) {
    if constexpr (B::kHeld) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) mix[c] = held[i][c];
    } else {
      for (int half = 0; half < 2; ++half) {
        const float4 four = *reinterpret_cast<const float4*>(mixes + (2 * i + half) * (width / 2));
        mix[4 * half] = four.x, mix[4 * half + 1] = four.y;
        mix[4 * half + 2] = four.z, mix[4 * half + 3] = four.w;
      }
    }
  };
  // Where two threads share what one of them copies, each copies one of two tokens.
  T* const ahead = reinterpret_cast<T*>(shared + (B::kHeld ? 0 : kMixes * width * sizeof(float)));
  const auto stage = [&](int last) {
    return ahead + last / kTogether % kAhead * (kTogether * kArrays * width);
  };
  const auto copy = [&](int last, int64_t at) {
    const int to_first = channel % kCopied;
#pragma unroll
    for (int turn = 0; turn < kTogether; turn += kSharers) {
      const int j = turn + threadIdx.x % kSharers;
      if (last - j < 0 || !active) break;
      T* const to = stage(last) + j * (kArrays * width) + channel - to_first;
#pragma unroll
      for (int i = 0; i < kArrays; ++i)
        CopyPacked<kCopied>(to + i * width,
                            array(i, at - j * width - to_first, last - j == 0 && begin == 0));
    }
    CommitCopies();
  };
  int64_t at = (first + count - 1) * width + channel;  // where token `last` is
  float z[kTogether][kChannels] = {};                  // of token last - j
  float dmix[kMixes][kChannels] = {}, dweight[kChannels] = {}, dbias[kChannels] = {};
  float later[kChannels] = {};  // d of the token after
#pragma unroll
  for (int j = 0; kCopies && j < kAhead * kTogether; j += kTogether)
    copy(count - 1 - j, at - j * width);
  __syncthreads();
  const auto parameter = [&](int i) {
    return call.parameters + (row * (kMixes + 2) + i) * width + channel;
  };
  const int64_t end = begin + count;
  const bool goes_on = end < call.tokens && OriginOf(call, first + count, end) == Origin::kToken;
  if (active) {
    if constexpr (B::kHeld) LoadFloats(parameter(0), held_weight);
    const auto x = LoadPacked<kChannels, T>(call.x, at);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) z[0][c] = (x[c] - moments[count].x) * moments[count].y;
#pragma unroll
    for (int i = 0; i < kMixes; ++i) {
      float mix[kChannels];
      LoadFloats(parameter(i + 2), mix);
      keep_mix(i, mix);
      if (!goes_on) continue;
      const auto dmixed = LoadPacked<kChannels, T>(call.dmixed[i], at + width);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) later[c] += dmixed[c] * mix[c];
    }
  }

  for (int last = count - 1; last >= 0; last -= kTogether, at -= kTogether * width) {
    if constexpr (kCopies) {
      WaitForCopies<kAhead - 1>();
      if constexpr (kSharers > 1) __syncwarp();
    }
    const T* const copied = stage(last) + channel;
    const auto load = [&](int j, int i) {
      if constexpr (kCopies) return LoadPacked<kChannels, T>(copied, (j * kArrays + i) * width);
      return LoadPacked<kChannels, T>(array(i, at - j * width, last - j == 0 && begin == 0), 0);
    };
    // g is dn, and then dn * weight.
    float g[kTogether][kChannels], sums[2 * kTogether] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int t = last - j;
      if (t < 0 || !active) break;
      const Origin origin = static_cast<Origin>(origins[t]);
      const float2 of_before = moments[t];
      float weight[kChannels], difference[kChannels], d[kChannels] = {};
      if constexpr (B::kHeld) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) weight[c] = held_weight[c];
      } else {
        LoadFloats(parameter(0), weight);
      }
      const auto before = load(j, kMixes + 1);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const float z_before = (before[c] - of_before.x) * of_before.y;
        difference[c] = (z_before - z[j][c]) * weight[c];
        g[j][c] = later[c];
        if (j + 1 < kTogether) z[j + 1][c] = z_before;
      }
      if (origin != Origin::kToken) {
        Packed<T, kChannels> state = {};
        float bias[kChannels];
        LoadFloats(parameter(1), bias);
        if (origin == Origin::kState)
          state = LoadPacked<kChannels, T>(call.before, row * width + channel);
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
          difference[c] = state[c] - (z[j][c] * weight[c] + bias[c]);
      }
#pragma unroll
      for (int i = 0; i < kMixes; ++i) {
        const auto dmixed = load(j, i);
        float mix[kChannels];
        load_mix(i, mix);
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          g[j][c] += dmixed[c];
          d[c] += dmixed[c] * mix[c];
          dmix[i][c] += dmixed[c] * difference[c];
        }
      }
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        g[j][c] -= d[c];
        dweight[c] += g[j][c] * z[j][c], dbias[c] += g[j][c];
        g[j][c] *= weight[c];
        sums[2 * j] += g[j][c], sums[2 * j + 1] += g[j][c] * z[j][c];
        later[c] = d[c];
      }
      if (origin != Origin::kToken) {
        if (origin == Origin::kState) StoreRounded<T>(call.dbefore, row * width + channel, d);
#pragma unroll
        for (float& x : later) x = 0.0f;
      }
    }
    Sums::Post(posted[last / kTogether % 2], sums);
    __syncthreads();
    Sums::Collect(posted[last / kTogether % 2], warps, sums);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int t = last - j;
      if (t < 0 || !active) break;
      const float scale = moments[t + 1].y;
      const float mean = sums[2 * j] * share * scale, product = sums[2 * j + 1] * share * scale;
      const auto dpassed = load(j, kMixes);
      float dx[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        dx[c] = g[j][c] * scale + (dpassed[c] - mean - z[j][c] * product);
      StoreRounded<T>(call.dx, at - j * width, dx);
      if (j + 1 < kTogether) continue;
      const auto before = load(j, kMixes + 1);
#pragma unroll
      for (int c = 0; c < kChannels; ++c) z[0][c] = (before[c] - moments[t].x) * moments[t].y;
    }
    if constexpr (kCopies) {
      if constexpr (kSharers > 1) __syncwarp();
      copy(last - kAhead * kTogether, at - kAhead * kTogether * width);
    }
  }

  if (!active) return;
  float* const partials = call.partials + int64_t{blockIdx.x} * (kMixes + 2) * width + channel;
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

Grid Blocks(const NormShiftMixCall& call, int64_t run) {
  return call.rows * Runs(call.tokens, run);
}

int Threads(const NormShiftMixCall& call, int channels) {
  return static_cast<int>((call.width + 32 * channels - 1) / (32 * channels)) * 32;
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const NormShiftMixForwardCall& call, const Device& device) {
  if (call.rows * call.tokens == 0) return cudaSuccess;
  return ForTypesAndMixes(call, [&](auto zero, auto mixes) {
    // Room for two blocks on a multiprocessor.
    const int64_t token = call.width * sizeof(zero);
    const int64_t together = std::clamp<int64_t>(device.shared_memory / 4 / token, 1, kTokens);
    const int run = ForwardRun(call, device);
    return Launch(ForwardKernel<decltype(zero), mixes()>, Blocks(call, run), Threads(call, kVector),
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
    constexpr int kMixes = mixes();
    const auto launch = [&](auto channels, auto copies) {
      const int64_t bytes = Backward<T, kMixes, channels()>::Bytes(call.width, copies());
      return Launch(BackwardKernel<T, kMixes, channels(), copies()>, Blocks(call, kRun),
                    Threads(call, channels()), bytes, stream, call);
    };
    constexpr std::integral_constant<int, 4> four;
    constexpr std::integral_constant<int, 8> eight;
    if (Backward<T, kMixes, 4>::Suits(call.width, device)) return launch(four, std::true_type());
    if (Backward<T, kMixes, 8>::Suits(call.width, device)) return launch(eight, std::true_type());
    return launch(eight, std::false_type());
  });
}

}  // namespace rwkv_jax::cuda
