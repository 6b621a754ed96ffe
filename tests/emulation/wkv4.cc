// The kernels of WKV4 for test_emulation.py.
#include "emulation.h"
#include "rows.h"

#include "wkv4/backward.cu"
#include "wkv4/forward.cu"

using namespace rwkv_jax;
using namespace rwkv_jax::cuda;

namespace {

// The next arrays of a call.
struct Arrays {
  void* const* next;

  void* Any() { return *next++; }
  float* Floats() { return static_cast<float*>(*next++); }
  template <typename Float>
  Wkv4State<Float> State() {
    next += 3;
    const auto part = [&](int i) { return static_cast<Float*>(next[i]); };
    return {part(-3), part(-2), part(-1)};
  }
};

}  // namespace

// Forward and backward; `sizes` are B, T, C, the arrays those of the two calls in order, then the
// scratch of both.
extern "C" int Wkv4(unsigned seed, const int64_t* sizes, int dtype, int decay, int64_t splits,
                    const emulation::Rows& rows, void* const* pointers) {
  emulation::random.seed(seed);
  Arrays arrays{pointers};
  Wkv4ForwardCall forward;
  forward.dims = {sizes[0], sizes[1], sizes[2]};
  rows.Put(forward);
  forward.dtype = static_cast<Dtype>(dtype);
  forward.decay = static_cast<Decay>(decay);
  forward.w = arrays.Floats(), forward.u = arrays.Floats();
  forward.k = arrays.Any(), forward.v = arrays.Any();
  forward.initial_state = arrays.State<const float>();
  forward.y = arrays.Any();
  forward.final_state = arrays.State<float>();
  forward.states = arrays.State<float>();

  Wkv4BackwardCall backward;
  static_cast<Wkv4Call&>(backward) = forward;
  backward.states = {forward.states.num, forward.states.den, forward.states.log_max};
  backward.dy = arrays.Any();
  backward.dfinal_state = arrays.State<const float>();
  backward.partials = splits;
  backward.dw = arrays.Floats(), backward.du = arrays.Floats();
  backward.dk = arrays.Any(), backward.dv = arrays.Any();
  backward.dinitial_state = arrays.State<float>();

  const int error = Wkv4Forward(nullptr, forward, splits, arrays.Floats());
  return error ? error : Wkv4Backward(nullptr, backward, arrays.Floats());
}

// `arrays` are those of the call in order, of which the last three are the state before and after.
extern "C" int Wkv4InPlace(const int64_t* sizes, int dtype, int decay, void* const* pointers) {
  Arrays arrays{pointers};
  Wkv4ForwardCall call;
  call.dims = {sizes[0], 1, sizes[2], 0};
  call.dtype = static_cast<Dtype>(dtype);
  call.decay = static_cast<Decay>(decay);
  call.w = arrays.Floats(), call.u = arrays.Floats();
  call.k = arrays.Any(), call.v = arrays.Any();
  call.y = arrays.Any();
  call.final_state = arrays.State<float>();
  call.initial_state = {call.final_state.num, call.final_state.den, call.final_state.log_max};
  return Wkv4Step(nullptr, call);
}
