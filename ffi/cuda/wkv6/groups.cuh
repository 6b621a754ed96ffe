// Groups of tokens for the kernels of WKV6 and WKV5 in float (recurrent.cu), which are exact for
// any decay.
//
// The recurrence and its sources are those of wkv6/decays.cuh. A group of L tokens is taken at
// once. With D(i, j) the product of the decay factors of tokens i to j - 1, S the state before the
// group, and dS the gradient of the state after it,
//
//   y_t = S (D(0, t) r_t) + sum_{i<t} (k_i^T D(i+1, t) r_t) v_i + (k_t^T (u r_t)) v_t
//   S  <- S D(0, L) + sum_i v_i (D(i+1, L) k_i)^T
//   dS <- dS D(0, L) + sum_j dy_j (D(0, j) r_j)^T.
//
// Compared to one token at a time this spares a quarter of the work on S, and nearly half of it in
// the backward pass. Decay factors are only multiplied, never divided by, so one that underflows is
// as good as any other. Everything that does not involve S is computed channel by channel.
//
// Where a segment starts in the group, S is cleared before its first token. The products above
// still connect tokens of different segments; the code that adds them up leaves those out.
#pragma once

#include "fragment.cuh"
#include "kernel_choice.cuh"
#include "launch.cuh"
#include "recurrent.cuh"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {

// The tokens of a group, but in the forward pass of a single token.
constexpr int kGroupTokens = 4;

// How a thread brings in its share of the tokens of a pipeline stage. A stage has kGroups groups of
// L tokens, one for each N threads, and a thread brings in one channel of one group. The argument
// `first` is the first token of the stage. A token past the end of the sequence, or one that is
// padding, comes as one that changes no state: its decay is 1, and all else is 0.
template <typename T, int N, int L, int kThreads>
class Channel {
 public:
  static constexpr int kGroups = kThreads / N;
  static constexpr int kStageTokens = kGroups * L;

  const int channel = threadIdx.x % N, group = threadIdx.x / N;

  __device__ Channel(const Wkv6Call& call, const Head<N>& head)
      : call_(call),
        tokens_(head.span.tokens),
        stride_(head.TokenStride()),
        origin_(head.FirstToken() + group * L * stride_ + channel) {
    if (call.constant_decay)
      fixed_ =
          DecayAndSlope(static_cast<const float*>(call.w)[head.index * N + channel], call.decay);
  }

  // The number of tokens of the group that the sequence has.
  __device__ int Count(int64_t first) const {
    const int64_t left = tokens_ - first - group * L;
    return left < 0 ? 0 : left < L ? static_cast<int>(left) : L;
  }

  __device__ void Fetch(const void* from, int64_t first, T (&x)[L]) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      if (t < count) x[t] = static_cast<const T*>(from)[origin_ + (first + t) * stride_];
  }
  __device__ void FetchDecay(int64_t first, T (&w)[L]) const {
    if (!call_.constant_decay) Fetch(call_.w, first, w);
  }

  // From the marks of the stage to those of the group, which the functions below take.
  template <bool kMarked>
  __device__ TileMarks<kMarked> Own(TileMarks<kMarked> marks) const {
    return marks.From(group * L);
  }

  template <bool kMarked>
  __device__ void Convert(const T (&fetched)[L], int64_t first, TileMarks<kMarked> marks,
                          float (&x)[L]) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      x[t] = t < count && !marks.Absent(t) ? ToFloat(fetched[t], call_.dtype) : 0.0f;
  }
  // Decay factors and their derivatives in w.
  template <bool kMarked>
  __device__ void ConvertDecay(const T (&w)[L], int64_t first, TileMarks<kMarked> marks,
                               float (&d)[L], float (&slope)[L]) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t) {
      float2 x{1.0f, 0.0f};
      if (t < count && !marks.Absent(t))
        x = call_.constant_decay ? fixed_ : DecayAndSlope(ToFloat(w[t], call_.dtype), call_.decay);
      d[t] = x.x, slope[t] = x.y;
    }
  }

  template <bool kMarked>
  __device__ void Write(const float (&x)[L], int64_t first, TileMarks<kMarked> marks,
                        void* to) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      if (t < count)
        static_cast<T*>(to)[origin_ + (first + t) * stride_] =
            FromFloat<T>(marks.Absent(t) ? 0.0f : x[t], call_.dtype);
  }

 private:
  const Wkv6Call& call_;
  const int64_t tokens_, stride_, origin_;
  float2 fixed_;  // the decay factor of all tokens and its derivative, if they have the same
};

// A group of tokens in shared memory.
template <int kHeadSize, int kTokens>
struct alignas(16) TokenGroup {
  static constexpr int N = kHeadSize;
  static constexpr int L = kTokens;
  // The number of warps that bring in a group.
  static constexpr int kWarps = N > 32 ? N / 32 : 1;

  float decay[N];  // D(0, L)
  float r[L][N];   // D(0, t) r_t
  float k[L][N];   // D(t+1, L) k_t
  float v[L][N];
  // k_t^T (u r_t) at t * L + t, and k_t^T D(t+1, j) r_j at t * L + j for j > t; each warp has the
  // sums over its own channels.
  float scores[kWarps][L * L];
};

template <int N>
struct BackwardGroup : TokenGroup<N, kGroupTokens> {
  float dy[kGroupTokens][N];
  float4 own[kGroupTokens][N];  // d, its derivative in w, r, k
  // v_t^T dy_j at t * L + j for j >= t; each warp has the sums over its own channels.
  float products[TokenGroup<N, kGroupTokens>::kWarps][kGroupTokens * kGroupTokens];
};

template <typename B>
__device__ void PutDecay(const float (&d)[B::L], int channel, B& group) {
  float product = d[0];
#pragma unroll
  for (int t = 1; t < B::L; ++t) product *= d[t];
  group.decay[channel] = product;
}

template <typename B>
__device__ void PutReads(const float (&d)[B::L], const float (&r)[B::L], int channel, B& group) {
  float product = 1.0f;
#pragma unroll
  for (int t = 0; t < B::L; ++t) {
    group.r[t][channel] = product * r[t];
    product *= d[t];
  }
}

template <typename B>
__device__ void PutWrites(const float (&d)[B::L], const float (&k)[B::L], const float (&v)[B::L],
                          int channel, B& group) {
  float product = 1.0f;
#pragma unroll
  for (int t = B::L - 1; t >= 0; --t) {
    group.k[t][channel] = product * k[t];
    group.v[t][channel] = v[t];
    product *= d[t];
  }
}

// Computes the share that one channel has in the scores.
template <int L>
__device__ void Scores(const float (&d)[L], const float (&k)[L], const float (&r)[L], float u,
                       float (&scores)[L * L]) {
#pragma unroll
  for (int t = 0; t < L; ++t) {
    float x = k[t];
#pragma unroll
    for (int j = 0; j < L; ++j) {
      scores[t * L + j] = j < t ? 0.0f : j == t ? u * x * r[j] : x * r[j];
      if (j > t) x *= d[j];
    }
  }
}

// ReduceScatter of the first kLeft elements. The function is recursive, so that it unrolls itself:
// nvcc would leave an array of more than 8 elements in memory.
template <int kLow, int kHigh, int kLeft, int kCount>
__device__ int ShareOut(float (&x)[kCount], int lane) {
  constexpr int kBit = kHigh / 2, kHalf = kLeft / 2;
  if constexpr (kBit < kLow) {
    return 0;
  } else if constexpr (kHalf > 0) {
    const bool upper = lane & kBit;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float keep = upper ? x[i + kHalf] : x[i];
      const float give = upper ? x[i] : x[i + kHalf];
      x[i] = keep + __shfl_xor_sync(~0u, give, kBit);
    }
    const int first = ShareOut<kLow, kBit, kHalf>(x, lane);
    return first < 0 ? first : first + (upper ? kHalf : 0);
  } else {
    x[0] += __shfl_xor_sync(~0u, x[0], kBit);
    const int first = ShareOut<kLow, kBit, 1>(x, lane);
    return lane & kBit ? -1 : first;
  }
}

// Adds up x over the lanes that differ in the bits [kLow, kHigh) of their number, and calls put(i,
// sum) once for each element.
template <int kLow, int kHigh, int kCount, typename Put>
__device__ void ReduceAndPut(float (&x)[kCount], int lane, Put&& put) {
  constexpr int kLanes = kHigh / kLow, kLeft = kCount > kLanes ? kCount / kLanes : 1;
  const int first = ShareOut<kLow, kHigh, kCount>(x, lane);
  if (first >= 0)
#pragma unroll
    for (int i = 0; i < kLeft; ++i) put(first + i, x[i]);
}

// Stores the sums of x over the channels that this warp, or half of it, has brought in.
template <int N, int kCount>
__device__ void PutSums(float (&x)[kCount], int channel, float (*sums)[kCount]) {
  ReduceAndPut<1, Min(N, 32)>(x, threadIdx.x % 32,
                              [&](int i, float sum) { sums[channel / 32][i] = sum; });
}

// Adds up what the warps have stored.
template <int kWarps, int kCount>
__device__ void AddSums(const float (&sums)[kWarps][kCount], float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = sums[0][i];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x[i] += sums[warp][i];
  }
}

// s = s diag(decay) + sum_t rows[t] cols[t]^T. If `cleared`, nothing is left of s, and the sum is
// over the tokens for which counts(t) holds.
template <typename G, int L, typename Counts>
__device__ void Advance(const G& partition, const float* decay, const float (&rows)[L][G::N],
                        const float (&cols)[L][G::N], bool cleared, Counts&& counts,
                        Fragment<G>& s) {
  float d[G::kCols], row[G::kRows], col[G::kCols];
  if (cleared) {
    Clear<G>(s);
#pragma unroll 1
    for (int t = 0; t < L; ++t) {
      if (!counts(t)) continue;
      LoadRows(partition, rows[t], row);
      LoadCols(partition, cols[t], col);
      Add<G>(s, row, col);
    }
    return;
  }
  LoadCols(partition, decay, d);
  LoadRows(partition, rows[0], row);
  LoadCols(partition, cols[0], col);
  DecayAndAdd<G>(s, d, row, col);
#pragma unroll
  for (int t = 1; t < L; ++t) {
    LoadRows(partition, rows[t], row);
    LoadCols(partition, cols[t], col);
    Add<G>(s, row, col);
  }
}

// From the state before a group to the state after it.
template <typename G, typename B, bool kMarked>
__device__ void AdvanceState(const G& partition, const B& group, TileMarks<kMarked> marks,
                             Fragment<G>& s) {
  const auto counts = [&](int t) { return !marks.Starts(t + 1, B::L); };
  Advance(partition, group.decay, group.v, group.k, marks.Starts(0, B::L), counts, s);
}

// From the gradient of the state after a group to the gradient of the state before it.
template <typename G, typename B, bool kMarked>
__device__ void AdvanceGradient(const G& partition, const B& group, TileMarks<kMarked> marks,
                                Fragment<G>& ds) {
  const auto counts = [&](int t) { return !marks.Starts(0, t + 1); };
  Advance(partition, group.decay, group.dy, group.r, marks.Starts(0, B::L), counts, ds);
}

}  // namespace rwkv_jax::cuda
