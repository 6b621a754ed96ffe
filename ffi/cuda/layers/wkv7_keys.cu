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
  HeadVector r_k = {};
  run.LoadParameter(call.parameters, 3, call.kParameters, r_k);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    const auto r = run.Load<T>(call.r, t);
    HeadVector key, a, b;
    MakeKeys<kLanes>(k, rate, parameters.k_k, parameters.k_a, parameters.a0, key, a, b);
    run.Store<T>(call.key, t, key);
    run.Store<T>(call.a, t, a);
    run.Store<T>(call.b, t, b);
    run.StoreOfHead<kLanes>(call.bonus, t, Bonus<kLanes>(r, key, r_k));
  }
}

// The gradients that the bonus gives: stores dr, adds to dr_k, and completes the cotangent of the key. It
// loads r_k for each token, because registers do not hold all parameters and sums.
template <typename T, int kLanes, typename Vector>
__device__ void AddBonusGradients(const HeadRun& run, const Wkv7KeysBackwardCall& call, int64_t t,
                                  const Vector& k, const HeadVector& alpha,
                                  const KeyParameters& parameters, HeadVector& dkey,
                                  HeadVector& dr_k) {
  const auto r = run.Load<T>(call.r, t), dpassed = run.Load<T>(call.dpassed, t);
  const auto dkey_given = run.Load<T>(call.dkey, t);
  const float dbonus = run.LoadOfHead<kLanes>(call.dbonus, t);
  HeadVector r_k = {}, dr;
  run.LoadParameter(call.parameters, 3, call.kParameters, r_k);
#pragma unroll
  for (int c = 0; c < kHeadVector; ++c) {
    const float slope = dbonus * k[c] * (1.0f + (alpha[c] - 1.0f) * parameters.k_a[c]);
    dr[c] = dpassed[c] + slope * r_k[c];
    dkey[c] = dkey_given[c] + dbonus * r[c] * r_k[c];
    dr_k[c] += slope * r[c];
  }
  run.Store<T>(call.dr, t, dr);
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(Wkv7KeysBackwardCall call) {
  const HeadRun run(call, kRun);
  const KeyParameters parameters(run, call);
  HeadVector dk_k = {}, dk_a = {}, da0 = {}, dr_k = {};
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto k = run.Load<T>(call.k, t), rate = run.Load<T>(call.rate, t);
    const auto da = run.Load<T>(call.da, t), db = run.Load<T>(call.db, t);
    HeadVector alpha, dkey;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) alpha[c] = Sigmoid(parameters.a0[c] + rate[c]);
    AddBonusGradients<T, kLanes>(run, call, t, k, alpha, parameters, dkey, dr_k);
    const float2 inverse = InverseLength<kLanes>(k, parameters.k_k);
    float product = 0.0f;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c)
      product += (db[c] * alpha[c] - da[c]) * k[c] * parameters.k_k[c];
    product = SumOverLanes<kLanes>(product) * inverse.x * inverse.x * inverse.y;
    HeadVector dk, drate;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const float u = k[c] * parameters.k_k[c];
      const float du = (db[c] * alpha[c] - da[c] - u * product) * inverse.x;
      const float dalpha = db[c] * u * inverse.x + dkey[c] * k[c] * parameters.k_a[c];
      dk[c] = dkey[c] * (1.0f + (alpha[c] - 1.0f) * parameters.k_a[c]) + du * parameters.k_k[c];
      drate[c] = dalpha * alpha[c] * (1.0f - alpha[c]);
      dk_k[c] += du * k[c];
      dk_a[c] += dkey[c] * k[c] * (alpha[c] - 1.0f);
      da0[c] += drate[c];
    }
    run.Store<T>(call.dk, t, dk);
    run.Store<T>(call.drate, t, drate);
  }
  run.StorePartial(call.partials, 0, call.kParameters, dk_k);
  run.StorePartial(call.partials, 1, call.kParameters, dk_a);
  run.StorePartial(call.partials, 2, call.kParameters, da0);
  run.StorePartial(call.partials, 3, call.kParameters, dr_k);
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
