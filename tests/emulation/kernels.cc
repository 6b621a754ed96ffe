// The kernels on matrix units for test_emulation.py.
#include "emulation.h"
#include "rows.h"

#include "wkv7/gradients.cu"
#include "wkv7/scan.cu"

using namespace rwkv_jax;
using namespace rwkv_jax::cuda;

extern "C" int64_t ScratchFloats(int64_t tokens, int64_t head_size, int64_t splits) {
  Wkv7Call call;
  call.dims = {1, tokens, 1, head_size, (tokens + kChunk - 1) / kChunk};
  return ChunkScratch::Size(call, splits);
}

// Forward and backward; `sizes` are B, T, H, K, and the arrays those of the two calls in order. The
// scratch of sequences has the gradients of frames first.
extern "C" int Wkv7(unsigned seed, const int64_t* sizes, int half, int decay, int64_t splits,
                    const emulation::Rows& rows, void* const* arrays) {
  emulation::random.seed(seed);
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  Wkv7ForwardCall forward;
  forward.dims = {sizes[0], sizes[1], sizes[2], sizes[3]};
  rows.Put(forward);
  forward.dtype = half ? Dtype::kF16 : Dtype::kBF16;
  forward.decay = static_cast<Decay>(decay);
  forward.r = arrays[0], forward.w = arrays[1], forward.k = arrays[2];
  forward.v = arrays[3], forward.a = arrays[4], forward.b = arrays[5];
  forward.initial_state = floats(6);
  forward.y = arrays[7];
  forward.final_state = floats(8);
  forward.states = arrays[9];
  forward.states_dtype = Dtype::kBF16;
  float* const scratch = floats(10);
  float* const inexact = forward.decay == Decay::kSigmoid ? nullptr : floats(11);

  Wkv7BackwardCall backward;
  static_cast<Wkv7Call&>(backward) = forward;
  backward.states = forward.states;
  backward.dy = arrays[12];
  backward.dfinal_state = floats(13);
  backward.dr = arrays[14], backward.dw = arrays[15], backward.dk = arrays[16];
  backward.dv = arrays[17], backward.da = arrays[18], backward.db = arrays[19];
  backward.dinitial_state = floats(20);

  if (rows.spans != nullptr) {
    uint4* const gradients = reinterpret_cast<uint4*>(scratch);
    float* const memory = scratch + sizes[2] * StateGradientFloats(sizes[3], rows.frames);
    const Splits parts = rows.SplitsOf(sizes[1], splits, memory, SummarySize(sizes[3]));
    int error = Wkv7Scan(nullptr, forward, parts, nullptr);
    if (!error) error = Wkv7ReverseScan(nullptr, backward, parts, gradients, nullptr);
    return error ? error : Wkv7Gradients(nullptr, backward, gradients, nullptr);
  }
  const Splits parts{splits, scratch, SummarySize(sizes[3])};
  const ChunkScratch rest{scratch, ChunkScratch::Size(backward, splits), splits};
  int error = Wkv7Scan(nullptr, forward, parts, inexact);
  if (!error)
    error = Wkv7ReverseScan(nullptr, backward, rest.StateSplits(backward), rest.Gradients(),
                            inexact);
  if (!error) error = Wkv7Gradients(nullptr, backward, rest.Gradients(), inexact);
  return error;
}

// A summary and a reverse summary: the inputs w, k, v, a, b and r, dy, dfinal_state, and the results.
extern "C" int Wkv7Summaries(unsigned seed, const int64_t* sizes, int half, const uint32_t* marks,
                             void* const* arrays) {
  emulation::random.seed(seed);
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  Wkv7SummaryCall summary = {};
  summary.dims = {sizes[0], sizes[1], sizes[2], sizes[3], 0};
  summary.dtype = half ? Dtype::kF16 : Dtype::kBF16;
  summary.decay = Decay::kSigmoid;
  summary.marks = {marks, Marks::Words(sizes[1])};
  summary.w = arrays[0], summary.k = arrays[1], summary.v = arrays[2];
  summary.a = arrays[3], summary.b = arrays[4];
  summary.factor = floats(8), summary.added = floats(9);

  Wkv7BackwardCall backward = {};
  static_cast<Wkv7Call&>(backward) = summary;
  backward.k = backward.v = nullptr;
  backward.r = arrays[5], backward.dy = arrays[6];
  backward.dfinal_state = floats(7), backward.dinitial_state = floats(10);

  const int error = Wkv7Summary(nullptr, summary);
  return error ? error : Wkv7ReverseSummary(nullptr, backward);
}
