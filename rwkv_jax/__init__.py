"""RWKV time-mixing operators for JAX.

Operators: `wkv7` and `wkv7_step`. `implementations` says which implementation of an operator can
run a given call, and `build_info` how the native kernels of this installation were built.
"""

from rwkv_jax._info import build_info as build_info
from rwkv_jax._info import export_checks as export_checks
from rwkv_jax._info import implementations as implementations
from rwkv_jax.wkv7 import wkv7 as wkv7
from rwkv_jax.wkv7 import wkv7_step as wkv7_step

__version__ = "0.1.0"
