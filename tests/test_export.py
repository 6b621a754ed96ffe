"""`jax.export` of operators, layer functions and models: symbolic sizes, several platforms at once,
and the names of trees."""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rwkv_jax
from rwkv_jax import generation, layers
from rwkv_jax.generation._session import Model, started
from rwkv_jax.models import Kernels, for_decoding, rwkv4, rwkv5, rwkv6, rwkv7
from support import hlo, internals
from support.cases import Case
from support.models import parameters
from support.operators import available

pytestmark = pytest.mark.usefixtures("unchecked_types")  # annotations know numbers alone

NATIVE = "ffi" in available("wkv7", Case(2, 16, 2, 32), "cpu")
native = pytest.mark.skipif(not NATIVE, reason="no native kernels for CPUs")


def _wkv7(implementation: str | None) -> Any:
    return jax.jit(functools.partial(rwkv_jax.wkv7, decay="sigmoid", implementation=implementation))


def _exported(function: Any, shape: str, **options: Any) -> Any:
    sizes = export.symbolic_shape(shape)
    arrays = [jax.ShapeDtypeStruct(sizes, jnp.float32)] * 6
    checks = rwkv_jax.export_disabled_checks()
    return export.export(function, disabled_checks=checks, **options)(*arrays)


@pytest.mark.parametrize(
    ("implementation", "shape", "tokens"),
    [
        pytest.param(None, "b, t, 2, 16", 70, marks=native),
        pytest.param("ffi", "b, t, 2, 16", 70, marks=native),
        ("xla", "b, 16, 2, 16", 16),
        ("reference", "b, t, 2, 16", 70),
    ],
)
def test_symbolic_sizes(implementation: str | None, shape: str, tokens: int) -> None:
    """Of results and gradients."""

    @jax.jit
    def function(*operands: jax.Array) -> Any:
        if implementation == "xla":  # whose gradients differ in the last bits
            return _wkv7(implementation)(*operands)
        found, vjp = jax.vjp(_wkv7(implementation), *operands)
        return found, vjp(found)

    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((6, 3, tokens, 2, 16), dtype=np.float32) / 4
    found = export.deserialize(_exported(function, shape, platforms=("cpu",)).serialize())
    with jax.default_device(jax.devices("cpu")[0]):
        jax.tree.map(np.testing.assert_array_equal, found.call(*arrays), function(*arrays))


def test_what_needs_a_number_says_so(pretend: Any) -> None:
    with pytest.raises(NotImplementedError) as error:
        _exported(_wkv7("xla"), "2, t, 2, 16")
    assert str(error.value) == (
        "wkv7: implementation 'xla' cannot run this call on cpu, cuda, tpu, others: "
        "T = t is symbolic; xla cuts rows into chunks, whose number it has to know; "
        "implementation='reference' takes symbolic sizes"
    )
    pretend("cuda", None)
    for implementation in (None, "ffi"):
        message = "on cuda: B = b is symbolic; the cuda kern.*; implementation='reference' takes"
        with pytest.raises(NotImplementedError, match=message):
            _exported(_wkv7(implementation), "b, t, 2, 16", platforms=("cuda",))


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("function", "tensors", "parameters"),
    [
        (layers.value_residual, ["b, t, 2, 16"] * 3, ["2, 16"]),
        (layers.low_rank, ["b, t, 128", "128, 16", "16, 128"], []),
    ],
    ids=["value_residual", "low_rank"],
)
def test_symbolic_sizes_of_layer_functions(
    function: Any, tensors: list[str], parameters: list[str], platform: str, pretend: Any
) -> None:
    """Only the kernels need numbers, and None leaves them out."""
    pretend("cuda", None)
    scope = export.SymbolicScope()
    given = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
        for shapes, dtype in ((tensors, jnp.bfloat16), (parameters, jnp.float32))
        for shape in shapes
    ]
    exported = export.export(jax.jit(function), platforms=(platform,))(*given)
    assert hlo.targets(exported.mlir_module()) == set()
    ffi = jax.jit(functools.partial(function, implementation="ffi"))
    with pytest.raises(NotImplementedError, match=r": .*B = b is symbolic; the cuda kern"):
        export.export(ffi, platforms=("cuda",))(*given)


@pytest.mark.parametrize("kernels", [None, "on holiday"])
def test_several_platforms(kernels: str | None, pretend: Any) -> None:
    """The kernels of a platform, those of Pallas among them, are in the program for it alone."""
    pretend("cuda", kernels)
    with hlo.device("cuda"):
        text = _exported(_wkv7(None), "2, 16, 2, 16", platforms=("cpu", "cuda")).mlir_module()
    own = internals.targets("wkv7", "fwd") if NATIVE or kernels is None else set()
    assert own <= hlo.targets(text)
    assert ("triton" in text) == (kernels is not None)


# Models.


def symbolic(shape: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.int32)


@pytest.mark.parametrize("module", [rwkv4, rwkv5, rwkv6, rwkv7], ids=lambda x: x.GENERATION.name)
@pytest.mark.slow
def test_any_rows_and_tokens(module: ModuleType) -> None:
    """A program for sequences and one for tokens, each with a state; also that they are written and
    read."""
    params = parameters(module)

    def program(params: Any, tokens: jax.Array) -> Any:
        state = module.initial_state(params, tokens.shape[0])
        return module.apply(for_decoding(params), tokens, state)

    for shape in ("b, t", "b"):
        exported = export.export(jax.jit(program))(params, symbolic(shape))
        again = export.deserialize(exported.serialize())
        assert again.in_tree == exported.in_tree
        assert again.out_tree == exported.out_tree
        if module in (rwkv7, rwkv4):
            tokens = np.arange(6, dtype=np.int32).reshape((2, 3) if "t" in shape else 6)
            found, _ = again.call(params, tokens)
            expected, _ = module.apply(params, tokens)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "value"), [("operator", "xla"), ("layers", "xla"), ("blocks", "fused")]
)
def test_kernels_need_sizes(name: str, value: str) -> None:
    kernels = dataclasses.replace(Kernels(), **{name: value})
    step = jax.jit(lambda tokens: rwkv7.apply(parameters(rwkv7), tokens, kernels=kernels))
    message = rf"rwkv7: kernels is .*{name}='{value}'.* and tokens has the symbolic shape \(b, 8\)"
    with pytest.raises(ValueError, match=message):
        export.export(step)(symbolic("b, 8"))


def test_trees_of_other_functions() -> None:
    """Stacked blocks, weights by their inputs, and sessions."""
    params = rwkv7.stacked(for_decoding(parameters(rwkv7)))
    start = jax.jit(lambda params: started(Model(rwkv7, np.dtype("float32")), params, 2))
    exported = export.deserialize(export.export(start)(params).serialize())
    assert exported.in_tree == jax.tree.structure(((params,), {}))
    session = jax.tree.unflatten(exported.out_tree, range(exported.out_tree.num_leaves))
    assert isinstance(session, generation.Session)
