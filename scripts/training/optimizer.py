"""The optimizer. This module needs optax, but no framework of layers."""

import argparse
import operator

import jax
import optax

from rwkv_jax.models import rwkv7


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW as in the official training: some parameters decay, some learn faster, and the learning
    rate starts at a hundredth of its peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        args.learning_rate / 100,
        args.learning_rate,
        args.warmup,
        max(args.steps, args.warmup + 1),
        args.learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.99, eps=1e-18),
        optax.add_decayed_weights(args.weight_decay, rwkv7.weight_decays),
        optax.stateless(
            lambda updates, _: jax.tree.map(operator.mul, updates, rwkv7.learning_rates(updates))
        ),
        optax.scale_by_learning_rate(schedule),
    )
