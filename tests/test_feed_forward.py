"""`rwkv_jax.layers.feed_forward` against its formula in numpy float64, and where the kernels are
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
from rwkv_jax.models._channel_mixing import feed_forward as of_model
from rwkv_jax.models._linear import Weight, WeightByInput
from support import hlo, internals, meshes, tolerance
from support.cases import DTYPES

ON_GPU = jax.default_backend() == "gpu"
FORWARD, BACKWARD = internals.feed_forward.TARGETS.values()


def _operands(
    dtype: str = "float32", tokens: int = 17, width: int = 32, hidden: int = 48, rows: int = 2
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng([rows, tokens, width, hidden])
    shapes = {"x": (rows, tokens, width), "key": (hidden, width), "value": (width, hidden)}
    scales = {"x": 1.0, "key": width**-0.5, "value": hidden**-0.5}
    inputs = {
        n: (scales[n] * rng.standard_normal(s)).astype(DTYPES[dtype]) for n, s in shapes.items()
    }
    return inputs, rng.standard_normal(shapes["x"]).astype(DTYPES[dtype])


def _expected(inputs: dict[str, np.ndarray], dy: np.ndarray) -> dict[str, np.ndarray]:
    x, key, value, dy = (np.asarray(a, np.float64) for a in (*inputs.values(), dy))
    positive = np.maximum(x @ key.T, 0)
    dproduct = 2 * positive * (dy @ value)
    return {
        "y": positive**2 @ value.T,
        "dx": dproduct @ key,
        "dkey": np.einsum("btf,btc->fc", dproduct, x),
        "dvalue": np.einsum("btc,btf->cf", dy, positive**2),
    }


def _found(
    inputs: Any, dy: Any, call: Callable[..., Any] = layers.feed_forward, **options: Any
) -> dict[str, Any]:
    y, vjp = jax.vjp(lambda x: call(**x, **options), inputs)
    return {"y": y} | {f"d{n}": d for n, d in vjp(dy)[0].items()}


def _assert_right(found: dict[str, Any], right: dict[str, np.ndarray], dtype: str) -> None:
    """The products are rounded to the dtype of `x`."""
    ceiling = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, ceiling)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes the way of the kernels for a few tokens as well."""
    internals.pretend(monkeypatch, "cuda", None)
    monkeypatch.setattr(internals.gpus, "why_not_hopper", lambda: None)
    monkeypatch.setattr(internals.feed_forward, "MIN_TOKENS", 0)


LARGE = {"dtype": "bfloat16", "width": 512, "hidden": 512}
"""What the kernels take."""


@pytest.mark.parametrize("tokens", [0, 17])
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_definition(dtype: str, implementation: str | None, tokens: int) -> None:
    inputs, dy = _operands(dtype, tokens)
    found = _found(inputs, dy, implementation=implementation)
    _assert_right(found, _expected(inputs, dy), dtype)
    assert {str(x.dtype) for x in found.values()} == {dtype}


def test_weights_of_another_dtype() -> None:
    inputs, dy = _operands("bfloat16")
    wide = {n: x if n == "x" else x.astype(np.float32) for n, x in inputs.items()}
    found = _found(wide, dy)
    _assert_right(found, _expected(inputs, dy), "bfloat16")
    narrow = {n for n, x in found.items() if x.dtype == jnp.bfloat16}
    assert narrow == {"y", "dx"}
    assert {str(found[n].dtype) for n in ("dkey", "dvalue")} == {"float32"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_the_way_of_the_kernels_where_there_is_none() -> None:
    """Gradients, under jit and remat, one call and several at once."""
    inputs, dy = _operands(**LARGE, tokens=8)
    call = jax.checkpoint(layers.feed_forward)
    _assert_right(jax.jit(functools.partial(_found, call=call))(inputs, dy), *_right(inputs, dy))
    stacked = {n: x if n == "value" else np.stack([x, 2 * x]) for n, x in inputs.items()}
    axes = {n: None if n == "value" else 0 for n in inputs}
    found = jax.jit(jax.vmap(_found, (axes, None)))(stacked, dy)
    for i in range(2):
        one = {n: x if n == "value" else x[i] for n, x in stacked.items()}
        _assert_right({n: x[i] for n, x in found.items()}, *_right(one, dy))


def _right(inputs: dict[str, np.ndarray], dy: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    return _expected(inputs, dy), "bfloat16"


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_second_derivative() -> None:
    inputs, dy = _operands(**LARGE, tokens=4)

    def gradient(x: jax.Array) -> jax.Array:
        return _found(inputs | {"x": x}, jnp.asarray(dy))["dx"]

    x = jnp.asarray(inputs["x"])
    _, tangent = jax.jvp(gradient, (x,), (x,))
    # The gradient is of degree 1 in x.
    _assert_right({"dx": tangent}, {"dx": _expected(inputs, dy)["dx"]}, "bfloat16")


PLACES = {
    "rows": {"x": P("data"), "key": P(), "value": P()},
    "hidden": {"x": P("data"), "key": P("model"), "value": P(None, "model")},
    "weights by rows": {"x": P("data"), "key": P("data"), "value": P("data")},
    "channels": {"x": P("data", None, "model"), "key": P(None, "model"), "value": P("model")},
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
    inputs, dy = _operands(**LARGE, tokens=8)
    specs = PLACES[place]
    found = jax.jit(_found)(
        meshes.put(mesh, specs, inputs), meshes.put(mesh, {"y": specs["x"]}, {"y": dy})["y"]
    )
    _assert_right(found, *_right(inputs, dy))


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_gradients_through_shard_map(cpus: list[Any]) -> None:
    inputs, dy = _operands(**LARGE, tokens=8)
    specs = PLACES["rows"]

    def loss(inputs: dict, dy: jax.Array) -> jax.Array:
        y = layers.feed_forward(**inputs)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32)), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AxisType.Auto, cpus),
        in_specs=(specs, specs["x"]),
        out_specs=P(),
    )
    found = jax.jit(jax.grad(mapped))(inputs, dy)
    right = _expected(inputs, dy)
    _assert_right(found, {n: right[f"d{n}"] for n in found}, "bfloat16")


# Which implementation runs.

MANY = {**LARGE, "tokens": 2048}


def _targets(case: dict[str, Any], call: Callable[..., Any] = _found, **options: Any) -> set[str]:
    """The targets of a program for an H200 with the gradients."""
    inputs, dy = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _operands(**case))
    traced = jax.jit(functools.partial(call, **options)).trace(inputs, dy)
    return hlo.targets(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_programs_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)
    both, few = {FORWARD, BACKWARD}, {**MANY, "tokens": 2047}
    with hlo.device("cuda"):
        assert _targets(MANY) == both
        assert _targets(few) == set()
        wide = {**MANY, "hidden": 8192}
        assert _targets({**wide, "tokens": 512}) == {FORWARD}
        assert _targets({**wide, "tokens": 511}) == set()
        assert _targets(few, implementation="ffi") == both
        for change in ({"dtype": "float32"}, {"width": 544}, {"width": 448}, {"hidden": 320}):
            assert _targets({**MANY, **change}) == set(), change
            with pytest.raises(NotImplementedError, match=r"feed_forward.*the cuda kernels take"):
                _targets({**MANY, **change}, implementation="ffi")
        for name in ("xla", "reference"):
            assert _targets(MANY, implementation=name) == set()
    monkeypatch.setattr(internals.gpus, "device_kinds", set)
    assert _targets(MANY) == set()
    with pytest.raises(NotImplementedError, match="no CUDA GPU is here"):
        _targets(MANY, implementation="ffi")


def test_models_take_the_kernels_for_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)

    def found(kind: str, layers: str | None, inputs: dict, dy: jax.Array) -> Any:
        def call(x: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            scale = jnp.ones((len(key), 1)) if kind == "scale" else None
            last = WeightByInput(value.T) if kind == "by input" else Weight(value)
            return checkpoint_name(of_model(Weight(key, scale), last, x, layers), "y")

        return _found(inputs, dy, jax.checkpoint(call))

    with hlo.device("cuda"):
        for layers_option, targets in {None: 2, "ffi": 2, "xla": 0}.items():
            call = functools.partial(found, "plain", layers_option)
            assert len(_targets(MANY, call)) == targets
        for kind in ("scale", "by input"):
            assert _targets(MANY, functools.partial(found, kind, None)) == set()


# Bad input.


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("name", ["x", "key", "value"])
def test_wrong_arguments(name: str) -> None:
    inputs, _ = _operands()

    def error(change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught:
            layers.feed_forward(**{**inputs, name: change(inputs[name])})
        return str(caught.value)

    assert f"feed_forward: {name} has shape (1, " in error(lambda x: x[None], ValueError)
    assert "accepted is [" in error(lambda x: np.concatenate([x, x], -1), ValueError)
    assert f"feed_forward: {name} is int32" in error(lambda x: x.astype(np.int32), TypeError)
    assert f"feed_forward: {name} is a list" in error(lambda x: x.tolist(), TypeError)


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_implementation() -> None:
    inputs, _ = _operands()
    with pytest.raises(ValueError, match="feed_forward: implementation is 'cuda'; accepted are"):
        layers.feed_forward(**inputs, implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"feed_forward.*the cuda kernels take bfloat16"):
        layers.feed_forward(**inputs, implementation="ffi")
