"""WKV6 on the native kernels."""

from rwkv_jax._native.kernels import HEAD_SIZES, NativeKernels
from rwkv_jax.wkv6.signature import SIGNATURE

IMPLEMENTATION = NativeKernels(SIGNATURE, head_sizes=HEAD_SIZES)
