// The kernels of WKV6 and WKV5 for test_emulation.py.
#include "emulation.h"
#include "rows.h"

#include "wkv6/recurrent.cu"

using namespace rwkv_jax;
using namespace rwkv_jax::cuda;

// For each head.
extern "C" int64_t Wkv6ScratchFloats(int64_t tokens, int64_t head_size, int64_t splits,
                                     int matrix_units) {
  Wkv6Call call;
  call.dims = {1, tokens, 1, head_size, Chunks(tokens)};
  return matrix_units ? Wkv6ChunkScratch::Size(call, splits)
                      : splits * Wkv6ScratchSize(head_size);
}

// Forward and backward; `sizes` are B, T, H, K, and the arrays those of the two calls in order. The
// scratch of sequences on matrix units has the gradients of frames first.
extern "C" int Wkv6(unsigned seed, const int64_t* sizes, int dtype, int decay, int constant_decay,
                    int64_t splits, int matrix_units, const emulation::Rows& rows,
                    void* const* arrays) {
  emulation::random.seed(seed);
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  Wkv6ForwardCall forward;
  forward.dims = {sizes[0], sizes[1], sizes[2], sizes[3]};
  rows.Put(forward);
  forward.dtype = static_cast<Dtype>(dtype);
  forward.states_dtype = forward.dtype == Dtype::kF32 ? Dtype::kF32 : Dtype::kBF16;
  forward.decay = static_cast<Decay>(decay);
  forward.constant_decay = constant_decay;
  forward.r = arrays[0], forward.w = arrays[1], forward.k = arrays[2], forward.v = arrays[3];
  forward.u = floats(4);
  forward.initial_state = floats(5);
  forward.y = arrays[6];
  forward.final_state = floats(7);
  forward.states = arrays[8];

  Wkv6BackwardCall backward;
  static_cast<Wkv6Call&>(backward) = forward;
  backward.states = forward.states;
  backward.dy = arrays[9];
  backward.dfinal_state = floats(10);
  backward.partials = matrix_units ? forward.dims.saved : splits;
  backward.dr = arrays[11], backward.dw = arrays[12], backward.dk = arrays[13];
  backward.dv = arrays[14];
  backward.du = floats(15), backward.dinitial_state = floats(16);

  float* const scratch = floats(17);
  if (!matrix_units) {
    const int error = Wkv6Forward(nullptr, forward);
    const int64_t heads = sizes[0] * sizes[2], stride = splits * Wkv6ScratchSize(sizes[3]);
    return error ? error : Wkv6Backward(nullptr, backward, {scratch, heads, splits, stride});
  }
  if (rows.spans != nullptr) {
    uint4* const gradients = reinterpret_cast<uint4*>(scratch);
    float* const memory = scratch + sizes[2] * StateGradientFloats(sizes[3], rows.frames);
    const Splits parts = rows.SplitsOf(sizes[1], splits, memory, kWkv6SummarySize);
    int error = Wkv6Scan(nullptr, forward, parts);
    if (!error) error = Wkv6ReverseScan(nullptr, backward, parts, gradients);
    return error ? error : Wkv6Gradients(nullptr, backward, gradients);
  }
  const int error =
      Wkv6ChunkForward(nullptr, forward, {splits, scratch, kWkv6SummarySize});
  const int64_t stride = Wkv6ChunkScratch::Size(backward, splits);
  return error ? error : Wkv6ChunkBackward(nullptr, backward, {scratch, stride, splits});
}
