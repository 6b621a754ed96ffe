"""JAX's transformations of the operators, compared with the oracle."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rwkv_jax
from support.cases import Arrays, Case
from support.harness import assert_right, expected, operands, results, value_and_gradients
from support.operators import FAST, Run, runs
from support.tolerance import assert_trees_close, rms_error

pytestmark = pytest.mark.quick("run", "op")

CASE = Case(2, 16, 2, 32)
ALL: list[Any] = runs(CASE)
RUNS: list[Any] = [x for x in ALL if x.values[0].implementation != "xla"]
"""All but xla, which compiles slowly and has the same rules as the native kernels."""

each_run = pytest.mark.parametrize("run", RUNS)
each_of_all = pytest.mark.parametrize("run", ALL)
each_custom_derivative = pytest.mark.parametrize(
    "run", [x for x in RUNS if x.values[0].implementation != "reference"]
)


def _several(op: str, number: int) -> list[tuple[Arrays, Arrays]]:
    """Inputs and cotangents."""
    return [operands(op, dataclasses.replace(CASE, seed=seed)) for seed in range(number)]


def _stacked(several: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.stack(xs), *several)


def _cotangents(found: Arrays, cotangents: Arrays) -> Arrays:
    return {name: cotangents[f"d{name}"] for name in found}


IDS = np.array([[1] * 20 + [2] * 45 + [0] * 5, [0] * 5 + [3] * 30 + [1] + [3] * 34], np.int32)
CU_SEQLENS = np.array([[0, 0, 1, 7, 7, 70, 70], [0, 9, 9, 9, 50, 66, 70]], np.int32)


def _packed(op: str, packing: str) -> tuple[Arrays, Arrays, np.ndarray, np.ndarray]:
    """Inputs, cotangents, and two packings of the same shape that suit them."""
    if packing == "segment_ids":
        return *operands(op, Case(2, 70, 1, 16)), IDS, IDS[::-1]
    return *operands(op, Case(1, 70, 2, 16), cu_seqlens=CU_SEQLENS[0]), *CU_SEQLENS


PACKED = list(itertools.product(("segment_ids", "cu_seqlens"), (FAST["wkv7"], FAST["wkv4"])))


@each_of_all
def test_without_jit(run: Run) -> None:
    arrays = jax.tree.map(jnp.asarray, operands(run.op, CASE))
    found = inspect.unwrap(value_and_gradients)(run, *arrays)
    assert_right(found, expected(run.op, *arrays))


MAPPED = [
    *((x.values[0], x.values[0].names) for x in ALL),
    *(
        (run, [name for name in run.names if name != unmapped])
        for run in (x.values[0] for x in RUNS)
        for unmapped in run.names
    ),
    *(
        (run, [only])
        for run in (Run("wkv7", None), FAST["wkv6"], FAST["wkv5"], FAST["wkv4"])
        for only in run.names
    ),
]


@pytest.mark.parametrize(("run", "mapped"), MAPPED, ids=lambda x: "-".join(map(str, x)))
def test_vmap(run: Run, mapped: Sequence[str]) -> None:
    """Over some operands, of results and gradients."""
    several = _several(run.op, 3)
    (first, _), (inputs, cotangents) = several[0], _stacked(several)
    inputs = {name: x if name in mapped else first[name] for name, x in inputs.items()}
    axes = {name: 0 if name in mapped else None for name in inputs}
    call = functools.partial(value_and_gradients, run)
    found = jax.vmap(call, in_axes=(axes, 0))(inputs, cotangents)
    for i, (own, d) in enumerate(several):
        one = {name: x if name in mapped else first[name] for name, x in own.items()}
        assert_right({name: x[i] for name, x in found.items()}, expected(run.op, one, d))


@each_run
def test_gradients_of_nested_vmap(run: Run) -> None:
    """The inner `vmap` alone maps one operand, and the outer one another, whose gradients are added
    along the axis that is not mapped."""
    inner, outer = run.names[1], run.names[4]
    several = _several(run.op, 6)
    rows = several[:3], several[3:]
    inputs, cotangents = _stacked([_stacked(row) for row in rows])
    inputs |= {inner: inputs[inner][0], outer: inputs[outer][:, 0]}
    of_inner, of_outer = (
        {name: None if name == only else 0 for name in inputs} for only in (outer, inner)
    )

    @jax.jit
    def call(inputs: Arrays, cotangents: Arrays) -> Arrays:
        of_rows = jax.vmap(lambda xs: results(run, **xs), in_axes=(of_inner,))
        found, vjp = jax.vjp(jax.vmap(of_rows, in_axes=(of_outer,)), inputs)
        gradients = vjp(_cotangents(found, cotangents))[0]
        return found | {f"d{name}": x for name, x in gradients.items()}

    each = [
        [
            expected(run.op, own | {inner: inputs[inner][j], outer: inputs[outer][i]}, d)
            for j, (own, d) in enumerate(row)
        ]
        for i, row in enumerate(rows)
    ]
    right = _stacked([_stacked(row) for row in each])
    right |= {f"d{inner}": right[f"d{inner}"].sum(0), f"d{outer}": right[f"d{outer}"].sum(1)}
    assert_right(call(inputs, cotangents), right)


@each_run
def test_vmap_of_no_elements(run: Run) -> None:
    arrays = operands(run.op, CASE)
    none = jax.tree.map(lambda x: x[None][:0], arrays)
    found = jax.vmap(functools.partial(value_and_gradients, run))(*none)
    right = expected(run.op, *arrays)
    assert {n: x.shape for n, x in found.items()} == {n: (0, *right[n].shape) for n in found}


@pytest.mark.parametrize(
    ("run", "remat", "packing"),
    [
        (RUNS[0].values[0], False, None),
        *(pytest.param(*x.values, True, None, marks=x.marks, id=f"{x.id}-remat") for x in RUNS),
        (FAST["wkv7"], True, "segment_ids"),
        (FAST["wkv7"], True, "cu_seqlens"),
    ],
    ids=str,
)
def test_scan_over_layers(run: Run, remat: bool, packing: str | None) -> None:
    several: list[Any] = _several(run.op, 2)
    rows: dict[str, Any] = {}
    if packing:
        *arrays, ids, _ = _packed(run.op, packing)
        several, rows = [arrays, arrays], {packing: ids}
    layers, cotangents = _stacked(several)
    v, dy = layers.pop("v")[0], cotangents["dy"][0]

    def loss(v: jax.Array, layers: Arrays, run: Run) -> jax.Array:
        def layer(v: jax.Array, layer: Arrays) -> tuple[jax.Array, None]:
            return results(run, **layer, v=v, **rows)["y"], None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.vdot(jax.lax.scan(body, v, layers)[0], dy)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    found, right = (gradients(v, layers, x) for x in (run, Run(run.op, "reference")))
    assert_trees_close(found, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "packing"),
    [
        ("wkv7", {}),
        ("wkv4", {"cu_seqlens": np.array([0, 1, 1, 3])}),
    ],
    ids=["rows", "sequences"],
)
def test_derivatives_of_the_reference(op: str, packing: dict[str, Any]) -> None:
    """Forward mode, and the second derivative against a difference of gradients."""
    run, case = Run(op, "reference"), Case(1, 3, 1, 2)
    packing = {name: np.asarray(x, np.int32) for name, x in packing.items()}
    inputs, cotangents = operands(op, case, **packing)
    direction, _ = operands(op, dataclasses.replace(case, seed=1), **packing)

    def loss(inputs: Arrays) -> jax.Array:
        found = results(run, **inputs, **packing)
        return sum(
            (jnp.vdot(jnp.sin(x), cotangents[f"d{n}"]) for n, x in found.items()), jnp.float32(0)
        )

    gradient = jax.jit(jax.grad(loss))

    def slope(inputs: Arrays) -> jax.Array:
        gradients = jax.grad(loss)(inputs)
        return sum((jnp.vdot(x, direction[n]) for n, x in gradients.items()), jnp.float32(0))

    _, derivative = jax.jvp(loss, (inputs,), (direction,))
    np.testing.assert_allclose(derivative, slope(inputs), rtol=1e-3)
    step = 1e-2
    ahead, behind = (
        gradient({name: x + s * direction[name] for name, x in inputs.items()})
        for s in (step, -step)
    )
    for name, x in jax.jit(jax.grad(slope))(inputs).items():
        difference = np.asarray((ahead[name] - behind[name]) / (2 * step))
        assert rms_error(difference, np.asarray(x)) < 1e-2, name


@each_custom_derivative
def test_what_other_implementations_refuse(run: Run) -> None:
    """Forward mode, and second derivatives in reverse and in forward mode, also within `jit` and
    `vmap`."""
    inputs, _ = operands(run.op, CASE)
    inputs = jax.tree.map(jnp.asarray, inputs)

    def total(gradients: Arrays) -> jax.Array:
        return sum((jnp.sum(x) for x in gradients.values()), jnp.float32(0))

    def gradient(inputs: Arrays) -> Arrays:
        return jax.grad(lambda xs: total(results(run, **xs)))(inputs)

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda xs: results(run, **xs), (inputs,), (inputs,))
    second = jax.grad(lambda xs: total(gradient(xs)))
    message = f"{run.op.removesuffix('_step')}.*second derivative.*implementation='reference'"
    for derivative in (
        second,
        jax.jacfwd(jax.jit(gradient)),
        lambda xs: jax.vmap(second)(jax.tree.map(lambda x: x[None], xs)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(derivative, inputs)


@each_of_all
def test_export_round_trip(run: Run) -> None:
    inputs, cotangents = operands(run.op, CASE)
    call = jax.jit(lambda xs: results(run, **xs))
    exported = export.export(call, disabled_checks=rwkv_jax.export_disabled_checks())(inputs)
    loaded: Any = export.deserialize(exported.serialize(vjp_order=1))
    found, vjp = jax.vjp(loaded.call, inputs)
    (gradients,) = vjp(_cotangents(found, cotangents))
    found |= {f"d{name}": x for name, x in gradients.items()}
    assert_right(found, expected(run.op, inputs, cotangents))


@each_run
def test_donated_operands_stay_on_the_device(run: Run) -> None:
    arrays = operands(run.op, CASE)
    right = expected(run.op, *arrays)
    inputs, cotangents = jax.tree.map(jnp.asarray, arrays)
    call = jax.jit(functools.partial(value_and_gradients, run), donate_argnums=0)
    with jax.transfer_guard("disallow"):
        found = call(inputs, cotangents)
    assert_right(found, right)
    assert all(x.is_deleted() for x in inputs.values())


@pytest.mark.parametrize(
    ("packing", "run"),
    [
        *(pytest.param(*x, id=f"{x[0]}-{x[1].op}") for x in PACKED),
        # In plain XLA each row of sequences has a path of its own.
        pytest.param("cu_seqlens", Run("wkv6", "xla"), marks=pytest.mark.slow),
    ],
)
def test_vmap_of_packed_rows(packing: str, run: Run) -> None:
    """The packing is mapped, and then not; all inputs of tokens but one are mapped."""
    inputs, cotangents, one, other = _packed(run.op, packing)
    several = run.operator.timed[1:]
    mapped = {n: np.stack([x, x[:, ::-1]]) if n in several else x for n, x in inputs.items()}
    axes = {n: 0 if n in several else None for n in inputs}

    def call(inputs: dict, rows: Any) -> dict:
        return value_and_gradients(run, inputs, cotangents, **{packing: rows})

    for rows, axis in ((np.stack([one, other]), 0), (one, None)):
        found = jax.vmap(call, in_axes=(axes, axis))(mapped, rows)
        for i in range(2):
            own = {n: x[i] if n in several else x for n, x in mapped.items()}
            packed: dict[str, Any] = {packing: one if axis is None else rows[i]}
            right = expected(run.op, own, cotangents, **packed)
            assert_right({name: x[i] for name, x in found.items()}, right)
