// The WKV7 kernels, compiled once for each instruction set RWKV_JAX_ISA.
#include "wkv7.h"

#include "heads.h"

namespace rwkv_jax::cpu {
namespace {

// The inputs of a run of tokens in float, [tokens, size], with d the decay factor.
struct Inputs {
  // As many vectors of rows as the registers take beside the scalars of a token.
  static constexpr int kMaxVecs = kLanes == 16 ? 4 : 2;

  static int64_t Scratch(int64_t tokens, int64_t size) { return 6 * tokens * size; }

  Inputs(float* scratch, int64_t tokens, int64_t size)
      : r(scratch),
        d(r + tokens * size),
        k(d + tokens * size),
        v(k + tokens * size),
        a(v + tokens * size),
        b(a + tokens * size) {}

  // Asks for the inputs of one token ahead of their use: the tokens of a head are too far apart in
  // memory for the CPU to foresee.
  [[gnu::always_inline]] static void PrefetchToken(const Wkv7Call& call, int64_t index) {
    const void* const inputs[] = {call.r, call.w, call.k, call.v, call.a, call.b};
    for (const void* input : inputs) Prefetch(call.dtype, input, index);
  }

  void Read(const Wkv7Call& call, const Head& head, const Tokens& tokens, float* slope) const {
    for (int64_t t = 0; t < tokens.there; ++t) {
      const int64_t from = head.Token(tokens.at[t]), to = t * head.size;
      LoadRow(call.dtype, call.r, from, head.size, r + to);
      LoadRow(call.dtype, call.w, from, head.size, d + to);
      LoadRow(call.dtype, call.k, from, head.size, k + to);
      LoadRow(call.dtype, call.v, from, head.size, v + to);
      LoadRow(call.dtype, call.a, from, head.size, a + to);
      LoadRow(call.dtype, call.b, from, head.size, b + to);
    }
    DecayRow(call.decay, tokens.there * head.size, d, slope);
  }

  // One pass over the state does a token and S a of the next one.
  template <int kVecs>
  void Forward(const Wkv7ForwardCall& call, const Head& head, const Tokens& tokens, int64_t row,
               bool prefetch, float* columns) const {
    constexpr int64_t kRows = kVecs * kLanes;
    const int64_t size = head.size;
    Vec sa[kVecs] = {};
    for (int64_t key = 0; key < size; ++key)
      for (int i = 0; i < kVecs; ++i) sa[i] += Load(columns + key * kRows + i * kLanes) * a[key];

    for (int64_t t = 0; t < tokens.there; ++t) {
      const int64_t token = t * size, next = Smaller(t + 1, tokens.there - 1) * size;
      const int64_t ahead = head.Token(Smaller(tokens.at[t] + kRun, head.span.tokens - 1));
      if (tokens.starts[t]) {
        Clear(columns, size * kRows);
        for (int i = 0; i < kVecs; ++i) sa[i] = Vec{};
      }
      Vec values[kVecs], y[kVecs] = {}, next_sa[kVecs] = {};
      for (int i = 0; i < kVecs; ++i) values[i] = Load(v + token + row + i * kLanes);
      for (int64_t key = 0; key < size; ++key) {
        if (key % 16 == 0 && prefetch) {
          PrefetchToken(call, ahead + key);
          Prefetch(call.dtype, call.y, ahead + key);
        }
        const float r_key = r[token + key], d_key = d[token + key], k_key = k[token + key];
        const float b_key = b[token + key], a_key = a[next + key];
        float* const column = columns + key * kRows;
        for (int i = 0; i < kVecs; ++i) {
          const Vec s = Load(column + i * kLanes) * d_key + (sa[i] * b_key + values[i] * k_key);
          Store(column + i * kLanes, s);
          y[i] += s * r_key;
          next_sa[i] += s * a_key;
        }
      }
      for (int i = 0; i < kVecs; ++i) sa[i] = next_sa[i];
      StoreVecs(call.dtype, call.y, head.Token(tokens.at[t]) + row, y);
    }
  }

  float *const r, *const d, *const k, *const v, *const a, *const b;
};

// One chunk as the backward pass wants it. Arrays are [tokens, size], but those of kLanes rows are `states`
// [tokens + 1, kLanes, size] and `sa` [tokens, kLanes].
struct Chunk : Inputs {
  static constexpr int64_t kArrays = 14;

  Chunk(const Wkv7BackwardCall& call, const Head& head, float* shared, float* own)
      : Chunk(shared, own, Smaller(call.dims.tokens, kChunk), head.size) {}
  Chunk(float* shared, float* own, int64_t tokens, int64_t size)
      : Inputs(shared, tokens, size), sa(own), states(own + tokens * kLanes) {
    float* free = shared + Inputs::Scratch(tokens, size);
    float** const arrays[] = {&dy, &slope, &dr, &dk, &dv, &da, &db, &dlog};
    for (float** array : arrays) {
      *array = free;
      free += tokens * size;
    }
  }

  void ClearTotals(int64_t) const {}

  TokenGradients Gradients(const Wkv7BackwardCall& call) const {
    return {{{dr, call.dr},
             {dlog, call.dw},
             {dk, call.dk},
             {dv, call.dv},
             {da, call.da},
             {db, call.db}},
            6};
  }

  static constexpr float* dlog_sum = nullptr;
  float *dy, *slope;
  float *dr, *dk, *dv, *da, *db, *dlog;
  float *const sa, *const states;
};

// dv is stored, and all else is added up.
void Start(const Chunk& chunk, int64_t tokens, int64_t size) {
  float* const sums[] = {chunk.dr, chunk.dk, chunk.da, chunk.db, chunk.dlog};
  for (float* sum : sums) Clear(sum, tokens * size);
}

// The states of kLanes rows before each token of a chunk, and after the last one. Adds to dr.
void Replay(const Chunk& chunk, const Tokens& tokens, int64_t size, int64_t first_row) {
  Vec sum[kLanes] = {};
  for (int row = 0; row < kLanes; ++row)
    for (int64_t key = 0; key < size; key += kLanes)
      sum[row] += Load(chunk.states + row * size + key) * Load(chunk.a + key);
  for (int64_t t = 0; t < tokens.there; ++t) {
    float* const all_sa = chunk.sa + t * kLanes;
    Store(all_sa, SumEach(sum));
    if (tokens.starts[t]) {
      Clear(chunk.states + t * kLanes * size, kLanes * size);
      Clear(all_sa, kLanes);
    }
    const int64_t token = t * size, next = Smaller(t + 1, tokens.there - 1) * size;
    for (int first = 0; first < kLanes; first += kGroup) {
      const float* const before = chunk.states + (t * kLanes + first) * size;
      float* const after = chunk.states + ((t + 1) * kLanes + first) * size;
      Vec sa[kGroup], v[kGroup], dy[kGroup], partial[kGroup] = {};
      for (int i = 0; i < kGroup; ++i) {
        sa[i] = Broadcast(all_sa[first + i]);
        v[i] = Broadcast(chunk.v[token + first_row + first + i]);
        dy[i] = Broadcast(chunk.dy[token + first_row + first + i]);
      }
      for (int64_t key = 0; key < size; key += kLanes) {
        const Vec d = Load(chunk.d + token + key), k = Load(chunk.k + token + key);
        const Vec b = Load(chunk.b + token + key), next_a = Load(chunk.a + next + key);
        Vec dr = Load(chunk.dr + token + key);
        for (int i = 0; i < kGroup; ++i) {
          const Vec s = Load(before + i * size + key) * d + (sa[i] * b + v[i] * k);
          Store(after + i * size + key, s);
          dr += s * dy[i];
          partial[i] += s * next_a;
        }
        Store(chunk.dr + token + key, dr);
      }
      for (int i = 0; i < kGroup; ++i) sum[first + i] = partial[i];
    }
  }
}

// dS += dy r^T for kLanes rows, then dv = dS k; returns dsa = dS b.
Vec ReadOut(const Chunk& chunk, int64_t t, int64_t size, int64_t first_row, float* ds) {
  const int64_t token = t * size;
  Vec dv[kLanes], dsa[kLanes];
  for (int first = 0; first < kLanes; first += kGroup) {
    Vec dy[kGroup], dv_part[kGroup] = {}, dsa_part[kGroup] = {};
    for (int i = 0; i < kGroup; ++i) dy[i] = Broadcast(chunk.dy[token + first_row + first + i]);
    for (int64_t key = 0; key < size; key += kLanes) {
      const Vec r = Load(chunk.r + token + key), k = Load(chunk.k + token + key);
      const Vec b = Load(chunk.b + token + key);
      for (int i = 0; i < kGroup; ++i) {
        float* const at = ds + (first + i) * size + key;
        const Vec s = Load(at) + dy[i] * r;
        Store(at, s);
        dv_part[i] += s * k;
        dsa_part[i] += s * b;
      }
    }
    for (int i = 0; i < kGroup; ++i) {
      dv[first + i] = dv_part[i];
      dsa[first + i] = dsa_part[i];
    }
  }
  const Vec result = SumEach(dsa);
  Store(chunk.dv + token + first_row, SumEach(dv));
  return result;
}

// The sums over kLanes rows for kVecs vectors of keys, and dS = dS diag(d) + dsa a^T.
template <int kVecs>
void StepBackKeys(const Chunk& chunk, int64_t t, int64_t size, int64_t first_row, int64_t key,
                  const float* dsa, float* ds) {
  const int64_t token = t * size + key;
  const float* const v = chunk.v + t * size + first_row;
  const float* const sa = chunk.sa + t * kLanes;
  const float* const before = chunk.states + t * kLanes * size + key;
  Vec dk[kVecs], da[kVecs], db[kVecs], dlog[kVecs], d[kVecs], a[kVecs];
  for (int i = 0; i < kVecs; ++i) {
    const int64_t at = token + i * kLanes;
    dk[i] = Load(chunk.dk + at);
    da[i] = Load(chunk.da + at);
    db[i] = Load(chunk.db + at);
    dlog[i] = Load(chunk.dlog + at);
    d[i] = Load(chunk.d + at);
    a[i] = Load(chunk.a + at);
  }
  for (int row = 0; row < kLanes; ++row) {
    const Vec row_v = Broadcast(v[row]), row_sa = Broadcast(sa[row]);
    const Vec row_dsa = Broadcast(dsa[row]);
    for (int i = 0; i < kVecs; ++i) {
      float* const at = ds + row * size + key + i * kLanes;
      const Vec x = Load(at), s = Load(before + row * size + i * kLanes);
      dk[i] += x * row_v;
      db[i] += x * row_sa;
      dlog[i] += x * s;
      da[i] += s * row_dsa;
      Store(at, x * d[i] + row_dsa * a[i]);
    }
  }
  for (int i = 0; i < kVecs; ++i) {
    const int64_t at = token + i * kLanes;
    Store(chunk.dk + at, dk[i]);
    Store(chunk.da + at, da[i]);
    Store(chunk.db + at, db[i]);
    Store(chunk.dlog + at, dlog[i]);
  }
}

// Takes dS of kLanes rows from after a token to before it.
void StepBack(const Chunk& chunk, int64_t t, int64_t size, int64_t first_row, float* ds) {
  alignas(64) float dsa[kLanes];
  Store(dsa, ReadOut(chunk, t, size, first_row, ds));
  constexpr int kVecs = kLanes == 16 ? 2 : 1;
  int64_t key = 0;
  for (; key + kVecs * kLanes <= size; key += kVecs * kLanes)
    StepBackKeys<kVecs>(chunk, t, size, first_row, key, dsa, ds);
  for (; key < size; key += kLanes) StepBackKeys<1>(chunk, t, size, first_row, key, dsa, ds);
}

}  // namespace

const Wkv7Kernels Wkv7Kernels::RWKV_JAX_ISA = {
    {kLanes, ForwardScratch<Inputs>, Forward<Inputs>, ScratchOf<Chunk>, Backward<Chunk>}};

}  // namespace rwkv_jax::cpu
