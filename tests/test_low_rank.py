"""`rwkv_jax.layers.low_rank` against its formula in numpy float64, and where the kernels are
chosen. What the kernels compute only a GPU can show (test_gpu.py): the emulation of
test_emulation.py has no products of warpgroups."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import layers
from rwkv_jax.models._linear import low_rank as of_model
from support import hlo, internals, meshes
from support.cases import DTYPES
from support.low_rank import assert_right, expected, operands

ON_GPU = jax.default_backend() == "gpu"
ACTIVATIONS = ("identity", "tanh", "sigmoid")


def _targets_of(activation: str) -> set[str]:
    return {internals.low_rank.TARGETS[activation, name] for name in ("forward", "backward")}


def _found(
    inputs: Any, dy: Any, call: Callable[..., Any] = layers.low_rank, **options: Any
) -> dict[str, Any]:
    y, vjp = jax.vjp(lambda x: call(**x, **options), inputs)
    return {"y": y} | {f"d{n}": d for n, d in vjp(dy)[0].items()}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes the way of the kernels for a few tokens as well."""
    internals.pretend(monkeypatch, "cuda", None)
    monkeypatch.setattr(internals.gpus, "why_not_hopper", lambda: None)
    monkeypatch.setattr(internals.low_rank, "MIN_TOKENS", 0)


LARGE = {"dtype": "bfloat16", "width": 128, "rank": 24}
"""What the kernels take."""


@pytest.mark.parametrize("tokens", [0, 17])
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_definition(dtype: str, implementation: str | None, tokens: int) -> None:
    inputs, dy = operands(dtype, tokens)
    found = _found(inputs, dy, implementation=implementation)
    assert_right(found, expected(inputs, dy), dtype)
    assert {str(x.dtype) for x in found.values()} == {dtype}


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rank", [1, 8, 13])
def test_activations(activation: str, offset: bool, rank: int) -> None:
    inputs, dy = operands(rank=rank, offset=offset)
    found = _found(inputs, dy, activation=activation)
    assert_right(found, expected(inputs, dy, activation), "float32")


def test_parameters_of_another_dtype() -> None:
    inputs, dy = operands("bfloat16")
    wide = {n: x if n == "x" else x.astype(np.float32) for n, x in inputs.items()}
    found = _found(wide, dy)
    assert_right(found, expected(inputs, dy), "bfloat16")
    narrow = {n for n, x in found.items() if x.dtype == jnp.bfloat16}
    assert narrow == {"y", "dx"}
    assert {str(found[n].dtype) for n in ("dfirst", "dsecond", "doffset")} == {"float32"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_way_of_the_kernels_where_there_is_none(activation: str, offset: bool) -> None:
    """Gradients, under jit and remat, one call and several at once."""
    inputs, dy = operands(**LARGE, tokens=8, offset=offset)
    call = jax.checkpoint(functools.partial(layers.low_rank, activation=activation))
    found = jax.jit(functools.partial(_found, call=call))
    assert_right(found(inputs, dy), expected(inputs, dy, activation), "bfloat16")
    alone = ("second", "offset")
    stacked = {n: x if n in alone else np.stack([x, -x]) for n, x in inputs.items()}
    axes = {n: None if n in alone else 0 for n in inputs}
    both = jax.jit(jax.vmap(functools.partial(_found, call=call), (axes, None)))(stacked, dy)
    for i in range(2):
        one = {n: x if n in alone else x[i] for n, x in stacked.items()}
        right = expected(one, dy, activation)
        assert_right({n: x[i] for n, x in both.items()}, right, "bfloat16")


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivative(activation: str) -> None:
    inputs, dy = operands(**LARGE, tokens=4)

    def gradient(dtype: str, x: jax.Array) -> jax.Array:
        given = {n: a.astype(dtype) for n, a in (inputs | {"x": x}).items()}
        return _found(given, jnp.asarray(dy, dtype), activation=activation)["dx"]

    tangents = {}
    for dtype in ("bfloat16", "float32"):
        x = 0.5 * jnp.asarray(inputs["x"], dtype)  # the slopes are not close to zero
        _, tangents[dtype] = jax.jvp(functools.partial(gradient, dtype), (x,), (x,))
    right = {"dx": np.asarray(tangents["float32"])}
    assert_right({"dx": tangents["bfloat16"]}, right, "bfloat16")


PLACES = {
    "rows": {"x": P("data"), "first": P(), "second": P(), "offset": P()},
    "rank": {
        "x": P("data"),
        "first": P(None, "model"),
        "second": P("model"),
        "offset": P(),
    },
    "matrices by rows": {
        "x": P("data"),
        "first": P("data"),
        "second": P("data"),
        "offset": P("data"),
    },
    "channels": {
        "x": P("data", None, "model"),
        "first": P("model"),
        "second": P(None, "model"),
        "offset": P("model"),
    },
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
@pytest.mark.parametrize(
    ("place", "axis_type"),
    [*((place, AxisType.Auto) for place in PLACES), ("rows", AxisType.Explicit)],
    ids=str,
)
def test_meshes(place: str, axis_type: AxisType, cpus: list[Any]) -> None:
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    inputs, dy = operands(**LARGE, tokens=8)
    specs = PLACES[place]
    found = jax.jit(functools.partial(_found, activation="tanh"))(
        meshes.put(mesh, specs, inputs), meshes.put(mesh, {"y": specs["x"]}, {"y": dy})["y"]
    )
    assert_right(found, expected(inputs, dy, "tanh"), "bfloat16")


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_gradients_through_shard_map(cpus: list[Any]) -> None:
    inputs, dy = operands(**LARGE, tokens=8)
    specs = PLACES["rows"]

    def loss(inputs: dict, dy: jax.Array) -> jax.Array:
        y = layers.low_rank(**inputs, activation="sigmoid")
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AxisType.Auto, cpus),
        in_specs=(specs, specs["x"]),
        out_specs=P(),
    )
    found = jax.jit(jax.grad(mapped))(inputs, dy)
    right = expected(inputs, dy, "sigmoid")
    assert_right(found, {n: right[f"d{n}"] for n in found}, "bfloat16")


# Which implementation runs.

MANY = {**LARGE, "tokens": 6144}


def _targets(case: dict[str, Any], call: Callable[..., Any] = _found, **options: Any) -> set[str]:
    """The targets of a program for an H200 with the gradients."""
    inputs, dy = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(**case))
    traced = jax.jit(functools.partial(call, **options)).trace(inputs, dy)
    return hlo.targets(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_programs_for_a_gpu(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)
    both, few = _targets_of(activation), {**MANY, "tokens": 6143}
    targets = functools.partial(_targets, activation=activation)
    with hlo.device("cuda"):
        assert targets(MANY) == targets({**MANY, "offset": False}) == both
        assert targets(few) == set()
        assert targets(few, implementation="ffi") == both
        for change in ({"dtype": "float32"}, {"width": 192}, {"rank": 20}, {"rank": 264}):
            assert targets({**MANY, **change}) == set(), change
            with pytest.raises(NotImplementedError, match=r"low_rank.*the cuda kernels take"):
                targets({**MANY, **change}, implementation="ffi")
        for name in ("xla", "reference"):
            assert targets(MANY, implementation=name) == set()
    monkeypatch.setattr(internals.gpus, "device_kinds", set)
    assert targets(MANY) == set()
    with pytest.raises(NotImplementedError, match="no CUDA GPU is here"):
        targets(MANY, implementation="ffi")


def test_models_take_the_kernels_for_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)

    def found(layers: str | None, inputs: dict, dy: jax.Array) -> Any:
        def call(x: jax.Array, first: jax.Array, second: jax.Array, offset: jax.Array) -> jax.Array:
            vector = offset.reshape((1,) * (x.ndim - 1) + offset.shape)
            return checkpoint_name(of_model(first, second, x, layers, "tanh", vector), "y")

        return _found(inputs, dy, jax.checkpoint(call))

    def single(inputs: dict, dy: jax.Array) -> Any:
        one = {**inputs, "x": inputs["x"].reshape(-1, dy.shape[-1])}
        return found(None, one, dy.reshape(one["x"].shape))

    with hlo.device("cuda"):
        for layers_option, targets in {None: 2, "ffi": 2, "xla": 0}.items():
            assert len(_targets(MANY, functools.partial(found, layers_option))) == targets
        assert _targets(MANY, single) == set()


# Bad input.


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("name", ["x", "first", "second", "offset"])
def test_wrong_arguments(name: str) -> None:
    inputs, _ = operands()

    def error(change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught:
            layers.low_rank(**{**inputs, name: change(inputs[name])})
        return str(caught.value)

    assert f"low_rank: {name} has shape (1, " in error(lambda x: x[None], ValueError)
    assert "accepted is [" in error(lambda x: np.concatenate([x, x], -1), ValueError)
    assert f"low_rank: {name} is int32" in error(lambda x: x.astype(np.int32), TypeError)
    assert f"low_rank: {name} is a list" in error(lambda x: x.tolist(), TypeError)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("option", "value"), [("implementation", "cuda"), ("activation", "relu")], ids=str
)
def test_wrong_options(option: str, value: str) -> None:
    inputs, _ = operands()
    options: Any = {option: value}
    match = f"low_rank: {option} is '{value}'; accepted are"
    with pytest.raises(ValueError, match=match):
        layers.low_rank(**inputs, **options)
    with pytest.raises(NotImplementedError, match=r"low_rank.*the cuda kernels take bfloat16"):
        layers.low_rank(**inputs, implementation="ffi")
