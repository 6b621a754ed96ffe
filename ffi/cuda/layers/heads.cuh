// How the layer functions of heads go through tokens: a thread has eight consecutive channels of one
// head and goes through the tokens of a run.
#pragma once

#include "layers/formulas.cuh"
#include "layers/kernels.h"
#include "layers/token_run.cuh"
#include "kernel_choice.cuh"
#include "launch.cuh"

namespace rwkv_jax::cuda {

constexpr int kHeadThreads = 256;

// The channels and the tokens of a thread, whose block has one of all runs of all rows. Lanes without channels
// take part in sums over a head, which are sums of zeros.
class HeadRun : public TokenRun {
 public:
  __device__ HeadRun(const HeadTokens& call, int run_length)
      : TokenRun(call.tokens, run_length),
        channel((static_cast<int64_t>(blockIdx.y) * kHeadThreads + threadIdx.x) * kHeadVector),
        active(channel < call.width),
        width_(call.width),
        first_(row * call.tokens) {}

  int64_t channel;
  bool active;

  // Calls fn(t, load(t)) for each token, while the loads of the next one are under way.
  template <typename LoadFn, typename Fn>
  __device__ void ForTokens(const LoadFn& load, Fn&& fn) const {
    auto next = load(begin);
    for (int64_t t = begin; t < end; ++t) {
      const auto loaded = next;
      if (t + 1 < end) next = load(t + 1);
      fn(t, loaded);
    }
  }

  template <typename T>
  __device__ Packed<T, kHeadVector> Load(const void* array, int64_t t) const {
    return active ? LoadPacked<kHeadVector, T>(array, At(t)) : Packed<T, kHeadVector>{};
  }
  template <typename T>
  __device__ void Store(void* array, int64_t t, const HeadVector& x) const {
    if (active) StoreRounded<T>(array, At(t), x);
  }
  // The number that an array [B, T, H] has for this head of kLanes lanes.
  template <int kLanes>
  __device__ float LoadOfHead(const float* array, int64_t t) const {
    return active ? array[At(t) / (kLanes * kHeadVector)] : 0.0f;
  }
  // All lanes of a head have the same x.
  template <int kLanes>
  __device__ void StoreOfHead(float* array, int64_t t, float x) const {
    if (active && threadIdx.x % kLanes == 0) array[At(t) / (kLanes * kHeadVector)] = x;
  }
  // Reads the parameter number i of `count`.
  __device__ void LoadParameter(const float* parameters, int i, int64_t count,
                                HeadVector& x) const {
    if (active) LoadFloats(parameters + (row * count + i) * width_ + channel, x);
  }
  // Writes the partial sum number i of `count`.
  __device__ void StorePartial(float* partials, int i, int64_t count, const HeadVector& x) const {
    if (active) StoreFloats(partials + (int64_t{blockIdx.x} * count + i) * width_ + channel, x);
  }

 private:
  __device__ int64_t At(int64_t t) const { return (first_ + t) * width_ + channel; }

  int64_t width_, first_;
};

// The tokens of a run in a forward pass, whose blocks leave no sums: fewer where otherwise too few threads
// would load from memory at a time.
inline int ForwardRun(const HeadTokens& call, const Device& device) {
  constexpr int64_t kMostTokens = 16, kLeastTokens = 2, kEnoughThreads = 1024;
  const int64_t vectors = call.rows * call.tokens * (call.width / kHeadVector);
  int64_t run = kMostTokens;
  while (run > kLeastTokens && vectors < kEnoughThreads * device.multiprocessors * run) run /= 2;
  return static_cast<int>(run);
}

// Launches fn(T(), integral_constant<lanes of a head>()), a kernel, over runs of `run_length` tokens.
template <typename Call, typename Fn>
cudaError_t LaunchOverHeads(cudaStream_t stream, const Call& call, int run_length, Fn&& fn) {
  if (call.rows * call.tokens * call.width == 0) return cudaSuccess;
  const int64_t vectors = call.width / kHeadVector;
  const Grid blocks(call.rows * Runs(call.tokens, run_length),
                    (vectors + kHeadThreads - 1) / kHeadThreads);
  const int threads =
      vectors < kHeadThreads ? static_cast<int>((vectors + 31) / 32 * 32) : kHeadThreads;
  return ForAllTypes<16, 32, 64, 128, 256>(
      call.dtype, call.head_size, [&](auto zero, auto head_size) {
        constexpr int kLanes = head_size() / kHeadVector;
        return Launch(fn(zero, std::integral_constant<int, kLanes>()), blocks, threads, 0, stream,
                      call, run_length);
      });
}

}  // namespace rwkv_jax::cuda
