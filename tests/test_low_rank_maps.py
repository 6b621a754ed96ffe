"""`rwkv_jax.layers.low_rank_maps` against the formula of each map in numpy float64, and where the
kernels are chosen. What the kernels compute only a GPU can show (test_gpu.py)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import layers
from rwkv_jax.models._linear import low_rank_maps as of_model
from support import hlo, internals, meshes
from support.cases import DTYPES
from support.low_rank import assert_right, expected, operands

ON_GPU = jax.default_backend() == "gpu"

TARGET = internals.low_rank_maps.TARGET

MAPS = (("tanh", 16, True), ("identity", 8, False), ("sigmoid", 24, False))
"""The activation of each map, its rank, and whether it has an offset."""

Inputs = list[dict[str, Any]]


def _inputs(dtype: str = "float32", tokens: int = 17, width: int = 48) -> tuple[Inputs, Any]:
    each = [operands(dtype, tokens, width, rank, offset=offset) for _, rank, offset in MAPS]
    return [inputs for inputs, _ in each], [dy for _, dy in each]


def _call(inputs: Inputs, **options: Any) -> tuple[jax.Array, ...]:
    maps = [
        layers.LowRankMap(**one, activation=activation)
        for one, (activation, *_) in zip(inputs, MAPS, strict=True)
    ]
    return layers.low_rank_maps(maps, **options)


def _found(inputs: Inputs, dys: Any, call: Callable[..., Any] = _call) -> Any:
    """For each map y and the gradients."""
    ys, vjp = jax.vjp(call, inputs)
    return [
        {"y": y} | {f"d{n}": d for n, d in gradients.items()}
        for y, gradients in zip(ys, vjp(tuple(dys))[0], strict=True)
    ]


def _assert_all_right(found: Any, inputs: Inputs, dys: Any, dtype: str = "bfloat16") -> None:
    for results, one, dy, (activation, *_) in zip(found, inputs, dys, MAPS, strict=True):
        assert_right(results, expected(one, dy, activation), dtype)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """None takes the way of the kernels for a few tokens as well."""
    internals.pretend(monkeypatch, "cuda", None)
    monkeypatch.setattr(internals.gpus, "why_not_hopper", lambda: None)
    monkeypatch.setattr(internals.low_rank_maps, "MIN_TOKENS", 0)


@pytest.mark.parametrize(
    ("dtype", "implementation", "tokens"),
    [*((dtype, None, 17) for dtype in DTYPES), ("float32", "xla", 17), ("float32", "reference", 0)],
)
def test_definition(dtype: str, implementation: str | None, tokens: int) -> None:
    inputs, dys = _inputs(dtype, tokens)
    call = functools.partial(_call, implementation=implementation)
    found = jax.jit(functools.partial(_found, call=call))(inputs, dys)
    _assert_all_right(found, inputs, dys, dtype)
    assert {str(x.dtype) for one in found for x in one.values()} == {dtype}


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_the_way_of_the_kernels_where_there_is_none() -> None:
    """Gradients of parameters in float32, under jit and remat, one call and several at once."""
    inputs, dys = _inputs("bfloat16", 8)
    wide = [{n: x if n == "x" else x.astype(np.float32) for n, x in m.items()} for m in inputs]
    found = jax.jit(functools.partial(_found, call=jax.checkpoint(_call)))
    results = found(wide, dys)
    _assert_all_right(results, inputs, dys)
    assert {str(one["dfirst"].dtype) for one in results} == {"float32"}
    stacked = [one | {"x": np.stack([one["x"], -one["x"]])} for one in inputs]
    axes = [{n: 0 if n == "x" else None for n in one} for one in inputs]
    both = jax.jit(jax.vmap(found, (axes, None)))(stacked, dys)
    for i in range(2):
        one = [m | {"x": m["x"][i]} for m in stacked]
        _assert_all_right(jax.tree.map(lambda x, i=i: x[i], both), one, dys)


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_second_derivative() -> None:
    inputs, dys = _inputs("bfloat16", 4)

    def gradients(dtype: str, scale: jax.Array) -> list[jax.Array]:
        given = [
            {n: jnp.asarray(x, dtype) * (0.5 * scale if n == "x" else 1) for n, x in one.items()}
            for one in inputs
        ]
        return [one["dx"] for one in _found(given, [jnp.asarray(dy, dtype) for dy in dys])]

    found, right = (
        jax.jvp(jax.jit(functools.partial(gradients, dtype)), (one,), (one,))[1]
        for dtype in ("bfloat16", "float32")
        for one in [jnp.ones((), dtype)]
    )
    for x, y in zip(found, right, strict=True):
        assert_right({"dx": x}, {"dx": np.asarray(y)}, "bfloat16")


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
@pytest.mark.parametrize(
    ("x", "first", "axis_type"),
    [
        (P("data"), P(), AxisType.Explicit),
        (P("data"), P(None, "model"), AxisType.Auto),
        (P("data", None, "model"), P("model"), AxisType.Auto),
    ],
    ids=str,
)
def test_meshes(x: P, first: P, axis_type: AxisType, cpus: list[Any]) -> None:
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    inputs, dys = _inputs("bfloat16", 8)
    specs = {"x": x, "first": first, "second": P(*reversed((None, *first)[-2:])), "offset": P()}
    put = [meshes.put(mesh, {n: specs[n] for n in one}, one) for one in inputs]
    cotangents = [meshes.put(mesh, {"y": x}, {"y": dy})["y"] for dy in dys]
    _assert_all_right(jax.jit(_found)(put, cotangents), inputs, dys)


@pytest.mark.usefixtures("kernels")
@pytest.mark.skipif(ON_GPU, reason="the kernels may not run on this GPU")
def test_gradients_through_shard_map(cpus: list[Any]) -> None:
    inputs, dys = _inputs("bfloat16", 8)
    specs = [{n: P("data") if n == "x" else P() for n in one} for one in inputs]

    def loss(inputs: Inputs, dys: Any) -> jax.Array:
        terms = (
            jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))
            for y, dy in zip(_call(inputs), dys, strict=True)
        )
        return jax.lax.psum(sum(terms), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AxisType.Auto, cpus),
        in_specs=(specs, [P("data")] * len(dys)),
        out_specs=P(),
    )
    for one, of_one, dy, (activation, *_) in zip(
        jax.jit(jax.grad(mapped))(inputs, dys), inputs, dys, MAPS, strict=True
    ):
        right = expected(of_one, dy, activation)
        assert_right(
            {f"d{n}": x for n, x in one.items()}, {f"d{n}": right[f"d{n}"] for n in one}, "bfloat16"
        )


# Which implementation runs.


def _targets(call: Callable[..., Any], *given: Any) -> set[str]:
    """The targets of a program for an H200."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    return hlo.targets(jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())


def test_programs_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)

    def targets(tokens: int = 256, width: int = 48, dtype: str = "bfloat16", **options: Any) -> Any:
        return _targets(functools.partial(_call, **options), _inputs(dtype, tokens, width)[0])

    with hlo.device("cuda"):
        assert targets() == targets(2048) == {TARGET}
        assert (
            targets(255) == targets(2049) == targets(dtype="float32") == targets(width=52) == set()
        )
        assert targets(255, implementation="ffi") == {TARGET}
        for name in ("xla", "reference"):
            assert targets(implementation=name) == set()
        changes: tuple[dict[str, Any], ...] = ({"dtype": "float32"}, {"width": 52})
        for change in changes:
            with pytest.raises(NotImplementedError, match=r"low_rank_maps.*the cuda kernels take"):
                targets(implementation="ffi", **change)
        inputs, dys = _inputs("bfloat16", 256)
        assert _targets(_found, inputs, dys) == {TARGET}
        inputs[1]["first"], inputs[1]["second"] = (inputs[1][n][..., :4] for n in ("first", "x"))
        inputs[1]["second"] = np.zeros((4, 48), inputs[1]["x"].dtype)
        assert _targets(_call, inputs) == set()
    monkeypatch.setattr(internals.gpus, "device_kinds", set)
    assert targets() == set()
    with pytest.raises(NotImplementedError, match="no CUDA GPU is here"):
        targets(implementation="ffi")


def test_models_take_the_kernels_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)

    def found(layers_option: str | None, inputs: Inputs) -> Any:
        maps = [layers.LowRankMap(**one) for one in inputs]
        of_axes = [
            m
            if m.offset is None
            else m._replace(offset=m.offset.reshape((1,) * (m.x.ndim - 1) + m.offset.shape))
            for m in maps
        ]
        return of_model(of_axes, layers_option)

    inputs, _ = _inputs("bfloat16", 256)
    single = [one | {"x": one["x"].reshape(512, -1)} for one in inputs]
    with hlo.device("cuda"):
        for layers_option, targets in {None: {TARGET}, "ffi": {TARGET}, "xla": set()}.items():
            assert _targets(functools.partial(found, layers_option), inputs) == targets
        assert _targets(functools.partial(found, None), single) == set()


# Bad input.


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_arguments() -> None:
    inputs, _ = _inputs()

    def error(kind: type[Exception], place: int, **changes: Any) -> str:
        maps = [layers.LowRankMap(**one) for one in inputs]
        maps[place] = maps[place]._replace(**changes)
        with pytest.raises(kind) as caught:
            layers.low_rank_maps(maps)
        return str(caught.value)

    first = inputs[1]["first"]
    assert "low_rank_maps: maps[1].first has shape (8,)" in error(ValueError, 1, first=first[0])
    assert "accepted is [C, Q]" in error(ValueError, 1, first=first[:40])
    assert "maps[1].second has shape" in error(ValueError, 1, first=first[:, :4])
    assert "maps[0].offset is int32" in error(TypeError, 0, offset=np.zeros(48, np.int32))
    assert "maps[2].x is a list" in error(TypeError, 2, x=[1.0])
    other = inputs[2]["x"].astype(np.float16)
    assert "maps[2].x is float16 where the others are float32" in error(TypeError, 2, x=other)
    assert "maps[2].activation is 'relu'; accepted" in error(ValueError, 2, activation="relu")
    for maps in ([], [layers.LowRankMap(**inputs[0])] * 8):
        with pytest.raises(ValueError, match=f"{len(maps)} maps; accepted are 1 to 7"):
            layers.low_rank_maps(maps)
    with pytest.raises(ValueError, match="implementation is 'cuda'; accepted"):
        _call(inputs, implementation="cuda")
