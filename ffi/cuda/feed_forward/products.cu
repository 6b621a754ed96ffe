// result[M, N] = epilogue(rows[M, K] weight[N, K]^T) on Hopper: bfloat16 with sums in float.
//
// Two blocks of a cluster have 128 rows each of the same 256 columns. One thread of a block copies 64
// columns of both operands at a time into a ring of stages; of the weight's tile, which both blocks need,
// each block copies one half for both. Two warpgroups multiply 64 rows each. They never wait for each
// other, and the copies of the next tile go on during the epilogue.
//
// The rows of the weight lie in shared memory in such an order that the sums of a lane are eight
// neighbouring columns of the result, so that the epilogue reads and writes 16 bytes of a lane without an
// exchange between lanes.
#include "feed_forward/kernels.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

bool HasProducts() { return false; }
cudaError_t Run(cudaStream_t, const SquaredReluCall&, const Device&) {
  return cudaErrorInvalidValue;
}
cudaError_t Run(cudaStream_t, const SquaredReluGradientCall&, const Device&) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "hopper.cuh"
#include "ptx.cuh"
#include "tensor_map.h"

namespace rwkv_jax::cuda {
namespace {

constexpr int kRows = 128, kColumns = 256, kDepth = 64;  // of a block's tile, and of a stage
constexpr int kCluster = 2, kStages = 4, kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // warpgroups 0 and 1 multiply, 2 copies
constexpr int kRowBytes = kRows * kDepth * 2, kWeightBytes = kColumns * kDepth * 2;
constexpr int kTileAlignment = 1024;  // of the swizzle
constexpr int kSharedBytes =
    kStages * (kRowBytes + kWeightBytes) + 2 * 8 * kStages + kTileAlignment;

static_assert(kProductWidthMultiple == kDepth && kHiddenMultiple == kColumns);

struct Sizes {
  int m, n, k;
};

struct Tiles {
  int rows, columns;

  __host__ __device__ explicit Tiles(const Sizes& sizes)
      : rows((sizes.m + kCluster * kRows - 1) / (kCluster * kRows)), columns(sizes.n / kColumns) {}
  __host__ __device__ int Count() const { return rows * columns; }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int kGroup = 8;         // row tiles of a cluster that are walked for each column tile
constexpr int kLaneVectors = 16;  // of eight columns: the sums of a lane
// The loads of `hidden` start so many stages before the last, and the last stages hide their roots.
constexpr int kLoadStages = 12, kRootStages = 8;
static_assert(kMinProductWidth >= kRootStages * kDepth);

struct Tile {
  int row, column;  // in units of a cluster's tiles
};

// Groups of row tiles, column by column, so that the operands stay in L2.
__device__ Tile TileOf(int number, const Tiles& tiles) {
  const int first = number / (kGroup * tiles.columns) * kGroup;
  const int size = min(kGroup, tiles.rows - first);
  const int within = number - first * tiles.columns, column = within / size;
  return {first + within - column * size, column};
}

__device__ float Low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float High(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ float SquaredRelu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y * y;
}

// 2 sqrt(x) of a pair. Volatile, so that it stays where products hide it.
__device__ uint32_t TwiceRoot(uint32_t pair) {
  uint32_t roots;
  asm volatile(
      "{.reg .f32 low, high; sqrt.approx.ftz.f32 low, %1; sqrt.approx.ftz.f32 high, %2; "
      "add.f32 low, low, low; add.f32 high, high, high; cvt.rn.bf16x2.f32 %0, high, low;}"
      : "=r"(roots)
      : "f"(Low(pair)), "f"(High(pair)));
  return roots;
}

__device__ uint4 LoadOnce(const __nv_bfloat16* from) {
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from));
  return x;
}

__device__ void StoreOnce(__nv_bfloat16* to, const uint32_t (&x)[4]) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// The stages of the ring in turn.
struct Stage {
  uint32_t index = 0, parity = 0;

  __device__ void Next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
  __device__ uint32_t Before() const { return index == 0 ? kStages - 1 : index - 1; }
};

#endif

// kGradient: the product times 2 sqrt(hidden); else its squared ReLU.
template <bool kGradient>
__global__ void __launch_bounds__(kThreads, 1)
    ProductKernel(const __grid_constant__ CUtensorMap rows_map,
                  const __grid_constant__ CUtensorMap weight_map, const __nv_bfloat16* hidden,
                  __nv_bfloat16* result, const Sizes sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  RWKV_JAX_DYNAMIC_SHARED(16, memory);
  const uint32_t row_tiles = (SharedAddress(memory) + kTileAlignment - 1) & ~(kTileAlignment - 1);
  const uint32_t weight_tiles = row_tiles + kStages * kRowBytes;
  const uint32_t full = weight_tiles + kStages * kWeightBytes, empty = full + 8 * kStages;
  const uint32_t rank = hopper::RankInCluster();

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::InitBarrier(full + 8 * i, 1);
      hopper::InitBarrier(empty + 8 * i, 8 * kCluster);  // the warps that multiply
    }
    hopper::PublishBarriers();
  }
  hopper::SynchronizeCluster();

  const Tiles tiles(sizes);
  const int count = tiles.Count(), steps = sizes.k / kDepth;
  const int clusters = gridDim.x / kCluster, cluster = blockIdx.x / kCluster;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  Stage stage;

  if (warpgroup == 2) {
    hopper::GiveRegisters<24>();
    if (threadIdx.x == 2 * kWarpgroup) {
      hopper::PrefetchMap(&rows_map), hopper::PrefetchMap(&weight_map);
      for (int number = cluster; number < count; number += clusters) {
        const Tile tile = TileOf(number, tiles);
        const int row = (tile.row * kCluster + rank) * kRows;
        const int weight_row = tile.column * kColumns + rank * (kColumns / kCluster);
        const uint32_t half = weight_tiles + rank * (kWeightBytes / kCluster);
        for (int step = 0; step < steps; ++step) {
          const uint32_t ready = full + 8 * stage.index;
          hopper::AwaitPhase(empty + 8 * stage.index, stage.parity ^ 1);
          hopper::ExpectBytes(ready, kRowBytes + kWeightBytes);
          hopper::CopyBox(row_tiles + stage.index * kRowBytes, &rows_map, ready, step * kDepth,
                          row);
          hopper::CopyGroupsToBoth(half + stage.index * kWeightBytes, &weight_map, ready,
                                   step * kDepth, weight_row / 32);
          stage.Next();
        }
      }
    }
  } else {
    hopper::TakeRegisters<240>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint64_t first_rows = hopper::Descriptor(row_tiles + warpgroup * (kRowBytes / 2));
    const uint64_t first_weight = hopper::Descriptor(weight_tiles);
    float sums[128];
    uint4 factors[kLaneVectors];  // kGradient: of this lane's sums

    const auto release = [&](uint32_t index) {
      if (lane < kCluster) hopper::ArriveAt(empty + 8 * index, lane);
    };

    for (int number = cluster; number < count; number += clusters) {
      const Tile tile = TileOf(number, tiles);
      const int row = (tile.row * kCluster + rank) * kRows + warpgroup * 64 + warp * 16 + lane / 4;
      // Vector i of this lane is in row `row` or, if i is odd, eight below, 32 columns after the last.
      const int64_t offset =
          static_cast<int64_t>(row) * sizes.n + tile.column * kColumns + lane % 4 * 8;
      const int64_t below = 8 * static_cast<int64_t>(sizes.n);
      const auto place = [&](int i) { return offset + (i % 2 ? below : 0) + i / 2 * 32; };
      const bool in = row < sizes.m, in_below = row + 8 < sizes.m;

      // Multiplies a stage. `meanwhile` runs at the same time.
      const auto multiply = [&](int step, auto meanwhile) {
        hopper::AwaitPhase(full + 8 * stage.index, stage.parity);
        const uint64_t a = first_rows + stage.index * (kRowBytes >> 4);
        const uint64_t b = first_weight + stage.index * (kWeightBytes >> 4);
        hopper::FenceProducts();
        hopper::Multiply<256>(sums, a, b, step > 0);
        hopper::Multiply<256>(sums, a + 2, b + 2, true);
        hopper::Multiply<256>(sums, a + 4, b + 4, true);
        hopper::Multiply<256>(sums, a + 6, b + 6, true);
        hopper::CommitProducts();
        meanwhile();
        hopper::AwaitProducts<1>();
        if (step > 0) release(stage.Before());
        stage.Next();
      };
      const auto nothing = [] {};

      if constexpr (kGradient) {
        int step = 0;
        for (; step < steps - kLoadStages; ++step) multiply(step, nothing);
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
          factors[i] = uint4{0, 0, 0, 0};
          if (i % 2 ? in_below : in) factors[i] = LoadOnce(hidden + place(i));
        }
        for (; step < steps - kRootStages; ++step) multiply(step, nothing);
#pragma unroll
        for (int part = 0; part < kRootStages; ++part) {
          multiply(step + part, [&] {
            constexpr int kPart = kLaneVectors / kRootStages;
#pragma unroll
            for (int i = kPart * part; i < kPart * (part + 1); ++i)
              factors[i] = uint4{TwiceRoot(factors[i].x), TwiceRoot(factors[i].y),
                                 TwiceRoot(factors[i].z), TwiceRoot(factors[i].w)};
          });
        }
      } else {
        for (int step = 0; step < steps; ++step) multiply(step, nothing);
      }
      hopper::AwaitProducts<0>();
#pragma unroll
      for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(sums[i])::"memory");
      release(stage.Before());

#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = i / 2 * 16 + j * 4 + i % 2 * 2;
          float low = sums[at], high = sums[at + 1];
          if constexpr (kGradient) {
            const uint4 factor = factors[i];
            const uint32_t pair = j == 0   ? factor.x
                                  : j == 1 ? factor.y
                                  : j == 2 ? factor.z
                                           : factor.w;
            low *= Low(pair), high *= High(pair);
          } else {
            low = SquaredRelu(low), high = SquaredRelu(high);
          }
          pairs[j] = RoundToBf16(low, high);
        }
        if (i % 2 ? in_below : in) StoreOnce(result + place(i), pairs);
      }
    }
  }
  hopper::SynchronizeCluster();  // the other block may still arrive at a barrier of this one
#else
  __trap();  // HasProducts says so before
#endif
}

template <bool kGradient>
cudaError_t RunProduct(cudaStream_t stream, const ProductCall& call, const void* hidden,
                       const Device& device) {
  if (TensorMapEncoder() == nullptr) return cudaErrorNotSupported;
  const cuuint64_t k = call.width, row = 2 * k;
  CUtensorMap rows_map, weight_map;
  const bool made =
      MakeMap<2>(rows_map, call.rows, {k, cuuint64_t(call.tokens)}, {row}, {kDepth, kRows}) &&
      // Row 32 g + 8 c + 2 j + e of the weight becomes row 32 g + 8 j + 2 c + e.
      MakeMap<5>(weight_map, call.weight, {k, 2, 4, 4, cuuint64_t(call.hidden_size / 32)},
                 {row, 8 * row, 2 * row, 32 * row}, {kDepth, 2, 4, 4, kColumns / kCluster / 32});
  if (!made) return cudaErrorInvalidValue;

  const auto kernel = ProductKernel<kGradient>;
  // Set at every launch: the attribute belongs to the current device.
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const Sizes sizes = {static_cast<int>(call.tokens), static_cast<int>(call.hidden_size),
                       static_cast<int>(call.width)};
  const int clusters =
      std::min(static_cast<int>(device.multiprocessors) / kCluster, Tiles(sizes).Count());
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = kCluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = clusters * kCluster, config.blockDim = kThreads;
  config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, rows_map, weight_map,
                            static_cast<const __nv_bfloat16*>(hidden),
                            static_cast<__nv_bfloat16*>(call.result), sizes);
}

}  // namespace

bool HasProducts() {
  int ordinal = 0, major = 0;
  cudaFuncAttributes code = {};
  return cudaGetDevice(&ordinal) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) ==
             cudaSuccess &&
         major == 9 && cudaFuncGetAttributes(&code, ProductKernel<false>) == cudaSuccess &&
         code.numRegs > 64;  // a kernel that only traps has few
}

cudaError_t Run(cudaStream_t stream, const SquaredReluCall& call, const Device& device) {
  return RunProduct<false>(stream, call, nullptr, device);
}

cudaError_t Run(cudaStream_t stream, const SquaredReluGradientCall& call, const Device& device) {
  return RunProduct<true>(stream, call, call.hidden, device);
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
