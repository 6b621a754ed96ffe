// The kernels that all operators share besides their own.
#include "launch.cuh"
#include "relays.h"
#include "splits.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 128;  // of each row and result
constexpr int kMaxResults = 6;

struct Results {
  TokenResult of[kMaxResults];
};

__global__ __launch_bounds__(kThreads) void ClearKernel(Sequences sequences,
                                                        int64_t sequences_of_row, int64_t tokens,
                                                        int64_t halves, Results results) {
  const int64_t row = blockIdx.x, start = row * tokens;
  const Span span = sequences.OfRow(row, sequences_of_row, tokens);
  uint16_t* const to = static_cast<uint16_t*>(results.of[blockIdx.z].data);
  const int64_t size = results.of[blockIdx.z].size * halves;
  const auto clear = [&](int64_t from, int64_t upto) {
    for (int64_t i = from * size + blockIdx.y * kThreads + threadIdx.x; i < upto * size;
         i += kBlocks * kThreads)
      to[i] = 0;
  };
  clear(start, span.first_token);
  clear(span.first_token + span.tokens, start + tokens);
}

constexpr int kSumColumns = 32;
constexpr int kSumWarps = 16;
constexpr int kSumThreads = kSumColumns * kSumWarps;
constexpr int kMaxInputs = 2;

struct Inputs {
  PartialSums of[kMaxInputs];
};

// A warp has kSumColumns columns. kWarps of them share a sequence: each adds up every kWarps-th partial
// sum, and the first then adds up what they have.
template <int kWarps>
__global__ __launch_bounds__(kSumThreads) void SumKernel(Sequences sequences, int64_t count,
                                                         int64_t partials, int64_t chunks,
                                                         int64_t columns, Inputs inputs) {
  __shared__ float sums[kSumWarps][kSumColumns];
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const int lane = threadIdx.x % kSumColumns, warp = threadIdx.x / kSumColumns;
  const int64_t sequence = blockIdx.x / groups * (kSumWarps / kWarps) + warp / kWarps;
  const int64_t column = blockIdx.x % groups * kSumColumns + lane;
  const bool active = sequence < count && column < columns;
  const PartialSums& input = inputs.of[blockIdx.y];
  float sum = 0.0f;
  if (active) {
    int64_t first = sequence * partials, stride = 1;
    if (sequences.Given()) {
      const Span span = sequences(sequence, 0);
      first = span.first_chunk, stride = chunks, partials = (span.Chunks() + chunks - 1) / chunks;
    }
#pragma unroll 8
    for (int64_t i = warp % kWarps; i < partials; i += kWarps)
      sum += input.from[(first + i * stride) * columns + column];
  }
  if constexpr (kWarps > 1) {
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp % kWarps > 0) return;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += sums[warp + i][lane];
  }
  if (active) input.to[sequence * columns + column] = sum;
}

// Finds the place of a chunk in the order: chunks with fewer chunks of their split after them come before it.
__device__ void FindOrder(const Relays& relays, int64_t chunk) {
  const int owner = relays.sequences.owners[chunk];
  int64_t split = 0, position = 0, turn = 0, all = 0;
  if (owner >= 0) {
    const Span span = relays.sequences(owner, relays.tokens);
    const int64_t each = relays.splits.ChunksPerSplit(span.Chunks());
    split = (chunk - span.first_chunk) / each;
    const int64_t behind = (split + 1) * each;
    position = (behind < span.Chunks() ? behind : span.Chunks()) - 1 - (chunk - span.first_chunk);
  }
  for (int64_t i = 0; i < relays.batch; ++i) {
    const int64_t chunks = relays.sequences(i, relays.tokens).Chunks();
    if (chunks == 0) continue;
    const int64_t each = relays.splits.ChunksPerSplit(chunks);
    const int64_t full = chunks / each, left = chunks % each;
    turn += full * (position < each ? position : each) + (position < left ? position : left);
    if (i < owner) turn += (position < each ? full : 0) + (position < left);
    all += chunks;
  }
  if (owner >= 0) relays.order[turn + split] = static_cast<int32_t>(chunk);
  if (chunk >= all) relays.order[chunk] = -1;
}

// A block for each relay.
__global__ __launch_bounds__(kThreads) void BeginKernel(Relays relays) {
  const int64_t heads = relays.heads, block = blockIdx.y * int64_t{gridDim.x} + blockIdx.x;
  const Splits& splits = relays.splits;
  if (relays.sequences.Given()) {
    const int64_t threads = int64_t{gridDim.x} * gridDim.y * kThreads;
    for (int64_t chunk = block * kThreads + threadIdx.x; chunk < relays.chunks; chunk += threads)
      FindOrder(relays, chunk);
  }
  const BlockWork work = splits.WorkOfBlock<true>(relays.sequences, relays.tokens, heads, false);
  if (work.split < 0) return;
  RelayPlace place;
  place.row = work.turn.sequence, place.head = blockIdx.x % heads;
  place.span = work.turn.span, place.split = work.split;

  const int64_t of_all = place.row * heads + place.head;
  const int64_t order = splits.Count(place.span.Chunks()) - 1 - place.split;
  const bool at_end = order == 0;
  const float* const from = at_end ? relays.start + of_all * relays.rows * relays.columns
                                   : splits.Transition<true>(of_all, heads, place.span, order - 1);
  const int rows = at_end ? relays.rows : relays.size;
  const int columns = at_end ? relays.columns : relays.size;
  const Baton to = relays.BatonOf(place);
  if (threadIdx.x == 0) *to.done = 0;
  for (int i = threadIdx.x; i < relays.size * relays.size / 2; i += kThreads) {
    const int row = 2 * i / relays.size, column = 2 * i % relays.size;
    float2 pair = {};
    if (row < rows && column < columns)
      pair = *reinterpret_cast<const float2*>(from + row * columns + column);
    if (row < to.rows && column < to.columns)
      *reinterpret_cast<float2*>(to.data + row * to.columns + column) = pair;
    reinterpret_cast<uint32_t*>(to.rounded)[i] = RoundToBf16(pair.x, pair.y);
  }
}

}  // namespace

cudaError_t ClearOutside(cudaStream_t stream, const Sequences& sequences, int64_t rows,
                         int64_t sequences_of_row, int64_t tokens, int64_t halves,
                         const std::vector<TokenResult>& results) {
  if (rows == 0 || tokens == 0) return cudaSuccess;
  Results all = {};
  unsigned count = 0;
  for (const TokenResult& result : results) all.of[count++] = result;
  return Launch(ClearKernel, {rows, kBlocks, count}, kThreads, 0, stream, sequences,
                sequences_of_row, tokens, halves, all);
}

cudaError_t SumPartials(cudaStream_t stream, int64_t count, const Sequences& sequences,
                        int64_t partials, int64_t columns,
                        std::initializer_list<PartialSums> inputs, int64_t chunks) {
  if (count * columns == 0) return cudaSuccess;
  Inputs all = {};
  unsigned number = 0;
  for (const PartialSums& input : inputs) all.of[number++] = input;
  const int64_t groups = (columns + kSumColumns - 1) / kSumColumns;
  const auto launch = [&](auto warps) {
    constexpr int kSequences = kSumWarps / warps();
    const int64_t blocks = (count + kSequences - 1) / kSequences * groups;
    return Launch(SumKernel<warps()>, {blocks, number}, kSumThreads, 0, stream, sequences, count,
                  partials, chunks, columns, all);
  };
  // Many short sequences have too few partial sums each to keep a block busy.
  const bool short_ones = sequences.Given() && partials < kSumWarps * count;
  return short_ones ? launch(std::integral_constant<int, 1>())
                    : launch(std::integral_constant<int, kSumWarps>());
}

cudaError_t BeginRelays(cudaStream_t stream, const Relays& relays) {
  if (relays.batch * relays.heads == 0) return cudaSuccess;
  return Launch(BeginKernel, relays.splits.Blocks(relays.batch, relays.heads), kThreads, 0, stream,
                relays);
}

}  // namespace rwkv_jax::cuda
