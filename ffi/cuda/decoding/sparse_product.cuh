// The product of one row, of whose inputs many are zeros, with a matrix [inputs, outputs] of which only the
// inputs that are not zero are read.
//
// Blocks have some columns of the matrix and a share of the inputs, which their warps share out again. A
// warp lists those of its inputs that are not zero, and takes so many of the list at once that enough loads
// are under way: kLanes lanes load the columns of one input, and the more bytes they load together, the
// less often memory opens a page. The block of a group of columns that is done last adds up their sums.
// Sums are float32, in an order that depends on nothing but the row.
#pragma once

#include "decoding/last_block.cuh"
#include "decoding/product.cuh"

namespace rwkv_jax::cuda {

constexpr int kSparseThreads = 512, kSparseWarps = kSparseThreads / 32;

// For rows of T, weights of W and kLanes lanes for an input.
template <typename T, typename W, int kLanes>
struct SparseProduct {
  static constexpr int kVector = kWeightVector<W>, kColumns = kLanes * kVector;
  // The loads that a lane has under way, and the inputs that a warp takes from its list at once.
  static constexpr int kAhead = 8, kTaken = kAhead * 32 / kLanes;
  // The inputs that a lane and a warp look at between two times that the warp takes some. They are few, so
  // that all warps of all shares have some.
  static constexpr int kLooks = 2, kSeen = 32 * kLooks;

  // The inputs of a warp that are not zero and have not been multiplied.
  struct List {
    int inputs[kTaken + kSeen];
    float values[kTaken + kSeen];
  };
  // Lists, and then sums, are in shared memory.
  using Posted = float[kSparseWarps][kColumns];
  static constexpr int64_t kBytes = sizeof(Posted) > kSparseWarps * sizeof(List)
                                        ? sizeof(Posted)
                                        : kSparseWarps * sizeof(List);

  // How many groups the columns of a matrix make.
  static int64_t Groups(int64_t outputs) { return (outputs + kColumns - 1) / kColumns; }

  // Multiplies with the columns of group blockIdx.x and the inputs of share blockIdx.y. epilogue(output,
  // sum) gets each result once. `shares` has room for the sums of all shares, and `tickets` a zero for
  // each group.
  template <typename Epilogue>
  __device__ static void Multiply(const Matrix& matrix, int outputs, int inputs, const T* row,
                                  unsigned char* shared, float* shares, uint32_t* tickets,
                                  Epilogue&& epilogue) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * kColumns;
    const int column = first + lane % kLanes * kVector;
    List& list = reinterpret_cast<List*>(shared)[warp];
    float sums[kVector] = {};
    // Adds the products with `count` inputs of the list from `from` on, up to kTaken of them.
    const auto take = [&](int from, int count) {
      Packed<W, kVector> weights[kAhead] = {};
      float values[kAhead] = {};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = i * (32 / kLanes) + lane / kLanes;
        if (at >= count || column >= outputs) continue;
        values[i] = list.values[from + at];
        weights[i] = LoadPacked<kVector, W>(
            matrix.weight, static_cast<int64_t>(list.inputs[from + at]) * outputs + column);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int c = 0; c < kVector; ++c) sums[c] = fmaf(weights[i][c], values[i], sums[c]);
    };
    struct Seen {
      float of[kLooks];
    };
    const auto look = [&](int begin) {
      Seen seen = {};
#pragma unroll
      for (int c = 0; c < kLooks; ++c)
        if (const int input = begin + c * 32 + lane; input < inputs)
          seen.of[c] = ToFloat(row[input]);
      return seen;
    };

    int count = 0;
    const int step = gridDim.y * kSparseWarps * kSeen;
    int begin = (blockIdx.y * kSparseWarps + warp) * kSeen;
    Seen next = look(begin);
    for (; begin < inputs; begin += step) {
      const Seen now = next;
      next = look(begin + step);
#pragma unroll
      for (int c = 0; c < kLooks; ++c) {
        const float value = now.of[c];
        const unsigned there = __ballot_sync(~0u, value != 0.0f);
        const int before = count + __popc(there & ((1u << lane) - 1));
        if (value != 0.0f) list.inputs[before] = begin + c * 32 + lane, list.values[before] = value;
        count += __popc(there);
      }
      __syncwarp();
      int taken = 0;
      for (; count - taken >= kTaken; taken += kTaken) take(taken, kTaken);
      count -= taken;
      __syncwarp();
      // What is left is shorter than what was taken, so that the two do not overlap.
      for (int i = lane; taken > 0 && i < count; i += 32)
        list.inputs[i] = list.inputs[taken + i], list.values[i] = list.values[taken + i];
      __syncwarp();
    }
    take(0, count);

    constexpr int kOwn = kVector * kLanes > 32 ? kVector * kLanes / 32 : 1;
    const int own = ReduceScatter<kLanes, 32>(sums, lane);
    Posted& posted = *reinterpret_cast<Posted*>(shared);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (own >= 0) posted[warp][lane % kLanes * kVector + own + i] = sums[i];
    __syncthreads();
    const int output = first + threadIdx.x;
    const bool active = threadIdx.x < kColumns && output < outputs;
    float sum = 0.0f;
    if (active) {
#pragma unroll
      for (int i = 0; i < kSparseWarps; ++i) sum += posted[i][threadIdx.x];
      shares[int64_t{blockIdx.y} * outputs + output] = sum;
    }
    if (!ArrivesLast(tickets + blockIdx.x, gridDim.y) || !active) return;
    sum = 0.0f;
    for (int share = 0; share < static_cast<int>(gridDim.y); ++share)
      sum += __ldcg(shares + int64_t{share} * outputs + output);
    epilogue(output, kQuantised<W> ? sum * matrix.scale[output] : sum);
  }
};

}  // namespace rwkv_jax::cuda
