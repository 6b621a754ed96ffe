// The products of a channel mixing on Hopper, with the squared ReLU and its derivative as epilogues.
#include "feed_forward/kernels.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t, const SquaredReluCall&, const Device&) {
  return cudaErrorInvalidValue;
}
cudaError_t Run(cudaStream_t, const SquaredReluGradientCall&, const Device&) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include "launch.cuh"
#include "wide_product.cuh"

namespace rwkv_jax::cuda {
namespace {

using wide_product::kDepth;
using wide_product::kSums;
using wide_product::kVectors;
using wide_product::Place;
using wide_product::PlainEpilogue;
using wide_product::StoreOnce;
using wide_product::SumOf;

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

// The squared ReLU.
class SquaredRelus : public PlainEpilogue {
 public:
  struct Arguments {
    __nv_bfloat16* result;
  };

  __device__ SquaredRelus(const Arguments& arguments, const Place& place)
      : result_(arguments.result), place_(place) {}

  __device__ void Finish(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pairs[j] =
            RoundToBf16(SquaredRelu(sums[SumOf(i, 2 * j)]), SquaredRelu(sums[SumOf(i, 2 * j + 1)]));
      if (place_.Has(i)) StoreOnce(result_ + place_.Offset(i), pairs);
    }
  }

 private:
  __nv_bfloat16* const result_;
  const Place place_;
};

// The product times 2 sqrt(hidden).
class SquaredReluGradients : public PlainEpilogue {
 public:
  struct Arguments {
    const __nv_bfloat16* hidden;
    __nv_bfloat16* result;
  };

  __device__ SquaredReluGradients(const Arguments& arguments, const Place& place)
      : arguments_(arguments), place_(place) {}

  template <typename Fn>
  __device__ void Multiply(int steps, const Fn& multiply) {
    int step = 0;
    for (; step < steps - kLoadStages; ++step) multiply(step, [] {});
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      factors_[i] = uint4{0, 0, 0, 0};
      if (place_.Has(i)) factors_[i] = LoadOnce(arguments_.hidden + place_.Offset(i));
    }
    for (; step < steps - kRootStages; ++step) multiply(step, [] {});
#pragma unroll
    for (int part = 0; part < kRootStages; ++part) {
      multiply(step + part, [&] {
        constexpr int kPart = kVectors / kRootStages;
#pragma unroll
        for (int i = kPart * part; i < kPart * (part + 1); ++i)
          factors_[i] = uint4{TwiceRoot(factors_[i].x), TwiceRoot(factors_[i].y),
                              TwiceRoot(factors_[i].z), TwiceRoot(factors_[i].w)};
      });
    }
  }

  __device__ void Finish(float (&sums)[kSums]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t factors[4] = {factors_[i].x, factors_[i].y, factors_[i].z, factors_[i].w};
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        pairs[j] = RoundToBf16(sums[SumOf(i, 2 * j)] * Low(factors[j]),
                               sums[SumOf(i, 2 * j + 1)] * High(factors[j]));
      if (place_.Has(i)) StoreOnce(arguments_.result + place_.Offset(i), pairs);
    }
  }

 private:
  // The loads of `hidden` start so many stages before the last, and the last stages hide their roots.
  static constexpr int kLoadStages = 12, kRootStages = 8;
  static_assert(kMinHiddenProductWidth >= kRootStages * kDepth);

  const Arguments arguments_;
  const Place place_;
  uint4 factors_[kVectors];  // of the sums
};

// The transpose of a matrix of multiples of kSide rows and columns. Products copy rows of their weight in
// another order, which they cannot do along the columns of V. XLA would transpose the V of all layers before
// the backward pass, and keep them until then.
constexpr int kSide = 64, kTransposeThreads = 256, kVector = 8;

__global__ void TransposeKernel(const uint4* from, uint4* to, int rows, int columns) {
  // A row of the tile begins in another bank than the row before.
  __shared__ uint32_t tile[kSide][kSide / 2 + 1];
  const int row = blockIdx.y * kSide, column = blockIdx.x * kSide;
  constexpr int kVectors = kSide / kVector;
#pragma unroll
  for (int i = threadIdx.x; i < kSide * kVectors; i += kTransposeThreads) {
    const int r = i / kVectors, vector = i % kVectors;
    const uint4 x = from[(static_cast<int64_t>(row + r) * columns + column) / kVector + vector];
    uint32_t* const at = &tile[r][vector * kVector / 2];
    at[0] = x.x, at[1] = x.y, at[2] = x.z, at[3] = x.w;
  }
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < kSide * kVectors; i += kTransposeThreads) {
    const int c = i / kVectors, vector = i % kVectors;
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = vector * kVector + 2 * j;
      pairs[j] = __byte_perm(tile[r][c / 2], tile[r + 1][c / 2], c % 2 ? 0x7632 : 0x5410);
    }
    to[(static_cast<int64_t>(column + c) * rows + row) / kVector + vector] = {pairs[0], pairs[1],
                                                                              pairs[2], pairs[3]};
  }
}

cudaError_t Transpose(cudaStream_t stream, const void* from, const void* to, int64_t rows,
                      int64_t columns) {
  return Launch(TransposeKernel, {columns / kSide, rows / kSide}, kTransposeThreads, 0, stream,
                static_cast<const uint4*>(from), static_cast<uint4*>(const_cast<void*>(to)),
                static_cast<int>(rows), static_cast<int>(columns));
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const SquaredReluCall& call, const Device& device) {
  return wide_product::Run<SquaredRelus>(stream, call, device,
                                         {static_cast<__nv_bfloat16*>(call.result)});
}

cudaError_t Run(cudaStream_t stream, const SquaredReluGradientCall& call, const Device& device) {
  const cudaError_t error = Transpose(stream, call.value, call.weight, call.width, call.columns);
  if (error != cudaSuccess) return error;
  return wide_product::Run<SquaredReluGradients>(
      stream, call, device,
      {static_cast<const __nv_bfloat16*>(call.hidden), static_cast<__nv_bfloat16*>(call.result)});
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
