// The products of several rows of bfloat16, on GPUs of compute capability 9.0.
#pragma once

#include <cuda_runtime.h>

#include "plan.h"
#include "products/kernels.h"
#include "products/matrix_products.cuh"

namespace rwkv_jax::cuda {

// Launches products, if HasTiledProducts. They use no tickets. With `products.sums`, the inputs of a product
// that is alone may be shared out. If `splits` is given as well, nothing adds up what the sums then are,
// [splits, rows, outputs], and `splits` is their number.
cudaError_t LaunchTiledProducts(cudaStream_t stream, const Device& device,
                                const MatrixProducts& products, int* splits);

}  // namespace rwkv_jax::cuda
