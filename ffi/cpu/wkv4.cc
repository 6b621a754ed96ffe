// The WKV4 kernels, compiled once for each instruction set, RWKV_JAX_ISA.
#include "wkv4.h"

#include "vector.h"

namespace rwkv_jax::cpu {
namespace {

// Where the arrays of a vector of channels are, of which there are `count` in the arrays.
struct Channels {
  Channels(const Wkv4Dims& dims, int64_t batch, int64_t first)
      : count(Smaller(dims.channels - first, kLanes)), dims(dims), batch(batch), first(first) {}

  int64_t Once() const { return batch * dims.channels + first; }
  int64_t Token(int64_t t) const { return (batch * dims.tokens + t) * dims.channels + first; }
  int64_t SavedState(int64_t n) const { return (batch * dims.saved + n) * dims.channels + first; }

  const int64_t count;

 private:
  const Wkv4Dims& dims;
  const int64_t batch, first;
};

int64_t Bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// LoadAs and StoreAs for a vector that is maybe the last, and short; it is then filled with zeros.
[[gnu::noinline]] Vec LoadShort(Dtype dtype, const void* from, int64_t index, int64_t count) {
  float padded[kLanes] = {};
  __builtin_memcpy(padded, static_cast<const char*>(from) + index * Bytes(dtype),
                   count * Bytes(dtype));
  return LoadAs(dtype, padded, 0);
}

inline Vec LoadUpTo(int64_t count, Dtype dtype, const void* from, int64_t index) {
  return count == kLanes ? LoadAs(dtype, from, index) : LoadShort(dtype, from, index, count);
}

[[gnu::noinline]] void StoreShort(Dtype dtype, void* to, int64_t index, int64_t count, Vec x) {
  float padded[kLanes];
  StoreAs(dtype, padded, 0, x);
  __builtin_memcpy(static_cast<char*>(to) + index * Bytes(dtype), padded, count * Bytes(dtype));
}

inline void StoreUpTo(int64_t count, Dtype dtype, void* to, int64_t index, Vec x) {
  if (count == kLanes)
    StoreAs(dtype, to, index, x);
  else
    StoreShort(dtype, to, index, count, x);
}

struct State {
  Vec num, den, log_max;
};

template <typename Float>
State LoadState(const Wkv4State<Float>& from, int64_t index, int64_t count) {
  return {LoadUpTo(count, Dtype::kF32, from.num, index),
          LoadUpTo(count, Dtype::kF32, from.den, index),
          LoadUpTo(count, Dtype::kF32, from.log_max, index)};
}

void StoreState(const Wkv4State<float>& to, int64_t index, int64_t count, const State& state) {
  StoreUpTo(count, Dtype::kF32, to.num, index, state.num);
  StoreUpTo(count, Dtype::kF32, to.den, index, state.den);
  StoreUpTo(count, Dtype::kF32, to.log_max, index, state.log_max);
}

struct Parameters {
  Parameters(const Wkv4Call& call, const Channels& channels)
      : u(LoadUpTo(channels.count, Dtype::kF32, call.u, channels.Once())) {
    const Vec w = LoadUpTo(channels.count, Dtype::kF32, call.w, channels.Once());
    log_decay = w;
    slope = Broadcast(1.0f);
    if (call.decay == Decay::kLog) return;
    // As unbounded_log_decay in rwkv_jax/_decay.py: the largest rate is 1e30.
    constexpr float kLargest = 69.07755279f;
    log_decay = -Exp(Clamp(w, kMinExp, kLargest));
    slope = w > kLargest ? Vec{} : log_decay;
  }

  Vec u, log_decay;
  Vec slope;  // of the log decay with respect to w
};

// e^log_past and e^log_now over the larger of them.
struct Weights {
  Vec past, now;
};

inline Weights Relative(Vec log_past, Vec log_now) {
  const Vec difference = log_past - log_now, one = Broadcast(1.0f);
  const auto smaller = difference < 0.0f;
  const Vec exponent = smaller ? difference : -difference;
  const Vec ratio = Exp(exponent < kMinExp ? Broadcast(kMinExp) : exponent);
  return {smaller ? ratio : one, smaller ? one : ratio};
}

// The larger one, NaN if one of them is.
inline Vec Larger(Vec a, Vec b) {
  const Vec larger = a > b ? a : b;
  return a == a ? larger : a;
}

// The weights of a state and of a token after it. `decayed` is the sum of log_max and log_decay as it
// was rounded; the sums take what is missing, so that over many tokens log_max does not drift away
// from them.
inline Weights Weigh(Vec log_max, Vec log_decay, Vec decayed, Vec k) {
  Weights weights = Relative(decayed, k);
  const Vec missing = (log_max - decayed) + log_decay, none = {};
  const auto small = missing * missing < 1e-4f;
  weights.past += weights.past * (small ? missing : none);
  return weights;
}

// The state after a token with these weights.
inline State Add(const State& state, const Weights& weights, Vec log_max, Vec v) {
  return {weights.past * state.num + weights.now * v, weights.past * state.den + weights.now,
          log_max};
}

// Tokens that the forward pass takes a vector of channels through, before the next vector; divides
// kChunk.
constexpr int64_t kRun = 16;

void ForwardRun(const Wkv4ForwardCall& call, const Channels& channels, int64_t start) {
  const int64_t count = channels.count, end = Smaller(start + kRun, call.dims.tokens);
  const Parameters parameters(call, channels);
  State state = LoadState(call.final_state, channels.Once(), count);
  if (call.states.num && start % kChunk == 0)
    StoreState(call.states, channels.SavedState(start / kChunk), count, state);
  for (int64_t t = start; t < end; ++t) {
    const int64_t token = channels.Token(t);
    const int64_t ahead = channels.Token(Smaller(t + kRun, call.dims.tokens - 1));
    Prefetch(call.dtype, call.k, ahead);
    Prefetch(call.dtype, call.v, ahead);
    Prefetch(call.dtype, call.y, ahead);
    const Vec k = LoadUpTo(count, call.dtype, call.k, token);
    const Vec v = LoadUpTo(count, call.dtype, call.v, token);
    const Weights read = Relative(state.log_max, parameters.u + k);
    StoreUpTo(count, call.dtype, call.y, token,
              (read.past * state.num + read.now * v) / (read.past * state.den + read.now));
    const Vec decayed = state.log_max + parameters.log_decay;
    const Weights weights = Weigh(state.log_max, parameters.log_decay, decayed, k);
    state = Add(state, weights, Larger(decayed, k), v);
  }
  StoreState(call.final_state, channels.Once(), count, state);
}

void Forward(const Wkv4ForwardCall& call, int64_t batch, int64_t first_channel) {
  const int64_t end = Smaller(first_channel + kChannels, call.dims.channels);
  for (int64_t c = first_channel; c < end; c += kLanes) {
    const Channels channels(call.dims, batch, c);
    StoreState(call.final_state, channels.Once(), channels.count,
               LoadState(call.initial_state, channels.Once(), channels.count));
  }
  for (int64_t start = 0; start < call.dims.tokens; start += kRun)
    for (int64_t c = first_channel; c < end; c += kLanes)
      ForwardRun(call, Channels(call.dims, batch, c), start);
}

// Takes the gradients of a vector of channels from after a chunk to before it.
//
// The exponents that a weight is relative to cancel out of y, so what y adds to the gradient of
// log_max is what it takes from that of u + k. A step hands the gradient of its log_max, which is
// that of all weights in the next state, to the larger exponent, less what the other has by its own
// weight; or half of the difference to each of two equal ones.
void BackwardChunk(const Wkv4BackwardCall& call, const Channels& channels, int64_t n) {
  const int64_t start = n * kChunk, tokens = Smaller(call.dims.tokens - start, kChunk);
  const int64_t count = channels.count;
  const Parameters parameters(call, channels);
  struct Token {
    State state;  // before it
    Weights kept;
    Vec k, v;
  };
  Token replayed[kChunk];
  State state = LoadState(call.states, channels.SavedState(n), count);
  for (int64_t t = 0; t < tokens; ++t) {
    const Vec k = LoadUpTo(count, call.dtype, call.k, channels.Token(start + t));
    const Vec v = LoadUpTo(count, call.dtype, call.v, channels.Token(start + t));
    const Vec decayed = state.log_max + parameters.log_decay;
    replayed[t] = {state, Weigh(state.log_max, parameters.log_decay, decayed, k), k, v};
    state = Add(state, replayed[t].kept, Larger(decayed, k), v);
  }

  auto [dnum, dden, dlog_max] = LoadState(call.dinitial_state, channels.Once(), count);
  Vec dw = LoadUpTo(count, Dtype::kF32, call.dw, channels.Once());
  Vec du = LoadUpTo(count, Dtype::kF32, call.du, channels.Once());
  for (int64_t t = tokens - 1; t >= 0; --t) {
    const int64_t token = channels.Token(start + t);
    if (n > 0) {
      const int64_t next = channels.Token(start - kChunk + t);
      Prefetch(call.dtype, call.k, next);
      Prefetch(call.dtype, call.v, next);
      Prefetch(call.dtype, call.dy, next);
      Prefetch(call.dtype, call.dk, next);
      Prefetch(call.dtype, call.dv, next);
    }
    const auto& [before, kept, k, v] = replayed[t];
    const auto& [num, den, log_max] = before;

    const Vec decayed = log_max + parameters.log_decay;
    const Vec dpast = kept.past * (dnum * num + dden * den);
    const Vec dnow = kept.now * (dnum * v + dden);
    const Vec tied = 0.5f * (dlog_max + dpast - dnow);
    const auto older = decayed > k;
    const Vec ddecayed = older ? dlog_max - dnow : decayed == k ? tied : dpast;
    Vec dk = older ? dnow : dlog_max - ddecayed;
    Vec dv = kept.now * dnum;
    dw += ddecayed;

    const Weights read = Relative(log_max, parameters.u + k);
    const Vec scale = 1.0f / (read.past * den + read.now);
    const Vec y = (read.past * num + read.now * v) * scale;
    const Vec dsum = LoadUpTo(count, call.dtype, call.dy, token) * scale;
    const Vec dbonus = read.now * dsum * (v - y);
    du += dbonus;
    dk += dbonus;
    dlog_max = ddecayed - dbonus;
    dv += read.now * dsum;
    dnum = kept.past * dnum + read.past * dsum;
    dden = kept.past * dden - read.past * dsum * y;
    StoreUpTo(count, call.dtype, call.dk, token, dk);
    StoreUpTo(count, call.dtype, call.dv, token, dv);
  }
  if (n == 0) dw *= parameters.slope;
  StoreState(call.dinitial_state, channels.Once(), count, {dnum, dden, dlog_max});
  StoreUpTo(count, Dtype::kF32, call.dw, channels.Once(), dw);
  StoreUpTo(count, Dtype::kF32, call.du, channels.Once(), du);
}

void Backward(const Wkv4BackwardCall& call, int64_t batch, int64_t first_channel) {
  const int64_t end = Smaller(first_channel + kChannels, call.dims.channels);
  for (int64_t c = first_channel; c < end; c += kLanes) {
    const Channels channels(call.dims, batch, c);
    StoreState(call.dinitial_state, channels.Once(), channels.count,
               LoadState(call.dfinal_state, channels.Once(), channels.count));
    StoreUpTo(channels.count, Dtype::kF32, call.dw, channels.Once(), Vec{});
    StoreUpTo(channels.count, Dtype::kF32, call.du, channels.Once(), Vec{});
  }
  for (int64_t n = call.dims.saved - 1; n >= 0; --n)
    for (int64_t c = first_channel; c < end; c += kLanes)
      BackwardChunk(call, Channels(call.dims, batch, c), n);
}

}  // namespace

const Wkv4Kernels Wkv4Kernels::RWKV_JAX_ISA = {Forward, Backward};

}  // namespace rwkv_jax::cpu
