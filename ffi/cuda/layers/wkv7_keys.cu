// The operands k, a and b of WKV7 from the projections of RWKV-7, and what read_out.cu needs of r and key,
// after the formulas of RWKV-LM:
//
//   alpha = sigmoid(a0 + rate)                     the in-context learning rate
//   u = k * k_k,  kk = u / max(|u|, eps)           for each head
//   key = k (1 + (alpha - 1) k_a),  a = -kk,  b = kk * alpha
//   bonus = sum over the head of r * key * r_k
#include "layers/formulas.cuh"
#include "layers/heads.cuh"

namespace rwkv_jax::cuda {
namespace {

__device__ KeyParameters LoadParameters(const HeadRun& run, const Wkv7KeysCall& call) {
  KeyParameters parameters;
  run.LoadParameter(call.parameters, 0, call.kParameters, parameters.k_k);
  run.LoadParameter(call.parameters, 1, call.kParameters, parameters.k_a);
  run.LoadParameter(call.parameters, 2, call.kParameters, parameters.a0);
  return parameters;
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads) void ForwardKernel(Wkv7KeysForwardCall call,
                                                              int run_length) {
  const HeadRun run(call, run_length);
  const KeyParameters parameters = LoadParameters(run, call);
  HeadVector r_k = {};
  run.LoadParameter(call.parameters, 3, call.kParameters, r_k);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    const auto r = run.Load<T>(call.r, t);
    HeadVector key, a, b;
    const float inverse = InverseLength<kLanes>(k, parameters.k_k);
    MakeKeys(k, rate, parameters.k_k, parameters.k_a, parameters.a0, inverse, key, a, b);
    if (call.inverse == nullptr) {
      run.Store<T>(call.key, t, key);
      run.Store<T>(call.a, t, a);
      run.Store<T>(call.b, t, b);
    } else {
      run.StoreOfHead<kLanes>(call.inverse, t, inverse);
    }
    run.StoreOfHead<kLanes>(call.bonus, t, Bonus<kLanes>(r, key, r_k));
  }
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(Wkv7KeysBackwardCall call,
                                                                  int run_length) {
  const HeadRun run(call, run_length);
  const KeyParameters parameters = LoadParameters(run, call);
  KeyParameterGradients sums;
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    const auto da = run.Load<T>(call.da, t), db = run.Load<T>(call.db, t);
    HeadVector alpha, dkey, dk, drate;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) alpha[c] = Sigmoid(parameters.a0[c] + rate[c]);
    {
      const auto r = run.Load<T>(call.r, t), dpassed = run.Load<T>(call.dpassed, t);
      const auto dkey_given = run.Load<T>(call.dkey, t);
      const float dbonus = run.LoadOfHead<kLanes>(call.dbonus, t);
      HeadVector r_k = {}, dr;
      run.LoadParameter(call.parameters, 3, call.kParameters, r_k);
      AddBonusGradients(k, r, alpha, parameters.k_a, r_k, dkey_given, dbonus, dpassed, dkey, dr,
                        sums.r_k);
      run.Store<T>(call.dr, t, dr);
    }
    AddKeyGradients<kLanes>(k, alpha, dkey, da, db, parameters,
                            InverseLength<kLanes>(k, parameters.k_k), dk, drate, sums);
    run.Store<T>(call.dk, t, dk);
    run.Store<T>(call.drate, t, drate);
  }
  run.StorePartial(call.partials, 0, call.kParameters, sums.k_k);
  run.StorePartial(call.partials, 1, call.kParameters, sums.k_a);
  run.StorePartial(call.partials, 2, call.kParameters, sums.a0);
  run.StorePartial(call.partials, 3, call.kParameters, sums.r_k);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const Wkv7KeysForwardCall& call, const Device& device) {
  return LaunchOverHeads(stream, call, ForwardRun(call, device), [](auto zero, auto lanes) {
    return ForwardKernel<decltype(zero), lanes()>;
  });
}

cudaError_t Run(cudaStream_t stream, const Wkv7KeysBackwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kRun, [](auto zero, auto lanes) {
    return BackwardKernel<decltype(zero), lanes()>;
  });
}

}  // namespace rwkv_jax::cuda
