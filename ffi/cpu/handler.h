// The handlers on CPUs: from XLA's operands to the kernels for this CPU, on threads of XLA's pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "parallel.h"
#include "row_product.h"
#include "rwkv_jax/description.h"
#include "rwkv_jax/targets.h"
#include "wkv4.h"
#include "wkv6.h"
#include "wkv7.h"

namespace rwkv_jax::cpu {

// The kernels of an operator for the best of the compiled instruction sets that this CPU has.
template <typename Kernels>
const Kernels& Best() {
#if defined(RWKV_JAX_HAS_avx512)
  if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f")) return Kernels::avx512;
#endif
#if defined(RWKV_JAX_HAS_avx2)
  if (__builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
      __builtin_cpu_supports("avx2"))
    return Kernels::avx2;
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

// Clears the tokens of results that no sequence has.
inline void ClearOutside(const Problem& problem, const Sequences& sequences,
                         const std::vector<TokenResult>& results) {
  const int64_t rows = problem.rows, tokens = problem.tokens;
  if (!sequences.Given() || rows == 0) return;
  for (int64_t row = 0; row < rows; ++row) {
    const Span span = sequences.OfRow(row, problem.sequences / rows, tokens);
    const int64_t end = span.first_token + span.tokens;
    for (const TokenResult& result : results) {
      char* const to = static_cast<char*>(result.data);
      const int64_t size = result.size * (problem.dtype == Dtype::kF32 ? 4 : 2);
      std::memset(to + row * tokens * size, 0, (span.first_token - row * tokens) * size);
      std::memset(to + end * size, 0, ((row + 1) * tokens - end) * size);
    }
  }
}

inline int64_t Lines(int64_t floats) { return (floats + 15) / 16; }

// The scratch of a call, in lines of 16 floats. It is kept for the next call, since memory that is new to a
// process costs a page fault for each page.
class Scratch {
 public:
  explicit Scratch(int64_t lines) : memory_(kept_.exchange(nullptr)) {
    if (memory_ != nullptr && memory_->lines >= lines) return;
    delete[] memory_;
    memory_ = new (std::nothrow) Line[1 + lines];
    if (memory_ != nullptr) memory_->lines = lines;
  }
  ~Scratch() { delete[] kept_.exchange(memory_); }

  bool Missing() const { return memory_ == nullptr; }
  float* operator[](int64_t line) const { return memory_[1 + line].floats; }

 private:
  union alignas(64) Line {
    int64_t lines;  // in the first line: how many follow
    float floats[16];
  };
  // That of the call that ended last. The end of the process does not free it: a thread may still compute.
  inline static std::atomic<Line*> kept_ = nullptr;
  Line* memory_;
};

inline ffi::Error NoMemory(const char* op) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    std::string(op) + ": no memory for scratch");
}

// Calls body(item, scratch) for each item, with `floats` of scratch.
template <typename Body>
ffi::Error Run(const char* op, ffi::ThreadPool& pool, int64_t workers, int64_t items,
               int64_t floats, const Body& body) {
  workers = std::min(workers, items);
  const int64_t lines = Lines(floats);
  const Scratch scratch(workers * lines);
  if (scratch.Missing()) return NoMemory(op);
  ParallelFor(pool, workers, items,
              [&](int64_t worker, int64_t item) { body(item, scratch[worker * lines]); });
  return ffi::Error::Success();
}

// How many rows of the state of a head a thread takes: with fewer heads than threads, not all of them.
inline int64_t RowsOfAThread(const HeadDims& dims, int64_t min_rows, int64_t workers) {
  const int64_t heads = dims.batch * dims.heads, size = dims.head_size;
  int64_t rows = size;
  while (rows > min_rows && heads * (size / rows) < workers) rows /= 2;
  return rows;
}

// Each thread takes some rows of the state of a head.
template <typename Kernels, typename Call>
ffi::Error RunForward(const char* op, ffi::ThreadPool& pool, const Call& call) {
  const Kernels& kernels = Best<Kernels>();
  const int64_t workers = Workers(pool, call), heads = call.dims.batch * call.dims.heads;
  const int64_t rows = RowsOfAThread(call.dims, kernels.min_rows, workers);
  const int64_t parts = call.dims.head_size / rows;
  return Run(op, pool, workers, heads * parts, kernels.forward_scratch(call.dims, rows),
             [&](int64_t item, float* scratch) {
               kernels.forward(call, item / parts, item % parts * rows, rows, scratch);
             });
}

// Each thread takes a head, or, with fewer heads than threads, some rows of a head. While one thread has the
// first rows of a chunk, another one has the next rows of the chunk after it, and so on.
template <typename Kernels, typename Call>
ffi::Error RunBackward(const char* op, ffi::ThreadPool& pool, const Call& call) {
  // An item is several chunks, so that a thread that the system interrupts does not stop the others at once. A
  // sequence of fewer than two items is too short to gain by that.
  constexpr int64_t kItemChunks = 4;
  const Kernels& kernels = Best<Kernels>();
  const HeadDims& dims = call.dims;
  const int64_t workers = Workers(pool, call), heads = dims.batch * dims.heads;
  const int64_t size = dims.head_size, chunks = Chunks(dims.tokens);
  const int64_t rows =
      chunks < 2 * kItemChunks ? size : RowsOfAThread(dims, kernels.min_rows, workers);
  const int64_t parts = size / rows;
  const BackwardScratch floats = kernels.backward_scratch(dims);
  if (parts == 1)
    return Run(
        op, pool, workers, heads, floats.chunk + floats.own, [&](int64_t head, float* scratch) {
          kernels.backward(call, {head, 0, size, 0, chunks}, scratch, scratch + floats.chunk);
        });

  const int64_t at_once = std::min(chunks, kItemChunks + parts);  // chunks of a head with scratch
  const int64_t shared = Lines(floats.chunk), own = Lines(floats.own);
  const Scratch scratch(heads * at_once * shared + workers * own);
  if (scratch.Missing()) return NoMemory(op);
  std::vector<std::atomic<int64_t>> done(heads * parts);  // chunks of these rows of a head
  // Sleeps after a while, since the thread that is waited for may need this core.
  const auto wait = [&done](int64_t part, int64_t chunks) {
    for (int i = 0; done[part].load(std::memory_order_acquire) < chunks; ++i)
      if (i < 200)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
  };
  // An item waits only for items before it, which are done or which threads are at work on.
  const auto body = [&](int64_t worker, int64_t item) {
    const int64_t part = item % parts, head = item / parts % heads, first = head * parts;
    const int64_t begin = item / (parts * heads) * kItemChunks;
    for (int64_t chunk = begin; chunk < std::min(begin + kItemChunks, chunks); ++chunk) {
      wait(first + part, chunk);
      if (part > 0)
        wait(first + part - 1, chunk + 1);
      else
        wait(first + parts - 1, chunk + 1 - at_once);
      kernels.backward(call, {head, part * rows, rows, chunk, 1},
                       scratch[(head * at_once + chunk % at_once) * shared],
                       scratch[heads * at_once * shared + worker * own]);
      done[first + part].store(chunk + 1, std::memory_order_release);
    }
  };
  ParallelFor(pool, workers, (chunks + kItemChunks - 1) / kItemChunks * heads * parts, body);
  return ffi::Error::Success();
}

// Each thread takes some channels of a sequence, at least a line of the cache.
template <typename Call>
ffi::Error RunChannels(ffi::ThreadPool& pool, const Call& call,
                       void (*kernel)(const Call&, int64_t, int64_t, int64_t)) {
  const Wkv4Dims& dims = call.dims;
  // With its exponentials, a token of a channel takes about as long as 16 elements of a matrix.
  const int64_t workers = Workers(pool, 16 * AllTokens(call) * dims.channels);
  int64_t channels = 128;
  const auto groups = [&] { return (dims.channels + channels - 1) / channels; };
  while (channels > 32 && dims.batch * groups() < workers) channels /= 2;
  ParallelFor(pool, workers, dims.batch * groups(), [&](int64_t, int64_t item) {
    const int64_t first = item % groups() * channels;
    kernel(call, item / groups(), first, std::min(first + channels, dims.channels));
  });
  return ffi::Error::Success();
}

inline ffi::Error RunCall(const char*, ffi::ThreadPool& pool, const Wkv4ForwardCall& call) {
  return RunChannels(pool, call, Best<Wkv4Kernels>().forward);
}
inline ffi::Error RunCall(const char*, ffi::ThreadPool& pool, const Wkv4BackwardCall& call) {
  return RunChannels(pool, call, Best<Wkv4Kernels>().backward);
}
inline ffi::Error RunCall(const char* op, ffi::ThreadPool& pool, const Wkv6ForwardCall& call) {
  return RunForward<Wkv6Kernels>(op, pool, call);
}
inline ffi::Error RunCall(const char* op, ffi::ThreadPool& pool, const Wkv6BackwardCall& call) {
  return RunBackward<Wkv6Kernels>(op, pool, call);
}
inline ffi::Error RunCall(const char* op, ffi::ThreadPool& pool, const Wkv7ForwardCall& call) {
  return RunForward<Wkv7Kernels>(op, pool, call);
}
inline ffi::Error RunCall(const char* op, ffi::ThreadPool& pool, const Wkv7BackwardCall& call) {
  return RunBackward<Wkv7Kernels>(op, pool, call);
}

// Below so many bytes of a matrix a second thread costs more than it saves.
constexpr int64_t kBytesWorthAThread = 1 << 18;

// Each thread takes some outputs of W [O, I].
inline ffi::Error RunOutputs(ffi::ThreadPool& pool, int64_t workers, const RowProductCall& call) {
  // Several parts for each thread, since threads may start late.
  const int64_t parts = workers == 1 ? 1 : 4 * workers, outputs = call.outputs;
  const int64_t share = ((outputs + parts - 1) / parts + 63) / 64 * 64;
  const auto kernel = Best<RowProductKernels>().outputs;
  ParallelFor(pool, workers, (outputs + share - 1) / std::max<int64_t>(share, 1),
              [&](int64_t, int64_t part) {
                kernel(call, part * share, std::min(outputs, (part + 1) * share));
              });
  return ffi::Error::Success();
}

// Each thread takes some outputs of some inputs of W [I, O]. How the inputs are divided depends on their
// number alone, and so do the bits of the results.
inline ffi::Error RunInputs(ffi::ThreadPool& pool, int64_t workers, const RowProductCall& call) {
  constexpr int64_t kMostParts = 16, kLeastInputs = 256, kMostOutputs = 1024;
  const int64_t inputs = call.inputs, outputs = call.outputs, size = call.rows * outputs;
  const int64_t share = std::max((inputs + kMostParts - 1) / kMostParts, kLeastInputs);
  const int64_t parts = std::max<int64_t>((inputs + share - 1) / share, 1);
  const int64_t tiles = (outputs + kMostOutputs - 1) / kMostOutputs;
  const int64_t tile = tiles ? ((outputs + tiles - 1) / tiles + 63) / 64 * 64 : 1;
  const std::unique_ptr<float[]> others(new (std::nothrow) float[(parts - 1) * size]);
  if (others == nullptr) return NoMemory("row_product");
  const auto sums = [&](int64_t part) { return part ? others.get() + (part - 1) * size : call.y; };
  const auto kernel = Best<RowProductKernels>().inputs;
  ParallelFor(pool, workers, parts * tiles, [&](int64_t, int64_t item) {
    const int64_t part = item / tiles, first = std::min(outputs, item % tiles * tile);
    kernel(call, part * share, std::min(inputs, (part + 1) * share), first,
           std::min(outputs, first + tile), sums(part));
  });
  for (int64_t part = 1; part < parts; ++part)
    for (int64_t i = 0; i < size; ++i) call.y[i] += sums(part)[i];
  return ffi::Error::Success();
}

inline ffi::Error RowProduct(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                             int64_t by_output) {
  Operands operands("row_product", args, rets);
  const float* const x = static_cast<const float*>(operands.Arg("x", "BI", Kind::kFloat));
  const void* const weight = operands.Arg("weight", by_output ? "OI" : "IO", Kind::kWeight);
  const auto* const scale = static_cast<const float*>(operands.Arg("scale", "OG", Kind::kFloat));
  float* const y = static_cast<float*>(operands.Ret("y", "BO", Kind::kFloat));
  const int64_t inputs = operands.Size('I'), outputs = operands.Size('O');
  const int64_t groups = operands.Size('G');
  operands.Require(groups == 0 || inputs % groups == 0, "scale has G = ", groups,
                   "; expected 0 or a divisor of I = ", inputs);
  if (ffi::Error error = operands.Finish(); error.failure()) return error;

  const ffi::DataType type = operands.weight_type();
  const Stored stored = type == ffi::S8     ? Stored::kI8
                        : type == ffi::BF16 ? Stored::kBF16
                        : type == ffi::F16  ? Stored::kF16
                                            : Stored::kF32;
  const int64_t size = stored == Stored::kF32 ? 4 : stored == Stored::kI8 ? 1 : 2;
  const RowProductCall call = {operands.Size('B'),
                               inputs,
                               outputs,
                               by_output != 0,
                               stored,
                               x,
                               weight,
                               groups ? scale : nullptr,
                               groups ? groups : 1,
                               y};
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t workers =
      std::clamp<int64_t>(inputs * outputs * size / kBytesWorthAThread, 1, threads);
  return by_output ? RunOutputs(pool, workers, call) : RunInputs(pool, workers, call);
}

inline XLA_FFI_Error* RowProductTarget(XLA_FFI_CallFrame* frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::ThreadPool>()
                                   .RemainingArgs()
                                   .RemainingRets()
                                   .Attr<int64_t>("by_output")
                                   .To(RowProduct)
                                   .release();
  return handler->Call(frame);
}

// The platform of rwkv_jax/targets.h and rwkv_jax/module.h. The kernels take one token at a time, and
// their scratch is memory of their own.
struct Cpu {
  using Context = ffi::ThreadPool;
  using Argument = ffi::ThreadPool;
  static constexpr bool kHasTransitions = false;
  static constexpr int64_t kMaxHeadSize = 256;
  static constexpr bool kOnlyLaunches = false;

  static std::vector<Registration> Targets() {
    std::vector<Registration> targets = Registrations<Cpu>();
    targets.push_back({"rwkv_row_product_v1", RowProductTarget});
    return targets;
  }

  template <typename Operator, Pass kPass>
  static ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                           const Attributes& attributes) {
    CallReader<Operator> reader(kPass, args, rets, attributes, kMaxHeadSize);
    auto call = EmptyCall<Operator, kPass>();
    reader.Read(call);
    if (ffi::Error error = reader.operands.Finish(); error.failure()) return error;
    ClearOutside(reader.problem, call.sequences, reader.TokenResults(call));
    return RunCall(kOpNames[static_cast<int>(Operator::kOp)], pool, call);
  }

  static int64_t ScratchFloats(const Problem&) { return 0; }
  static bool HasTransition(const Problem&) { return false; }
  static Description PlanOf(int64_t, int64_t, const Problem&) {
    return {{"kernel", std::string("token by token")},
            {"splits", int64_t{1}},
            {"scratch", int64_t{0}},
            {"shared_memory", int64_t{0}}};
  }
};

}  // namespace rwkv_jax::cpu
