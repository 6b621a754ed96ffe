// WKV7 one token at a time, all in float: exact for every decay. One block of threads per head, or,
// in the backward pass, per head and split of its tokens.
//
// The recurrence (RWKV-7, arXiv:2503.14456, "state evolution"), with d_t = exp(log d_t) made from
// w_t:
//
//   S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T      y_t = S_t r_t
//
// One token of the backward pass, where dS enters as the gradient of S_t by all later tokens
// (`backward_kernel` in RWKV-LM, RWKV-v7/train_temp/cuda/rwkv7_clampw.cu; but there S_{t-1} is
// found from S_t by dividing by d_t, and here it is replayed from a saved state):
//
//   dr_t = S_t^T dy_t       dS <- dS + dy_t r_t^T
//   dd_t = sum_v dS * S_{t-1}      dk_t = dS^T v_t      dv_t = dS k_t
//   db_t = dS^T (S_{t-1} a_t)      da_t = S_{t-1}^T (dS b_t)
//   dS <- dS diag(d_t) + (dS b_t) a_t^T
#include <algorithm>

#include "kernel_choice.cuh"
#include "launch.cuh"
#include "recurrent.cuh"
#include "fragment.cuh"
#include "wkv7/kernels.h"
#include "wkv7/token.cuh"

namespace rwkv_jax::cuda {
namespace {

// Of the vectors of a token, to replay it takes the first five alone.
constexpr int kReplayVectors = 5;
constexpr int kForwardVectors = 6;
constexpr int kBackwardVectors = 7;

template <typename T>
struct Vectors {
  template <typename... Pointers>
  explicit Vectors(Pointers... pointers) : x{static_cast<const T*>(pointers)...} {}

  const T* x[kBackwardVectors];
};

template <typename T, int N>
struct ForwardShared {
  static constexpr int kTokens = 8;

  float tokens[2][kForwardVectors * kTokens * N];
  alignas(16) T y[2][kTokens * N];
};

template <int N>
using ForwardPartition = StatePartition<N, 4>;

// Tokens are brought to shared memory kTokens at a time, in two stages: one is read while the other
// is filled. The kernel is compiled for kBlocks blocks per multiprocessor. Many blocks hide each
// other's latency; with few heads one block is faster, since it has more registers.
template <typename T, int N, int kBlocks, bool kMarked>
__global__ __launch_bounds__(ForwardPartition<N>::kThreads, kBlocks) void ForwardKernel(
    const __grid_constant__ Vectors<T> inputs, int64_t row_tokens, int64_t heads, Dtype dtype,
    Decay decay, Marks marks, Sequences sequences, const float* initial_state, T* y,
    float* final_state, SavedStates states) {
  constexpr int kTokens = ForwardShared<T, N>::kTokens;
  const Head<N> head(blockIdx.x, row_tokens, heads, sequences);
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<ForwardShared<T, N>*>(memory);
  using G = ForwardPartition<N>;
  const G partition;
  const int64_t tokens = head.span.tokens, stride = head.TokenStride();
  y += head.FirstToken();

  Fragment<G> s;
  LoadState(partition, initial_state + head.State(), s);

  TokenLoader<T, G, kForwardVectors, kTokens> loader;
  const auto count_at = [&](int64_t first) {
    return static_cast<int>(tokens - first < kTokens ? tokens - first : kTokens);
  };
  TileMarks<kMarked> own, next_own;
  const auto fetch = [&](int64_t first) {
    loader.Fetch(inputs.x, head.FirstToken() + first * stride, stride, count_at(first));
    next_own = LoadMarks<kMarked>(marks, head.sequence, first);
  };
  if (tokens > 0) {
    fetch(0);
    loader.template Store<false>(shared.tokens[0], nullptr, count_at(0), next_own, decay, dtype);
  }
  __syncthreads();

  int stage = 0;
  int64_t saved = head.SavedState(0);
  for (int64_t first = 0; first < tokens; first += kTokens, stage ^= 1) {
    const int count = count_at(first);
    const int64_t next = first + kTokens;
    own = next_own;
    if (next < tokens) fetch(next);
    if (states.data != nullptr && first % kChunk == 0) {
      states.Store(partition, saved, s);
      saved += heads * N * N;
    }

    float out[kTokens][G::kRows];
    int first_sum = 0;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const TokenView<N, kTokens> at{shared.tokens[stage], t};
      float sa[G::kRows], r[G::kCols];
      if (own.Starts(t)) Clear<G>(s);
      ReadFromState(partition, at, s, sa);
      UpdateState(partition, at, sa, s);
      LoadCols(partition, at.Row(kR), r);
      PartialDot<G>(s, r, out[t]);
      first_sum = ReduceScatter<1, G::kColGroups>(out[t], partition.lane);
    }
    // All y are stored together: a store between two tokens would delay the loads of the second
    // token.
    if (first_sum >= 0)
#pragma unroll
      for (int t = 0; t < kTokens; ++t)
        shared.y[stage][t * N + partition.first_row + first_sum] = FromFloat<T>(out[t][0], dtype);

    if (next < tokens)
      loader.template Store<false>(shared.tokens[stage ^ 1], nullptr, count_at(next), next_own,
                                   decay, dtype);
    __syncthreads();
    struct alignas(16) Piece {
      T x[8];
    };
    for (int i = threadIdx.x; i < count * N / 8; i += G::kThreads)
      *reinterpret_cast<Piece*>(y + (first + i / (N / 8)) * stride + i % (N / 8) * 8) =
          own.Absent(i / (N / 8)) ? Piece{} : reinterpret_cast<const Piece*>(shared.y[stage])[i];
  }
  StoreState(partition, final_state + head.State(), s);
}

// Takes the gradient of a state one token backwards, which needs no state: dS <- (dS + dy r^T) diag(d) +
// ((dS + dy r^T) b) a^T.
template <typename G>
__device__ void ReverseToken(const G& partition, const float* dy_row, const float* r_row,
                             const float* b_row, const float* d_row, const float* a_row,
                             Fragment<G>& ds) {
  float dy[G::kRows], dsa[G::kRows], x[G::kCols], d[G::kCols];
  LoadRows(partition, dy_row, dy);
  LoadCols(partition, r_row, x);
  Add<G>(ds, dy, x);
  LoadCols(partition, b_row, x);
  Dot<G>(ds, x, dsa);
  LoadCols(partition, d_row, d);
  LoadCols(partition, a_row, x);
  DecayAndAdd<G>(ds, d, dsa, x);
}

// Leaves the gradient of the state at the end of each split but the last in the scratch.
template <typename T, int N>
__global__ __launch_bounds__(ForwardPartition<N>::kThreads) void SplitKernel(
    const __grid_constant__ Vectors<T> inputs, int64_t row_tokens, int64_t heads, Dtype dtype,
    Decay decay, Marks marks, Sequences sequences, const float* dfinal_state, ReplayLot lot) {
  enum { kDecayRow, kARow, kBRow, kRRow, kDyRow, kSplitVectors };
  using G = ForwardPartition<N>;
  constexpr int kTokens = 8;
  __shared__ __align__(16) float shared[kSplitVectors * kTokens * N];
  const G partition;
  const Head<N> head(lot.first_head + blockIdx.x, row_tokens, heads, sequences);
  const int64_t tokens = head.span.tokens, stride = head.TokenStride();
  if (tokens == 0) return;
  const int64_t length = lot.Length(head.span.Chunks()) * kChunk;

  Fragment<G> ds;
  LoadState(partition, dfinal_state + head.State(), ds);
  TokenLoader<T, G, kSplitVectors, kTokens> loader;
  const auto count_at = [&](int64_t first) {
    return static_cast<int>(tokens - first < kTokens ? tokens - first : kTokens);
  };
  TileMarks<true> next_own;
  const auto fetch = [&](int64_t first) {
    loader.Fetch(inputs.x, head.FirstToken() + first * stride, stride, count_at(first));
    next_own = LoadMarks<true>(marks, head.sequence, first);
  };
  int64_t first = (tokens - 1) / kTokens * kTokens;
  fetch(first);
  for (; first >= length; first -= kTokens) {
    const TileMarks<true> own = next_own;
    __syncthreads();
    loader.template Store<false>(shared, nullptr, count_at(first), own, decay, dtype);
    __syncthreads();
    if (first > length) fetch(first - kTokens);
#pragma unroll
    for (int t = kTokens - 1; t >= 0; --t) {
      const auto row = [&](int vector) { return shared + (vector * kTokens + t) * N; };
      ReverseToken(partition, row(kDyRow), row(kRRow), row(kBRow), row(kDecayRow), row(kARow), ds);
      if (own.Starts(t)) Clear<G>(ds);
    }
    if (first % length == 0)
      StoreState(partition, lot.Scratch(head.turn, first / length - 1, ScratchSize(N)), ds);
  }
}

// The gradients that are sums over the rows of S.
enum ColumnSum { kDr, kDw, kDk, kDa, kDb, kColumnSums };

template <typename T>
struct Gradients {
  T* columns[kColumnSums];
  T* v;
  float* initial_state;
};

// In large heads a lane has more rows, because registers and shared memory admit no more warps.
template <int N>
using BackwardPartition = StatePartition<N, N == 128 ? 8 : 4>;
// The blocks of BackwardKernel for which it is compiled to fit a multiprocessor.
template <int N>
constexpr int kBackwardBlocks = N == 64 ? 2 : 1;

// A state inside a quad, in the order in which threads hold it.
template <typename G>
using KeptState = float4[G::kRows * G::kCols / 4][G::kThreads];

template <typename G>
struct BackwardShared {
  // Large heads have no room for S_0 beside S_1 and S_2, nor for the sums of more than one token.
  static constexpr bool kLarge = G::N > 64;
  static constexpr int kSumTokens = kLarge ? 1 : kReplayTokens;

  float tokens[2][kBackwardVectors * kReplayTokens * G::N];
  float slope[2][kReplayTokens * G::N];
  float sa[2][kReplayTokens * G::N];
  // The sums of each warp for the gradients of a token.
  float sums[kSumTokens][G::kWarps][kColumnSums][G::N];
  // S_1, S_2 and perhaps S_0 of a quad; in the scratch where a block of a large head has too little memory.
  KeptState<G> kept[kLarge ? 2 : 3];
};

template <typename G>
__device__ void Keep(KeptState<G>& kept, const Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; c += 4)
      kept[(i * G::kCols + c) / 4][threadIdx.x] = Pack(&s[i][c]);
}

template <typename G>
__device__ void Recall(const KeptState<G>& kept, Fragment<G>& s) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; c += 4)
      Unpack(kept[(i * G::kCols + c) / 4][threadIdx.x], &s[i][c]);
}

template <typename G>
__device__ void Copy(const Fragment<G>& from, Fragment<G>& to) {
#pragma unroll
  for (int i = 0; i < G::kRows; ++i)
#pragma unroll
    for (int c = 0; c < G::kCols; ++c) to[i][c] = from[i][c];
}

// Takes one token backwards. `ds` enters as the gradient of S_t without the term of y_t and leaves
// as the gradient of S_{t-1}. The sums over the rows of this warp go to `sums`, and dv_t to `dv`
// unless it is null; if kPart, dv_t has `values` elements.
template <typename T, typename G, bool kPart, bool kMarked>
__device__ void BackwardToken(const G& partition, const TokenView<G::N, kReplayTokens>& at,
                              const float* slope_row, const float* sa_row, TileMarks<kMarked> marks,
                              const Fragment<G>& s_before, Fragment<G>& ds, float (*sums)[G::N],
                              T* dv, int values, Dtype dtype) {
  constexpr int kRows = G::kRows, kCols = G::kCols;
  float dy[kRows], v[kRows], sa[kRows], dsa[kRows], dv_rows[kRows];
  float r[kCols], b[kCols], k[kCols], d[kCols], a[kCols], slope[kCols];
  float column[kColumnSums][kCols];

  LoadRows(partition, at.Row(kDy), dy);
  LoadCols(partition, at.Row(kR), r);
  Add<G>(ds, dy, r);
  LoadCols(partition, at.Row(kB), b);
  Dot<G>(ds, b, dsa);

  LoadCols(partition, at.Row(kK), k);
  PartialDot<G>(ds, k, dv_rows);
  LoadRows(partition, at.Row(kV), v);
  LoadRows(partition, sa_row, sa);
  TransposedDot<G>(v, ds, column[kDk]);
  TransposedDot<G>(sa, ds, column[kDb]);

  // dr_t = S_t^T dy_t is computed from S_{t-1}, so that S_t need not be kept.
  LoadCols(partition, at.Row(kW), d);
  LoadCols(partition, slope_row, slope);
  TransposedDot<G>(dy, s_before, column[kDr]);
  float sa_dy = 0.0f, v_dy = 0.0f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sa_dy = fmaf(sa[i], dy[i], sa_dy);
    v_dy = fmaf(v[i], dy[i], v_dy);
  }
#pragma unroll
  for (int c = 0; c < kCols; ++c) {
    column[kDr][c] = fmaf(d[c], column[kDr][c], fmaf(sa_dy, b[c], v_dy * k[c]));
    column[kDw][c] = ds[0][c] * s_before[0][c];
#pragma unroll
    for (int i = 1; i < kRows; ++i) column[kDw][c] = fmaf(ds[i][c], s_before[i][c], column[kDw][c]);
    column[kDw][c] *= slope[c];
  }
  TransposedDot<G>(dsa, s_before, column[kDa]);
  LoadCols(partition, at.Row(kA), a);
  DecayAndAdd<G>(ds, d, dsa, a);
  if (marks.Starts(at.token)) Clear<G>(ds);

  // All sums are stored together: a store in between would delay the loads after it.
  int first = 0;
#pragma unroll
  for (int which = 0; which < kColumnSums; ++which)
    first = ReduceScatter<G::kColGroups, 32>(column[which], partition.lane);
  constexpr int kLeft = kCols > G::kRowGroups ? kCols / G::kRowGroups : 1;
  if (first >= 0)
#pragma unroll
    for (int which = 0; which < kColumnSums; ++which)
#pragma unroll
      for (int c = 0; c < kLeft; ++c) sums[which][partition.Col(first + c)] = column[which][c];
  const int first_dv = ReduceScatter<1, G::kColGroups>(dv_rows, partition.lane);
  if (first_dv >= 0 && dv != nullptr && (!kPart || partition.first_row + first_dv < values))
    dv[partition.first_row + first_dv] =
        FromFloat<T>(marks.Absent(at.token) ? 0.0f : dv_rows[0], dtype);
}

// Adds up the sums of all warps and writes the gradients of `count` tokens. The first token is at
// element `first` of each array. If kPart, a token has `keys` elements, and `first` and `stride` count heads.
template <typename T, typename G, bool kPart, int kTokens, bool kMarked>
__device__ void WriteColumnSums(const float (&sums)[kTokens][G::kWarps][kColumnSums][G::N],
                                int count, TileMarks<kMarked> marks, int64_t first, int64_t stride,
                                const Gradients<T>& out, int keys, Dtype dtype) {
  constexpr int kPiece = 4;
  struct alignas(kPiece * sizeof(T)) Piece {
    T x[kPiece];
  };
  for (int i = kPiece * threadIdx.x; i < count * kColumnSums * G::N; i += kPiece * G::kThreads) {
    const int t = i / (kColumnSums * G::N), which = i / G::N % kColumnSums, col = i % G::N;
    if (kPart && col >= keys) continue;
    float sum[kPiece] = {};
#pragma unroll
    for (int warp = 0; warp < G::kWarps; ++warp)
#pragma unroll
      for (int e = 0; e < kPiece; ++e) sum[e] += sums[t][warp][which][col + e];
    Piece piece;
#pragma unroll
    for (int e = 0; e < kPiece; ++e)
      piece.x[e] = FromFloat<T>(marks.Absent(t) ? 0.0f : sum[e], dtype);
    const int64_t token = first + t * stride;
    *reinterpret_cast<Piece*>(out.columns[which] + (kPart ? token * keys : token) + col) = piece;
  }
}

// S_{t-1} of a token of a quad becomes S_t. If the next token is the first of its segment, the state
// is cleared. As a lambda in the kernel the same code is scheduled worse: the kernel takes 3 % longer.
template <typename G, int kTokens, bool kMarked>
__device__ void ReplayToken(const G& partition, const TokenView<G::N, kTokens>& at,
                            const float* sa_rows, TileMarks<kMarked> marks, Fragment<G>& s) {
  float sa[G::kRows];
  LoadRows(partition, sa_rows + at.token * G::N, sa);
  UpdateState(partition, at, sa, s);
  if (marks.Starts(at.token + 1)) Clear<G>(s);
}

// The chunks that are left to this kernel, which may be of any head: their numbers in [chunks, H], of
// which there are numbers[0], and the gradients of the states behind all chunks, [chunks, H, N, N].
// Without numbers there are none. Heads may have K and V below N, and may share keys.
struct SteepChunks {
  const uint32_t* numbers;
  const void* gradients;
  int keys, values;
  int key_heads, group;
};

// Into how many shares, each of equally many quads, every one of `chunks` steep chunks is divided, so that few
// chunks fill a GPU.
__device__ inline uint32_t SharesOfChunk(uint32_t chunks) {
  uint32_t shares = 1;
  while (shares < kChunkQuads && chunks <= gridDim.x / (2 * shares)) shares *= 2;
  return shares;
}

// What a call of the delta rule has besides, [B, T, H] but the scale.
struct DeltaOperands {
  const float *scale, *beta;
  float* dbeta;
};
struct NoOperands {};

// Makes in shared memory the vectors of `count` tokens from those that a TokenLoader has stored, which are k' in the
// place of k, a and b, and, if kReads, q in that of r. `first` and `stride` count heads.
template <typename G, bool kReads>
__device__ void MakeVectors(const DeltaOperands& delta, float* tokens, int64_t first,
                            int64_t stride, int count, TileMarks<true> marks) {
  __syncthreads();
  for (int i = threadIdx.x; i < kReplayTokens * G::N; i += G::kThreads) {
    const int t = i / G::N;
    if (t >= count || marks.Absent(t)) continue;
    const auto element = [&](Vector vector) -> float& {
      return tokens[vector * kReplayTokens * G::N + i];
    };
    const float key = element(kK), beta = delta.beta[first + t * stride];
    element(kK) = beta * key, element(kA) = element(kW) * key, element(kB) = -beta * key;
    if constexpr (kReads) element(kR) *= *delta.scale;
  }
}

// WriteColumnSums of the gradients of the inputs of the delta rule; a token in each warp. `decays` has the factors
// of the tokens.
template <typename T, typename G, int kTokens>
__device__ void WriteDeltaSums(const float (&sums)[kTokens][G::kWarps][kColumnSums][G::N],
                               const DeltaOperands& delta, const T* keys, const TokenRows& of_keys,
                               const float* decays, int count, TileMarks<true> marks, int64_t first,
                               int64_t stride, const Gradients<T>& out, Dtype dtype) {
  const int t = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= count || t >= kTokens) return;
  const bool absent = marks.Absent(t);
  const int64_t token = first + t * stride;
  const float beta = absent ? 0.0f : delta.beta[token], scale = *delta.scale;
  float dbeta[1] = {};
  for (int col = lane; col < of_keys.size; col += 32) {
    float of[kColumnSums] = {};
#pragma unroll
    for (int which = 0; which < kColumnSums; ++which)
#pragma unroll
      for (int warp = 0; warp < G::kWarps; ++warp) of[which] += sums[t][warp][which][col];
    const int64_t at = token * of_keys.size + col;
    const float key = absent ? 0.0f : ToFloat(keys[of_keys.Element(t) + col], dtype),
                a = decays[t * G::N + col] * of[kDa];
    const float written = of[kDk] - of[kDb];
    dbeta[0] += key * written;
    const auto write = [&](T* to, float x) { to[at] = FromFloat<T>(absent ? 0.0f : x, dtype); };
    write(out.columns[kDr], scale * of[kDr]);
    write(out.columns[kDk], beta * written + a);
    write(out.columns[kDw], of[kDw] + key * a);
  }
  AllReduce<1, 32>(dbeta);
  if (lane == 0) delta.dbeta[token] = absent ? 0.0f : dbeta[0];
}

// The element type of those gradients.
template <typename T>
using SteepState = std::conditional_t<std::is_same_v<T, float>, float, __nv_bfloat16>;

// A split takes its chunks from the last to the first. In a chunk there are two phases:
//   - The whole chunk is replayed once from its saved state. That leaves in the scratch the state
//     before each quad of kReplayTokens tokens but the first, and S_{t-1} a_t of each token.
//   - Quads are taken from the last to the first. A quad is replayed from the state before it, so
//     that S_{t-1} of its tokens is at hand, and then its tokens are taken backwards.
// So no decay is ever inverted.
//
// If kSteep, a block takes one share of a steep chunk after another. For its run of quads, the state is replayed
// through all quads before, and the gradient of the state is taken backwards through all quads after. As a rule
// there are few steep chunks. Then all time is latency, most of it that of loading instructions, so loops over
// tokens are not unrolled.
template <typename T, int N, bool kMarked, bool kSteep, typename Form>
__global__ __launch_bounds__(
    BackwardPartition<N>::kThreads,
    (kBackwardBlocks<N>)) void BackwardKernel(const __grid_constant__ Vectors<T> inputs,
                                              int64_t row_tokens, int64_t heads, Dtype dtype,
                                              Decay decay, Marks marks, Sequences sequences,
                                              SavedStates states, const float* dfinal_state,
                                              const __grid_constant__ Gradients<T> out, bool keeps,
                                              ReplayLot lot, SteepChunks steep, Form form) {
  using G = BackwardPartition<N>;
  static_assert(kReplayTokens * N <= 4 * G::kThreads);
  static_assert(kReplayTokens == 4, "S_0, S_1 and S_2 are kept or reloaded, S_3 is in registers");
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  using Shared = BackwardShared<G>;
  constexpr bool kLarge = Shared::kLarge;
  constexpr bool kDelta = std::is_same_v<Form, DeltaOperands>;
  static_assert(!kSteep || kMarked,
                "steep chunks are rare: one kernel does for calls with marks and without");
  auto& shared = *reinterpret_cast<Shared*>(memory);
  constexpr int kRows = G::kRows;
  constexpr int kUnrolled = kSteep ? 1 : kReplayTokens;
  const G partition;
  const uint32_t steep_chunks = kSteep ? steep.numbers[0] : 0;
  const uint32_t shares = kSteep ? SharesOfChunk(steep_chunks) : 1;
  for (uint32_t part = blockIdx.x; !kSteep || part < shares * steep_chunks; part += gridDim.x) {
    const uint32_t number = kSteep ? steep.numbers[1 + part / shares] : 0;
    const int share_quads = kChunkQuads / shares;
    const int first_quad = kSteep ? part % shares * share_quads : 0;
    const Head<N> head =
        kSteep ? Head<N>(number % heads, heads, sequences.OfChunk(number / heads, row_tokens))
               : Head<N>(lot.Turn(), row_tokens, heads, sequences);
    const int64_t tokens = head.span.tokens, chunks = head.span.Chunks();
    const int64_t split = kSteep ? 0 : lot.Split(), length = kSteep ? 1 : lot.Length(chunks);
    const int64_t first_chunk = kSteep ? number / heads - head.span.first_chunk : split * length;
    const int64_t last_chunk = first_chunk + length < chunks ? first_chunk + length : chunks;
    constexpr int kUnit = kSteep ? N : 1;  // elements of what tokens are counted in
    const int64_t stride = head.TokenStride() / kUnit;
    float* const ds_end =
        lot.Scratch(kSteep ? lot.first_head + blockIdx.x : head.turn, split, ScratchSize(N));
    float* const quad_states = ds_end + (kLarge ? 2 : 1) * N * N;
    float* const chunk_sa = quad_states + (kChunkQuads - 1) * N * N;
    KeptState<G>* const kept =
        kLarge && !keeps ? reinterpret_cast<KeptState<G>*>(ds_end) : shared.kept;

    Fragment<G> ds, s;
    if constexpr (kSteep)
      LoadState(partition,
                static_cast<const SteepState<T>*>(steep.gradients) + head.SavedState(first_chunk),
                ds);
    else
      LoadState(partition, last_chunk == chunks ? dfinal_state + head.State() : ds_end, ds);

    for (int64_t chunk = last_chunk - 1; chunk >= first_chunk; --chunk) {
      const int64_t start = chunk * kChunk;
      const int64_t first_token = head.FirstToken() / kUnit + start * stride;
      const int in_chunk = static_cast<int>(tokens - start < kChunk ? tokens - start : kChunk);
      const int quads = (in_chunk + kReplayTokens - 1) / kReplayTokens;
      const int end_quad = kSteep ? Min(first_quad + share_quads, quads) : quads;
      if (kSteep && first_quad >= quads) break;
      const auto count_of = [&](int quad) {
        return Min(kReplayTokens, in_chunk - quad * kReplayTokens);
      };
      const auto token_of = [&](int quad) { return first_token + quad * kReplayTokens * stride; };
      // Of a steep chunk: where a quad lies in an array.
      const auto rows_of = [&](int quad, int vector) -> TokenRows {
        const bool values = vector == kV || vector == kDy;
        if (values || (kDelta && vector == kW))
          return {token_of(quad), stride, values ? steep.values : steep.keys};
        const int64_t token = head.span.first_token + start + quad * kReplayTokens;
        return {token * steep.key_heads + static_cast<int>(head.head) / steep.group,
                steep.key_heads, steep.keys};
      };
      const auto fetch_tokens = [&](auto& loader, int quad) {
        if constexpr (kSteep)
          loader.FetchPart(inputs.x, count_of(quad),
                           [&](int vector) { return rows_of(quad, vector); });
        else
          loader.Fetch(inputs.x, token_of(quad), stride, count_of(quad));
      };
      const auto marks_of = [&](int quad) {
        return LoadMarks<kMarked>(marks, head.sequence, start + quad * kReplayTokens);
      };
      // The state before a quad, before the first token of the quad may clear it.
      const auto load_state = [&](int quad, Fragment<G>& s) {
        if (quad > 0)
          LoadState(partition, quad_states + (quad - 1) * N * N, s);
        else if constexpr (kSteep)
          LoadStatePart(partition,
                        static_cast<const SteepState<T>*>(states.data) +
                            head.SavedState(chunk) / (N * N) * (steep.values * steep.keys),
                        steep.values, steep.keys, s);
        else
          states.Load(partition, head.SavedState(chunk), s);
      };

      load_state(0, s);
      TokenLoader<T, G, kReplayVectors, kReplayTokens> replay_loader;
      TileMarks<kMarked> own, next_own;
      for (int quad = -1; quad < end_quad; ++quad) {
        const bool more = quad + 1 < end_quad;
        own = next_own;
        if (more) {
          fetch_tokens(replay_loader, quad + 1);
          next_own = marks_of(quad + 1);
        }
        if (quad > 0 && quad >= first_quad)
          StoreState(partition, quad_states + (quad - 1) * N * N, s);
        if (quad >= 0) {
#pragma unroll 1
          for (int first = 0; first < kReplayTokens; first += kUnrolled) {
            float sa[kUnrolled][kRows];
#pragma unroll
            for (int t = 0; t < kUnrolled; ++t) {
              const TokenView<N, kReplayTokens> at{shared.tokens[quad % 2], first + t};
              if (own.Starts(first + t)) Clear<G>(s);
              ReadFromState(partition, at, s, sa[t]);
              UpdateState(partition, at, sa[t], s);
            }
            if (partition.col_group == 0)
#pragma unroll
              for (int t = 0; t < kUnrolled; ++t)
                StoreRows(partition, chunk_sa + (quad * kReplayTokens + first + t) * N, sa[t]);
          }
        }
        if (more) {
          replay_loader.template Store<false>(shared.tokens[(quad + 1) % 2], nullptr,
                                              count_of(quad + 1), next_own, decay, dtype);
          if constexpr (kDelta)
            MakeVectors<G, false>(form, shared.tokens[(quad + 1) % 2], token_of(quad + 1), stride,
                                  count_of(quad + 1), next_own);
        }
        __syncthreads();
      }

      TokenLoader<T, G, kBackwardVectors, kReplayTokens> loader;
      float4 sa_piece;
      const auto has_sa = [&](int quad) {
        return (!kSteep || quad < end_quad) && 4 * threadIdx.x < kReplayTokens * N;
      };
      const auto fetch = [&](int quad) {
        fetch_tokens(loader, quad);
        next_own = marks_of(quad);
        if (has_sa(quad))
          sa_piece = *reinterpret_cast<const float4*>(chunk_sa + quad * kReplayTokens * N +
                                                      4 * threadIdx.x);
      };
      const auto store = [&](int quad) {
        loader.template Store<true>(shared.tokens[quad % 2], shared.slope[quad % 2], count_of(quad),
                                    next_own, decay, dtype);
        if constexpr (kDelta)
          MakeVectors<G, true>(form, shared.tokens[quad % 2], token_of(quad), stride,
                               count_of(quad), next_own);
        if (has_sa(quad))
          *reinterpret_cast<float4*>(&shared.sa[quad % 2][4 * threadIdx.x]) = sa_piece;
      };
      // The gradients of `count` tokens of a quad from token `t` on.
      const auto write_sums = [&](int quad, int t, int count) {
        const int64_t first = token_of(quad) + t * stride;
        if constexpr (kDelta) {
          TokenRows of_keys = rows_of(quad, kK);
          of_keys.first += t * of_keys.stride;
          WriteDeltaSums<T, G>(shared.sums, form, inputs.x[kK], of_keys,
                               shared.tokens[quad % 2] + t * N, count, own.From(t), first, stride,
                               out, dtype);
        } else
          WriteColumnSums<T, G, kSteep>(shared.sums, count, own.From(t), first, stride, out,
                                        steep.keys, dtype);
      };
      Fragment<G> s_next;
      for (int quad = quads; quad >= first_quad; --quad) {
        using Token = TokenView<N, kReplayTokens>;
        const int count = count_of(quad), stage = quad % 2;
        const bool in_share = quad < end_quad;
        const bool more = quad > first_quad;
        own = next_own;
        if (more) fetch(quad - 1);
        if constexpr (!kLarge) {
          if (in_share) Copy<G>(s_next, s);
          if (more && quad <= end_quad) load_state(quad - 1, s_next);
        }
        if (in_share) {
          if constexpr (kLarge) load_state(quad, s);
          if (own.Starts(0)) Clear<G>(s);
          if constexpr (!kLarge) Keep<G>(kept[2], s);
#pragma unroll(kUnrolled)
          for (int t = 0; t < kReplayTokens - 1; ++t) {
            ReplayToken<G>(partition, Token{shared.tokens[stage], t}, shared.sa[stage], own, s);
            if (t < kReplayTokens - 2) Keep<G>(kept[t], s);
          }
          // All warps are done with the sums of the quad before.
          if constexpr (!kLarge) __syncthreads();
          const auto token = [&](int t) { return token_of(quad) + t * stride; };
#pragma unroll(kUnrolled)
          for (int t = kReplayTokens - 1; t >= 0; --t) {
            if (t == 0 && kLarge) {
              load_state(quad, s);
              if (own.Starts(0)) Clear<G>(s);
            } else if (t < kReplayTokens - 1) {
              Recall<G>(kept[t > 0 ? t - 1 : 2], s);
            }
            BackwardToken<T, G, kSteep>(
                partition, {shared.tokens[stage], t}, shared.slope[stage] + t * N,
                shared.sa[stage] + t * N, own, s, ds,
                shared.sums[t % Shared::kSumTokens][threadIdx.x / 32],
                t < count ? out.v + (kSteep ? token(t) * steep.values : token(t)) : nullptr,
                steep.values, dtype);
            if constexpr (kLarge) {
              __syncthreads();
              write_sums(quad, t, t < count);
              __syncthreads();
            }
          }
        } else if (kSteep && quad < quads) {
#pragma unroll 1
          for (int t = kReplayTokens - 1; t >= 0; --t) {
            const Token at{shared.tokens[stage], t};
            ReverseToken(partition, at.Row(kDy), at.Row(kR), at.Row(kB), at.Row(kW), at.Row(kA),
                         ds);
            if (own.Starts(t)) Clear<G>(ds);
          }
        }
        if (more) store(quad - 1);
        __syncthreads();
        if constexpr (!kLarge)
          if (in_share) write_sums(quad, 0, count);
      }
    }
    if ((kSteep ? first_chunk : split) == 0 && first_quad == 0) {
      if constexpr (kSteep)
        StoreStatePart(partition, out.initial_state + head.index * steep.values * steep.keys,
                       steep.values, steep.keys, ds);
      else
        StoreState(partition, out.initial_state + head.State(), ds);
    }
    if constexpr (!kSteep) break;
    if constexpr (kDelta) __syncthreads();  // until the decays of the last quad have been read
  }
}

// Launches the kernel of the backward pass, for a lot of heads or for steep chunks.
template <typename T, int N, bool kMarked, bool kSteep, typename Form = NoOperands>
cudaError_t LaunchBackward(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                           const ReplayLot& lot, int64_t blocks, const SteepChunks& steep,
                           const Form& form = {}) {
  const Gradients<T> gradients{
      {static_cast<T*>(call.dr), static_cast<T*>(call.dw), static_cast<T*>(call.dk),
       static_cast<T*>(call.da), static_cast<T*>(call.db)},
      static_cast<T*>(call.dv),
      call.dinitial_state};
  using Shared = BackwardShared<BackwardPartition<N>>;
  static_assert(Shared::kLarge || sizeof(Shared) <= kLeastSharedMemory);
  const bool keeps = static_cast<int64_t>(sizeof(Shared)) <= device.shared_memory;
  return Launch(BackwardKernel<T, N, kMarked, kSteep, Form>, blocks, BackwardPartition<N>::kThreads,
                sizeof(Shared) - (keeps ? 0 : sizeof(Shared::kept)), stream,
                Vectors<T>(call.w, call.k, call.v, call.a, call.b, call.r, call.dy),
                call.dims.tokens, call.dims.heads, call.dtype, call.decay, call.marks,
                call.sequences, StatesOf(call), call.dfinal_state, gradients, keeps, lot, steep,
                form);
}

// Launches it for steep chunks.
template <typename T, int N, typename Form>
cudaError_t LaunchSteep(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                        const ReplayScratch& scratch, const uint4* gradients, const uint32_t* steep,
                        const Form& form) {
  if (scratch.heads == 0) return cudaSuccess;
  const int64_t resident = kBackwardBlocks<N> * device.multiprocessors;
  return LaunchBackward<T, N, true, true>(
      stream, call, device, {0, scratch}, std::min(resident, scratch.heads),
      {steep, gradients, static_cast<int>(call.dims.head_size),
       static_cast<int>(call.dims.value_size), static_cast<int>(call.dims.key_heads),
       static_cast<int>(call.dims.group)},
      form);
}

}  // namespace

cudaError_t Wkv7Forward(cudaStream_t stream, const Wkv7ForwardCall& call, bool few_heads) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  return ForFloatOrHalf(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    const auto launch = [&](auto blocks, auto marked) {
      return Launch(ForwardKernel<T, N, blocks(), marked()>, heads, ForwardPartition<N>::kThreads,
                    sizeof(ForwardShared<T, N>), stream,
                    Vectors<T>(call.w, call.k, call.v, call.a, call.b, call.r), call.dims.tokens,
                    call.dims.heads, call.dtype, call.decay, call.marks, call.sequences,
                    call.initial_state, static_cast<T*>(call.y), call.final_state, StatesOf(call));
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, N == 64 ? 4 : 1> many;
    return ForMarks(call.marks, [&](auto marked) {
      return few_heads ? launch(one, marked) : launch(many, marked);
    });
  });
}

cudaError_t Wkv7Backward(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                         const ReplayScratch& scratch) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  return ForFloatOrHalf(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    return ForMarks<std::is_same_v<T, float>>(call.marks, [&](auto marked) {
      return ForHeads(heads, scratch, [&](const ReplayLot& lot, int64_t count) {
        if (scratch.splits > 1 && call.dims.tokens > 0) {
          const cudaError_t error =
              Launch(SplitKernel<T, N>, count, ForwardPartition<N>::kThreads, 0, stream,
                     Vectors<T>(call.w, call.a, call.b, call.r, call.dy), call.dims.tokens,
                     call.dims.heads, call.dtype, call.decay, call.marks, call.sequences,
                     call.dfinal_state, lot);
          if (error != cudaSuccess) return error;
        }
        return LaunchBackward<T, N, marked(), false>(stream, call, device, lot,
                                                     count * scratch.splits, {});
      });
    });
  });
}

cudaError_t Wkv7SteepChunks(cudaStream_t stream, const Wkv7BackwardCall& call, const Device& device,
                            const ReplayScratch& scratch, const uint4* gradients,
                            const uint32_t* steep) {
  const auto launch = [&](auto zero, auto size) {
    return LaunchSteep<decltype(zero), size()>(stream, call, device, scratch, gradients, steep,
                                               NoOperands());
  };
  if (call.dtype == Dtype::kF32) return ForHeadSize<64>(call.dims.head_size, 0.0f, launch);
  return ForHeadSize<64, 128>(MatrixHeadSize(call.dims), AnyHalf(), launch);
}

cudaError_t Wkv7SteepChunks(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                            const Device& device, const ReplayScratch& scratch,
                            const uint4* gradients, const uint32_t* steep) {
  Wkv7BackwardCall made = call;
  made.a = made.b = call.k;
  return ForHeadSize<64, 128>(MatrixHeadSize(call.dims), AnyHalf(), [&](auto zero, auto size) {
    return LaunchSteep<decltype(zero), size()>(stream, made, device, scratch, gradients, steep,
                                               DeltaOperands{call.scale, call.beta, call.dbeta});
  });
}

}  // namespace rwkv_jax::cuda
