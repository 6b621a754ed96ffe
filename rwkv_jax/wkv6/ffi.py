"""WKV6 on the native kernels: their targets, attributes and limits. Those of WKV5 differ in name
and in that all tokens have the same w."""

from collections.abc import Mapping, Sequence
from types import NotImplementedType
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _chunked, _ffi, _packing, _sequences
from rwkv_jax._chunked import CHUNK, states_dtype
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, TokenKeys, TokenValues, Values
from rwkv_jax.wkv6.segments import Map
from rwkv_jax.wkv7.ffi import (
    DECAY_CODES,
    call_on_sequences,
    kernels,
    on_matrix_units,
    segments,
    sequence_segments,
    why_not,
)

__all__ = [
    "TARGETS",
    "backward",
    "backward_sequences",
    "forward",
    "forward_sequences",
    "how",
    "reverse_summary",
    "step",
    "summary",
    "targets",
    "why_not",
]


STAGES = (
    *("fwd", "bwd", "chunk_fwd", "chunk_bwd", "sequences_fwd", "sequences_bwd"),
    *("summary", "reverse_summary", "step"),
)


def target(op: str, stage: str) -> str:
    return f"rwkv_{op}_{stage}_v1"


def targets(op: str) -> tuple[str, ...]:
    return tuple(target(op, stage) for stage in STAGES)


TARGETS = targets("wkv6")

TILE = 8
"""Tokens between the states that the CUDA backward pass in float32 keeps inside a chunk."""


MATRIX_HEAD_SIZE = 64
"""The head size of the kernels on matrix units."""


def _on_matrix_units(platform: str, options: Options, r: Any) -> bool:
    return r.shape[-1] == MATRIX_HEAD_SIZE and on_matrix_units(platform, options, r)


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    return kernels(platform, _on_matrix_units(platform, options, operands["r"]))


def _scan_segments(heads: int, frames: int) -> int:
    """Into how many segments the kernels on matrix units split a sequence so as to give few heads
    more of a large GPU. Splitting costs a pass over the sequence: measured on 132 multiprocessors,
    it pays until each has two blocks of threads."""
    return max(1, min(frames, 264 // heads)) if heads else 1


# A kernel may not allocate, so its scratch is one more result. The sizes are those of
# ffi/cuda/wkv6.h, and a handler refuses others.


def _scratch(size: int, count: int) -> int:
    """What each segment but the last does to a state."""
    return (size * size + size) * (count - 1)


def _replay(size: int) -> int:
    return CHUNK // TILE * size * size


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
    marks: Marks | None = None,
    op: str = "wkv6",
) -> tuple[Values, State, States]:
    batch, tokens, heads, size = r.shape
    frames = _chunked.boundaries(tokens)
    stage = "fwd"
    attributes: dict[str, Any] = {"decay": DECAY_CODES[options.decay]}
    saved = (batch, frames if options.save else 0, heads, size, size)
    results: list[tuple[Any, Any]] = [
        (v.shape, v.dtype),
        (initial_state.shape, jnp.float32),
        (saved, states_dtype(options, r.dtype)),
    ]
    if _on_matrix_units(platform, options, r):
        stage = "chunk_fwd"
        count = attributes["segments"] = _scan_segments(batch * heads, frames)
        results.append(((batch, heads, _scratch(size, count)), jnp.float32))
    y, final_state, states, *_ = _ffi.call(
        *(target(op, stage), results, r, w, k, v, u, initial_state, *_packing.operand(marks)),
        **attributes,
    )
    return y, final_state, states


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
    op: str = "wkv6",
) -> tuple[Keys, Array, Keys, Values, TokenKeys, State]:
    batch, frames, heads, size, _ = states.shape
    stage = "bwd"
    attributes: dict[str, Any] = {"decay": DECAY_CODES[options.decay]}
    scratch: list[tuple[Any, Any]] = []
    partials = 1
    if _on_matrix_units(platform, options, r):
        stage, partials = "chunk_bwd", frames
        count = attributes["segments"] = _scan_segments(batch * heads, frames)
        floats = max(frames * size * size // 2 + _scratch(size, count), _replay(size))
        scratch = [((batch, heads, floats), jnp.float32)]
    elif platform == "cuda":
        partials = segments(batch * heads, frames)
        scratch = [((batch, heads, partials, _replay(size)), jnp.float32)]
    summed = (batch, partials, heads, size)
    constant = w.ndim == u.ndim
    results = [
        (r.shape, r.dtype),
        (summed, jnp.float32) if constant else (w.shape, w.dtype),
        (k.shape, k.dtype),
        (v.shape, v.dtype),
        (summed, jnp.float32),
        (dfinal_state.shape, jnp.float32),
        *scratch,
    ]
    operands = (r, w, k, v, u, states, dy, dfinal_state, *_packing.operand(marks))
    dr, dw, dk, dv, du, dinitial_state, *_ = _ffi.call(
        target(op, stage), results, *operands, **attributes
    )
    if constant:
        dw = jnp.sum(dw, axis=1)
    return dr, dw, dk, dv, jnp.sum(du, axis=1), dinitial_state


def forward_sequences(
    options: Options, platform: str, *operands: Array, op: str = "wkv6"
) -> tuple[Values, Array, States] | NotImplementedType:
    """As that of WKV7. Each sequence has the parameters of its row."""
    *inputs, initial_state, cu = operands
    r = inputs[0]
    if not (_on_matrix_units(platform, options, r) and _ffi.fits_matrix_units()):
        return NotImplemented
    split = sequence_segments(_segments_of, r, _scratch(r.shape[3], 2))
    each = _for_each(inputs, initial_state)
    return call_on_sequences(target(op, "sequences_fwd"), options, split, each, initial_state, cu)


def backward_sequences(
    options: Options, platform: str, *operands: Array, op: str = "wkv6"
) -> tuple[Array, ...] | NotImplementedType:
    *inputs, states, dy, dfinal_state, cu = operands
    r, w, k, v, u = inputs
    if not (_on_matrix_units(platform, options, r) and _ffi.fits_matrix_units()):
        return NotImplemented
    size = r.shape[3]
    spans, owners = _sequences.spans(cu, r.shape[1])
    count, scratch = sequence_segments(_segments_of, r, _scratch(size, 2))
    summed = ((*states.shape[:3], size), jnp.float32)
    gradients = ((*states.shape[:3], size * size // 2), jnp.float32)
    constant = w.ndim == u.ndim
    dr, dw, dk, dv, du, dinitial_state, _, _ = _ffi.call(
        target(op, "sequences_bwd"),
        [
            (r.shape, r.dtype),
            summed if constant else (w.shape, w.dtype),
            (k.shape, k.dtype),
            (v.shape, v.dtype),
            summed,
            (dfinal_state.shape, jnp.float32),
            scratch,
            gradients,
        ],
        *(*_for_each(inputs, dfinal_state), states, dy, dfinal_state, spans, owners),
        decay=DECAY_CODES[options.decay],
        segments=count,
    )
    if constant:
        dw = jnp.sum(dw, axis=1)
    return dr, dw, dk, dv, jnp.sum(du, axis=1), dinitial_state


def _segments_of(heads: int, size: int, frames: int) -> int:
    return _scan_segments(heads, frames)


def _for_each(inputs: Sequence[Array], state: Array) -> list[Array]:
    """The inputs, parameters [B, H, K] as [B, S, H, K]."""
    sequences = state.shape[1]
    return [jnp.repeat(x[:, None], sequences, axis=1) if x.ndim == 3 else x for x in inputs]


def summary(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    marks: Marks | None = None,
    op: str = "wkv6",
) -> Map | NotImplementedType:
    if not _on_matrix_units(platform, options, r):
        return NotImplemented
    batch, _, heads, size = r.shape
    factor, added = _ffi.call(
        target(op, "summary"),
        [((batch, heads, size), jnp.float32), ((batch, heads, size, size), jnp.float32)],
        *(w, k, v, *_packing.operand(marks)),
        decay=DECAY_CODES[options.decay],
    )
    return factor, added


def reverse_summary(
    options: Options, platform: str, *operands: Array, op: str = "wkv6"
) -> tuple[State] | NotImplementedType:
    r, w, _, _, _, _, dy, dfinal_state, *marks = operands
    if not _on_matrix_units(platform, options, r):
        return NotImplemented
    (dinitial_state,) = _ffi.call(
        target(op, "reverse_summary"),
        [(dfinal_state.shape, jnp.float32)],
        *(r, w, dy, dfinal_state, *_packing.operand(*marks)),
        decay=DECAY_CODES[options.decay],
    )
    return (dinitial_state,)


def step(
    options: Options,
    platform: str,
    r: TokenKeys,
    w: TokenKeys,
    k: TokenKeys,
    v: TokenValues,
    u: TokenKeys,
    state: State,
    op: str = "wkv6",
) -> tuple[TokenValues, State]:
    y, state = _ffi.call(
        target(op, "step"),
        [(v.shape, v.dtype), (state.shape, jnp.float32)],
        *(r, w, k, v, u, state),
        aliases={5: 1},
        decay=DECAY_CODES[options.decay],
    )
    return y, state
