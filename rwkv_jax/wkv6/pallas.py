"""WKV6 in Pallas kernels."""

from rwkv_jax._linear_attention.pallas import gradient, prepare
from rwkv_jax._pallas.hopper import HopperKernels
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax.wkv6.operator import SIGNATURE

ENOUGH_HEADS = {"forward": 128, "backward": 128}
"""As measured on an H200."""

HOPPER = HopperKernels(SIGNATURE, "rwkv_jax.wkv6.hopper", SIGNATURE.decays, ENOUGH_HEADS)

IMPLEMENTATION = PallasKernels(SIGNATURE, prepare, gradient, HOPPER)
