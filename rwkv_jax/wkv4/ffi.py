"""WKV4 on the native kernels: their targets, attributes and limits."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from rwkv_jax import _chunked, _ffi, _packing
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


def _segments(platform: str, k: Any) -> int:
    """Into how many segments the CUDA kernels split a sequence, so as to fill a GPU of 132
    multiprocessors with few channels. Splitting costs a pass over the sequence. A block, of which a
    multiprocessor has two, takes as many channels as 128 bytes have elements."""
    batch, tokens, channels = k.shape
    blocks = batch * -(-channels * k.dtype.itemsize // 128)
    if platform != "cuda" or not 0 < blocks <= 132:
        return 1
    return max(1, min(_chunked.boundaries(tokens), 264 // blocks))


def _scratch(platform: str, k: Any, summary: int) -> list[tuple[tuple[int, ...], Any]]:
    """A kernel may not allocate, so its scratch is one more result. A handler refuses other sizes
    than those of ffi/cuda/wkv4.h."""
    batch, _, channels = k.shape
    shape = (batch, _segments(platform, k) - 1, summary, channels)
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
    batch, tokens, channels = k.shape
    saved = (batch, _chunked.boundaries(tokens) if options.save else 0, channels)
    y, num, den, log_max, nums, dens, log_maxs, *_ = _ffi.call(
        FORWARD,
        [
            (v.shape, v.dtype),
            *[(initial_num.shape, jnp.float32)] * 3,
            *[(saved, jnp.float32)] * 3,
            *_scratch(platform, k, 3),
        ],
        *(w, u, k, v, initial_num, initial_den, initial_log_max, *_packing.operand(marks)),
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
    summed = (w.shape[0], _segments(platform, k), w.shape[1])
    dw, du, dk, dv, dnum, dden, dlog_max, *_ = _ffi.call(
        BACKWARD,
        [
            *[(summed, jnp.float32)] * 2,
            (k.shape, k.dtype),
            (v.shape, v.dtype),
            *[(dfinal_num.shape, jnp.float32)] * 3,
            *_scratch(platform, k, 4),
        ],
        *(w, u, k, v, nums, dens, log_maxs, dy, dfinal_num, dfinal_den, dfinal_log_max),
        *_packing.operand(marks),
        decay=DECAY_CODES[options.decay],
    )
    return jnp.sum(dw, axis=1), jnp.sum(du, axis=1), dk, dv, dnum, dden, dlog_max


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
