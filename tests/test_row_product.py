"""The product of a few rows with a matrix, against numpy in float64."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax.models import _row_product
from rwkv_jax.models._row_product import TARGET, product
from support import hlo, meshes
from support.tolerance import CHUNKED, EXACT_FLOAT32, rms_error

pytestmark = pytest.mark.quick("dtype", "by_output")

NATIVE = rwkv_jax.build_info()["missing"]["cpu"] is None
each_dtype = pytest.mark.parametrize("dtype", _row_product.MAX_ROWS)
MANY = 1 + max(_row_product.MAX_ROWS.values())


def _operands(
    rows: int, inputs: int, outputs: int, dtype: str, *, groups: int = 1, by_output: bool = True
) -> tuple[np.ndarray, Any, Any, np.ndarray]:
    """x, the matrix, its scale, and the product in float64."""
    rng = np.random.default_rng(0)
    shape = (outputs, inputs) if by_output else (inputs, outputs)
    x = rng.standard_normal((rows, inputs), np.float32)
    if dtype != "int8":
        weight = jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        wide = np.asarray(weight, np.float64)
        return x, weight, None, x.astype(np.float64) @ (wide.T if by_output else wide)
    weight = rng.integers(-127, 128, (outputs, inputs), np.int8)
    scale = rng.uniform(0.5, 2, (outputs, groups)).astype(np.float32)
    wide = weight.reshape(outputs, groups, -1) * scale[..., None].astype(np.float64)
    expected = x.astype(np.float64) @ wide.reshape(weight.shape).T
    return x, jnp.asarray(weight if by_output else weight.T), jnp.asarray(scale), expected


@each_dtype
@pytest.mark.parametrize("by_output", [True, False])
def test_right(dtype: str, by_output: bool) -> None:
    """The kernel, with rows that are taken four, two and one at a time, and with vectors of inputs
    and what is left of them; and the formula, which takes more rows. Integers may have groups."""
    kinds = [(1, "float32"), (5, "float32"), (5, "bfloat16")][: 3 if dtype == "int8" else 1]
    for rows, inputs, outputs in ((1, 135, 70), (7, 65, 5), (MANY, 65, 5)):
        for groups, result in kinds:
            sizes = (rows, inputs, outputs, dtype)
            x, weight, scale, expected = _operands(*sizes, groups=groups, by_output=by_output)
            y = product(jnp.asarray(x, result), weight, scale, result, by_output=by_output)
            assert y.dtype == result
            ceiling = EXACT_FLOAT32 if result == "float32" else CHUNKED["output"]
            assert rms_error(np.asarray(y), expected) < ceiling


needs_kernel = pytest.mark.skipif(not NATIVE, reason="the CPU kernels are missing")


@pytest.fixture
def on_cpu(cpus: list[Any]) -> Iterator[None]:
    with jax.default_device(cpus[0]):
        yield


@needs_kernel
@pytest.mark.usefixtures("on_cpu")
@each_dtype
def test_inputs_that_are_zero_are_not_read(dtype: str) -> None:
    """In a matrix by input, those that are zero in all rows: NaN there does not show. There are
    several parts of the inputs and tiles of the outputs, and one part without any input."""
    rows, inputs, outputs = 5, 1100, 1030
    x, weight, scale, _ = _operands(rows, inputs, outputs, dtype, by_output=False)
    x = np.where(np.random.default_rng(1).random(x.shape) < 0.6, 0, x)
    x[:, 256:512] = 0
    x[:, 7] = -0.0
    read = (x != 0).any(axis=0)
    assert 0 < read.sum() < inputs - 256
    wide = np.asarray(weight, np.float64)
    expected = x.astype(np.float64) @ (wide if scale is None else wide * np.asarray(scale).T)
    unread = 99 if dtype == "int8" else jnp.nan
    poisoned = jnp.where(read[:, None], weight, jnp.asarray(unread, weight.dtype))
    call = jax.jit(functools.partial(product, dtype=jnp.float32, by_output=False))
    y = np.asarray(call(jnp.asarray(x), poisoned, scale))
    assert rms_error(y, expected) < EXACT_FLOAT32


@needs_kernel
@pytest.mark.usefixtures("on_cpu")
@each_dtype
@pytest.mark.parametrize("by_output", [True, False])
def test_a_row_has_the_same_bits_with_any_other_rows(dtype: str, by_output: bool) -> None:
    """However many there are, and wherever the row is: alone, in fours, in twos and left over. By
    input, the zeros of other rows do not matter."""
    x, weight, scale, _ = _operands(13, 600, 139, dtype, groups=2, by_output=by_output)
    x = np.where(np.random.default_rng(1).random(x.shape) < 0.6, 0, x)
    call = jax.jit(functools.partial(product, dtype=jnp.float32, by_output=by_output))
    y = np.asarray(call(jnp.asarray(x), weight, scale))
    for some in ([3], [4, 0], [1, 2, 3], [12, 5, 6, 7, 8, 9, 10]):
        np.testing.assert_array_equal(call(jnp.asarray(x[some]), weight, scale), y[some])


@needs_kernel
def test_where_the_kernel_runs() -> None:
    """For few rows on a CPU: neither on other platforms nor for many rows or sequences."""
    x, weight, *_ = _operands(_row_product.MAX_ROWS["bfloat16"], 64, 32, "bfloat16")

    def targets(platform: str, x: Any) -> set[str]:
        traced = jax.jit(lambda x, w: product(x, w, None, jnp.float32)).trace(x, weight)
        return hlo.targets(traced.lower(lowering_platforms=(platform,)).as_text())

    assert targets("cpu", x) == {TARGET}
    assert targets("cuda", x) == set()
    assert targets("cpu", np.concatenate([x, x])) == set()
    assert targets("cpu", x[None]) == set()


def test_derivatives_and_vmap() -> None:
    """Those of the formula, of every input that is no integer."""
    x, weight, *_ = _operands(2, 64, 32, "float32")
    _, integers, scale, _ = _operands(2, 64, 32, "int8", groups=2)

    def sums(x: Any, weight: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
        y, z = product(x, weight, None, x.dtype), product(x, integers, scale, x.dtype)
        return jnp.sum(y**2), jnp.sum(z**2)

    def of_formula(x: Any, weight: Any, scale: Any) -> tuple[jax.Array, jax.Array]:
        wide = _row_product.wide(integers, scale)
        return jnp.sum((x @ weight.T) ** 2), jnp.sum((x @ wide.T) ** 2)

    operands = tuple(map(jnp.asarray, (x, weight, scale)))
    found, expected = (
        jax.jit(jax.jacrev(f, argnums=(0, 1, 2)))(*operands) for f in (sums, of_formula)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert rms_error(a, b) < EXACT_FLOAT32
    _, tangent = jax.jvp(sums, operands, operands)
    _, expected = jax.jvp(of_formula, operands, operands)
    assert rms_error(np.stack(tangent), np.stack(expected)) < EXACT_FLOAT32
    rows = jax.vmap(lambda x: product(x[None], weight, None, x.dtype)[0])(operands[0])
    assert rms_error(np.asarray(rows), x @ np.asarray(weight).T) < EXACT_FLOAT32


@pytest.mark.parametrize("spec", [P("data", None), P(None, "model"), P("model", "data")], ids=str)
def test_parts_of_a_matrix_stay_where_they_are(spec: P) -> None:
    """Each device multiplies with its part. Only results are exchanged, where the inputs are
    distributed, and only the rows."""
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, jax.devices("cpu"))
    x, weight, scale, expected = _operands(2, 64, 32, "int8", groups=4)
    place = functools.partial(NamedSharding, mesh)
    placed = [jax.device_put(a, place(spec)) for a in (weight, scale)]
    rows = jax.device_put(x, place(P(None, None)))
    call = jax.jit(functools.partial(product, dtype=jnp.float32))
    compiled = call.lower(rows, *placed).compile()
    assert hlo.exchanged(compiled.as_text()) <= expected.size * 4
    assert rms_error(np.asarray(compiled(rows, *placed)), expected) < EXACT_FLOAT32


def test_on_explicit_mesh_and_in_shard_map() -> None:
    mesh = meshes.mesh("data=2,model=2", AxisType.Explicit, jax.devices("cpu"))
    x, weight, scale, expected = _operands(2, 64, 32, "int8")
    call = functools.partial(product, dtype=jnp.float32)
    specs = (P("data", None), P("model", None), P("model", None))
    operands = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((x, weight, scale), specs, strict=True)
    ]
    y = jax.jit(call)(*operands)
    assert rms_error(np.asarray(y), expected) < EXACT_FLOAT32
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("data", "model"))
    assert rms_error(np.asarray(jax.jit(mapped)(*operands)), expected) < EXACT_FLOAT32


def test_weights_are_not_made_wide_ahead_of_a_loop() -> None:
    """Where the compiler multiplies, too, a loop over tokens reads the integers each time."""
    x, weight, scale, _ = _operands(MANY, 64, 64, "int8")

    def loop(x: jax.Array, weight: Any, scale: Any) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return product(x, weight, scale, x.dtype), None

        return jax.lax.scan(step, x, length=4)[0]

    text = jax.jit(loop).lower(jnp.asarray(x), weight, scale).compile().as_text() or ""
    entry = text[text.index("\nENTRY") :]
    assert "s8[64,64]" in entry
    assert "f32[64,64]" not in entry
