// Whether the kernels that only GPUs of compute capability 9.0 have can run.
#pragma once

namespace rwkv_jax::cuda {

// Whether the current device is such a GPU and this build has code for it.
bool HasHopperCode();

}  // namespace rwkv_jax::cuda
