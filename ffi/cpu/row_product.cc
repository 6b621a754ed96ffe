#include "row_product.h"

#include <type_traits>

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
  if constexpr (kStored == Stored::kF16) return LoadF16(from, index);
  if constexpr (kStored == Stored::kI8)
    return __builtin_convertvector(LoadBytes(static_cast<const int8_t*>(from) + index), Vec);
}

template <Stored kStored>
inline float LoadWeight(const void* from, int64_t index) {
  if constexpr (kStored == Stored::kF32) return static_cast<const float*>(from)[index];
  if constexpr (kStored == Stored::kI8) return static_cast<const int8_t*>(from)[index];
  if constexpr (kStored == Stored::kBF16)
    return FromBF16(Bits{} + static_cast<const uint16_t*>(from)[index])[0];
}

// The first `count` weights from `index` on, and zeros for the others.
template <Stored kStored>
inline Vec LoadSome(const void* from, int64_t index, int64_t count) {
  if constexpr (kStored == Stored::kF16) {
    uint16_t halves[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) halves[i] = static_cast<const uint16_t*>(from)[index + i];
    return LoadF16(halves, 0);
  } else {
    Vec weights = {};
    for (int64_t i = 0; i < count; ++i) weights[i] = LoadWeight<kStored>(from, index + i);
    return weights;
  }
}

// The outputs output, output + apart, ... of kRows rows, from `row` on, of W [O, I]. The matrix is read
// as kStreams streams far from each other: a CPU fetches each of them ahead within a page alone, and from
// neighbouring rows of a matrix it would come to the end of a page in all of them at once.
template <Stored kStored, int kStreams, int kRows>
inline void Dot(const RowProductCall& call, int64_t output, int64_t apart, int64_t row) {
  const int64_t inputs = call.inputs, size = inputs / call.groups;
  const int64_t whole = size - size % kLanes;
  const float* const x = call.x + row * inputs;
  const auto place = [&](int n, int64_t i) { return (output + n * apart) * inputs + i; };
  Vec total[kStreams][kRows] = {};
  for (int64_t group = 0; group < call.groups; ++group) {
    const int64_t begin = group * size;
    Vec sums[kStreams][kRows] = {};
    for (int64_t i = begin; i < begin + whole; i += kLanes)
      for (int n = 0; n < kStreams; ++n) {
        __builtin_prefetch(static_cast<const char*>(call.weight) + place(n, i) * kSize<kStored> +
                           kAhead);
        const Vec weights = LoadWeights<kStored>(call.weight, place(n, i));
        for (int b = 0; b < kRows; ++b)
          sums[n][b] = MultiplyAdd(weights, Load(x + b * inputs + i), sums[n][b]);
      }
    for (int n = 0; n < kStreams; ++n) {
      const int64_t at_scale = (output + n * apart) * call.groups + group;
      const Vec scale = Broadcast(call.scale ? call.scale[at_scale] : 1.0f);
      const Vec weights = LoadSome<kStored>(call.weight, place(n, begin + whole), size - whole);
      for (int b = 0; b < kRows; ++b) {
        const Vec left = LoadSome<Stored::kF32>(x, b * inputs + begin + whole, size - whole);
        total[n][b] = MultiplyAdd(scale, MultiplyAdd(weights, left, sums[n][b]), total[n][b]);
      }
    }
  }
  for (int n = 0; n < kStreams; ++n)
    for (int b = 0; b < kRows; ++b)
      call.y[(row + b) * call.outputs + output + n * apart] = Sum(total[n][b]);
}

template <Stored kStored, int kStreams>
inline void DotAllRows(const RowProductCall& call, int64_t output, int64_t apart) {
  int64_t row = 0;
  for (; row + 4 <= call.rows; row += 4) Dot<kStored, kStreams, 4>(call, output, apart, row);
  for (; row + 2 <= call.rows; row += 2) Dot<kStored, kStreams, 2>(call, output, apart, row);
  if (row < call.rows) Dot<kStored, kStreams, 1>(call, output, apart, row);
}

// The sums of W [I, O] are computed for so many rows and outputs at a time, which a level-1 cache holds, and
// added up after so many inputs. A power of 2 apart, the sums of all rows would share a set of that cache.
constexpr int64_t kRowsAtOnce = 4, kOutputsAtOnce = 1024, kInputsAtOnce = 256;
constexpr int64_t kApart = kOutputsAtOnce + 16;
using Sums = float[kRowsAtOnce][kApart];

// Adds kIn of the listed inputs to the sums of `count` outputs, from `first` on, of kRows rows. While the
// first rows are computed, the kIn inputs that are listed next are fetched ahead.
template <Stored kStored, int kIn, int kRows>
inline void Add(const RowProductCall& call, const int32_t* listed, int64_t first, int64_t count,
                const float* x, float (*sums)[kApart], bool fetches) {
  constexpr int64_t kPiece = 64;
  Vec values[kRows][kIn];
  int64_t place[kIn], ahead[kIn];
  for (int i = 0; i < kIn; ++i) {
    for (int b = 0; b < kRows; ++b) values[b][i] = Broadcast(x[b * call.inputs + listed[i]]);
    place[i] = listed[i] * call.outputs + first;
    ahead[i] = listed[kIn + i] * call.outputs + first;
  }
  const auto add = [&](int64_t o, const Vec(&weights)[kIn]) {
    for (int b = 0; b < kRows; ++b) {
      Vec sum = Load(sums[b] + o);
      for (int i = 0; i < kIn; ++i) sum = MultiplyAdd(values[b][i], weights[i], sum);
      Store(sums[b] + o, sum);
    }
  };
  const auto vector = [&](int64_t o) {
    Vec weights[kIn];
    for (int i = 0; i < kIn; ++i) weights[i] = LoadWeights<kStored>(call.weight, place[i] + o);
    add(o, weights);
  };
  int64_t o = 0;
  for (; o + kPiece <= count; o += kPiece) {
    if (fetches)
      for (int i = 0; i < kIn; ++i)
        for (int64_t line = 0; line < kPiece * kSize<kStored>; line += 64)
          __builtin_prefetch(static_cast<const char*>(call.weight) +
                             (ahead[i] + o) * kSize<kStored> + line);
    for (int64_t at = 0; at < kPiece; at += kLanes) vector(o + at);
  }
  for (; o + kLanes <= count; o += kLanes) vector(o);
  if (o == count) return;
  Vec weights[kIn];
  for (int i = 0; i < kIn; ++i)
    weights[i] = LoadSome<kStored>(call.weight, place[i] + o, count - o);
  add(o, weights);
}

template <Stored kStored, int kIn>
inline void AddToAllRows(const RowProductCall& call, const int32_t* listed, int64_t first,
                         int64_t count, const float* x, int64_t rows, Sums& sums) {
  int64_t row = 0;
  const auto add = [&](auto taken) {
    constexpr int kRows = taken();
    for (; row + kRows <= rows; row += kRows)
      Add<kStored, kIn, kRows>(call, listed, first, count, x + row * call.inputs, sums + row,
                               row == 0);
  };
  add(std::integral_constant<int, 4>());
  add(std::integral_constant<int, 2>());
  add(std::integral_constant<int, 1>());
}

// Lists the inputs from `begin` on, up to `end`, that are not zero in all rows.
inline int64_t ListInputs(const RowProductCall& call, const float* x, int64_t rows, int64_t begin,
                          int64_t end, int32_t* listed) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    bool counts = false;
    for (int64_t b = 0; b < rows; ++b) counts |= x[b * call.inputs + i] != 0;
    listed[count] = static_cast<int32_t>(i);
    count += counts;
  }
  return count;
}

// A row has the same bits with any other rows: each output is a chain of additions in the order of the
// inputs, to which an input that is zero in this row adds nothing.
template <Stored kStored>
void InputsOf(const RowProductCall& call, int64_t begin, int64_t end, int64_t first, int64_t last,
              float* to) {
  constexpr int kMostIn = 8;
  const int64_t size = call.inputs / call.groups, all = last - first;
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = Smaller(kRowsAtOnce, call.rows - row);
    const float* const x = call.x + row * call.inputs;
    for (int64_t b = 0; b < rows; ++b)
      __builtin_memset(to + (row + b) * call.outputs + first, 0, all * sizeof(float));
    for (int64_t at = begin, stop; at < end; at = stop) {
      const int64_t group = at / size;
      stop = Smaller(Smaller(at + kInputsAtOnce, end), (group + 1) * size);
      int32_t listed[kInputsAtOnce + kMostIn];
      const int64_t inputs = ListInputs(call, x, rows, at, stop, listed);
      if (inputs == 0) continue;
      for (int i = 0; i < kMostIn; ++i) listed[inputs + i] = listed[inputs - 1];
      for (int64_t output = first, count; output < last; output += count) {
        count = Smaller(kOutputsAtOnce, last - output);
        Sums sums;
        // The last vector may go past the last output.
        for (int64_t b = 0; b < rows; ++b)
          __builtin_memset(sums[b], 0, (count + kLanes) * sizeof(float));
        int64_t i = 0;
        // The values of several rows would leave no registers for more inputs.
        for (; rows == 1 && i + 8 <= inputs; i += 8)
          Add<kStored, 8, 1>(call, listed + i, output, count, x, sums, true);
        for (; i + 4 <= inputs; i += 4)
          AddToAllRows<kStored, 4>(call, listed + i, output, count, x, rows, sums);
        for (; i < inputs; ++i)
          AddToAllRows<kStored, 1>(call, listed + i, output, count, x, rows, sums);
        for (int64_t b = 0; b < rows; ++b) {
          float* const y = to + (row + b) * call.outputs + output;
          for (int64_t o = 0; o < count; ++o)
            y[o] += call.scale ? call.scale[(output + o) * call.groups + group] * sums[b][o]
                               : sums[b][o];
        }
      }
    }
  }
}

template <Stored kStored>
void OutputsOf(const RowProductCall& call, int64_t first, int64_t last) {
  constexpr int kStreams = 4;
  const int64_t apart = (last - first) / kStreams;
  for (int64_t i = 0; i < apart; ++i) DotAllRows<kStored, kStreams>(call, first + i, apart);
  for (int64_t i = first + kStreams * apart; i < last; ++i) DotAllRows<kStored, 1>(call, i, 0);
}

// Calls body() with the type in which the matrix is stored as a template argument.
template <typename Body>
inline void Dispatch(Stored stored, const Body& body) {
  switch (stored) {
    case Stored::kF32: return body(std::integral_constant<Stored, Stored::kF32>());
    case Stored::kBF16: return body(std::integral_constant<Stored, Stored::kBF16>());
    case Stored::kF16: return body(std::integral_constant<Stored, Stored::kF16>());
    case Stored::kI8: return body(std::integral_constant<Stored, Stored::kI8>());
  }
}

void Outputs(const RowProductCall& call, int64_t first, int64_t last) {
  Dispatch(call.stored, [&](auto stored) { OutputsOf<stored()>(call, first, last); });
}

void Inputs(const RowProductCall& call, int64_t begin, int64_t end, int64_t first, int64_t last,
            float* sums) {
  Dispatch(call.stored,
           [&](auto stored) { InputsOf<stored()>(call, begin, end, first, last, sums); });
}

}  // namespace

const RowProductKernels RowProductKernels::RWKV_JAX_ISA = {Outputs, Inputs};

}  // namespace rwkv_jax::cpu
