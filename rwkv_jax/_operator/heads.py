"""Heads that share keys: each of the G heads of an array serves H / G heads, one after another."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array


def check(op: str, axes: Mapping[str, str], inputs: Mapping[str, Any], y: str) -> None:
    """Raise an error unless the heads of the input `y` are a multiple of each G."""
    for name, letters in axes.items():
        if "G" not in letters:
            continue
        heads, groups = inputs[y].shape[-2], inputs[name].shape[-2]
        if groups != heads and (groups == 0 or heads % groups):
            raise ValueError(
                f"{op}: {name} has shape {inputs[name].shape}, so {groups} heads, where {y} has "
                f"{heads}; accepted are numbers of heads that divide {heads}"
            )


def repeated(x: Array, heads: int) -> Array:
    """[..., G, K] as [..., H, K]: each head once for all that it serves."""
    *rest, groups, size = x.shape
    if groups == heads:
        return x
    # Not `jnp.repeat`, which an Explicit mesh would have to be told of.
    each = jnp.broadcast_to(x[..., None, :], (*rest, groups, heads // groups, size))
    return each.reshape(*rest, heads, size)


def repeated_unless(
    enough: Callable[[int], bool], axes: Mapping[str, str], inputs: Mapping[str, Array], y: str
) -> dict[str, Array]:
    """The inputs, of which those with an axis G have the heads of `y` unless G heads are enough."""
    heads = inputs[y].shape[-2]
    return {
        name: repeated(x, heads) if "G" in axes[name] and not enough(x.shape[-2]) else x
        for name, x in inputs.items()
    }


def summed(x: Array, groups: int) -> Array:
    """[..., H, K] as [..., G, K]: the derivative of `repeated`, with sums in float32."""
    *rest, heads, size = x.shape
    if groups == heads:
        return x
    each = x.reshape(*rest, groups, heads // groups, size)
    return jnp.sum(each, axis=-2, dtype=jnp.float32).astype(x.dtype)
