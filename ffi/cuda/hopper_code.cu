#include "hopper_code.h"

#include <cuda_runtime.h>

#include "asked_once.h"

namespace rwkv_jax::cuda {
namespace {

// Has shared memory in the code for sm_90a alone, by which the host knows which code a device runs.
__global__ void ProbeKernel(int* to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ int sign[1];
  atomicExch(sign, 1);
  *to = sign[0];
#endif
}

}  // namespace

bool HasHopperCode() {
  static AskedOnce<int, bool> known;
  int device = 0;
  bool has_code = false;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = known.Get(device, has_code, [](bool& answer) {
      cudaFuncAttributes code = {};
      const cudaError_t error =
          cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(ProbeKernel));
      answer = error == cudaSuccess && code.sharedSizeBytes > 0;
      return error;
    });
  if (error != cudaSuccess) cudaGetLastError();  // there is no code at all for this device
  return has_code;
}

}  // namespace rwkv_jax::cuda
