"""WKV6 in Pallas kernels."""

from rwkv_jax._linear_attention.pallas import gradient, prepare
from rwkv_jax._pallas.hopper import HopperKernels
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax.wkv6 import reference
from rwkv_jax.wkv6.signature import SIGNATURE

IMPLEMENTATION = PallasKernels(
    SIGNATURE,
    prepare=prepare,
    gradient=gradient,
    reference=reference.IMPLEMENTATION,
    hopper=HopperKernels(SIGNATURE, "rwkv_jax.wkv6.hopper", decays=SIGNATURE.decays),
)
