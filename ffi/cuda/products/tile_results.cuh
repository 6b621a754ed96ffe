// What becomes of the sums of a tile.
#pragma once

#include <cuda_bf16.h>

#include "fragment.cuh"
#include "products/tile.cuh"
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace rwkv_jax::cuda {

// Makes results of sums, by a function that is long: its instructions are there for a few sums, and not for each
// of them. The larger a kernel, the longer the device takes to go over to it from another one.
template <int kSums, typename Fn>
__device__ void ChangeFewAtATime(float (&sums)[kSums], const Fn& fn) {
  constexpr int kFew = kSums < 8 ? kSums : 8;
#pragma unroll 1
  for (int done = 0; done < kSums; done += kFew) {
    float changed[kFew];
#pragma unroll
    for (int i = 0; i < kFew; ++i) changed[i] = fn(sums[i]);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      sums[i] = i + kFew < kSums ? sums[i + kFew] : changed[i + kFew - kSums];
  }
}

// Makes results of sums. Most tiles have another result than this one or that one, whose instructions are not
// fetched then.
template <int kSums>
__device__ void ChangeSums(Result result, float (&sums)[kSums]) {
  if (result == Result::kTanh)
    ChangeFewAtATime(sums, [](float sum) { return ResultOf(Result::kTanh, sum, 0.0f); });
  else if (result == Result::kSigmoid)
    ChangeFewAtATime(sums, [](float sum) { return ResultOf(Result::kSigmoid, sum, 0.0f); });
  else if (result == Result::kSquaredRelu)
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = ResultOf(Result::kSquaredRelu, sums[i], 0.0f);
}

// Four lanes that have a row exchange pairs of neighbouring outputs: word k of lane l becomes word l of
// lane k. Then a lane has eight outputs in a row, or no longer has them.
__device__ void Exchange(uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & distance) continue;
      const bool upper = lane & distance;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? words[k] : words[k + distance], distance);
      (upper ? words[k] : words[k + distance]) = got;
    }
  }
}

// The sums of a thread: 8 i + 2 (lane % 4) and the output after it for each i, in a row and in the one eight
// below.
template <typename Tile>
struct ResultsOfManyRows {
  static constexpr int kSums = Tile::kSums;
  const MatrixProduct& product;
  int rows, row, output;  // the first ones
  float (&sums)[kSums];

  __device__ void PutFloats(float* y, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      const int own_row = row + i / 2 % 2 * 8, own_output = output + i / 4 * 8 + OwnPair();
      if (own_row < rows && own_output < product.outputs)
        *reinterpret_cast<float2*>(y + own_row * stride + own_output) = {sums[i], sums[i + 1]};
    }
  }

  __device__ void Put() const {
    ChangeSums(product.result, sums);
    if (product.result == Result::kAdded && product.is_offset) AddOffset();
    if (product.result == Result::kAdded && !product.is_offset) {
      ForVectors([&](int i, bool present, int own_row, int own_output) {
        uint4 x = {};
        if (present)
          x = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(product.residual) +
                                              product.Place(own_row, own_output));
        uint32_t words[4] = {x.x, x.y, x.z, x.w};
        Exchange(words);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sums[i + 4 * k] += __uint_as_float(words[k] << 16);
          sums[i + 4 * k + 1] += __uint_as_float(words[k] & 0xffff0000u);
        }
      });
    }
    ForVectors([&](int i, bool present, int own_row, int own_output) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = RoundToBf16(sums[i + 4 * k], sums[i + 4 * k + 1]);
      Exchange(words);
      if (present)
        *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(product.y) +
                                  product.Place(own_row, own_output)) = {words[0], words[1],
                                                                         words[2], words[3]};
    });
  }

 private:
  __device__ static int OwnPair() { return threadIdx.x % 4 * 2; }

  __device__ void AddOffset() const {
    const auto* offset = static_cast<const __nv_bfloat16*>(product.residual);
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      const int own_output = output + i / 4 * 8 + OwnPair();
      uint32_t pair = 0;
      if (own_output < product.outputs)
        pair = __ldg(reinterpret_cast<const uint32_t*>(offset + own_output));
      const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
      sums[i] += low, sums[i + 1] += high, sums[i + 2] += low, sums[i + 3] += high;
    }
  }

  // Calls fn(the first of the sums of four pairs, whether there is a vector of eight outputs that this lane
  // has of them once they are exchanged, its row, its first output).
  template <typename Fn>
  __device__ void ForVectors(Fn&& fn) const {
#pragma unroll
    for (int i = 0; i < kSums; i += 16) {
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        const int own_row = row + below * 8;
        const int own_output = output + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 8;
        fn(i + 2 * below, own_row < rows && own_output < product.outputs, own_row, own_output);
      }
    }
  }
};

// The sums of a thread of a tile with few rows: an output and the one eight after it, in rows 8 i and 8 i + 1
// for each i.
template <typename Tile>
struct ResultsOfFewRows {
  const MatrixProduct& product;
  int rows, row, output;  // the first ones
  float (&sums)[Tile::kSums];

  __device__ void PutFloats(float* y, int64_t stride) const {
    ForEach(
        [&](float sum, int own_row, int own_output) { y[own_row * stride + own_output] = sum; });
  }

  __device__ void Put() const {
    const auto put = [&](float result, int own_row, int own_output) {
      static_cast<__nv_bfloat16*>(product.y)[product.Place(own_row, own_output)] =
          __float2bfloat16_rn(result);
    };
    if (product.result == Result::kAdded)
      return ForEach([&](float sum, int own_row, int own_output) {
        const auto* residual = static_cast<const __nv_bfloat16*>(product.residual);
        const float x = ToFloat(residual[product.PlaceOfResidual(own_row, own_output)]);
        put(sum + x, own_row, own_output);
      });
    ChangeSums(product.result, sums);
    ForEach(put);
  }

 private:
  // Calls fn(sum, its row, its output).
  template <typename Fn>
  __device__ void ForEach(Fn&& fn) const {
#pragma unroll
    for (int i = 0; i < Tile::kSums; ++i) {
      const int own_row = row + i / 4 * 8 + i % 2, own_output = output + i / 2 % 2 * 8;
      if (own_row < rows && own_output < product.outputs) fn(sums[i], own_row, own_output);
    }
  }
};

// The results of this thread.
template <typename Tile>
__device__ auto ResultsOf(const MatrixProduct& product, int rows, const Part<Tile>& part,
                          float (&sums)[Tile::kSums]) {
  const int lane = threadIdx.x % 32, of_left = threadIdx.x / 32 * 16 + lane / 4;
  if constexpr (Tile::kFew)
    return ResultsOfFewRows<Tile>{product, rows, part.row + lane % 4 * 2, part.output + of_left,
                                  sums};
  else
    return ResultsOfManyRows<Tile>{product, rows, part.row + of_left, part.output, sums};
}

}  // namespace rwkv_jax::cuda

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
