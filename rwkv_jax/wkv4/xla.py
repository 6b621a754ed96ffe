"""WKV4 in chunks of plain jnp: for each token of a block the weights of all tokens before it, by
their exponents less the largest."""

import functools
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float32

from rwkv_jax import _chunked, _packing
from rwkv_jax._decay import unbounded_log_decay
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.reference import Part, Token, Tokens
from rwkv_jax.wkv7 import xla as wkv7

why_not, how = wkv7.why_not, wkv7.how
step = reference.step

Parts: TypeAlias = Float32[Array, "B N C"]
State: TypeAlias = tuple[Array, ...]


def _block(
    options: Options,
    state: State,
    k: Tokens,
    v: Tokens,
    w: Token,
    u: Token,
    *,
    marks: Marks | None = None,
) -> tuple[State, Tokens]:
    num, den, log_max = (x[:, None] for x in state)
    k32, v32 = k.astype(jnp.float32)[:, None], v.astype(jnp.float32)[:, None]
    log_decay = unbounded_log_decay(w, options.decay)[:, None]
    # The state before token i, and after the last: [B, L + 1, C], its weights [B, L + 1, L, C].
    tokens = k.shape[1]
    ages = lax.iota(jnp.float32, tokens + 1)[None, :, None]
    earlier = ages[:, :, None] > ages[:, None, :tokens]
    alive = jnp.array(True)
    if marks is not None:
        there, own = marks != _packing.ABSENT, _packing.segments(marks)
        own_of_state = jnp.concatenate([own, own[:, -1:]], axis=1)[..., None]
        earlier &= (own_of_state == own[:, None])[..., None] & there[:, None, :, None]
        alive = own_of_state == 0
        ages = jnp.pad(jnp.cumsum(there, axis=1, dtype=jnp.float32), ((0, 0), (1, 0)))[..., None]
    added = ages[:, :, None] - 1 - ages[:, None, :tokens]
    decays, decay = added * log_decay[:, None], ages * log_decay
    weights = jnp.where(earlier, decays + k32, -jnp.inf)
    before = jnp.where(alive, decay + log_max, reference.NOTHING)
    largest = jnp.maximum(before, jnp.max(weights, axis=2))
    # As in the reference, against drift.
    weights = jnp.where(earlier, (k32 - largest[:, :, None]) + decays, -jnp.inf)
    start = jnp.where(alive, (log_max - largest) + decay, -jnp.inf)
    weights, start = jnp.exp(weights), jnp.exp(start)
    num = start * num + jnp.sum(weights * v32, axis=2)
    den = start * den + jnp.sum(weights, axis=2)
    y = reference.read(u[:, None], k, v, num[:, :-1], den[:, :-1], largest[:, :-1])
    (y,) = _packing.cleared(marks, [y])
    return (num[:, -1], den[:, -1], largest[:, -1]), y


def forward(
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Tokens,
    v: Tokens,
    initial_num: Part,
    initial_den: Part,
    initial_log_max: Part,
    marks: Marks | None = None,
) -> tuple[Tokens, Part, Part, Part, Parts, Parts, Parts]:
    start = initial_num, initial_den, initial_log_max
    run = functools.partial(_block, options)
    y, end, states = _chunked.forward(run, start, (k, v), (w, u), marks, save=options.save)
    return y, *end, *states


def backward(
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Tokens,
    v: Tokens,
    nums: Parts,
    dens: Parts,
    log_maxs: Parts,
    dy: Tokens,
    dfinal_num: Part,
    dfinal_den: Part,
    dfinal_log_max: Part,
    marks: Marks | None = None,
) -> tuple[Token, Token, Tokens, Tokens, Part, Part, Part]:
    run = functools.partial(_block, options)
    (dk, dv), (dw, du), dstart = _chunked.backward(
        *(run, (nums, dens, log_maxs), dy, (dfinal_num, dfinal_den, dfinal_log_max)),
        *((k, v), (w, u), marks),
    )
    return dw, du, dk, dv, *dstart
