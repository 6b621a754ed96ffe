"""The forms in which `w` gives a decay, as a log decay in float32.

The native kernels have the same forms and constants (ffi/include/rwkv_jax/types.h)."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

Decay: TypeAlias = Literal["log", "exp", "sigmoid"]

MIN_LOG_DECAY = -200.0
"""exp(-200) is 0 in float32, so flooring a log decay here changes no value and keeps every
derivative finite."""

SIGMOID_SCALE = 0.6065306597126334
"""exp(-1/2), the largest decay rate of RWKV-7."""


def _log(w: Array) -> Array:
    return jnp.where(w < MIN_LOG_DECAY, MIN_LOG_DECAY, w)


def _exp(w: Array) -> Array:
    largest = jnp.log(-MIN_LOG_DECAY)
    return -jnp.exp(jnp.where(w > largest, largest, w))


@jax.custom_jvp
def _logistic(w: Array) -> Array:
    return jax.nn.sigmoid(w)


# JAX has 1 - sigmoid(w), which has lost its digits where decays are strong.
_logistic.defjvps(lambda dw, result, w: dw * result * jax.nn.sigmoid(-w))


def _sigmoid(w: Array) -> Array:
    return -SIGMOID_SCALE * _logistic(w)


LOG_DECAY: dict[str, Callable[[Array], Array]] = {"log": _log, "exp": _exp, "sigmoid": _sigmoid}
"""The log decay of each form. Comparisons, not clips: a NaN stays a NaN."""

NO_DECAY = {"log": 0.0, "exp": -1e4, "sigmoid": -1e4}
"""A number of each form whose log decay is 0, exactly."""

BOUNDED = ("sigmoid",)
"""Forms whose log decay is never below -SIGMOID_SCALE, so that one may divide by the decay of up to
32 tokens."""


def decay_factor(w: Array, decay: Decay) -> Array:
    """The factor by which a state channel shrinks, in float32."""
    return jnp.exp(LOG_DECAY[decay](w.astype(jnp.float32)))


LARGEST_RATE = 1e30


def unbounded_log_decay(w: Array, decay: Decay) -> Array:
    """The log decay in float32 where it is not only exponentiated, but compared and added to other
    exponents, so that one below MIN_LOG_DECAY is not as good as another. Finite for a finite w."""
    w = w.astype(jnp.float32)
    if decay == "log":
        return w
    largest = jnp.log(LARGEST_RATE)
    return -jnp.exp(jnp.where(w > largest, largest, w))
