// The kernels of WKV6 and WKV5, compiled once for each instruction set RWKV_JAX_ISA.
#include "wkv6.h"

#include "heads.h"

namespace rwkv_jax::cpu {
namespace {

// The inputs of a run of tokens in float, [tokens, size], with d the decay factor.
struct Inputs {
  // As many vectors of rows as the registers take beside the scalars of a token.
  static constexpr int kMaxVecs = 4;

  static int64_t Scratch(int64_t tokens, int64_t size) { return 4 * tokens * size; }

  Inputs(float* scratch, int64_t tokens, int64_t size)
      : r(scratch), d(r + tokens * size), k(d + tokens * size), v(k + tokens * size) {}

  // Asks for the inputs of one token ahead of their use: the tokens of a head are too far apart in
  // memory for the CPU to foresee.
  [[gnu::always_inline]] static void PrefetchToken(const Wkv6Call& call, int64_t index) {
    const void* const inputs[] = {call.r, call.k, call.v};
    for (const void* input : inputs) Prefetch(call.dtype, input, index);
    if (!call.constant_decay) Prefetch(call.dtype, call.w, index);
  }

  void Read(const Wkv6Call& call, const Head& head, const Tokens& tokens, float* slope) const {
    for (int64_t t = 0; t < tokens.there; ++t) {
      const int64_t from = head.Token(tokens.at[t]), to = t * head.size;
      LoadRow(call.dtype, call.r, from, head.size, r + to);
      LoadRow(call.dtype, call.k, from, head.size, k + to);
      LoadRow(call.dtype, call.v, from, head.size, v + to);
      if (call.constant_decay)
        LoadRow(Dtype::kF32, call.w, head.Parameter(), head.size, d + to);
      else
        LoadRow(call.dtype, call.w, from, head.size, d + to);
    }
    DecayRow(call.decay, tokens.there * head.size, d, slope);
  }

  template <int kVecs>
  void Forward(const Wkv6ForwardCall& call, const Head& head, const Tokens& tokens, int64_t row,
               bool prefetch, float* columns) const {
    constexpr int64_t kRows = kVecs * kLanes;
    const int64_t size = head.size;
    const float* const u = call.u + head.Parameter();
    for (int64_t t = 0; t < tokens.there; ++t) {
      const int64_t token = t * size;
      const int64_t ahead = head.Token(Smaller(tokens.at[t] + kRun, head.span.tokens - 1));
      if (tokens.starts[t]) Clear(columns, size * kRows);
      Vec own = {};
      for (int64_t key = 0; key < size; key += kLanes)
        own += Load(r + token + key) * Load(u + key) * Load(k + token + key);
      const float own_weight = Sum(own);
      Vec values[kVecs], y[kVecs] = {};
      for (int i = 0; i < kVecs; ++i) values[i] = Load(v + token + row + i * kLanes);
      for (int64_t key = 0; key < size; ++key) {
        if (key % 16 == 0 && prefetch) {
          PrefetchToken(call, ahead + key);
          Prefetch(call.dtype, call.y, ahead + key);
        }
        const float r_key = r[token + key], d_key = d[token + key], k_key = k[token + key];
        float* const column = columns + key * kRows;
        for (int i = 0; i < kVecs; ++i) {
          const Vec s = Load(column + i * kLanes);
          y[i] += s * r_key;
          Store(column + i * kLanes, s * d_key + values[i] * k_key);
        }
      }
      for (int i = 0; i < kVecs; ++i) y[i] += values[i] * own_weight;
      StoreVecs(call.dtype, call.y, head.Token(tokens.at[t]) + row, y);
    }
  }

  float *const r, *const d, *const k, *const v;
};

// One chunk as the backward pass wants it. Arrays are [tokens, size], but `states`, of kLanes rows, is
// [tokens + 1, kLanes, size].
struct Chunk : Inputs {
  static constexpr int64_t kArrays = 10;

  Chunk(const Wkv6BackwardCall& call, const Head& head, float* shared, float* own)
      : Chunk(call, head, shared, own, Smaller(call.dims.tokens, kChunk)) {}
  Chunk(const Wkv6BackwardCall& call, const Head& head, float* shared, float* own, int64_t tokens)
      : Inputs(shared, tokens, head.size),
        u(call.u + head.Parameter()),
        du(call.du + head.Parameter()),
        dlog_sum(call.constant_decay ? static_cast<float*>(call.dw) + head.Parameter() : nullptr),
        states(own) {
    float* free = shared + Inputs::Scratch(tokens, head.size);
    float** const arrays[] = {&dy, &slope, &dr, &dk, &dv, &dlog};
    for (float** array : arrays) {
      *array = free;
      free += tokens * head.size;
    }
  }

  void ClearTotals(int64_t size) const {
    Clear(du, size);
    if (dlog_sum) Clear(dlog_sum, size);
  }

  TokenGradients Gradients(const Wkv6BackwardCall& call) const {
    return {{{dr, call.dr}, {dk, call.dk}, {dv, call.dv}, {dlog, call.dw}}, dlog_sum ? 3 : 4};
  }

  const float* const u;
  float *const du, *const dlog_sum;
  float *dy, *slope;
  float *dr, *dk, *dv, *dlog;
  float* const states;
};

// Starts the gradients of a chunk with those of what a token reads of itself, v (u * k)^T r.
void Start(const Chunk& chunk, int64_t tokens, int64_t size) {
  const float* const u = chunk.u;
  float* const du = chunk.du;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t token = t * size;
    Vec own = {}, down = {};
    for (int64_t i = 0; i < size; i += kLanes) {
      own += Load(chunk.r + token + i) * Load(u + i) * Load(chunk.k + token + i);
      down += Load(chunk.v + token + i) * Load(chunk.dy + token + i);
    }
    const float weight = Sum(own), dweight = Sum(down);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Vec r = Load(chunk.r + token + i) * dweight, k = Load(chunk.k + token + i);
      Store(chunk.dr + token + i, Load(u + i) * k * dweight);
      Store(chunk.dk + token + i, Load(u + i) * r);
      Store(chunk.dv + token + i, Load(chunk.dy + token + i) * weight);
      Store(chunk.dlog + token + i, Vec{});
      Store(du + i, Load(du + i) + r * k);
    }
  }
}

// The states of kLanes rows before each token of a chunk, and after the last one. Adds to dr.
void Replay(const Chunk& chunk, const Tokens& tokens, int64_t size, int64_t first_row) {
  for (int64_t t = 0; t < tokens.there; ++t) {
    const int64_t token = t * size;
    if (tokens.starts[t]) Clear(chunk.states + t * kLanes * size, kLanes * size);
    for (int first = 0; first < kLanes; first += kGroup) {
      const float* const before = chunk.states + (t * kLanes + first) * size;
      float* const after = chunk.states + ((t + 1) * kLanes + first) * size;
      Vec v[kGroup], dy[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        v[i] = Broadcast(chunk.v[token + first_row + first + i]);
        dy[i] = Broadcast(chunk.dy[token + first_row + first + i]);
      }
      for (int64_t key = 0; key < size; key += kLanes) {
        const Vec d = Load(chunk.d + token + key), k = Load(chunk.k + token + key);
        Vec dr = Load(chunk.dr + token + key);
        for (int i = 0; i < kGroup; ++i) {
          const Vec s = Load(before + i * size + key);
          dr += s * dy[i];
          Store(after + i * size + key, s * d + v[i] * k);
        }
        Store(chunk.dr + token + key, dr);
      }
    }
  }
}

// Takes dS of kLanes rows from after a token to before it. Adds to dk, dv and dlog.
void StepBack(const Chunk& chunk, int64_t t, int64_t size, int64_t first_row, float* ds) {
  const int64_t token = t * size;
  Vec sums[kLanes];
  for (int first = 0; first < kLanes; first += kGroup) {
    const float* const before = chunk.states + (t * kLanes + first) * size;
    Vec v[kGroup], dy[kGroup], dv[kGroup] = {};
    for (int i = 0; i < kGroup; ++i) {
      v[i] = Broadcast(chunk.v[token + first_row + first + i]);
      dy[i] = Broadcast(chunk.dy[token + first_row + first + i]);
    }
    for (int64_t key = 0; key < size; key += kLanes) {
      const Vec r = Load(chunk.r + token + key), d = Load(chunk.d + token + key);
      const Vec k = Load(chunk.k + token + key);
      Vec dk = Load(chunk.dk + token + key), dlog = Load(chunk.dlog + token + key);
      for (int i = 0; i < kGroup; ++i) {
        float* const at = ds + (first + i) * size + key;
        const Vec x = Load(at);
        dv[i] += x * k;
        dk += x * v[i];
        dlog += x * Load(before + i * size + key);
        Store(at, x * d + dy[i] * r);
      }
      Store(chunk.dk + token + key, dk);
      Store(chunk.dlog + token + key, dlog);
    }
    for (int i = 0; i < kGroup; ++i) sums[first + i] = dv[i];
  }
  float* const dv = chunk.dv + token + first_row;
  Store(dv, Load(dv) + SumEach(sums));
}

}  // namespace

const Wkv6Kernels Wkv6Kernels::RWKV_JAX_ISA = {
    {kLanes, ForwardScratch<Inputs>, Forward<Inputs>, ScratchOf<Chunk>, Backward<Chunk>}};

}  // namespace rwkv_jax::cpu
