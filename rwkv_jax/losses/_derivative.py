"""The losses of tokens and their sum, with derivatives.

The sum computes its gradients in the forward pass, where the logits are, and its backward pass only
scales them. Losses of tokens have a cotangent each, which scales the gradient of the token's logits
before the gradient of the weight is summed over tokens. So their backward pass computes the logits
again.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, Integer

from rwkv_jax._operator.dispatch import Computation, Pass, run
from rwkv_jax._operator.partition import Shards, match_shardings
from rwkv_jax.losses import _chunks
from rwkv_jax.losses._chunks import Gradients, Statistics, Tokens
from rwkv_jax.losses._options import Axis, Options

TOKENS = "abdefghijklmnopqrstu"
"""A letter for each axis of tokens. V is the vocabulary, as `v`, and C the channels, as `c`."""

SHARDED = f"{TOKENS}v"
"""Devices compute their own tokens with their own part of the weight. Channels are gathered first,
and so are parts of the vocabulary along mesh axes that distribute tokens as well. Then devices
exchange a few numbers for each token, and sums of losses and of gradients."""


class Operands(NamedTuple):
    """The arrays of a call. `mask` says which tokens count, or how much each of them does."""

    hidden_states: Float[Array, "*shape C"]
    weight: Float[Array, "vocabulary C"]
    targets: Integer[Array, "*shape"]
    mask: Bool[Array, "*shape"] | Float32[Array, "*shape"]


def losses(options: Options, axis: Axis, operands: Operands) -> Float32[Array, "*shape"]:
    """The loss of each token, 0 where it does not count."""
    operands = _prepared(axis, operands)
    return _over_devices(axis, _of_tokens(options, axis, operands))


def predictions(
    operands: Operands,
) -> tuple[Float32[Array, "*shape"], Int32[Array, "*shape"]]:
    """The loss of each token, 0 where it does not count, and the token with the largest logit, of
    several the first. There are no derivatives."""
    # With this term, which is none of the loss, the place of the largest logit is computed.
    options = Options(l2_wrap=1.0)
    operands = _prepared(None, operands)
    found, statistics = run(_Loss("losses", None), "forward", options, operands)
    return found, statistics.largest_at


def total(
    options: Options, axis: Axis, operands: Operands, *, recompute: bool
) -> Float32[Array, ""]:
    if recompute:
        return jnp.sum(losses(options, axis, operands))
    operands = _prepared(axis, operands)
    return _over_devices(axis, _total(options, axis, operands))


def _prepared(axis: Axis, operands: Operands) -> Operands:
    return Operands._make(match_shardings(_axes(operands), *operands, axis=axis, sharded=SHARDED))


def _axes(operands: Operands) -> Any:
    tokens = TOKENS[: operands.targets.ndim]
    return Operands._make((f"{tokens}c", "vc", tokens, tokens))


@dataclass(frozen=True)
class _Loss(Computation):
    """What devices compute of their tokens: the loss of each, or the sum of all, or gradients.
    `axis` are the mesh axes of the vocabulary inside a `shard_map` of the caller, where results are
    not summed over devices."""

    what: Literal["losses", "gradients", "total", "total and gradients"]
    axis: Axis

    name = "cross_entropy"
    implementations = ("xla",)
    sharded = SHARDED
    vmap: ClassVar = "in turn"
    higher_derivatives = "losses in plain JAX, such as those of jax.nn.log_softmax, have all others"

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        if self.what == "gradients":
            axes = _axes(operands[0])
            return (axes, axes.targets, Statistics(*[axes.targets] * 3)), _axes_of_gradients(axes)
        axes = _axes(operands)
        if self.what == "losses":
            return axes, (axes.targets, Statistics(*[axes.targets] * 3))
        total = f"+{axes.targets}"
        return axes, total if self.what == "total" else (total, _axes_of_gradients(axes))

    def implementation(
        self, name: Pass, choice: str, options: Options, platform: str, shards: Shards
    ) -> Callable[[Any], Any]:
        return functools.partial(self._local, options, shards.get("v") or self.axis)

    def _local(self, options: Options, axis: Axis, operands: Any) -> Any:
        """What one device computes, whose parts of the vocabulary are along `axis`."""
        if self.what == "gradients":
            operands, cotangents, statistics = operands
            tokens, weight = _taken_apart(operands)
            scale = jnp.where(tokens.scale == 0, 0.0, tokens.scale * cotangents)
            tokens = tokens._replace(scale=scale)
            return _chunks.gradients(options, axis, tokens, weight, statistics)
        tokens, weight = _taken_apart(operands)
        if self.what == "total and gradients":
            losses, gradients = _chunks.losses_and_gradients(options, axis, tokens, weight)
            return jnp.sum(losses), gradients
        losses, statistics = _chunks.losses(options, axis, tokens, weight)
        return jnp.sum(losses) if self.what == "total" else (losses, statistics)


def _axes_of_gradients(axes: Any) -> Any:
    """Each device has the gradients of its tokens and of its part of the vocabulary."""
    return Gradients._make((f"{axes.hidden_states}+v", f"{axes.weight}+{axes.targets}"))


def _once(axis: Axis, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """`x` on the first device along `axis`, and zeros on the others.

    The sum over these devices, outside the derivatives, is `x`. So its transpose hands the whole
    cotangent of `x` to each of them, with `check_vma` and without.
    """
    return x if axis is None else jnp.where(lax.axis_index(axis) == 0, x, 0.0)


def _over_devices(axis: Axis, x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return x if axis is None else lax.psum(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(options: Options, axis: Axis, operands: Operands) -> Float32[Array, ""]:
    """The sum of the losses, on the first device along `axis`."""
    options = dataclasses.replace(options, l2_wrap=0.0)
    return _once(axis, run(_Loss("total", axis), "forward", options, operands))


class _Saved(NamedTuple):
    """The gradients of the sum. `hidden_states` and `weight` have the dtypes of the operands."""

    gradients: Gradients
    hidden_states: Float[Array, ""]
    weight: Float[Array, ""]


def _total_forward(
    options: Options, axis: Axis, operands: Operands
) -> tuple[Float32[Array, ""], _Saved]:
    both = run(_Loss("total and gradients", axis), "forward", options, operands)
    found, gradients = both
    dtypes = (jnp.zeros((), x.dtype) for x in (operands.hidden_states, operands.weight))
    return _once(axis, found), _Saved(gradients, *dtypes)


def _total_backward(
    options: Options, axis: Axis, saved: _Saved, cotangent: Float32[Array, ""]
) -> tuple[Operands]:
    return (
        Operands(
            (saved.gradients.hidden_states * cotangent).astype(saved.hidden_states.dtype),
            (saved.gradients.weight * cotangent).astype(saved.weight.dtype),
            *_NONE,
        ),
    )


_total.defvjp(_total_forward, _total_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_tokens(options: Options, axis: Axis, operands: Operands) -> Float32[Array, "*shape"]:
    """The loss of each token, on the first device along `axis`."""
    options = dataclasses.replace(options, l2_wrap=0.0)
    return _of_tokens_forward(options, axis, operands)[0]


def _of_tokens_forward(
    options: Options, axis: Axis, operands: Operands
) -> tuple[Float32[Array, "*shape"], tuple[Operands, Statistics]]:
    losses, statistics = run(_Loss("losses", axis), "forward", options, operands)
    return _once(axis, losses), (operands, statistics)


def _of_tokens_backward(
    options: Options,
    axis: Axis,
    saved: tuple[Operands, Statistics],
    cotangents: Float32[Array, "*shape"],
) -> tuple[Operands]:
    operands, statistics = saved
    of_tokens = _Loss("gradients", axis)
    found = run(of_tokens, "backward", options, (operands, cotangents, statistics))
    hidden_states = found.hidden_states.astype(operands.hidden_states.dtype)
    return (Operands(hidden_states, found.weight.astype(operands.weight.dtype), *_NONE),)


_of_tokens.defvjp(_of_tokens_forward, _of_tokens_backward)

_NONE: tuple[Any, Any] = (None, None)
"""The cotangents of `targets` and `mask`."""


def _taken_apart(operands: Operands) -> tuple[Tokens, Array]:
    hidden_states, weight, targets, mask = operands
    # NaN would stay NaN in the gradient of the weight, even multiplied by 0.
    hidden_states = jnp.where(mask.astype(bool)[..., None], hidden_states, 0.0)
    return Tokens(hidden_states, targets, mask.astype(jnp.float32)), weight
