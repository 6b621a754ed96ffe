// The kernels of WKV7 that take one token at a time for test_emulation.py.
#include "emulation.h"
#include "rows.h"

#include "wkv7/recurrent.cu"

using namespace rwkv_jax;
using namespace rwkv_jax::cuda;

// For each split of each head.
extern "C" int64_t Wkv7TokensScratchFloats(int64_t head_size) { return ScratchSize(head_size); }

// Forward and backward; `sizes` are B, T, H, K, and the arrays those of the two calls in order. So
// many heads of all sequences run at a time.
extern "C" int Wkv7Tokens(unsigned seed, const int64_t* sizes, int dtype, int decay,
                          int64_t splits, int64_t heads, const emulation::Rows& rows,
                          void* const* arrays) {
  emulation::random.seed(seed);
  const auto floats = [&](int i) { return static_cast<float*>(arrays[i]); };
  Wkv7ForwardCall forward;
  forward.dims = {sizes[0], sizes[1], sizes[2], sizes[3]};
  rows.Put(forward);
  forward.dtype = static_cast<Dtype>(dtype);
  forward.states_dtype = forward.dtype == Dtype::kF32 ? Dtype::kF32 : Dtype::kBF16;
  forward.decay = static_cast<Decay>(decay);
  forward.r = arrays[0], forward.w = arrays[1], forward.k = arrays[2];
  forward.v = arrays[3], forward.a = arrays[4], forward.b = arrays[5];
  forward.initial_state = floats(6);
  forward.y = arrays[7];
  forward.final_state = floats(8);
  forward.states = arrays[9];

  Wkv7BackwardCall backward;
  static_cast<Wkv7Call&>(backward) = forward;
  backward.states = forward.states;
  backward.dy = arrays[11];
  backward.dfinal_state = floats(12);
  backward.dr = arrays[13], backward.dw = arrays[14], backward.dk = arrays[15];
  backward.dv = arrays[16], backward.da = arrays[17], backward.db = arrays[18];
  backward.dinitial_state = floats(19);

  const int error = Wkv7Forward(nullptr, forward);
  const int64_t stride = splits * ScratchSize(sizes[3]);
  return error ? error : Wkv7Backward(nullptr, backward, {floats(10), heads, splits, stride});
}
