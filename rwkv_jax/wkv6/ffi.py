"""WKV6 on the native kernels: their targets, attributes and limits. Those of WKV5 differ in name
and in that all tokens have the same w."""

from collections.abc import Mapping, Sequence
from types import NotImplementedType
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _chunked, _ffi, _packing, _sequences
from rwkv_jax._chunked import CHUNK
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, TokenKeys, TokenValues, Values
from rwkv_jax.wkv6.segments import Map
from rwkv_jax.wkv7.ffi import (
    DECAY_CODES,
    Results,
    call_on_sequences,
    forward_by_token,
    forward_results,
    kernels,
    on_matrix_units,
    replay_scratch,
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


def _sequences_on_matrix_units(platform: str, options: Options, r: Any) -> bool:
    return _on_matrix_units(platform, options, r) and _ffi.fits_matrix_units()


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    on_matrices = _sequences_on_matrix_units if "cu_seqlens" in operands else _on_matrix_units
    return kernels(platform, on_matrices(platform, options, operands["r"]))


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
    inputs, rows = (r, w, k, v, u), _packing.operand(marks)
    if not _on_matrix_units(platform, options, r):
        of_tokens = target(op, "fwd")
        return forward_by_token(of_tokens, options, inputs, initial_state, frames, *rows)
    count = _scan_segments(batch * heads, frames)
    y, final_state, states, _ = _ffi.call(
        target(op, "chunk_fwd"),
        [
            *forward_results(options, inputs, initial_state, frames),
            ((batch, heads, _scratch(size, count)), jnp.float32),
        ],
        *(*inputs, initial_state, *rows),
        decay=DECAY_CODES[options.decay],
        splits=count,
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
    inputs, rows = (r, w, k, v, u), _packing.operand(marks)
    operands = *inputs, states, dy, dfinal_state, *rows
    if not _on_matrix_units(platform, options, r):
        return _backward_by_token(platform, options, inputs, *operands[len(inputs) :], op=op)
    count = _scan_segments(batch * heads, frames)
    floats = max(frames * size * size // 2 + _scratch(size, count), _replay(size))
    found = _ffi.call(
        target(op, "chunk_bwd"),
        [
            *_gradients(inputs, (batch, frames), dfinal_state),
            ((batch, heads, floats), jnp.float32),
        ],
        *operands,
        decay=DECAY_CODES[options.decay],
        splits=count,
    )
    return _summed(found, inputs)


def _backward_by_token(
    platform: str,
    options: Options,
    inputs: Sequence[Array],
    states: Array,
    dy: Array,
    dfinal_state: Array,
    *rows: Array,
    op: str,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    frames, size = states.shape[1], states.shape[-1]
    partials, scratch = replay_scratch(platform, dfinal_state, frames, _replay(size))
    found = _ffi.call(
        target(op, "bwd"),
        [*_gradients(inputs, (len(dfinal_state), partials), dfinal_state), *scratch],
        *(*inputs, states, dy, dfinal_state, *rows),
        decay=DECAY_CODES[options.decay],
    )
    return _summed(found, inputs)


def _gradients(inputs: Sequence[Array], parts: Sequence[int], dfinal_state: Array) -> Results:
    """Of parameters there are so many sums [*parts, H, K]."""
    most = inputs[0].ndim
    return [
        *(
            (x.shape, x.dtype) if x.ndim == most else ((*parts, *x.shape[1:]), jnp.float32)
            for x in inputs
        ),
        (dfinal_state.shape, jnp.float32),
    ]


def _summed(
    found: Sequence[Array], inputs: Sequence[Array]
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The sums of parameters of each row added up; not what comes behind the gradients."""
    batch, most = len(inputs[0]), inputs[0].ndim

    def total(x: Array) -> Array:
        sequences, parts, *shape = x.shape
        return jnp.sum(x.reshape(batch, sequences * parts // max(1, batch), *shape), axis=1)

    dr, dw, dk, dv, du = (
        dx if x.ndim == most else total(dx) for x, dx in zip(inputs, found, strict=False)
    )
    return dr, dw, dk, dv, du, found[len(inputs)]


def forward_sequences(
    options: Options, platform: str, *operands: Array, op: str = "wkv6"
) -> tuple[Array, Array, Array]:
    """As that of WKV7. Each sequence has the parameters of its row."""
    *inputs, initial_state, cu = operands
    r = inputs[0]
    matrices = _sequences_on_matrix_units(platform, options, r)
    split = sequence_segments(_segments_of, r, _scratch(r.shape[3], 2))
    targets = target(op, "sequences_fwd"), target(op, "fwd")
    return call_on_sequences(
        targets, options, split if matrices else None, inputs, initial_state, cu
    )


def backward_sequences(
    options: Options, platform: str, *operands: Array, op: str = "wkv6"
) -> tuple[Array, ...]:
    *inputs, states, dy, dfinal_state, cu = operands
    inputs, (dstate,), spans, owners = _sequences.native(inputs, [dfinal_state], cu)
    r, size = inputs[0], states.shape[-1]
    if _sequences_on_matrix_units(platform, options, r):
        count, scratch = sequence_segments(_segments_of, r, _scratch(size, 2))
        gradients = ((*states.shape[:3], size * size // 2), jnp.float32)
        found = _ffi.call(
            target(op, "sequences_bwd"),
            [*_gradients(inputs, states.shape[:2], dstate), scratch, gradients],
            *(*inputs, states, dy, dstate, spans, owners),
            decay=DECAY_CODES[options.decay],
            splits=count,
        )
        *gradients, dinitial_state = _summed(found, inputs)
    else:
        *gradients, dinitial_state = _backward_by_token(
            platform, options, inputs, states, dy, dstate, spans, op=op
        )
    return *gradients, dinitial_state.reshape(dfinal_state.shape)


def _segments_of(heads: int, size: int, frames: int) -> int:
    return _scan_segments(heads, frames)


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
