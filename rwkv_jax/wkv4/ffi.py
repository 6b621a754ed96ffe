"""WKV4 on the native kernels: their targets, attributes and limits."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _chunked, _ffi, _packing, _sequences
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax.wkv4.reference import Part, Token, Tokens
from rwkv_jax.wkv4.xla import Parts
from rwkv_jax.wkv7.ffi import DECAY_CODES

FORWARD = "rwkv_wkv4_fwd_v1"
BACKWARD = "rwkv_wkv4_bwd_v1"
STEP = "rwkv_wkv4_step_v1"
TARGETS = (FORWARD, BACKWARD, STEP)


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    return _ffi.why_not(platform)


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    return {
        "cpu": "C++ kernels, one token at a time in float32",
        "cuda": "CUDA kernels, runs of tokens side by side in float32",
    }[platform]


def _segments(platform: str, k: Any, sequences: int) -> int:
    """Into how many segments the CUDA kernels split a sequence, so as to fill a GPU of 132
    multiprocessors with few channels. Splitting costs a pass over the sequence. A block, of which a
    multiprocessor has two, takes as many channels as 128 bytes have elements."""
    _, tokens, channels = k.shape
    blocks = sequences * -(-channels * k.dtype.itemsize // 128)
    if platform != "cuda" or not 0 < blocks <= 132:
        return 1
    return max(1, min(_chunked.boundaries(tokens), 264 // blocks))


def _scratch(platform: str, k: Any, sequences: int, summary: int) -> list[tuple[Any, Any]]:
    """A kernel may not allocate, so its scratch is one more result. A handler refuses other sizes
    than those of ffi/cuda/wkv4.h."""
    shape = sequences, _segments(platform, k, sequences) - 1, summary, k.shape[2]
    return [(shape, jnp.float32)] if platform == "cuda" else []


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
    state = initial_num, initial_den, initial_log_max
    frames = _chunked.boundaries(k.shape[1])
    return _forward(options, platform, (w, u, k, v), state, frames, *_packing.operand(marks))


def _forward(
    options: Options,
    platform: str,
    inputs: Sequence[Array],
    state: Sequence[Array],
    frames: int,
    *rows: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    k, v = inputs[2:]
    sequences, channels = state[0].shape
    saved = (len(k), frames if options.save else 0, channels)
    y, num, den, log_max, nums, dens, log_maxs, *_ = _ffi.call(
        FORWARD,
        [
            (v.shape, v.dtype),
            *((x.shape, jnp.float32) for x in state),
            *[(saved, jnp.float32)] * 3,
            *_scratch(platform, k, sequences, 3),
        ],
        *(*inputs, *state, *rows),
        decay=DECAY_CODES[options.decay],
    )
    return y, num, den, log_max, nums, dens, log_maxs


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
    dstate = dfinal_num, dfinal_den, dfinal_log_max
    saved, rows = (nums, dens, log_maxs), _packing.operand(marks)
    return _backward(options, platform, (w, u, k, v), saved, dy, dstate, *rows)


def _backward(
    options: Options,
    platform: str,
    inputs: Sequence[Array],
    saved: Sequence[Array],
    dy: Array,
    dstate: Sequence[Array],
    *rows: Array,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    k, v = inputs[2:]
    sequences, channels = dstate[0].shape
    count = _segments(platform, k, sequences)
    summed = sequences, count, channels
    dw, du, dk, dv, dnum, dden, dlog_max, *_ = _ffi.call(
        BACKWARD,
        [
            *[(summed, jnp.float32)] * 2,
            *((x.shape, x.dtype) for x in (k, v, *dstate)),
            *_scratch(platform, k, sequences, 4),
        ],
        *(*inputs, *saved, dy, *dstate, *rows),
        decay=DECAY_CODES[options.decay],
    )

    def total(x: Array) -> Array:
        return jnp.sum(x.reshape(len(k), sequences * count // max(1, len(k)), channels), axis=1)

    return total(dw), total(du), dk, dv, dnum, dden, dlog_max


def forward_sequences(options: Options, platform: str, *operands: Array) -> tuple[Array, ...]:
    """Of `rwkv_jax._sequences`: the states are [B, S, C]."""
    inputs, states, cu = operands[:4], operands[4:7], operands[7]
    inputs, before, spans, owners = _sequences.native(inputs, states, cu)
    y, *found = _forward(options, platform, inputs, before, owners.shape[1], spans)
    after = (x.reshape(states[0].shape) for x in found[:3])
    return y, *after, *found[3:]


def backward_sequences(options: Options, platform: str, *operands: Array) -> tuple[Array, ...]:
    inputs, saved, dy = operands[:4], operands[4:7], operands[7]
    dstates, cu = operands[8:11], operands[11]
    inputs, dstate, spans, _ = _sequences.native(inputs, dstates, cu)
    *found, dnum, dden, dlog_max = _backward(options, platform, inputs, saved, dy, dstate, spans)
    return *found, *(x.reshape(dstates[0].shape) for x in (dnum, dden, dlog_max))


def step(
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Token,
    v: Token,
    num: Part,
    den: Part,
    log_max: Part,
) -> tuple[Token, Part, Part, Part]:
    y, num, den, log_max = _ffi.call(
        STEP,
        [(v.shape, v.dtype), *[(num.shape, jnp.float32)] * 3],
        *(w, u, k, v, num, den, log_max),
        aliases={4: 1, 5: 2, 6: 3},
        decay=DECAY_CODES[options.decay],
    )
    return y, num, den, log_max
