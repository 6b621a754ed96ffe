"""WKV6 in Pallas kernels."""

from rwkv_jax._linear_attention.pallas import gradient, prepare
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax.wkv6.operator import SIGNATURE

IMPLEMENTATION = PallasKernels(SIGNATURE, prepare, gradient)
