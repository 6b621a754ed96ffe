"""JAX's transformations of the operators, compared with the reference written out by hand."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rwkv_jax
from support import tolerance
from support.cases import Case
from support.harness import assert_right, expected, operands, value_and_gradients
from support.operators import FAST, SEQUENCES, Run, runs
from support.tolerance import assert_trees_close

pytestmark = pytest.mark.quick("run", "op")

CASE = Case(2, 16, 2, 32)
ALL = runs(CASE)
RUNS = [x for x in ALL if x.values[0].implementation != "xla"]
"""All but xla, which compiles slowly and has the same rules as the native kernels."""

each_run = pytest.mark.parametrize("run", RUNS)
each_of_all = pytest.mark.parametrize("run", ALL)
each_custom_derivative = pytest.mark.parametrize(
    "run", [x for x in RUNS if "reference" not in (x.id or "")]
)
each_reference = pytest.mark.parametrize("run", [x for x in RUNS if "reference" in (x.id or "")])


def _inputs(run: Run, *leading: int, case: Case = CASE) -> tuple[jax.Array, ...]:
    """Operands with mapped axes in front of them."""
    several = [
        run.operator.make(Case(case.B, case.T, case.H, case.K, seed=seed))[0]
        for seed in range(int(np.prod(leading, dtype=int)))
    ]
    stacked = {name: np.stack([one[name] for one in several]) for name in run.names}
    return tuple(jnp.asarray(x.reshape(*leading, *x.shape[1:])) for x in stacked.values())


def _call(run: Run, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return run(*operands, precision="highest")


def _loss(run: Run, *operands: jax.Array) -> jax.Array:
    return _scalar(_call(run, *operands))


def _scalar(results: Sequence[jax.Array]) -> jax.Array:
    y, *states = results
    return jnp.sum(jnp.sin(y)) + sum(jnp.sum(jnp.cos(state)) for state in states)


def _gradients(run: Run, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *xs: _loss(run, *xs), argnums=range(len(operands)))(*operands)


def _result_shapes(run: Run) -> list[tuple[int, ...]]:
    inputs = dict(zip(run.names, _inputs(run), strict=True))
    return [inputs[name].shape for name in ("v", *run.operator.states)]


def _reference(run: Run) -> Run:
    return Run(run.op, "reference")


@functools.cache
def _results(run: Run) -> Callable[..., Any]:
    """A jitted function: the results of the reference."""
    return jax.jit(lambda *xs: _call(_reference(run), *xs))


@functools.cache
def _result_gradients(run: Run) -> Callable[..., Any]:
    """A jitted function: the gradients of the reference."""
    return jax.jit(lambda *xs: _gradients(_reference(run), *xs))


def _one_by_one(function: Any, mapped: tuple[bool, ...], operands: tuple[jax.Array, ...]) -> Any:
    size = next(x.shape[0] for x, m in zip(operands, mapped, strict=True) if m)
    results = [
        function(*(x[i] if m else x for x, m in zip(operands, mapped, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


@each_of_all
def test_jit_and_eager_agree(run: Run) -> None:
    operands = _inputs(run)
    eager = _gradients(run, *operands)
    assert_trees_close(jax.jit(_gradients, static_argnums=0)(run, *operands), eager)
    assert_trees_close(eager, _gradients(_reference(run), *operands))


@pytest.mark.parametrize(
    ("run", "mapped"),
    [
        *((x.values[0], x.values[0].names) for x in RUNS),
        *(
            (run, [name for name in run.names if name != unmapped])
            for run in (x.values[0] for x in RUNS)
            for unmapped in run.names
        ),
        *((run, [only]) for run in (Run(op, None) for op in SEQUENCES) for only in run.names),
    ],
)
def test_vmap_over_some_operands(run: Run, mapped: Sequence[str]) -> None:
    which = tuple(name in mapped for name in run.names)
    operands = tuple(x if m else x[0] for x, m in zip(_inputs(run, 3), which, strict=True))
    axes = tuple(0 if m else None for m in which)
    result = jax.jit(jax.vmap(lambda *xs: _call(run, *xs), in_axes=axes))(*operands)
    assert_trees_close(result, _one_by_one(_results(run), which, operands))


@each_run
def test_nested_vmap(run: Run) -> None:
    operands = list(_inputs(run, 2, 3))
    operands[1] = operands[1][0]  # mapped by the inner vmap only
    operands[4] = operands[4][:, 0]  # mapped by the outer vmap only
    axes = [tuple(None if i == only else 0 for i in range(len(operands))) for only in (4, 1)]
    inner = jax.vmap(lambda *xs: _call(run, *xs), in_axes=axes[0])
    result = jax.jit(jax.vmap(inner, in_axes=axes[1]))(*operands)
    for i, j in itertools.product(range(2), range(3)):
        one = [x[i, j] for x in operands]
        one[1], one[4] = operands[1][j], operands[4][i]
        assert_trees_close(jax.tree.map(lambda x, i=i, j=j: x[i, j], result), _results(run)(*one))


@each_run
def test_vmap_of_no_elements(run: Run) -> None:
    results = jax.vmap(lambda *xs: _call(run, *xs))(*(x[:0] for x in _inputs(run, 1)))
    assert [x.shape for x in results] == [(0, *shape) for shape in _result_shapes(run)]


def _mapped_but_for_w(run: Run) -> tuple[tuple[jax.Array, ...], tuple[bool, ...], Any]:
    """Operands of which `w` is not mapped, which are mapped, and the axes of `vmap`."""
    mapped = tuple(name != "w" for name in run.names)
    operands = tuple(x if m else x[0] for x, m in zip(_inputs(run, 3), mapped, strict=True))
    return operands, mapped, tuple(0 if m else None for m in mapped)


@each_of_all
def test_vmap_of_grad(run: Run) -> None:
    operands, mapped, axes = _mapped_but_for_w(run)
    result = jax.jit(jax.vmap(lambda *xs: _gradients(run, *xs), in_axes=axes))(*operands)
    assert_trees_close(result, _one_by_one(_result_gradients(run), mapped, operands))


@each_run
def test_grad_of_vmap(run: Run) -> None:
    operands, mapped, axes = _mapped_but_for_w(run)

    def loss(*xs: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda *ys: _loss(run, *ys), in_axes=axes)(*xs))

    result = list(jax.jit(jax.grad(loss, argnums=range(len(operands))))(*operands))
    expected = list(_one_by_one(_result_gradients(run), mapped, operands))
    w = run.names.index("w")
    expected[w] = jnp.sum(expected[w], axis=0)
    assert_trees_close(result, expected)


@pytest.mark.parametrize(
    ("run", "remat"), [(RUNS[0].values[0], False), *((x.values[0], True) for x in RUNS)], ids=str
)
def test_scan_over_layers(run: Run, remat: bool) -> None:
    v, operands = run.names.index("v"), list(_inputs(run, 2))
    x = operands.pop(v)[0]

    def loss(run: Run, x: jax.Array, *operands: jax.Array) -> jax.Array:
        def layer(x: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            return x + _call(run, *layer[:v], x, *layer[v:])[0], None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, operands)[0]))

    gradients = jax.jit(jax.grad(loss, argnums=range(1, 2 + len(operands))), static_argnums=0)
    assert_trees_close(gradients(run, x, *operands), gradients(_reference(run), x, *operands))


@each_reference
def test_forward_mode_of_the_reference(run: Run) -> None:
    operands, tangents = _inputs(run), _inputs(run, 2)
    tangents = tuple(x[1] for x in tangents)
    _, derivative = jax.jvp(lambda *xs: _loss(run, *xs), operands, tangents)
    gradients = _gradients(run, *operands)
    expected = sum(np.vdot(g, t) for g, t in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(derivative, expected, rtol=1e-3)


@each_reference
def test_second_order_of_the_reference(run: Run) -> None:
    case = Case(1, 3, 1, 2)
    operands, direction = _inputs(run, case=case), tuple(x[1] for x in _inputs(run, 2, case=case))

    def slope(*xs: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack(list(map(jnp.vdot, _gradients(run, *xs), direction))))

    curvature = jax.grad(slope, argnums=range(len(operands)))(*operands)
    step = 1e-2
    ahead, behind = (
        _gradients(run, *(x + s * d for x, d in zip(operands, direction, strict=True)))
        for s in (step, -step)
    )
    for exact, a, b in zip(curvature, ahead, behind, strict=True):
        assert tolerance.rms_error(np.asarray((a - b) / (2 * step)), np.asarray(exact)) < 1e-2


@each_custom_derivative
def test_other_implementations_refuse_forward_mode(run: Run) -> None:
    operands = _inputs(run)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda *xs: _loss(run, *xs), operands, operands)


@each_custom_derivative
def test_other_implementations_refuse_second_derivatives(run: Run) -> None:
    """In reverse and in forward mode, also within `jit` and `vmap`."""
    operands = _inputs(run)

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: _loss(run, x, *operands[1:]))(x)

    message = f"{run.op.removesuffix('_step')}.*second derivative.*implementation='reference'"
    for derivative in (
        jax.grad(lambda x: jnp.sum(gradient(x))),
        jax.jacfwd(jax.jit(gradient)),
        lambda x: jax.vmap(jax.grad(lambda x: jnp.sum(gradient(x))))(x[None]),
    ):
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(derivative, operands[0])


@each_of_all
def test_export_round_trip(run: Run) -> None:
    operands = _inputs(run)
    exported = export.export(
        jax.jit(lambda *xs: _call(run, *xs)),
        disabled_checks=rwkv_jax.export_disabled_checks(),
    )(*operands)
    loaded = export.deserialize(exported.serialize(vjp_order=1))

    def loss(*xs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        results = tuple(loaded.call(*xs))
        return _scalar(results), results

    gradients, results = jax.grad(loss, argnums=range(len(operands)), has_aux=True)(*operands)
    assert_trees_close(results, _results(run)(*operands))
    assert_trees_close(gradients, _result_gradients(run)(*operands))


@each_run
def test_donated_operands_stay_on_the_device(run: Run) -> None:
    operands = _inputs(run)
    expected = _result_gradients(run)(*operands)
    call = jax.jit(lambda *xs: _gradients(run, *xs), donate_argnums=(3, len(operands) - 1))
    with jax.transfer_guard("disallow"):
        result = call(*operands)
    assert_trees_close(result, expected)
    assert operands[3].is_deleted()
    assert operands[-1].is_deleted()


# Packed rows, of both kinds.

IDS = np.array([[1] * 20 + [2] * 45 + [0] * 5, [0] * 5 + [3] * 30 + [1] + [3] * 34], np.int32)
CU_SEQLENS = np.array([[0, 0, 1, 7, 7, 70, 70], [0, 9, 9, 9, 50, 66, 70]], np.int32)

each_packing = pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])


def _packed(op: str, packing: str) -> tuple[dict, dict, np.ndarray, np.ndarray]:
    """Inputs, cotangents, and two packings of the same shape that suit them."""
    if packing == "segment_ids":
        return *operands(op, Case(2, 70, 1, 16)), IDS, IDS[::-1]
    return *operands(op, Case(1, 70, 2, 16), cu_seqlens=CU_SEQLENS[0]), *CU_SEQLENS


@pytest.mark.parametrize("op", ["wkv7", "wkv4"])
@each_packing
def test_vmap_of_packed_rows(packing: str, op: str) -> None:
    """The packing is mapped, and then not; all inputs of tokens but one are mapped."""
    run, (inputs, cotangents, one, other) = FAST[op], _packed(op, packing)
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
            right = expected(op, own, cotangents, **packed)
            assert_right({name: x[i] for name, x in found.items()}, right)


@each_packing
def test_remat_of_packed_rows_inside_a_scan(packing: str) -> None:
    run, (inputs, cotangents, rows, _) = FAST["wkv7"], _packed("wkv7", packing)

    def loss(v: jax.Array, run: Run, remat: bool) -> jax.Array:
        def layer(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            return run(**{**inputs, "v": v, packing: rows}, precision="highest")[0], None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, v, None, length=2)
        return jnp.vdot(y, cotangents["dy"])

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    found = gradient(inputs["v"], run, True)
    assert_right({"dv": found}, {"dv": gradient(inputs["v"], Run("wkv7", "reference"), False)})
