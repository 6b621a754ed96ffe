// The products of a block of RWKV-7 for one token of each row without matrix units, each with what stands
// before it and after it (product.cuh and sparse_product.cuh have how a product is computed):
//
//   ProjectTokens    r, k, v = R x_r, K x_k, V x_v;  tanh(x_w w1), x_a a1, sigmoid(x_g g1), x_v v1
//   ReadTokens       between = x + O read
//   ProjectChannels  hidden = max(K x_k, 0)^2
//   ReadChannels     out = between + V hidden
#include "decoding/kernels.h"
#include "decoding/mixed_rows.cuh"
#include "decoding/product.cuh"
#include "decoding/sparse_product.cuh"
#include "kernel_choice.cuh"
#include "launch_chain.cuh"

namespace rwkv_jax::cuda {
namespace {

// A product with rows that have a mix of their own, and where its results begin in `projected`.
struct Product {
  Matrix matrix;
  const void* mix;
  int outputs, offset;
};

constexpr int kMatrices = 3;

struct ProjectArguments {
  const void *x, *before, *weight, *bias;
  void* normalised;
  Product products[kMatrices];  // with matrices [outputs, C], all of one size
  Product maps[kLowRankMaps];   // with matrices [C, outputs]
  float* projected;             // [B, projected_width], or null, and then
  void* hidden;                 // [B, outputs] gets max(x, 0)^2
  uint32_t* tickets;            // to be cleared for the next kernel, or null
  int rows, width, projected_width, ticket_count;
  int matrices, blocks, rounds;  // blocks of each matrix
  int slice;
};

// The results of ProjectKernel.
template <typename T>
struct Projected {
  const ProjectArguments& own;
  const Product& product;

  __device__ void Begin(int) {}
  __device__ void Finish(int first, int o, int row, float sum) const {
    const int output = first + o;
    if (row >= own.rows) return;
    if (own.projected != nullptr) {
      own.projected[int64_t{row} * own.projected_width + product.offset + output] = sum;
    } else {
      const float positive = sum > 0.0f ? sum : 0.0f;
      static_cast<T*>(own.hidden)[int64_t{row} * product.outputs + output] =
          FromFloat<T>(positive * positive);
    }
  }
};

template <typename T, typename W, int kRows>
__global__ __launch_bounds__(kProductThreads, kProductBlocks) void ProjectKernel(
    ChainPlace place, const __grid_constant__ ProjectArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  __shared__ typename MixedRows<T, kRows>::Sums sums;
  const Slice<T> slice{reinterpret_cast<T*>(shared), own.slice};
  int block = blockIdx.x, which = block / own.blocks;
  const bool by_output = which < own.matrices;
  block -= (by_output ? which : own.matrices) * own.blocks;
  if (!by_output)
    for (which = 0;; ++which) {
      const int blocks = (own.maps[which].outputs + kBlockColumns<T> - 1) / kBlockColumns<T>;
      if (block < blocks) break;
      block -= blocks;
    }
  const Product& product = by_output ? own.products[which] : own.maps[which];
  MixedRows<T, kRows> source{static_cast<const T*>(own.x),
                             static_cast<const T*>(own.before),
                             static_cast<const T*>(own.weight),
                             static_cast<const T*>(own.bias),
                             static_cast<const T*>(product.mix),
                             blockIdx.x == 0 ? static_cast<T*>(own.normalised) : nullptr,
                             own.rows,
                             own.width,
                             sums};
  if (by_output) {
    Projected<T> results{own, product};
    MultiplyByOutput<W, kRows>(product.matrix, product.outputs, own.width,
                               block * own.rounds * kBlockOutputs<W, kRows>, own.rounds, slice,
                               place, source, results);
  } else {
    MultiplyByInput<T, kRows>(
        static_cast<const T*>(product.matrix.weight), product.outputs, own.width,
        block * kBlockColumns<T>, slice, place, source, [&](int output, int row, float sum) {
          if (row >= own.rows) return;
          if (which == kDecayMap) sum = tanhf(sum);
          if (which == kGateMap) sum = Sigmoid(sum);
          own.projected[int64_t{row} * own.projected_width + product.offset + output] = sum;
        });
  }
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < own.ticket_count; i += kProductThreads) own.tickets[i] = 0;
}

struct ReadArguments {
  const void *inputs, *residual;
  Matrix matrix;
  void* out;
  const void *normalised, *before;  // one of them goes to `after`, unless that is null
  void* after;
  const int32_t* segment_ids;
  float* shares;      // of a matrix by input: room for the sums of the shares of its inputs,
  uint32_t* tickets;  // and a ticket for each group of outputs
  int rows, inputs_width, width, slice, rounds;
};

// The results of ReadKernel. Those of the first row are with the first lane of a warp, which fetches what
// they are added to while the others are still multiplied.
template <typename T, int kOutputs>
struct Residual {
  const ReadArguments& own;
  T first_row[kOutputs];

  __device__ void Begin(int output) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (lane == 0) first_row[o] = static_cast<const T*>(own.residual)[output + o];
      const int64_t at = int64_t{lane} * own.width + output + o;
      if (own.after != nullptr && lane < own.rows)
        static_cast<T*>(own.after)[at] =
            static_cast<const T*>(own.segment_ids[lane] == 0 ? own.before : own.normalised)[at];
    }
  }
  __device__ void Finish(int first, int o, int row, float sum) const {
    if (row >= own.rows) return;
    const int64_t at = int64_t{row} * own.width + first + o;
    const T residual = row > 0 ? static_cast<const T*>(own.residual)[at] : first_row[o];
    static_cast<T*>(own.out)[at] = FromFloat<T>(ToFloat(residual) + sum);
  }
};

template <typename T, typename W, int kRows>
__global__ __launch_bounds__(kProductThreads, kProductBlocks) void ReadKernel(
    ChainPlace place, const __grid_constant__ ReadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  const Slice<T> slice{reinterpret_cast<T*>(shared), own.slice};
  PlainRows<T, kRows> source{static_cast<const T*>(own.inputs), own.rows, own.inputs_width};
  Residual<T, kOutputs<W, kRows>> results{own};
  MultiplyByOutput<W, kRows>(own.matrix, own.width, own.inputs_width,
                             blockIdx.x * own.rounds * kBlockOutputs<W, kRows>, own.rounds, slice,
                             place, source, results);
}

// The same for one row and a matrix [inputs, outputs].
template <typename T, typename W, int kLanes>
__global__ __launch_bounds__(kSparseThreads,
                             2) void ReadByInputKernel(ChainPlace place,
                                                       const __grid_constant__ ReadArguments own) {
  RWKV_JAX_DYNAMIC_SHARED(16, shared);
  const EarlierKernels kernels(place);
  kernels.LetNextStart();
  kernels.Await();
  SparseProduct<T, W, kLanes>::Multiply(
      own.matrix, own.width, own.inputs_width, static_cast<const T*>(own.inputs), shared,
      own.shares, own.tickets, [&](int output, float sum) {
        const float residual = ToFloat(static_cast<const T*>(own.residual)[output]);
        static_cast<T*>(own.out)[output] = FromFloat<T>(residual + sum);
        static_cast<T*>(own.after)[output] =
            static_cast<const T*>(own.segment_ids[0] == 0 ? own.before : own.normalised)[output];
      });
}

// Calls fn(T(), W(), integral_constant<the rows of a kernel>()) with the types of the activations and of the
// weights. Only weights of float32 have several rows.
template <typename Fn>
cudaError_t ForTypesAndRows(const Rwkv7BlockCall& call, Fn&& fn) {
  if (call.Quantised())
    return ForAllTypes<1>(call.dtype, call.rows,
                          [&](auto zero, auto rows) { return fn(zero, int8_t(), rows); });
  const auto alike = [&](auto zero, auto rows) { return fn(zero, zero, rows); };
  if (call.dtype != Dtype::kF32) return ForHalfTypes<1>(call.dtype, call.rows, alike);
  const int64_t rows = call.rows == 1 ? 1 : call.rows <= 4 ? 4 : kRowsAtOnce;
  return ForHeadSize<1, 4, kRowsAtOnce>(rows, 0.0f, alike);
}

cudaError_t Project(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device,
                    ProjectArguments own) {
  own.normalised = call.scratch + BlockScratch(call).normalised;
  own.rows = static_cast<int>(call.rows), own.width = static_cast<int>(call.width);
  return ForTypesAndRows(call, [&](auto zero, auto weight, auto rows) {
    using T = decltype(zero);
    using W = decltype(weight);
    constexpr int kRows = rows();
    int64_t others = 0;
    for (const Product& map : own.maps)
      others += (map.outputs + kBlockColumns<T> - 1) / kBlockColumns<T>;
    const ProductPlan plan =
        PlanProduct<T, W, kRows>(device, own.matrices, own.products[0].outputs, own.width, others);
    own.slice = static_cast<int>(plan.slice), own.rounds = static_cast<int>(plan.rounds);
    own.blocks = static_cast<int>(plan.blocks);
    const int64_t blocks = own.matrices * plan.blocks + others;
    return chain.Launch(ProjectKernel<T, W, kRows>, blocks, kProductThreads, plan.bytes, own);
  });
}

cudaError_t Read(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device,
                 ReadArguments own) {
  own.rows = static_cast<int>(call.rows), own.width = static_cast<int>(call.width);
  return ForTypesAndRows(call, [&](auto zero, auto weight, auto rows) {
    using T = decltype(zero);
    using W = decltype(weight);
    constexpr int kRows = rows();
    const ProductPlan plan = PlanProduct<T, W, kRows>(device, 1, own.width, own.inputs_width, 0);
    own.slice = static_cast<int>(plan.slice), own.rounds = static_cast<int>(plan.rounds);
    return chain.Launch(ReadKernel<T, W, kRows>, plan.blocks, kProductThreads, plan.bytes, own);
  });
}

// With half as many lanes an input has twice as many groups of columns.
cudaError_t ReadByInput(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device,
                        ReadArguments own) {
  own.width = static_cast<int>(call.width);
  return ForTypesAndRows(call, [&](auto zero, auto weight, auto) {
    using T = decltype(zero);
    using W = decltype(weight);
    const auto blocks = [&](auto lanes) {
      return Grid(SparseProduct<T, W, lanes()>::Groups(own.width), kSharesOfInputs);
    };
    const auto launch = [&](auto lanes) {
      return chain.Launch(ReadByInputKernel<T, W, lanes()>, blocks(lanes), kSparseThreads,
                          SparseProduct<T, W, lanes()>::kBytes, own);
    };
    constexpr std::integral_constant<int, 32> whole;
    constexpr std::integral_constant<int, 16> half;
    const bool fills = 4 * blocks(whole).x * kSharesOfInputs >= 3 * device.multiprocessors;
    return fills ? launch(whole) : launch(half);
  });
}

}  // namespace

cudaError_t ProjectTokens(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  ProjectArguments own = {};
  own.x = call.x, own.before = call.time_before;
  own.weight = call.time_norm.weight, own.bias = call.time_norm.bias;
  own.projected = call.scratch + BlockScratch(call).projected;
  const int width = static_cast<int>(call.width);
  own.products[0] = {call.receptance, call.mix[kMixR], width, 0};
  own.products[1] = {call.key, call.mix[kMixK], width, width};
  own.products[2] = {call.value, call.mix[kMixV], width, 2 * width};
  own.matrices = kMatrices, own.projected_width = kMatrices * width;
  constexpr Mix kMixOf[] = {kMixW, kMixA, kMixG, kMixV};
  for (int i = 0; i < kLowRankMaps; ++i) {
    const int rank = static_cast<int>(call.maps[i].rank);
    own.maps[i] = {{call.maps[i].first, nullptr}, call.mix[kMixOf[i]], rank, own.projected_width};
    own.projected_width += rank;
  }
  return Project(chain, call, device, own);
}

cudaError_t ReadTokens(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  ReadArguments own = {};
  own.inputs = call.scratch + scratch.read, own.residual = call.x, own.matrix = call.output;
  own.out = call.scratch + scratch.between;
  own.inputs_width = static_cast<int>(call.width);
  return Read(chain, call, device, own);
}

cudaError_t ProjectChannels(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  ProjectArguments own = {};
  own.x = call.scratch + BlockScratch(call).between, own.before = call.channel_before;
  own.weight = call.channel_norm.weight, own.bias = call.channel_norm.bias;
  own.products[0] = {call.channel_key, call.channel_mix, static_cast<int>(call.hidden), 0};
  own.matrices = 1;
  const BlockScratch scratch(call);
  own.hidden = call.scratch + scratch.hidden;
  own.tickets = reinterpret_cast<uint32_t*>(call.scratch + scratch.tickets);
  own.ticket_count = static_cast<int>(scratch.ticket_count);
  return Project(chain, call, device, own);
}

cudaError_t ReadChannels(LaunchChain& chain, const Rwkv7BlockCall& call, const Device& device) {
  const BlockScratch scratch(call);
  ReadArguments own = {};
  own.inputs = call.scratch + scratch.hidden, own.residual = call.scratch + scratch.between;
  own.matrix = call.channel_value, own.out = call.out;
  own.normalised = call.scratch + scratch.normalised, own.before = call.channel_before;
  own.after = call.channel_after, own.segment_ids = call.segment_ids;
  own.inputs_width = static_cast<int>(call.hidden);
  own.shares = call.scratch + scratch.sums;
  own.tickets = reinterpret_cast<uint32_t*>(call.scratch + scratch.tickets);
  return call.value_by_input ? ReadByInput(chain, call, device, own)
                             : Read(chain, call, device, own);
}

}  // namespace rwkv_jax::cuda
