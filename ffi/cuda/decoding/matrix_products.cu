// A block of RWKV-7 for one token of each of several rows of 16-bit elements, whose products are computed
// on the matrix units (matrix_product.cuh):
//
//   the rows normalised, shifted and mixed for six products (mixed_rows.cuh has the formula)
//   r, k, v = R x_r, K x_k, V x_v;  tanh(x_w w1), x_a a1, sigmoid(x_g g1), x_v v1
//   the second products of the low-rank maps
//   what stands between them and the output product (summed_heads.cu)
//   between = x + O read
//   `between` normalised, shifted and mixed
//   hidden = max(K x_k, 0)^2
//   out = between + V hidden
#include "decoding/kernels.h"
#include "decoding/matrix_product.cuh"
#include "decoding/mixed_rows.cuh"
#include "current_device.h"
#include "products/tiled_products.h"

namespace rwkv_jax::cuda {
namespace {

struct MixArguments {
  const void *x, *before, *weight, *bias, *mix[kMixes];
  const int32_t* segment_ids;
  void *mixed, *after;  // [count, rows, width]; [rows, width], the next token shift
  uint32_t* tickets;    // to be cleared, if there are any
  int rows, width, count, ticket_count;
  // If there are `splits` of sums [rows, width], they are added to x, and the rows are that, also `total`.
  const float* sums;
  void* total;
  int splits;
};

constexpr int kMixVector = 8, kMixColumns = kProductThreads * kMixVector;

// A block has kMixColumns columns of a row, and the moments of the whole row.
template <typename T, bool kAddsUp>
__global__ __launch_bounds__(kProductThreads) void MixKernel(
    ChainPlace place, const __grid_constant__ MixArguments own) {
  using Vector = Packed<T, kMixVector>;
  __shared__ float2 sums[kProductWarps];
  const int row = blockIdx.x, column = blockIdx.y * kMixColumns + threadIdx.x * kMixVector;
  const bool active = column < own.width;
  const int64_t begin = int64_t{row} * own.width, at = begin + column;

  const EarlierKernels kernels(place);
  kernels.LetNextStart();
  Vector before, weight, bias, mix[kMixes];
  if (active) {
    before = LoadPacked<kMixVector, T>(own.before, at);
    weight = LoadPacked<kMixVector, T>(own.weight, column);
    bias = LoadPacked<kMixVector, T>(own.bias, column);
#pragma unroll
    for (int i = 0; i < kMixes; ++i)
      if (i < own.count) mix[i] = LoadPacked<kMixVector, T>(own.mix[i], column);
  }
  kernels.Await();
  const T* const x = static_cast<const T*>(own.x) + begin;
  const auto load = [&](int i) {
    Vector tokens = LoadPacked<kMixVector, T>(x, i);
    if constexpr (kAddsUp) {
      float total[kMixVector] = {};
#pragma unroll 4
      for (int split = 0; split < own.splits; ++split) {
        const float* const sums = own.sums + (int64_t{split} * own.rows + row) * own.width + i;
#pragma unroll
        for (int c = 0; c < kMixVector; c += 4) {
          const float4 four = *reinterpret_cast<const float4*>(sums + c);
          total[c] += four.x, total[c + 1] += four.y;
          total[c + 2] += four.z, total[c + 3] += four.w;
        }
      }
#pragma unroll
      for (int c = 0; c < kMixVector; ++c) total[c] += tokens[c];
      tokens.Set(total);
    }
    return tokens;
  };
  const float pivot = PivotOf(x);
  float offsets = 0.0f, squares = 0.0f;
  Vector tokens;
  for (int i = threadIdx.x * kMixVector; i < own.width; i += kMixColumns) {
    const Vector there = load(i);
    AddOffsets(there, pivot, offsets, squares);
    if (i == column) tokens = there;
  }
  const float2 of_warp{SumOverLanes<32>(offsets), SumOverLanes<32>(squares)};
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = of_warp;
  const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  for (int i = block * kProductThreads + threadIdx.x; i < own.ticket_count;
       i += blocks * kProductThreads)
    own.tickets[i] = 0;
  __syncthreads();
  if (!active) return;

  const float2 moments = MomentsOf(sums, pivot, own.width);
  if constexpr (kAddsUp) tokens.Store(static_cast<T*>(own.total) + at);
  float n[kMixVector], mixed[kMixVector];
#pragma unroll
  for (int c = 0; c < kMixVector; ++c)
    n[c] = fmaf((tokens[c] - moments.x) * moments.y, weight[c], bias[c]);
#pragma unroll
  for (int i = 0; i < kMixes; ++i) {
    if (i >= own.count) break;
#pragma unroll
    for (int c = 0; c < kMixVector; ++c) mixed[c] = fmaf(before[c] - n[c], mix[i][c], n[c]);
    StoreRounded<T>(own.mixed, int64_t{i} * own.rows * own.width + at, mixed);
  }
  // A row without a token keeps its state.
  if (own.segment_ids[row] == 0)
    before.Store(static_cast<T*>(own.after) + at);
  else
    StoreRounded<T>(own.after, at, n);
}

// Products of matrix_product.cuh; the rows are rounded up to fragments.
template <typename T, int kFragments>
struct SharedSteps {
  using Element = T;
  static int Tickets(const MatrixProducts& products) {
    int groups = 0;
    for (int i = 0; i < products.count; ++i) groups += products.of[i].Groups();
    return groups;
  }
  static cudaError_t Launch(LaunchChain& chain, const Device& device,
                            const MatrixProducts& products, int*) {
    return LaunchProducts<T, kFragments>(chain, device, products);
  }
};

// Products of tiled_products.h.
struct InTiles {
  using Element = __nv_bfloat16;
  static int Tickets(const MatrixProducts&) { return 0; }
  static cudaError_t Launch(LaunchChain& chain, const Device& device,
                            const MatrixProducts& products, int* splits) {
    return LaunchTiledProducts(chain, device, products, splits);
  }
};

// The launches of a block, whose products are those of `Products`.
template <typename Products>
class MatrixBlock {
  using T = typename Products::Element;

 public:
  MatrixBlock(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device)
      : chain_(chain),
        call_(call),
        device_(device),
        scratch_(call),
        rows_(static_cast<int>(call.rows)),
        width_(static_cast<int>(call.width)),
        hidden_(static_cast<int>(call.hidden)),
        low_rank_(static_cast<T*>(At(scratch_.low_rank))) {}

  cudaError_t Run() {
    cudaError_t error = MixTokens();
    if (error == cudaSuccess) error = ProjectTokens();
    if (error == cudaSuccess) error = FinishMaps();
    if (error == cudaSuccess) error = StepSummedHeads(chain_, call_, device_);
    if (error == cudaSuccess) error = ReadTokens();
    if (error == cudaSuccess) error = MixChannels();
    if (error == cudaSuccess) error = ProjectChannels();
    if (error == cudaSuccess) error = ReadChannels();
    return error;
  }

 private:
  cudaError_t MixTokens() {
    MixArguments own = {call_.x, call_.time_before, call_.time_norm.weight, call_.time_norm.bias};
    for (int i = 0; i < kMixes; ++i) own.mix[i] = call_.mix[i];
    own.after = call_.time_after, own.count = kMixes;
    own.tickets = reinterpret_cast<uint32_t*>(call_.scratch + scratch_.tickets);
    own.ticket_count = static_cast<int>(scratch_.ticket_count);
    return Launch(own);
  }

  cudaError_t ProjectTokens() {
    MatrixProducts own = {};
    const auto add = [&](const void* matrix, Mix mix) {
      own.of[own.count] = {matrix, Mixed(mix), Projected(own.count), nullptr, width_,
                           width_, Stride(),   Result::kRounded,     false};
      ++own.count;
    };
    add(call_.receptance.weight, kMixR), add(call_.key.weight, kMixK);
    add(call_.value.weight, kMixV);
    constexpr Mix kMixOfMap[] = {kMixW, kMixA, kMixG, kMixV};
    constexpr Result kResultOfMap[] = {Result::kTanh, Result::kRounded, Result::kSigmoid,
                                       Result::kRounded};
    ForMaps([&](int map, int rank, T* low_rank) {
      own.of[own.count++] = {call_.maps[map].first,
                             Mixed(kMixOfMap[map]),
                             low_rank,
                             nullptr,
                             rank,
                             width_,
                             rank,
                             kResultOfMap[map],
                             true};
    });
    return Launch(own);
  }

  cudaError_t FinishMaps() {
    MatrixProducts own = {};
    ForMaps([&](int map, int rank, T* low_rank) {
      own.of[own.count++] = {
          call_.maps[map].second, low_rank, Projected(3 + map), nullptr, width_, rank, Stride(),
          Result::kRounded,       true};
    });
    return Launch(own);
  }

  cudaError_t ReadTokens() {
    return Multiply({call_.output.weight, At(scratch_.read), At(scratch_.between), call_.x, width_,
                     width_, width_, Result::kAdded, false},
                    &splits_);
  }

  cudaError_t MixChannels() {
    MixArguments own = {At(scratch_.between), call_.channel_before, call_.channel_norm.weight,
                        call_.channel_norm.bias};
    own.mix[0] = call_.channel_mix, own.count = 1;
    own.after = call_.channel_after;
    if (splits_ > 1) {
      own.x = call_.x, own.total = At(scratch_.between);
      own.sums = call_.scratch + scratch_.sums, own.splits = splits_;
    }
    return Launch(own);
  }

  cudaError_t ProjectChannels() {
    return Multiply({call_.channel_key.weight, Mixed(0), At(scratch_.hidden), nullptr, hidden_,
                     width_, hidden_, Result::kSquaredRelu, false});
  }

  cudaError_t ReadChannels() {
    return Multiply({call_.channel_value.weight, At(scratch_.hidden), call_.out,
                     At(scratch_.between), width_, hidden_, width_, Result::kAdded, false});
  }

  cudaError_t Launch(MixArguments own) {
    own.mixed = At(scratch_.mixed), own.segment_ids = call_.segment_ids;
    own.rows = rows_, own.width = width_;
    const Grid blocks(rows_, (width_ + kMixColumns - 1) / kMixColumns);
    const auto kernel = own.splits > 1 ? MixKernel<T, true> : MixKernel<T, false>;
    return chain_.Launch(kernel, blocks, kProductThreads, 0, own);
  }

  cudaError_t Multiply(const MatrixProduct& product, int* splits = nullptr) {
    MatrixProducts own = {};
    own.of[own.count++] = product;
    return Launch(own, splits);
  }

  cudaError_t Launch(MatrixProducts own, int* splits = nullptr) {
    own.rows = rows_;
    own.sums = call_.scratch + scratch_.sums, own.sum_floats = scratch_.sum_floats;
    own.tickets = reinterpret_cast<uint32_t*>(call_.scratch + scratch_.tickets) + used_tickets_;
    used_tickets_ += Products::Tickets(own);
    if (used_tickets_ > scratch_.ticket_count) return cudaErrorInvalidValue;
    return Products::Launch(chain_, device_, own, splits);
  }

  // Calls fn(map, its rank, what is between its products) for the low-rank maps that there are.
  template <typename Fn>
  void ForMaps(Fn&& fn) const {
    T* low_rank = low_rank_;
    for (int map = 0; map < kLowRankMaps; ++map) {
      const int rank = static_cast<int>(call_.maps[map].rank);
      if (rank > 0) fn(map, rank, low_rank);
      low_rank += call_.rows * rank;
    }
  }

  void* At(int64_t part) const { return call_.scratch + part; }
  const T* Mixed(int which) const {
    return static_cast<const T*>(At(scratch_.mixed)) + which * call_.rows * call_.width;
  }
  T* Projected(int which) const {
    return static_cast<T*>(At(scratch_.projected)) + which * call_.width;
  }
  int Stride() const { return static_cast<int>(scratch_.projected_width); }

  LaunchChain& chain_;
  const Rwkv7BlockCall& call_;
  const Device& device_;
  const BlockScratch scratch_;
  const int rows_, width_, hidden_;
  int64_t used_tickets_ = 0;  // by the launches so far
  int splits_ = 1;  // of the inputs of the output product, if its sums are not added up yet
  T* const low_rank_;
};

}  // namespace

cudaError_t RunOnMatrixUnits(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  if (call.dtype == Dtype::kBF16 && HasHopperCode())
    return MatrixBlock<InTiles>(chain, call, device).Run();
  return ForHalfTypes<1, 2, 4>(call.dtype, FragmentsOf(call.rows), [&](auto zero, auto count) {
    return MatrixBlock<SharedSteps<decltype(zero), count()>>(chain, call, device).Run();
  });
}

}  // namespace rwkv_jax::cuda
