"""WKV4 on the native kernels."""

from rwkv_jax._native.kernels import NativeKernels
from rwkv_jax.wkv4.signature import SIGNATURE

IMPLEMENTATION = NativeKernels(SIGNATURE, has_summaries=False)
