"""WKV7 on the native kernels: their targets, attributes and limits."""

from collections.abc import Callable, Mapping, Sequence
from types import NotImplementedType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _chunked, _ffi, _packing, _sequences
from rwkv_jax._chunked import CHUNK, states_dtype
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, TokenKeys, TokenValues, Values
from rwkv_jax.wkv7.segments import Map

FORWARD = "rwkv_wkv7_fwd_v1"
BACKWARD = "rwkv_wkv7_bwd_v1"
CHUNK_FORWARD = "rwkv_wkv7_chunk_fwd_v1"
CHUNK_BACKWARD = "rwkv_wkv7_chunk_bwd_v1"
SEQUENCES_FORWARD = "rwkv_wkv7_sequences_fwd_v1"
SEQUENCES_BACKWARD = "rwkv_wkv7_sequences_bwd_v1"
SUMMARY = "rwkv_wkv7_summary_v1"
REVERSE_SUMMARY = "rwkv_wkv7_reverse_summary_v1"
STEP = "rwkv_wkv7_step_v1"
TARGETS = (
    *(FORWARD, BACKWARD, CHUNK_FORWARD, CHUNK_BACKWARD, SEQUENCES_FORWARD, SEQUENCES_BACKWARD),
    *(SUMMARY, REVERSE_SUMMARY, STEP),
)

HEAD_SIZES = {"cpu": (16, 32, 64, 128, 256), "cuda": (16, 32, 64, 128)}
MATRIX_HEAD_SIZES = (64, 128)
MATRIX_TOKENS = 16
"""The head sizes of the kernels on matrix units, and the tokens that make one product."""

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


def on_matrix_units(platform: str, options: Options, r: Any) -> bool:
    """Whether the kernels on matrix units run a call, rather than those that take one token at a
    time in float32, which have all dtypes and head sizes and are as fast on a few tokens. The
    former leave a head whose decays are out of their range to the latter."""
    return (
        platform == "cuda"
        and r.dtype != jnp.float32
        and options.precision != jax.lax.Precision.HIGHEST
        and r.shape[-1] in MATRIX_HEAD_SIZES
        and r.ndim == 4
        and r.shape[1] >= MATRIX_TOKENS
    )


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    on_matrices = _sequences_on_matrix_units if "cu_seqlens" in operands else on_matrix_units
    return kernels(platform, on_matrices(platform, options, operands["r"]))


def kernels(platform: str, matrix_units: bool) -> str:
    if matrix_units:
        return "CUDA kernels on matrix units, bfloat16 with float32 sums"
    language = {"cpu": "C++", "cuda": "CUDA"}[platform]
    return f"{language} kernels, one token at a time in float32"


def _scan_segments(heads: int, size: int, frames: int) -> int:
    """Into how many segments the kernels on matrix units split a sequence so as to give few heads
    more of a large GPU. Splitting costs a pass over the sequence and shortens two: measured on 132
    multiprocessors, which hold two blocks each in the first pass over heads of 64, it pays from 8
    segments on, and up to 64 heads; a head of 128 takes a multiprocessor to itself, and 3 pay."""
    if heads == 0 or heads > (64 if size == 64 else 42):
        return 1
    return max(1, min(frames, max(8, 264 // heads + 1) if size == 64 else 128 // heads))


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
    marks: Marks | None = None,
) -> tuple[Values, State, States]:
    batch, tokens, heads, size = r.shape
    frames = _chunked.boundaries(tokens)
    inputs, rows = (r, w, k, v, a, b), _packing.operand(marks)
    if not on_matrix_units(platform, options, r):
        return forward_by_token(FORWARD, options, inputs, initial_state, frames, *rows)
    count = _scan_segments(batch * heads, size, frames)
    y, final_state, states, *_ = _ffi.call(
        CHUNK_FORWARD,
        [
            *forward_results(options, inputs, initial_state, frames),
            *_scratch(batch, heads, _summaries(size, count)),
        ],
        *(*inputs, initial_state, *rows),
        decay=DECAY_CODES[options.decay],
        splits=count,
    )
    return y, final_state, states


def forward_by_token(
    target: str,
    options: Options,
    inputs: Sequence[Array],
    initial_state: Array,
    frames: int,
    *rows: Array,
) -> tuple[Array, Array, Array]:
    """One token at a time, of rows with so many frames."""
    results = forward_results(options, inputs, initial_state, frames)
    operands = *inputs, initial_state, *rows
    y, final_state, states = _ffi.call(target, results, *operands, decay=DECAY_CODES[options.decay])
    return y, final_state, states


Results: TypeAlias = list[tuple[Sequence[int], Any]]
"""Their shapes and dtypes."""


def forward_results(
    options: Options, inputs: Sequence[Array], initial_state: Array, frames: int
) -> Results:
    v = inputs[3]
    batch, _, heads, size = v.shape
    saved = batch, frames if options.save else 0, heads, size, size
    return [
        (v.shape, v.dtype),
        (initial_state.shape, jnp.float32),
        (saved, states_dtype(options, v.dtype)),
    ]


# A kernel may not allocate, so its scratch is one more result. The sizes are those of
# ffi/cuda/wkv7.h, and a handler refuses others.


def _scratch(batch: int, heads: int, floats: int) -> Results:
    return [((batch, heads, floats), jnp.float32), ((batch, heads), jnp.float32)]


def _summaries(size: int, segments: int) -> int:
    return 2 * size * size * (segments - 1)


def _replay(size: int) -> int:
    return CHUNK // BLOCK * size * size + CHUNK * size


HEADS_AT_A_TIME = 1056
"""Of all sequences, in the CUDA backward pass that goes token by token, which has hundreds of
kilobytes of scratch for each: 8 for each of 132 multiprocessors."""


def replay_scratch(platform: str, state: Array, frames: int, floats: int) -> tuple[int, Results]:
    """Into how many segments the backward pass that goes token by token splits sequences with these
    states [B, H, V, K], and its scratch, so many floats for each segment."""
    if platform != "cuda":
        return 1, []
    batch, heads = state.shape[:2]
    count = segments(batch * heads, frames)
    lot = min(batch, max(1, HEADS_AT_A_TIME // max(1, heads)))
    return count, [((lot, heads, count, floats), jnp.float32)]


def segments(heads: int, chunks: int) -> int:
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
    marks: Marks | None = None,
) -> tuple[Keys, Keys, Keys, Values, Keys, Keys, State]:
    inputs, rows = (r, w, k, v, a, b), _packing.operand(marks)
    batch, frames, heads, size, _ = states.shape
    if not on_matrix_units(platform, options, r):
        return _backward_by_token(platform, options, inputs, states, dy, dfinal_state, *rows)
    count = _scan_segments(batch * heads, size, frames)
    floats = frames * size * size // 2 + _summaries(size, count)
    dr, dw, dk, dv, da, db, dinitial_state, _, _ = _ffi.call(
        CHUNK_BACKWARD,
        [
            *((x.shape, x.dtype) for x in (*inputs, dfinal_state)),
            *_scratch(batch, heads, max(floats, _replay(size))),
        ],
        *(*inputs, states, dy, dfinal_state, *rows),
        decay=DECAY_CODES[options.decay],
        splits=count,
    )
    return dr, dw, dk, dv, da, db, dinitial_state


def _backward_by_token(
    platform: str,
    options: Options,
    inputs: Sequence[Array],
    states: Array,
    dy: Array,
    dfinal_state: Array,
    *rows: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    frames, size = states.shape[1], states.shape[-1]
    _, scratch = replay_scratch(platform, dfinal_state, frames, _replay(size))
    dr, dw, dk, dv, da, db, dinitial_state, *_ = _ffi.call(
        BACKWARD,
        [*((x.shape, x.dtype) for x in (*inputs, dfinal_state)), *scratch],
        *(*inputs, states, dy, dfinal_state, *rows),
        decay=DECAY_CODES[options.decay],
    )
    return dr, dw, dk, dv, da, db, dinitial_state


def forward_sequences(
    options: Options, platform: str, *operands: Array
) -> tuple[Array, Array, Array]:
    """Of `rwkv_jax._sequences`: the states are [B, S, H, V, K]."""
    *inputs, initial_state, cu = operands
    r = inputs[0]
    matrices = _sequences_on_matrix_units(platform, options, r)
    split = sequence_segments(_scan_segments, r, _summaries(r.shape[3], 2))
    targets = SEQUENCES_FORWARD, FORWARD
    return call_on_sequences(
        targets, options, split if matrices else None, inputs, initial_state, cu
    )


def call_on_sequences(
    targets: tuple[str, str],
    options: Options,
    split: tuple[int, Any] | None,
    inputs: Sequence[Array],
    initial_state: Array,
    cu: Array,
) -> tuple[Array, Array, Array]:
    """By the first target on matrix units, in so many segments; without these by the second."""
    on_matrices, by_token = targets
    inputs, (state,), spans, owners = _sequences.native(inputs, [initial_state], cu)
    frames = owners.shape[1]
    if split is None:
        y, final_state, states = forward_by_token(by_token, options, inputs, state, frames, spans)
    else:
        count, scratch = split
        y, final_state, states, _ = _ffi.call(
            on_matrices,
            [*forward_results(options, inputs, state, frames), scratch],
            *(*inputs, state, spans),
            decay=DECAY_CODES[options.decay],
            splits=count,
        )
    return y, final_state.reshape(initial_state.shape), states


def backward_sequences(options: Options, platform: str, *operands: Array) -> tuple[Array, ...]:
    *inputs, states, dy, dfinal_state, cu = operands
    inputs, (dstate,), spans, owners = _sequences.native(inputs, [dfinal_state], cu)
    r, size = inputs[0], states.shape[-1]
    if _sequences_on_matrix_units(platform, options, r):
        count, scratch = sequence_segments(_scan_segments, r, _summaries(size, 2))
        gradients = ((*states.shape[:3], size * size // 2), jnp.float32)
        *found, dinitial_state, _, _ = _ffi.call(
            SEQUENCES_BACKWARD,
            [*((x.shape, x.dtype) for x in (*inputs, dstate)), scratch, gradients],
            *(*inputs, states, dy, dstate, spans, owners),
            decay=DECAY_CODES[options.decay],
            splits=count,
        )
    else:
        *found, dinitial_state = _backward_by_token(
            platform, options, inputs, states, dy, dstate, spans
        )
    return *found, dinitial_state.reshape(dfinal_state.shape)


def sequence_segments(rule: Callable[..., int], r: Array, summary: int) -> tuple[int, Any]:
    """Into how many segments all tokens would be split if they were one sequence, and the scratch
    for what they do to a state: longer sequences are split into segments of that length."""
    batch, tokens, heads, size = r.shape
    frames = _chunked.boundaries(batch * tokens)
    count = rule(batch * heads, size, frames)
    return count, ((heads, summary * count if count > 1 else 0), jnp.float32)


def _summarizes(platform: str, options: Options, r: Any) -> bool:
    """Whether a kernel computes what tokens do to a state alone: on matrix units, where no decay
    can be out of their range."""
    return options.decay == "sigmoid" and on_matrix_units(platform, options, r)


def _sequences_on_matrix_units(platform: str, options: Options, r: Any) -> bool:
    """Of several sequences in a row none can be left to the other kernels."""
    return _summarizes(platform, options, r) and _ffi.fits_matrix_units()


def summary(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    marks: Marks | None = None,
) -> Map | NotImplementedType:
    if not _summarizes(platform, options, r):
        return NotImplemented
    batch, _, heads, size = r.shape
    of_state = ((batch, heads, size, size), jnp.float32)
    decay = DECAY_CODES[options.decay]
    operands = w, k, v, a, b, *_packing.operand(marks)
    factor, added = _ffi.call(SUMMARY, [of_state, of_state], *operands, decay=decay)
    return factor, added


def reverse_summary(
    options: Options, platform: str, *operands: Array
) -> tuple[State] | NotImplementedType:
    r, w, _, _, a, b, _, dy, dfinal_state, *marks = operands
    if not _summarizes(platform, options, r):
        return NotImplemented
    (dinitial_state,) = _ffi.call(
        REVERSE_SUMMARY,
        [(dfinal_state.shape, jnp.float32)],
        *(r, w, a, b, dy, dfinal_state, *_packing.operand(*marks)),
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
