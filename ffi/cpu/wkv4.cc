// The WKV4 kernels, compiled once for each instruction set RWKV_JAX_ISA.
#include "wkv4.h"

#include "decay.h"
#include "vector.h"

namespace rwkv_jax::cpu {
namespace {

// Where a vector of channels of a sequence lies in the arrays, which have `count` of these channels.
struct Channels {
  Channels(const Wkv4Call& call, int64_t sequence, int64_t first)
      : count(Smaller(call.dims.channels - first, kLanes)),
        sequence(sequence),
        span(call.sequences(sequence, call.dims.tokens)),
        all(call.dims.channels),
        first(first) {}

  int64_t Once() const { return sequence * all + first; }
  int64_t Token(int64_t t) const { return (span.first_token + t) * all + first; }
  int64_t SavedState(int64_t n) const { return (span.first_chunk + n) * all + first; }

  const int64_t count, sequence;
  const Span span;

 private:
  const int64_t all, first;
};

// LoadAs and StoreAs for a vector that may be the last one, and short. What it lacks is zeros.
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

// The state that a segment starts from; -1e38 is NOTHING in rwkv_jax/wkv4/reference.py.
inline State Nothing() { return {Vec{}, Vec{}, Broadcast(-1e38f)}; }

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
    const auto [value, derivative] = UnboundedLogDecay(w, call.decay);
    log_decay = value;
    slope = derivative;
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

// The weights with which a token reads the state before it, and itself, and those with which the two
// make the next state.
struct TokenWeights {
  Weights read, kept;
};

// Relative to log_max, which moves from token to token, so that any exponent is right.
template <bool kMarked>
struct MovingMax {
  static constexpr bool kMarks = kMarked;  // whether tokens may have marks

  explicit MovingMax(const Parameters& parameters) : u(parameters.u), w(parameters.log_decay) {}

  State Enter(const State& state) const { return state; }
  State Leave(const State& state) const { return state; }
  State EnterGradient(const State& dstate, Vec) const { return dstate; }
  State LeaveGradient(const State& dstate, Vec) const { return dstate; }
  // What is kept of a token, and its weights.
  using Kept = TokenWeights;
  Kept Token(Vec log_max, Vec decayed, Vec k) const {
    return {Relative(log_max, u + k), Weigh(log_max, w, decayed, k)};
  }
  TokenWeights WeightsOf(const Kept& kept) const { return kept; }

  const Vec u, w;
};

// Whether any token of a row has a mark, from `start`, the first one of a word, to before `end`.
bool Marked(const Marks& marks, int64_t row, int64_t start, int64_t end) {
  uint32_t marked = 0;
  for (int64_t t = start; marks.Given() && t < end; t += kWordTokens) {
    const uint32_t word = marks.Word(row, t);
    marked |= (word | word >> kWordTokens) & ((1u << Smaller(end - t, kWordTokens)) - 1);
  }
  return marked != 0;
}

// Relative to one number for all tokens of a run without marks: one exponential a token where
// MovingMax takes two.
class CommonMax {
 public:
  static constexpr bool kMarks = false;

  // For the keys of `tokens` tokens after a state.
  template <typename Key>
  CommonMax(const Parameters& parameters, Vec log_max, int64_t tokens, const Key& key)
      : max_(log_max), min_(log_max), u_(parameters.u), w_(parameters.log_decay) {
    for (int64_t t = 0; t < tokens; ++t) {
      const Vec k = key(t);
      max_ = k > max_ ? k : max_;
      min_ = k < min_ ? k : min_;
      sum_ += k;
    }
    bonus_ = Exp(Clamp(u_, kMinExp, kMaxExp));
    kept_ = Exp(Clamp(w_, kMinExp, 0.0f));
  }

  // Whether no exponent is so far from another that a weight could vanish; not for a NaN.
  bool Right() const {
    constexpr float kFar = 40;
    const auto right =
        (max_ - min_ < kFar) & (u_ < kFar) & (u_ > -kFar) & (w_ <= 0.0f) & (sum_ == sum_);
    for (int i = 0; i < kLanes; ++i)
      if (!right[i]) return false;
    return true;
  }

  State Enter(const State& state) const { return Scaled(state, state.log_max - max_); }
  State Leave(const State& state) const { return Scaled(state, max_ - state.log_max); }
  State EnterGradient(const State& dstate, Vec log_max) const {
    return Scaled(dstate, max_ - log_max);
  }
  State LeaveGradient(const State& dstate, Vec log_max) const {
    return Scaled(dstate, log_max - max_);
  }
  using Kept = Vec;
  Kept Token(Vec, Vec, Vec k) const { return Exp(k - max_); }
  TokenWeights WeightsOf(Kept now) const { return {{Broadcast(1.0f), bonus_ * now}, {kept_, now}}; }

 private:
  static State Scaled(const State& state, Vec exponent) {
    const Vec scale = Exp(exponent);
    return {scale * state.num, scale * state.den, state.log_max};
  }

  Vec max_, min_, sum_ = {}, bonus_, kept_;
  const Vec u_, w_;
};

// The state after a token with these weights.
inline State Add(const State& state, const Weights& weights, Vec log_max, Vec v) {
  return {weights.past * state.num + weights.now * v, weights.past * state.den + weights.now,
          log_max};
}

// Tokens that the forward pass takes a vector of channels through, before the next vector; divides
// kChunk.
constexpr int64_t kRun = 16;

template <typename Max>
State ForwardTokens(const Wkv4ForwardCall& call, const Channels& channels, const Max& max,
                    Vec log_decay, State state, int64_t start, int64_t end) {
  const int64_t count = channels.count;
  state = max.Enter(state);
  for (int64_t t = start; t < end; ++t) {
    const int64_t token = channels.Token(t);
    const int64_t ahead = channels.Token(Smaller(t + kRun, channels.span.tokens - 1));
    Prefetch(call.dtype, call.k, ahead);
    Prefetch(call.dtype, call.v, ahead);
    Prefetch(call.dtype, call.y, ahead);
    if (Max::kMarks && call.marks.Absent(channels.sequence, t)) {
      StoreUpTo(count, call.dtype, call.y, token, Vec{});
      continue;
    }
    if (Max::kMarks && call.marks.Starts(channels.sequence, t)) state = Nothing();
    const Vec k = LoadUpTo(count, call.dtype, call.k, token);
    const Vec v = LoadUpTo(count, call.dtype, call.v, token);
    const Vec decayed = state.log_max + log_decay;
    const auto [read, kept] = max.WeightsOf(max.Token(state.log_max, decayed, k));
    StoreUpTo(count, call.dtype, call.y, token,
              (read.past * state.num + read.now * v) / (read.past * state.den + read.now));
    state = Add(state, kept, Larger(decayed, k), v);
  }
  return max.Leave(state);
}

void ForwardRun(const Wkv4ForwardCall& call, const Channels& channels, int64_t start) {
  const int64_t count = channels.count, end = Smaller(start + kRun, channels.span.tokens);
  const Parameters parameters(call, channels);
  State state = LoadState(call.final_state, channels.Once(), count);
  if (call.states.num && start % kChunk == 0)
    StoreState(call.states, channels.SavedState(start / kChunk), count, state);
  const CommonMax common(parameters, state.log_max, end - start, [&](int64_t t) {
    return LoadUpTo(count, call.dtype, call.k, channels.Token(start + t));
  });
  const auto run = [&](const auto& max) {
    return ForwardTokens(call, channels, max, parameters.log_decay, state, start, end);
  };
  const bool marked = Marked(call.marks, channels.sequence, start, end);
  state = marked           ? run(MovingMax<true>(parameters))
          : common.Right() ? run(common)
                           : run(MovingMax<false>(parameters));
  StoreState(call.final_state, channels.Once(), count, state);
}

void Forward(const Wkv4ForwardCall& call, int64_t sequence, int64_t first, int64_t end) {
  const int64_t tokens = call.sequences(sequence, call.dims.tokens).tokens;
  for (int64_t c = first; c < end; c += kLanes) {
    const Channels channels(call, sequence, c);
    StoreState(call.final_state, channels.Once(), channels.count,
               LoadState(call.initial_state, channels.Once(), channels.count));
  }
  for (int64_t start = 0; start < tokens; start += kRun)
    for (int64_t c = first; c < end; c += kLanes)
      ForwardRun(call, Channels(call, sequence, c), start);
}

// Takes the gradients of a vector of channels from after a chunk to before it.
//
// The exponents that a weight is relative to cancel out of y, so what y adds to the gradient of
// log_max is what it takes from that of u + k. A step hands the gradient of its log_max, which is
// that of all weights in the next state, to the larger exponent, less what the other has by its own
// weight; or half of the difference to each of two equal ones.
template <typename Max>
void BackwardTokens(const Wkv4BackwardCall& call, const Channels& channels, const Max& max,
                    const Parameters& parameters, State state, int64_t n) {
  const int64_t start = n * kChunk, tokens = Smaller(channels.span.tokens - start, kChunk);
  const int64_t count = channels.count;
  struct Token {
    State before;
    typename Max::Kept kept;
    Vec k, v;
  };
  Token replayed[kChunk];
  const Vec first_log_max = state.log_max;
  state = max.Enter(state);
  for (int64_t t = 0; t < tokens; ++t) {
    if (Max::kMarks && call.marks.Absent(channels.sequence, start + t)) continue;
    if (Max::kMarks && call.marks.Starts(channels.sequence, start + t)) state = Nothing();
    const Vec k = LoadUpTo(count, call.dtype, call.k, channels.Token(start + t));
    const Vec v = LoadUpTo(count, call.dtype, call.v, channels.Token(start + t));
    const Vec decayed = state.log_max + parameters.log_decay;
    replayed[t] = {state, max.Token(state.log_max, decayed, k), k, v};
    state = Add(state, max.WeightsOf(replayed[t].kept).kept, Larger(decayed, k), v);
  }

  auto [dnum, dden, dlog_max] =
      max.EnterGradient(LoadState(call.dinitial_state, channels.Once(), count), state.log_max);
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
    if (Max::kMarks && call.marks.Absent(channels.sequence, start + t)) {
      StoreUpTo(count, call.dtype, call.dk, token, Vec{});
      StoreUpTo(count, call.dtype, call.dv, token, Vec{});
      continue;
    }
    const auto& [num, den, log_max] = replayed[t].before;
    const auto [read, kept] = max.WeightsOf(replayed[t].kept);
    const Vec k = replayed[t].k, v = replayed[t].v;

    const Vec decayed = log_max + parameters.log_decay;
    const Vec dpast = kept.past * (dnum * num + dden * den);
    const Vec dnow = kept.now * (dnum * v + dden);
    const Vec tied = 0.5f * (dlog_max + dpast - dnow);
    const auto older = decayed > k;
    const Vec ddecayed = older ? dlog_max - dnow : decayed == k ? tied : dpast;
    Vec dk = older ? dnow : dlog_max - ddecayed;
    Vec dv = kept.now * dnum;
    dw += ddecayed;

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
    if (Max::kMarks && call.marks.Starts(channels.sequence, start + t))
      dnum = dden = dlog_max = Vec{};
  }
  if (n == 0) dw *= parameters.slope;
  StoreState(call.dinitial_state, channels.Once(), count,
             max.LeaveGradient({dnum, dden, dlog_max}, first_log_max));
  StoreUpTo(count, Dtype::kF32, call.dw, channels.Once(), dw);
  StoreUpTo(count, Dtype::kF32, call.du, channels.Once(), du);
}

void BackwardChunk(const Wkv4BackwardCall& call, const Channels& channels, int64_t n) {
  const int64_t start = n * kChunk, tokens = Smaller(channels.span.tokens - start, kChunk);
  const Parameters parameters(call, channels);
  const State state = LoadState(call.states, channels.SavedState(n), channels.count);
  const CommonMax common(parameters, state.log_max, tokens, [&](int64_t t) {
    return LoadUpTo(channels.count, call.dtype, call.k, channels.Token(start + t));
  });
  if (Marked(call.marks, channels.sequence, start, start + tokens))
    BackwardTokens(call, channels, MovingMax<true>(parameters), parameters, state, n);
  else if (common.Right())
    BackwardTokens(call, channels, common, parameters, state, n);
  else
    BackwardTokens(call, channels, MovingMax<false>(parameters), parameters, state, n);
}

void Backward(const Wkv4BackwardCall& call, int64_t sequence, int64_t first, int64_t end) {
  for (int64_t c = first; c < end; c += kLanes) {
    const Channels channels(call, sequence, c);
    StoreState(call.dinitial_state, channels.Once(), channels.count,
               LoadState(call.dfinal_state, channels.Once(), channels.count));
    StoreUpTo(channels.count, Dtype::kF32, call.dw, channels.Once(), Vec{});
    StoreUpTo(channels.count, Dtype::kF32, call.du, channels.Once(), Vec{});
  }
  const int64_t chunks = call.sequences(sequence, call.dims.tokens).Chunks();
  for (int64_t n = chunks - 1; n >= 0; --n)
    for (int64_t c = first; c < end; c += kLanes)
      BackwardChunk(call, Channels(call, sequence, c), n);
}

}  // namespace

const Wkv4Kernels Wkv4Kernels::RWKV_JAX_ISA = {Forward, Backward};

}  // namespace rwkv_jax::cpu
