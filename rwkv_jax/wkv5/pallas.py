"""WKV5 in Pallas kernels."""

from rwkv_jax._linear_attention.pallas import gradient, prepare
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax.wkv5.operator import REFERENCE, SIGNATURE

IMPLEMENTATION = PallasKernels(SIGNATURE, prepare=prepare, gradient=gradient, reference=REFERENCE)
