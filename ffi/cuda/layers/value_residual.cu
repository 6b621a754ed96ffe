// The value of RWKV-7 in all layers but the first, after the formula of RWKV-LM:
//
//   share = sigmoid(v0 + rate),  value = v + (first - v) share
#include "layers/heads.cuh"

namespace rwkv_jax::cuda {
namespace {

template <typename T>
__global__ __launch_bounds__(kHeadThreads) void ForwardKernel(ValueResidualForwardCall call,
                                                              int run_length) {
  const HeadRun run(call, run_length);
  HeadVector v0 = {};
  run.LoadParameter(call.parameters, 0, call.kParameters, v0);
  for (int64_t t = run.begin; t < run.end; ++t) {
    const auto v = run.Load<T>(call.v, t), rate = run.Load<T>(call.rate, t);
    const auto first = run.Load<T>(call.first, t);
    HeadVector value;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c)
      value[c] = v[c] + (first[c] - v[c]) * Sigmoid(v0[c] + rate[c]);
    run.Store<T>(call.value, t, value);
  }
}

template <typename T>
__global__ __launch_bounds__(kHeadThreads, 2) void BackwardKernel(ValueResidualBackwardCall call,
                                                                  int run_length) {
  const HeadRun run(call, run_length);
  HeadVector v0 = {}, dv0 = {};
  run.LoadParameter(call.parameters, 0, call.kParameters, v0);
  struct Token {
    Packed<T, kHeadVector> v, rate, first, dpassed, dvalue[2];
  };
  const auto load = [&](int64_t t) {
    return Token{run.Load<T>(call.v, t),
                 run.Load<T>(call.rate, t),
                 run.Load<T>(call.first, t),
                 run.Load<T>(call.dpassed, t),
                 {run.Load<T>(call.dvalue[0], t), run.Load<T>(call.dvalue[1], t)}};
  };
  run.ForTokens(load, [&](int64_t t, const Token& token) {
    HeadVector dv, drate, dfirst;
#pragma unroll
    for (int c = 0; c < kHeadVector; ++c) {
      const float share = Sigmoid(v0[c] + token.rate[c]);
      const float dvalue = token.dvalue[0][c] + token.dvalue[1][c];
      dv[c] = dvalue * (1.0f - share);
      dfirst[c] = token.dpassed[c] + dvalue * share;
      drate[c] = dvalue * (token.first[c] - token.v[c]) * share * (1.0f - share);
      dv0[c] += drate[c];
    }
    run.Store<T>(call.dv, t, dv);
    run.Store<T>(call.drate, t, drate);
    run.Store<T>(call.dfirst, t, dfirst);
  });
  run.StorePartial(call.partials, 0, call.kParameters, dv0);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const ValueResidualForwardCall& call, const Device& device) {
  return LaunchOverHeads(stream, call, ForwardRun(call, device),
                         [](auto zero, auto) { return ForwardKernel<decltype(zero)>; });
}

cudaError_t Run(cudaStream_t stream, const ValueResidualBackwardCall& call, const Device&) {
  return LaunchOverHeads(stream, call, kRun,
                         [](auto zero, auto) { return BackwardKernel<decltype(zero)>; });
}

}  // namespace rwkv_jax::cuda
