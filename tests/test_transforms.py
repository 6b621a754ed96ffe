"""JAX's transformations of the operators, compared with the reference written out by hand."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import cases
import rwkv_jax
import tolerance
from cases import Case
from operators import available

CASE = Case(2, 16, 2, 32)
NAMES = ("r", "w", "k", "v", "a", "b", "initial_state")
AVAILABLE = available("wkv7", CASE)
DERIVED = [name for name in AVAILABLE if name != "reference"]

each_implementation = pytest.mark.parametrize("implementation", AVAILABLE)
each_custom_derivative = pytest.mark.parametrize("implementation", DERIVED)


def _inputs(*leading: int, case: Case = CASE) -> tuple[jax.Array, ...]:
    """Operands with mapped axes in front of them."""
    several = [
        cases.wkv7(Case(case.B, case.T, case.H, case.K, seed=seed))[0]
        for seed in range(int(np.prod(leading, dtype=int)))
    ]
    stacked = {name: np.stack([one[name] for one in several]) for name in NAMES}
    return tuple(jnp.asarray(x.reshape(*leading, *x.shape[1:])) for x in stacked.values())


def _call(implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rwkv_jax.wkv7(
        *operands, decay="sigmoid", precision="highest", implementation=implementation
    )


def _loss(implementation: str | None, *operands: jax.Array) -> jax.Array:
    y, state = _call(implementation, *operands)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))


def _gradients(implementation: str | None, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *xs: _loss(implementation, *xs), argnums=range(len(NAMES)))(*operands)


def _assert_alike(result: Any, expected: Any) -> None:
    def named(tree: Any) -> dict[str, np.ndarray]:
        return {jax.tree_util.keystr(k): np.asarray(x) for k, x in jax.tree.leaves_with_path(tree)}

    tolerance.assert_close(named(result), named(expected), tolerance.EXACT_FLOAT32)


def _one_by_one(function: Any, mapped: tuple[bool, ...], operands: tuple[jax.Array, ...]) -> Any:
    size = next(x.shape[0] for x, m in zip(operands, mapped, strict=True) if m)
    results = [
        function(*(x[i] if m else x for x, m in zip(operands, mapped, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *results)


@each_implementation
def test_jit_and_eager_agree(implementation: str) -> None:
    operands = _inputs()
    eager = _gradients(implementation, *operands)
    _assert_alike(jax.jit(_gradients, static_argnums=0)(implementation, *operands), eager)
    _assert_alike(eager, _gradients("reference", *operands))


@each_implementation
@pytest.mark.parametrize("unmapped", [None, *NAMES])
def test_vmap_with_each_operand_mapped_or_not(implementation: str, unmapped: str | None) -> None:
    mapped = tuple(name != unmapped for name in NAMES)
    _check_vmap(implementation, mapped)


@pytest.mark.parametrize("only", NAMES)
def test_vmap_over_one_operand(only: str) -> None:
    _check_vmap(None, tuple(name == only for name in NAMES))


def _check_vmap(implementation: str | None, mapped: tuple[bool, ...]) -> None:
    operands = tuple(x if m else x[0] for x, m in zip(_inputs(3), mapped, strict=True))
    axes = tuple(0 if m else None for m in mapped)
    result = jax.jit(jax.vmap(lambda *xs: _call(implementation, *xs), in_axes=axes))(*operands)
    _assert_alike(result, _one_by_one(REFERENCE, mapped, operands))


REFERENCE = jax.jit(lambda *xs: _call("reference", *xs))
REFERENCE_GRADIENTS = jax.jit(lambda *xs: _gradients("reference", *xs))


@each_implementation
def test_vmap_over_other_axes(implementation: str) -> None:
    operands = _inputs(3)
    moved = tuple(jnp.moveaxis(x, 0, 2) for x in operands)
    call = jax.vmap(lambda *xs: _call(implementation, *xs), in_axes=2, out_axes=1)
    expected = _one_by_one(REFERENCE, (True,) * 7, operands)
    _assert_alike(call(*moved), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), expected))


@each_implementation
def test_nested_vmap(implementation: str) -> None:
    operands = list(_inputs(2, 3))
    operands[1] = operands[1][0]  # w: mapped by the inner vmap only
    operands[4] = operands[4][:, 0]  # a: mapped by the outer vmap only
    inner = jax.vmap(lambda *xs: _call(implementation, *xs), in_axes=(0, 0, 0, 0, None, 0, 0))
    result = jax.jit(jax.vmap(inner, in_axes=(0, None, 0, 0, 0, 0, 0)))(*operands)
    for i, j in itertools.product(range(2), range(3)):
        one = [x[i, j] for x in operands]
        one[1], one[4] = operands[1][j], operands[4][i]
        _assert_alike(jax.tree.map(lambda x, i=i, j=j: x[i, j], result), REFERENCE(*one))


@each_implementation
def test_vmap_of_no_elements(implementation: str) -> None:
    y, state = jax.vmap(lambda *xs: _call(implementation, *xs))(*(x[:0] for x in _inputs(1)))
    assert y.shape == (0, 2, 16, 2, 32)
    assert state.shape == (0, 2, 2, 32, 32)


@each_implementation
def test_vmap_of_grad(implementation: str) -> None:
    operands = list(_inputs(3))
    operands[1] = operands[1][0]
    mapped = tuple(name != "w" for name in NAMES)
    axes = tuple(0 if m else None for m in mapped)
    result = jax.jit(jax.vmap(lambda *xs: _gradients(implementation, *xs), in_axes=axes))(*operands)
    _assert_alike(result, _one_by_one(REFERENCE_GRADIENTS, mapped, tuple(operands)))


@each_implementation
def test_grad_of_vmap(implementation: str) -> None:
    operands = list(_inputs(3))
    operands[1] = operands[1][0]
    axes = tuple(None if name == "w" else 0 for name in NAMES)

    def loss(*xs: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda *ys: _loss(implementation, *ys), in_axes=axes)(*xs))

    result = list(jax.jit(jax.grad(loss, argnums=range(7)))(*operands))
    mapped = tuple(name != "w" for name in NAMES)
    expected = list(_one_by_one(REFERENCE_GRADIENTS, mapped, tuple(operands)))
    expected[1] = jnp.sum(expected[1], axis=0)
    _assert_alike(result, expected)


@each_implementation
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_remat(implementation: str, policy: str | None) -> None:
    operands = _inputs()
    chosen = getattr(jax.checkpoint_policies, policy) if policy else None
    loss = jax.checkpoint(lambda *xs: _loss(implementation, *xs), policy=chosen)
    result = jax.jit(jax.grad(loss, argnums=range(7)))(*operands)
    _assert_alike(result, REFERENCE_GRADIENTS(*operands))


@each_implementation
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(implementation: str, remat: bool) -> None:
    operands = _inputs(2)
    x = operands[0][0]

    def loss(implementation: str, x: jax.Array, *operands: jax.Array) -> jax.Array:
        def layer(x: jax.Array, layer: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            return x + _call(implementation, x, *layer)[0], None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, operands)[0]))

    gradients = jax.jit(jax.grad(loss, argnums=range(1, 8)), static_argnums=0)
    _assert_alike(
        gradients(implementation, x, *operands[1:]), gradients("reference", x, *operands[1:])
    )


@each_implementation
def test_jacrev(implementation: str) -> None:
    operands = _inputs(case=Case(1, 3, 1, 16))

    def first_channels(implementation: str, *operands: jax.Array) -> jax.Array:
        return _call(implementation, *operands)[0][0, :, 0, :2]

    jacobian = jax.jit(jax.jacrev(first_channels, argnums=(2, 7)), static_argnums=0)
    _assert_alike(jacobian(implementation, *operands), jacobian("reference", *operands))


def test_forward_mode_of_the_reference() -> None:
    operands, tangents = _inputs(), _inputs(2)
    tangents = tuple(x[1] for x in tangents)
    _, derivative = jax.jvp(lambda *xs: _loss("reference", *xs), operands, tangents)
    gradients = _gradients("reference", *operands)
    expected = sum(np.vdot(g, t) for g, t in zip(gradients, tangents, strict=True))
    np.testing.assert_allclose(derivative, expected, rtol=1e-3)


def test_second_order_of_the_reference() -> None:
    case = Case(1, 3, 1, 2)
    operands, direction = _inputs(case=case), tuple(x[1] for x in _inputs(2, case=case))

    def slope(*xs: jax.Array) -> jax.Array:
        gradients = _gradients("reference", *xs)
        return jnp.sum(jnp.stack(list(map(jnp.vdot, gradients, direction))))

    curvature = jax.grad(slope, argnums=range(7))(*operands)
    step = 1e-2
    ahead, behind = (
        _gradients("reference", *(x + s * d for x, d in zip(operands, direction, strict=True)))
        for s in (step, -step)
    )
    for exact, a, b in zip(curvature, ahead, behind, strict=True):
        assert tolerance.rms_error(np.asarray((a - b) / (2 * step)), np.asarray(exact)) < 1e-2


@each_custom_derivative
def test_other_implementations_refuse_forward_mode(implementation: str) -> None:
    operands = _inputs()
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda *xs: _loss(implementation, *xs), operands, operands)


@each_implementation
def test_inputs_may_be_donated(implementation: str) -> None:
    operands = _inputs()
    expected = REFERENCE(*operands)
    call = jax.jit(lambda *xs: _call(implementation, *xs), donate_argnums=(3, 6))
    _assert_alike(call(*operands), expected)
    assert operands[3].is_deleted()
    assert operands[6].is_deleted()


@each_implementation
def test_export_round_trip(implementation: str) -> None:
    operands = _inputs()
    exported = export.export(
        jax.jit(lambda *xs: _call(implementation, *xs)),
        disabled_checks=rwkv_jax.export_checks(),
    )(*operands)
    loaded = export.deserialize(exported.serialize(vjp_order=1))
    _assert_alike(loaded.call(*operands), REFERENCE(*operands))

    def loss(*xs: jax.Array) -> jax.Array:
        y, state = loaded.call(*xs)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

    gradients = jax.grad(loss, argnums=range(7))(*operands)
    _assert_alike(gradients, REFERENCE_GRADIENTS(*operands))


@each_implementation
def test_ahead_of_time_compilation(implementation: str) -> None:
    operands = _inputs()
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    compiled = jax.jit(lambda *xs: _gradients(implementation, *xs)).lower(*shapes).compile()
    _assert_alike(compiled(*operands), REFERENCE_GRADIENTS(*operands))


@each_implementation
def test_no_transfer_between_host_and_device(implementation: str) -> None:
    operands = _inputs()
    expected = REFERENCE_GRADIENTS(*operands)
    call = jax.jit(lambda *xs: _gradients(implementation, *xs))
    with jax.transfer_guard("disallow"):
        result = call(*operands)
    _assert_alike(result, expected)


@each_implementation
def test_eval_shape(implementation: str) -> None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _inputs()]
    y, state = jax.eval_shape(lambda *xs: _call(implementation, *xs), *shapes)
    assert (y.shape, state.shape) == ((2, 16, 2, 32), (2, 2, 32, 32))
