"""WKV5 in Pallas kernels."""

from rwkv_jax._linear_attention.pallas import gradient, prepare
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax.wkv5.operator import SIGNATURE

IMPLEMENTATION = PallasKernels(SIGNATURE, prepare, gradient)
