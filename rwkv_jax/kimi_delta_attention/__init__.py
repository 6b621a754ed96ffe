"""Kimi Delta Attention, the time mixing of Kimi Linear."""

from jax import Array

from rwkv_jax._operator.operator import public
from rwkv_jax._typing import Operand, Precision
from rwkv_jax.kimi_delta_attention.operator import OPERATOR as OPERATOR


@public(OPERATOR)
def kimi_delta_attention(
    q: Operand,
    k: Operand,
    v: Operand,
    g: Operand,
    beta: Operand,
    initial_state: Operand | None = None,
    *,
    scale: float | None = None,
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    r"""Kimi Delta Attention over whole sequences: the delta rule with a decay for each key channel.

    For each head, with the state S a [V, K] matrix that starts as `initial_state`:

        S_t = S_{t-1} diag(exp(g_t)) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
        o_t = scale S_t q_t

    So a token decays the state, reads what it holds under `k_t`, and writes a share `beta_t` of the
    difference between `v_t` and what it has read.
    Source: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv:2510.26692).

    Args:
      q: queries, [B, T, G, K]. H is a multiple of G: each head of `q` and `k` serves H / G heads of
        `v` one after another.
      k: keys, [B, T, G, K], usually of unit length.
      v: values, [B, T, H, V].
      g: the log decay of each key channel, [B, T, H, K], <= 0. float32, or the dtype of the others.
      beta: how much of the error is written, [B, T, H], from 0 to 1, or to 2 where the transition
        of a state may have negative eigenvalues. float32, or the dtype of the others.
      initial_state: [B, H, V, K], float32; zeros if None. (flash-linear-attention keeps the
        transpose, [B, H, K, V].)
      scale: what the output is multiplied by; if None, K^(-1/2).
      segment_ids: integers [B, T], the same for consecutive tokens that belong together, such as
        those of a document; 0 is padding.
      cu_seqlens: int32 [S + 1], the offsets of S sequences that lie one after another in a single
        row. States are then [S, H, V, K].
      precision: "default", "high", "highest" or a `jax.lax.Precision`; if None, "default".
      implementation: the name of an implementation; if None, the first that can run.

    `help(rwkv_jax)` describes in full what all operators share: these options, the dtypes and the
    errors.

    Returns:
      The output `o` [B, T, H, V] in the dtype of `v`, and the final state [B, H, V, K] in float32.
      Both are differentiable once in reverse mode, with respect to all six array arguments.
    """
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return OPERATOR.sequence(
        inputs, initial_state, segment_ids, cu_seqlens, None, precision, implementation, scale
    )


@public(OPERATOR)
def kimi_delta_attention_step(
    q: Operand,
    k: Operand,
    v: Operand,
    g: Operand,
    beta: Operand,
    state: Operand,
    *,
    scale: float | None = None,
    active: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """One token of `kimi_delta_attention`, for decoding.

    The arguments are those of `kimi_delta_attention` without the time axis: `q` and `k` are
    [B, G, K], `v` is [B, H, V], `g` is [B, H, K], `beta` is [B, H], and `state` [B, H, V, K] is
    float32. Where the caller donates `state`, the native kernels update it in place.

    `active` are booleans [B]: a row where it is False has no token. Its `o` is 0, and its state
    stays as it is. If None, every row has one.

    Returns:
      `o` [B, H, V] in the dtype of `v`, and the next state. Equal to `kimi_delta_attention` on one
      token, derivatives included.
    """
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return OPERATOR.step(inputs, state, active, None, precision, implementation, scale)
