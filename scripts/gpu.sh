# Other scripts source this file before they install the package. It sets cuda_extra to the extra that
# installs JAX for the first GPU, cuda13 or cuda12, or to nothing where there is no GPU. Unless the caller has
# chosen, CUDA kernels are compiled for the architecture of that GPU, or not at all where there is none.
cuda_extra=
cuda_arch=
gpu=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || gpu=
# JAX for CUDA 13 needs driver 580 or newer, for CUDA 12 driver 525 or newer.
if [[ $gpu =~ ^([0-9]+)[0-9.]*,\ *([0-9]+)\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= 525)); then
  if ((BASH_REMATCH[1] >= 580)); then cuda_extra=cuda13; else cuda_extra=cuda12; fi
  cuda_arch=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
fi
if [[ -z ${RWKV_JAX_CUDA-}${RWKV_JAX_CUDA_ARCHS-} ]]; then
  if [[ -n $cuda_arch ]]; then
    export RWKV_JAX_CUDA_ARCHS=${cuda_arch/#90/90a}-real
  else
    export RWKV_JAX_CUDA=OFF
  fi
fi
