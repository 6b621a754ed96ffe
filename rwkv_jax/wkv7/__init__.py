"""WKV7, the time mixing of RWKV-7 "Goose"."""

from jax import Array

from rwkv_jax._operator.operator import public
from rwkv_jax._portable.decay import Decay
from rwkv_jax._typing import Operand, Precision
from rwkv_jax.wkv7.operator import OPERATOR as OPERATOR


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
    decay: Decay,
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    r"""The recurrence of RWKV-7 over whole sequences.

    For each head, with the state S a [V, K] matrix that starts as `initial_state`:

        S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    In the model, `a` is minus the normalised removal key and `b` that key times the in-context
    learning rate; the operator takes any `a` and `b`. Source: "RWKV-7 Goose with Expressive Dynamic
    State Evolution" (arXiv:2503.14456), and the official CUDA kernels of RWKV-LM, with whose state
    layout and (for "sigmoid", their `clampw` form) decay this function agrees.

    Args:
      r: receptance, [B, T, H, K].
      w: decay, [B, T, H, K], in the form that `decay` names.
      k: key, [B, T, H, K].
      v: value, [B, T, H, V].
      a: what each token reads from the state, [B, T, H, K].
      b: where what was read is written back, [B, T, H, K].
      initial_state: [B, H, V, K], float32; zeros if None. (flash-linear-attention keeps the
        transpose, [B, H, K, V].)
      decay: what `w` is. "log": the log decay itself, <= 0, so d = exp(w). "exp": d = exp(-exp(w)).
        "sigmoid", the form of RWKV-7: d = exp(-exp(-1/2) sigmoid(w)).
      segment_ids: integers [B, T], the same for consecutive tokens that belong together, such as
        those of a document; 0 is padding.
      cu_seqlens: int32 [S + 1], the offsets of S sequences that lie one after another in a single
        row. States are then [S, H, V, K].
      precision: "default", "high", "highest" or a `jax.lax.Precision`; if None, "default".
      implementation: the name of an implementation; if None, the first that can run.

    `help(rwkv_jax)` describes in full what all operators share: these options, the dtypes and the
    errors.

    Returns:
      `y` [B, T, H, V] in the dtype of `v`, and the final state [B, H, V, K] in float32. Both are
      differentiable once in reverse mode, with respect to all seven array arguments.
    """
    inputs = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    return OPERATOR.sequence(
        inputs, initial_state, segment_ids, cu_seqlens, decay, precision, implementation
    )


@public(OPERATOR)
def wkv7_step(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    state: Operand,
    *,
    decay: Decay,
    active: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """One token of `wkv7`, for decoding.

    The arguments are those of `wkv7` without the time axis: `r`, `w`, `k`, `a`, `b` are [B, H, K],
    `v` is [B, H, V] and `state` [B, H, V, K] is float32. Where the caller donates `state`, the
    native kernels update it in place.

    `active` are booleans [B]: a row where it is False has no token. Its `y` is 0, and its state
    stays as it is. If None, every row has one.

    Returns:
      `y` [B, H, V] in the dtype of `v`, and the next state. Equal to `wkv7` on one token,
      derivatives included.
    """
    inputs = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    return OPERATOR.step(inputs, state, active, decay, precision, implementation)
