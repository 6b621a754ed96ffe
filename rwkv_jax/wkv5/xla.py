"""WKV5 in links of plain jnp, for any backend, head size and decay."""

from rwkv_jax._linear_attention.xla import terms
from rwkv_jax._portable.chain import Chain
from rwkv_jax.wkv5 import reference
from rwkv_jax.wkv5.signature import SIGNATURE

IMPLEMENTATION = Chain(SIGNATURE, terms, reference.IMPLEMENTATION)
