"""The gated delta rule and Kimi Delta Attention."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import rwkv_jax
from rwkv_jax.sharding import shard
from support import cases, hlo, meshes, oracle
from support.cases import Arrays, Case
from support.harness import (
    assert_right,
    ceilings,
    check,
    expected,
    operands,
    value_and_gradients,
)
from support.operators import DELTA_RULES, Run, available

CASE = Case(2, 70, 4, 32, decay="log")
IDS = np.array([[1] * 20 + [2] * 45 + [0] * 5, [0] * 5 + [3] * 30 + [1] + [3] * 34], np.int32)
CU_SEQLENS = np.array([0, 0, 1, 7, 7, 70, 70], np.int32)

each_rule = pytest.mark.parametrize("op", DELTA_RULES)


@each_rule
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_oracle(op: str, name: str) -> None:
    """Its backward pass is the derivative of its forward pass."""
    own = DELTA_RULES[op]
    inputs, cotangents = own.make(Case(1, 4, 2, 3, V=2, decay="log"))
    inputs = {n: x.astype(np.float64) for n, x in inputs.items()}
    gradient = own.oracle(inputs, "log", cotangents)[f"d{name}"]

    def objective(x: np.ndarray) -> float:
        found = own.oracle(inputs | {name: x}, "log")
        return sum(float(np.sum(y * cotangents[f"d{n}"])) for n, y in found.items())

    numeric, step = np.zeros_like(gradient), 1e-5
    for index in np.ndindex(gradient.shape):
        change = np.zeros_like(gradient)
        change[index] = step
        ends = objective(inputs[name] + change), objective(inputs[name] - change)
        numeric[index] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("op", "implementation", "case", "precision"),
    [
        (op, implementation, case, precision)
        for op in DELTA_RULES
        for case, precision in (
            (CASE, "highest"),
            (dataclasses.replace(CASE, V=16, dtype="bfloat16"), None),
        )
        for implementation in available(op, case)
        if implementation != "xla" or (op == "kimi_delta_attention" and precision is None)
    ]
    + [
        ("kimi_delta_attention", None, dataclasses.replace(CASE, **other), "highest")
        for other in (
            {"B": 0},
            {"T": 0},
            {"H": 3, "dtype": "float16"},
            {"regime": "steep"},
            {"regime": "mixed"},
            {"regime": "near 0"},
        )
    ],
    ids=str,
)
def test_values_and_gradients(
    op: str, implementation: str | None, case: Case, precision: str | None
) -> None:
    check(Run(op, implementation), case, precision=precision)


@pytest.mark.parametrize(
    ("implementation", "packing"),
    [
        (implementation, packing)
        for implementation in available("gated_delta_rule", CASE)
        for packing in ("segment_ids", "cu_seqlens")
        if implementation != "xla" or packing == "segment_ids"
    ],
)
def test_packed(implementation: str, packing: str) -> None:
    """Padding holds NaN, and gradients show that nothing leaks from one document to another."""
    case = CASE if packing == "segment_ids" else dataclasses.replace(CASE, B=1)
    packed: dict[str, Any] = {packing: IDS if packing == "segment_ids" else CU_SEQLENS}
    check(Run("gated_delta_rule", implementation), case, **packed)


@each_rule
def test_float32_gates_of_16_bits(op: str) -> None:
    """`g` and `beta` may be float32, are not rounded then, and have gradients of float32."""
    case = dataclasses.replace(CASE, H=3)
    inputs, cotangents = operands(op, dataclasses.replace(case, dtype="bfloat16"))
    exact, _ = operands(op, case)
    inputs |= {"g": exact["g"], "beta": exact["beta"]}
    found = value_and_gradients(Run(op, None), inputs, cotangents)
    assert found["dg"].dtype == found["dbeta"].dtype == jnp.float32
    assert found["dk"].dtype == found["y"].dtype == jnp.bfloat16
    assert_right(found, expected(op, inputs, cotangents))


def test_scale() -> None:
    inputs, cotangents = operands("gated_delta_rule", CASE)
    scaled = functools.partial(rwkv_jax.gated_delta_rule, scale=-0.25)
    run = Run("gated_delta_rule", None)
    found = value_and_gradients(run, inputs, cotangents, function=scaled)
    assert_right(found, oracle.delta_rule(inputs, "log", cotangents, scale=-0.25))


@each_rule
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_step(op: str, implementation: str | None) -> None:
    """One token is a sequence of one token; rows that are not active keep their state."""
    inputs, cotangents = operands(op, dataclasses.replace(CASE, T=1))
    state = inputs.pop("initial_state")
    step = getattr(rwkv_jax, f"{op}_step")
    token = {name: x[:, 0] for name, x in inputs.items()}
    (y, after), vjp = jax.vjp(
        lambda t, s: step(**t, state=s, implementation=implementation), token, state
    )
    dtoken, dstate = vjp(
        (jnp.asarray(cotangents["dy"][:, 0]), jnp.asarray(cotangents["dfinal_state"]))
    )
    found = {"y": y[:, None], "final_state": after, "dinitial_state": dstate}
    found |= {f"d{name}": x[:, None] for name, x in dtoken.items()}
    assert_right(found, expected(op, inputs | {"initial_state": state}, cotangents))
    active = np.array([True, False])
    y, kept = step(**token, state=state, active=active, implementation=implementation)
    np.testing.assert_array_equal(kept[1], state[1])
    np.testing.assert_array_equal(kept[0], after[0])
    assert not np.any(y[1])


def test_vmap() -> None:
    """Over all operands but the keys."""
    several = [operands("gated_delta_rule", dataclasses.replace(CASE, seed=i)) for i in range(2)]
    inputs, cotangents = jax.tree.map(lambda *xs: np.stack(xs), *several)
    inputs["k"] = several[0][0]["k"]
    axes = {name: None if name == "k" else 0 for name in inputs}
    call = jax.vmap(
        lambda x, d: value_and_gradients(Run("gated_delta_rule", None), x, d), (axes, 0)
    )
    found = call(inputs, cotangents)
    for i, (own, d) in enumerate(several):
        right = expected("gated_delta_rule", own | {"k": inputs["k"]}, d)
        assert_right({name: x[i] for name, x in found.items()}, right)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", ["data=2,model=2", "model=2,seq=2"])
def test_shard(axes: str, axis_type: AxisType, cpus: list[Any]) -> None:
    """Two heads of keys, and four of values, along two devices; of 16 bits computed in float32."""
    dtype = "bfloat16" if "seq" in axes else "float32"
    case, op = Case(2, 32, 4, 16, dtype=dtype, decay="log"), "gated_delta_rule"
    over = shard(getattr(rwkv_jax, op), meshes.mesh(axes, axis_type, cpus), **meshes.PLACES[axes])
    inputs, cotangents = operands(op, case)
    run = Run(op, None)
    compiled = value_and_gradients.lower(run, inputs, cotangents, function=over).compile()
    limits = ceilings(run, inputs)
    assert_right(compiled(inputs, cotangents), expected(op, inputs, cotangents), limits)
    if "seq" not in axes:
        assert hlo.collectives(compiled.as_text()) == set()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sharded", [False, True])
def test_more_devices_than_heads_of_keys(
    sharded: bool, axis_type: AxisType, cpus: list[Any]
) -> None:
    """Heads of values are distributed all the same: by `shard`, or by the compiler along two axes,
    each of which divides the heads of keys alone."""
    op, case = "gated_delta_rule", Case(1, 20, 4, 16, decay="log")
    inputs, cotangents = operands(op, case)
    axes = "model" if sharded else ("data", "model")
    mesh = meshes.mesh("model=4" if sharded else "data=2,model=2", axis_type, cpus)
    function = getattr(rwkv_jax, op)
    if sharded:
        function = shard(function, mesh, heads="model")
    heads = jax.sharding.PartitionSpec(None, None, axes)
    whole = dict.fromkeys((*inputs, *cotangents), jax.sharding.PartitionSpec())
    put = functools.partial(
        meshes.put, mesh, whole | dict.fromkeys(("v", "g", "beta", "dy"), heads)
    )
    with jax.set_mesh(mesh):
        found = value_and_gradients(Run(op, None), put(inputs), put(cotangents), function=function)
    assert_right(found, expected(op, inputs, cotangents))
    assert found["y"].sharding.spec[2] == axes


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type: AxisType, cpus: list[Any]) -> None:
    """Operands that are sharded along batch and heads stay so, without a collective."""
    op, case = "gated_delta_rule", Case(2, 32, 4, 16, decay="log")
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    inputs, cotangents = operands(op, case)
    heads = jax.sharding.PartitionSpec("data", None, "model")
    specs = dict.fromkeys((*inputs, *cotangents), heads)
    states = jax.sharding.PartitionSpec("data", "model")
    specs |= dict.fromkeys(("initial_state", "dfinal_state"), states)
    placed = meshes.put(mesh, specs, inputs), meshes.put(mesh, specs, cotangents)
    with jax.set_mesh(mesh):
        compiled = value_and_gradients.lower(Run(op, None), *placed).compile()
        found = compiled(*placed)
    assert_right(found, expected(op, inputs, cotangents))
    assert hlo.collectives(compiled.as_text()) == set()


@pytest.mark.usefixtures("unchecked_types")
def test_export() -> None:
    """With a number of rows that is not known."""
    own = DELTA_RULES["kimi_delta_attention"]
    inputs, _ = own.make(Case(3, 16, 2, 16, decay="log"))
    (b,) = export.symbolic_shape("b")
    shapes = {n: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for n, x in inputs.items()}
    call = jax.jit(lambda inputs: rwkv_jax.kimi_delta_attention(**inputs))
    checks = rwkv_jax.export_disabled_checks()
    exported = export.export(call, platforms=("cpu",), disabled_checks=checks)(shapes)
    found = export.deserialize(exported.serialize()).call(inputs)
    jax.tree.map(np.testing.assert_array_equal, found, call(inputs))


def _given(**changes: Any) -> Arrays:
    inputs, _ = cases.delta_rule(Case(2, 3, 4, 16, decay="log"), by_head=True)
    return inputs | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"v": np.zeros((2, 3, 3, 16), np.float32)},
            ValueError,
            r"gated_delta_rule: g has shape \(2, 3, 4\), so H = 4, where v has H = 3",
        ),
        (
            dict.fromkeys("qk", np.zeros((2, 3, 3, 16), np.float32)),
            ValueError,
            r"q has shape \(2, 3, 3, 16\), so 3 heads, where v has 4; accepted are numbers of",
        ),
        (
            {"k": np.zeros((2, 3, 4, 16), np.float32)},
            ValueError,
            r"k has shape \(2, 3, 4, 16\), so G = 4, where q has G = 2",
        ),
        (
            {"g": np.zeros((2, 3, 4), np.float16)},
            TypeError,
            "g is float16 where the others are float32",
        ),
        ({"scale": "1"}, TypeError, "gated_delta_rule: scale is '1'; accepted is a number"),
        ({"scale": np.inf}, ValueError, "scale is inf; accepted is a finite number"),
        ({"implementation": "fused"}, ValueError, "implementation is 'fused'; accepted are 'ffi'"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_input(changes: Arrays, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rwkv_jax.gated_delta_rule(**_given(**changes))


def test_implementations() -> None:
    inputs = _given()
    found = rwkv_jax.implementations("gated_delta_rule", *inputs.values(), platform="cpu")
    assert list(found) == ["ffi", "pallas", "xla", "reference"]
    assert found["xla"].available
    assert "CUDA GPUs" in str(found["pallas"].reason)
    with pytest.raises(ValueError, match="decay is 'exp'; accepted are None"):
        rwkv_jax.implementations("gated_delta_rule", *inputs.values(), decay="exp")


def test_higher_derivatives_of_the_reference() -> None:
    inputs = {name: jnp.asarray(x) for name, x in _given().items()}

    def total(k: jax.Array) -> Any:
        others = {**inputs, "k": k, "implementation": "reference"}
        o, state = rwkv_jax.gated_delta_rule(**others)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(state))

    def of_direction(k: jax.Array) -> Any:
        return jnp.vdot(jax.grad(total)(k), inputs["k"])

    assert np.isfinite(jax.grad(of_direction)(inputs["k"])).all()
