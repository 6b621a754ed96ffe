"""RWKV time-mixing operators for JAX.

Operators: `wkv4`, `wkv5`, `wkv6` and `wkv7`, and for one token `wkv4_step` and so on.
`implementations` says which implementation of an operator can run a given call, and `build_info`
how the native kernels of this installation were built. `rwkv_jax.sharding` runs the operators on
many devices.
"""

from rwkv_jax import sharding as sharding
from rwkv_jax._info import build_info as build_info
from rwkv_jax._info import export_checks as export_checks
from rwkv_jax._info import implementations as implementations
from rwkv_jax._native import library as _library
from rwkv_jax.wkv4 import Wkv4State as Wkv4State
from rwkv_jax.wkv4 import wkv4 as wkv4
from rwkv_jax.wkv4 import wkv4_step as wkv4_step
from rwkv_jax.wkv5 import wkv5 as wkv5
from rwkv_jax.wkv5 import wkv5_step as wkv5_step
from rwkv_jax.wkv6 import wkv6 as wkv6
from rwkv_jax.wkv6 import wkv6_step as wkv6_step
from rwkv_jax.wkv7 import wkv7 as wkv7
from rwkv_jax.wkv7 import wkv7_step as wkv7_step

__version__ = _library.VERSION
