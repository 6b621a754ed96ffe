"""What the backward pass of a model keeps of the forward pass, and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from rwkv_jax._operator.derivative import KEPT
from rwkv_jax.layers.feed_forward import PRODUCT

Recompute: TypeAlias = Literal["mixes", "cheap", "blocks"]

MIX = "mix"
"""The name of the results of token shifts for `jax.checkpoint_policies`."""


def product(x: jax.Array) -> jax.Array:
    """`x`, which a product gave, so that "cheap" keeps it."""
    return checkpoint_name(x, PRODUCT)


def mix(x: jax.Array) -> jax.Array:
    """`x`, which a token shift gave, so that "mixes" does not keep it."""
    return checkpoint_name(x, MIX)


def recomputed(
    block: Callable[..., Any], recompute: Recompute | None, *, scanned: bool = False
) -> Callable[..., Any]:
    """`block` with a backward pass that computes again what `recompute` says. `scanned` says that
    it is the body of a scan.

    Raises:
      ValueError: `recompute` is none of its accepted values.
    """
    policies = {
        "mixes": jax.checkpoint_policies.save_anything_except_these_names(MIX),
        "cheap": jax.checkpoint_policies.save_only_these_names(PRODUCT, KEPT),
        "blocks": jax.checkpoint_policies.nothing_saveable,
    }
    if recompute is None:
        return block
    if recompute not in policies:
        raise ValueError(
            f"recompute is {recompute!r}; accepted are None, {', '.join(map(repr, policies))}"
        )
    # In a scan the forward and the backward pass are two loops, which the compiler cannot merge.
    return jax.checkpoint(block, policy=policies[recompute], prevent_cse=not scanned)
