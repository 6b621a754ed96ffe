"""The log probabilities of the tokens of a step."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float32, Int32

from rwkv_jax.models import _mesh


class LogProbs(NamedTuple):
    """What the model says of a token that was chosen: natural logarithms of probabilities, from the
    logits before penalties and all other settings of `Sampling`.

    Attributes:
      chosen: that of the token.
      likeliest: those of the most probable tokens by token, in descending order, and of equal ones
        the first token first.
    """

    chosen: float
    likeliest: dict[int, float]


class Steps(NamedTuple):
    """`LogProbs` of the rows of a step, or of several, as arrays."""

    chosen: Float32[Array, "*steps B"]
    tokens: Int32[Array, "*steps B n"]
    log_probs: Float32[Array, "*steps B n"]

    def of(self, step: int, row: int) -> LogProbs:
        """Those of a row in one of several steps."""
        place = step, row
        likeliest = zip(self.tokens[place].tolist(), self.log_probs[place].tolist(), strict=True)
        return LogProbs(float(self.chosen[place]), dict(likeliest))


def nothing(steps: int, rows: int, number: int) -> Steps:
    """Zeros for `number` tokens of each row in so many steps."""
    shape = (steps, rows)
    return Steps(
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, number), jnp.int32),
        jnp.zeros((*shape, number), jnp.float32),
    )


def step(logits: Float32[Array, "B vocabulary"], chosen: Int32[Array, " B"], number: int) -> Steps:
    """Those of a step. They mean nothing in rows without a token."""
    whole = [PartitionSpec()] * len(Steps._fields)
    compute = functools.partial(_step, number)
    return _mesh.partitioned(compute, logits, chosen, results=lambda: Steps._make(whole))


def _step(number: int, logits: Array, chosen: Array) -> Steps:
    log_probs = jax.nn.log_softmax(logits)
    place = jnp.maximum(chosen, 0)[:, None]
    of_chosen = jnp.take_along_axis(log_probs, place, axis=1)[:, 0]
    largest, tokens = lax.top_k(log_probs, number)
    return Steps(of_chosen, tokens.astype(jnp.int32), largest)
