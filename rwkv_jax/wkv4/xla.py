"""WKV4 in chunks of plain jnp: for each token of a tile the weights of all tokens before it, by
their exponents less the largest."""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._packing import segments
from rwkv_jax._portable.chunked import Chunked
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.signature import NOTHING, SIGNATURE


def tile(
    options: Options, state: Arrays, inputs: Arrays, marks: Array | None
) -> tuple[Arrays, Array]:
    num, den, log_max = (state[part][:, None] for part in ("num", "den", "log_max"))
    k, v = (inputs[name].astype(jnp.float32)[:, None] for name in "kv")
    log_decay = unbounded_log_decay(inputs["w"], options.decay)[:, None]
    # The state before token i, and after the last: [B, L + 1, C], its weights [B, L + 1, L, C].
    tokens = inputs["k"].shape[1]
    ages = lax.iota(jnp.float32, tokens + 1)[None, :, None]
    earlier = ages[:, :, None] > ages[:, None, :tokens]
    alive = jnp.array(True)
    if marks is not None:
        there, own = marks != segments.PADDING, segments.numbers(marks)
        own_of_state = jnp.concatenate([own, own[:, -1:]], axis=1)[..., None]
        earlier &= (own_of_state == own[:, None])[..., None] & there[:, None, :, None]
        alive = own_of_state == 0
        ages = jnp.pad(jnp.cumsum(there, axis=1, dtype=jnp.float32), ((0, 0), (1, 0)))[..., None]
    added = ages[:, :, None] - 1 - ages[:, None, :tokens]
    decays, decay = added * log_decay[:, None], ages * log_decay
    weights = jnp.where(earlier, decays + k, -jnp.inf)
    before = jnp.where(alive, decay + log_max, NOTHING)
    # `y` does not depend on what is subtracted from the exponents, but the final state does.
    largest = lax.stop_gradient(jnp.maximum(before, jnp.max(weights, axis=2)))
    last = _first_largest(before[:, -1:], weights[:, -1])
    largest = jnp.concatenate([largest[:, :-1], last], axis=1)
    # As in the reference, against drift.
    weights = jnp.where(earlier, (k - largest[:, :, None]) + decays, -jnp.inf)
    start = jnp.where(alive, (log_max - largest) + decay, -jnp.inf)
    weights, start = jnp.exp(weights), jnp.exp(start)
    states = {
        "num": start * num + jnp.sum(weights * v, axis=2),
        "den": start * den + jnp.sum(weights, axis=2),
        "log_max": largest,
    }
    of_tokens = {part: x[:, :-1] for part, x in states.items()}
    y = reference.read(inputs | {"u": inputs["u"][:, None]}, of_tokens)
    (y,) = segments.cleared(marks, [y])
    return {part: x[:, -1] for part, x in states.items()}, y


def _first_largest(*parts: Array) -> Array:
    """The largest along axis 1 of all parts, [B, 1, C]; the first of equal ones gets its cotangent.

    The derivative of `jnp.max` compares its operand with the result. The compiler may compute the
    operand twice and round it differently, and then nothing is equal to the result."""
    x = jnp.concatenate(parts, axis=1)
    at = lax.argmax(x, 1, jnp.int32)[:, None]
    here = lax.broadcasted_iota(jnp.int32, x.shape, 1) == at
    return jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True)


IMPLEMENTATION = Chunked(SIGNATURE, tile, reference.IMPLEMENTATION)
