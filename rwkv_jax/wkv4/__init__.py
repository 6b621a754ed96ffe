"""WKV4, the time mixing of RWKV-4 "Dove"."""

from typing import Literal

from jax import Array

from rwkv_jax._native.kernels import NativeKernels
from rwkv_jax._operator.operator import Operator, public
from rwkv_jax._typing import Operand, Precision
from rwkv_jax.wkv4 import reference, xla
from rwkv_jax.wkv4.signature import SIGNATURE
from rwkv_jax.wkv4.signature import Wkv4State as Wkv4State
from rwkv_jax.wkv4.transition import TRANSITION

OPERATOR = Operator(
    SIGNATURE,
    TRANSITION,
    implementations={
        "ffi": NativeKernels(SIGNATURE, has_transitions=False),
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
    decay: Literal["log", "exp"],
    segment_ids: Operand | None = None,
    cu_seqlens: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Wkv4State]:
    r"""The recurrence of RWKV-4 over whole sequences: a mean of values, with weights that decay.

    For each channel, with the log decay w <= 0:

        y_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t)
              / (sum_{i<t} e^{(t-1-i) w + k_i} + e^{u + k_t})

    and, if there is an initial state, its two sums before the first token. Source: "RWKV:
    Reinventing RNNs for the Transformer Era" (arXiv:2305.13048), and the official CUDA kernels of
    RWKV-LM.

    Args:
      w: decay, the same for all tokens, [C], in the form that `decay` names.
      u: the bonus of the present token, [C].
      k: key, [B, T, C]. Any finite value.
      v: value, [B, T, C].
      initial_state: as `Wkv4State`; that of no tokens if None.
      decay: what `w` is. "log": the log decay itself, <= 0. "exp", the parameter of the official
        models: the log decay is -exp(w).
      segment_ids: integers [B, T], the same for consecutive tokens that belong together, such as
        those of a document; 0 is padding.
      cu_seqlens: int32 [S + 1], the offsets of S sequences that lie one after another in a single
        row. States are then arrays [S, C].
      precision: "default", "high", "highest" or a `jax.lax.Precision`; if None, "default".
      implementation: the name of an implementation; if None, the first that can run.

    `help(rwkv_jax)` describes in full what all operators share: these options, the dtypes and the
    errors.

    Returns:
      `y` [B, T, C] in the dtype of `v`, and the final state, whose `log_max` is the largest
      exponent so far. Both are differentiable once in reverse mode, with respect to all arguments.
      The gradients of `w` and `u` are sums over the batch, in an order that does not change.
    """
    inputs = {"w": w, "u": u, "k": k, "v": v}
    return OPERATOR.sequence(
        inputs, initial_state, segment_ids, cu_seqlens, decay, precision, implementation
    )


@public(OPERATOR)
def wkv4_step(
    w: Operand,
    u: Operand,
    k: Operand,
    v: Operand,
    state: Wkv4State,
    *,
    decay: Literal["log", "exp"],
    active: Operand | None = None,
    precision: Precision = None,
    implementation: str | None = None,
) -> tuple[Array, Wkv4State]:
    """One token of `wkv4`, for decoding.

    The arguments are those of `wkv4` without the time axis: `k` and `v` are [B, C].

    `active` are booleans [B]: a row where it is False has no token. Its `y` is 0, and its state
    stays as it is. If None, every row has one.

    Returns:
      `y` [B, C] in the dtype of `v`, and the next state. Equal to `wkv4` on one token, derivatives
      included.
    """
    inputs = {"w": w, "u": u, "k": k, "v": v}
    return OPERATOR.step(inputs, state, active, decay, precision, implementation)
