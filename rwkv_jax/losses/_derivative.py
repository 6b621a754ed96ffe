"""The losses of tokens and their sum, with derivatives.

The sum computes its gradients in the forward pass, where the logits are, and its backward pass only
scales them. Losses of tokens have a cotangent each, which scales the gradient of the token's logits
before the gradient of the weight is summed over tokens. So their backward pass computes the logits
again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Integer

from rwkv_jax.losses import _slabs
from rwkv_jax.losses._options import Axis, Options
from rwkv_jax.losses._partition import Axes, alike, distributed
from rwkv_jax.losses._slabs import Gradients, Statistics, Tokens


class Operands(NamedTuple):
    """The arrays of a call. `mask` says which tokens count."""

    features: Float[Array, "*shape C"]
    weight: Float[Array, "vocabulary C"]
    targets: Integer[Array, "*shape"]
    mask: Bool[Array, "*shape"]


def losses(options: Options, axis: Axis, operands: Operands) -> Float32[Array, "*shape"]:
    """The loss of each token, 0 where it does not count."""
    operands = _prepared(axis, operands)
    return _over_devices(axis, _of_tokens(options, axis, operands))


def total(
    options: Options, axis: Axis, operands: Operands, *, recompute: bool
) -> Float32[Array, ""]:
    """The sum of the losses."""
    if recompute:
        return jnp.sum(losses(options, axis, operands))
    operands = _prepared(axis, operands)
    return _over_devices(axis, _total(options, axis, operands))


def _prepared(axis: Axis, operands: Operands) -> Operands:
    return Operands(*alike(operands, _operand_axes(operands), axis))


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

    def local(axis: Axis, *operands: Array) -> tuple[Array]:
        tokens, weight = _taken_apart(operands)
        losses, _ = _slabs.losses(options, axis, tokens, weight)
        return (jnp.sum(losses),)

    (found,) = distributed(local, axis, operands, _operand_axes(operands), [Axes("", summed="t")])
    return _once(axis, found)


class _Saved(NamedTuple):
    """The gradients of the sum. `features` and `weight` have the dtypes of the operands."""

    gradients: Gradients
    features: Float[Array, ""]
    weight: Float[Array, ""]


def _total_forward(
    options: Options, axis: Axis, operands: Operands
) -> tuple[Float32[Array, ""], _Saved]:
    def local(axis: Axis, *operands: Array) -> tuple[Array, ...]:
        found, gradients = _slabs.total_and_gradients(options, axis, *_taken_apart(operands))
        return found, *gradients

    axes = [Axes("", summed="t"), *_gradient_axes(operands)]
    found, *gradients = distributed(local, axis, operands, _operand_axes(operands), axes)
    dtypes = (jnp.zeros((), x.dtype) for x in (operands.features, operands.weight))
    return _once(axis, found), _Saved(Gradients(*gradients), *dtypes)


def _total_backward(
    options: Options, axis: Axis, saved: _Saved, cotangent: Float32[Array, ""]
) -> tuple[Operands]:
    return (
        Operands(
            (saved.gradients.features * cotangent).astype(saved.features.dtype),
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
    def local(axis: Axis, *operands: Array) -> tuple[Array, ...]:
        losses, statistics = _slabs.losses(options, axis, *_taken_apart(operands))
        return losses, *statistics

    axes = _operand_axes(operands)
    losses, *statistics = distributed(local, axis, operands, axes, [axes[2]] * 4)
    return _once(axis, losses), (operands, Statistics(*statistics))


def _of_tokens_backward(
    options: Options,
    axis: Axis,
    saved: tuple[Operands, Statistics],
    cotangents: Float32[Array, "*shape"],
) -> tuple[Operands]:
    operands, statistics = saved
    count = len(operands)

    def local(axis: Axis, *arrays: Array) -> tuple[Array, ...]:
        cotangents, *statistics = arrays[count:]
        tokens, weight = _taken_apart(arrays[:count])
        tokens = tokens._replace(scale=jnp.where(tokens.scale == 0, 0.0, cotangents))
        return tuple(_slabs.gradients(options, axis, tokens, weight, Statistics(*statistics)))

    axes = _operand_axes(operands)
    features, weight = distributed(
        local,
        axis,
        (*operands, cotangents, *statistics),
        (*axes, *[axes[2]] * 4),
        _gradient_axes(operands),
    )
    features = features.astype(operands.features.dtype)
    return (Operands(features, weight.astype(operands.weight.dtype), *_NONE),)


_of_tokens.defvjp(_of_tokens_forward, _of_tokens_backward)

_NONE: tuple[Any, Any] = (None, None)
"""The cotangents of `targets` and `mask`."""


def _operand_axes(operands: Operands) -> tuple[Axes, ...]:
    tokens = "t" * operands.targets.ndim
    return Axes(f"{tokens}c"), Axes("vc"), Axes(tokens), Axes(tokens)


def _gradient_axes(operands: Operands) -> tuple[Axes, ...]:
    """Each device has the gradients of its tokens and of its part of the vocabulary."""
    features, weight, _, _ = _operand_axes(operands)
    return Axes(features.letters, summed="v"), Axes(weight.letters, summed="t")


def _taken_apart(operands: Sequence[Array]) -> tuple[Tokens, Array]:
    features, weight, targets, mask = operands
    # NaN would stay NaN in the gradient of the weight, even multiplied by 0.
    features = jnp.where(mask[..., None], features, 0.0)
    return Tokens(features, targets, mask.astype(jnp.float32)), weight
