// The delta rule with a decay of each head (Gated DeltaNet, arXiv:2412.06464) on matrix units, the gradients of the
// inputs: one block of threads per head and chunk of 64 tokens. As in gradients.cu, a block starts from the saved
// state S0 before its chunk and from dS, the gradient of the state after its chunk.
//
//   S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T      y_t = scale S_t q_t
//
// A decay that all channels share is a factor of tokens and of pairs of tokens, and products take q, k and v as they
// are. Such factors are made from differences of G, the sum of the log2 decays up to a token, which are not positive.
// So any decay is in range, and no chunk is steep. Rows are tokens, except that a state is [V, K]:
//
//   read_i = 2^G_i    write_j = 2^(G_63 - G_j)    D_ij = 2^(G_i - G_j)
//
//   T = tril_strict(D * K K^T) diag(beta)      P = scale tril(D * Q K^T) diag(beta)      M = (I + T)^-1
//   W = M (V - diag(read) K S0^T)      Y = scale diag(read) Q S0^T + P W
//   S_63 = read_63 S0 + W^T diag(beta write) K
//
// where * multiplies elements. The gradients are
//
//   dW = P^T dY + diag(beta write) K dS^T      dV = M^T dW
//   dP = scale tril(D * dY W^T)                dT = -tril_strict(D * dV W^T)
//   dQ = scale diag(read) dY S0 + dP diag(beta) K
//   dK = R + diag(beta) X,   R = dT diag(beta) K - diag(read) dV S0,   X = diag(write) W dS + dP^T Q + dT^T K
//   dbeta = the sums of K * X over channels
//   dg_t = sum(dS * read_63 S0) + the sum over tokens s < t, and channels, of W * diag(beta write) K dS^T
//          + the sum over tokens s >= t, and channels, of Q * dQ + K * R - diag(beta) K * (dP^T Q + dT^T K)
//
// where dP and dT are without beta. A pair of tokens that both are at t or later occurs in the last sum twice, once
// with each sign, and cancels, as beta K is rounded in the same way on both sides. A token with itself, for which D is
// 1, is left out: products have dP without its diagonal. So all terms, and not only their sum, are as small as the
// decays. The sum over s < t can be much less than its terms, so W is taken before it is rounded.
//
// All products but those of tokens by tokens are computed transposed, as in gradients.cu. A warpgroup has a panel of 64
// channels: of V in the values, and of K in the gradients of q and k. States pass through a few bytes of shared memory
// of each warp on the way to its registers. So two blocks with heads of 128 share a multiprocessor, and each fills the
// waits of the other.
//
//   phase            computes                               barrier of the block after it, and what it is for
//   LoadChunk        starts all copies; factors of tokens   q, k and the factors have come
//   TokenProduct     M in the first warpgroup, P in the
//                    last one
//   StateProducts    K S0^T, K dS^T                         M and P are stored, v and dY have come
//   Values           W, dV                                  W and dV are stored, M and P have been read
//   TriangleGradient dP in the first warpgroup, dT in the
//                    last one
//   WriteValues      dv
//   QueryProducts    dY S0, dV S0                           dP and dT are stored, dY and dV have been read
//   QueryGradients   dq, R
//   KeyGradients     X, dk                                  sums of all warps
//   TokenGradients   dbeta, dg
#include "fragment.cuh"
#include "kernel_choice.cuh"
#include "launch.cuh"
#include "wkv7/chunk_products.cuh"
#include "wkv7/kernels.h"

namespace rwkv_jax::cuda {
namespace {

// Shared memory: arrays [64 tokens, N] and products of tokens by tokens in panels, and what each warp has.
template <int N>
struct HeadDecayLayout {
  static constexpr int kTerms = 1, kTermBytes = 0;
  static constexpr int kPanels = N / kPanelCols;
  static constexpr int kThreads = 128 * kPanels;
  static constexpr int kPanelBytes = kChunkTokens * kRowBytes;
  static constexpr int kTokenBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = kChunkTiles * kTileBytes;  // of a warp

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kTokenBytes;
  static constexpr int kV = kK + kTokenBytes;    // v, W
  static constexpr int kDy = kV + kTokenBytes;   // dY, dq
  static constexpr int kDv = kDy + kTokenBytes;  // stages of dS, -dV, dk
  static constexpr int kM = kDv + kTokenBytes;   // T, M, dT
  static constexpr int kP = kM + kPanelBytes;    // P, dP
  static constexpr int kStage = kP + kPanelBytes;
  // float [4, 64]: G, beta, read, and beta write or the diagonal of dP.
  static constexpr int kFactors = kStage + 4 * kPanels * kStageBytes;
  static constexpr int kBytes = kFactors + 4 * kChunkTokens * sizeof(float);
};

// The blocks of a multiprocessor.
template <int N>
constexpr int kHeadDecayBlocks = !kAmpleSharedMemory ? 1
                                 : N == 64           ? 3
                                                     : 2;

template <typename T, int N, bool kMarked>
class HeadDecayGradients {
 public:
  using L = HeadDecayLayout<N>;
  using Call = Wkv7DeltaBackwardCall;
  using Channels = WarpChannels<L>;
  using Sum = Accumulator<8>;  // 64 rows by the tokens of the chunk
  using Operand = Left[kChunkTiles][1];
  static constexpr int kTiles = N / kTileTokens;
  static constexpr int kRowPieces = N / 8;
  static constexpr bool kFilled = !kMarked;  // whether K and V are N
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;

  __device__ HeadDecayGradients(const Call& call, const uint4* state_gradients,
                                unsigned char* memory)
      : call(call),
        state_gradients(state_gradients),
        memory(memory),
        shared(SharedAddress(memory)),
        warp(Warp() % 4),
        panel(L::kPanels == 1 ? 0 : Warp() / 4) {}

  // Finds the chunk and the head of this block. Returns false if the block has nothing to do.
  __device__ __forceinline__ bool Find() {
    const unsigned heads = static_cast<unsigned>(call.dims.heads);
    const int64_t all_chunks = blockIdx.x / heads, head = blockIdx.x - all_chunks * heads;
    const int row = call.sequences.Given()
                        ? call.sequences.owners[all_chunks]
                        : static_cast<int>(all_chunks / static_cast<unsigned>(call.dims.saved));
    if (row < 0) return false;
    const Span span = call.sequences(row, call.dims.tokens);
    const int chunk = static_cast<int>(all_chunks - span.first_chunk);
    const int64_t left_tokens = span.tokens - chunk * kChunk;
    constexpr int kWords = kChunkTokens / kWordTokens;
    marks_index = row * static_cast<int>(call.marks.per_row / kWords) + chunk;
    const unsigned key_heads = static_cast<unsigned>(call.dims.key_heads);
    const int64_t first_token = span.first_token + chunk * kChunk;
    stride = static_cast<int>(heads), first = first_token * heads + head;
    key_stride = static_cast<int>(key_heads);
    first_key = first_token * key_heads +
                static_cast<unsigned>(head) / static_cast<unsigned>(call.dims.group);
    tokens = static_cast<int>(left_tokens < kChunkTokens ? left_tokens : kChunkTokens);
    return true;
  }

  // Starts the copies in three groups: q and k; the first stages of S0 and dS; v and dY.
  __device__ __forceinline__ void LoadChunk() const {
    CopyTokens(L::kK, call.k, first_key, key_stride, KeySize());
    CopyTokens(L::kQ, call.r, first_key, key_stride, KeySize());
    CommitCopies();
    StageRows(0);
    CommitCopies();
    CopyTokens(L::kV, call.v, first, stride, ValueSize());
    CopyTokens(L::kDy, call.dy, first, stride, ValueSize());
    CommitCopies();
    constexpr int kLine = 128 / sizeof(__nv_bfloat16);
    for (int i = threadIdx.x * kLine; i < N * N; i += L::kThreads * kLine) {
      if (i < ValueSize() * KeySize()) Prefetch(Start() + i);
      Prefetch(Gradient() + i);
    }
    if (BlockWarp() == 0) MakeFactors();
  }
  __device__ __forceinline__ void WaitForKeys() const {
    WaitForCopies<2>();
    RoundToken(L::kK), RoundToken(L::kQ);
  }
  __device__ __forceinline__ void WaitForValues() const {
    WaitForCopies<1>();  // all but the next stage
    RoundToken(L::kV), RoundToken(L::kDy);
  }

  // M, or P.
  __device__ __forceinline__ void TokenProducts() const {
    if (panel > 0)
      // compute-sanitizer's racecheck orders accesses by the number of barriers that a warp has passed.
      for (int i = 0; i < kInvertBarriers; ++i) WaitForWarpgroup();
    if (panel == L::kPanels - 1) TokenProduct(L::kP, L::kQ, L::kK, true, *call.scale, true);
    if (panel > 0) return;
    TokenProduct(L::kM, L::kK, L::kK, false, -1.0f, true);
    __syncwarp();
    InvertPanel<L>(warp, kWarpgroup, At(L::kM));
  }

  // dP, or dT.
  __device__ __forceinline__ void TriangleGradients() const {
    if (panel == 0) TokenProduct(L::kP, L::kDy, L::kV, false, *call.scale, false);
    if (panel == L::kPanels - 1) TokenProduct(L::kM, L::kDv, L::kV, false, 1.0f, false);
  }

  // K S0^T and K dS^T transposed, for the rows of the states that are this panel, and the sum of dS * read_63 S0.
  __device__ __forceinline__ void StateProducts(Sum& reads, Sum& dw, float& of_start) const {
#pragma unroll
    for (int p = 0; p < L::kPanels; ++p) {
      if (p == 0)
        WaitForCopies<1>();
      else
        WaitForCopies<0>();
      AddStaged(of_start);
      __syncwarp();
      Operand s, ds;
#pragma unroll
      for (int tile = 0; tile < kChunkTiles; ++tile) {
        LoadLeft(Stage(), 0, tile, s[tile][0]);
        LoadLeft(GradientStage(), 0, tile, ds[tile][0]);
      }
      __syncwarp();
      if (p + 1 < L::kPanels)
        StageRows(p + 1);
      else
        StageColumns(Start(), ValueSize(), KeySize(), 0);
      CommitCopies();
      const Along keys{At(L::kK) + p * L::kPanelBytes};
      if (p == 0) {
        Product<L, false>(reads, s, keys);
        Product<L, false>(dw, ds, keys);
      } else {
        Product<L, true>(reads, s, keys);
        Product<L, true>(dw, ds, keys);
      }
      Finish(reads, dw);
    }
    of_start = LoadMarks().starts == 0 ? of_start * Factors(kRead)[kChunkTokens - 1] : 0.0f;
  }

  // W and dV of the channels of this panel; -dV is left in shared memory. `written` gets the sums over channels of
  // W * diag(beta write) K dS^T, as from ReduceTokens.
  __device__ __forceinline__ void Values(Sum& reads, Sum& dw, float (&written)[2]) const {
    ScaleTokens(kRead, 1.0f, reads);
    ScaleTokens(kBetaWrite, 1.0f, dw);
    if (const ChunkMarks marks = LoadMarks(); marks.starts != 0) {
      KeepTokens<8>(0, 0, marks.FirstStart(), reads);
      KeepTokens<8>(0, marks.LastStart(), kChunkTokens, dw);
    }
    OwnChannels(L::kV).template ForEachPair<kChunkTiles>(
        0, [&](int fragment, int e, float low, float high) {
          reads[fragment][e] = low - reads[fragment][e];
          reads[fragment][e + 1] = high - reads[fragment][e + 1];
        });
    Operand rounded;
    RoundPanel(reads, rounded);
    Product<L, false>(reads, rounded, Along{At(L::kM)});
    Finish(reads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int fragment = 4 * half + i / 2, e = i % 2;
        sums[i] =
            reads[fragment][e] * dw[fragment][e] + reads[fragment][e + 2] * dw[fragment][e + 2];
      }
      written[half] = ReduceTokens(sums);
    }
    Product<L, true, kChunkTiles>(warp, dw, Down{OwnPanel(L::kDy)}, Down{At(L::kP)});
    OwnChannels(L::kV).template StoreSum<__nv_bfloat16>(0, reads);
    Finish(dw);
    RoundPanel(dw, rounded);
    Product<L, false>(dw, rounded, Down{At(L::kM)});
    Finish(dw);
    ForEachElement<8>([&](int fragment, int e) { dw[fragment][e] = -dw[fragment][e]; });
    OwnChannels(L::kDv).template StoreSum<__nv_bfloat16>(0, dw);
  }

  __device__ __forceinline__ void WriteValues() const {
    WriteRows<true>(L::kDv, call.dv, ValueSize());
  }

  // dY S0 and -dV S0 transposed, for the channels of this panel.
  __device__ __forceinline__ void QueryProducts(Sum& dq, Sum& dk) const {
#pragma unroll
    for (int p = 0; p < L::kPanels; ++p) {
      Operand s;
      LoadStagedColumns(s);
      if (p + 1 < L::kPanels)
        StageColumns(Start(), ValueSize(), KeySize(), p + 1);
      else
        StageColumns(Gradient(), N, N, 0);
      CommitCopies();
      const Along of_q{At(L::kDy) + p * L::kPanelBytes}, of_k{At(L::kDv) + p * L::kPanelBytes};
      if (p == 0) {
        Product<L, false>(dq, s, of_q);
        Product<L, false>(dk, s, of_k);
      } else {
        Product<L, true>(dq, s, of_q);
        Product<L, true>(dk, s, of_k);
      }
      Finish(dq, dk);
    }
  }

  // dq, and R in `dk`; `reads` gets the sums over channels of Q * dQ + K * R, as from ReduceTokens.
  __device__ __forceinline__ void QueryGradients(Sum& dq, Sum& dk, float (&reads)[2]) const {
    ScaleTokens(kRead, *call.scale, dq);
    ScaleTokens(kRead, 1.0f, dk);
    if (const ChunkMarks marks = LoadMarks(); marks.starts != 0) {
      KeepTokens<8>(0, 0, marks.FirstStart(), dq);
      KeepTokens<8>(0, 0, marks.FirstStart(), dk);
    }
    Operand writes;
    LoadTransposedPanel<L>(OwnPanel(L::kK), warp, 0, writes);
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        writes[tile][0][i] = TimesBeta(writes[tile][0][i], 2 * tile + i / 2);
    Product<L, true>(dq, writes, Along{At(L::kP)});
    Product<L, true>(dk, writes, Along{At(L::kM)});
    Finish(dq, dk);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[8] = {};
      AddTokens(half, L::kQ, dq, sums);
      AddTokens(half, L::kK, dk, sums);
      reads[half] = ReduceTokens(sums);
    }
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int fragment = 2 * tile + i / 2, e = i % 2 * 2;
        const float2 own = FactorsOf(kOwn, fragment);
        dq[fragment][e] += own.x * Bf16::Low(writes[tile][0][i]);
        dq[fragment][e + 1] += own.y * Bf16::High(writes[tile][0][i]);
      }
    OwnChannels(L::kDy).template StoreSum<T>(0, dq);
    WaitForWarpgroup();
    WriteRows<false>(L::kDy, call.dr, KeySize());
  }

  // dk, from R in `dk`, and what this warp has of the sums for dbeta and dg.
  __device__ __forceinline__ void KeyGradients(Sum& dk, const float (&reads)[2],
                                               const float (&written)[2], float of_start) const {
    Sum x;
#pragma unroll
    for (int p = 0; p < L::kPanels; ++p) {
      Operand ds;
      LoadStagedColumns(ds);
      if (p + 1 < L::kPanels) StageColumns(Gradient(), N, N, p + 1);
      CommitCopies();
      const Along values{At(L::kV) + p * L::kPanelBytes};
      if (p == 0)
        Product<L, false>(x, ds, values);
      else
        Product<L, true>(x, ds, values);
      Finish(x);
    }
    const float last = Factors(kSum)[kChunkTokens - 1];
    ForTokens([&](int fragment, int i, int token) {
      const float factor = Exp2(last - Factors(kSum)[token]);
      x[fragment][i] *= factor, x[fragment][i + 2] *= factor;
    });
    if (const ChunkMarks marks = LoadMarks(); marks.starts != 0)
      KeepTokens<8>(0, marks.LastStart(), kChunkTokens, x);
    float dbeta[2][2], writes[2];
    AddKeyGradients<false>(x, dk, dbeta[0], writes);
    Product<L, false, kChunkTiles>(warp, x, Down{OwnPanel(L::kQ)}, Down{At(L::kP)});
    Product<L, true, kChunkTiles>(warp, x, Down{OwnPanel(L::kK)}, Down{At(L::kM)});
    Finish(x);
    AddKeyGradients<true>(x, dk, dbeta[1], writes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 32 * half + Lane() / 8 * 8 + 2 * (Lane() % 4) + Lane() / 4 % 2;
      WarpSums(BlockWarp(), 0)[token] = dbeta[0][half] + dbeta[1][half];
      WarpSums(BlockWarp(), 1)[token] = reads[half] - writes[half];
      WarpSums(BlockWarp(), 2)[token] = written[half];
    }
    float all[1] = {of_start};
    AllReduce<1, 32>(all);
    if (Lane() == 0) WarpSums(BlockWarp(), 3)[0] = all[0];

    OwnChannels(L::kDv).template StoreSum<T>(0, dk);
    WaitForWarpgroup();
    WriteRows<false>(L::kDv, call.dk, KeySize());
  }

  // dbeta and dg; one warp. A lane has a token of each half of the chunk.
  __device__ __forceinline__ void TokenGradients() const {
    if (BlockWarp() > 0) return;
    const auto sum_of = [&](int i, int token) {
      float sum = 0.0f;
#pragma unroll
      for (int of_warp = 0; of_warp < 4 * L::kPanels; ++of_warp) sum += WarpSums(of_warp, i)[token];
      return sum;
    };
    const ChunkMarks marks = LoadMarks();
    // What S_63 has of S0 and of the tokens of the segment before each.
    float before = sum_of(3, 0), written[2], later = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = half * 32 + Lane(), begin = marks.SegmentBegin(token);
      float& sum = written[half];
      sum = token > begin ? sum_of(2, token - 1) : 0.0f;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float next = __shfl_sync(~0u, sum, (Lane() - step) & 31);
        if (Lane() >= step && token - step >= begin) sum += next;
      }
      if (begin <= half * 32) sum += before;
      before = __shfl_sync(~0u, sum, 31);
    }
#pragma unroll
    for (int half = 1; half >= 0; --half) {
      const int token = half * 32 + Lane(), end = marks.SegmentEnd(token);
      float dg = sum_of(1, token);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float next = __shfl_down_sync(~0u, dg, step);
        if (Lane() + step < 32 && token + step < end) dg += next;
      }
      if (half == 0 && end > 32) dg += later;
      later = __shfl_sync(~0u, dg, 0);
      if (end == kChunkTokens) dg += written[half];
      if (token >= tokens) continue;
      const bool absent = marks.absent >> token & 1;
      const int64_t at = first + static_cast<int64_t>(token) * stride;
      call.dbeta[at] = absent ? 0.0f : sum_of(0, token);
      static_cast<float*>(call.dw)[at] = absent ? 0.0f : dg;
    }
  }

 private:
  enum NamedBarrier : int {
    kWarpgroup = 1
  };  // + the warpgroup: its 128 threads; 0 is __syncthreads
  enum Factor { kSum, kBeta, kRead, kBetaWrite, kOwn = kBetaWrite };

  // The marks are read again wherever they are needed: there are no registers to keep them.
  __device__ ChunkMarks LoadMarks() const {
    if (!kMarked || !call.marks.Given()) return ChunkMarks();
    return ChunkMarks(reinterpret_cast<const uint4*>(call.marks.words)[marks_index]);
  }
  __device__ int KeySize() const { return kFilled ? N : static_cast<int>(call.dims.head_size); }
  __device__ int ValueSize() const { return kFilled ? N : static_cast<int>(call.dims.value_size); }
  // The element of a token in an array with heads of `size` channels.
  __device__ int64_t ElementOf(int row, int size) const {
    return (first + static_cast<int64_t>(row) * stride) * size;
  }
  __device__ const __nv_bfloat16* Start() const {
    return static_cast<const __nv_bfloat16*>(call.states) +
           blockIdx.x * (static_cast<int64_t>(ValueSize()) * KeySize());
  }
  __device__ const __nv_bfloat16* Gradient() const {
    return reinterpret_cast<const __nv_bfloat16*>(state_gradients) +
           blockIdx.x * static_cast<int64_t>(N * N);
  }

  __device__ uint32_t At(int offset) const { return shared + offset; }
  __device__ uint32_t OwnPanel(int offset) const {
    return shared + offset + panel * L::kPanelBytes;
  }
  __device__ Channels OwnChannels(int offset) const { return {OwnPanel(offset), warp}; }
  __device__ Along AllChannels(int offset) const { return {At(offset), L::kPanelBytes}; }
  __device__ int BlockWarp() const { return 4 * panel + warp; }
  __device__ uint32_t Stage() const { return At(L::kStage) + BlockWarp() * L::kStageBytes; }
  __device__ uint32_t GradientStage() const { return At(L::kDv) + BlockWarp() * L::kStageBytes; }
  __device__ float* Factors(Factor factor) const {
    return reinterpret_cast<float*>(memory + L::kFactors) + factor * kChunkTokens;
  }
  // What a warp has of sums over channels, in the place of its stage: of tokens for dbeta and for dg, and of dS * S_63
  // by the tokens that have written S_63, and by S0.
  __device__ float* WarpSums(int of_warp, int i) const {
    return reinterpret_cast<float*>(memory + L::kStage + of_warp * L::kStageBytes) +
           i * kChunkTokens;
  }
  __device__ void WaitForWarpgroup() const { Synchronize(kWarpgroup + panel, 128); }

  __device__ bool Has(int piece, int size) const { return kFilled || 8 * piece < size; }
  // Starts to copy the tokens of an array with heads of `size` channels, of which `first` and `stride` count heads.
  __device__ __forceinline__ void CopyTokens(int to, const void* from, int64_t first, int stride,
                                             int size) const {
    const uint64_t absent = LoadMarks().absent;
#pragma unroll
    for (int i = 0; i < kChunkTokens * kRowPieces / L::kThreads; ++i) {
      const int index = threadIdx.x + i * L::kThreads;
      const int row = index / kRowPieces, piece = index % kRowPieces;
      CopyAsync(PieceAddress(At(to) + piece / 8 * L::kPanelBytes, row, piece % 8),
                static_cast<const T*>(from) + (first + static_cast<int64_t>(row) * stride) * size +
                    8 * piece,
                row < tokens && (absent >> row & 1) == 0 && Has(piece, size));
    }
  }
  // Rounds what this thread has copied of an array to bfloat16.
  __device__ __forceinline__ void RoundToken(int array) const {
    if constexpr (kBf16) return;
#pragma unroll
    for (int i = 0; i < kChunkTokens * kRowPieces / L::kThreads; ++i) {
      const int index = threadIdx.x + i * L::kThreads;
      const int row = index / kRowPieces, piece = index % kRowPieces;
      uint4& x = *reinterpret_cast<uint4*>(
          memory + PieceAddress(array + piece / 8 * L::kPanelBytes, row, piece % 8));
      x = {ToBf16<T>(x.x), ToBf16<T>(x.y), ToBf16<T>(x.z), ToBf16<T>(x.w)};
    }
  }
  // Starts to copy 64 columns of the rows of S0 and dS that are the channels of this warp.
  __device__ __forceinline__ void StageRows(int of_panel) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Lane() / 8 + 4 * i, piece = Lane() % 8, column = 64 * of_panel + 8 * piece;
      const int state_row = 64 * panel + 16 * warp + row;
      CopyAsync(PieceAddress(Stage(), row, piece), Start() + state_row * KeySize() + column,
                kFilled || (state_row < ValueSize() && column < KeySize()));
      CopyAsync(PieceAddress(GradientStage(), row, piece), Gradient() + state_row * N + column,
                true);
    }
  }
  // Adds dS * S0 of what this thread has copied in StageRows. Not from the operands, all of which would be converted at
  // once, for which there are no registers.
  __device__ __forceinline__ void AddStaged(float& sum) const {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const auto load = [&](uint32_t stage) {
        return *reinterpret_cast<const uint4*>(
            memory + PieceAddress(stage - shared, Lane() / 8 + 4 * i, Lane() % 8));
      };
      const auto add = [&](uint32_t s, uint32_t ds) {
        sum += Bf16::Low(s) * Bf16::Low(ds) + Bf16::High(s) * Bf16::High(ds);
      };
      const uint4 s = load(Stage()), ds = load(GradientStage());
      add(s.x, ds.x), add(s.y, ds.y), add(s.z, ds.z), add(s.w, ds.w);
    }
  }
  // Starts to copy 64 rows of the columns of a state that are the channels of this warp, as packed tiles.
  __device__ __forceinline__ void StageColumns(const __nv_bfloat16* state, int rows, int columns,
                                               int of_panel) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Lane() / 2 + 16 * i, piece = Lane() % 2, state_row = 64 * of_panel + row;
      const int column = 64 * panel + 16 * warp + 8 * piece;
      CopyAsync(Stage() + i * kTileBytes + Lane() / 16 * 256 + piece * 128 + row % 8 * 16,
                state + state_row * columns + column,
                kFilled || (state_row < rows && column < columns));
    }
  }
  // The transpose of what StageColumns has copied last.
  __device__ __forceinline__ void LoadStagedColumns(Operand& x) const {
    WaitForCopies<0>();
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kChunkTiles; ++tile)
      LoadTransposed(PackedTileAddressByRows(Stage() + tile * kTileBytes), x[tile][0]);
    __syncwarp();
  }

  // The factors of tokens, by one warp; a lane has two tokens side by side.
  __device__ __forceinline__ void MakeFactors() const {
    const uint64_t absent = LoadMarks().absent;
    float log_decays[2], betas[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * Lane() + i;
      const bool present = token < tokens && (absent >> token & 1) == 0;
      const int64_t at = first + static_cast<int64_t>(token) * stride;
      const float log2 = present ? kLog2E * static_cast<const float*>(call.w)[at] : 0.0f;
      log_decays[i] = log2 < kVanishedLog2 ? kVanishedLog2 : log2;
      betas[i] = present ? call.beta[at] : 0.0f;
    }
    float upto = log_decays[0] + log_decays[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float before = __shfl_sync(~0u, upto, (Lane() - step) & 31);
      if (Lane() >= step) upto += before;
    }
    const float last = __shfl_sync(~0u, upto, 31);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * Lane() + i;
      const float sum = i == 1 ? upto : upto - log_decays[1];
      Factors(kSum)[token] = sum, Factors(kBeta)[token] = betas[i];
      Factors(kRead)[token] = Exp2(sum), Factors(kBetaWrite)[token] = betas[i] * Exp2(last - sum);
    }
  }

  // Calls fn(fragment, i, token) for the tokens that this lane has, of which elements i and i + 2 are.
  template <typename Fn>
  static __device__ __forceinline__ void ForTokens(Fn&& fn) {
#pragma unroll
    for (int fragment = 0; fragment < 8; ++fragment)
#pragma unroll
      for (int i = 0; i < 2; ++i) fn(fragment, i, 8 * fragment + 2 * (Lane() % 4) + i);
  }
  __device__ __forceinline__ void ScaleTokens(Factor by, float factor, Sum& sum) const {
    ForTokens([&](int fragment, int i, int token) {
      const float x = factor * Factors(by)[token];
      sum[fragment][i] *= x, sum[fragment][i + 2] *= x;
    });
  }
  // Factors of the tokens that this lane has in a fragment, and a pair of these tokens of a channel times beta.
  __device__ float2 FactorsOf(Factor factor, int fragment) const {
    return reinterpret_cast<const float2*>(Factors(factor))[4 * fragment + Lane() % 4];
  }
  __device__ __forceinline__ uint32_t TimesBeta(uint32_t pair, int fragment) const {
    const float2 beta = FactorsOf(kBeta, fragment);
    return Bf16::Round(Bf16::Low(pair) * beta.x, Bf16::High(pair) * beta.y);
  }
  // Adds an array times `x` for each token that this lane has in a half of the chunk, over its channels.
  __device__ __forceinline__ void AddTokens(int half, int array, const Sum& x,
                                            float (&sums)[8]) const {
    OwnChannels(array).template ForEachPair<kHalfTiles>(
        2 * half, [&](int fragment, int e, float low, float high) {
          sums[2 * fragment] += low * x[4 * half + fragment][e];
          sums[2 * fragment + 1] += high * x[4 * half + fragment][e + 1];
        });
  }
  // Adds what X has in `x` to dk. Of each half of the chunk this lane gets, as from ReduceTokens, the sums over channels
  // of K * x, and, if kWithOwn, of K * x times beta. Then X has the diagonal of dP besides, but the second sum has not.
  template <bool kWithOwn>
  __device__ __forceinline__ void AddKeyGradients(const Sum& x, Sum& dk, float (&of_beta)[2],
                                                  float (&of_write)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float dbeta[8] = {}, writes[8] = {};
#pragma unroll
      for (int tile = 2 * half; tile < 2 * half + 2; ++tile) {
        Left keys, queries = {};
        LoadTransposed(OwnChannels(L::kK).Address(tile), keys);
        if constexpr (kWithOwn) LoadTransposed(OwnChannels(L::kQ).Address(tile), queries);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int fragment = 2 * tile + i / 2, e = i % 2 * 2;
          const float2 beta = FactorsOf(kBeta, fragment), own = FactorsOf(kOwn, fragment);
          const uint32_t pair = TimesBeta(keys[i], fragment);
          const auto add = [&](int j, float key, float query, float write, float beta, float own) {
            const float later = x[fragment][e + j];
            const float gradient = kWithOwn ? later + own * query : later;
            dbeta[2 * fragment % 8 + j] += key * gradient;
            writes[2 * fragment % 8 + j] += write * later;
            dk[fragment][e + j] += beta * gradient;
          };
          add(0, Bf16::Low(keys[i]), Bf16::Low(queries[i]), Bf16::Low(pair), beta.x, own.x);
          add(1, Bf16::High(keys[i]), Bf16::High(queries[i]), Bf16::High(pair), beta.y, own.y);
        }
      }
      of_beta[half] = ReduceTokens(dbeta);
      if constexpr (kWithOwn) of_write[half] = ReduceTokens(writes);
    }
  }
  // The sum over the channels of this warp for one of the tokens that have sums: with the number of bits 2, 3 and 4 of
  // the lane, bit 2 being the last.
  static __device__ __forceinline__ float ReduceTokens(float (&sums)[8]) {
    ReduceHalf<4>(sums), ReduceHalf<2>(sums), ReduceHalf<1>(sums);
    return sums[0];
  }
  // Of lanes whose numbers differ by 4 * kCount one gets the first kCount sums of both, the other the next.
  template <int kCount>
  static __device__ __forceinline__ void ReduceHalf(float (&sums)[8]) {
    const bool upper = Lane() & 4 * kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float low = sums[i], high = sums[kCount + i];
      sums[i] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, 4 * kCount);
    }
  }

  // Stores the lower triangle of D * left right^T, times `factor` and, if `betas`, times beta of the right token. The
  // diagonal of dP is stored apart.
  __device__ __forceinline__ void TokenProduct(int to, int left, int right, bool diagonal,
                                               float factor, bool betas) const {
    Sum sum;
    Product<L, false, kTiles>(warp, sum, AllChannels(left), AllChannels(right));
    const int row = 16 * warp + Lane() / 4;
    const float sums[2] = {Factors(kSum)[row], Factors(kSum)[row + 8]};
    Finish(sum);
#pragma unroll
    for (int fragment = 0; fragment < 8; ++fragment) {
      if (fragment / 2 > warp) continue;
      const int token = 8 * fragment + 2 * (Lane() % 4);
      const float2 beta = betas ? FactorsOf(kBeta, fragment) : float2{1.0f, 1.0f};
      const float of_tokens[2] = {factor * beta.x, factor * beta.y};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sum[fragment][e] *= of_tokens[e % 2] * Exp2(sums[e / 2] - Factors(kSum)[token + e % 2]);
    }
    if (!betas && to == L::kP)
#pragma unroll
      for (int fragment = 0; fragment < 8; ++fragment)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (row + e / 2 * 8 == 8 * fragment + 2 * (Lane() % 4) + e % 2)
            Factors(kOwn)[row + e / 2 * 8] = sum[fragment][e];
    StoreLower<L>(warp, At(to), diagonal, LoadMarks(), sum);
  }

  // Writes this panel of an array, after all warps of this warpgroup have stored their channels there. If kNegated,
  // it has the negated numbers as bfloat16.
  template <bool kNegated>
  __device__ __forceinline__ void WriteRows(int array, void* out, int size) const {
    const int begin = threadIdx.x % 128 / 8, piece = threadIdx.x % 8;
    if (!Has(8 * panel + piece, size)) return;
#pragma unroll
    for (int row = begin; row < kChunkTokens; row += 16) {
      if (row >= tokens) continue;
      uint4 x = *reinterpret_cast<const uint4*>(
          memory + PieceAddress(array + panel * L::kPanelBytes, row, piece));
      if constexpr (kNegated)
        for (uint32_t* word : {&x.x, &x.y, &x.z, &x.w}) *word = FromBf16<T>(*word ^ 0x80008000u);
      *reinterpret_cast<uint4*>(static_cast<T*>(out) + ElementOf(row, size) + kPanelCols * panel +
                                8 * piece) = x;
    }
  }

  const Call& call;
  const uint4* const state_gradients;
  unsigned char* const memory;
  const uint32_t shared;
  const int warp, panel;  // the warp in its warpgroup, and the panel of the warpgroup
  int marks_index;        // of this chunk among the chunks of all rows
  int64_t first;          // the number of the first token of the chunk in [B, T, H]
  int stride, tokens;     // numbers from token to token; tokens of the chunk
  int64_t first_key;      // the same in [B, T, key heads]
  int key_stride;
};

template <typename T, int N, bool kMarked>
__global__ __launch_bounds__(
    HeadDecayLayout<N>::kThreads,
    (kHeadDecayBlocks<N>)) void HeadDecayKernel(const __grid_constant__ Wkv7DeltaBackwardCall call,
                                                const uint4* state_gradients) {
  RWKV_JAX_DYNAMIC_SHARED(kPanelAlignment, memory);
  HeadDecayGradients<T, N, kMarked> gradients(call, state_gradients, memory);
  if (!gradients.Find()) return;
  const auto synchronize = [] {
    PublishOperands();
    __syncthreads();
  };
  gradients.LoadChunk();
  gradients.WaitForKeys();
  synchronize();

  Accumulator<8> first, second;
  float of_start = 0.0f, written[2], reads[2];
  gradients.TokenProducts();
  gradients.StateProducts(first, second, of_start);
  gradients.WaitForValues();
  synchronize();
  gradients.Values(first, second, written);
  synchronize();
  gradients.TriangleGradients();
  gradients.WriteValues();
  gradients.QueryProducts(first, second);
  synchronize();
  gradients.QueryGradients(first, second, reads);
  gradients.KeyGradients(second, reads, written, of_start);
  __syncthreads();
  gradients.TokenGradients();
}

}  // namespace

cudaError_t Wkv7HeadDecayGradients(cudaStream_t stream, const Wkv7DeltaBackwardCall& call,
                                   const uint4* gradients) {
  if (call.dims.tokens == 0) return cudaSuccess;
  const int64_t rows = call.sequences.Given() ? 1 : call.dims.batch;
  const int64_t blocks = rows * call.dims.saved * call.dims.heads;
  return ForHalfTypes<64, 128>(call.dtype, MatrixHeadSize(call.dims), [&](auto zero, auto size) {
    using L = HeadDecayLayout<size()>;
    const auto launch = [&](auto marked) {
      return Launch(HeadDecayKernel<decltype(zero), size(), marked()>, blocks, L::kThreads,
                    L::kBytes, stream, call, gradients);
    };
    return FillsMatrixHead(call.dims) ? ForMarks(call.marks, launch) : launch(std::true_type());
  });
}

}  // namespace rwkv_jax::cuda
