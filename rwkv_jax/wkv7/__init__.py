"""WKV7, the time mixing of RWKV-7 "Goose"."""

import jax
from jax import Array

from rwkv_jax._operator.implementation import Lazy
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.public import public, run
from rwkv_jax._pallas import TRITON_TARGET
from rwkv_jax._portable.decay import Decay
from rwkv_jax._typing import Operand
from rwkv_jax.wkv7 import ffi, reference, xla
from rwkv_jax.wkv7.signature import SIGNATURE
from rwkv_jax.wkv7.summary import SUMMARY

OPERATOR = Operator(
    SIGNATURE,
    SUMMARY,
    implementations={
        "ffi": ffi.IMPLEMENTATION,
        "pallas": Lazy("rwkv_jax.wkv7.pallas", targets=(TRITON_TARGET,)),
        "xla": xla.IMPLEMENTATION,
        "reference": reference.IMPLEMENTATION,
    },
)


@public(OPERATOR)
def wkv7(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    initial_state: Operand | None = None,
    *,
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    slots: Operand | None = None,
    decay: Decay = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    r"""The recurrence of RWKV-7 over whole sequences.

    For each head, with the state S a [V, K] matrix that starts as `initial_state`::

        S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    In the model, `a` is minus the normalised removal key and `b` that key times the in-context
    learning rate; the operator takes any `a` and `b`. Source: "RWKV-7 Goose with Expressive Dynamic
    State Evolution" (arXiv:2503.14456), and the official CUDA kernels of RWKV-LM, with whose state
    layout and (for "sigmoid", their `clampw` form) decay this function agrees.

    Args:
      r: receptance, [B, T, H, K]. Any B >= 0, T >= 0 and H >= 0.
      w: decay, [B, T, H, K], in the form that `decay` names.
      k: key, [B, T, H, K].
      v: value, [B, T, H, V].
      a: what each token reads from the state, [B, T, H, K].
      b: where what was read is written back, [B, T, H, K].
      initial_state: [B, H, V, K], float32; zeros if None. (flash-linear-attention keeps the
        transpose, [B, H, K, V].)
      segment_ids: integers [B, T] that say which tokens of a row belong together. A segment is a
        run of tokens with the same id; the id 0 is padding. The first segment of a row continues
        from `initial_state`, every other segment starts from the state before any token, and the
        final state is the state after the last segment. Padding changes no state, and its `y` and
        its gradients are 0.
      cu_seqlens: int32 [S + 1], for S sequences of different lengths in a single row, B = 1:
        the sequence s has the tokens from `cu_seqlens[s]` to `cu_seqlens[s + 1]`, none if the two
        are equal, and states of its own, so `initial_state` and the final state are [S, H, V, K].
        Offsets that do not go from 0 to T, or that decrease, raise a ValueError where their values
        are known when the call is traced; otherwise they are clamped, and tokens of no sequence
        have a `y` and gradients of 0. It excludes `segment_ids`.
      slots: int32 [B], or [S] with `cu_seqlens`: rows of a pool of states [P, ...], which
        `initial_state` then is. The pool is returned with these rows replaced, in place where it
        is donated. A row or sequence with a slot below 0 is not active: its `y` is 0. A slot that
        the pool does not have, or that is there twice, raises a ValueError where slots are known
        when the call is traced. Otherwise a row whose slot the pool does not have is not active,
        and of several rows with the same slot the last one is kept.
      decay: what `w` is. "log": the log decay itself, <= 0, so d = exp(w). "exp": d = exp(-exp(w)).
        "sigmoid", the form of RWKV-7: d = exp(-exp(-1/2) sigmoid(w)). Any finite `w` is accepted; a
        decay that underflows to 0 clears its channel.
      precision: as `jax.lax.Precision`. HIGHEST computes in float32 throughout; the default may use
        matrix units in lower precision with float32 accumulation.
      implementation: "ffi" (native kernels on CPU and CUDA), "pallas" (Pallas kernels on CUDA and
        TPU), "xla", or "reference" (one `lax.scan` step, differentiable any number of times and in
        forward mode). None takes the first of ffi, pallas (on CUDA alone) and xla that can run
        where the program is lowered.

    `r`, `w`, `k`, `v`, `a`, `b` share one dtype: float32, bfloat16 or float16. The state is always
    float32 and so is all accumulation.

    Returns:
      `y` [B, T, H, V] in the dtype of `v`, and the final state [B, H, V, K] in float32. Both are
      differentiable once in reverse mode, with respect to all seven array arguments.

    Raises:
      TypeError: an argument is not an array, or has a dtype that is not accepted or not shared.
      ValueError: an argument has a wrong rank or size, or an option is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why. If
        only the platform is at fault, this is raised when the program is lowered.
    """
    return run(wkv7, locals())


@public(OPERATOR, is_step=True)
def wkv7_step(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    state: Operand,
    *,
    slots: Operand | None = None,
    decay: Decay = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """One token of `wkv7`, for decoding.

    The arguments are those of `wkv7` without the time axis: `r`, `w`, `k`, `a`, `b` are [B, H, K],
    `v` is [B, H, V] and `state` [B, H, V, K] is float32. Where the caller donates `state`, the
    native kernels update it in place.

    With `slots` as in `wkv7`, `state` is a pool, which the caller donates.

    Returns:
      `y` [B, H, V] in the dtype of `v`, and the next state. Equal to `wkv7` on one token,
      derivatives included.

    Raises:
      TypeError, ValueError, NotImplementedError: as `wkv7`.
    """
    return run(wkv7_step, locals())
