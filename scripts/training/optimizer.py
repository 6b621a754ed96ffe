"""The optimizer. This module needs optax, but no framework of layers."""

import argparse
from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from training.sizes import rank


def name_of(path: jax.tree_util.KeyPath) -> str:
    """The name of the array at `path`, as in `blocks.0.att.receptance.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW as in the official training: matrices decay, `w0` learns at twice the rate, and the
    learning rate starts at a hundredth of its peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        args.learning_rate / 100,
        args.learning_rate,
        args.warmup,
        max(args.steps, args.warmup + 1),
        args.learning_rate / 20,
    )

    def where(
        condition: Callable[[str, jax.Array], bool],
    ) -> Callable[[PyTree[jax.Array]], PyTree[bool]]:
        def mask(params: PyTree[jax.Array]) -> PyTree[bool]:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: condition(name_of(path), x), params
            )

        return mask

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.99, eps=1e-18),
        optax.add_decayed_weights(
            args.weight_decay, where(lambda name, x: "weight" in name and rank(name, x) == 2)
        ),
        optax.masked(optax.scale(2.0), where(lambda name, x: "w0" in name)),
        optax.scale_by_learning_rate(schedule),
    )
