// The products of several rows of bfloat16, on GPUs of compute capability 9.0.
#pragma once

#include <cuda_runtime.h>

#include "launch_chain.cuh"
#include "plan.h"
#include "products/matrix_products.cuh"

namespace rwkv_jax::cuda {

// Launches products, if HasHopperCode. They use no tickets. With `products.sums`, the inputs of a product
// that is alone may be shared out. If `splits` is given as well, nothing adds up what the sums then are,
// [splits, rows, outputs], and `splits` is their number.
cudaError_t LaunchTiledProducts(LaunchChain& chain, const Device& device,
                                const MatrixProducts& products, int* splits);

}  // namespace rwkv_jax::cuda
