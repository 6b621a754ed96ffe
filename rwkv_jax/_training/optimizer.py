"""The optimizer. This module needs optax, but no framework of layers."""

import argparse
import functools
from typing import Any

import jax
import optax

from rwkv_jax._training.clipping import clipped
from rwkv_jax.models import rwkv7


def make_optimizer(args: argparse.Namespace, devices: int = 1) -> optax.GradientTransformation:
    """AdamW as in the official training: some parameters decay, some learn faster, and the learning
    rate starts at a hundredth of its peak. `devices` is the size of the mesh that has the
    parameters."""
    schedule = optax.warmup_cosine_decay_schedule(
        args.learning_rate / 100,
        args.learning_rate,
        args.warmup,
        max(args.steps, args.warmup + 1),
        args.learning_rate / 20,
    )
    clip = optax.clip_by_global_norm(1.0)
    if devices == 1:  # else each device would get the whole of the gradients that `clipped` joins
        clip = optax.stateless(lambda updates, _: clipped(updates, 1.0))
    return optax.chain(
        clip,
        optax.scale_by_adam(0.9, 0.99, eps=1e-18),
        optax.add_decayed_weights(args.weight_decay, rwkv7.weight_decays),
        optax.stateless(functools.partial(_faster, _factor_of_states(args))),
        optax.scale_by_learning_rate(schedule),
    )


def _faster(of_states: float, updates: Any, _: Any) -> Any:
    """The updates times the factors of the learning rate, most of which are 1, and that of tuned
    states."""
    factors = rwkv7.learning_rates(updates)
    if of_states != 1 and getattr(updates, "states", None) is not None:
        factors = factors._replace(states=jax.tree.map(lambda _: of_states, updates.states))
    return jax.tree.map(lambda x, factor: x if factor == 1 else x * factor, updates, factors)


def _factor_of_states(args: argparse.Namespace) -> float:
    """The learning rate of tuned states relative to that of all else."""
    own = getattr(args, "states_learning_rate", None)
    return own / args.learning_rate if own is not None and args.learning_rate else 1.0


def updated(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """The next parameters, and the next state of the optimizer."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state
