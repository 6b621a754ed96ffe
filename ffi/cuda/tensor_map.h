// Descriptions of arrays of bfloat16 in global memory, from which boxes are copied to shared memory, with
// rows of 128 bytes that are swizzled over eight rows.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace rwkv_jax::cuda {

// Sizes are those of the axes from the last one on, strides are bytes. False if the driver makes no map.
template <int kRank>
bool MakeMap(CUtensorMap& map, const void* x, const cuuint64_t (&sizes)[kRank],
             const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  // The driver's function, which is asked for so that nothing links with the driver.
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return reinterpret_cast<Encode>(found);
  }();
  const cuuint32_t ones[] = {1, 1, 1, 1, 1};
  return encode != nullptr &&
         encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(x), sizes, strides,
                box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace rwkv_jax::cuda
