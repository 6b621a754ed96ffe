"""What the backward pass of a model keeps of the forward pass, and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
from jax.ad_checkpoint import checkpoint_name

from rwkv_jax._operator.operator import KEPT
from rwkv_jax.layers import read_out, value_residual, wkv7_keys
from rwkv_jax.layers._products import PRODUCT

Recompute: TypeAlias = Literal["mixes", "cheap", "blocks"]
ACCEPTED = (None, *get_args(Recompute))

KEPT_BY_MIXES = "kept by mixes"
"""The name of what "mixes" keeps and "cheap" does not, but for results of layer functions, which
have the names of their functions."""

LAYERS = tuple(f.__name__ for f in (read_out, value_residual, wkv7_keys))
"""The layer functions whose results "mixes" keeps."""


def product(x: jax.Array) -> jax.Array:
    """`x`, which a product gave, so that "cheap" keeps it."""
    return checkpoint_name(x, PRODUCT)


def save_under_mixes(x: jax.Array) -> jax.Array:
    """`x`, so that "mixes" keeps it."""
    return checkpoint_name(x, KEPT_BY_MIXES)


def recomputed(
    block: Callable[..., Any], recompute: Recompute | None, *, scanned: bool = False
) -> Callable[..., Any]:
    """`block` with a backward pass that computes again what `recompute` says. `scanned` says that
    it is the body of a scan."""
    policies = {
        "mixes": jax.checkpoint_policies.save_only_these_names(
            PRODUCT, KEPT, KEPT_BY_MIXES, *LAYERS
        ),
        "cheap": jax.checkpoint_policies.save_only_these_names(PRODUCT, KEPT),
        "blocks": jax.checkpoint_policies.nothing_saveable,
    }
    if recompute is None:
        return block
    # In a scan the forward and the backward pass are two loops, which the compiler cannot merge.
    return jax.checkpoint(block, policy=policies[recompute], prevent_cse=not scanned)
