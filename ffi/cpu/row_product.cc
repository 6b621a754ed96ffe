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

// The outputs output, output + apart, ... of kRows rows, from `row` on, of W [O, I]. The matrix is read
// as kStreams streams far from each other: a CPU fetches each of them ahead within a page alone, and from
// neighbouring rows of a matrix it would come to the end of a page in all of them at once.
template <Stored kStored, int kStreams, int kRows, int kSteps>
inline void Dot(const RowProductCall& call, int64_t output, int64_t apart, int64_t row) {
  const int64_t inputs = call.inputs, size = inputs / call.groups;
  const int64_t whole = size - size % kLanes, even = whole - whole % (kSteps * kLanes);
  const float* const x = call.x + row * inputs;
  const auto place = [&](int n, int64_t i) { return (output + n * apart) * inputs + i; };
  float total[kStreams][kRows] = {};
  for (int64_t group = 0; group < call.groups; ++group) {
    const int64_t begin = group * size;
    Vec sums[kStreams][kSteps][kRows] = {};
    const auto step = [&](int n, int64_t i, int at) {
      const Vec weights = LoadWeights<kStored>(call.weight, place(n, i));
      for (int b = 0; b < kRows; ++b) sums[n][at][b] += weights * Load(x + b * inputs + i);
    };
    for (int64_t i = begin; i < begin + even; i += kSteps * kLanes)
      for (int n = 0; n < kStreams; ++n) {
        const auto* const now =
            static_cast<const char*>(call.weight) + place(n, i) * kSize<kStored>;
        for (int64_t line = 0; line < kSteps * kLanes * kSize<kStored>; line += 64)
          __builtin_prefetch(now + kAhead + line);
        for (int at = 0; at < kSteps; ++at) step(n, i + at * kLanes, at);
      }
    for (int n = 0; n < kStreams; ++n) {
      for (int64_t i = begin + even; i < begin + whole; i += kLanes) step(n, i, 0);
      const int64_t at_scale = (output + n * apart) * call.groups + group;
      const float scale = call.scale ? call.scale[at_scale] : 1.0f;
      for (int b = 0; b < kRows; ++b) {
        for (int at = 1; at < kSteps; ++at) sums[n][0][b] += sums[n][at][b];
        float sum = Sum(sums[n][0][b]);
        for (int64_t i = begin + whole; i < begin + size; ++i)
          sum += LoadWeight<kStored>(call.weight, place(n, i)) * x[b * inputs + i];
        total[n][b] += scale * sum;
      }
    }
  }
  for (int n = 0; n < kStreams; ++n)
    for (int b = 0; b < kRows; ++b)
      call.y[(row + b) * call.outputs + output + n * apart] = total[n][b];
}

template <Stored kStored, int kStreams>
inline void DotAllRows(const RowProductCall& call, int64_t output, int64_t apart) {
  // A row that is left over has the sums of the others, so that its place does not change its bits.
  if (call.rows == 1) return Dot<kStored, kStreams, 1, 2>(call, output, apart, 0);
  int64_t row = 0;
  for (; row + 4 <= call.rows; row += 4) Dot<kStored, kStreams, 4, 1>(call, output, apart, row);
  for (; row + 2 <= call.rows; row += 2) Dot<kStored, kStreams, 2, 1>(call, output, apart, row);
  if (row < call.rows) Dot<kStored, kStreams, 1, 1>(call, output, apart, row);
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
    constexpr int kStreams = 4;
    const int64_t apart = (last - first) / kStreams;
    for (int64_t i = 0; i < apart; ++i) DotAllRows<kStored, kStreams>(call, first + i, apart);
    for (int64_t i = first + kStreams * apart; i < last; ++i) DotAllRows<kStored, 1>(call, i, 0);
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
