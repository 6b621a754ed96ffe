"""The loss and its gradients on one device, chunk by chunk.

With the logits z of a token, of which z_y is that of its target and z_m the first of the largest:

    log_sum   = log sum_v exp(z_v)
    loss      = log_sum - z_y + z_loss log_sum^2
    dloss/dz  = (1 + 2 z_loss log_sum) exp(z - log_sum) - onehot(y) + l2_wrap z_m onehot(m)

A soft cap c makes z = c tanh(z' / c) of the product z' of hidden states and weight, and dloss/dz'
is dloss/dz (1 - (z / c)^2). The term of `l2_wrap` is in the gradient alone.

If the vocabulary is distributed over the mesh axes `axis`, the device has some rows of the weight,
in the order of the devices. Losses and statistics are then the same on all devices along `axis`,
while the gradient of the hidden states is this device's part of a sum over these devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, Integer

from rwkv_jax._operator.dispatch import Computation, Pass, run
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax.losses import _native
from rwkv_jax.losses._options import Axis, Options, Tokens, chunks


class Statistics(NamedTuple):
    """What the gradient of a token's logits depends on beside each logit itself."""

    log_sum: Float32[Array, "*shape"]
    largest: Float32[Array, "*shape"]
    largest_at: Int32[Array, "*shape"]
    """The first place of the largest logit in the whole vocabulary."""


class Gradients(NamedTuple):
    """Gradients in float32."""

    hidden_states: Float32[Array, "*shape C"]
    weight: Float32[Array, "vocabulary C"]


def losses(
    options: Options, axis: Axis, tokens: Tokens, weight: Float[Array, "vocabulary C"]
) -> tuple[Float32[Array, "*shape"], Statistics]:
    """The loss of each token, times its scale, and the statistics of its logits."""
    narrow = weight.astype(tokens.hidden_states.dtype)

    def chunk(nothing: None, tokens: Tokens) -> tuple[None, tuple[Array, Statistics]]:
        logits = _logits(options, tokens.hidden_states, narrow)
        return nothing, _losses(options, axis, tokens, logits)

    _, found = _by_chunk(options, weight.shape[0], tokens, tokens, chunk, None)
    return found


def gradients(
    options: Options,
    axis: Axis,
    tokens: Tokens,
    weight: Float[Array, "vocabulary C"],
    statistics: Statistics,
) -> Gradients:
    """The gradients of the sum of the losses, each times its scale, from logits that are computed
    again."""
    # Gradients of logits with a scale of at most 1 are within the range of float16.
    largest = jnp.max(jnp.abs(tokens.scale), initial=0.0)
    unit = jnp.where(largest > 0, largest, 1.0)
    tokens = tokens._replace(scale=tokens.scale / unit)
    _, found = losses_and_gradients(options, axis, tokens, weight, statistics)
    return Gradients(found.hidden_states * unit, found.weight * unit)


def losses_and_gradients(
    options: Options,
    axis: Axis,
    tokens: Tokens,
    weight: Float[Array, "vocabulary C"],
    statistics: Statistics | None = None,
) -> tuple[Any, Gradients]:
    """The losses, unless their statistics are given, and the gradients of their sum, each times its
    scale."""
    dtype = tokens.hidden_states.dtype
    narrow = weight.astype(dtype)

    def chunk(
        dweight: Array, chunk: tuple[Tokens, Statistics | None]
    ) -> tuple[Array, tuple[Array | None, Array]]:
        tokens, statistics = chunk
        if statistics is None:
            found, dlogits, factors = _losses_and_dlogits(options, axis, tokens, narrow)
        else:
            logits = _logits(options, tokens.hidden_states, narrow)
            dlogits = _dlogits(options, axis, tokens, logits, statistics).astype(dtype)
            found = factors = None
        # Two products read it. Without the barrier each of them may compute it from the logits.
        dlogits = lax.optimization_barrier(dlogits)
        hidden_states = tokens.hidden_states
        if factors is not None:
            hidden_states = (hidden_states.astype(jnp.float32) * factors[:, None]).astype(dtype)
        dhidden_states = _product(options, "nv,vc->nc", dlogits, narrow)
        if factors is not None:
            dhidden_states *= factors[:, None]
        dweight += _product(options, "nv,nc->vc", dlogits, hidden_states)
        return dweight, (found, dhidden_states)

    zeros, _ = vary_alike(jnp.zeros(weight.shape, jnp.float32), weight)
    dweight, (found, dhidden_states) = _by_chunk(
        options, weight.shape[0], tokens, (tokens, statistics), chunk, zeros
    )
    return found, Gradients(dhidden_states, dweight)


def _by_chunk(
    options: Options,
    vocabulary: int,
    tokens: Tokens,
    of_tokens: Any,
    chunk: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
) -> tuple[Any, Any]:
    """As `lax.scan`, over chunks of a tree of arrays with the leading axes of all `tokens`. The
    last chunk is filled up with tokens that do not count, of which nothing is returned."""
    shape = tokens.targets.shape
    leading, number = len(shape), tokens.targets.size
    count, size = chunks(options.chunk_size, number, vocabulary)

    def cut(x: Array) -> Array:
        rest = x.shape[leading:]
        x = x.reshape(number, *rest)
        if missing := count * size - number:
            x = jnp.pad(x, ((0, missing), *((0, 0) for _ in rest)))
        return x.reshape(count, size, *rest)

    def joined(x: Array) -> Array:
        rest = x.shape[2:]
        return x.reshape(count * size, *rest)[:number].reshape(*shape, *rest)

    carry, results = lax.scan(chunk, carry, jax.tree.map(cut, of_tokens))
    return carry, jax.tree.map(joined, results)


def _product(options: Options, axes: str, x: Array, y: Array) -> Float32[Array, "..."]:
    return jnp.einsum(axes, x, y, precision=options.precision, preferred_element_type=jnp.float32)


def _logits(
    options: Options, hidden_states: Float[Array, "tokens C"], weight: Float[Array, "vocabulary C"]
) -> Float32[Array, "tokens vocabulary"]:
    logits = _product(options, "nc,vc->nv", hidden_states, weight)
    if options.soft_cap is None:
        return logits
    return options.soft_cap * jnp.tanh(logits / options.soft_cap)


def _losses(
    options: Options, axis: Axis, tokens: Tokens, logits: Float32[Array, "tokens vocabulary"]
) -> tuple[Float32[Array, "tokens"], Statistics]:
    at, here = _places(axis, tokens.targets, logits.shape[1])
    at = jnp.clip(at, 0, logits.shape[1] - 1)
    target = jnp.take_along_axis(logits, at[:, None], axis=1)[:, 0]
    target = jnp.where(here, target, 0.0)
    largest = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=1)
    largest_at = jnp.zeros_like(tokens.targets, jnp.int32)
    if options.l2_wrap:
        # This fuses with the sum of the exponentials, which an argmax would not.
        places = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        places = jnp.where(logits == largest[:, None], places, logits.shape[1])
        largest_at = jnp.min(places, axis=1)
    if axis is not None:
        own, largest = largest, lax.pmax(largest, axis)
        total, target, here = lax.psum(
            (total * jnp.exp(own - largest), target, here.astype(jnp.int32)), axis
        )
        largest_at += lax.axis_index(axis) * logits.shape[1]
        largest_at = jnp.where(own == largest, largest_at, jnp.iinfo(jnp.int32).max)
        largest_at = lax.pmin(largest_at, axis)
        here = here > 0
    log_sum = largest + jnp.log(total)
    found = log_sum - jnp.where(here, target, jnp.nan) + options.z_loss * log_sum**2
    found = jnp.where(tokens.scale == 0, 0.0, found * tokens.scale)
    return found, Statistics(log_sum, largest, largest_at)


def _losses_and_dlogits(
    options: Options, axis: Axis, tokens: Tokens, weight: Float[Array, "vocabulary C"]
) -> tuple[Float32[Array, "tokens"], Float[Array, "tokens vocabulary"], Array | None]:
    """The losses and, in the dtype of the hidden states, the gradient of the product of hidden
    states and weight. If the last result is not None, each token's gradient has to be multiplied by
    it."""
    operands, of_hidden_states = (tokens, weight), _OfHiddenStates(axis)
    if of_hidden_states.why_not("forward", "ffi", options, "cuda", operands) is None:
        return run(of_hidden_states, "forward", options, operands)
    return *_of_logits(options, axis, *operands), None


def _of_logits(
    options: Options, axis: Axis, tokens: Tokens, weight: Float[Array, "vocabulary C"]
) -> tuple[Float32[Array, "tokens"], Float[Array, "tokens vocabulary"]]:
    logits = _logits(options, tokens.hidden_states, weight)
    return run(_OfLogits(axis), "forward", options, (tokens, logits))


@dataclass(frozen=True)
class _OfChunk(Computation):
    """The losses and the gradients of logits of a chunk, which one device computes."""

    axis: Axis
    name = "cross_entropy"
    implementations = ("ffi", "xla")
    vmap: ClassVar = "in turn"
    mesh: ClassVar = "none"


class _OfLogits(_OfChunk):
    """The results from logits."""

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        return None, ("", "")

    def why_no_kernel(self, name: Pass, options: Options, operands: Any) -> str | None:
        vocabulary = operands[1].shape[1]
        if self.axis or options.soft_cap is not None or vocabulary % _native.LOGITS_MULTIPLE:
            return "the kernel does not take these logits"
        return None

    def kernel(self, name: Pass, options: Options, operands: Any) -> tuple[Array, Array]:
        return _native.of_logits(options, *operands)

    def formula(self, name: Pass, options: Options, operands: Any) -> tuple[Array, Array]:
        tokens, logits = operands
        found, statistics = _losses(options, self.axis, tokens, logits)
        dlogits = _dlogits(options, self.axis, tokens, logits, statistics)
        return found, dlogits.astype(tokens.hidden_states.dtype)


class _OfHiddenStates(_OfChunk):
    """The results from hidden states and the weight, with a factor for each token."""

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        return None, ("", "", "")

    def why_no_kernel(self, name: Pass, options: Options, operands: Any) -> str | None:
        tokens, weight = operands
        takes = _native.takes_hidden_states(options, self.axis, tokens.hidden_states, weight)
        return None if takes else "the kernel does not take these hidden states"

    def kernel(self, name: Pass, options: Options, operands: Any) -> tuple[Array, Array, Array]:
        return _native.of_hidden_states(options, *operands)

    def formula(self, name: Pass, options: Options, operands: Any) -> tuple[Array, Array, Array]:
        tokens, weight = operands
        return *_of_logits(options, self.axis, tokens, weight), jnp.ones_like(tokens.scale)


def _dlogits(
    options: Options,
    axis: Axis,
    tokens: Tokens,
    logits: Float32[Array, "tokens vocabulary"],
    statistics: Statistics,
) -> Float32[Array, "tokens vocabulary"]:
    """The gradient of the product of hidden states and weight."""
    places = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def at(place: Integer[Array, "tokens"], x: Float32[Array, "tokens"]) -> Array:
        here, _ = _places(axis, place, logits.shape[1])
        return jnp.where(places == here[:, None], x[:, None], 0.0)

    log_sum, scale = statistics.log_sum, tokens.scale
    of_sum = scale * (1 + 2 * options.z_loss * log_sum)
    gradient = jnp.exp(logits - log_sum[:, None]) * of_sum[:, None] - at(tokens.targets, scale)
    if options.l2_wrap:
        gradient += at(statistics.largest_at, scale * options.l2_wrap * statistics.largest)
    if options.soft_cap is not None:
        gradient *= 1 - (logits / options.soft_cap) ** 2
    return gradient


def _places(
    axis: Axis, places: Integer[Array, "tokens"], size: int
) -> tuple[Int32[Array, "tokens"], Bool[Array, "tokens"]]:
    """Places in the vocabulary as places in this device's part of it, and whether they are in this
    part."""
    places = places.astype(jnp.int32)
    if axis is not None:
        places -= lax.axis_index(axis) * size
    return places, (places >= 0) & (places < size)
