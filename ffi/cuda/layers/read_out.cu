// What RWKV-7 makes of the output of WKV7 before the output product, after the formulas of RWKV-LM:
//
//   z = (y - mean) / sqrt(variance + eps)          for each head
//   out = (z * weight + bias + s v) * gate,  s = sum over the head of r * k * r_k
//
// Backward, with e = dout * gate and g = e * weight:
//
//   dy = (g - mean(g) - z mean(g z)) / sqrt(variance + eps),  dgate = dout * (z * weight + bias + s v)
//   ds = sum over the head of e * v,  dr = ds k r_k,  dk = ds r r_k,  dv = s e
#include "layers/formulas.cuh"
#include "layers/heads.cuh"

namespace rwkv_jax::cuda {
namespace {

constexpr int64_t kForwardTokens = 16;

struct ReadOutParameters {
  HeadVector weight = {}, bias = {}, r_k = {};

  __device__ ReadOutParameters(const HeadRun& run, const ReadOutCall& call) {
    run.LoadParameter(call.parameters, 0, call.kParameters, weight);
    run.LoadParameter(call.parameters, 1, call.kParameters, bias);
    run.LoadParameter(call.parameters, 2, call.kParameters, r_k);
  }
};

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads) void ForwardKernel(ReadOutForwardCall call) {
  const HeadRun run(call, kForwardTokens);
  const ReadOutParameters parameters(run, call);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto y = run.Load<T>(call.y, t), r = run.Load<T>(call.r, t), k = run.Load<T>(call.k, t);
    const auto v = run.Load<T>(call.v, t), gate = run.Load<T>(call.gate, t);
    const Normalised<kLanes> head(y, r, k, parameters.r_k);
    HeadVector out;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c)
      out[c] = (head.z[c] * parameters.weight[c] + parameters.bias[c] + head.s * v[c]) * gate[c];
    run.Store<T>(call.out, t, out);
  }
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(ReadOutBackwardCall call) {
  constexpr float kShare = 1.0f / (kLanes * kHeadVector);
  const HeadRun run(call, kRun);
  const ReadOutParameters parameters(run, call);
  HeadVector dweight = {}, dbias = {}, dr_k = {};
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto y = run.Load<T>(call.y, t), r = run.Load<T>(call.r, t), k = run.Load<T>(call.k, t);
    const auto v = run.Load<T>(call.v, t), gate = run.Load<T>(call.gate, t);
    const auto dout = run.Load<T>(call.dout, t);
    const Normalised<kLanes> head(y, r, k, parameters.r_k);
    HeadVector e, dgate;
    float ds = 0.0f, sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const float affine = head.z[c] * parameters.weight[c] + parameters.bias[c];
      dgate[c] = dout[c] * (affine + head.s * v[c]);
      e[c] = dout[c] * gate[c];
      const float g = e[c] * parameters.weight[c];
      ds += e[c] * v[c], sum += g, product += g * head.z[c];
      dweight[c] += e[c] * head.z[c], dbias[c] += e[c];
    }
    ds = SumOverLanes<kLanes>(ds);
    sum = SumOverLanes<kLanes>(sum) * kShare, product = SumOverLanes<kLanes>(product) * kShare;
    HeadVector dy, dr, dk, dv;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      dy[c] = (e[c] * parameters.weight[c] - sum - head.z[c] * product) * head.scale;
      dr[c] = ds * k[c] * parameters.r_k[c];
      dk[c] = ds * r[c] * parameters.r_k[c];
      dv[c] = head.s * e[c];
      dr_k[c] += ds * r[c] * k[c];
    }
    run.Store<T>(call.dy, t, dy);
    run.Store<T>(call.dr, t, dr);
    run.Store<T>(call.dk, t, dk);
    run.Store<T>(call.dv, t, dv);
    run.Store<T>(call.dgate, t, dgate);
  }
  run.StorePartial(call.partials, 0, call.kParameters, dweight);
  run.StorePartial(call.partials, 1, call.kParameters, dbias);
  run.StorePartial(call.partials, 2, call.kParameters, dr_k);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const ReadOutForwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kForwardTokens, [](auto zero, auto lanes) {
    return ForwardKernel<decltype(zero), lanes()>;
  });
}

cudaError_t Run(cudaStream_t stream, const ReadOutBackwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kRun, [](auto zero, auto lanes) {
    return BackwardKernel<decltype(zero), lanes()>;
  });
}

}  // namespace rwkv_jax::cuda
