"""How the next token is chosen from logits."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float32, Int32, UInt32

from rwkv_jax._typing import Operand
from rwkv_jax.models import _not_finite

NO_DISTRIBUTION = -2
"""What `sample` gives in place of a token where no token can be sampled."""

_PROBABILITY_BITS = 30
"""The bits of a float32 from 0 to 1 that are not always 0."""

_FEW_ROWS, _BITS_OF_FEW_ROWS, _BITS = 32, 3, 2
"""In how many steps of how many bits a GPU searches for the least probability that stays. Few rows
do not fill it, so that it computes many sums at once."""

Number: TypeAlias = float | int | Sequence[float] | Sequence[int] | np.ndarray
"""A setting: one number for all rows, or one for each row."""

_LOWEST_TEMPERATURE = 1e-6
_LARGEST = float(np.finfo(np.float32).max)
_RANGES = {
    "temperature": (f"0, or a number from {_LOWEST_TEMPERATURE} on", 0, _LARGEST),
    "top_p": ("a number from 0 to 1", 0, 1),
    "top_k": ("an integer from 0 to 2^31 - 1", 0, 2**31 - 1),
    "presence_penalty": ("a finite number", -_LARGEST, _LARGEST),
    "frequency_penalty": ("a finite number", -_LARGEST, _LARGEST),
    "decay": ("a number from 0 to 1", 0, 1),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the definitions of ChatRWKV and of the `rwkv` package.

    With the logits l[i] of a row, and with n[i], which counts the tokens i since the last prompt:

        l[i] <- l[i] - (presence_penalty + frequency_penalty * n[i])
            for every i that has occurred since then
        p = softmax(l)
        c = p[j] of the first token j, in descending order of p, where the sum of p up to and with j
            is at least top_p
        p[i] <- 0    where p[i] < c, or where p[i] is less than the top_k-th largest p
        q[i] = p[i]^(1 / temperature) / sum over j of p[j]^(1 / temperature)

    The next token x is sampled from q. Then n[i] <- n[i] * decay for all i, and n[x] <- n[x] + 1,
    or + 0 if x is in `uncounted`, so that only `presence_penalty` counts against such a token at
    first.

    Tokens with equal p stay or go together. With temperature 0 the next token is the one with the
    largest l, and the first of several. The defaults sample from softmax(l).

    A number may also be a sequence with one number for each row. Numbers are data of the compiled
    programs: other numbers compile nothing.

    Attributes:
      temperature: 0, or at least 1e-6.
      top_p: from 0, where only the likeliest token stays, to 1, where all stay.
      top_k: how many tokens stay; 0 for all.
      presence_penalty: the penalty of a token that has occurred.
      frequency_penalty: the penalty for each time that it has occurred.
      decay: what is left of a count after each token, from 0 to 1.
      uncounted: tokens that add nothing to counts. ChatRWKV takes the digits, the space and the
        tab.

    Raises:
      ValueError: a number is none of those accepted, or `uncounted` has a negative token.
      TypeError: a number is no number, or a token no integer.
    """

    temperature: Number = 1.0
    top_p: Number = 1.0
    top_k: Number = 0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    decay: Number = 1.0
    uncounted: Sequence[int] = ()

    def __post_init__(self):
        for name, (accepted, low, high) in _RANGES.items():
            given = getattr(self, name)
            values = np.asarray(given)
            if values.dtype.kind not in ("iu" if name == "top_k" else "fiu"):
                raise TypeError(f"Sampling: {name} is {given!r}; accepted is {accepted}")
            inside = (values >= low) & (values <= high)
            if name == "temperature":
                inside &= (values == 0) | (values >= _LOWEST_TEMPERATURE)
            if values.ndim > 1 or not inside.all():
                raise ValueError(f"Sampling: {name} is {given!r}; accepted is {accepted}")
        check_tokens("Sampling", "uncounted", self.uncounted)


def checked(what: str, sampling: Any) -> Sampling:
    """`sampling`, or the defaults if it is None. Raise an error that begins with `what` if it is
    anything else."""
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"{what}: sampling is {sampling!r}; accepted is a Sampling or None")
    return sampling or Sampling()


class Settings(NamedTuple):
    """`Sampling` as arrays: one number for each row, and which tokens of the vocabulary count."""

    temperature: Float32[Operand, " B"]
    top_p: Float32[Operand, " B"]
    top_k: Int32[Operand, " B"]
    presence_penalty: Float32[Operand, " B"]
    frequency_penalty: Float32[Operand, " B"]
    decay: Float32[Operand, " B"]
    counted: Bool[Operand, "B vocabulary"]


class Occurrences(NamedTuple):
    """Which tokens have occurred since the last prompt of each row, and their counts."""

    seen: Bool[Array, "B vocabulary"]
    counts: Float32[Array, "B vocabulary"]


def settings(sampling: Sampling, batch: int, vocabulary: int) -> Settings:
    """The settings of a batch, as arrays of numpy.

    Raises:
      ValueError: `sampling` has numbers for another number of rows, or a token outside the
        vocabulary.
    """

    def rows(name: str) -> np.ndarray:
        values = np.asarray(getattr(sampling, name), np.int32 if name == "top_k" else np.float32)
        if values.ndim and values.shape != (batch,):
            raise ValueError(
                f"Sampling: {name} has {len(values)} numbers; accepted is one, or {batch}, one for "
                "each row"
            )
        return np.broadcast_to(values, (batch,))

    names = [name for name in Settings._fields if name != "counted"]
    uncounted = mask("Sampling", "uncounted", sampling.uncounted, batch, vocabulary)
    return Settings(**{name: rows(name) for name in names}, counted=~uncounted)


def check_tokens(what: str, name: str, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """The tokens as an array. Raise an error that begins with `what` unless they are integers from
    0 on."""
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: {name} is {tokens!r}; accepted are integers")
    if array.ndim != 1 or array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"{what}: {name} is {tokens!r}; accepted are tokens, from 0 on")
    return array.astype(np.int32)


def mask(
    what: str, name: str, tokens: Sequence[int], batch: int, vocabulary: int
) -> Bool[np.ndarray, "B vocabulary"]:
    """Which tokens of the vocabulary are among `tokens`, the same for each row."""
    array = check_tokens(what, name, tokens)
    if array.size and array.max() >= vocabulary:
        raise ValueError(
            f"{what}: {name} has the token {array.max()}; accepted are tokens below {vocabulary}"
        )
    found = np.zeros(vocabulary, bool)
    found[array] = True
    return np.broadcast_to(found, (batch, vocabulary))


def sample(
    logits: Float32[Array, "B vocabulary"],
    settings: Settings,
    occurrences: Occurrences,
    seeds: Int32[Array, " B"],
    positions: Int32[Array, " B"],
) -> Int32[Array, " B"]:
    """The next token of each row, as `Sampling` defines it. It is `NO_DISTRIBUTION` where a logit
    less its penalty is NaN or +inf, or where all of them are -inf. Single ones may be -inf: their
    tokens are never sampled."""
    presence, frequency, temperature, top_p, top_k = (
        jnp.asarray(x)[:, None]
        for x in (
            *(settings.presence_penalty, settings.frequency_penalty, settings.temperature),
            *(settings.top_p, settings.top_k),
        )
    )
    penalty = jnp.where(occurrences.seen, presence + frequency * occurrences.counts, 0)
    logits = logits - penalty
    largest = _not_finite.largest(logits, keepdims=True)
    greedy = temperature == 0

    mass = jnp.where(top_p < 1, top_p, jnp.inf)
    number = jnp.where((top_k > 0) & (top_k < logits.shape[1]), top_k, np.iinfo(np.int32).max)

    def chosen(least: Callable[[Array, Array, Array], Array]) -> Array:
        below_largest = logits - largest
        p = jnp.exp(below_largest)
        p = p / jnp.sum(p, axis=-1, keepdims=True)
        stays = p >= least(p, mass, number)
        # With independent E[i] of the exponential distribution, the i with the largest
        # l[i] / temperature - log(E[i]) has the distribution q (the Gumbel-max trick). A rounding
        # error of the logits changes the token only if two candidates are as close to each other
        # as that error, however large the vocabulary is; sums of probabilities would add up the
        # errors.
        noise = -jnp.log(_exponential(seeds, positions, logits.shape[1]))
        scores = below_largest / jnp.where(greedy, 1, temperature) + noise
        return first_largest(jnp.where(greedy, logits, jnp.where(stays, scores, -jnp.inf)))

    def chosen_on_cpu() -> Array:
        some = jnp.any(~greedy & (jnp.isfinite(mass) | (number < logits.shape[1])))

        def least(p: Array, mass: Array, number: Array) -> Array:
            search = functools.partial(_least, p, mass, number, bits=1)
            return lax.cond(some, search, lambda: jnp.zeros_like(mass))

        return lax.cond(jnp.all(greedy), lambda: _first(logits == largest), lambda: chosen(least))

    # A GPU waits for the host before it takes a branch, and has the results of both sooner.
    bits = _BITS_OF_FEW_ROWS if len(logits) <= _FEW_ROWS else _BITS
    tokens = lax.platform_dependent(
        cpu=chosen_on_cpu, default=lambda: chosen(functools.partial(_least, bits=bits))
    )
    return jnp.where(jnp.isfinite(largest[:, 0]), tokens, NO_DISTRIBUTION)


def first_largest(x: Float32[Array, "B vocabulary"]) -> Int32[Array, " B"]:
    """The first index of the largest number of each row without NaN."""
    # Compilers for CPUs vectorise two passes, but not a single one, which reads x only once.
    return lax.platform_dependent(
        x,
        cpu=lambda x: _first(x == jnp.max(x, axis=-1, keepdims=True)),
        default=lambda x: lax.argmax(x, 1, jnp.int32),
    )


def _first(wanted: Bool[Array, "B vocabulary"]) -> Int32[Array, " B"]:
    index = lax.broadcasted_iota(jnp.int32, wanted.shape, 1)
    return jnp.min(jnp.where(wanted, index, wanted.shape[1]), axis=-1)


def no_distribution(what: str, tokens: int) -> FloatingPointError:
    """The error for `NO_DISTRIBUTION` after so many new tokens. Its message begins with `what`."""
    return FloatingPointError(
        f"{what}: no token can be sampled after {tokens} new ones, because a logit is NaN or "
        f"infinite: {_not_finite.REASON}"
    )


def counted(
    occurrences: Occurrences, settings: Settings, tokens: Int32[Array, " B"]
) -> Occurrences:
    """The occurrences after one more token of each row."""
    ids = lax.broadcasted_iota(jnp.int32, occurrences.seen.shape, 1)
    here = ids == tokens[:, None]
    more = here & settings.counted
    counts = occurrences.counts * settings.decay[:, None] + more.astype(jnp.float32)
    return Occurrences(occurrences.seen | here, counts)


def _least(
    p: Float32[Array, "B vocabulary"],
    mass: Float32[Array, "B 1"],
    number: Int32[Array, "B 1"],
    *,
    bits: int,
) -> Float32[Array, "B 1"]:
    """The largest of the probabilities from which on there are `mass` of probability or `number` of
    tokens; 0 where there is none.

    Probabilities have the order of their bits as integers. A pass finds the next `bits` of the
    result, by sums over the vocabulary for each value that these may have. That is faster than
    sorting, is partitioned over devices, and has no step that depends on a result of another one,
    for which a GPU would wait for the host.
    """
    least = jnp.zeros(mass.shape, jnp.int32)
    for shift in reversed(range(0, _PROBABILITY_BITS, bits)):
        digits = jnp.arange(1, 1 << bits, dtype=jnp.int32)[None] << shift
        from_on = lax.bitcast_convert_type(least + digits, jnp.float32)
        if len(p) <= _FEW_ROWS:
            masses, numbers = _above(p[:, None], from_on[..., None])
        else:
            sums = [_above(p, x) for x in jnp.split(from_on, digits.size, axis=-1)]
            masses, numbers = (jnp.stack(x, axis=-1) for x in zip(*sums, strict=True))
        enough = (masses >= mass) | (numbers >= number)
        least += jnp.sum(enough, axis=-1, keepdims=True, dtype=jnp.int32) << shift
    # Where the likeliest token is enough, so is every larger number.
    return jnp.minimum(lax.bitcast_convert_type(least, jnp.float32), jnp.max(p, -1, keepdims=True))


def _above(p: Array, least: Array) -> tuple[Array, Array]:
    """The sum of the numbers of the last axis that are `least` or more, and how many these are."""
    stays = p >= least
    return jnp.sum(jnp.where(stays, p, 0), axis=-1), jnp.sum(stays, axis=-1, dtype=jnp.int32)


def _exponential(
    seeds: Int32[Array, " B"], positions: Int32[Array, " B"], vocabulary: int
) -> Float32[Array, "B vocabulary"]:
    """Numbers of the exponential distribution, one for each token that a row may take at a
    position. They depend on the row's seed, on the position and on the token, and on nothing else:
    Threefry is asked for single words by their keys, which no option of JAX changes."""
    root = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")

    def words(seed: Array, position: Array) -> UInt32[Array, " vocabulary"]:
        key = jax.random.fold_in(jax.random.fold_in(root, seed), position)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(vocabulary))
        return jax.random.key_data(keys)[:, 0]

    bits = jax.vmap(words)(seeds, positions)
    # Within (0, 1), and finest near 0, where the exponential decides about unlikely tokens.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-uniform)
