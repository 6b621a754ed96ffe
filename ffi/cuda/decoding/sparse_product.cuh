// The product of one row, of whose inputs many are zeros, with a matrix [inputs, outputs] of which only the
// inputs that are not zero are read.
//
// A block has some columns of the matrix, and its warps share out the inputs. A warp lists those of its
// inputs that are not zero, and takes so many of the list at once that enough loads are under way: kLanes
// lanes load the columns of one input. Sums are float32, in an order that depends on nothing but the row.
#pragma once

#include "decoding/product.cuh"

namespace rwkv_jax::cuda {

constexpr int kSparseThreads = 512, kSparseWarps = kSparseThreads / 32;

// For rows of T, weights of W and kLanes lanes for an input.
template <typename T, typename W, int kLanes>
struct SparseProduct {
  static constexpr int kVector = kWeightVector<W>, kColumns = kLanes * kVector;
  // The loads that a lane has under way, and the inputs that a warp takes from its list at once.
  static constexpr int kAhead = 8, kTaken = kAhead * 32 / kLanes;
  // The inputs that a warp looks at between two times that it takes some.
  static constexpr int kSeen = 32 * kWeightVector<T>;

  // The inputs of a warp that are not zero and have not been multiplied.
  struct List {
    int inputs[kTaken + kSeen];
    float values[kTaken + kSeen];
  };
  static constexpr int64_t kBytes = kSparseWarps * sizeof(List);

  // How many blocks have the columns of a matrix.
  static int64_t Blocks(int64_t outputs) { return (outputs + kColumns - 1) / kColumns; }

  // Multiplies with the columns from `first` on. epilogue(output, sum) gets each result once, in threads
  // that call begin(output) before the products.
  template <typename Begin, typename Epilogue>
  __device__ static void Multiply(const Matrix& matrix, int outputs, int inputs, const T* row,
                                  int first, unsigned char* shared, Begin&& begin,
                                  Epilogue&& epilogue) {
    __shared__ float posted[kSparseWarps][kColumns];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    const auto look = [&](int input) {
      Packed<T, kWeightVector<T>> vector = {};
      if (input < inputs) vector = LoadPacked<kWeightVector<T>, T>(row, input);
      return vector;
    };

    if (threadIdx.x < kColumns && first + threadIdx.x < outputs) begin(first + threadIdx.x);
    int count = 0;
    int input = warp * kSeen + lane * kWeightVector<T>;
    auto next = look(input);
    for (; input - lane * kWeightVector<T> < inputs; input += kSparseWarps * kSeen) {
      const auto now = next;
      next = look(input + kSparseWarps * kSeen);
#pragma unroll
      for (int c = 0; c < kWeightVector<T>; ++c) {
        const unsigned there = __ballot_sync(~0u, now[c] != 0.0f);
        const int before = count + __popc(there & ((1u << lane) - 1));
        if (now[c] != 0.0f) list.inputs[before] = input + c, list.values[before] = now[c];
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
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (own >= 0) posted[warp][lane % kLanes * kVector + own + i] = sums[i];
    __syncthreads();
    const int output = first + threadIdx.x;
    if (threadIdx.x >= kColumns || output >= outputs) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSparseWarps; ++i) sum += posted[i][threadIdx.x];
    epilogue(output, kQuantised<W> ? sum * matrix.scale[output] : sum);
  }
};

}  // namespace rwkv_jax::cuda
