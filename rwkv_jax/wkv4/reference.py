"""WKV4, one token at a time: the specification that every other implementation agrees with."""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.wkv4.signature import SIGNATURE


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """y = (num + e^(u + k) v) / (den + e^(u + k)), then num = e^w num + e^k v and den = e^w den +
    e^k, where num and den stand for these times e^log_max, the largest weight so far."""
    y = read(inputs, state)
    w = unbounded_log_decay(inputs["w"], options.decay)
    k, v = inputs["k"].astype(jnp.float32), inputs["v"].astype(jnp.float32)
    return y, add(state, w, {"num": v, "den": jnp.ones_like(v), "log_max": k})


def read(inputs: Arrays, state: Arrays) -> Array:
    """`y` of tokens from the state before each. It does not depend on `largest`."""
    u, k, v = (inputs[name].astype(jnp.float32) for name in "ukv")
    own, log_max = u + k, state["log_max"]
    largest = lax.stop_gradient(jnp.maximum(log_max, own))
    before, now = jnp.exp(log_max - largest), jnp.exp(own - largest)
    y = (before * state["num"] + now * v) / (before * state["den"] + now)
    return y.astype(inputs["v"].dtype)


def add(state: Arrays, w: Array, added: Arrays) -> Arrays:
    """The state after a log decay of w, plus what is added to it. The exponents are compared with
    the largest as it was rounded, so that over many tokens it does not drift away from the sums."""
    decayed = state["log_max"] + w
    # The derivative of `jnp.maximum` is 0 where the compiler computes `decayed` twice and rounds it
    # differently, since it compares the operands with the result.
    largest = jnp.where(decayed >= added["log_max"], decayed, added["log_max"])
    before = jnp.exp((state["log_max"] - largest) + w)
    now = jnp.exp(added["log_max"] - largest)
    sums = {part: before * state[part] + now * added[part] for part in ("num", "den")}
    return sums | {"log_max": largest}


IMPLEMENTATION = TokenByToken(SIGNATURE, step)
