"""WKV5, one token at a time: the specification that every other implementation agrees with."""

from rwkv_jax import _chunked
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, TokenKeys, TokenValues, Values
from rwkv_jax.wkv6 import reference as wkv6

why_not, how = wkv6.why_not, wkv6.how

step = wkv6.step
"""That of WKV6: what differs is that all tokens have the same w."""


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: TokenKeys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State]:
    def one(r: TokenKeys, k: TokenKeys, v: TokenValues, state: State) -> tuple[TokenValues, State]:
        return step(options, platform, r, w, k, v, u, state)

    return _chunked.token_by_token(one, initial_state, (r, k, v), marks)
