"""WKV6, one token at a time: the specification that every other implementation agrees with."""

from rwkv_jax._linear_attention.reference import step
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.wkv6.signature import SIGNATURE

IMPLEMENTATION = TokenByToken(SIGNATURE, step)
