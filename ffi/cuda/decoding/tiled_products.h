// The products of several rows of bfloat16, on GPUs of compute capability 9.0.
#pragma once

#include <cuda_runtime.h>

#include "decoding/matrix_products.cuh"
#include "plan.h"

namespace rwkv_jax::cuda {

// Launches products, if HasTiledProducts (kernels.h). They use no tickets. If `splits` is given
// and the inputs of the product are shared out, nothing adds up what `products.sums` then has, [splits, rows,
// outputs], and `splits` is their number.
cudaError_t LaunchTiledProducts(cudaStream_t stream, const Device& device,
                                const MatrixProducts& products, int* splits);

}  // namespace rwkv_jax::cuda
