// The cross entropy of a token from its features x and the weight of the head, z = W x, with the target y
// and the first of the largest logits m:
//
//   loss = scale (log sum_v exp(z_v) - z_y)
//   dz = scale (exp(z) / sum_v exp(z_v) - onehot(y) + l2_wrap z_m onehot(m)) = factor e
//
// A product on matrix units computes the logits and leaves exp(z - base) of them, rounded, and no logits
// at all. The gradient e differs from that at y and at m alone, and has a factor for each token, which is
// known when all columns are. The exponential of y itself is left out of the sum, so that e_y, minus the
// sum of the others, is exact where the target is nearly certain.
//
// The base is z_y, which the caller computes. Then the sum is at least 1, and out of range only for a
// token with a loss of more than log(kMaxSum): rows of tiles with such a token are computed again with
// z_m as the base of the token.
#include "losses/kernels.h"

#ifdef RWKV_JAX_EMULATION

namespace rwkv_jax::cuda {

cudaError_t Run(cudaStream_t, const HeadCrossEntropyCall&, const Device&) {
  return cudaErrorInvalidValue;
}

}  // namespace rwkv_jax::cuda

#else

#include <cmath>

#include "launch.cuh"
#include "wide_product.cuh"

namespace rwkv_jax::cuda {
namespace {

using wide_product::kColumns;
using wide_product::kSums;
using wide_product::kVectors;
using wide_product::Place;
using wide_product::SumOf;

static_assert(kHeadTileTokens == wide_product::kClusterRows && kHeadTileColumns == kColumns);

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMaxSum = 0x1p60f;

// The largest of some logits of a token, the first column that has it, and the sum of their
// exponentials.
struct Statistics {
  float sum = 0.0f, largest = -INFINITY;
  int at = 0;

  __device__ void Add(const Statistics& other) {
    sum += other.sum;
    if (other.largest > largest || (other.largest == largest && other.at < at))
      largest = other.largest, at = other.at;
  }
  __device__ Statistics OfLane(int mask) const {
    return {__shfl_xor_sync(~0u, sum, mask), __shfl_xor_sync(~0u, largest, mask),
            __shfl_xor_sync(~0u, at, mask)};
  }
  __device__ void Load(const float4& x) { sum = x.x, largest = x.y, at = __float_as_int(x.z); }
  __device__ float4 Stored() const { return {sum, largest, __int_as_float(at), 0.0f}; }
};

// The exponentials of logits, and the statistics of each tile [columns / kColumns, tokens].
class Exponentials : public wide_product::PlainEpilogue {
 public:
  struct Arguments {
    const float* bases;
    const int32_t* targets;
    const int32_t* again;  // if given, tiles of rows where it is 0 are left as they are
    __nv_bfloat16* exponentials;
    float4* statistics;
  };

  static __device__ bool Skips(const Arguments& arguments, int rows) {
    return arguments.again != nullptr && arguments.again[rows] == 0;
  }

  __device__ Exponentials(const Arguments& arguments, const Place& place)
      : arguments_(arguments), place_(place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.row + 8 * half;
      const bool has = row < place.sizes.m;
      base_[half] = has ? arguments.bases[row] * kLog2E : 0.0f;
      target_[half] = has ? arguments.targets[row] - place.column : -1;
    }
  }

  // All of a logit at once: exponentials have few units, and the rest is done meanwhile.
  __device__ void Finish(float (&z)[kSums]) {
    LeaveOutTargets(z);
    Statistics found[2];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Statistics& row = found[i % 2];
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float logit = z[SumOf(i, j)];
        if (logit > row.largest) row.largest = logit, row.at = i / 2 * 32 + j;
        x[j] = Exp2(fmaf(logit, kLog2E, -base_[i % 2]));
        row.sum += x[j];
      }
      const uint32_t pairs[4] = {RoundToBf16(x[0], x[1]), RoundToBf16(x[2], x[3]),
                                 RoundToBf16(x[4], x[5]), RoundToBf16(x[6], x[7])};
      if (place_.Has(i)) wide_product::StoreOnce(arguments_.exponentials + place_.Offset(i), pairs);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Statistics& row = found[half];
      row.at += place_.column;
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) row.Add(row.OfLane(mask));
      const int64_t tile = place_.column / kColumns;
      if (threadIdx.x % 4 == 0 && place_.Has(half))
        arguments_.statistics[tile * place_.sizes.m + place_.row + 8 * half] = row.Stored();
    }
  }

 private:
  __device__ __forceinline__ void LeaveOutTargets(float (&z)[kSums]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (target_[half] < 0 || target_[half] >= kColumns || target_[half] % 32 >= 8) continue;
#pragma unroll
      for (int i = half; i < kVectors; i += 2)
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (target_[half] == i / 2 * 32 + j) z[SumOf(i, j)] = -INFINITY;
    }
  }

  const Arguments arguments_;
  const Place place_;
  float base_[2];  // times log2(e)
  int target_[2];  // counted from the column of the lane
};

// From the statistics of all tiles the loss and the factor of each token, and the exponentials at y and m.
// The first time a token whose sum is out of range gets another base; the second time tiles of rows that
// were not computed again are done. A block has kTokens tokens, of each of which its warps share the tiles.
constexpr int kTokens = 32, kParts = 8;

__global__ __launch_bounds__(kTokens* kParts) void FinishKernel(HeadCrossEntropyCall call,
                                                                bool again) {
  __shared__ Statistics parts[kParts][kTokens];
  const int64_t token = blockIdx.x * int64_t{kTokens} + threadIdx.x % kTokens;
  const int64_t rows = blockIdx.x * int64_t{kTokens} / kHeadTileTokens;
  if (again && call.again[rows] == 0) return;

  Statistics found;
  const int part = threadIdx.x / kTokens;
  if (token < call.tokens)
    for (int64_t tile = part; tile < call.columns / kColumns; tile += kParts) {
      Statistics other;
      other.Load(static_cast<const float4*>(call.statistics)[tile * call.tokens + token]);
      found.Add(other);
    }
  parts[part][threadIdx.x % kTokens] = found;
  __syncthreads();
  if (part > 0 || token >= call.tokens) return;
  for (int i = 1; i < kParts; ++i) found.Add(parts[i][threadIdx.x]);

  const int target = call.targets[token];
  const bool has_target = target >= 0 && target < call.columns;
  const float of_target = call.of_target[token], scale = call.scale[token];
  const float base = again ? call.bases[token] : of_target;
  Statistics all = found;
  if (has_target) all.Add({expf(of_target - base), of_target, target});
  if (!again) {
    const bool in_range = all.sum <= kMaxSum;
    call.bases[token] = in_range ? of_target : all.largest;
    if (!in_range) {
      call.again[rows] = 1;
      return;
    }
  }
  const float log_sum =
      base + (base == of_target && has_target ? log1pf(found.sum) : logf(all.sum));
  const float loss = has_target ? log_sum - of_target : NAN;
  call.loss[token] = scale == 0.0f ? 0.0f : scale * loss;
  call.factors[token] = scale / all.sum;

  auto* const exponentials = static_cast<__nv_bfloat16*>(call.exponentials) + token * call.columns;
  const float of_largest = *call.l2_wrap * all.largest * all.sum;
  if (has_target)
    exponentials[target] = __float2bfloat16(all.at == target ? of_largest - found.sum : -found.sum);
  if (*call.l2_wrap != 0.0f && !(has_target && all.at == target))
    exponentials[all.at] = __float2bfloat16(expf(all.largest - base) + of_largest);
}

}  // namespace

cudaError_t Run(cudaStream_t stream, const HeadCrossEntropyCall& call, const Device& device) {
  if (call.tokens == 0) return cudaSuccess;
  const int64_t rows = (call.tokens + kHeadTileTokens - 1) / kHeadTileTokens;
  cudaError_t error = cudaMemsetAsync(call.again, 0, rows * sizeof(int32_t), stream);
  for (const bool again : {false, true}) {
    const Exponentials::Arguments arguments = {
        again ? call.bases : call.of_target, call.targets, again ? call.again : nullptr,
        static_cast<__nv_bfloat16*>(call.exponentials), static_cast<float4*>(call.statistics)};
    if (error == cudaSuccess)
      error = wide_product::Run<Exponentials>(stream, call, device, arguments);
    if (error == cudaSuccess)
      error = Launch(FinishKernel, (call.tokens + kTokens - 1) / kTokens, kTokens * kParts, 0,
                     stream, call, again);
  }
  return error;
}

}  // namespace rwkv_jax::cuda

#endif  // RWKV_JAX_EMULATION
