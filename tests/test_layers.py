"""`rwkv_jax.layers` against formulas in numpy float64: values and gradients, transformations,
meshes and bad input."""

import functools
import math
import re
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
from rwkv_jax._operator.call import Options
from rwkv_jax.layers._function import Operands
from rwkv_jax.layers.value_residual import FUNCTION as VALUE_RESIDUAL
from support import hlo, internals, meshes
from support.cases import DTYPES
from support.layer_functions import (
    LAYER_FUNCTIONS,
    Case,
    assert_right,
    check,
    expected,
    operands,
    value_and_gradients,
)

ON_GPU = jax.default_backend() == "gpu"
NATIVE = ON_GPU and rwkv_jax.build_info()["missing"]["cuda"] is None
IMPLEMENTATIONS = [*(["ffi"] if NATIVE else []), "xla", "reference"]
FAST = IMPLEMENTATIONS[0]

each_function = pytest.mark.parametrize("name", LAYER_FUNCTIONS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@each_function
def test_gradients_of_the_oracle(name: str) -> None:
    """Against finite differences of its own results."""
    case = Case(B=2, T=5, H=2, K=3, origin=True)
    inputs, cotangents = operands(name, case)
    inputs = {n: x if n == "origin" else x.astype(np.float64) for n, x in inputs.items()}
    own, right = LAYER_FUNCTIONS[name], expected(name, inputs, cotangents)
    rng, step = np.random.default_rng(0), 1e-6
    for n in own.inputs:
        direction = rng.standard_normal(inputs[n].shape)
        ends = [own.oracle(inputs | {n: inputs[n] + s * direction}) for s in (step, -step)]
        numeric = sum(
            np.vdot(cotangents[f"d{x}"], (ends[0][x] - ends[1][x]) / (2 * step)) for x in ends[0]
        )
        assert np.vdot(right[f"d{n}"], direction) == pytest.approx(numeric, rel=1e-6, abs=1e-7), n


@pytest.mark.parametrize("dtype", DTYPES)
@each_implementation
@each_function
def test_definition(name: str, implementation: str, dtype: str) -> None:
    check(name, implementation, Case(B=3, T=65, dtype=dtype, origin=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_parameters_over_many_tokens(dtype: str) -> None:
    """Gradients of parameters are summed in float32 whatever the dtype."""
    for name in LAYER_FUNCTIONS:
        check(name, FAST, Case(B=2, T=1000, dtype=dtype))


SHAPES = [
    *(Case(B=1, T=tokens, mixes=1) for tokens in (0, 1, 15, 63, 64)),
    Case(B=0, T=15),
    Case(B=3, T=1, origin=True),
    Case(B=1, T=0, origin=True),
    Case(B=1, T=16, H=3, K=64, mixes=1),
    Case(B=1, T=5, H=1, K=24, mixes=3),
]
"""The last one has sizes that kernels lack."""


@pytest.mark.parametrize("case", SHAPES, ids=str)
@each_function
def test_shapes(name: str, case: Case) -> None:
    check(name, None, case)


@each_function
def test_a_head_of_zeros(name: str) -> None:
    """Variances and lengths of 0 make no NaN."""
    inputs, cotangents = operands(name, Case(B=1, T=3))
    for x in inputs.values():
        if x.ndim > 1:
            x[..., :1, :] = 0
    found = value_and_gradients(name, FAST, inputs, cotangents)
    for n, x in found.items():
        assert np.isfinite(x).all(), n
    if name != "wkv7_keys":  # whose slope at a length of 0 is 1e12
        assert_right(found, expected(name, inputs, cotangents), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_squared(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 1000)).astype(DTYPES[dtype])
    y, vjp = jax.vjp(layers.relu_squared, jnp.asarray(x))
    found = {"y": np.asarray(y), "dx": np.asarray(vjp(jnp.asarray(dy))[0])}
    positive = np.maximum(np.float64(x), 0)
    right = {"y": positive**2, "dx": 2 * positive * np.float64(dy)}
    assert_right(found, right, dtype)
    assert {str(z.dtype) for z in found.values()} == {dtype}


# Transformations.

SMALL = Case(B=2, T=17, H=2, K=16, mixes=1)


def _fields(name: str) -> tuple[str, ...]:
    results = LAYER_FUNCTIONS[name].results
    return tuple(n for n in results if not n.startswith("mixed") or n == "mixed0")


@each_implementation
@each_function
def test_vmap(name: str, implementation: str) -> None:
    """Of tensors, while parameters are shared or mapped as well."""
    several = [operands(name, Case(**{**vars(SMALL), "seed": seed})) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *several)
    parameters = LAYER_FUNCTIONS[name].parameters
    mapped = jax.vmap(lambda *xs: value_and_gradients(name, implementation, *xs))(*stacked)
    for i, (inputs, cotangents) in enumerate(several):
        found = {n: x[i] for n, x in mapped.items()}
        assert_right(found, expected(name, inputs, cotangents), "float32")
    shared = {n: several[0][0][n] for n in parameters}
    axes = {n: None if n in parameters else 0 for n in stacked[0]}
    call = functools.partial(value_and_gradients, name, implementation)
    found = jax.vmap(call, in_axes=(axes, 0))(stacked[0] | shared, stacked[1])
    for i, (inputs, cotangents) in enumerate(several):
        right = expected(name, inputs | shared, cotangents)
        assert_right({n: x[i] for n, x in found.items()}, right, "float32")


@each_function
def test_checkpoint_and_scan(name: str) -> None:
    """Each of several batches in turn, computed again in the backward pass."""
    several = [operands(name, Case(**{**vars(SMALL), "seed": seed})) for seed in range(2)]
    stacked, cotangents = (
        {n: np.stack([x[i][n] for x in several]) for n in several[0][i]} for i in range(2)
    )
    parameters = {n: several[0][0][n] for n in LAYER_FUNCTIONS[name].parameters}
    tensors = {n: x for n, x in stacked.items() if n not in parameters}
    call = LAYER_FUNCTIONS[name].call

    @jax.jit
    @jax.grad
    def gradients(both: tuple) -> jax.Array:
        parameters, tensors = both

        @jax.checkpoint
        def step(total: jax.Array, each: tuple) -> tuple:
            inputs, d = each
            found = call(**inputs, **parameters, implementation=FAST)
            return total + sum(jnp.vdot(x, d[f"d{n}"]) for n, x in found.items()), None

        total, _ = jax.lax.scan(step, jnp.zeros(()), (tensors, cotangents))
        return total

    summed, own = gradients((parameters, tensors))
    rights = [expected(name, x | parameters, d) for x, d in several]
    right = {n: sum(x[f"d{n}"] for x in rights) for n in parameters}
    right |= {n: np.stack([x[f"d{n}"] for x in rights]) for n in tensors}
    assert_right({**summed, **own}, right, "float32")


def test_reference_has_forward_mode() -> None:
    inputs, cotangents = operands("read_out", SMALL)
    call = functools.partial(LAYER_FUNCTIONS["read_out"].call, implementation="reference")
    _, tangents = jax.jvp(lambda x: call(**x), (inputs,), (inputs,))
    right = expected("read_out", inputs, cotangents)
    found = np.vdot(tangents["out"], cotangents["dout"])
    assert found == pytest.approx(
        sum(np.vdot(right[f"d{n}"], x) for n, x in inputs.items()), rel=1e-4
    )


# Meshes: forced CPU devices, with GPUs as well.

SHARDED = Case(B=4, T=16, H=4, K=16, mixes=1)

each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

PLACES = {"batch": ("data", None), "batch and heads": ("data", "model")}


def _specs(name: str, place: tuple) -> dict[str, P]:
    """The specs of all arrays by name."""
    batch, heads = place
    own = LAYER_FUNCTIONS[name]
    where = {"B": batch, "H": heads}
    specs = {n: P(*(where.get(x) for x in axes)) for n, axes in own.inputs.items()}
    specs |= {n: P(*(where.get(x) for x in axes)) for n, axes in own.results.items()}
    gradients = {f"d{n}": spec for n, spec in specs.items()}
    return specs | gradients


def _summed(name: str) -> int:
    """The bytes of the gradients of all parameters."""
    own, sizes = LAYER_FUNCTIONS[name], SHARDED.sizes
    return 4 * sum(math.prod(sizes[x] for x in axes) for axes in own.parameters.values())


@pytest.mark.parametrize("place", PLACES)
@each_mesh
@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@each_function
def test_meshes(
    name: str, implementation: str | None, axis_type: AxisType, place: str, cpus: list[Any]
) -> None:
    """Devices exchange nothing but the sums of gradients of parameters."""
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    arrays, specs = operands(name, SHARDED), _specs(name, PLACES[place])
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled = value_and_gradients.lower(name, implementation, *placed).compile()
    assert_right(compiled(*placed), expected(name, *arrays), "float32")
    text = compiled.as_text()
    assert hlo.collectives(text) == {"all-reduce"}
    # Sums may be exchanged in several parts, but each part once.
    assert 0 < hlo.exchanged(text) <= _summed(name)


def _local_loss(name: str, inputs: dict, cotangents: dict) -> jax.Array:
    found = LAYER_FUNCTIONS[name].call(**inputs)
    return jax.lax.psum(sum(jnp.vdot(x, cotangents[f"d{n}"]) for n, x in found.items()), "data")


@pytest.mark.parametrize("check_vma", [True, False])
@each_function
def test_gradients_through_shard_map(name: str, check_vma: bool, cpus: list[Any]) -> None:
    """Those of parameters are sums over devices."""
    inputs, cotangents = operands(name, SHARDED)
    specs = _specs(name, ("data", None))
    loss = jax.shard_map(
        functools.partial(_local_loss, name),
        mesh=meshes.mesh("data=4", AxisType.Auto, cpus),
        in_specs=tuple({n: specs[n] for n in x} for x in (inputs, cotangents)),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(loss))(inputs, cotangents)
    right = expected(name, inputs, cotangents)
    assert_right(found, {n: right[f"d{n}"] for n in found}, "float32")


@each_function
def test_gradients_inside_shard_map(name: str, cpus: list[Any]) -> None:
    """Over batch and heads, where there are heads."""
    inputs, cotangents = operands(name, SHARDED)
    specs = _specs(name, ("data", "model"))
    own = LAYER_FUNCTIONS[name]
    names = (*_fields(name), *(f"d{n}" for n in own.inputs))

    def local(inputs: dict, cotangents: dict) -> dict:
        return value_and_gradients(name, None, inputs, cotangents)

    call = jax.shard_map(
        local,
        mesh=meshes.mesh("data=2,model=2", AxisType.Auto, cpus),
        in_specs=tuple({n: specs[n] for n in x} for x in (inputs, cotangents)),
        out_specs={n: specs[n] for n in names},
    )
    assert_right(jax.jit(call)(inputs, cotangents), expected(name, inputs, cotangents), "float32")


# Bad input.


def _spoil(name: str, argument: str, change: Callable[[Any], Any]) -> dict[str, Any]:
    inputs, _ = operands(name, Case(B=2, T=3, mixes=1, origin=True))
    return inputs | {argument: change(inputs[argument])}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, argument) for name, own in LAYER_FUNCTIONS.items() for argument in own.inputs],
)
def test_wrong_arguments(name: str, argument: str) -> None:
    own = LAYER_FUNCTIONS[name]

    def error(change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught:
            own.call(**_spoil(name, argument, change))
        return str(caught.value)

    axes = f"[{', '.join(own.inputs[argument])}]"
    text = error(lambda x: x[None], ValueError)
    assert f"{name}: {argument} has shape (1, " in text
    assert f"accepted is {axes}" in text
    longer = error(lambda x: np.concatenate([x, x], axis=-1), ValueError)
    assert f"{name}: " in longer
    assert argument in longer
    assert "accepted is [" in longer
    text = error(lambda x: x.astype(np.int32), TypeError)
    assert f"{name}: {argument} is int32" in text
    assert "accepted" in text
    other = np.float16 if argument in own.tensors else DTYPES["bfloat16"]
    text = error(lambda x: x.astype(other), TypeError)
    # Of two tensors either may be the odd one.
    assert f"is {np.dtype(other)}" in text or f"others are {np.dtype(other)}" in text
    assert re.match(rf"{name}: .*accepted (is|are) ", text)
    assert argument in text
    text = error(lambda x: x.tolist(), TypeError)
    assert f"{name}: {argument} is a list" in text


@pytest.mark.usefixtures("unchecked_types")
@each_function
def test_wrong_implementation(name: str) -> None:
    inputs, _ = operands(name, Case(B=2, T=3, mixes=1))
    with pytest.raises(ValueError, match=rf"{name}: implementation is 'cuda'; accepted are 'ffi'"):
        LAYER_FUNCTIONS[name].call(**inputs, implementation="cuda")


@each_function
def test_implementations_that_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason of each platform."""
    internals.pretend(monkeypatch, "cuda", "on holiday")
    inputs, _ = operands(name, Case(B=2, T=3, mixes=1))
    call = jax.jit(LAYER_FUNCTIONS[name].call, static_argnames="implementation")
    with pytest.raises(NotImplementedError) as error:
        call(**inputs, implementation="ffi")
    assert str(error.value) == (
        f"{name}: implementation 'ffi' cannot run this call on cpu, tpu, others: "
        f"{name} has native kernels for CUDA GPUs; on cuda: on holiday"
    )


@each_function
def test_second_derivatives(name: str) -> None:
    """The reference has them, and others say so."""
    inputs, _ = operands(name, Case(B=2, T=3, mixes=1))
    first = next(iter(LAYER_FUNCTIONS[name].tensors))

    def curvature(implementation: str | None) -> Any:
        def total(x: Any) -> jax.Array:
            given = inputs | {first: x}
            found = LAYER_FUNCTIONS[name].call(**given, implementation=implementation)
            return sum((jnp.sum(x**2) for x in found.values()), jnp.float32(0))

        x = jnp.asarray(inputs[first])
        return jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x))), x)

    assert curvature("reference").shape == inputs[first].shape
    message = f"{name}: a second derivative is asked for; .*; implementation='reference' has"
    with pytest.raises(NotImplementedError, match=message):
        curvature(None)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    "change",
    [lambda x: x[:, :2], lambda x: x[0], lambda x: x.astype(np.float32), lambda x: x[:1]],
    ids=["tokens", "rank", "dtype", "batch"],
)
def test_wrong_origin(change: Callable[[Any], Any]) -> None:
    inputs = _spoil("norm_shift_mix", "origin", change)
    accepted = r"accepted is int32 \[B, T\] = \[2, 3\]"
    with pytest.raises((TypeError, ValueError), match=rf"norm_shift_mix: origin is .*; {accepted}"):
        LAYER_FUNCTIONS["norm_shift_mix"].call(**inputs)


@pytest.mark.parametrize(("rows", "tokens"), [(2**16, 2**15), (1, 2**31)])
def test_no_kernel_beyond_its_grid(rows: int, tokens: int) -> None:
    function = VALUE_RESIDUAL
    axes = {"B": rows, "T": tokens, "H": 1, "K": 64}
    inputs = {
        name: jax.ShapeDtypeStruct([axes[x] for x in letters], jnp.float32)
        for name, letters in function.inputs.items()
    }
    options = Options(implementation="ffi")
    reason = function.why_not("forward", "ffi", options, "cuda", Operands(inputs))
    assert f"B = {rows} and T = {tokens}" in str(reason)
