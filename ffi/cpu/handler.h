// What the handlers share: the kernels for this CPU, threads and their scratch, and the stages of
// an operator with a state for each head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>

#include "parallel.h"
#include "rwkv_jax/operands.h"
#include "rwkv_jax/types.h"

namespace rwkv_jax::cpu {

constexpr int64_t kMaxHeadSize = 256;

// The kernels of an operator for the best instruction set that this CPU has.
template <typename Kernels>
const Kernels& Best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("fma")) {
    if (__builtin_cpu_supports("avx512f")) return Kernels::avx512;
    if (__builtin_cpu_supports("avx2")) return Kernels::avx2;
  }
#endif
  return Kernels::baseline;
}

// Below this many updates of a state element a second thread costs more than it saves.
constexpr int64_t kWorthAThread = 1 << 18;

inline int64_t Workers(const ffi::ThreadPool& pool, int64_t updates) {
  return std::clamp<int64_t>(updates / kWorthAThread, 1, std::max<int64_t>(pool.num_threads(), 1));
}

// The tokens of all sequences.
template <typename Call>
int64_t AllTokens(const Call& call) {
  int64_t tokens = 0;
  for (int64_t i = 0; i < call.dims.batch; ++i)
    tokens += call.sequences(i, call.dims.tokens).tokens;
  return tokens;
}

template <typename Call>
int64_t Workers(const ffi::ThreadPool& pool, const Call& call) {
  const HeadDims& dims = call.dims;
  return Workers(pool, AllTokens(call) * dims.heads * dims.head_size * dims.head_size);
}

// Clears those tokens of results, with `size` elements each, that no sequence has.
inline void ClearOutside(const Operands& operands, const Sequences& sequences, int64_t size,
                         std::initializer_list<void*> results) {
  const int64_t rows = operands.Size('B'), tokens = operands.Size('T');
  if (!sequences.Given() || rows == 0) return;
  size *= operands.dtype() == Dtype::kF32 ? 4 : 2;
  for (int64_t row = 0; row < rows; ++row) {
    const Span span = sequences.OfRow(row, operands.Size('S') / rows, tokens);
    const int64_t end = span.first_token + span.tokens;
    for (void* result : results) {
      char* const to = static_cast<char*>(result);
      std::memset(to + row * tokens * size, 0, (span.first_token - row * tokens) * size);
      std::memset(to + end * size, 0, ((row + 1) * tokens - end) * size);
    }
  }
}

template <typename Call>
void ClearOutside(const Operands& operands, const Call& call,
                  std::initializer_list<void*> results) {
  ClearOutside(operands, call.sequences, call.dims.heads * call.dims.head_size, results);
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

template <typename Kernels, typename Call>
ffi::Error RunForward(const char* op, ffi::ThreadPool& pool, const Call& call) {
  const Kernels& kernels = Best<Kernels>();
  const int64_t workers = Workers(pool, call), size = call.dims.head_size;
  const int64_t heads = call.dims.batch * call.dims.heads;
  int64_t rows = size;
  while (rows > kernels.min_rows && heads * (size / rows) < workers) rows /= 2;
  const int64_t parts = size / rows;
  return Run(op, pool, workers, heads * parts, kernels.forward_scratch(call.dims, rows),
             [&](int64_t item, float* scratch) {
               kernels.forward(call, item / parts, item % parts * rows, rows, scratch);
             });
}

template <typename Kernels, typename Call>
ffi::Error RunBackward(const char* op, ffi::ThreadPool& pool, const Call& call) {
  const Kernels& kernels = Best<Kernels>();
  return Run(op, pool, Workers(pool, call), call.dims.batch * call.dims.heads,
             kernels.backward_scratch(call.dims),
             [&](int64_t head, float* scratch) { kernels.backward(call, head, scratch); });
}

inline auto Binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attr<int64_t>(
      "decay");
}

}  // namespace rwkv_jax::cpu
