#include "row_product.h"

#include "vector.h"

namespace rwkv_jax::cpu {
namespace {

// A matrix is asked for so many bytes ahead of its use.
constexpr int64_t kAhead = 1024;

template <Stored kStored>
constexpr int64_t kSize = kStored == Stored::kF32  ? 4
                          : kStored == Stored::kI8 ? 1
                                                   : 2;

template <Stored kStored>
inline Vec LoadWeights(const void* from, int64_t index) {
  if constexpr (kStored == Stored::kF32) return Load(static_cast<const float*>(from) + index);
  if constexpr (kStored == Stored::kBF16) return FromBF16(LoadHalves(from, index));
  if constexpr (kStored == Stored::kF16) return FromF16(LoadHalves(from, index));
  if constexpr (kStored == Stored::kI8)
    return __builtin_convertvector(LoadBytes(static_cast<const int8_t*>(from) + index), Vec);
}

template <Stored kStored>
inline float LoadWeight(const void* from, int64_t index) {
  if constexpr (kStored == Stored::kF32) return static_cast<const float*>(from)[index];
  if constexpr (kStored == Stored::kI8) return static_cast<const int8_t*>(from)[index];
  if constexpr (kStored == Stored::kBF16 || kStored == Stored::kF16) {
    const Bits half = Bits{} + static_cast<const uint16_t*>(from)[index];
    return (kStored == Stored::kBF16 ? FromBF16(half) : FromF16(half))[0];
  }
}

// An output of kRows rows, from `row` on, of W [O, I]. The matrix is read as one stream, because CPUs
// fetch several at once more slowly, and kSteps vectors of it are multiplied side by side.
template <Stored kStored, int kRows, int kSteps>
inline void Dot(const RowProductCall& call, int64_t output, int64_t row) {
  const int64_t inputs = call.inputs, size = inputs / call.groups;
  const int64_t whole = size - size % kLanes, even = whole - whole % (kSteps * kLanes);
  const float* const x = call.x + row * inputs;
  float total[kRows] = {};
  for (int64_t group = 0; group < call.groups; ++group) {
    const int64_t begin = group * size, first = output * inputs;
    Vec sums[kSteps][kRows] = {};
    const auto step = [&](int64_t i, int at) {
      const Vec weights = LoadWeights<kStored>(call.weight, first + i);
      for (int b = 0; b < kRows; ++b) sums[at][b] += weights * Load(x + b * inputs + i);
    };
    for (int64_t i = begin; i < begin + even; i += kSteps * kLanes) {
      const char* const now = static_cast<const char*>(call.weight) + (first + i) * kSize<kStored>;
      for (int64_t line = 0; line < kSteps * kLanes * kSize<kStored>; line += 64)
        __builtin_prefetch(now + kAhead + line);
      for (int at = 0; at < kSteps; ++at) step(i + at * kLanes, at);
    }
    for (int64_t i = begin + even; i < begin + whole; i += kLanes) step(i, 0);
    for (int b = 0; b < kRows; ++b) {
      for (int at = 1; at < kSteps; ++at) sums[0][b] += sums[at][b];
      float sum = Sum(sums[0][b]);
      for (int64_t i = begin + whole; i < begin + size; ++i)
        sum += LoadWeight<kStored>(call.weight, first + i) * x[b * inputs + i];
      total[b] += (call.scale ? call.scale[output * call.groups + group] : 1.0f) * sum;
    }
  }
  for (int b = 0; b < kRows; ++b) call.y[(row + b) * call.outputs + output] = total[b];
}

template <Stored kStored>
inline void DotAllRows(const RowProductCall& call, int64_t output) {
  int64_t row = 0;
  for (; row + 4 <= call.rows; row += 4) Dot<kStored, 4, 2>(call, output, row);
  for (; row + 2 <= call.rows; row += 2) Dot<kStored, 2, 4>(call, output, row);
  for (; row < call.rows; ++row) Dot<kStored, 1, 4>(call, output, row);
}

// Adds kIn inputs, from `input` on, to the outputs of all rows of W [I, O].
template <Stored kStored, int kIn>
inline void Add(const RowProductCall& call, int64_t input, int64_t first, int64_t last) {
  const int64_t outputs = call.outputs, whole = last - (last - first) % kLanes;
  for (int64_t row = 0; row < call.rows; ++row) {
    const float* const x = call.x + row * call.inputs + input;
    float* const y = call.y + row * outputs;
    Vec values[kIn];
    for (int i = 0; i < kIn; ++i) values[i] = Broadcast(x[i]);
    for (int64_t o = first; o < whole; o += kLanes) {
      Vec sum = Load(y + o);
      for (int i = 0; i < kIn; ++i)
        sum += values[i] * LoadWeights<kStored>(call.weight, (input + i) * outputs + o);
      Store(y + o, sum);
    }
    for (int64_t o = whole; o < last; ++o)
      for (int i = 0; i < kIn; ++i)
        y[o] += x[i] * LoadWeight<kStored>(call.weight, (input + i) * outputs + o);
  }
}

template <Stored kStored>
void OutputsOf(const RowProductCall& call, int64_t first, int64_t last) {
  if (call.by_output) {
    for (int64_t output = first; output < last; ++output) DotAllRows<kStored>(call, output);
    return;
  }
  for (int64_t row = 0; row < call.rows; ++row)
    __builtin_memset(call.y + row * call.outputs + first, 0, (last - first) * sizeof(float));
  int64_t input = 0;
  for (; input + 4 <= call.inputs; input += 4) Add<kStored, 4>(call, input, first, last);
  for (; input < call.inputs; ++input) Add<kStored, 1>(call, input, first, last);
}

void Outputs(const RowProductCall& call, int64_t first, int64_t last) {
  switch (call.stored) {
    case Stored::kF32: return OutputsOf<Stored::kF32>(call, first, last);
    case Stored::kBF16: return OutputsOf<Stored::kBF16>(call, first, last);
    case Stored::kF16: return OutputsOf<Stored::kF16>(call, first, last);
    case Stored::kI8: return OutputsOf<Stored::kI8>(call, first, last);
  }
}

}  // namespace

const RowProductKernels RowProductKernels::RWKV_JAX_ISA = {Outputs};

}  // namespace rwkv_jax::cpu
