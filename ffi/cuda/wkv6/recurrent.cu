// WKV6 and WKV5 in float, exact for every decay: one block of threads per head.
//
// L tokens are taken at once. With D(i, j) the product of the decay factors of tokens i to j - 1, S
// the state before the L tokens, and dS the gradient of the state after them,
//   y_t = S (D(0, t) r_t) + sum_{i<t} (k_i^T D(i+1, t) r_t) v_i + (k_t^T (u r_t)) v_t
//   S  <- S D(0, L) + sum_i v_i (D(i+1, L) k_i)^T
//   dS <- dS D(0, L) + sum_j dy_j (D(0, j) r_j)^T
// which spares a quarter of the work on S, and nearly half in the backward pass. Decays are only
// multiplied, so one that underflows is as good as any other. What has no S in it is up to single
// channels.
//
// Where S is cleared before one of the L tokens, the products above are those of tokens that it
// keeps apart as well. Who adds them up leaves these out.
#include "launch.cuh"
#include "recurrent.cuh"
#include "fragment.cuh"
#include "wkv6/kernels.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kBlock = 4;

template <typename T>
struct Inputs {
  const T *r, *k, *v, *dy;
  const void* w;  // of T for each token, or, if the decay is constant, float [B, H, N]
  const float* u;
  bool constant_decay;
  Decay decay;
  Marks marks;
  Sequences sequences;

  Inputs(const Wkv6Call& call, const void* dy)
      : r(static_cast<const T*>(call.r)),
        k(static_cast<const T*>(call.k)),
        v(static_cast<const T*>(call.v)),
        dy(static_cast<const T*>(dy)),
        w(call.w),
        u(call.u),
        constant_decay(call.constant_decay),
        decay(call.decay),
        marks(call.marks),
        sequences(call.sequences) {}
};

// A tile of tokens has a block of L for each N threads. In the tile that starts at token `first`, a
// thread brings in one channel of one block. A token past the end, or one that is padding, comes as
// one that changes no state: decay 1, all else 0.
template <typename T, int N, int L, int kThreads>
class Channel {
 public:
  static constexpr int kParts = kThreads / N;
  static constexpr int kTile = kParts * L;

  const int channel = threadIdx.x % N, part = threadIdx.x / N;

  __device__ Channel(const Inputs<T>& in, const Head<N>& head)
      : in_(in),
        tokens_(head.span.tokens),
        stride_(head.TokenStride()),
        origin_(head.FirstToken() + part * L * stride_ + channel) {
    if (in.constant_decay)
      fixed_ = DecayAndSlope(static_cast<const float*>(in.w)[head.index * N + channel], in.decay);
  }

  // How many of the block's tokens there are.
  __device__ int Count(int64_t first) const {
    const int64_t left = tokens_ - first - part * L;
    return left < 0 ? 0 : left < L ? static_cast<int>(left) : L;
  }

  __device__ void Fetch(const T* from, int64_t first, T (&x)[L]) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      if (t < count) x[t] = from[origin_ + (first + t) * stride_];
  }
  __device__ void FetchDecay(int64_t first, T (&w)[L]) const {
    if (!in_.constant_decay) Fetch(static_cast<const T*>(in_.w), first, w);
  }

  // The marks of the block, out of those of the tile.
  template <bool kMarked>
  __device__ TileMarks<kMarked> Own(TileMarks<kMarked> marks) const {
    return marks.From(part * L);
  }

  // From here on the marks are those of the block.
  template <bool kMarked>
  __device__ void Convert(const T (&fetched)[L], int64_t first, TileMarks<kMarked> marks,
                          float (&x)[L]) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      x[t] = t < count && !marks.Absent(t) ? ToFloat(fetched[t]) : 0.0f;
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
        x = in_.constant_decay ? fixed_ : DecayAndSlope(ToFloat(w[t]), in_.decay);
      d[t] = x.x, slope[t] = x.y;
    }
  }

  template <bool kMarked>
  __device__ void Write(const float (&x)[L], int64_t first, TileMarks<kMarked> marks,
                        T* to) const {
    const int count = Count(first);
#pragma unroll
    for (int t = 0; t < L; ++t)
      if (t < count)
        to[origin_ + (first + t) * stride_] = FromFloat<T>(marks.Absent(t) ? 0.0f : x[t]);
  }

 private:
  const Inputs<T>& in_;
  const int64_t tokens_, stride_, origin_;
  float2 fixed_;  // the constant decay
};

// A block in shared memory.
template <int kHeadSize, int kTokens>
struct alignas(16) Block {
  static constexpr int N = kHeadSize;
  static constexpr int L = kTokens;
  // The warps that bring it in.
  static constexpr int kWarps = N > 32 ? N / 32 : 1;

  float decay[N];  // D(0, L)
  float r[L][N];   // D(0, t) r_t
  float k[L][N];   // D(t+1, L) k_t
  float v[L][N];
  // k_t^T (u r_t) at t * L + t, and k_t^T D(t+1, j) r_j at t * L + j > t: what each warp has of it.
  float scores[kWarps][L * L];
};

template <int N>
struct BackwardBlock : Block<N, kBlock> {
  float dy[kBlock][N];
  float4 own[kBlock][N];  // what the channels go back to: d, its slope, r, k
  float products[Block<N, kBlock>::kWarps][kBlock * kBlock];  // v_t^T dy_j at t * L + j >= t
};

template <typename B>
__device__ void PutDecay(const float (&d)[B::L], int channel, B& block) {
  float product = d[0];
#pragma unroll
  for (int t = 1; t < B::L; ++t) product *= d[t];
  block.decay[channel] = product;
}

template <typename B>
__device__ void PutReads(const float (&d)[B::L], const float (&r)[B::L], int channel, B& block) {
  float product = 1.0f;
#pragma unroll
  for (int t = 0; t < B::L; ++t) {
    block.r[t][channel] = product * r[t];
    product *= d[t];
  }
}

template <typename B>
__device__ void PutWrites(const float (&d)[B::L], const float (&k)[B::L], const float (&v)[B::L],
                          int channel, B& block) {
  float product = 1.0f;
#pragma unroll
  for (int t = B::L - 1; t >= 0; --t) {
    block.k[t][channel] = product * k[t];
    block.v[t][channel] = v[t];
    product *= d[t];
  }
}

// The share of one channel in the scores.
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

// ReduceScatter of the first kLeft elements. It unrolls itself: nvcc would leave an array of more
// than 8 elements in memory.
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

// Adds up x over the lanes that differ in the bits [kLow, kHigh) of their number.
template <int kLow, int kHigh, int kCount, typename Put>
__device__ void ReduceAndPut(float (&x)[kCount], int lane, Put&& put) {
  constexpr int kLanes = kHigh / kLow, kLeft = kCount > kLanes ? kCount / kLanes : 1;
  const int first = ShareOut<kLow, kHigh, kCount>(x, lane);
  if (first >= 0)
#pragma unroll
    for (int i = 0; i < kLeft; ++i) put(first + i, x[i]);
}

// The sums over the channels that this warp, or half of one, has brought in.
template <int N, int kCount>
__device__ void PutSums(float (&x)[kCount], int channel, float (*sums)[kCount]) {
  ReduceAndPut<1, Min(N, 32)>(x, threadIdx.x % 32,
                              [&](int i, float sum) { sums[channel / 32][i] = sum; });
}

template <int kWarps, int kCount>
__device__ void AddSums(const float (&sums)[kWarps][kCount], float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = sums[0][i];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x[i] += sums[warp][i];
  }
}

// s = s diag(decay) + sum_t rows[t] cols[t]^T; if `cleared`, nothing is left of s, and only the
// tokens count that `counts`.
template <typename G, int L, typename Counts>
__device__ void Advance(const G& tile, const float* decay, const float (&rows)[L][G::N],
                        const float (&cols)[L][G::N], bool cleared, Counts&& counts,
                        Fragment<G>& s) {
  float d[G::kCols], row[G::kRows], col[G::kCols];
  if (cleared) {
    Clear<G>(s);
#pragma unroll 1
    for (int t = 0; t < L; ++t) {
      if (!counts(t)) continue;
      LoadRows(tile, rows[t], row);
      LoadCols(tile, cols[t], col);
      Add<G>(s, row, col);
    }
    return;
  }
  LoadCols(tile, decay, d);
  LoadRows(tile, rows[0], row);
  LoadCols(tile, cols[0], col);
  DecayAndAdd<G>(s, d, row, col);
#pragma unroll
  for (int t = 1; t < L; ++t) {
    LoadRows(tile, rows[t], row);
    LoadCols(tile, cols[t], col);
    Add<G>(s, row, col);
  }
}

// The state before a block becomes that after it.
template <typename G, typename B, bool kMarked>
__device__ void AdvanceState(const G& tile, const B& block, TileMarks<kMarked> marks,
                             Fragment<G>& s) {
  const auto counts = [&](int t) { return !marks.Starts(t + 1, B::L); };
  Advance(tile, block.decay, block.v, block.k, marks.Starts(0, B::L), counts, s);
}

// The gradient of the state after a block becomes that of the state before it.
template <typename G, typename B, bool kMarked>
__device__ void AdvanceGradient(const G& tile, const B& block, TileMarks<kMarked> marks,
                                Fragment<G>& ds) {
  const auto counts = [&](int t) { return !marks.Starts(0, t + 1); };
  Advance(tile, block.decay, block.dy, block.r, marks.Starts(0, B::L), counts, ds);
}

template <int N>
using ForwardTile = StatePartition<N, N == 32 ? 2 : 4>;

template <int N, int L, int kParts>
struct ForwardShared {
  Block<N, L> blocks[2][kParts];
  float y[2][kParts][L][N];  // S (D(0, t) r_t)
};

template <typename T, int N, int L>
using ForwardChannel = Channel<T, N, L, ForwardTile<N>::kThreads>;

template <typename T, int N, int L>
using ForwardMemory = ForwardShared<N, L, ForwardChannel<T, N, L>::kParts>;

template <typename T, int N, int L, bool kMarked>
__global__ __launch_bounds__(ForwardTile<N>::kThreads, N == 128 ? 1 : 4) void ForwardKernel(
    const __grid_constant__ Inputs<T> in, int64_t row_tokens, int64_t heads,
    const float* initial_state, T* y, float* final_state, SavedStates states) {
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<ForwardMemory<T, N, L>*>(memory);
  using G = ForwardTile<N>;
  const G tile;
  const Head<N> head(blockIdx.x, row_tokens, heads, in.sequences);
  const int64_t tokens = head.span.tokens;

  Fragment<G> s;
  LoadState(tile, initial_state + head.State(), s);

  const ForwardChannel<T, N, L> own(in, head);
  constexpr int kTile = own.kTile;
  const float u = in.u[head.index * N + own.channel];
  T raw_w[L], raw_r[L], raw_k[L], raw_v[L];
  TileMarks<kMarked> marks, next_marks;
  const auto fetch = [&](int64_t first) {
    own.FetchDecay(first, raw_w);
    own.Fetch(in.r, first, raw_r);
    own.Fetch(in.k, first, raw_k);
    own.Fetch(in.v, first, raw_v);
    next_marks = LoadMarks<kMarked>(in.marks, head.sequence, first);
  };
  const auto put = [&](int64_t first) {
    auto& block = shared.blocks[first / kTile % 2][own.part];
    float d[L], slope[L], r[L], k[L], v[L], scores[L * L];
    WithMarks<kTile>(next_marks, [&](auto marks) {
      own.ConvertDecay(raw_w, first, own.Own(marks), d, slope);
      own.Convert(raw_r, first, own.Own(marks), r);
      own.Convert(raw_k, first, own.Own(marks), k);
      own.Convert(raw_v, first, own.Own(marks), v);
    });
    PutDecay(d, own.channel, block);
    PutReads(d, r, own.channel, block);
    PutWrites(d, k, v, own.channel, block);
    Scores(d, k, r, in.u[head.index * N + own.channel], scores);
    PutSums<N>(scores, own.channel, block.scores);
  };
  if (tokens > 0) {
    fetch(0);
    put(0);
  }
  __syncthreads();

  int64_t saved = head.SavedState(0);
  for (int64_t first = 0; first < tokens; first += kTile) {
    const int stage = first / kTile % 2;
    const bool more = first + kTile < tokens;
    marks = next_marks;
    if (more) fetch(first + kTile);
    if (states.data != nullptr && first % kChunk == 0) {
      states.Store(tile, saved, s);
      saved += heads * N * N;
    }

    WithMarks<kTile>(marks, [&](auto marks) {
#pragma unroll 1
      for (int part = 0; part < own.kParts && first + part * L < tokens; ++part) {
        const auto& block = shared.blocks[stage][part];
        float out[L * G::kRows];
#pragma unroll
        for (int t = 0; t < L; ++t) {
          float r[G::kCols], sums[G::kRows];
          LoadCols(tile, block.r[t], r);
          PartialDot<G>(s, r, sums);
#pragma unroll
          for (int i = 0; i < G::kRows; ++i) out[t * G::kRows + i] = sums[i];
        }
        AdvanceState(tile, block, marks.From(part * L), s);
        ReduceAndPut<1, G::kColGroups>(out, tile.lane, [&](int i, float sum) {
          shared.y[stage][part][i / G::kRows][tile.first_row + i % G::kRows] = sum;
        });
      }
    });

    if (more) put(first + kTile);
    WithMarks<kTile>(marks, [&](auto marks) {
      const auto& block = shared.blocks[stage][own.part];
      const auto own_marks = own.Own(marks);
      float scores[L * L], out[L] = {};
      AddSums(block.scores, scores);
#pragma unroll
      for (int i = 0; i < L; ++i)
#pragma unroll
        for (int t = i; t < L; ++t)
          if (!own_marks.Starts(i + 1, t + 1))
            out[t] = fmaf(scores[i * L + t], block.v[i][own.channel], out[t]);
      __syncthreads();
#pragma unroll
      for (int t = 0; t < L; ++t)
        if (!own_marks.Starts(0, t + 1)) out[t] += shared.y[stage][own.part][t][own.channel];
      own.Write(out, first, own_marks, y);
    });
  }
  StoreState(tile, final_state + head.State(), s);
}

// What of a block changes the gradient of the state.
template <int kHeadSize>
struct alignas(16) SplitBlock {
  static constexpr int N = kHeadSize;
  static constexpr int L = kBlock;

  float decay[N], r[L][N], dy[L][N];
};

// The gradient of the state at the end of each split but the last. It needs no state.
template <typename T, int N, bool kMarked>
__global__ __launch_bounds__(ForwardTile<N>::kThreads) void SplitKernel(
    const __grid_constant__ Inputs<T> in, int64_t row_tokens, int64_t heads,
    const float* dfinal_state, ReplayLot lot) {
  using G = ForwardTile<N>;
  constexpr int L = kBlock;
  const G tile;
  const Head<N> head(lot.first_head + blockIdx.x, row_tokens, heads, in.sequences);
  const int64_t tokens = head.span.tokens;
  if (tokens == 0) return;
  const ForwardChannel<T, N, L> own(in, head);
  constexpr int kTile = own.kTile;
  __shared__ SplitBlock<N> shared[own.kParts];
  const int64_t length = lot.Length(head.span.Chunks()) * kChunk;

  Fragment<G> ds;
  LoadState(tile, dfinal_state + head.State(), ds);
  T raw_w[L], raw_r[L], raw_dy[L];
  TileMarks<kMarked> next_marks;
  const auto fetch = [&](int64_t first) {
    own.FetchDecay(first, raw_w);
    own.Fetch(in.r, first, raw_r);
    own.Fetch(in.dy, first, raw_dy);
    next_marks = LoadMarks<kMarked>(in.marks, head.sequence, first);
  };
  int64_t first = (tokens - 1) / kTile * kTile;
  fetch(first);
  for (; first >= length; first -= kTile) {
    const TileMarks<kMarked> marks = next_marks;
    float d[L], slope[L], r[L], dy[L];
    WithMarks<kTile>(marks, [&](auto marks) {
      own.ConvertDecay(raw_w, first, own.Own(marks), d, slope);
      own.Convert(raw_r, first, own.Own(marks), r);
      own.Convert(raw_dy, first, own.Own(marks), dy);
    });
    __syncthreads();
    PutDecay(d, own.channel, shared[own.part]);
    PutReads(d, r, own.channel, shared[own.part]);
#pragma unroll
    for (int t = 0; t < L; ++t) shared[own.part].dy[t][own.channel] = dy[t];
    __syncthreads();
    if (first > length) fetch(first - kTile);
    WithMarks<kTile>(marks, [&](auto marks) {
#pragma unroll 1
      for (int part = own.kParts - 1; part >= 0; --part)
        AdvanceGradient(tile, shared[part], marks.From(part * L), ds);
    });
    if (first % length == 0)
      StoreState(tile, lot.Scratch(head.turn, first / length - 1, Wkv6ScratchSize(N)), ds);
  }
}

template <typename T>
struct Gradients {
  T *r, *k, *v;
  void* w;
  float *u, *initial_state;
};

// A lane of a large head has more rows: registers and shared memory admit no more warps.
template <int N>
using BackwardTile = StatePartition<N, N == 128 ? 8 : N == 32 ? 2 : 4>;

// Columns of S^T dy_t, those of dS^T v_t, and sum_v(dS * S).
enum ColumnSum { kReadSums = 0, kWriteSums = kBlock, kStateSum = 2 * kBlock, kColumnSums };

template <typename G, int kParts>
struct BackwardShared {
  BackwardBlock<G::N> blocks[2][kParts];
  float columns[kParts][G::kWarps][kColumnSums][G::N];  // what each warp has
  float dv[kParts][kBlock][G::N];                       // dS (D(t+1, L) k_t)
  float du[kParts][G::N], dw[kParts][G::N];             // sums over all tokens
};

// What S and dS have to do with the gradients of a block; dS becomes that of the state before it.
template <typename G, bool kMarked>
__device__ void BackwardStep(const G& tile, const BackwardBlock<G::N>& block,
                             TileMarks<kMarked> marks, const Fragment<G>& s, Fragment<G>& ds,
                             float (*columns)[G::N], float (*dv)[G::N]) {
  constexpr int kLeft = G::kCols > G::kRowGroups ? G::kCols / G::kRowGroups : 1;
  float column[G::kCols], row[G::kRows];

  // Stored together: a store in between would hold back the loads behind it.
  const auto put_columns = [&](auto& sums, int which, int first) {
    if (first >= 0)
#pragma unroll
      for (auto& sum : sums) {
#pragma unroll
        for (int i = 0; i < kLeft; ++i) columns[which][tile.Col(first + i)] = sum[i];
        ++which;
      }
  };
  const auto reduce = [&](float (&sum)[kLeft]) {
    const int first = ShareOut<G::kColGroups, 32, G::kCols>(column, tile.lane);
#pragma unroll
    for (int i = 0; i < kLeft; ++i) sum[i] = column[i];
    return first;
  };
  float out[kBlock * G::kRows];
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    LoadCols(tile, block.k[t], column);
    PartialDot<G>(ds, column, row);
#pragma unroll
    for (int i = 0; i < G::kRows; ++i) out[t * G::kRows + i] = row[i];
  }
  ReduceAndPut<1, G::kColGroups>(out, tile.lane, [&](int i, float sum) {
    dv[i / G::kRows][tile.first_row + i % G::kRows] = sum;
  });

  float reads[kBlock][kLeft], writes[kBlock + 1][kLeft];
  int first;
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    LoadRows(tile, block.dy[t], row);
    TransposedDot<G>(row, s, column);
    first = reduce(reads[t]);
  }
  put_columns(reads, kReadSums, first);
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    LoadRows(tile, block.v[t], row);
    TransposedDot<G>(row, ds, column);
    first = reduce(writes[t]);
  }
#pragma unroll
  for (int c = 0; c < G::kCols; ++c) {
    column[c] = s[0][c] * ds[0][c];
#pragma unroll
    for (int i = 1; i < G::kRows; ++i) column[c] = fmaf(s[i][c], ds[i][c], column[c]);
  }
  first = reduce(writes[kBlock]);
  put_columns(writes, kWriteSums, first);

  AdvanceGradient(tile, block, marks, ds);
}

// The chunks of a split run last to first. In a chunk the saved state is replayed to find the
// state before each tile, and then the tiles are taken backwards. Of a block, only what depends on
// S before it or dS after it is summed over rows; each channel finds its gradients from that alone.
template <typename T, int N, bool kMarked>
__global__ __launch_bounds__(BackwardTile<N>::kThreads, N == 128 ? 1 : 3) void BackwardKernel(
    const __grid_constant__ Inputs<T> in, int64_t row_tokens, int64_t heads, SavedStates states,
    const float* dfinal_state, const __grid_constant__ Gradients<T> out, ReplayLot lot) {
  using G = BackwardTile<N>;
  constexpr int L = kBlock;
  using Own = Channel<T, N, L, G::kThreads>;
  constexpr int kTile = Own::kTile, kParts = Own::kParts;
  static_assert(kTile == kWkv6Tile);
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  auto& shared = *reinterpret_cast<BackwardShared<G, kParts>*>(memory);
  const G tile;
  const Head<N> head(lot.Turn(), row_tokens, heads, in.sequences);
  const int64_t tokens = head.span.tokens, chunks = head.span.Chunks();
  const int64_t split = lot.Split(), length = lot.Length(chunks);
  const int64_t first_chunk = split * length;
  const int64_t last_chunk = first_chunk + length < chunks ? first_chunk + length : chunks;
  float* const ds_end = lot.Scratch(head.turn, split, Wkv6ScratchSize(N));

  Fragment<G> ds, s;
  LoadState(tile, last_chunk == chunks ? dfinal_state + head.State() : ds_end, ds);

  const Own own(in, head);
  float& du_total = shared.du[own.part][own.channel];
  float& dw_total = shared.dw[own.part][own.channel];
  du_total = dw_total = 0.0f;

  for (int64_t chunk = last_chunk - 1; chunk >= first_chunk; --chunk) {
    const int64_t start = chunk * kChunk;
    const int in_chunk = static_cast<int>(tokens - start < kChunk ? tokens - start : kChunk);
    const int tiles = (in_chunk + kTile - 1) / kTile;
    const auto load_state = [&](int i) {
      if (i > 0)
        LoadState(tile, ds_end + i * N * N, s);
      else
        states.Load(tile, head.SavedState(chunk), s);
    };
    T raw_w[L], raw_r[L], raw_k[L], raw_v[L], raw_dy[L];
    TileMarks<kMarked> marks, next_marks;
    const auto fetch_writes = [&](int i) {
      next_marks = LoadMarks<kMarked>(in.marks, head.sequence, start + i * kTile);
      own.FetchDecay(start + i * kTile, raw_w);
      own.Fetch(in.k, start + i * kTile, raw_k);
      own.Fetch(in.v, start + i * kTile, raw_v);
    };
    const auto fetch = [&](int i) {
      fetch_writes(i);
      own.Fetch(in.r, start + i * kTile, raw_r);
      own.Fetch(in.dy, start + i * kTile, raw_dy);
    };
    const auto put_writes = [&](int i, float (&d)[L], float (&slope)[L], float (&k)[L],
                                float (&v)[L]) {
      auto& block = shared.blocks[i % 2][own.part];
      WithMarks<kTile>(next_marks, [&](auto marks) {
        own.ConvertDecay(raw_w, start + i * kTile, own.Own(marks), d, slope);
        own.Convert(raw_k, start + i * kTile, own.Own(marks), k);
        own.Convert(raw_v, start + i * kTile, own.Own(marks), v);
      });
      PutDecay(d, own.channel, block);
      PutWrites(d, k, v, own.channel, block);
    };
    const auto put = [&](int i) {
      float d[L], slope[L], r[L], k[L], v[L], dy[L];
      put_writes(i, d, slope, k, v);
      auto& block = shared.blocks[i % 2][own.part];
      WithMarks<kTile>(next_marks, [&](auto marks) {
        own.Convert(raw_r, start + i * kTile, own.Own(marks), r);
        own.Convert(raw_dy, start + i * kTile, own.Own(marks), dy);
      });
      PutReads(d, r, own.channel, block);
#pragma unroll
      for (int t = 0; t < L; ++t) {
        block.dy[t][own.channel] = dy[t];
        block.own[t][own.channel] = {d[t], slope[t], r[t], k[t]};
      }
      float sums[L * L];
      Scores(d, k, r, in.u[head.index * N + own.channel], sums);
      PutSums<N>(sums, own.channel, block.scores);
#pragma unroll
      for (int t = 0; t < L; ++t)
#pragma unroll
        for (int j = 0; j < L; ++j) sums[t * L + j] = j < t ? 0.0f : v[t] * dy[j];
      PutSums<N>(sums, own.channel, block.products);
    };

    load_state(0);
    if (tiles > 1) {
      float d[L], slope[L], k[L], v[L];
      fetch_writes(0);
      put_writes(0, d, slope, k, v);
      __syncthreads();
      for (int i = 0; i + 1 < tiles; ++i) {
        const bool more = i + 2 < tiles;
        marks = next_marks;
        if (more) fetch_writes(i + 1);
        WithMarks<kTile>(marks, [&](auto marks) {
#pragma unroll 1
          for (int part = 0; part < kParts; ++part)
            AdvanceState(tile, shared.blocks[i % 2][part], marks.From(part * L), s);
        });
        StoreState(tile, ds_end + (i + 1) * N * N, s);
        if (more) put_writes(i + 1, d, slope, k, v);
        __syncthreads();
      }
    }

    fetch(tiles - 1);
    put(tiles - 1);
    __syncthreads();
    for (int i = tiles - 1; i >= 0; --i) {
      marks = next_marks;
      if (i > 0) fetch(i - 1);
      const auto& blocks = shared.blocks[i % 2];
#pragma unroll 1
      for (int part = kParts - 1; part >= 0; --part) {
        if (part + 1 < kParts) load_state(i);
#pragma unroll 1
        for (int before = 0; before < part; ++before)
          AdvanceState(tile, blocks[before], marks.From(before * L), s);
        BackwardStep(tile, blocks[part], marks.From(part * L), s, ds,
                     shared.columns[part][threadIdx.x / 32], shared.dv[part]);
      }
      if (i > 0) load_state(i - 1);
      __syncthreads();

      const auto& block = blocks[own.part];
      const int64_t first = start + i * kTile;
      WithMarks<kTile>(marks, [&](auto marks) {
        const auto own_marks = own.Own(marks);
        {
          float scores[L * L], x[L];
          AddSums(block.scores, scores);
#pragma unroll
          for (int t = 0; t < L; ++t) {
            x[t] = own_marks.Starts(t + 1, L) ? 0.0f : shared.dv[own.part][t][own.channel];
#pragma unroll
            for (int j = t; j < L; ++j)
              if (!own_marks.Starts(t + 1, j + 1))
                x[t] = fmaf(scores[t * L + j], block.dy[j][own.channel], x[t]);
          }
          own.Write(x, first, own_marks, out.v);
        }

        // In their channel, the products of S_{t-1} and of dS_t with dy_j, v_j and each other follow
        // the recurrences of S and dS, and are cleared where these are.
        float products[L * L], columns[kColumnSums];
        AddSums(block.products, products);
#pragma unroll
        for (int which = 0; which < kColumnSums; ++which) {
          columns[which] = 0.0f;
#pragma unroll
          for (int warp = 0; warp < G::kWarps; ++warp)
            columns[which] += shared.columns[own.part][warp][which][own.channel];
        }
        float d[L], slope[L], r[L], k[L];
#pragma unroll
        for (int t = 0; t < L; ++t) {
          const float4 x = block.own[t][own.channel];
          d[t] = x.x, slope[t] = x.y, r[t] = x.z, k[t] = x.w;
        }
        const float u = in.u[head.index * N + own.channel];
        float* const reads = columns + kReadSums;
        float* const writes = columns + kWriteSums;
        float state = columns[kStateSum], dr[L], dw[L], dk[L], dw_sum = 0.0f, du_sum = 0.0f;
#pragma unroll
        for (int t = 0; t < L; ++t) {
          if (own_marks.Starts(t)) {
            state = 0.0f;
#pragma unroll
            for (int j = t; j < L; ++j) reads[j] = 0.0f;
          }
          dr[t] = fmaf(products[t * L + t], u * k[t], reads[t]);
          float x = state;
#pragma unroll
          for (int j = L - 1; j > t; --j)
            x = own_marks.Starts(j) ? 0.0f : fmaf(x, d[j], r[j] * reads[j]);
          dw[t] = own_marks.Absent(t) ? 0.0f : slope[t] * x;
          dw_sum += dw[t];
#pragma unroll
          for (int j = t + 1; j < L; ++j)
            reads[j] = fmaf(reads[j], d[t], k[t] * products[t * L + j]);
          state = fmaf(state, d[t], k[t] * writes[t]);
        }
        own.Write(dr, first, own_marks, out.r);
        if (!in.constant_decay) own.Write(dw, first, own_marks, static_cast<T*>(out.w));
#pragma unroll
        for (int t = L - 1; t >= 0; --t) {
          dk[t] = fmaf(products[t * L + t], u * r[t], writes[t]);
          du_sum = fmaf(products[t * L + t], r[t] * k[t], du_sum);
#pragma unroll
          for (int j = 0; j < t; ++j)
            writes[j] = own_marks.Starts(t)
                            ? 0.0f
                            : fmaf(writes[j], d[t], r[t] * products[j * L + t]);
        }
        own.Write(dk, first, own_marks, out.k);
        du_total += du_sum;
        dw_total += dw_sum;
      });
      if (i > 0) put(i - 1);
      __syncthreads();
    }
  }

  // The blocks of a tile have the same channels.
  __syncthreads();
  if (own.part == 0) {
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      du_total += shared.du[part][own.channel];
      dw_total += shared.dw[part][own.channel];
    }
    const int64_t sum = head.sequence * lot.scratch.splits + split;
    const int64_t at = (sum * heads + head.head) * N + own.channel;
    out.u[at] = du_total;
    if (in.constant_decay) static_cast<float*>(out.w)[at] = dw_total;
  }
  if (split == 0) StoreState(tile, out.initial_state + head.State(), ds);
}

}  // namespace

cudaError_t Wkv6Forward(cudaStream_t stream, const Wkv6ForwardCall& call) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  if (heads == 0) return cudaSuccess;
  return ForAllTypes<16, 32, 64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    const auto launch = [&](auto tokens, auto marked) {
      constexpr int L = tokens();
      return Launch(ForwardKernel<T, N, L, marked()>, heads, ForwardTile<N>::kThreads,
                    sizeof(ForwardMemory<T, N, L>), stream, Inputs<T>(call, nullptr),
                    call.dims.tokens, call.dims.heads, call.initial_state,
                    static_cast<T*>(call.y), call.final_state,
                    SavedStates{call.states, call.states_dtype == Dtype::kBF16});
    };
    if (call.dims.tokens == 1 && !call.marks.Given() && !call.sequences.Given())
      return launch(std::integral_constant<int, 1>(), std::false_type());
    return ForMarks(call.marks, [&](auto marked) {
      return launch(std::integral_constant<int, kBlock>(), marked);
    });
  });
}

cudaError_t Wkv6Backward(cudaStream_t stream, const Wkv6BackwardCall& call,
                         const ReplayScratch& scratch) {
  const int64_t heads = call.dims.batch * call.dims.heads;
  return ForAllTypes<16, 32, 64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    constexpr int N = size();
    using G = BackwardTile<N>;
    const Inputs<T> inputs(call, call.dy);
    const Gradients<T> gradients{static_cast<T*>(call.dr), static_cast<T*>(call.dk),
                                 static_cast<T*>(call.dv), call.dw,
                                 call.du, call.dinitial_state};
    const SavedStates states{const_cast<void*>(call.states), call.states_dtype == Dtype::kBF16};
    return ForMarks(call.marks, [&](auto marked) {
      return ForHeads(heads, scratch, [&](const ReplayLot& lot, int64_t count) {
        if (scratch.splits > 1 && call.dims.tokens > 0) {
          const cudaError_t error =
              Launch(SplitKernel<T, N, marked()>, count, ForwardTile<N>::kThreads, 0, stream,
                     inputs, call.dims.tokens, call.dims.heads, call.dfinal_state, lot);
          if (error != cudaSuccess) return error;
        }
        return Launch(BackwardKernel<T, N, marked()>, count * scratch.splits, G::kThreads,
                      sizeof(BackwardShared<G, G::kThreads / N>), stream, inputs,
                      call.dims.tokens, call.dims.heads, states, call.dfinal_state, gradients,
                      lot);
      });
    });
  });
}

}  // namespace rwkv_jax::cuda
