// The operands k, a and b of WKV7 from the projections of RWKV-7, after the formulas of RWKV-LM:
//
//   alpha = sigmoid(a0 + rate)                     the in-context learning rate
//   u = k * k_k,  kk = u / max(|u|, eps)           for each head
//   key = k (1 + (alpha - 1) k_a),  a = -kk,  b = kk * alpha
#include "layers/formulas.cuh"
#include "layers/heads.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int64_t kForwardTokens = 16;

struct KeyParameters {
  HeadVector k_k = {}, k_a = {}, a0 = {};

  __device__ KeyParameters(const HeadRun& run, const Wkv7KeysCall& call) {
    run.LoadParameter(call.parameters, 0, call.kParameters, k_k);
    run.LoadParameter(call.parameters, 1, call.kParameters, k_a);
    run.LoadParameter(call.parameters, 2, call.kParameters, a0);
  }
};

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads) void ForwardKernel(Wkv7KeysForwardCall call) {
  const HeadRun run(call, kForwardTokens);
  const KeyParameters parameters(run, call);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    HeadVector key, a, b;
    MakeKeys<kLanes>(k, rate, parameters.k_k, parameters.k_a, parameters.a0, key, a, b);
    run.Store<T>(call.key, t, key);
    run.Store<T>(call.a, t, a);
    run.Store<T>(call.b, t, b);
  }
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(Wkv7KeysBackwardCall call) {
  const HeadRun run(call, kRun);
  const KeyParameters parameters(run, call);
  HeadVector dk_k = {}, dk_a = {}, da0 = {};
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    const auto da = run.Load<T>(call.da, t), db = run.Load<T>(call.db, t);
    const auto dkey0 = run.Load<T>(call.dkey[0], t), dkey1 = run.Load<T>(call.dkey[1], t);
    const float2 inverse = InverseLength<kLanes>(k, parameters.k_k);
    HeadVector alpha, dkk;
    float product = 0.0f;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      alpha[c] = Sigmoid(parameters.a0[c] + rate[c]);
      dkk[c] = db[c] * alpha[c] - da[c];
      product += dkk[c] * k[c] * parameters.k_k[c];
    }
    product = SumOverLanes<kLanes>(product) * inverse.x * inverse.x * inverse.y;
    HeadVector dk, drate;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const float u = k[c] * parameters.k_k[c], dkey = dkey0[c] + dkey1[c];
      const float du = (dkk[c] - u * product) * inverse.x;
      const float dalpha = db[c] * u * inverse.x + dkey * k[c] * parameters.k_a[c];
      dk[c] = dkey * (1.0f + (alpha[c] - 1.0f) * parameters.k_a[c]) + du * parameters.k_k[c];
      drate[c] = dalpha * alpha[c] * (1.0f - alpha[c]);
      dk_k[c] += du * k[c];
      dk_a[c] += dkey * k[c] * (alpha[c] - 1.0f);
      da0[c] += drate[c];
    }
    run.Store<T>(call.dk, t, dk);
    run.Store<T>(call.drate, t, drate);
  }
  run.StorePartial(call.partials, 0, call.kParameters, dk_k);
  run.StorePartial(call.partials, 1, call.kParameters, dk_a);
  run.StorePartial(call.partials, 2, call.kParameters, da0);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv7KeysForwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kForwardTokens, [](auto zero, auto lanes) {
    return ForwardKernel<decltype(zero), lanes()>;
  });
}

cudaError_t Run(cudaStream_t stream, const Wkv7KeysBackwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kRun, [](auto zero, auto lanes) {
    return BackwardKernel<decltype(zero), lanes()>;
  });
}

}  // namespace rwkv_jax::cuda
