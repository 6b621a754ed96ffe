"""WKV6 in chunks of plain jnp, for any backend, head size and decay."""

from rwkv_jax._linear_attention.xla import tile
from rwkv_jax._portable.chunked import Chunked
from rwkv_jax.wkv6 import reference
from rwkv_jax.wkv6.signature import SIGNATURE

IMPLEMENTATION = Chunked(SIGNATURE, tile, reference.IMPLEMENTATION)
