// The two products of a low-rank map in one kernel on Hopper, bfloat16 with sums in float:
//
//   forward   hidden  = activation(x first)                      [M, R]
//             y       = hidden second + offset                   [M, C]
//   backward  dhidden = (dy second^T) activation'(hidden)        [M, R]
//             dx      = dhidden first^T                          [M, C]
//
// A block has 128 rows. One thread copies 64 columns of the rows and of the first matrix at a time into a
// ring of stages, then 64 columns of the second one at a time. Two warpgroups multiply 64 rows each and
// never wait for each other. The sums of the first product become an operand of the second one in
// registers. Each warp writes its results to shared memory, from where they are copied to the result.
//
// A matrix lies in shared memory as in global memory, for both passes: `first` [C, R] in tiles of 64 x R,
// `second` [R, C] in tiles of R x 64. The instruction reads it transposed forward, as it is backward.
//
// Columns of the hidden layer from R on are zero, because copies fill what is outside of a matrix with
// zeros.
#include "low_rank/kernels.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t, const LowRankForwardCall&, const Device&) {
  return cudaErrorInvalidValue;
}
cudaError_t Run(cudaStream_t, const LowRankBackwardCall&, const Device&) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "hopper.cuh"
#include "current_device.h"
#include "launch.cuh"
#include "ptx.cuh"
#include "tensor_map.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kRows = 128, kColumns = 64;  // of a block's rows, and of a stage
constexpr int kWarps = 8, kWarpRows = kRows / kWarps, kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // warpgroups 0 and 1 multiply, 2 copies
constexpr int kTileBytes = kColumns * kColumns * 2, kRowBytes = kRows * kColumns * 2;
constexpr int kResultBytes = kWarpRows * kColumns * 2;  // of a warp's results for one store
constexpr int kResults = 2;                             // stores of a warp that run
constexpr int kTileAlignment = 1024;                    // of the swizzle
constexpr int kRankStep = 32, kMinKernelRank = 64;      // a kernel for each such rank

constexpr int kRingBytes = 196608;

template <int kRank>
struct Layout {
  static constexpr int kTiles = (kRank + kColumns - 1) / kColumns;  // of 64 x 64, of `first`
  static constexpr int kFirstBytes = kTiles * kTileBytes, kSecondBytes = kRank * kColumns * 2;
  static constexpr int kStageBytes = kRowBytes + kFirstBytes;
  static constexpr int kStages = kRingBytes / kStageBytes;
  static constexpr int kResultsAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kResultsAt + kWarps * kResults * kResultBytes;
  static constexpr int kSharedBytes = kBarriersAt + 2 * 8 * kStages + kTileAlignment;
  static_assert(kFirstBytes >= kSecondBytes && kSharedBytes <= 232448);
};

struct Sizes {
  int tokens, width, rank, hidden_size;
  Activation activation;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <Activation kActivation>
__device__ float Activate(float x) {
  if constexpr (kActivation == Activation::kTanh) {
    asm("tanh.approx.f32 %0, %0;" : "+f"(x));
  } else if constexpr (kActivation == Activation::kSigmoid) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.4426950408889634f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(1.0f + e));
  }
  return x;
}

template <Activation kActivation>
struct Constant {
  static constexpr Activation kValue = kActivation;
};

// The derivative where the activation is y.
template <Activation kActivation>
__device__ float Slope(float y) {
  if constexpr (kActivation == Activation::kTanh) return 1.0f - y * y;
  if constexpr (kActivation == Activation::kSigmoid) return y - y * y;
  return 1.0f;
}

// What writes registers of products stays before this, and what reads them after it.
template <int kSize>
__device__ void Pin(float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kSize>
__device__ void Pin(uint32_t (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

__device__ uint32_t LoadPair(const __nv_bfloat16* from) {
  uint32_t pair;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(pair) : "l"(from));
  return pair;
}

// The stages of the ring in turn.
template <int kStages>
struct Stage {
  uint32_t index = 0, parity = 0;

  __device__ void Next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

// What a warp writes, 16 x 64 at a time.
struct Results {
  uint32_t memory;  // kResults boxes
  uint32_t lane, next = 0;

  // Pairs 2 i and 2 i + 1 are those of columns 8 i to 8 i + 7, of row lane / 4 and of the one eight below.
  __device__ void Store(const CUtensorMap* map, const uint32_t (&pairs)[16], int column, int row) {
    if (lane == 0) hopper::AwaitReads<kResults - 1>();
    __syncwarp();
    const uint32_t box = memory + next * kResultBytes;
    const uint32_t matrix = lane / 8, line = matrix % 2 * 8 + lane % 8;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      hopper::StoreMatrices(box + line * 128 + ((2 * i + matrix / 2) ^ (line % 8)) * 16,
                            pairs + 4 * i);
    hopper::PublishToCopies();
    __syncwarp();
    if (lane == 0) hopper::StoreBox(map, box, column, row);
    next = (next + 1) % kResults;
  }
};

#endif

template <int kRank, bool kBackward>
__global__ void __launch_bounds__(kThreads, 1)
    LowRankKernel(const __grid_constant__ CUtensorMap rows_map,
                  const __grid_constant__ CUtensorMap first_map,
                  const __grid_constant__ CUtensorMap second_map,
                  const __grid_constant__ CUtensorMap result_map,
                  // Of hidden or dhidden, which the kernel writes.
                  const __grid_constant__ CUtensorMap hidden_map,
                  // Backward hidden, forward the offset, or null.
                  const __nv_bfloat16* more, const Sizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Layout<kRank>;
  constexpr int kBlocks = kRank / 8;  // of eight columns of the hidden layer
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  const uint32_t ring = (SharedAddress(memory) + kTileAlignment - 1) & ~(kTileAlignment - 1);
  const uint32_t full = ring + L::kBarriersAt, empty = full + 8 * L::kStages;

  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      hopper::InitBarrier(full + 8 * i, 1);
      hopper::InitBarrier(empty + 8 * i, kWarps);
    }
    hopper::PublishBarriers();
  }
  __syncthreads();

  const int steps = sizes.width / kColumns;
  const int first_row = blockIdx.x * kRows, rows_at_once = gridDim.x * kRows;
  const int hidden_size = kBackward ? sizes.rank : sizes.hidden_size;  // that the kernel writes
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  Stage<L::kStages> stage;

  if (warpgroup == 2) {
    hopper::GiveRegisters<24>();
    if (threadIdx.x == 2 * kWarpgroup) {
      hopper::PrefetchMap(&second_map), hopper::PrefetchMap(&first_map);
      hopper::PrefetchMap(&hidden_map), hopper::PrefetchMap(&result_map);
      for (int row = first_row; row < sizes.tokens; row += rows_at_once) {
        for (int step = 0; step < 2 * steps; ++step) {
          const bool second_product = step >= steps;
          const int column = (second_product ? step - steps : step) * kColumns;
          const uint32_t ready = full + 8 * stage.index, to = ring + stage.index * L::kStageBytes;
          hopper::AwaitPhase(empty + 8 * stage.index, stage.parity ^ 1);
          const bool of_first = second_product == kBackward;
          hopper::ExpectBytes(ready, (second_product ? 0 : kRowBytes) +
                                         (of_first ? L::kFirstBytes : L::kSecondBytes));
          if (!second_product) hopper::CopyBox(to, &rows_map, ready, column, row);
          if (of_first) {
#pragma unroll
            for (int tile = 0; tile < L::kTiles; ++tile)
              hopper::CopyBox(to + kRowBytes + tile * kTileBytes, &first_map, ready,
                              tile * kColumns, column);
          } else {
            hopper::CopyBox(to + kRowBytes, &second_map, ready, column, 0);
          }
          stage.Next();
        }
      }
    }
  } else {
    hopper::TakeRegisters<240>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Results results{ring + L::kResultsAt + warp * kResults * kResultBytes,
                    static_cast<uint32_t>(lane)};
    const uint64_t rows_tile = hopper::Descriptor(ring + warpgroup * (kRowBytes / 2));
    const uint64_t matrix_tile = hopper::Descriptor(ring + kRowBytes, kBackward ? 16 : kTileBytes);

    const auto release = [&](uint32_t index) {
      if (lane == 0) hopper::Arrive(empty + 8 * index);
    };
    const auto before = [](uint32_t index) { return index == 0 ? L::kStages - 1 : index - 1; };

    for (int row = first_row; row < sizes.tokens; row += rows_at_once) {
      const int warp_row = row + warp * kWarpRows;
      float sums[kRank / 2] = {};
      uint32_t hidden[kRank / 4];  // of this lane, as those of Results::Store
      // The offset of two tiles of 64 columns, loaded long before the sums of a tile start as it.
      uint32_t of_even[8] = {}, of_odd[8] = {};
      const auto load = [&](uint32_t (&offset)[8], int step) {
        if constexpr (!kBackward) {
          if (more == nullptr || step >= steps) return;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            offset[i] = LoadPair(more + step * kColumns + i * 8 + lane % 4 * 2);
        }
      };
      load(of_even, 0);
      load(of_odd, 1);

      if constexpr (kBackward) {
        if (sizes.activation != Activation::kIdentity) {
#pragma unroll
          for (int i = 0; i < kRank / 4; ++i) {
            const int at = warp_row + lane / 4 + i % 2 * 8, column = i / 2 * 8;
            hidden[i] = 0;
            if (at < sizes.tokens && column < sizes.rank)
              hidden[i] = LoadPair(more + static_cast<int64_t>(at) * sizes.hidden_size + column +
                                   lane % 4 * 2);
          }
        }
      }

      Pin(sums);
      for (int step = 0; step < steps; ++step) {
        hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
        const uint64_t a = rows_tile + stage.index * (L::kStageBytes >> 4);
        const uint64_t b = matrix_tile + stage.index * (L::kStageBytes >> 4);
        constexpr int kStride = kBackward ? 32 >> 4 : 16 * 128 >> 4;  // 16 rows or columns of x
        hopper::FenceProducts();
        hopper::Multiply<kRank, !kBackward>(sums, a, b, true);
        hopper::Multiply<kRank, !kBackward>(sums, a + 2, b + kStride, true);
        hopper::Multiply<kRank, !kBackward>(sums, a + 4, b + 2 * kStride, true);
        hopper::Multiply<kRank, !kBackward>(sums, a + 6, b + 3 * kStride, true);
        hopper::CommitProducts();
        hopper::AwaitProducts<1>();
        if (step > 0) release(before(stage.index));
        stage.Next();
      }
      hopper::AwaitProducts<0>();
      Pin(sums);
      release(before(stage.index));

      const auto activate = [&](auto kind) {
        constexpr Activation kActivation = decltype(kind)::kValue;
#pragma unroll
        for (int i = 0; i < kRank / 4; ++i) {
          float low = sums[2 * i], high = sums[2 * i + 1];
          if constexpr (!kBackward)
            low = Activate<kActivation>(low), high = Activate<kActivation>(high);
          else if constexpr (kActivation != Activation::kIdentity)
            low *= Slope<kActivation>(Low(hidden[i])), high *= Slope<kActivation>(High(hidden[i]));
          hidden[i] = RoundToBf16(low, high);
        }
      };
      if (sizes.activation == Activation::kTanh)
        activate(Constant<Activation::kTanh>());
      else if (sizes.activation == Activation::kSigmoid)
        activate(Constant<Activation::kSigmoid>());
      else
        activate(Constant<Activation::kIdentity>());
      Pin(hidden);

      // Adds the products of the hidden layer with a tile of 64 columns to the offset.
      const auto multiply = [&](float (&sums)[32], uint32_t (&offset)[8], int step) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[4 * i] = sums[4 * i + 2] = Low(offset[i]);
          sums[4 * i + 1] = sums[4 * i + 3] = High(offset[i]);
        }
        Pin(sums);
        hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
        const uint64_t b = matrix_tile + stage.index * (L::kStageBytes >> 4);
        hopper::FenceProducts();
#pragma unroll
        for (int i = 0; i < kRank / 16; ++i) {
          const int at = kBackward ? i / 4 * kTileBytes + i % 4 * 32 : i * 16 * 128;
          hopper::Multiply<!kBackward>(sums, hidden + 4 * i, b + (at >> 4));
        }
        hopper::CommitProducts();
        stage.Next();
        load(offset, step + 2);
      };
      // Stores the results of a tile.
      const auto finish = [&](float (&sums)[32], int step) {
        Pin(sums);
        uint32_t pairs[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) pairs[i] = RoundToBf16(sums[2 * i], sums[2 * i + 1]);
        results.Store(&result_map, pairs, step * kColumns, warp_row);
      };

      // Columns of ones follow those of the hidden layer, if there is an offset.
      constexpr uint32_t kOnes = 0x3F803F80;
#pragma unroll
      for (int part = 0; part * kColumns <= kRank; ++part) {
        if (part * kColumns >= hidden_size) break;
        uint32_t pairs[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int block = part * 8 + i / 2;
          pairs[i] = block < kBlocks ? hidden[min(2 * block + i % 2, kRank / 4 - 1)] : 0;
          if (block * 8 == sizes.rank) pairs[i] = kOnes;
        }
        results.Store(&hidden_map, pairs, part * kColumns, warp_row);
      }

      for (int step = 0; step < steps; step += 2) {
        float even[32], odd[32];
        multiply(even, of_even, step);
        multiply(odd, of_odd, step + 1);
        hopper::AwaitProducts<1>();
        release(before(before(stage.index)));
        finish(even, step);
        hopper::AwaitProducts<0>();
        release(before(stage.index));
        finish(odd, step + 1);
      }
    }
    if (lane == 0) hopper::AwaitReads<0>();
  }
#else
  __trap();  // HasHopperCode says so before
#endif
}

template <int kRank, bool kBackward>
cudaError_t RunKernel(cudaStream_t stream, const LowRankCall& call, void* hidden, const void* more,
                      const Device& device) {
  const cuuint64_t tokens = call.tokens, width = call.width, rank = call.rank;
  const cuuint64_t hidden_size = kBackward ? call.rank : call.hidden_size;
  CUtensorMap rows_map, first_map, second_map, result_map, hidden_map;
  const bool made =
      MakeMap<2>(rows_map, call.rows, {width, tokens}, {2 * width}, {kColumns, kRows}) &&
      MakeMap<2>(first_map, call.first, {rank, width}, {2 * rank}, {kColumns, kColumns}) &&
      MakeMap<2>(second_map, call.second, {width, rank}, {2 * width}, {kColumns, kRank}) &&
      MakeMap<2>(result_map, call.result, {width, tokens}, {2 * width}, {kColumns, kWarpRows}) &&
      MakeMap<2>(hidden_map, hidden, {hidden_size, tokens}, {2 * hidden_size},
                 {kColumns, kWarpRows});
  if (!made) return cudaErrorNotSupported;
  const Sizes sizes = {static_cast<int>(call.tokens), static_cast<int>(call.width),
                       static_cast<int>(call.rank), static_cast<int>(call.hidden_size),
                       call.activation};
  const int blocks =
      std::min(static_cast<int>(device.multiprocessors), (sizes.tokens + kRows - 1) / kRows);
  return Launch(LowRankKernel<kRank, kBackward>, blocks, kThreads, Layout<kRank>::kSharedBytes,
                stream, rows_map, first_map, second_map, result_map, hidden_map,
                static_cast<const __nv_bfloat16*>(more), sizes);
}

// The kernel of the least rank that is enough.
template <bool kBackward, int kRank = kMinKernelRank>
cudaError_t RunForRank(cudaStream_t stream, const LowRankCall& call, void* hidden, const void* more,
                       const Device& device) {
  if constexpr (kRank < kMaxLowRank)
    if (call.rank > kRank)
      return RunForRank<kBackward, kRank + kRankStep>(stream, call, hidden, more, device);
  return RunKernel<kRank, kBackward>(stream, call, hidden, more, device);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const LowRankForwardCall& call, const Device& device) {
  return RunForRank<false>(stream, call, call.hidden, call.offset, device);
}

cudaError_t Run(cudaStream_t stream, const LowRankBackwardCall& call, const Device& device) {
  return RunForRank<true>(stream, call, call.dhidden, call.hidden, device);
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
