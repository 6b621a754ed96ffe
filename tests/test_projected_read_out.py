"""`rwkv_jax.layers.projected_read_out`: what it computes, what it keeps, and where its backward
pass has the kernel that restores the result of `read_out`, which test_emulation.py checks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import layers, models
from rwkv_jax.models import rwkv7
from support import hlo, internals, meshes
from support.cases import DTYPES, Arrays
from support.layer_functions import Case
from support.projected_read_out import (
    AXES,
    READ_OUT,
    RESULTS,
    apart,
    assert_right,
    expected,
    operands,
    value_and_gradients,
)
from support.tolerance import assert_trees_close

SMALL = Case(2, 17, 2, 64, "bfloat16")

FORWARD, RESTORING = internals.projected_read_out.RESTORING.targets
BACKWARD = internals.read_out.FUNCTION.targets[1]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be lowered for GPUs with the kernels, as they can where these are installed."""
    internals.pretend(monkeypatch, "cuda", None)


def _found(arrays: tuple[Arrays, Arrays], **options: Any) -> dict[str, jax.Array]:
    call = functools.partial(value_and_gradients, **options)
    return jax.jit(call)(*jax.tree.map(jnp.asarray, arrays))


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        (Case(2, 17, 2, 16), None),
        (Case(3, 1, 1, 24, "bfloat16"), None),
        (Case(1, 17, 2, 16, "float16"), "xla"),
        (Case(1, 17, 2, 16, "bfloat16"), "reference"),
        (Case(2, 0, 2, 16, "float16"), None),
        (Case(0, 17, 2, 16, "bfloat16"), None),
        (Case(0, 1, 2, 16), "reference"),
    ],
    ids=str,
)
def test_definition(case: Case, implementation: str | None) -> None:
    arrays = operands(case)
    found = _found(arrays, implementation=implementation)
    assert_right(found, expected(*arrays), case.dtype)
    assert found["dmatrix"].dtype == DTYPES[case.dtype]


def test_equals_the_two_functions() -> None:
    """Exactly, with a matrix of another dtype as well, whose gradient has that dtype."""
    arrays = operands(SMALL, "float32")
    found, right = (_found(arrays, function=x) for x in (layers.projected_read_out, apart))
    for name, x in found.items():
        assert x.dtype == right[name].dtype, name
        assert np.array_equal(x, right[name]), name
    assert found["dmatrix"].dtype == jnp.float32


@pytest.mark.usefixtures("kernels")
def test_vmap_and_remat() -> None:
    """Parameters are shared. The program is one for all platforms, with the way of the kernel."""
    inputs, cotangents = operands(SMALL)
    stacked = {n: np.stack([x, x[::-1]]) if "B" in AXES[n] else x for n, x in inputs.items()}
    axes = {n: 0 if "B" in AXES[n] else None for n in inputs}
    call = functools.partial(
        value_and_gradients, function=jax.checkpoint(layers.projected_read_out)
    )
    found = jax.jit(jax.vmap(call, (axes, None)))(stacked, cotangents)
    for i in range(2):
        one = {n: x[i] if "B" in AXES[n] else x for n, x in stacked.items()}
        assert_right({n: x[i] for n, x in found.items()}, expected(one, cotangents), SMALL.dtype)


def test_reference_has_forward_mode() -> None:
    inputs, cotangents = operands(Case(2, 17, 2, 16))
    call = functools.partial(layers.projected_read_out, implementation="reference")
    _, tangent = jax.jvp(lambda x: call(**x), (inputs,), (inputs,))
    right = expected(inputs, cotangents)
    assert np.vdot(tangent, cotangents["dprojected"]) == pytest.approx(
        sum(np.vdot(right[f"d{n}"], x) for n, x in inputs.items()), rel=1e-4
    )


# Meshes.


def _specs(**where: str | None) -> dict[str, P]:
    """The specs of all arrays by name, from the mesh axis of each letter."""
    specs = {n: P(*map(where.get, axes)) for n, axes in {**AXES, **RESULTS}.items()}
    return specs | {f"d{n}": spec for n, spec in specs.items()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("axis_type", "heads"),
    [(AxisType.Auto, "model"), (AxisType.Explicit, None)],
    ids=["rows and heads", "rows of an Explicit mesh"],
)
def test_meshes(axis_type: AxisType, heads: str | None, cpus: list[Any]) -> None:
    """Devices exchange no more than with the two functions. The product is over the heads of all
    devices, so that an Explicit mesh cannot distribute them."""
    arrays = operands(SMALL)
    mesh, specs = meshes.mesh("data=2,model=2", axis_type, cpus), _specs(B="data", H=heads, C=heads)
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled, of_two = (
        jax.jit(functools.partial(value_and_gradients, function=x)).lower(*placed).compile()
        for x in (layers.projected_read_out, apart)
    )
    assert_right(compiled(*placed), expected(*arrays), SMALL.dtype)
    assert hlo.collectives(compiled.as_text()) == {"all-reduce"}
    assert hlo.exchanged(compiled.as_text()) == hlo.exchanged(of_two.as_text())


@pytest.mark.usefixtures("kernels")
def test_gradients_through_shard_map(cpus: list[Any]) -> None:
    """Those of parameters and of the matrix are sums over devices."""
    arrays, specs = operands(Case(2, 17, 2, 16)), _specs(B="data")

    def loss(inputs: Arrays, cotangents: Arrays) -> jax.Array:
        projected = layers.projected_read_out(**inputs)
        return jax.lax.psum(jnp.vdot(projected, cotangents["dprojected"]), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AxisType.Auto, cpus),
        in_specs=tuple({n: specs[n] for n in x} for x in arrays),
        out_specs=P(),
    )
    found = {f"d{n}": x for n, x in jax.jit(jax.grad(mapped))(*arrays).items()}
    right = expected(*arrays)
    assert_right(found, {n: right[n] for n in found}, "float32")


# What is kept, and which kernels run.


def _kept(size: int, call: Callable[..., Any], *arguments: Any) -> int:
    """How many arrays of a size the backward pass needs."""
    found = jax.eval_shape(lambda *x: jax.vjp(call, *x)[1], *arguments)
    return [x.size for x in jax.tree.leaves(found)].count(size)


@pytest.mark.usefixtures("kernels")
def test_what_is_kept() -> None:
    """Of arrays of the size of y the three arguments."""
    inputs, _ = operands(SMALL)
    size = inputs["y"].size
    for implementation in (None, "ffi", "xla"):
        call = functools.partial(layers.projected_read_out, implementation=implementation)
        assert _kept(size, lambda x, call=call: call(**x), inputs) == 3
    assert _kept(size, lambda x: apart(**x), inputs) == 4


def _calls(function: Callable[..., Any], case: Case, **options: Any) -> tuple[int, ...]:
    """How often the program for CUDA calls each target of the function."""
    call = functools.partial(value_and_gradients, function=function, **options)
    with hlo.device("cuda"):
        traced = jax.jit(call).trace(*operands(case))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return tuple(text.count(f"custom_call @{x}(") for x in (FORWARD, RESTORING, BACKWARD))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("case", "implementation", "calls"),
    [
        (SMALL, None, (1, 1, 0)),
        (Case(2, 17, 2, 16), "ffi", (1, 1, 0)),
        (Case(2, 17, 2, 24), None, (0, 0, 0)),
        (SMALL, "xla", (0, 0, 0)),
        (SMALL, "reference", (0, 0, 0)),
    ],
    ids=str,
)
def test_where_there_are_kernels(
    case: Case, implementation: str | None, calls: tuple[int, ...]
) -> None:
    """The kernel of the forward pass runs once, also where the backward pass keeps nothing."""
    options = {"implementation": implementation}
    assert _calls(layers.projected_read_out, case, **options) == calls
    again = jax.checkpoint(functools.partial(layers.projected_read_out, **options))
    assert _calls(again, case) == calls


CONFIG = rwkv7.Config(num_layers=2, hidden_size=64, vocab_size=32, head_size=32)
TIME_MIXING = "rwkv_jax.models.rwkv7.projected_read_out"


def _apart(*of_heads: Any, implementation: str | None) -> jax.Array:
    """`apart`, for the model."""
    return apart(**dict(zip(AXES, of_heads, strict=True)), implementation=implementation)


def _hidden_states(params: rwkv7.Params, tokens: jax.Array, **options: Any) -> jax.Array:
    return rwkv7.hidden_states(params, tokens, dtype=jnp.bfloat16, **options)[0].astype(jnp.float32)


def _sum(*arguments: Any, **options: Any) -> jax.Array:
    return jnp.sum(_hidden_states(*arguments, **options) ** 3)


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_the_model_keeps_one_array_less_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes `read_out` again where it computes whole blocks again, but not for "cheap"."""
    params = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), CONFIG))
    tokens = jax.ShapeDtypeStruct((3, 17), jnp.int32)

    def kept() -> int:
        return _kept(
            tokens.size * CONFIG.hidden_size, lambda *x: _hidden_states(*x), params, tokens
        )

    def calls(**options: Any) -> tuple[int, ...]:
        program = jax.make_jaxpr(jax.grad(functools.partial(_sum, **options)))(params, tokens)
        return tuple(hlo.calls(program, x) for x in (FORWARD, RESTORING, BACKWARD))

    once = CONFIG.num_layers
    assert calls() == calls(layers="ffi") == (once, once, 0)
    assert calls(recompute="mixes") == calls(recompute="cheap") == (once, once, 0)
    assert calls(recompute="blocks") == (2 * once, once, 0)
    assert calls(layers="xla") == (0, 0, 0)
    found = kept()
    monkeypatch.setattr(TIME_MIXING, _apart)
    assert calls() == (once, 0, once)
    assert kept() == found + CONFIG.num_layers


@pytest.mark.slow
def test_the_model_equals_the_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and all gradients, of blocks in a scan."""
    params = rwkv7.init(jax.random.key(0), CONFIG)
    # Initial matrices of zeros would hide gradients.
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, CONFIG.vocab_size)

    def gradients() -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: _sum(*x)))(rwkv7.stacked(params), tokens)

    found = gradients()
    monkeypatch.setattr(TIME_MIXING, _apart)
    assert_trees_close(found, gradients(), 1e-3)


class Called(Exception):
    """The model has called `projected_read_out`."""


def test_the_model_has_another_product_for_tokens_and_integers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> jax.Array:
        raise Called

    monkeypatch.setattr(TIME_MIXING, refuse)
    params = rwkv7.init(jax.random.key(0), CONFIG)
    tokens = jnp.zeros((2, 3), jnp.int32)
    jax.eval_shape(_hidden_states, params, tokens[:, 0])
    jax.eval_shape(_hidden_states, models.quantize(params), tokens)
    with pytest.raises(Called):
        jax.eval_shape(_hidden_states, params, tokens)


# Bad input.


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("argument", AXES)
def test_wrong_arguments(argument: str) -> None:
    inputs, _ = operands(SMALL)

    def error(change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind, match=r"^projected_read_out: ") as caught:
            layers.projected_read_out(**inputs | {argument: change(inputs[argument])})
        return str(caught.value)

    text = error(lambda x: x[None], ValueError)
    assert f"{argument} has shape (1, " in text
    assert f"accepted is [{', '.join(AXES[argument])}]" in text
    longer = error(lambda x: np.concatenate([x, x], axis=-1), ValueError)
    assert argument in longer
    assert "accepted is [" in longer
    assert f"{argument} is int32" in error(lambda x: x.astype(np.int32), TypeError)
    assert f"{argument} is a list" in error(lambda x: x.tolist(), TypeError)
    if argument != "matrix":
        other = "float16" if argument in READ_OUT.tensors else "bfloat16"
        assert f"is {other}" in error(lambda x: x.astype(DTYPES[other]), TypeError)


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_implementation() -> None:
    with pytest.raises(
        ValueError, match="projected_read_out: implementation is 'pallas'; accepted are 'ffi'"
    ):
        layers.projected_read_out(**operands(SMALL)[0], implementation="pallas")
