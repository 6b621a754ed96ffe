"""The optimizer. This module needs optax, but no framework of layers."""

import argparse
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from rwkv_jax._training.schedules import make_schedule
from rwkv_jax.models import rwkv7


class Scaled(NamedTuple):
    """The state of the learning rate: the number of steps so far, and the rate of the last one."""

    steps: Array
    learning_rate: Array


class Averaged(NamedTuple):
    """The number of steps so far, and the average of what is trained after each of them."""

    steps: Array
    average: Any


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW as in the official training, for gradients that are clipped: some parameters decay, and
    some learn faster. It changes each array by itself.

    The state has the average of what is trained, if the options ask for it, and what
    `learning_rate` and `average` read.
    """
    moments = jnp.bfloat16 if args.moments == "bfloat16" else None
    return optax.chain(
        optax.scale_by_adam(0.9, 0.99, eps=1e-18, mu_dtype=moments),
        optax.add_decayed_weights(args.weight_decay, rwkv7.weight_decays),
        optax.stateless(functools.partial(_faster, _factor_of_states(args))),
        _scaling(make_schedule(args)),
        *([_averaging(args.ema)] if args.ema else []),
    )


def _faster(of_states: float, updates: Any, _: Any) -> Any:
    """The updates times the factors of the learning rate, most of which are 1, and that of tuned
    states."""
    factors = rwkv7.learning_rates(updates)
    if getattr(updates, "states", None) is not None:
        factors = factors._replace(states=jax.tree.map(lambda _: of_states, updates.states))
    return jax.tree.map(lambda x, factor: x if factor == 1 else x * factor, updates, factors)


def _factor_of_states(args: argparse.Namespace) -> float:
    """The learning rate of tuned states relative to that of all else."""
    return args.states_learning_rate / args.learning_rate if args.learning_rate else 1.0


def _scaling(schedule: optax.Schedule) -> optax.GradientTransformation:
    def init(params: Any) -> Scaled:
        return Scaled(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rate = jnp.asarray(schedule(state.steps), jnp.float32)
        updates = jax.tree.map(lambda x: -rate * x, updates)
        return updates, Scaled(state.steps + 1, rate)

    return optax.GradientTransformation(init, update)


def _averaging(decay: float) -> optax.GradientTransformation:
    """The last part of an optimizer: averages the parameters after each step, with weights that are
    `decay` times as large with each step back and have the sum 1.

    After t steps the newest parameters have the weight (1 - decay) / (1 - decay^t).
    """
    log = math.log(decay)

    def init(params: Any) -> Averaged:
        return Averaged(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps = state.steps + 1
        newest = math.expm1(log) / jnp.expm1(log * steps.astype(jnp.float32))
        params = optax.apply_updates(params, updates)
        return updates, Averaged(steps, optax.incremental_update(params, state.average, newest))

    return optax.GradientTransformation(init, update)


def updated(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """The next parameters, and the next state of the optimizer."""
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def learning_rate(state: Any) -> Array:
    """That of the last step, from the state after it; 0 where an optimizer keeps none."""
    return optax.tree.get(state, "learning_rate", jnp.zeros((), jnp.float32))


def average(state: Any) -> Any:
    """The average of what is trained in a state of the optimizer, or None without --ema."""
    return optax.tree.get(state, "average")
