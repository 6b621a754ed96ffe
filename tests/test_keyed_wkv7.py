"""`rwkv_jax.layers.keyed_wkv7`: what it computes, and where it has kernels, whose results
test_emulation.py checks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import layers
from rwkv_jax.models import rwkv7
from support import hlo, internals, meshes
from support.cases import DTYPES, Case
from support.keyed_wkv7 import (
    AXES,
    RESULTS,
    TENSORS,
    apart,
    assert_right,
    expected,
    operands,
    value_and_gradients,
)
from support.tolerance import assert_trees_close

SMALL = Case(2, 17, 2, 64, dtype="bfloat16")
"""A call that the kernels take."""

FORWARD, BACKWARD = internals.keyed_wkv7.TARGETS.values()
IDS = np.array([[1] * 5 + [0] * 2 + [3] * 10, [0] * 4 + [2] * 13], np.int32)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be lowered for GPUs with the kernels, as they can where these are installed."""
    internals.pretend(monkeypatch, "cuda", None)


def _found(case: Case, **options: Any) -> dict[str, jax.Array]:
    call = functools.partial(value_and_gradients, **options)
    return jax.jit(call)(*jax.tree.map(jnp.asarray, operands(case)))


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        (Case(2, 17, 2, 16), None),
        (Case(1, 65, 1, 64, dtype="bfloat16", state=False), None),
        (Case(2, 9, 1, 64, dtype="float16"), "reference"),
        (Case(0, 3, 1, 64, dtype="bfloat16"), None),
        (Case(1, 0, 2, 16), "xla"),
    ],
    ids=str,
)
def test_definition(case: Case, implementation: str | None) -> None:
    assert_right(_found(case, implementation=implementation), expected(*operands(case)), case.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("ids", [None, IDS], ids=["", "segments"])
def test_the_way_of_the_kernels_on_other_platforms(ids: np.ndarray | None) -> None:
    """One program for all platforms: it computes what the two functions do, and under remat."""
    right = expected(*operands(SMALL), segment_ids=ids)
    assert_right(_found(SMALL, segment_ids=ids), right, SMALL.dtype)
    if ids is None:
        assert_right(_found(SMALL, function=jax.checkpoint(layers.keyed_wkv7)), right, SMALL.dtype)


@pytest.mark.usefixtures("kernels")
def test_vmap() -> None:
    """Parameters are shared."""
    inputs, cotangents = operands(SMALL)
    stacked = {n: np.stack([x, x[::-1]]) if n in TENSORS else x for n, x in inputs.items()}
    axes = {n: 0 if n in TENSORS else None for n in inputs}
    found = jax.jit(jax.vmap(value_and_gradients, (axes, None)))(stacked, cotangents)
    for i in range(2):
        one = {n: x[i] if n in TENSORS else x for n, x in stacked.items()}
        right = expected(one, cotangents)
        assert_right({n: x[i] for n, x in found.items()}, right, SMALL.dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes(axis_type: AxisType, cpus: list[Any]) -> None:
    """Devices have rows and heads, and exchange nothing but the sums of parameters' gradients."""
    arrays = operands(SMALL)
    where = {"B": "data", "H": "model"}
    specs = {n: P(*(where.get(x) for x in axes)) for n, axes in {**AXES, **RESULTS}.items()}
    specs |= {f"d{n}": spec for n, spec in specs.items()}
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled = jax.jit(value_and_gradients).lower(*placed).compile()
    assert_right(compiled(*placed), expected(*arrays), SMALL.dtype)
    assert hlo.collectives(compiled.as_text()) <= {"all-reduce"}


@pytest.mark.usefixtures("kernels")
def test_gradients_through_shard_map(cpus: list[Any]) -> None:
    """Those of parameters are sums over devices."""
    inputs, cotangents = operands(SMALL)
    specs = {n: P("data") if "B" in axes else P() for n, axes in {**AXES, **RESULTS}.items()}

    def loss(inputs: dict, cotangents: dict) -> jax.Array:
        found = layers.keyed_wkv7(**inputs)._asdict()
        each = (jnp.vdot(x.astype(jnp.float32), cotangents[f"d{n}"]) for n, x in found.items())
        return jax.lax.psum(sum(each), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AxisType.Auto, cpus),
        in_specs=({n: specs[n] for n in inputs}, {n: specs[n[1:]] for n in cotangents}),
        out_specs=P(),
    )
    wide = {n: x.astype(np.float32) for n, x in cotangents.items()}
    found = jax.jit(jax.grad(mapped))(inputs, wide)
    right = expected(inputs, cotangents)
    names = {n: f"d{n}" for n in inputs}
    assert_right(
        {names[n]: x for n, x in found.items()}, {d: right[d] for d in names.values()}, SMALL.dtype
    )


def _text(call: Callable[..., Any], *arguments: Any) -> str:
    """The program for CUDA."""
    with hlo.device("cuda"):
        traced = jax.jit(call).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def _targets(text: str) -> dict[str, int]:
    """How often the program calls each target of the two functions."""
    passes = ("wkv7_{}_v2", "wkv7_keys_{}_v1")
    apart = (f"rwkv_{function.format(name)}" for name in ("fwd", "bwd") for function in passes)
    return {name: text.count(f"custom_call @{name}(") for name in (FORWARD, BACKWARD, *apart)}


ONE, APART = (1, 1, 0, 0, 0, 0), (0, 0, 1, 1, 1, 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("case", "options", "calls"),
    [
        (SMALL, {}, ONE),
        (SMALL, {"implementation": "ffi"}, ONE),
        (SMALL, {"segment_ids": IDS}, ONE),
        (Case(1, 16, 1, 64, dtype="float16", state=False), {}, ONE),
        (Case(1, 15, 1, 64, dtype="bfloat16"), {}, APART),
        (Case(2, 17, 2, 64), {}, APART),
        (Case(2, 17, 2, 128, dtype="bfloat16"), {}, APART),
        (SMALL, {"implementation": "xla"}, (0,) * 6),
    ],
    ids=str,
)
def test_where_both_functions_have_kernels_in_one(
    case: Case, options: dict[str, Any], calls: tuple[int, ...]
) -> None:
    text = _text(functools.partial(value_and_gradients, **options), *operands(case))
    assert tuple(_targets(text).values()) == calls


CONFIG = rwkv7.Config(num_layers=2, hidden_size=128, vocab_size=32, head_size=64)


def _operator(*operands: Any, **options: Any) -> Any:
    """`wkv7`, unknown to the model."""
    return rwkv_jax.wkv7(*operands, **options)


def _hidden_states(params: rwkv7.Params, tokens: jax.Array, **options: Any) -> jax.Array:
    hidden_states, _ = rwkv7.hidden_states(params, tokens, dtype=jnp.bfloat16, **options)
    return jnp.sum(hidden_states.astype(jnp.float32) ** 3)


@pytest.mark.usefixtures("kernels")
def test_the_model_takes_the_kernels() -> None:
    """Unless it is given an operator or another implementation for one of the two functions."""
    params = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), CONFIG))
    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)

    def calls(**options: Any) -> tuple[int, ...]:
        call = jax.grad(functools.partial(_hidden_states, **options))
        program = jax.make_jaxpr(call)(params, tokens)
        return tuple(hlo.calls(program, target) for target in (FORWARD, BACKWARD))

    each = CONFIG.num_layers
    assert calls() == calls(layers="ffi", implementation="ffi") == (each, each)
    assert calls(wkv=_operator) == calls(implementation="ffi") == (0, 0)
    assert calls(recompute="mixes") == calls(recompute="cheap") == (each, each)
    assert calls(recompute="blocks") == (2 * each, each)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_the_model_equals_the_two_functions() -> None:
    """The loss and all gradients."""
    params = rwkv7.init(jax.random.key(0), CONFIG)
    # Initial matrices of zeros would hide gradients.
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, CONFIG.vocab_size)
    found, right = (
        jax.jit(jax.value_and_grad(functools.partial(_hidden_states, **options)))(params, tokens)
        for options in ({}, {"wkv": _operator})
    )
    assert_trees_close(found, right, 1e-3)
    assert all(np.any(x) for x in jax.tree.leaves(found[1].blocks[1].att))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("argument", [*AXES, "segment_ids"])
def test_wrong_arguments(argument: str) -> None:
    inputs: dict[str, Any] = operands(SMALL)[0] | {"segment_ids": IDS}

    def error(change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind, match=r"^keyed_wkv7: ") as caught:
            layers.keyed_wkv7(**inputs | {argument: change(inputs[argument])})
        return str(caught.value)

    text = error(lambda x: x[None], ValueError)
    assert f"{argument} has shape (1, " in text
    assert "accepted is [" in text
    assert f"{argument} is a list" in error(lambda x: x.tolist(), TypeError)
    longer = error(lambda x: np.concatenate([x, x], axis=-1), ValueError)
    assert argument in longer
    dtype = np.int32 if argument in AXES else np.float32
    assert f"{argument} is {np.dtype(dtype)}" in error(lambda x: x.astype(dtype), TypeError)
    if argument in AXES:
        other = "float16" if argument in TENSORS else "bfloat16"
        text = error(lambda x: x.astype(DTYPES[other]), TypeError)
        assert f"{argument} is {other}" in text


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_implementation() -> None:
    with pytest.raises(
        ValueError, match="keyed_wkv7: implementation is 'pallas'; accepted are 'ffi'"
    ):
        layers.keyed_wkv7(**operands(SMALL)[0], implementation="pallas")


def test_equals_the_two_functions() -> None:
    """Exactly, where it is a call of each."""
    found, right = (
        _found(Case(2, 17, 2, 16), function=call) for call in (layers.keyed_wkv7, apart)
    )
    for name, x in found.items():
        assert np.array_equal(x, right[name]), name
