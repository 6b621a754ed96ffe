"""Models in exported programs: symbolic sizes, and the names of their trees."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from rwkv_jax import generation
from rwkv_jax.generation._session import Model, started
from rwkv_jax.models import for_decoding, rwkv4, rwkv5, rwkv6, rwkv7
from support.models import parameters

# Symbolic sizes are no int.
pytestmark = pytest.mark.usefixtures("unchecked_types")

each_generation = pytest.mark.parametrize(
    "module", [rwkv7, rwkv6, rwkv5, rwkv4], ids=lambda x: x.GENERATION.name
)


def symbolic(shape: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.int32)


@each_generation
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


@pytest.mark.parametrize("name", ["implementation", "layers"])
def test_kernels_need_sizes(name: str) -> None:
    options: dict[str, Any] = {name: "xla"}
    step = jax.jit(lambda tokens: rwkv7.apply(parameters(rwkv7), tokens, **options))
    message = rf"rwkv7: {name} is 'xla' and tokens has the symbolic shape \(b, 8\); accepted"
    with pytest.raises(ValueError, match=message):
        export.export(step)(symbolic("b, 8"))


def test_trees_of_other_functions() -> None:
    """Stacked blocks, weights by their inputs, and sessions."""
    params = rwkv7.stacked(for_decoding(parameters(rwkv7)))
    start = jax.jit(lambda params: started(Model(rwkv7, np.dtype("float32"), None), params, 2))
    exported = export.deserialize(export.export(start)(params).serialize())
    assert exported.in_tree == jax.tree.structure(((params,), {}))
    session = jax.tree.unflatten(exported.out_tree, range(exported.out_tree.num_leaves))
    assert isinstance(session, generation.Session)
