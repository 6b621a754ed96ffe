"""WKV4, the time mixing of RWKV-4 "Dove"."""

from typing import Literal

import jax
from jax import Array

from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.public import public, run
from rwkv_jax._typing import Operand
from rwkv_jax.wkv4 import ffi, reference, xla
from rwkv_jax.wkv4.signature import SIGNATURE
from rwkv_jax.wkv4.signature import Wkv4State as Wkv4State
from rwkv_jax.wkv4.summary import SUMMARY

OPERATOR = Operator(
    SIGNATURE,
    SUMMARY,
    implementations={
        "ffi": ffi.IMPLEMENTATION,
        "xla": xla.IMPLEMENTATION,
        "reference": reference.IMPLEMENTATION,
    },
)


@public(OPERATOR)
def wkv4(
    w: Operand,
    u: Operand,
    k: Operand,
    v: Operand,
    initial_state: Wkv4State | None = None,
    *,
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    slots: Operand | None = None,
    decay: Literal["log", "exp"] = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Wkv4State]:
    r"""The recurrence of RWKV-4 over whole sequences: a mean of values, with weights that decay.

    For each channel, with the log decay w <= 0::

        y_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t)
              / (sum_{i<t} e^{(t-1-i) w + k_i} + e^{u + k_t})

    and, if there is an initial state, its two sums before the first token. Source: "RWKV:
    Reinventing RNNs for the Transformer Era" (arXiv:2305.13048), and the official CUDA kernels of
    RWKV-LM.

    Args:
      w: decay, the same for all tokens, [C], in the form that `decay` names.
      u: the bonus of the present token, [C].
      k: key, [B, T, C]. Any B >= 0, T >= 0 and C >= 0, and any finite value.
      v: value, [B, T, C].
      initial_state: as `Wkv4State`; that of no tokens if None.
      segment_ids: integers [B, T] that say which tokens of a row belong together. A segment is a
        run of tokens with the same id; the id 0 is padding. The first segment of a row continues
        from `initial_state`, every other segment starts from the state before any token, and the
        final state is the state after the last segment. Padding changes no state, and its `y` and
        its gradients are 0.
      cu_seqlens: int32 [S + 1], for S sequences of different lengths in a single row, B = 1:
        the sequence s has the tokens from `cu_seqlens[s]` to `cu_seqlens[s + 1]`, none if the two
        are equal, and states of its own, so `initial_state` and the final state are of [S, C] each.
        Offsets that do not go from 0 to T, or that decrease, raise a ValueError where their values
        are known when the call is traced; otherwise they are clamped, and tokens of no sequence
        have a `y` and gradients of 0. It excludes `segment_ids`.
      slots: int32 [B], or [S] with `cu_seqlens`: rows of a pool of states [P, ...], which
        `initial_state` then is. The pool is returned with these rows replaced, in place where it
        is donated. A row or sequence with a slot below 0 is not active: its `y` is 0. A slot that
        the pool does not have, or that is there twice, raises a ValueError where slots are known
        when the call is traced. Otherwise a row whose slot the pool does not have is not active,
        and of several rows with the same slot the last one is kept.
      decay: what `w` is. "log": the log decay itself, <= 0. "exp", the parameter of the official
        models: the log decay is -exp(w).
      precision: as `jax.lax.Precision`; all computation is in float32.
      implementation: "ffi" (native kernels on CPU and CUDA), "xla", or "reference" (one `lax.scan`
        step, differentiable any number of times and in forward mode). None takes the first of ffi
        and xla that can run where the program is lowered.

    `w`, `u`, `k`, `v` share one dtype: float32, bfloat16 or float16. The state is always float32.

    Returns:
      `y` [B, T, C] in the dtype of `v`, and the final state, whose `log_max` is the largest
      exponent so far. Both are differentiable once in reverse mode, with respect to all arguments.
      The gradients of `w` and `u` are sums over the batch, in an order that does not change.

    Raises:
      TypeError: an argument is not an array, or has a dtype that is not accepted or not shared.
      ValueError: an argument has a wrong rank or size, or an option is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why.
    """
    return run(wkv4, locals())


@public(OPERATOR, is_step=True)
def wkv4_step(
    w: Operand,
    u: Operand,
    k: Operand,
    v: Operand,
    state: Wkv4State,
    *,
    slots: Operand | None = None,
    decay: Literal["log", "exp"] = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Wkv4State]:
    """One token of `wkv4`, for decoding.

    The arguments are those of `wkv4` without the time axis: `k` and `v` are [B, C].

    With `slots` as in `wkv4`, `state` is a pool, which the caller donates.

    Returns:
      `y` [B, C] in the dtype of `v`, and the next state. Equal to `wkv4` on one token, derivatives
      included.

    Raises:
      TypeError, ValueError, NotImplementedError: as `wkv4`.
    """
    return run(wkv4_step, locals())
