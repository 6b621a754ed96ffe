"""WKV5 in chunks of plain jnp: the blocks of WKV6, all tokens of which have the same w."""

import functools

import jax.numpy as jnp

from rwkv_jax import _chunked
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, TokenKeys, Values
from rwkv_jax.wkv6 import xla as wkv6

why_not, how, step = wkv6.why_not, wkv6.how, wkv6.step


def _block(
    options: Options,
    state: State,
    r: Keys,
    k: Keys,
    v: Values,
    w: TokenKeys,
    u: TokenKeys,
    *,
    marks: Marks | None = None,
) -> tuple[State, Values]:
    repeated = jnp.broadcast_to(w[:, None], r.shape)
    return wkv6.block(options, state, r, repeated, k, v, u, marks=marks)


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
) -> tuple[Values, State, States]:
    run = functools.partial(_block, options)
    return _chunked.forward(
        *(run, initial_state, (r, k, v), (w, u), marks),
        save=options.save,
        save_as=_chunked.states_dtype(options, r.dtype),
    )


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: TokenKeys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
) -> tuple[Keys, TokenKeys, Keys, Values, TokenKeys, State]:
    run = functools.partial(_block, options)
    (dr, dk, dv), (dw, du), dinitial_state = _chunked.backward(
        run, states, dy, dfinal_state, (r, k, v), (w, u), marks
    )
    return dr, dw, dk, dv, du, dinitial_state
