// The products of a channel mixing on Hopper, with the squared ReLU and its derivative as epilogues.
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

}  // namespace

bool HasProducts() { return wide_product::IsCompiled<SquaredRelus>(); }

cudaError_t Run(cudaStream_t stream, const SquaredReluCall& call, const Device& device) {
  return wide_product::Run<SquaredRelus>(stream, call, device,
                                         {static_cast<__nv_bfloat16*>(call.result)});
}

cudaError_t Run(cudaStream_t stream, const SquaredReluGradientCall& call, const Device& device) {
  return wide_product::Run<SquaredReluGradients>(
      stream, call, device,
      {static_cast<const __nv_bfloat16*>(call.hidden), static_cast<__nv_bfloat16*>(call.result)});
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
