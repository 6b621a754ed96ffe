"""How a step of training changes the parameters: gradients of a batch in parts, clipping, schedules
of the learning rate, moments, and the average of the parameters."""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from rwkv_jax.models import rwkv7
from support.models import random_like, shapes_of

MODEL = ["--layers=1", "--width=32", "--head-size=16", "--batch=8", "--context=16"]


@pytest.fixture
def optimizer(train: ModuleType) -> ModuleType:
    return importlib.import_module("rwkv_jax._training.optimizer")


def test_a_batch_in_parts(train: ModuleType) -> None:
    """Loss and gradients are those of the whole batch, where each part has another number of
    predictions that count, one of them none."""
    accumulation = importlib.import_module("rwkv_jax._training.accumulation")
    rng = np.random.default_rng(0)
    mask = np.arange(8)[:, None] % 4 * 5 > np.arange(16)
    batch = train.data.windows(rng.integers(256, size=(8, 17)))._replace(mask=mask)
    weight = jnp.asarray(rng.standard_normal(16))

    def mean_loss(weight: jax.Array, batch: Any) -> jax.Array:
        losses = jnp.sin(weight * batch.targets)
        if batch.mask is None:
            return losses.mean()
        return (losses * batch.mask).sum() / jnp.maximum(batch.mask.sum(), 1)

    for part in (batch, batch._replace(mask=None)):
        expected, *found = (
            jax.jit(accumulation.accumulated, static_argnums=(0, 3))(mean_loss, weight, part, parts)
            for parts in (1, 2, 4, 8)
        )
        for x in found:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), x, expected)


@pytest.mark.slow
def test_parts_take_less_memory(train: ModuleType) -> None:
    """A step in parts measures the same, and needs less memory for what its backward pass reads."""
    steps = importlib.import_module("rwkv_jax._training.steps")
    args = train.options.parse([*MODEL, "--l2-wrap=0", "--context=64"])
    model, _ = train.prepare(args)
    optimizer = train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    batch = train.data.windows(np.random.default_rng(0).integers(256, size=(8, 65), dtype=np.int32))
    found = []
    for parts in (1, 4):
        step = steps.train_step(model, optimizer, shapes, 0.0, parts).trace(shapes, batch)
        step = step.lower().compile()
        state = steps.initial_state(model, optimizer, shapes, seed=0)
        memory = step.gradients.memory_analysis()
        found.append((memory.temp_size_in_bytes, step(state, batch)[1]))
    (whole, expected), (parts, measures) = found
    assert parts < 0.6 * whole
    np.testing.assert_allclose(measures, expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_parts_gather_parameters_anew(train: ModuleType) -> None:
    """A mesh has the whole of a parameter only while it computes with it."""
    steps = importlib.import_module("rwkv_jax._training.steps")
    args = train.options.parse([*MODEL, "--mesh=data=4"])
    model, _ = train.prepare(args)
    optimizer = train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    batch = steps.on_mesh(train.data.windows(np.zeros((8, 17), np.int32)), model.mesh)
    step = steps.train_step(model, optimizer, shapes, 0.0, 2).trace(shapes, batch).lower()
    loop, _, entry = step.gradients.compile().as_text().partition("\nENTRY ")
    assert " all-gather(" in loop
    assert " all-gather(" not in entry


SCHEDULES = {
    "--schedule=constant": [0.01, 0.505, 1, 1, 1, 1, 1, 1, 1, 1],
    "--schedule=wsd --decay-share=0.4": [0.01, 0.505, 1, 1, 1, 1, 1, 0.7625, 0.525, 0.2875],
    "--schedule=wsd --decay-share=0": [0.01, 0.505, 1, 1, 1, 1, 1, 1, 1, 1],
    "--schedule=wsd --decay-share=1 --warmup=0": [*np.linspace(1, 0.145, 10)],
    "--schedule=wsd --warmup=0 --final-learning-rate=0": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5],
    "--warmup=0 --final-learning-rate=0.5": [*(0.75 + 0.25 * np.cos(np.arange(10) * np.pi / 10))],
}


@pytest.mark.quick
@pytest.mark.parametrize("given", SCHEDULES)
def test_schedules(train: ModuleType, given: str) -> None:
    """The learning rate of each of ten steps."""
    schedules = importlib.import_module("rwkv_jax._training.schedules")
    base = ["--steps=10", "--learning-rate=1", "--warmup=2"]
    schedule = schedules.make_schedule(train.options.parse([*MODEL, *base, *given.split()]))
    np.testing.assert_allclose(schedule(np.arange(10)), SCHEDULES[given], rtol=1e-5)


TINY = rwkv7.Config(1, 16, 16, vocab_size=8)


def state_after(
    train: ModuleType, optimizer: ModuleType, *given: str, steps: int = 3
) -> tuple[list[Any], Any]:
    """The parameters after each step, and the last state."""
    made = optimizer.make_optimizer(train.options.parse([*MODEL, "--warmup=0", *given]))
    params = random_like(shapes_of(rwkv7, TINY), 1.0)
    state, update = made.init(params), jax.jit(lambda *x: optimizer.updated(made, *x))
    history = []
    for i in range(steps):
        gradients = random_like(shapes_of(rwkv7, TINY), 1.0, seed=i)
        params, state = update(gradients, state, params)
        history.append(params)
    return history, state


def test_learning_rate_of_a_step(train: ModuleType, optimizer: ModuleType) -> None:
    """The one of the step before the state, whose number is counted from 0."""
    _, state = state_after(train, optimizer, "--schedule=wsd", "--steps=4", "--decay-share=1")
    rate = optimizer.learning_rate(state)
    np.testing.assert_allclose(rate, 4e-3 * (1 - 0.5 * 0.95), rtol=1e-5)


def test_average_of_parameters(train: ModuleType, optimizer: ModuleType) -> None:
    """Each step back weighs 0.75 as much, and the weights have the sum 1."""
    history, state = state_after(train, optimizer, "--ema=0.75")
    weights = np.array([0.75**2, 0.75, 1])

    def expected(*x: jax.Array) -> np.ndarray:
        return np.average(np.stack(x), axis=0, weights=weights)

    jax.tree.map(
        lambda x, *others: np.testing.assert_allclose(x, expected(*others), rtol=1e-5, atol=1e-6),
        optimizer.average(state),
        *history,
    )
    assert optimizer.average(state_after(train, optimizer, steps=1)[1]) is None


def test_moments(train: ModuleType, optimizer: ModuleType) -> None:
    """In bfloat16 the first moments are rounded, and little else changes."""
    found = [state_after(train, optimizer, *x) for x in ((), ("--moments=bfloat16",))]
    dtypes = [{x.dtype for x in jax.tree.leaves(state[0].mu)} for _, state in found]
    assert dtypes == [{jnp.dtype("float32")}, {jnp.dtype("bfloat16")}]
    (whole, _), (rounded, state) = found
    assert {x.dtype for x in jax.tree.leaves((state[0].nu, rounded))} == {jnp.dtype("float32")}
    change = optax.tree.sub(whole[-1], random_like(shapes_of(rwkv7, TINY), 1.0))
    difference = optax.tree.sub(whole[-1], rounded[-1])
    assert 0 < optax.tree.norm(difference) < 1e-2 * optax.tree.norm(change)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_clipping(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is that of all gradients before they are scaled, in which some are joined to several
    arrays and the largest to none. On several devices some have the same shards."""
    clipping = importlib.import_module("rwkv_jax._training.clipping")
    monkeypatch.setattr(clipping, "SMALL", 100)
    monkeypatch.setattr(clipping, "JOINED", 7)
    gradients = random_like(shapes_of(rwkv7, TINY), 1.0)
    assert {x.size > 100 for x in jax.tree.leaves(gradients)} == {True, False}
    expected = optax.tree.norm(gradients)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = rwkv7.shardings(gradients, mesh, data="data", model="model")
    assert {x.is_fully_replicated for x in jax.tree.leaves(places)} == {True, False}
    for where in (None, places):
        norm = jax.jit(functools.partial(clipping.global_norm, places=where))(gradients)
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
    for limit, after in ((0.0, expected), (0.5, 0.5), (1e6, expected)):
        scaled = clipping.scaled(gradients, expected, limit)
        np.testing.assert_allclose(optax.tree.norm(scaled), after, rtol=1e-5)


def test_a_step_is_compiled_for_one_block(
    train: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """What changes the parameters is one program for the first block, one for all others, and one
    for what is in none; it clips gradients, and the norm that a step measures is that before."""
    steps = importlib.import_module("rwkv_jax._training.steps")
    args = train.options.parse([*MODEL, "--layers=4", "--batch=2"])
    model, _ = train.prepare(args)
    optimizer = train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    state = steps.initial_state(model, optimizer, shapes, seed=0)
    batch = train.data.windows(np.arange(34, dtype=np.int32).reshape(2, 17))
    traced = steps.train_step(model, optimizer, shapes, 0.0, clip=0.01).trace(shapes, batch)
    with caplog.at_level("DEBUG", "jax._src.dispatch"):
        step = traced.lower().compile()
    names = [
        x.getMessage().split()[4] for x in caplog.records if "XLA compilation" in x.getMessage()
    ]
    assert sorted(names) == ["jit(gradients)", *3 * ["jit(update)"]]
    assert len(step.updates) == 5
    state, measures = step(state, batch)
    assert measures.gradient_norm > 0.1
    of_first = [part[0].mu for part in state.optimizer]
    np.testing.assert_allclose(optax.tree.norm(of_first), 0.1 * 0.01, rtol=1e-4)
