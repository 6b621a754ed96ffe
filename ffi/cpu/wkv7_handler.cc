// WKV7 on CPUs: from XLA's operands to the kernels.
#include "wkv7.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "parallel.h"
#include "rwkv_jax/wkv7_calls.h"

namespace rwkv_jax::cpu {
namespace {

constexpr int64_t kMaxHeadSize = 256;

const Wkv7Kernels& Kernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512f")) return avx512::kWkv7;
    if (__builtin_cpu_supports("avx2")) return avx2::kWkv7;
  }
#endif
  return baseline::kWkv7;
}

// Below this many updates of a state element a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 18;

int64_t Workers(const ffi::ThreadPool& pool, const Wkv7Dims& dims) {
  const int64_t updates =
      dims.batch * dims.heads * dims.tokens * dims.head_size * dims.head_size;
  return std::clamp<int64_t>(updates / kWorthAThread, 1, std::max<int64_t>(pool.num_threads(), 1));
}

// Calls body(item, scratch) for each item, with `floats` of scratch.
template <typename Body>
ffi::Error Run(const char* op, ffi::ThreadPool& pool, int64_t workers, int64_t items,
               int64_t floats, const Body& body) {
  if (items == 0) return ffi::Error::Success();
  workers = std::min(workers, items);
  struct alignas(64) Line {
    float floats[16];
  };
  const int64_t lines = (floats + 15) / 16;
  const std::unique_ptr<Line[]> scratch(new (std::nothrow) Line[workers * lines]);
  if (scratch == nullptr) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      std::string(op) + ": no memory for the scratch of " +
                          std::to_string(workers) + " threads");
  }
  ParallelFor(pool, workers, items, [&](int64_t worker, int64_t item) {
    body(item, scratch[worker * lines].floats);
  });
  return ffi::Error::Success();
}

ffi::Error RunForward(const char* op, ffi::ThreadPool& pool, const Wkv7ForwardCall& call) {
  const Wkv7Kernels& kernels = Kernels();
  const int64_t workers = Workers(pool, call.dims), size = call.dims.head_size;
  const int64_t heads = call.dims.batch * call.dims.heads;
  int64_t rows = size;
  while (rows > kernels.min_rows && heads * (size / rows) < workers) rows /= 2;
  const int64_t parts = size / rows;
  return Run(op, pool, workers, heads * parts, kernels.forward_scratch(call.dims, rows),
             [&](int64_t item, float* scratch) {
               kernels.forward(call, item / parts, item % parts * rows, rows, scratch);
             });
}

ffi::Error Forward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   int64_t decay) {
  Operands operands("wkv7", args, rets);
  Wkv7ForwardCall call;
  ReadForward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return RunForward("wkv7", pool, call);
}

ffi::Error Backward(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    int64_t decay) {
  Operands operands("wkv7 backward", args, rets);
  Wkv7BackwardCall call;
  ReadBackward(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  const Wkv7Kernels& kernels = Kernels();
  return Run("wkv7 backward", pool, Workers(pool, call.dims), call.dims.batch * call.dims.heads,
             kernels.backward_scratch(call.dims),
             [&](int64_t head, float* scratch) { kernels.backward(call, head, scratch); });
}

ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t decay) {
  Operands operands("wkv7_step", args, rets);
  Wkv7ForwardCall call;
  ReadStep(operands, decay, kMaxHeadSize, call);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;
  return RunForward("wkv7_step", pool, call);
}

auto Binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>(
      "decay");
}

}  // namespace
}  // namespace rwkv_jax::cpu

RWKV_JAX_HANDLER(Wkv7Fwd, rwkv_jax::cpu::Forward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv7Bwd, rwkv_jax::cpu::Backward, rwkv_jax::cpu::Binding());
RWKV_JAX_HANDLER(Wkv7Step, rwkv_jax::cpu::Step, rwkv_jax::cpu::Binding());
