"""A training step of an RWKV-7 language model, and what it costs: time, memory and compilation."""

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from benchmarking import profile
from benchmarking.timing import seconds
from rwkv_jax._training import by_block, copies
from rwkv_jax._training.clipping import global_norm, scaled
from rwkv_jax._training.sizes import flops_per_token
from rwkv_jax.losses import cross_entropy, in_pieces
from rwkv_jax.models import rwkv7

Figures: TypeAlias = dict[str, Any]


class Row(NamedTuple):
    """A size of a model, and the rows of its batch."""

    layers: int
    width: int
    batch: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}, batch {self.batch}"


@dataclass(frozen=True)
class Settings:
    """What all rows of the table share.

    Attributes:
      tokens: the length of a sequence (T).
      vocabulary: the number of different tokens.
      model: the arguments of the model by name: `dtype`, `kernels` and any other one.
      l2_wrap: the factor of the L2 wrap of RWKV-LM, which is 1e-4 there; 0 leaves it out.
      pieces: the arguments `piece` and `truncate` of `losses.in_pieces`; None for whole rows.
      steps: how many steps are timed together.
      repeats: how often they are timed. The median counts.
      warm_up: how many steps come before the first one that is timed.
      peak: operations that the device could do in a second.
      forward: whether the forward pass is timed as well.
      profile: whether the kernels of a training step are measured.
      traces: a folder that keeps the traces; None keeps none.
    """

    tokens: int
    vocabulary: int
    model: Mapping[str, Any]
    l2_wrap: float = 0.0
    pieces: Mapping[str, Any] | None = None
    steps: int = 10
    repeats: int = 3
    warm_up: int = 3
    peak: float = 989e12
    forward: bool = False
    profile: bool = False
    traces: Path | None = None


def mean_loss(
    params: rwkv7.Params,
    tokens: Array,
    model: Mapping[str, Any],
    l2_wrap: float = 0.0,
    pieces: Mapping[str, Any] | None = None,
) -> Array:
    """The mean cross entropy, in nats, of all tokens [B, T + 1] but the first of each row. `pieces`
    are arguments of `losses.in_pieces`.

    The L2 wrap changes gradients alone: the gradient of the largest logit of each token grows by
    `l2_wrap` / (B * T) times that logit.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if pieces:
        return in_pieces(params, inputs, targets, l2_wrap=l2_wrap, **pieces, **model)[0]
    hidden_states, _ = rwkv7.hidden_states(params, inputs, **model)
    return cross_entropy(hidden_states, params.head.weight, targets, l2_wrap=l2_wrap)


class Optimizer(NamedTuple):
    """Two functions: `init(params)` makes the state of the optimizer, and
    `update(gradients, state, params)` returns the next parameters and the next state."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def make_optimizer(learning_rate: float, warmup: int, steps: int, weight_decay: float) -> Optimizer:
    """The optimizer of train.py, which needs optax. Where optax is not installed, it is an AdamW of
    the same cost without a schedule, for timing alone."""
    try:
        from rwkv_jax._training import optimizer, options
    except ImportError:
        return _adamw(learning_rate, weight_decay)
    parser = argparse.ArgumentParser()
    options.add_optimizer_arguments(parser)
    parser.set_defaults(
        learning_rate=learning_rate, warmup=warmup, steps=steps, weight_decay=weight_decay
    )
    args = parser.parse_args([])
    transformation = optimizer.make_optimizer(args)

    @jax.jit
    def of_part(gradients: Any, state: Any, params: Any, norm: Array) -> tuple[Any, Any]:
        gradients = scaled(gradients, norm, args.clip)
        return optimizer.updated(transformation, gradients, state, params)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        norm = global_norm(gradients)
        return by_block.joined(
            [of_part(*part, norm) for part in by_block.parts((gradients, state, params))]
        )

    return Optimizer(transformation.init, update)


def _adamw(rate: float, decay: float, b1: float = 0.9, b2: float = 0.99) -> Optimizer:
    def init(params: rwkv7.Params) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.zeros_like, params)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        count, first, second = state
        count += 1
        gradients = scaled(gradients, global_norm(gradients), 1.0)
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, gradients)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, gradients)

        def step(p: Array, m: Array, v: Array) -> Array:
            direction = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + 1e-18)
            return p - rate * (direction + (decay * p if p.ndim >= 2 else 0.0))

        return jax.tree.map(step, params, first, second), (count, first, second)

    return Optimizer(init, update)


class State(NamedTuple):
    """What a step of training changes: the parameters, the state of the optimizer, and the copies
    of `training.copies`."""

    params: rwkv7.Params
    optimizer: Any
    copies: Any


def initial_state(optimizer: Optimizer, model: Mapping[str, Any], params: rwkv7.Params) -> State:
    return State(params, optimizer.init(params), copies.rounded(params, model["dtype"]))


def training_step(
    optimizer: Optimizer,
    model: Mapping[str, Any],
    l2_wrap: float,
    change: Callable[[rwkv7.Params], rwkv7.Params] | None = None,
    pieces: Mapping[str, Any] | None = None,
) -> Callable[[State, Array], tuple[State, Array]]:
    """A function of a `State` and of tokens [B, T + 1]. It returns the next state, and the mean
    loss before the change. With `change`, the loss is that of changed parameters."""

    def step(state: State, tokens: Array) -> tuple[State, Array]:
        def loss(params: rwkv7.Params) -> Array:
            own = copies.in_place(params if change is None else change(params), state.copies)
            return mean_loss(own, tokens, model, l2_wrap, pieces)

        loss_before, gradients = jax.value_and_grad(loss)(state.params)
        params, moments = optimizer.update(gradients, state.optimizer, state.params)
        return State(params, moments, copies.rounded(params, model["dtype"])), loss_before

    return step


CONSTANTS = {"w0": -2.0, "v0": 0.5, "k_k": 0.7, "k_a": 1.0, "weight": 1.0, "r_k": -0.04}
"""The values of vectors by the last part of their names. The shares of the previous token are 0.5,
and all other vectors are 0."""


def random_parameters(shapes: rwkv7.Params) -> rwkv7.Params:
    """Parameters for measurements of speed, made on the device: matrices are random with rows or
    columns of a length near 1, and vectors are constant. The official initialisation would take
    minutes to make orthogonal matrices."""

    def normal(key: Array, shape: tuple[int, ...], dtype: Any, scale: float) -> Array:
        return (scale * jax.random.normal(key, shape)).astype(dtype)

    normal = jax.jit(normal, static_argnums=(1, 2, 3))  # compiled once for each shape

    def make(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        last = name.rpartition(".")[2]
        if len(x.shape) < 2 or last == "r_k":
            value = 0.5 if last.startswith("x_") else CONSTANTS.get(last, 0.0)
            return jnp.full(x.shape, value, x.dtype)
        inputs = x.shape[-1] if last == "weight" else x.shape[-2]
        # This generator compiles fast and is as good as any for such values.
        key = jax.random.key(sum(name.encode()), impl="rbg")
        return normal(key, x.shape, x.dtype, 1 / math.sqrt(inputs))

    return jax.tree_util.tree_map_with_path(make, shapes)


def make_tokens(settings: Settings, batch: int) -> Array:
    """Random tokens [B, T + 1]."""
    shape = batch, settings.tokens + 1
    return jax.random.randint(jax.random.key(0), shape, 0, settings.vocabulary)


def measure(row: Row, settings: Settings) -> list[Figures]:
    """The figures of the training step of one row, and of the forward pass if it is asked for. The
    largest number of bytes in use counts all that the process has done until then, so each row
    needs a process of its own."""
    config = rwkv7.Config(row.layers, row.width, vocab_size=settings.vocabulary)
    shapes = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), config))
    optimizer = make_optimizer(1e-5, 10, 1000, 0.1)
    state_of = functools.partial(initial_state, optimizer, settings.model)
    state_shapes = jax.eval_shape(state_of, shapes)
    token_shapes = jax.eval_shape(lambda: make_tokens(settings, row.batch))
    step = training_step(optimizer, settings.model, settings.l2_wrap, pieces=settings.pieces)
    step = jax.jit(step, donate_argnums=0)
    about = {**row._asdict(), "device": jax.devices()[0].device_kind, "jax": jax.__version__}

    training, compiled = _compiled(step, state_shapes, token_shapes)
    params, tokens = random_parameters(shapes), make_tokens(settings, row.batch)
    flops = flops_per_token(params) * row.batch * settings.tokens
    state = jax.jit(state_of, donate_argnums=0)(params)
    loss = jnp.zeros(())

    def run(count: int) -> Array:
        nonlocal state, loss
        for _ in range(count):
            state, loss = compiled(state, tokens)
        return loss

    jax.block_until_ready(run(settings.warm_up))
    training |= about | {"pass": "training", **_timed(run, flops, row, settings)}
    training |= {"loss": float(loss), "peak_bytes": _peak_bytes()}
    if settings.profile:
        training["profile"] = profile.of_steps(
            run,
            compiled.as_text() or "",
            steps=3,
            folder=settings.traces and _folder(row, settings),
        )
    figures = [training]
    if settings.forward:
        params = state.params
        del state
        function = jax.jit(lambda params, tokens: mean_loss(params, tokens, settings.model))
        forward, call = _compiled(function, shapes, token_shapes)

        def passes(count: int) -> Array:
            return [call(params, tokens) for _ in range(count)][-1]

        jax.block_until_ready(passes(settings.warm_up))
        forward |= about | {"pass": "forward", **_timed(passes, flops / 3, row, settings)}
        figures.append(forward | {"peak_bytes": None})
    return figures


def _folder(row: Row, settings: Settings) -> Path:
    assert settings.traces is not None
    return settings.traces / "x".join(map(str, row))


def _timed(run: Callable[[int], Array], flops: float, row: Row, settings: Settings) -> Figures:
    """The time of one call, from the median over `repeats` of the time of `steps` calls."""
    times = [seconds(lambda: run(settings.steps)) / settings.steps for _ in range(settings.repeats)]
    median = statistics.median(times)
    return {
        "ms": 1e3 * median,
        "best_ms": 1e3 * min(times),
        "tokens_per_second": row.batch * settings.tokens / median,
        "share_of_peak": flops / median / settings.peak,
    }


def _compiled(function: Any, *shapes: Any) -> tuple[Figures, Any]:
    """The seconds to trace, lower and compile a jitted function; the bytes of its arguments and of
    the temporaries of its program; and the program."""
    times = [time.perf_counter()]
    traced = function.trace(*shapes)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    took = (after - before for before, after in itertools.pairwise(times))
    memory = compiled.memory_analysis()
    figures = dict(zip(("trace_s", "lower_s", "compile_s"), took, strict=True))
    sizes = {
        "argument_bytes": getattr(memory, "argument_size_in_bytes", None),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "program_peak_bytes": getattr(memory, "peak_memory_in_bytes", None),
    }
    return figures | sizes, compiled


def _peak_bytes() -> int | None:
    """The largest number of bytes that were in use on the device, if it tells."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
