// What RWKV-7 makes of the output of WKV7 before the output product, after the formulas of RWKV-LM:
//
//   z = (y - mean) / sqrt(variance + eps)          for each head
//   out = (z * weight + bias + bonus v) * gate     with a number for each head, of wkv7_keys.cu
//
// Backward, with e = dout * gate and g = e * weight:
//
//   dy = (g - mean(g) - z mean(g z)) / sqrt(variance + eps)
//   dgate = dout * (z * weight + bias + bonus v),  dv = bonus e,  dbonus = sum over the head of e * v
//
// The backward pass can restore `out`: it writes what the forward pass wrote, so that `out` need not be kept
// for the gradient of the output product.
#include "layers/formulas.cuh"
#include "layers/heads.cuh"

namespace rwkv_jax::cuda {
namespace {

struct ReadOutParameters {
  HeadVector weight = {}, bias = {};

  __device__ ReadOutParameters(const HeadRun& run, const ReadOutCall& call) {
    run.LoadParameter(call.parameters, 0, call.kParameters, weight);
    run.LoadParameter(call.parameters, 1, call.kParameters, bias);
  }
};

// `out` before the gate. Both passes have it from here, so that both round it alike.
template <int kLanes, typename Vector>
__device__ float Ungated(const Normalised<kLanes>& head, const ReadOutParameters& parameters,
                         float bonus, const Vector& v, int c) {
  return head.z[c] * parameters.weight[c] + parameters.bias[c] + bonus * v[c];
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads) void ForwardKernel(ReadOutForwardCall call,
                                                              int run_length) {
  const HeadRun run(call, run_length);
  const ReadOutParameters parameters(run, call);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto y = run.Load<T>(call.y, t), v = run.Load<T>(call.v, t);
    const auto gate = run.Load<T>(call.gate, t);
    const float bonus = run.LoadOfHead<kLanes>(call.bonus, t);
    const Normalised<kLanes> head(y);
    HeadVector out;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) out[c] = Ungated(head, parameters, bonus, v, c) * gate[c];
    run.Store<T>(call.out, t, out);
  }
}

template <typename T, int kLanes>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(ReadOutBackwardCall call,
                                                                  int run_length) {
  constexpr float kShare = 1.0f / (kLanes * kHeadVector);
  const HeadRun run(call, run_length);
  const ReadOutParameters parameters(run, call);
  HeadVector dweight = {}, dbias = {};
  struct Token {
    Packed<T, kHeadVector> y, v, gate, dout;
    float bonus;
  };
  const auto load = [&](int64_t t) {
    return Token{run.Load<T>(call.y, t), run.Load<T>(call.v, t), run.Load<T>(call.gate, t),
                 run.Load<T>(call.dout, t), run.LoadOfHead<kLanes>(call.bonus, t)};
  };
  run.ForTokens(load, [&](int64_t t, const Token& token) {
    const auto& [y, v, gate, dout, bonus] = token;
    const Normalised<kLanes> head(y);
    HeadVector e, dgate, out;
    float dbonus = 0.0f, sum = 0.0f, product = 0.0f;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const float ungated = Ungated(head, parameters, bonus, v, c);
      out[c] = ungated * gate[c];
      dgate[c] = dout[c] * ungated;
      e[c] = dout[c] * gate[c];
      const float g = e[c] * parameters.weight[c];
      dbonus += e[c] * v[c], sum += g, product += g * head.z[c];
      dweight[c] += e[c] * head.z[c], dbias[c] += e[c];
    }
    if (call.out != nullptr) run.Store<T>(call.out, t, out);
    dbonus = SumOverLanes<kLanes>(dbonus);
    sum = SumOverLanes<kLanes>(sum) * kShare, product = SumOverLanes<kLanes>(product) * kShare;
    HeadVector dy, dv;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      dy[c] = (e[c] * parameters.weight[c] - sum - head.z[c] * product) * head.scale;
      dv[c] = bonus * e[c];
    }
    run.Store<T>(call.dy, t, dy);
    run.StoreOfHead<kLanes>(call.dbonus, t, dbonus);
    run.Store<T>(call.dv, t, dv);
    run.Store<T>(call.dgate, t, dgate);
  });
  run.StorePartial(call.partials, 0, call.kParameters, dweight);
  run.StorePartial(call.partials, 1, call.kParameters, dbias);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const ReadOutForwardCall& call, const Device& device) {
  return LaunchOverHeads(stream, call, ForwardRun(call, device), [](auto zero, auto lanes) {
    return ForwardKernel<decltype(zero), lanes()>;
  });
}

cudaError_t Run(cudaStream_t stream, const ReadOutBackwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kRun, [](auto zero, auto lanes) {
    return BackwardKernel<decltype(zero), lanes()>;
  });
}

}  // namespace rwkv_jax::cuda
