"""WKV6, the time mixing of RWKV-6 "Finch"."""

from typing import Literal

from jax import Array

from rwkv_jax._operator.operator import public
from rwkv_jax._typing import Operand, Precision
from rwkv_jax.wkv6.operator import OPERATOR as OPERATOR


@public(OPERATOR)
def wkv6(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    u: Operand,
    initial_state: Operand | None = None,
    *,
    decay: Literal["log", "exp"],
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    r"""The recurrence of RWKV-6 over whole sequences.

    For each head, with the state S a [V, K] matrix that starts as `initial_state`:

        y_t = (S_{t-1} + v_t (u * k_t)^T) r_t
        S_t = S_{t-1} diag(d_t) + v_t k_t^T

    so that a token reads what the tokens before it have written, and itself with the weight `u`.
    Source: "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
    (arXiv:2404.05892), and the official CUDA kernels of RWKV-LM, with whose state layout and (for
    "exp") decay this function agrees.

    Args:
      r: receptance, [B, T, H, K].
      w: decay, [B, T, H, K], in the form that `decay` names.
      k: key, [B, T, H, K].
      v: value, [B, T, H, V].
      u: the bonus of the present token, [H, K].
      initial_state: [B, H, V, K], float32; zeros if None. (flash-linear-attention keeps the
        transpose, [B, H, K, V].)
      decay: what `w` is. "log": the log decay itself, <= 0, so d = exp(w). "exp", the form of the
        official kernels: d = exp(-exp(w)).
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
      differentiable once in reverse mode, with respect to all six array arguments. The gradients
      of `u` are sums over the batch, in an order that does not change.
    """
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    return OPERATOR.sequence(
        inputs, initial_state, segment_ids, cu_seqlens, decay, precision, implementation
    )


@public(OPERATOR)
def wkv6_step(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    u: Operand,
    state: Operand,
    *,
    decay: Literal["log", "exp"],
    active: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """One token of `wkv6`, for decoding.

    The arguments are those of `wkv6` without the time axis: `r`, `w`, `k` are [B, H, K], `v` is
    [B, H, V], `u` [H, K] and `state` [B, H, V, K] is float32.

    `active` are booleans [B]: a row where it is False has no token. Its `y` is 0, and its state
    stays as it is. If None, every row has one.

    Returns:
      `y` [B, H, V] in the dtype of `v`, and the next state. Equal to `wkv6` on one token,
      derivatives included.
    """
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    return OPERATOR.step(inputs, state, active, decay, precision, implementation)
