"""Decoding with an RWKV-7 language model, and its floor: all that a token has to read and write, at
the speed of a copy."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarking import profile
from benchmarking.model_step import random_parameters
from benchmarking.timing import copy_gb_s, seconds
from rwkv_jax import models
from rwkv_jax._training.sizes import flops_per_token
from rwkv_jax.generation import Sampling, TokenStream
from rwkv_jax.generation._sampling import first_largest
from rwkv_jax.models import Kernels, rwkv7
from rwkv_jax.models._deferral import at_step, deferred, flush

Figures: TypeAlias = dict[str, Any]

WEIGHTS = ("float32", "bfloat16", "float16", "int8")


class Row(NamedTuple):
    """A size of a model, the rows of its batch, the dtype of its weights, and the share of zeros
    that the weights are made for, as `parameters` does it, or None."""

    layers: int
    width: int
    batch: int
    weights: str
    zeros: float | None = None

    def __str__(self) -> str:
        zeros = "" if self.zeros is None else f", {100 * self.zeros:g} % zeros"
        return f"{self.layers}x{self.width}, batch {self.batch}, {self.weights}{zeros}"


@dataclass(frozen=True)
class Settings:
    """What all rows of the table share.

    Attributes:
      vocabulary: the number of different tokens.
      dtype: the dtype of the activations.
      tokens: how many tokens of each row are decoded in one program.
      repeats: how often that is timed. The median counts.
      processor_time: whether the processor time of this process counts, and not the clock.
      blocks: as `Kernels` has it, while the model decodes.
      invariant: how many rows `models.Invariant` takes at once, or None for the model without it.
      generated: how many tokens `generate` samples with top_p in each row, which is timed as well,
        or 0.
      prefill: the length of a prompt whose reading is timed as well, or 0.
      pause: seconds in which the device is idle before each prompt.
      peak: operations that the device could do in a second.
      profile: whether the kernels of a token are measured.
      traces: a folder that keeps the traces; None keeps none.
    """

    vocabulary: int
    dtype: str
    tokens: int = 64
    repeats: int = 5
    processor_time: bool = False
    blocks: str | None = None
    invariant: int | None = None
    generated: int = 0
    prefill: int = 0
    pause: float = 0.0
    peak: float = 989e12
    profile: bool = False
    traces: Path | None = None

    @property
    def model(self) -> Any:
        return rwkv7 if self.invariant is None else models.Invariant(rwkv7, self.invariant)

    @property
    def clock(self) -> Callable[[], float]:
        return time.process_time if self.processor_time else time.perf_counter


def parameters(row: Row, settings: Settings) -> rwkv7.Params:
    """Random parameters with weights as the row has them. Beside int8, what is not quantised has
    the dtype of the activations.

    With a share of zeros they are `models.for_decoding`, and the channel mixings are such that this
    share of max(K x, 0)^2 is zero on average: K x is normally distributed, and the normalisation
    before it adds an offset which moves the mean."""
    config = rwkv7.Config(row.layers, row.width, vocab_size=settings.vocabulary)
    shapes = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), config))
    quantised = row.weights == "int8"
    dtype = jnp.dtype(settings.dtype if quantised else row.weights)
    params = random_parameters(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes))
    if row.zeros is not None:
        params = models.for_decoding(with_zeros(params, row.zeros))
    return models.quantize(params) if quantised else params


def with_zeros(params: rwkv7.Params, share: float) -> rwkv7.Params:
    """Random parameters whose channel mixings have this share of zeros in max(K x, 0)^2."""
    # Of the least and the largest share, all numbers are on one side of 0.
    mean = -NormalDist().inv_cdf(share) if 0 < share < 1 else 8.0 * (1 - 2 * share)

    @jax.jit
    def moved(key: Array) -> Array:
        wide = key.astype(jnp.float32)
        # A normalised token has the sum 0, and with an offset of 1 that of its channels.
        return (wide + (mean / wide.shape[1] - wide.mean(1, keepdims=True))).astype(key.dtype)

    def with_offset(block: rwkv7.BlockParams) -> rwkv7.BlockParams:
        ffn = block.ffn
        key = rwkv7.Weight(moved(ffn.key.weight))
        return block._replace(
            ln2=block.ln2._replace(bias=jnp.ones_like(block.ln2.bias)),
            ffn=ffn._replace(x_k=jnp.zeros_like(ffn.x_k), key=key),
        )

    return params._replace(blocks=tuple(map(with_offset, params.blocks)))


def bytes_of_token(
    params: rwkv7.Params, state: rwkv7.State, batch: int, zeros: float | None = None
) -> int:
    """What a token of each row has to move: all parameters are read once, but of the embedding the
    rows of the tokens alone, and with a share of zeros in each row, of `ffn.value` what some row
    needs. All states are read and written."""

    def size(tree: Any) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(tree))

    embedding = params.emb.weight
    rows = batch * embedding.nbytes // len(embedding)
    unread = 0.0
    if zeros is not None:
        unread = zeros**batch * sum(block.ffn.value.by_input.nbytes for block in params.blocks)
    return size(params) - size(params.emb) + rows + 2 * size(state) - round(unread)


def decode(
    params: rwkv7.Params,
    state: rwkv7.State,
    tokens: Array,
    *,
    model: Any,
    dtype: str,
    kernels: Kernels,
    length: int,
) -> tuple[rwkv7.State, Array]:
    """The state and the token of each row after `length` tokens, each of which is the most probable
    one. `model` is the module of the model, or a `models.Invariant` of it."""

    def step(carry: tuple[rwkv7.State, Array], i: Array) -> tuple[tuple[rwkv7.State, Array], None]:
        state, tokens = carry
        state = at_step(state, i, i == length - 1)
        logits, state = model.apply(params, tokens, state, dtype=dtype, kernels=kernels)
        return (state, first_largest(logits)), None

    state = deferred(model, params, state) if kernels.may_fuse else state
    state, tokens = lax.scan(step, (state, tokens), jnp.arange(length))[0]
    return flush(state), tokens


def measure(row: Row, settings: Settings) -> list[Figures]:
    """The figures of decoding with one row, and of reading a prompt if that is asked for."""
    params = parameters(row, settings)
    state = rwkv7.initial_state(params, row.batch, settings.dtype)
    tokens = jnp.arange(row.batch, dtype=jnp.int32) % settings.vocabulary
    moved = bytes_of_token(params, state, row.batch, row.zeros)
    about = {**row._asdict(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}
    options = {"dtype": settings.dtype, "length": settings.tokens, "model": settings.model}
    options["kernels"] = Kernels(blocks=settings.blocks)
    loop = functools.partial(decode, **options)
    compiled = jax.jit(loop, donate_argnums=1).lower(params, state, tokens).compile()
    copy = copy_gb_s(settings.clock)

    def run(_: int = 1) -> Array:
        nonlocal state, tokens
        state, tokens = compiled(params, state, tokens)
        return tokens

    took = [ms / settings.tokens for ms in _milliseconds(run, settings)]
    median, floor = statistics.median(took), moved / copy / 1e6
    decoding = about | {
        "pass": "decoding",
        "ms": median,
        "best_ms": min(took),
        "tokens_per_second": 1e3 * row.batch / median,
        "bytes": moved,
        "copy_gb_s": copy,
        "floor_ms": floor,
        "times_floor": median / floor,
    }
    figures = [decoding | _profile(run, compiled, row, settings, "decoding", settings.tokens)]
    if settings.generated:
        figures.append(about | _generated(params, row, settings, median))
    if settings.prefill:
        del state
        figures.append(about | _prefill(params, row, settings))
    return figures


def _profile(
    run: Callable[[int], Any], compiled: Any, row: Row, settings: Settings, name: str, steps: int
) -> Figures:
    """The classes of the kernels of a pass with so many steps, if they are asked for."""
    if not settings.profile:
        return {}
    folder = settings.traces and settings.traces / "x".join(map(str, row)) / name
    return {"profile": profile.of_steps(run, compiled.as_text() or "", steps=steps, folder=folder)}


def _generated(params: rwkv7.Params, row: Row, settings: Settings, loop_ms: float) -> Figures:
    """The figures of `generate` after the first token of a prompt. The loop takes `loop_ms` a
    token."""

    def milliseconds() -> float:
        stream = TokenStream(
            *(settings.model, params, [[0]] * row.batch, settings.generated),
            sampling=Sampling(top_p=0.5),
            dtype=settings.dtype,
            kernels=Kernels(blocks=settings.blocks),
        )
        jax.block_until_ready(stream.session)
        return 1e3 * seconds(stream.run, settings.clock) / settings.generated

    took = [milliseconds() for _ in range(settings.repeats + 1)][1:]
    median = statistics.median(took)
    return {
        "pass": "generate",
        "ms": median,
        "best_ms": min(took),
        "tokens_per_second": 1e3 * row.batch / median,
        "share_of_loop": loop_ms / median,
    }


def _prefill(params: rwkv7.Params, row: Row, settings: Settings) -> Figures:
    """The figures of reading one prompt. The head, which only the last token needs, is left out."""
    length = settings.prefill

    def read(params: rwkv7.Params, tokens: Array) -> tuple[Array, rwkv7.State]:
        hidden_states, state = settings.model.hidden_states(params, tokens, dtype=settings.dtype)
        return hidden_states[:, -1], state

    prompt = jax.random.randint(jax.random.key(0), (1, length), 0, settings.vocabulary)
    compiled = jax.jit(read).lower(params, prompt).compile()

    def run(_: int = 1) -> Any:
        return compiled(params, prompt)

    took = _milliseconds(run, settings, settings.pause)
    median = statistics.median(took)
    flops = length * (flops_per_token(params) / 3 - 2 * params.head.weight.size)
    return {
        "pass": "prefill",
        "ms": median,
        "best_ms": min(took),
        "tokens_per_second": 1e3 * length / median,
        "share_of_peak": 1e3 * flops / median / settings.peak,
        **_profile(run, compiled, row, settings, "prefill", 1),
    }


def _milliseconds(run: Callable[[int], Any], settings: Settings, pause: float = 0.0) -> list[float]:
    """The milliseconds of each of several calls with pauses, after one that warms up."""

    def one() -> float:
        time.sleep(pause)
        return 1e3 * seconds(lambda: run(1), settings.clock)

    jax.block_until_ready(run(1))
    return [one() for _ in range(settings.repeats)]
