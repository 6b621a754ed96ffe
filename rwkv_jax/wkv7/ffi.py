"""WKV7 on the native kernels: their targets, attributes and limits."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rwkv_jax import _chunked, _ffi
from rwkv_jax._dispatch import Options
from rwkv_jax._typing import Keys, State, States, TokenKeys, TokenValues, Values
from rwkv_jax.wkv7.residuals import CHUNK

FORWARD = "rwkv_wkv7_fwd_v1"
BACKWARD = "rwkv_wkv7_bwd_v1"
STEP = "rwkv_wkv7_step_v1"

HEAD_SIZES = {"cpu": (16, 32, 64, 128, 256), "cuda": (16, 32, 64, 128)}
BLOCK = 4
"""Tokens between the states that the CUDA backward pass keeps inside a chunk."""

DECAY_CODES = {"log": 0, "exp": 1, "sigmoid": 2}


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    if reason := _ffi.why_not(platform):
        return reason
    key_size, value_size = operands["r"].shape[-1], operands["v"].shape[-1]
    if key_size != value_size or key_size not in HEAD_SIZES[platform]:
        sizes = ", ".join(map(str, HEAD_SIZES[platform]))
        return (
            f"K = {key_size} and V = {value_size}; the {platform} kernels take K = V out of {sizes}"
        )
    return None


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    initial_state: State,
) -> tuple[Values, State, States]:
    tokens = r.shape[1]
    batch, *state_shape = initial_state.shape
    saved = _chunked.boundaries(tokens, CHUNK) if options.save else 0
    y, final_state, states = _ffi.call(
        FORWARD,
        [
            (v.shape, v.dtype),
            (initial_state.shape, jnp.float32),
            ((batch, saved, *state_shape), jnp.float32),
        ],
        *(r, w, k, v, a, b, initial_state),
        decay=DECAY_CODES[options.decay],
    )
    return y, final_state, states


def _segments(heads: int, chunks: int) -> int:
    """Into how many segments the CUDA backward pass splits a sequence so as to fill a large GPU
    with few heads. Segments cost a pass over the sequence, so many heads do without."""
    few = 0 < heads <= 128
    return max(1, min(chunks, 512 // heads)) if few else 1


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    states: States,
    dy: Values,
    dfinal_state: State,
) -> tuple[Keys, Keys, Keys, Values, Keys, Keys, State]:
    inputs = (r, w, k, v, a, b)
    results = [(x.shape, x.dtype) for x in (*inputs, dfinal_state)]
    if platform == "cuda":
        # A kernel may not allocate, so its scratch is one more result (ScratchSize in
        # ffi/cuda/wkv7.h).
        batch, heads, size, _ = dfinal_state.shape
        floats = CHUNK // BLOCK * size * size + CHUNK * size
        segments = _segments(batch * heads, states.shape[1])
        results.append(((batch, heads, segments, floats), jnp.float32))
    gradients = _ffi.call(
        BACKWARD, results, *inputs, states, dy, dfinal_state, decay=DECAY_CODES[options.decay]
    )
    dr, dw, dk, dv, da, db, dinitial_state = gradients[:7]
    return dr, dw, dk, dv, da, db, dinitial_state


def step(
    options: Options,
    platform: str,
    r: TokenKeys,
    w: TokenKeys,
    k: TokenKeys,
    v: TokenValues,
    a: TokenKeys,
    b: TokenKeys,
    state: State,
) -> tuple[TokenValues, State]:
    y, state = _ffi.call(
        STEP,
        [(v.shape, v.dtype), (state.shape, jnp.float32)],
        *(r, w, k, v, a, b, state),
        aliases={6: 1},
        decay=DECAY_CODES[options.decay],
    )
    return y, state
