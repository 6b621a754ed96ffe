// The matrix products of a launch, and what becomes of their results.
#pragma once

#include <cstdint>

#include "layers/vectors.cuh"
#include "rwkv_jax/products.h"

namespace rwkv_jax::cuda {

constexpr int kStepInputs = 64;

// What becomes of a result.
enum class Result { kRounded, kTanh, kSigmoid, kSquaredRelu, kAdded };

// y [rows, stride].
struct MatrixProduct {
  const void *matrix, *x;  // [outputs, inputs], or by input [inputs, outputs]; [rows, inputs]
  void* y;
  const void* residual;  // for Result::kAdded, of y, or as an offset [outputs]
  int outputs, inputs, stride;
  Result result;
  bool by_input;
  bool is_offset;  // tiles alone take one

  __host__ __device__ int64_t Place(int row, int output) const {
    return int64_t{row} * stride + output;
  }
  __host__ __device__ int64_t PlaceOfResidual(int row, int output) const {
    return is_offset ? output : Place(row, output);
  }
  __host__ __device__ int Groups() const { return (outputs + kGroupOutputs - 1) / kGroupOutputs; }
  __host__ __device__ int StepsOfGroup() const { return (inputs + kStepInputs - 1) / kStepInputs; }
};

struct MatrixProducts {
  MatrixProduct of[kMaxProducts];
  int count, rows;
  float* sums;         // of groups that blocks share
  int64_t sum_floats;  // for which there is room
  uint32_t* tickets;   // how many blocks have written their sums, 0 before the launch
};

// What is rounded to a result; `residual` is for Result::kAdded.
__device__ inline float ResultOf(Result result, float sum, float residual) {
  switch (result) {
    case Result::kRounded: break;
    case Result::kTanh: return tanhf(sum);
    case Result::kSigmoid: return Sigmoid(sum);
    case Result::kSquaredRelu: return sum > 0.0f ? sum * sum : 0.0f;
    case Result::kAdded: return sum + residual;
  }
  return sum;
}

}  // namespace rwkv_jax::cuda
