// WKV7 on matrix units, the state from token to token: the forward pass, and the gradient of the state
// in the backward pass. One block of threads per head, or per head and segment of its tokens.
//
// Tokens are taken in chunks of L = 16 (rows of the matrices below are tokens), in the form
//
//   At = A exp(G')   Rt = R exp(G)   Bh = B exp(-G)   Kh = K exp(-G)
//   M  = (I - tril_strict(At Bh^T))^-1
//   U  = M (At S^T + tril_strict(At Kh^T) V)
//   Y  = Rt S^T + tril(Rt Bh^T) U + tril(Rt Kh^T) V
//   S  = S + U^T Bh + V^T Kh
//
// where G is the sum of the log decays of the frame up to a token and G' that before it, and S is the
// state times exp(-G) of the last token; at the end of a frame it becomes the state itself again.
//
// The gradient of the state follows the same recurrence from the last token to the first: its rows
// read b and write a, and y and its cotangent take the place of v and r that of k,
//
//   dS <- (dS + dy r^T) diag(d) + ((dS + dy r^T) b) a^T,
//
// but a token adds dy r^T before it reads and decays, where the forward pass adds v k^T after it. So r
// is scaled by exp(-G'), and the triangle of products with it keeps its diagonal.
#include "launch.cuh"
#include "wkv7.h"
#include "wkv7_chunk.cuh"

namespace rwkv_jax::cuda {
namespace {

// The operands by their role in the recurrence: rows of the state are read by a and r, and written
// with b and k.
template <typename T>
struct Scan {
  const T *a, *r, *b, *k, *v, *w;
  int64_t tokens, heads;
  Decay decay;
  const float* start;
  float* end;
  T* y;
  float* states;             // forward: [B, frames, H, V, K], or null
  FrameGradients gradients;  // backward; its memory may be null
  Segments segments;
  bool summarize;  // find the summaries of the segments, all but the last
  float* inexact;
};

template <int N, bool kOutput>
struct Layout {
  static constexpr int kPanels = N / kTileCols;
  static constexpr int kThreads = 2 * N;
  static constexpr int kTile = kSub * kRowBytes;
  static constexpr int kMatrices = 4 * kBlockBytes;
  static constexpr int kDecayStride = N / 4 + 4;  // so that four lanes read different banks

  // In a slot. Rt follows At in each panel of 64 columns, so that the two are one operand.
  static constexpr int kA = 0;
  static constexpr int kR = kTile;
  static constexpr int kReadStride = (kOutput ? 2 : 1) * kTile;
  static constexpr int kB = kPanels * kReadStride;
  static constexpr int kK = kB + kPanels * kTile;
  static constexpr int kV = kK + kPanels * kTile;
  static constexpr int kSlot = kV + kPanels * kTile;

  static constexpr int kSlots = 4;
  static constexpr int kW = kSlots * kSlot;  // consumed two chunks before the rest: a ring of 2
  static constexpr int kY = kW + 2 * kPanels * kTile;
  static constexpr int kM = kY + (kOutput ? 2 * kPanels * kTile : 0);
  static constexpr int kDecays = kM + 2 * kMatrices;
  static constexpr int kDecayBytes = 4 * 4 * kDecayStride;
  static constexpr int kBarriers = kDecays + kSlots * kDecayBytes;
  static constexpr int kBytes = kBarriers + 8 * kSlots;
};

// Two sums for each of the columns, as tiles of one warp see them.
struct Carry {
  float sum[2][2];
};

// Scales the columns 16 * block to 16 * block + 15 of a chunk in place, and leaves exp(G) of its last
// token in `decays`. Returns whether the sums stay in range.
template <typename T, int N, bool kReverse, bool kOutput>
__device__ bool ScaleChunk(int warp, uint32_t slot, uint32_t w_tile, float* decays, Decay form,
                           const Rows& rows, const Ones& inclusive, const Ones& exclusive,
                           bool new_frame, Carry& carry) {
  using L = Layout<N, kOutput>;
  const int lane = Lane(), panel = warp / 4;
  const uint32_t here = BlockAddress(0, 0, warp % 4);
  uint32_t w[4], log_decays[4];
  LoadTransposed(w_tile + panel * L::kTile + here, w);
  LogDecays<T>(w, form, rows, log_decays);

  float sum[2][4], before[2][4], e[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = before[i][j] = new_frame ? 0.0f : carry.sum[i][j % 2];
    WarpMultiplyHalf(sum[i], inclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
    WarpMultiplyHalf(before[i], exclusive.a, log_decays[2 * i], log_decays[2 * i + 1]);
#pragma unroll
    for (int j = 0; j < 2; ++j) carry.sum[i][j] = __shfl_sync(~0u, sum[i][2 + j], 28 | lane);
  }

  const auto exponentials = [&](float sign, const float(&x)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) e[i][j] = Exp2(sign * x[i][j]);
  };
  const auto scale = [&](uint32_t tile) {
    uint32_t x[4];
    LoadMatrices(tile + here, x);
    Scale<T>(e, x);
    StoreMatrices(tile + here, x);
  };
  exponentials(1.0f, before);
  scale(slot + L::kA + panel * L::kReadStride);
  if constexpr (kReverse) {
    exponentials(-1.0f, before);
    scale(slot + L::kK + panel * L::kTile);
  }
  exponentials(1.0f, sum);
  if constexpr (kOutput) scale(slot + L::kR + panel * L::kReadStride);
  if (lane >= 28)
    *reinterpret_cast<float4*>(decays + (lane & 3) * L::kDecayStride + 4 * warp) = {
        e[0][2], e[0][3], e[1][2], e[1][3]};
  exponentials(-1.0f, sum);
  scale(slot + L::kB + panel * L::kTile);
  if constexpr (!kReverse) scale(slot + L::kK + panel * L::kTile);
  if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) e[i][j] = 1.0f;
    scale(slot + L::kV + panel * L::kTile);
  }
  bool in_range = true;
  if (form != Decay::kSigmoid) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) in_range = in_range && fabsf(sum[i][j]) <= kMaxFrameLog2;
  }
  return in_range;
}

// The matrices of 16 x 16 of a chunk, one per warp: tril(At Kh^T), tril(Rt Kh^T), M, tril(Rt Bh^T).
template <int N, bool kReverse, bool kOutput>
__device__ void MultiplyChunk(int warp, uint32_t slot, uint32_t matrices) {
  using L = Layout<N, kOutput>;
  if (warp >= (kOutput ? 4 : 2)) return;
  const bool reads_r = warp >= 2, writes_k = warp % 2 == 1;
  const uint32_t left = slot + (reads_r ? L::kR : L::kA);
  const uint32_t right = slot + (writes_k ? L::kK : L::kB);
  Sum<2> m = {};
#pragma unroll
  for (int block = 0; block < N / kSub; ++block) {
    const int panel = block / 4;
    Left a;
    LoadLeft(left + panel * L::kReadStride, 0, block % 4, a);
    uint32_t b[4];
    KAlongRows{right + panel * L::kTile, block % 4}.Load(0, b);
    WarpMultiply(m[0], a, b[0], b[1]);
    WarpMultiply(m[1], a, b[2], b[3]);
  }
  KeepLower(reads_r || (kReverse && writes_k), m);
  Left rounded;
  if (warp == 0)
    InvertUnitLower(m, rounded);
  else
    Round(m[0], m[1], rounded);
  const int place = reads_r ? (writes_k ? 1 : 3) : (writes_k ? 0 : 2);
  StoreMatrices(PackedBlockAddress(matrices + place * kBlockBytes), rounded);
}

// The rows of a state that this thread has: those of one warp, in the tiles of a Sum.
template <int N>
struct StateTiles {
  static constexpr int kPanels = N / kTileCols;
  using State = float[kPanels][8][4];

  // Calls fn(index, element) for elements 0 and 2 of each tile, which are followed by 1 and 3.
  template <typename Fn>
  static __device__ void ForEachPair(Fn&& fn) {
    const int row = threadIdx.x / 32 * 16 + Lane() / 4, col = 2 * (Lane() % 4);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int tile = 0; tile < 8; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          fn((row + 8 * half) * N + 64 * panel + 8 * tile + col, panel, tile, 2 * half);
  }

  static __device__ void Load(const float* from, State& s) {
    ForEachPair([&](int index, int panel, int tile, int e) {
      const float2 pair = *reinterpret_cast<const float2*>(from + index);
      s[panel][tile][e] = pair.x, s[panel][tile][e + 1] = pair.y;
    });
  }

  static __device__ void Store(const State& s, float* to) {
    ForEachPair([&](int index, int panel, int tile, int e) {
      *reinterpret_cast<float2*>(to + index) = {s[panel][tile][e], s[panel][tile][e + 1]};
    });
  }

  static __device__ void SetDiagonal(float value, State& s) {
    ForEachPair([&](int index, int panel, int tile, int e) {
      const int row = index / N, col = index % N;
      s[panel][tile][e] = row == col ? value : 0.0f;
      s[panel][tile][e + 1] = row == col + 1 ? value : 0.0f;
    });
  }
};

// 64 columns of a state as left operands.
constexpr int kPanelBlocks = kTileCols / kSub;

__device__ void RoundPanel(const Sum<8>& panel, Left (&rounded)[kPanelBlocks]) {
#pragma unroll
  for (int block = 0; block < kPanelBlocks; ++block)
    Round(panel[2 * block], panel[2 * block + 1], rounded[block]);
}

// One chunk: y, and the state after it from the state before it.
template <typename T, int N, bool kOutput>
__device__ void AdvanceState(int warp, uint32_t slot, uint32_t matrices, uint32_t y_tile,
                             typename StateTiles<N>::State& s) {
  using L = Layout<N, kOutput>;
  constexpr int kReadTiles = kOutput ? 4 : 2;
  const int panel_of_v = warp / 4;
  Left v;
  LoadLeftTransposed(slot + L::kV + panel_of_v * L::kTile, 0, warp % 4, v);

  Sum<kReadTiles> zy;  // [Z | Y]^T = S [At; Rt]^T + V^T [Aak; Qrk]^T
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) {
    // One panel at a time: there are no registers for the operands of two.
    if (panel > 0) {
      CommitProducts();
      WaitForProducts<0>();
      Settle(zy);
    }
    Left before[kPanelBlocks];
    RoundPanel(s[panel], before);
    BeginProducts();
#pragma unroll
    for (int block = 0; block < kPanelBlocks; ++block) {
      const KAlongRows read{slot + panel * L::kReadStride, block};
      if (panel == 0 && block == 0)
        Multiply<false>(zy, before[block], read);
      else
        Multiply<true>(zy, before[block], read);
    }
  }
  Multiply<true>(zy, v, PackedBlocks{matrices});
  CommitProducts();
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(s[panel], v, KDownRows{slot + L::kK + panel * L::kTile});
  CommitProducts();
  WaitForProducts<1>();
  Settle(zy);

  Left rounded;
  Round(zy[0], zy[1], rounded);
  Sum<2> u;  // U^T = Z^T M^T
  BeginProducts();
  Multiply<false>(u, rounded, PackedBlocks{matrices + 2 * kBlockBytes});
  CommitProducts();
  WaitForProducts<0>();
  Settle(u);

  Left u_rounded;
  Round(u[0], u[1], u_rounded);
  BeginProducts();
  if constexpr (kOutput) {
    // Y += Qrb U; the product with M beside it falls into Z, which is no longer needed.
    Multiply<true>(zy, u_rounded, PackedBlocks{matrices + 2 * kBlockBytes});
    CommitProducts();
  }
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel)
    Multiply<true>(s[panel], u_rounded, KDownRows{slot + L::kB + panel * L::kTile});
  CommitProducts();
  if constexpr (kOutput) {
    WaitForProducts<1>();
    Settle(zy);
    StoreTransposed(BlockAddress(y_tile + panel_of_v * L::kTile, 0, warp % 4),
                    {Pair<T>::Round(zy[2][0], zy[2][1]), Pair<T>::Round(zy[3][0], zy[3][1]),
                     Pair<T>::Round(zy[2][2], zy[2][3]), Pair<T>::Round(zy[3][2], zy[3][3])});
  }
  WaitForProducts<0>();
#pragma unroll
  for (int panel = 0; panel < L::kPanels; ++panel) Settle(s[panel]);
}

// The chunks are a pipeline with one barrier per chunk: while chunk c advances the state, the matrices
// of c + 1 are computed, then the operands of c + 2 are scaled, and those of c + 4 are on their way.
template <typename T, int N, bool kReverse, bool kOutput>
__global__ __launch_bounds__(2 * N, N == 64 ? 4 : 2) void ScanKernel(
    const __grid_constant__ Scan<T> scan) {
  using L = Layout<N, kOutput>;
  using Tiles = StateTiles<N>;
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const uint32_t shared = SharedAddress(memory);
  const int warp = Warp();
  const int64_t head = blockIdx.x;
  const int64_t order = blockIdx.y;  // of the segments, as they come in the recurrence
  const bool identity = blockIdx.z == 1;
  const Segments& segments = scan.segments;
  if (scan.inexact != nullptr && scan.inexact[head] != 0.0f) return;
  if (identity && order == 0) return;  // its start is known, so its summary is its end

  const int64_t frames = (scan.tokens + kChunk - 1) / kChunk;
  const int64_t segment = kReverse ? segments.count - 1 - order : order;
  const int64_t first_frame = segment * segments.Frames(frames);
  const int64_t first_token = first_frame * kChunk;
  const int64_t left = scan.tokens - first_token, most = segments.Frames(frames) * kChunk;
  const int tokens = static_cast<int>(left < most ? left : most);
  const int chunks = tokens > 0 ? (tokens + kSub - 1) / kSub : 0;

  typename Tiles::State s;
  if (scan.summarize && order > 0)
    Tiles::SetDiagonal(identity ? 1.0f : 0.0f, s);
  else
    Tiles::Load(order == 0 ? scan.start + head * N * N
                           : segments.State<N>(head, order - 1), s);

  // Where the rows of a chunk lie: backwards, the first row is its last token.
  const int copy_row = threadIdx.x / (N / 8), copy_piece = threadIdx.x % (N / 8);
  const uint32_t copy_to = PieceAddress(0, copy_row, copy_piece % 8);
  const auto time_of = [&](int chunk) { return kReverse ? chunks - 1 - chunk : chunk; };
  const auto token_of = [&](int chunk) {
    return time_of(chunk) * kSub + (kReverse ? kSub - 1 - copy_row : copy_row);
  };
  const int64_t batch = head / scan.heads;
  const int stride = static_cast<int>(scan.heads * N);
  const int64_t first = (batch * scan.tokens + first_token) * stride +
                        (head - batch * scan.heads) * N + copy_piece * 8;
  const auto element_of = [&](int token) { return first + static_cast<int64_t>(token) * stride; };
  const auto rows_of = [&](int chunk) {
    const int there = tokens - time_of(chunk) * kSub;
    return kReverse ? Rows{kSub - there, kSub} : Rows{0, there};
  };

  const auto slot_of = [&](int chunk) { return shared + chunk % L::kSlots * L::kSlot; };
  const auto barrier_of = [&](int chunk) {
    return CopyBarrier(shared + L::kBarriers + 8 * (chunk % L::kSlots));
  };
  const auto copy_operands = [&](int chunk) {
    const int token = token_of(chunk);
    const bool there = token < tokens;
    const int64_t from = there ? element_of(token) : 0;
    const int panel = copy_piece / 8;
    const uint32_t to = slot_of(chunk) + copy_to;
    CopyAsync(to + L::kA + panel * L::kReadStride, scan.a + from, there);
    if constexpr (kOutput) CopyAsync(to + L::kR + panel * L::kReadStride, scan.r + from, there);
    CopyAsync(to + L::kB + panel * L::kTile, scan.b + from, there);
    CopyAsync(to + L::kK + panel * L::kTile, scan.k + from, there);
    CopyAsync(to + L::kV + panel * L::kTile, scan.v + from, there && !identity);
  };
  const auto w_of = [&](int chunk) {
    return shared + L::kW + chunk % 2 * L::kPanels * L::kTile;
  };
  const auto copy_decays = [&](int chunk) {
    const int token = token_of(chunk);
    const bool there = token < tokens;
    CopyAsync(w_of(chunk) + copy_piece / 8 * L::kTile + copy_to,
              scan.w + (there ? element_of(token) : 0), there);
    barrier_of(chunk).ArriveAfterCopies();
  };

  const Ones inclusive(true, true, false), exclusive(true, false, false);
  Carry carry = {};
  bool in_range = true;
  const auto starts_frame = [&](int chunk) {
    return kReverse ? chunk == 0 || time_of(chunk) % 4 == 3 : chunk % 4 == 0;
  };
  const auto ends_frame = [&](int chunk) {
    return kReverse ? time_of(chunk) % 4 == 0 : chunk % 4 == 3 || chunk == chunks - 1;
  };
  const auto decays_of = [&](int chunk) {
    return reinterpret_cast<float*>(memory + L::kDecays) + chunk % L::kSlots * 4 * L::kDecayStride;
  };
  const auto scale = [&](int chunk) {
    barrier_of(chunk).Wait(chunk / L::kSlots % 2);
    in_range &= ScaleChunk<T, N, kReverse, kOutput>(
        warp, slot_of(chunk), w_of(chunk), decays_of(chunk), scan.decay, rows_of(chunk), inclusive,
        exclusive, starts_frame(chunk), carry);
  };
  const auto matrices_of = [&](int chunk) {
    return shared + L::kM + chunk % 2 * L::kMatrices;
  };
  const auto multiply = [&](int chunk) {
    MultiplyChunk<N, kReverse, kOutput>(warp, slot_of(chunk), matrices_of(chunk));
  };
  // Returns false where the block has to give up.
  const auto synchronize = [&] {
    PublishOperands();
    if (scan.inexact == nullptr) {
      __syncthreads();
      return true;
    }
    return __syncthreads_and(in_range) != 0;
  };
  const auto give_up = [&] {
    WaitForCopies();
    if (threadIdx.x == 0) scan.inexact[head] = 1.0f;
  };

  if (threadIdx.x < L::kSlots) barrier_of(threadIdx.x).Init(L::kThreads);
  __syncthreads();
  for (int chunk = 0; chunk < L::kSlots && chunk < chunks; ++chunk) {
    copy_operands(chunk);
    if (chunk < 2) copy_decays(chunk);
  }
  for (int chunk = 0; chunk < 2 && chunk < chunks; ++chunk) scale(chunk);
  if (!synchronize()) return give_up();
  for (int chunk = 2; chunk < L::kSlots && chunk < chunks; ++chunk) copy_decays(chunk);
  if (chunks > 0) multiply(0);
  PublishOperands();
  __syncthreads();

#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) multiply(chunk + 1);

    if (starts_frame(chunk)) {
      const int64_t frame = first_frame + time_of(chunk) / 4;
      if constexpr (kReverse) {
        if (scan.gradients.memory != nullptr) {
          uint4* const to = scan.gradients.memory + head * scan.gradients.stride +
                            frame * (N / kSub) * L::kThreads + threadIdx.x;
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel) {
            Left x[kPanelBlocks];
            RoundPanel(s[panel], x);
#pragma unroll
            for (int block = 0; block < kPanelBlocks; ++block)
              to[(panel * kPanelBlocks + block) * L::kThreads] = {x[block][0], x[block][1],
                                                                  x[block][2], x[block][3]};
          }
        }
      } else if (scan.states != nullptr) {
        // [B, frames, H, V, K], and head is batch * H + h
        const int64_t index = head + (batch * (frames - 1) + frame) * scan.heads;
        Tiles::Store(s, scan.states + index * N * N);
      }
    }
    const uint32_t y_tile = shared + L::kY + chunk % 2 * L::kPanels * L::kTile;
    AdvanceState<T, N, kOutput>(warp, slot_of(chunk), matrices_of(chunk), y_tile, s);
    if (ends_frame(chunk)) {
      const float* const decays = decays_of(chunk) + (threadIdx.x & 3) * L::kDecayStride;
#pragma unroll
      for (int pair = 0; pair < N / 16; ++pair) {
        const float4 d = *reinterpret_cast<const float4*>(decays + 4 * pair);
        float(&left_tile)[4] = s[pair / 4][pair % 4 * 2];
        float(&right_tile)[4] = s[pair / 4][pair % 4 * 2 + 1];
        left_tile[0] *= d.x, left_tile[1] *= d.y, left_tile[2] *= d.x, left_tile[3] *= d.y;
        right_tile[0] *= d.z, right_tile[1] *= d.w, right_tile[2] *= d.z, right_tile[3] *= d.w;
      }
    }

    if (chunk + 2 < chunks) scale(chunk + 2);
    if (!synchronize()) return give_up();
    if constexpr (kOutput) {
      const int token = token_of(chunk);
      const unsigned char* const from =
          memory + (y_tile - shared) + copy_piece / 8 * L::kTile + copy_to;
      if (token < tokens)
        *reinterpret_cast<uint4*>(scan.y + element_of(token)) =
            *reinterpret_cast<const uint4*>(from);
    }
    if (chunk + L::kSlots < chunks) {
      copy_operands(chunk + L::kSlots);
      copy_decays(chunk + L::kSlots);
    }
  }

  if (scan.summarize)
    Tiles::Store(s, identity ? segments.Factor<N>(head, order) : segments.State<N>(head, order));
  else if (order == segments.count - 1)
    Tiles::Store(s, scan.end + head * N * N);
}

// From the summaries of the segments the state at the end of each: S_i = S_{i-1} M_i + D_i, where S_0
// is there already, and D_i becomes S_i. A block has some rows of the state.
constexpr int kCombineThreads = 128;
constexpr int kCombineRows = 8;

template <int N>
__global__ __launch_bounds__(kCombineThreads) void CombineKernel(Segments segments,
                                                                 const float* inexact) {
  constexpr int kCols = kCombineRows * N / kCombineThreads;
  __shared__ float s[kCombineRows][N];
  extern __shared__ __align__(16) float factor[];  // [N, N]
  const int64_t head = blockIdx.x;
  const int first_row = blockIdx.y * kCombineRows;
  const int row = threadIdx.x * kCols / N, col = threadIdx.x * kCols % N;
  if (inexact != nullptr && inexact[head] != 0.0f) return;

  float sum[kCols];
  const auto at = [&](int order) {
    return segments.State<N>(head, order) + (first_row + row) * N + col;
  };
#pragma unroll
  for (int c = 0; c < kCols; ++c) sum[c] = at(0)[c];
  for (int order = 1; order < segments.count - 1; ++order) {
    const float4* const from = reinterpret_cast<const float4*>(segments.Factor<N>(head, order));
    for (int i = threadIdx.x; i < N * N / 4; i += kCombineThreads)
      reinterpret_cast<float4*>(factor)[i] = from[i];
#pragma unroll
    for (int c = 0; c < kCols; ++c) s[row][col + c] = sum[c];
    float* const to = at(order);
#pragma unroll
    for (int c = 0; c < kCols; ++c) sum[c] = to[c];
    __syncthreads();
#pragma unroll 8
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int c = 0; c < kCols; ++c)
        sum[c] = fmaf(s[row][i], factor[i * N + col + c], sum[c]);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kCols; ++c) to[c] = sum[c];
  }
}

// The whole sequence, or segment by segment: first what each does to a state, then, from the state at
// the start of each, all of them at once.
template <typename T, int N, bool kReverse>
cudaError_t Run(cudaStream_t stream, Scan<T> scan, int64_t heads) {
  const auto launch = [&](auto output, int segments, int roles) {
    using L = Layout<N, output()>;
    const dim3 blocks(static_cast<unsigned>(heads), segments, roles);
    return Launch(ScanKernel<T, N, kReverse, output()>, blocks, L::kThreads, L::kBytes, stream,
                  scan);
  };
  const int segments = static_cast<int>(scan.segments.count);
  if (segments > 1) {
    scan.summarize = true;
    if (cudaError_t error = launch(std::false_type(), segments - 1, segments > 2 ? 2 : 1);
        error != cudaSuccess)
      return error;
    scan.summarize = false;
    const dim3 blocks(static_cast<unsigned>(heads), N / kCombineRows);
    if (cudaError_t error = Launch(CombineKernel<N>, blocks, kCombineThreads,
                                   N * N * sizeof(float), stream, scan.segments, scan.inexact);
        error != cudaSuccess)
      return error;
  }
  return launch(std::bool_constant<!kReverse>(), segments, 1);
}

}  // namespace

cudaError_t Wkv7Scan(cudaStream_t stream, const Wkv7ForwardCall& call, const Segments& segments,
                     float* inexact) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    Scan<T> scan = {};
    scan.a = in(call.a), scan.r = in(call.r), scan.b = in(call.b);
    scan.k = in(call.k), scan.v = in(call.v), scan.w = in(call.w);
    scan.tokens = call.dims.tokens, scan.heads = call.dims.heads, scan.decay = call.decay;
    scan.start = call.initial_state, scan.end = call.final_state;
    scan.y = static_cast<T*>(call.y), scan.states = call.states;
    scan.segments = segments, scan.inexact = inexact;
    return Run<T, size(), false>(stream, scan, call.dims.batch * call.dims.heads);
  });
}

cudaError_t Wkv7ReverseScan(cudaStream_t stream, const Wkv7BackwardCall& call,
                            const Segments& segments, const FrameGradients& gradients,
                            float* inexact) {
  return ForHalfTypes<64, 128>(call.dtype, call.dims.head_size, [&](auto zero, auto size) {
    using T = decltype(zero);
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    Scan<T> scan = {};
    scan.a = in(call.b), scan.b = in(call.a);
    scan.k = in(call.r), scan.v = in(call.dy), scan.w = in(call.w);
    scan.tokens = call.dims.tokens, scan.heads = call.dims.heads, scan.decay = call.decay;
    scan.start = call.dfinal_state, scan.end = call.dinitial_state;
    scan.gradients = gradients;
    scan.segments = segments, scan.inexact = inexact;
    return Run<T, size(), true>(stream, scan, call.dims.batch * call.dims.heads);
  });
}

}  // namespace rwkv_jax::cuda
