"""The cross entropy: its arguments and options."""

from typing import Literal

from jax import Array

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand, Precision
from rwkv_jax.losses import _arguments, _derivative
from rwkv_jax.losses._options import Axis


def cross_entropy(
    hidden_states: Operand,
    weight: Operand,
    targets: Operand,
    *,
    mask: Operand | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    z_loss: float = 0.0,
    l2_wrap: float = 0.0,
    soft_cap: float | None = None,
    recompute: bool = False,
    chunk_size: int | None = None,
    axis_name: Axis = None,
    precision: Precision = None,
) -> Array:
    r"""The cross entropy of a language model, without the logits of all tokens at once.

    With the logits z = W x of a token, of its hidden states x and the weight W of the head, and
    with the target y, the loss of the token is

        log_sum - z_y + z_loss log_sum^2,   log_sum = log sum_v exp(z_v)

    Args:
      hidden_states: [..., C], what the head makes logits of, such as `rwkv7.hidden_states` returns;
        float32, bfloat16 or float16. The products are computed from operands of this dtype, with
        float32 sums. Everything else is float32.
      weight: the weight of the head, [vocabulary, C], in one of these dtypes. It is cast to the
        dtype of the hidden states. Its gradient is summed in float32, so that a weight in float32
        gets a gradient that was not rounded to 16 bits.
      targets: integers [...], the token to be predicted at each place. The loss of a target outside
        the vocabulary is NaN.
      mask: booleans [...], which tokens count; all if None. A token that does not count has a loss
        and gradients of 0, whatever its target is and even if its hidden states are NaN. Numbers of
        at least 0 in float32 are weights: the loss of a token is multiplied by its weight, and a
        token of the weight 0 does not count. There are no gradients of weights.
      reduction: "mean" over the tokens that count, which is 0 if there are none, or the sum of the
        weighted losses divided by that of the weights; "sum" of them; or "none", the loss of each
        token.
      z_loss: the weight of log_sum^2, which keeps the logits from drifting; 1e-4 is usual.
      l2_wrap: adds the gradient of l2_wrap / 2 * max(z)^2 to that of a token's loss, but not the
        value. RWKV-LM trains with 1e-4.
      soft_cap: if it is c, the logits are c tanh(W x / c).
      recompute: whether the backward pass computes the logits again. Otherwise the gradients are
        computed in the forward pass, together with the loss, and kept: [..., C] and
        [vocabulary, C] in float32. That takes three products of the size of the head instead of
        four. With "none" the logits are always computed again, because the gradient of the weight
        depends on the cotangent of each token.
      chunk_size: how many tokens have logits in memory at once, at most. If None, so many that
        their logits take 1 GiB in float32 on each device.
      axis_name: inside a `shard_map`, the mesh axes along which the vocabulary is distributed, in
        this order. `weight` is then this device's part of the rows, and `targets` still are places
        in the whole vocabulary.
      precision: "default", "high", "highest" or a `jax.lax.Precision`; if None,
        `jax.default_matmul_precision` applies.

    Without `shard_map` tokens and vocabulary may be distributed over Auto or Explicit meshes. No
    device then gathers logits. Inside a `shard_map` the tokens are those of this device: for the
    mean over all devices, divide the "sum" that `lax.psum` makes of theirs by the number of tokens.

    Returns:
      The loss in nats, float32: a scalar, or [...] with "none". It is differentiable once in
      reverse mode, with respect to `hidden_states` and `weight`. `vmap` computes one call after
      another.

    Raises:
      TypeError, ValueError: an argument has a wrong type, dtype, shape or value.
    """
    op = "cross_entropy"
    operands = _arguments.operands(op, hidden_states, weight, targets, mask)
    check.choice(op, "reduction", reduction, ("mean", "sum", "none"))
    options = _arguments.options(
        op,
        z_loss=z_loss,
        l2_wrap=l2_wrap,
        soft_cap=soft_cap,
        chunk_size=chunk_size,
        precision=precision,
    )
    axis = _arguments.axis(op, axis_name)
    if reduction == "none":
        return _derivative.losses(options, axis, operands)
    total = _derivative.total(options, axis, operands, recompute=recompute)
    if reduction == "sum":
        return total
    return total / _arguments.count(mask, targets.size)
