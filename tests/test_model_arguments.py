"""What the models of all generations check before they compute anything."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import models
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.nn import equinox, flax
from support.models import VOCABULARY, parameters

pytestmark = pytest.mark.usefixtures("unchecked_types")

GENERATIONS = {"rwkv7": rwkv7, "rwkv6": rwkv6, "rwkv5": rwkv5, "rwkv4": rwkv4}

each_generation = pytest.mark.parametrize("module", GENERATIONS.values(), ids=GENERATIONS)


def layer_of_equinox(params: Any, tokens: Any) -> Any:
    config = rwkv7.Config(2, 32, head_size=16, vocabulary=VOCABULARY)
    return equinox.RWKV(config, params=params)(tokens)


def layer_of_flax(params: Any, tokens: Any) -> Any:
    config = rwkv7.Config(2, 32, head_size=16, vocabulary=VOCABULARY)
    return flax.RWKV(config, params=params)(tokens)


FUNCTIONS = {
    "features": rwkv7.features,
    "apply": rwkv7.apply,
    "Invariant": models.Invariant(rwkv7).apply,
    "flax": layer_of_flax,
    "equinox": layer_of_equinox,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2, 3]], TypeError, "tokens is a list; accepted is a JAX or numpy array"),
        (3, TypeError, "tokens is a int; accepted is a JAX or numpy array"),
        (np.ones((1, 3), np.float32), TypeError, "tokens is float32; accepted are integers"),
        (np.ones((1, 3), bool), TypeError, "tokens is bool; accepted are integers"),
        (np.ones((1, 2, 3), np.int32), ValueError, r"tokens has shape \(1, 2, 3\); accepted is \["),
        (
            np.array([VOCABULARY]),
            ValueError,
            rf"tokens has {VOCABULARY}; accepted .* to {VOCABULARY - 1}",
        ),
        (jnp.array([3, -1]), ValueError, "tokens has -1; accepted are integers from 0 to"),
    ],
    ids=["list", "int", "float", "bool", "axes", "large", "negative"],
)
def test_tokens(name: str, tokens: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(
        error, match=f"{'Invariant' if name == 'Invariant' else 'rwkv7'}: {message}"
    ):
        FUNCTIONS[name](parameters(rwkv7), tokens)


def test_tokens_of_a_compiled_program_are_not_known() -> None:
    """They read another row, as the documentation says."""
    params = parameters(rwkv7)
    embedded = jax.jit(lambda tokens: rwkv7.apply(params, tokens)[0])
    assert jnp.array_equal(embedded(np.array([VOCABULARY])), embedded(np.array([VOCABULARY - 1])))


@each_generation
def test_states(module: ModuleType) -> None:
    params, name = parameters(module), module.GENERATION.name
    tokens = np.array([1, 2], np.int32)

    def refused(state: Any, error: type[Exception], message: str, dtype: Any = "float32") -> None:
        with pytest.raises(error, match=f"(?s){name}: {message}"):
            jax.eval_shape(lambda: module.apply(params, tokens, state, dtype=dtype))

    state = module.initial_state(params, 2)
    wrong = "state is not one of this model with 2 rows and float32 activations:.*"
    refused(state[:1], ValueError, wrong + r"1\.att\.shift is missing; expected is \[2, 32\]")
    refused((*state, state[0]), ValueError, wrong + r"'2\.att\.shift' is expected nowhere")
    refused(module.initial_state(params, 3), ValueError, wrong + r"0\.ffn is \[3, 32\] in float32")
    # The states of RWKV-5 to 7 are alike.
    other = rwkv7 if module is rwkv4 else rwkv4
    refused(other.initial_state(parameters(other), 2), ValueError, wrong + r"att\.wkv")
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), state)
    refused(narrow, TypeError, wrong + r"0\.att\.shift is .* in bfloat16; expected is .* float32")
    refused(state, TypeError, r"state .* and bfloat16 activations:.*float32; expected", "bfloat16")
    refused(jax.tree.map(lambda x: 1.0, state), ValueError, wrong + r"0\.ffn is a float; expected")
    refused(module.stacked(state), ValueError, "state is Stacked; accepted with a tuple")
    assert jax.eval_shape(lambda: module.apply(params, tokens, state))


@each_generation
def test_unknown_options(module: ModuleType) -> None:
    """Also for one token of each row, where no layer function has kernels."""
    params = parameters(module)
    accepted = "accepted are None, 'mixes', 'cheap', 'blocks'"
    with pytest.raises(ValueError, match=f"recompute is 'all'; {accepted}"):
        module.apply(params, jnp.ones((2, 3), jnp.int32), recompute="all")
    for tokens in (jnp.ones((2, 3), jnp.int32), jnp.ones(2, jnp.int32)):
        with pytest.raises(ValueError, match="layers is 'fast'; accepted are"):
            module.apply(params, tokens, layers="fast")
