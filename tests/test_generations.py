"""`rwkv_jax.models` of all generations against the published formulas in numpy."""

import dataclasses
import functools
import math
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import models
from rwkv_jax.models import Kernels, rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.nn import equinox, flax
from support import checkpoints, language_models, meshes
from support.models import DOCUMENTS, config_of, formulas, parameters, random_like, shapes_of
from support.operators import FAST
from support.tolerance import EXACT_FLOAT32, assert_close, assert_trees_close

pytestmark = pytest.mark.quick("module")

WIDTH, VOCABULARY = 48, 37
BATCH, TOKENS = DOCUMENTS.shape


VERSIONS = {rwkv4: "RWKV-4", rwkv5: "RWKV-5.2", rwkv6: "RWKV-6", rwkv7: "RWKV-7"}
"""The versions of the official models that the modules are."""


def config(module: ModuleType) -> Any:
    ranks = {"mix_rank": 5, "decay_rank": 7}
    return config_of(module, hidden_size=WIDTH, vocab_size=VOCABULARY, **ranks)


def apply(module: ModuleType, *args: Any, **options: Any) -> Any:
    kernels = Kernels(FAST[f"wkv{module.GENERATION.name[-1]}"].implementation)
    return module.apply(*args, kernels=kernels, **options)


LAST = (WIDTH - 1) / WIDTH
ENDS = {
    rwkv4: {
        "blocks.0.att.time_decay": (-5.0, 3.0),
        "blocks.1.att.time_first": (math.log(0.3), math.log(0.3) - 0.5),
        "blocks.1.att.time_mix_v": (0.3, 0.3 + LAST**0.5),
        "blocks.0.ffn.time_mix_k": (0.0, LAST),
    },
    rwkv5: {
        "blocks.0.att.time_decay": (-6.0, -1.0),
        "blocks.1.att.time_faaaa": (1.0, -0.1),
        "blocks.1.att.time_mix_g": (0.0, LAST**0.25),
        "blocks.0.att.ln_x.weight": (0.5**0.7, 0.5**0.7),
    },
    rwkv6: {
        "blocks.0.att.time_decay": (-6.0, -1.0),
        "blocks.1.att.time_faaaa": (1.0, -0.1),
        "blocks.1.att.time_maa_v": (0.7, 0.7 - LAST**0.5),
        "blocks.1.ffn.time_maa_r": (1.0, 1 - LAST**0.125),
    },
    rwkv7: {
        "blocks.0.att.w0": (-8.0, 3.0),
        "blocks.1.att.a0": (-0.69, 0.31),
        "blocks.0.att.ln_x.weight": (2**-0.7, 2**-0.7),
        "blocks.1.att.ln_x.weight": (1.0, 1.0),
    },
}
"""Initial values at the two ends of vectors, from the official formulas evaluated by hand."""


# In the quick run test_evaluation.py compares RWKV-5 and RWKV-6 with the formulas.
@pytest.fixture(
    scope="module",
    params=[rwkv4, rwkv7, *(pytest.param(x, marks=pytest.mark.slow) for x in (rwkv5, rwkv6))],
    ids=lambda module: module.GENERATION.name,
)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


@pytest.fixture(scope="module")
def initial(module: ModuleType) -> Any:
    return module.init(jax.random.key(0), config(module))


@pytest.fixture(scope="module")
def params(initial: Any) -> Any:
    """Parameters with noise on the initial values, many of which are zero."""
    return jax.tree.map(jnp.add, initial, random_like(initial, 0.1))


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(2), (BATCH, TOKENS), 0, VOCABULARY)


def expected(module: ModuleType, params: Any, tokens: jax.Array) -> np.ndarray:
    return np.stack(formulas(module, params, np.asarray(tokens)))


def test_logits_and_states(module: ModuleType, params: Any, tokens: jax.Array) -> None:
    """Of sequences, of tokens one by one, and of packed rows that go on from their state."""

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
        prefill = apply(module, params, tokens)

        def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, state = apply(module, params, token, state)
            return state, logits

        start = module.initial_state(params, BATCH)
        state, logits = jax.lax.scan(step, start, tokens.T)
        decoded = jnp.moveaxis(logits, 0, 1), state
        ids = jnp.asarray(DOCUMENTS, jnp.int32)
        packed, _ = apply(module, params, tokens, prefill[1], segment_ids=ids)
        return prefill, decoded, packed

    prefill, decoded, packed = run(params, tokens)
    right = expected(module, params, tokens)
    assert_close({"logits": prefill[0]}, {"logits": right}, EXACT_FLOAT32)
    assert_trees_close(prefill, decoded, EXACT_FLOAT32)
    documents = ((0, 2, 8), (0, 11, 16), (1, 0, 6), (1, 6, 13), (1, 13, 19))
    for row, start, stop in documents:
        before = tokens[row] if (row, start) in ((0, 2), (1, 0)) else tokens[row, :0]
        whole = jnp.concatenate([before, tokens[row, start:stop]])
        alone = expected(module, params, whole[None])[0, len(before) :]
        assert_close({"packed": packed[row, start:stop]}, {"packed": alone}, EXACT_FLOAT32)


@pytest.mark.parametrize("version", ["5.0", pytest.param("5.1", marks=pytest.mark.slow)])
def test_earlier_versions_of_rwkv5(tokens: jax.Array, version: str) -> None:
    """Which have one decay and one bonus for each head."""
    params = random_like(shapes_of(rwkv5, config(rwkv5)), 0.2)

    def earlier(p: Any) -> Any:
        p = p._replace(time_decay=p.time_decay[:, 0], time_faaaa=p.time_faaaa[:, 0])
        if version == "5.1":
            return p
        return p._replace(time_faaaa=None, time_first=p.time_faaaa, time_mix_g=None, gate=None)

    blocks = tuple(block._replace(att=earlier(block.att)) for block in params.blocks)
    params = params._replace(blocks=blocks)
    logits, state = jax.jit(functools.partial(apply, rwkv5))(params, tokens)
    right = expected(rwkv5, params, tokens)
    assert_close({"logits": logits}, {"logits": right}, EXACT_FLOAT32)
    start = rwkv5.initial_state(params, BATCH)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)


def test_gradients(module: ModuleType, params: Any, tokens: jax.Array) -> None:
    """Of the stacked form: each parameter and state has one, and along the gradient of parameters
    the function of the formulas has its slope."""
    name = module.GENERATION.name
    weights = np.random.default_rng(3).standard_normal((BATCH, TOKENS, VOCABULARY))

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(params: Any, state: Any) -> jax.Array:
        logits, _ = apply(module, module.stacked(params), tokens, module.stacked(state))
        return jnp.vdot(logits, jnp.asarray(weights, jnp.float32))

    both = gradients(params, module.initial_state(params, BATCH))
    for path, x in jax.tree_util.tree_leaves_with_path(both):
        assert np.isfinite(x).all(), path
        # The empty sums of RWKV-4 have no weight.
        assert x.any() or (module is rwkv4 and ".wkv" in jax.tree_util.keystr(path)), path
    slope = module.names(both[0])

    def value(step: float) -> float:
        moved = {
            n: np.asarray(x, np.float64) + step * np.asarray(slope[n], np.float64)
            for n, x in named.items()
        }
        found = [language_models.logits(name, moved, row) for row in np.asarray(tokens)]
        return float(np.vdot(np.stack(found), weights))

    named = module.names(params)
    square = sum(float(np.square(x, dtype=np.float64).sum()) for x in slope.values())
    step = 1e-6 / math.sqrt(square)
    assert (value(step) - value(-step)) / (2 * step) == pytest.approx(square, rel=1e-4)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(module: ModuleType, params: Any, tokens: jax.Array) -> None:
    """With parameters in bfloat16, too."""
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), narrow)
    forward = jax.jit(functools.partial(apply, module, dtype="bfloat16"))
    logits, state = forward(narrow, tokens)
    assert logits.dtype == jnp.float32
    assert state[0].ffn.dtype == jnp.bfloat16
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state[0].att.wkv))
    assert_trees_close(forward(wide, tokens), (logits, state), 1e-2)
    assert_close({"logits": logits}, {"logits": expected(module, wide, tokens)}, 5e-2)


def test_names_are_official(module: ModuleType, initial: Any) -> None:
    names = set(checkpoints.official(VERSIONS[module]))
    assert set(module.names(initial)) == names - set(checkpoints.UNUSED)


def test_initial_values(module: ModuleType, initial: Any) -> None:
    zero = ("output.weight", "ffn.value.weight", "ffn.receptance.weight", "bias")
    zero += {
        rwkv4: ("att.key.weight", "att.receptance.weight"),
        rwkv5: (),
        rwkv6: ("time_maa_w1", "time_decay_w1"),
        rwkv7: ("w1", "a1", "v1", "g1"),
    }[module]
    named = module.names(initial)
    for name, x in named.items():
        assert x.dtype == jnp.float32
        assert bool(x.any()) != name.endswith(zero), name
    for name, ends in ENDS[module].items():
        assert jnp.allclose(named[name].reshape(-1)[jnp.array([0, -1])], jnp.array(ends)), name


def test_groups_of_the_official_training(module: ModuleType, initial: Any) -> None:
    """Of parameters in both forms, and of trees of modules that have them."""
    faster = {"time_decay": 2, "time_first": 3} if module is rwkv4 else {"time_decay": 2}
    faster["w0"] = 2
    model = nnx.eval_shape(lambda: flax.RWKV(config(module), rngs=nnx.Rngs(0)))
    stacked = jax.eval_shape(module.stacked, initial)
    layer = equinox.RWKV(config(module), params=initial)
    for params in (initial, stacked, nnx.state(model, nnx.Param), model.params, layer):
        rates, decays = (
            module.names(group(params)) for group in (module.learning_rates, module.weight_decays)
        )
        assert rates == {name: faster.get(name.split(".")[-1], 1) for name in rates}
        assert len(decays) == len(rates)
        assert {name for name, decay in decays.items() if decay} == {
            name for name in decays if name.endswith(".weight") and "ln" not in name
        }


def test_no_tokens_leave_the_state(module: ModuleType, params: Any) -> None:
    block = params.blocks[0]
    x = jnp.ones((BATCH, 0, WIDTH))
    y, state, _ = module.time_mix(block.att, x)
    z, shift = module.channel_mix(block.ffn, x)
    assert y.shape == z.shape == x.shape
    assert_trees_close(module.BlockState(state, shift), module.initial_state(params, BATCH)[0], 0.0)


@pytest.mark.usefixtures("unchecked_types")
def test_arguments_are_checked(module: ModuleType, params: Any, tokens: jax.Array) -> None:
    name, block = module.GENERATION.name, params.blocks[0]
    ids = jnp.ones((BATCH, TOKENS + 1), jnp.int32)
    x = jnp.zeros((BATCH, TOKENS, WIDTH))
    with pytest.raises(ValueError, match=rf"{name}: segment_ids has shape \(2, 20\)"):
        module.apply(params, tokens, segment_ids=ids)
    with pytest.raises(ValueError, match=rf"{name}: segment_ids has shape \(2, 20\); .* \[B\] = "):
        module.apply(params, tokens[:, 0], segment_ids=ids)
    with pytest.raises(ValueError, match="time_mix: segment_ids has shape"):
        module.time_mix(block.att, x, segment_ids=ids)
    with pytest.raises(TypeError, match="channel_mix: segment_ids is float32"):
        module.channel_mix(block.ffn, x, segment_ids=x[..., 0])
    state = module.initial_state(params, BATCH)
    with pytest.raises(ValueError, match=f"{name}: state is a tuple; accepted with stacked"):
        module.apply(module.stacked(params), tokens, state)
    with pytest.raises(ValueError, match=f"{name}: num_layers is 0"):
        module.Config(num_layers=0, hidden_size=64)
    other = rwkv4 if module is rwkv7 else rwkv7
    message = rf"{name}: config is a .*{other.__name__}.*; accepted is a .*{name}"
    with pytest.raises(TypeError, match=message):
        module.init(jax.random.key(0), other.Config(num_layers=1, hidden_size=64))


def test_parameters_on_a_mesh(module: ModuleType, cpus: list[Any]) -> None:
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, cpus)
    shapes = shapes_of(module, dataclasses.replace(config(module), hidden_size=64))
    apart, placed = (
        module.shardings(x, mesh, data="data", model="model")
        for x in (shapes, jax.eval_shape(module.stacked, shapes))
    )
    assert placed.head.weight.spec == P(None, "data")
    assert apart.blocks[1].att.value.weight.spec == P("model", "data")
    assert apart.blocks[1].ffn.value.weight.spec == P("data", "model")
    assert apart.blocks[0].att.output.weight.spec == P("data", "model")
    assert placed.blocks.first == apart.blocks[0]
    for x, one in zip(*map(jax.tree.leaves, (placed.blocks.rest, apart.blocks[1])), strict=True):
        assert tuple(x.spec) == (None, *one.spec)


# What a model checks before it computes anything.

FUNCTIONS = {
    "hidden_states": rwkv7.hidden_states,
    "apply": rwkv7.apply,
    "Invariant": models.Invariant(rwkv7).apply,
    "flax": lambda params, tokens: flax.RWKV(config_of(rwkv7), params=params)(tokens),
    "equinox": lambda params, tokens: equinox.RWKV(config_of(rwkv7), params=params)(tokens),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([[1, 2, 3]], TypeError, "tokens is a list; accepted is a JAX or numpy array"),
        (3, TypeError, "tokens is a int; accepted is a JAX or numpy array"),
        (np.ones((1, 3), np.float32), TypeError, "tokens is float32; accepted are integers"),
        (np.ones((1, 3), bool), TypeError, "tokens is bool; accepted are integers"),
        (np.ones((1, 2, 3), np.int32), ValueError, r"tokens has shape \(1, 2, 3\); accepted is \["),
        (np.array([61]), ValueError, "tokens has 61; accepted are integers from 0 to 60"),
        (jnp.array([3, -1]), ValueError, "tokens has -1; accepted are integers from 0 to"),
    ],
)
def test_tokens_are_checked(name: str, tokens: Any, error: type[Exception], message: str) -> None:
    what = "Invariant" if name == "Invariant" else "rwkv7"
    with pytest.raises(error, match=f"{what}: {message}"):
        FUNCTIONS[name](parameters(rwkv7), tokens)


def test_tokens_of_a_compiled_program_are_not_known() -> None:
    """They read another row, as the documentation says."""
    params = parameters(rwkv7)
    logits = jax.jit(lambda tokens: rwkv7.apply(params, tokens)[0])
    assert jnp.array_equal(logits(np.array([61])), logits(np.array([60])))


@pytest.mark.usefixtures("unchecked_types")
def test_states_are_checked(module: ModuleType) -> None:
    name = module.GENERATION.name
    params = parameters(module)
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


@pytest.mark.usefixtures("unchecked_types")
def test_unknown_options(module: ModuleType) -> None:
    """Also for one token of each row, where no layer function has kernels."""
    params = parameters(module)
    name = module.GENERATION.name
    for recompute in ("all", []):
        accepted = "accepted are None, 'mixes', 'cheap', 'blocks'"
        message = re.escape(f"{name}: recompute is {recompute!r}; {accepted}")
        with pytest.raises(ValueError, match=message):
            module.apply(params, jnp.ones((2, 3), jnp.int32), recompute=recompute)
    for of in ("wkv", "gather", "embed"):
        message = f"Kernels: {of} is 'ffi'; accepted are None and a function"
        with pytest.raises(TypeError, match=message):
            models.Kernels(**{of: "ffi"})  # pyright: ignore[reportArgumentType]
    accepted = "accepted are None, 'xla', 'reference', 'fused' and a models.Kernels"
    for tokens in (jnp.ones((2, 3), jnp.int32), jnp.ones(2, jnp.int32)):
        for kernels, error in (("fast", ValueError), (["xla"], TypeError)):
            message = re.escape(f"{name}: kernels is {kernels!r}; {accepted}")
            with pytest.raises(error, match=message):
                module.apply(params, tokens, kernels=kernels)


@pytest.mark.slow
def test_parameters_and_embedding_by_functions() -> None:
    """The parameters of a block are those that a function gives, once more in a backward pass that
    computes the block again, and the embedding of tokens is what another one returns."""
    params, calls = parameters(rwkv7), []
    tokens = jnp.ones((2, 3), jnp.int32)
    half = jax.tree.map(lambda x: x / 2, params.blocks)

    def gather(block: Any, x: jax.Array, of_first: Any) -> Any:
        jax.debug.callback(calls.append, jnp.sum(block.ln1.weight))
        return jax.tree.map(lambda x: 2 * x, block), x, of_first

    def embed(weight: Any, tokens: jax.Array, dtype: Any) -> jax.Array:
        return weight.weight[tokens + 1].astype(dtype)

    def loss(blocks: Any, tokens: jax.Array, kernels: Any) -> jax.Array:
        used = params._replace(blocks=blocks)
        x, _ = rwkv7.hidden_states(used, tokens, kernels=kernels, recompute="blocks")
        return jnp.sum(x**2)

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=2)
    by_functions = models.Kernels("xla", "xla", gather=gather, embed=embed)
    value, found = jax.block_until_ready(gradient(half, tokens, by_functions))
    jax.effects_barrier()
    assert len(calls) == 2 * len(half)
    expected_value, expected = gradient(params.blocks, tokens + 1, models.Kernels("xla", "xla"))
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, 2 * y, rtol=1e-3, atol=1e-4)


def test_outputs_of_mixings_by_a_function(module: ModuleType) -> None:
    """A function gives what blocks add. Here it is nothing, so that normalisations remain."""
    params, tokens = parameters(module), jnp.arange(6).reshape(2, 3)
    kernels = models.Kernels("xla", "xla", total=jnp.zeros_like)
    found, _ = module.hidden_states(params, tokens, kernels=kernels)
    expected = np.asarray(params.emb.weight, np.float64)[np.asarray(tokens)]
    for norm in (params.blocks[0].ln0, params.ln_out):
        assert norm is not None
        expected -= expected.mean(-1, keepdims=True)
        expected /= np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5)
        expected = expected * np.asarray(norm.weight) + np.asarray(norm.bias)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_parameters_and_sizes(module: ModuleType) -> None:
    params, name, config = parameters(module), module.GENERATION.name, config_of(module)
    other = rwkv5 if module is rwkv6 else rwkv6
    for function in (module.apply, module.initial_state):
        with pytest.raises(TypeError, match=f"{name}: params is a dict; accepted is a Params"):
            function({}, np.ones(2, np.int32))
        with pytest.raises(TypeError, match=f"{name}: params is of rwkv.; accepted are those of"):
            function(parameters(other), np.ones(2, np.int32))
    for error, size in ((ValueError, -1), (TypeError, 1.5), (TypeError, "2"), (TypeError, True)):
        with pytest.raises(error, match=f"{name}: batch is {size!r}; accepted is an integer"):
            module.initial_state(params, size)
        with pytest.raises(error, match=f"{name}: num_layers is {size!r}; accepted is an integer"):
            dataclasses.replace(config, num_layers=size)
    with pytest.raises(ValueError, match=f"{name}: segment_ids has 4294967296; accepted are int"):
        module.apply(params, np.ones(2, np.int32), segment_ids=np.array([2**32, 1]))
