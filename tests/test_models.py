"""`rwkv_jax.models.rwkv7` against the paper in numpy; its two modes, options and initialisation."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

import rwkv_jax
from rwkv_jax.models import rwkv7
from support import hlo, internals, language_models
from support.compiler import AS_USERS
from support.operators import FAST
from support.tolerance import assert_trees_close

pytestmark = pytest.mark.quick("dtype", "implementation")

CONFIG = rwkv7.Config(num_layers=2, hidden_size=64, head_size=32, vocab_size=256)
BATCH, TOKENS = 2, 37

NORM = ("weight", "bias")
VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a", "r_k")
MATRICES = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2")
LINEAR = ("receptance.weight", "key.weight", "value.weight", "output.weight")
ZERO_AT_FIRST = ("w1", "a1", "v1", "g1", "output.weight", "ffn.value.weight", "bias")


def official_names(layers: int) -> set[str]:
    """The names in an official checkpoint, except `v0`, `v1`, `v2` of the first layer, which are
    unused there."""
    names = {"emb.weight", "ln_out.weight", "ln_out.bias", "head.weight"}
    names |= {f"blocks.0.ln0.{x}" for x in NORM}
    for layer in range(layers):
        att = {*VECTORS, *MATRICES, *LINEAR, *(f"ln_x.{x}" for x in NORM)}
        att -= {"v0", "v1", "v2"} if layer == 0 else set()
        names |= {f"blocks.{layer}.att.{x}" for x in att}
        names |= {f"blocks.{layer}.ffn.{x}" for x in ("x_k", "key.weight", "value.weight")}
        names |= {f"blocks.{layer}.{norm}.{x}" for norm in ("ln1", "ln2") for x in NORM}
    return names


@pytest.fixture(scope="module")
def initial() -> rwkv7.Params:
    return jax.jit(rwkv7.init, static_argnames="config")(jax.random.key(0), config=CONFIG)


@pytest.fixture(scope="module")
def params(initial: rwkv7.Params) -> rwkv7.Params:
    """Parameters with noise on the initial values, many of which are zero."""
    rng = np.random.default_rng(1)

    def noisy(x: jax.Array) -> jax.Array:
        return x + 0.1 * rng.standard_normal(x.shape).astype(np.float32)

    return jax.tree.map(noisy, initial)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(2), (BATCH, TOKENS), 0, CONFIG.vocab_size)


forward = jax.jit(rwkv7.apply, static_argnames=("dtype", "implementation"))


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_logits_equal_the_paper(
    params: rwkv7.Params, tokens: jax.Array, implementation: str | None
) -> None:
    with jax.default_matmul_precision("highest"):
        logits, _ = forward(params, tokens, implementation=implementation)
    named = rwkv7.names(params)
    expected = np.stack([language_models.logits("rwkv7", named, row) for row in np.asarray(tokens)])
    assert_trees_close(logits, expected, 1e-4)


@pytest.mark.parametrize(("dtype", "ceiling"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_decoding_equals_the_sequence(
    params: rwkv7.Params, tokens: jax.Array, dtype: str, ceiling: float
) -> None:
    expected, expected_state = forward(params, tokens, dtype=dtype)

    @jax.jit
    def decode(params: rwkv7.Params, tokens: jax.Array) -> tuple[jax.Array, rwkv7.State]:
        def step(state, token):
            logits, state = rwkv7.apply(params, token, state, dtype=dtype)
            return state, logits

        start = rwkv7.initial_state(params, BATCH, dtype)
        state, logits = jax.lax.scan(step, start, tokens.T)
        return jnp.moveaxis(logits, 0, 1), state

    logits, state = decode(params, tokens)
    assert logits.dtype == jnp.float32
    assert all(s.att.wkv.dtype == jnp.float32 for s in state)
    assert_trees_close((logits, state), (expected, expected_state), ceiling)


def buffers(tree: object) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_decoding_replaces_a_donated_state(
    params: rwkv7.Params, tokens: jax.Array, dtype: str, compiled: bool
) -> None:
    start = functools.partial(rwkv7.initial_state, batch=BATCH, dtype=dtype)
    step = jax.jit(functools.partial(rwkv7.apply, dtype=dtype), donate_argnums=2)
    first = (jax.jit(start) if compiled else start)(params)
    state, logits = first, []
    for token in tokens.T[:3]:
        assert len(set(buffers(state))) == len(jax.tree.leaves(state))
        last, state = step(params, token, state)
        logits.append(last)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    expected = forward(params, tokens[:, :3], dtype=dtype)
    assert_trees_close(
        (jnp.stack(logits, axis=1), state), expected, {"float32": 1e-4}.get(dtype, 3e-2)
    )


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 1), (BATCH, 0)], ids=str)
def test_states_share_no_buffer_with_what_was_given(
    params: rwkv7.Params, shape: tuple[int, ...]
) -> None:
    """Also where a layer is called outside `jit`, so that each array may be donated alone."""
    x, block = jnp.ones((*shape, CONFIG.hidden_size)), params.blocks[0]
    for given in (None, rwkv7.initial_state(params, BATCH)[0]):
        _, att, _ = rwkv7.time_mix(block.att, x, given and given.att)
        _, ffn = rwkv7.channel_mix(block.ffn, x, given and given.ffn)
        everything = buffers((x, given, att, ffn))
        assert len(set(everything)) == len(everything)


@pytest.mark.parametrize("cut", [0, 1, 16])
def test_sequence_in_two_parts_equals_the_whole(
    params: rwkv7.Params, tokens: jax.Array, cut: int
) -> None:
    first, state = forward(params, tokens[:, :cut])
    second, state = forward(params, tokens[:, cut:], state)
    logits = jnp.concatenate([first, second], axis=1)
    assert_trees_close((logits, state), forward(params, tokens), 1e-4)


def test_every_parameter_and_state_has_a_gradient(params: rwkv7.Params, tokens: jax.Array) -> None:
    state = jax.tree.map(lambda x: x + 0.1, rwkv7.initial_state(params, BATCH))

    @jax.jit
    @jax.grad
    def gradient(both: tuple[rwkv7.Params, rwkv7.State]) -> jax.Array:
        logits, _ = rwkv7.apply(both[0], tokens, both[1])
        return jnp.square(logits).mean()

    for path, x in jax.tree_util.tree_leaves_with_path(gradient((params, state))):
        assert jnp.isfinite(x).all(), jax.tree_util.keystr(path)
        assert x.any(), jax.tree_util.keystr(path)


def test_bfloat16_is_close_to_float32(params: rwkv7.Params, tokens: jax.Array) -> None:
    logits, state = forward(params, tokens, dtype="bfloat16")
    assert logits.dtype == jnp.float32
    assert state[0].ffn.dtype == jnp.bfloat16
    assert_trees_close(logits, forward(params, tokens)[0], 5e-2)


Results: TypeAlias = tuple[jax.Array, rwkv7.State]

LENGTH = 6
DOCUMENTS = np.array(
    [
        [0] * 2 + [1] * LENGTH + [0] * 3 + [1] * LENGTH + [0] * 5,
        [2] * LENGTH + [3] * LENGTH + [2] * LENGTH + [0] * 4,
    ]
)
"""Segment ids with padding before, between and after documents, and with adjacent documents."""


@pytest.mark.slow
@pytest.mark.parametrize("given", [True, False], ids=str)
def test_packed_rows_equal_documents_alone(
    params: rwkv7.Params, tokens: jax.Array, given: bool
) -> None:
    """Logits, next states, and the gradients of parameters and states are equal."""
    tokens, ids = tokens[:, : DOCUMENTS.shape[1]], jnp.asarray(DOCUMENTS, jnp.int32)
    state = jax.tree.map(lambda x: x + 0.1, rwkv7.initial_state(params, BATCH)) if given else None
    model = functools.partial(rwkv7.apply, implementation="reference")
    rows, places = (x.reshape(-1, LENGTH) for x in np.nonzero(DOCUMENTS))
    firsts, lasts = np.array([0, 2]), np.array([1, 4])

    def packed(params: rwkv7.Params, state: rwkv7.State | None) -> Results:
        logits, after = model(params, tokens, state, segment_ids=ids)
        return logits[rows, places], after

    def alone(params: rwkv7.Params, state: rwkv7.State | None) -> Results:
        """Each document in a row of its own."""
        starts = rwkv7.initial_state(params, len(rows))
        if state is not None:
            starts = jax.tree.map(lambda x, y: x.at[firsts].set(y), starts, state)
        logits, after = model(params, tokens[rows, places], starts)
        return logits, jax.tree.map(lambda x: x[lasts], after)

    def both(
        call: Callable[..., Results], *operands: PyTree[jax.Array]
    ) -> tuple[Results, PyTree[jax.Array]]:
        results, vjp = jax.vjp(call, *operands)
        return results, vjp(jax.tree.map(jnp.cos, results))

    found, expected = (jax.jit(functools.partial(both, x))(params, state) for x in (packed, alone))
    assert_trees_close(found, expected, 1e-4)


def _loss_and_gradients(
    params: rwkv7.Params, tokens: jax.Array, **options: Any
) -> tuple[jax.Array, rwkv7.Params]:
    def loss(params: rwkv7.Params) -> jax.Array:
        logits, _ = rwkv7.apply(params, tokens, **options)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return jax.value_and_grad(loss)(params)


gradients_of_model = jax.jit(
    _loss_and_gradients,
    static_argnames=("dtype", "implementation", "layers", "recompute"),
    compiler_options=AS_USERS,
)

FFI_OR_REFERENCE = FAST["wkv7"].implementation


@pytest.mark.parametrize(
    ("dtype", "ceiling"),
    [("float32", 1e-5), pytest.param("bfloat16", 3e-2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("packed", "layers"),
    [
        (True, None),
        pytest.param(True, "xla", marks=pytest.mark.slow),
        pytest.param(False, None, marks=pytest.mark.slow),
    ],
)
def test_layers_in_any_implementation(
    params: rwkv7.Params,
    tokens: jax.Array,
    packed: bool,
    dtype: str,
    ceiling: float,
    layers: str | None,
) -> None:
    """The loss and all gradients are equal, in bfloat16 but for where they are rounded."""
    tokens = tokens[:, : DOCUMENTS.shape[1]]
    ids = jnp.asarray(DOCUMENTS, jnp.int32) if packed else None
    options = {"segment_ids": ids, "dtype": dtype, "implementation": FFI_OR_REFERENCE}
    found, expected = (
        gradients_of_model(params, tokens, layers=x, **options) for x in (layers, "reference")
    )
    assert_trees_close(found, expected, ceiling)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["mixes", "cheap", "blocks"])
def test_gradients_that_are_computed_again(
    params: rwkv7.Params, tokens: jax.Array, recompute: str
) -> None:
    found, expected = (
        gradients_of_model(params, tokens, implementation=FFI_OR_REFERENCE, recompute=x)
        for x in (recompute, None)
    )
    assert_trees_close(found, expected, 1e-5)


def test_layer_norm_keeps_its_input_alone() -> None:
    """In its own dtype, and the scale. It has a forward mode all the same."""
    x = jax.random.normal(jax.random.key(0), (2, 5, 16), jnp.bfloat16)
    norm = rwkv7.Norm(jnp.full(16, 0.5), jnp.ones(16))
    residuals = jax.eval_shape(lambda *xs: jax.vjp(rwkv7.layer_norm, *xs)[1], norm, x)
    assert {(x.shape, str(x.dtype)) for x in jax.tree.leaves(residuals)} == {
        ((2, 5, 16), "bfloat16"),
        ((16,), "float32"),
    }
    wide = x.astype(jnp.float32)
    _, slope = jax.jvp(functools.partial(rwkv7.layer_norm, norm), (wide,), (wide,))
    # A longer input has the same direction.
    np.testing.assert_allclose(slope, jnp.zeros_like(slope), atol=1e-4)


def test_what_recompute_keeps(params: rwkv7.Params, tokens: jax.Array) -> None:
    """The more is computed again, the less is kept. JAX is asked, since XLA undoes recomputation on
    CPUs."""
    kept = {}
    for recompute in (None, "mixes", "cheap", "blocks"):
        model = functools.partial(
            rwkv7.hidden_states, implementation=FFI_OR_REFERENCE, recompute=recompute
        )
        residuals = jax.eval_shape(lambda p, model=model: jax.vjp(model, p, tokens)[1], params)
        kept[recompute] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))
    assert kept["blocks"] < kept["cheap"] < kept["mixes"] < kept[None], kept


def test_forward_passes_of_recompute(
    params: rwkv7.Params, tokens: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "blocks" has a second forward pass of `wkv7`."""
    internals.pretend(monkeypatch, "cuda", None)
    forwards = {}
    (target,) = internals.targets("wkv7", "fwd")
    for recompute in (None, "mixes", "cheap", "blocks"):
        options = {"implementation": "ffi", "recompute": recompute}
        call = functools.partial(_loss_and_gradients, **options)
        forwards[recompute] = hlo.calls(jax.make_jaxpr(call)(params, tokens), target)
    # Each platform with kernels has a branch with the target.
    branches = sum(x is None for x in rwkv_jax.build_info()["missing"].values())
    once = CONFIG.num_layers * branches
    assert forwards == {None: once, "mixes": once, "cheap": once, "blocks": 2 * once}
    monkeypatch.undo()
    jax.clear_caches()


def test_blocks_of_one_shape_are_traced_once(tokens: jax.Array) -> None:
    """The first block, which has parameters of its own, and the others."""
    config = dataclasses.replace(CONFIG, num_layers=4)
    shapes = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), config))
    program = jax.make_jaxpr(lambda *xs: rwkv7.hidden_states(*xs))(shapes, tokens)
    bodies = [x.params["jaxpr"] for x in program.eqns if x.params.get("name") == "_block"]
    assert len(bodies) == 4
    assert len(set(map(id, bodies))) == 2


def test_kernels_add_the_cotangents_of_heads(
    params: rwkv7.Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the sums between kernels are those of the first layer's value, with three uses."""
    internals.pretend(monkeypatch, "cuda", None)
    tokens = jax.ShapeDtypeStruct((3, 17), jnp.int32)
    with hlo.device("cuda"):
        traced = jax.jit(lambda p, x: _loss_and_gradients(p, x)).trace(params, tokens)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.undo()
    jax.clear_caches()
    heads, size = params.blocks[0].att.r_k.shape
    adds = [x for x in text.splitlines() if "stablehlo.add " in x]
    assert sum(f"tensor<3x17x{heads}x{size}xf32>" in x for x in adds) == 2


def test_a_step_is_exported(params: rwkv7.Params, tokens: jax.Array) -> None:
    """With the kernels that multiply few rows on a CPU, which are no operator's."""

    step = jax.jit(lambda tokens: rwkv7.apply(params, tokens)[0])
    exported = export.export(step, disabled_checks=rwkv_jax.export_disabled_checks())(tokens[:, 0])
    found = export.deserialize(exported.serialize()).call(tokens[:, 0])
    np.testing.assert_array_equal(found, step(tokens[:, 0]))


def test_training_is_exported_for_gpus(
    params: rwkv7.Params, tokens: jax.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernels of layer functions. All targets of the package are among the checks."""
    checks = rwkv_jax.export_disabled_checks()
    every = internals.other_targets("cpu") | internals.other_targets("cuda")
    assert {export.DisabledSafetyCheck.custom_call(x) for x in every} <= {*checks}
    internals.pretend(monkeypatch, "cuda", None)

    def loss(params: rwkv7.Params, tokens: jax.Array) -> jax.Array:
        return jnp.sum(rwkv7.hidden_states(params, tokens)[0] ** 2)

    exported = export.export(jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=checks)(
        params, tokens
    )
    assert {"rwkv_wkv7_bwd_v2", "rwkv_read_out_restoring_bwd_v1"} <= hlo.targets(
        exported.mlir_module()
    )


@pytest.mark.usefixtures("unchecked_types")
def test_options_of_layers_are_checked(params: rwkv7.Params, tokens: jax.Array) -> None:
    wrong: Any = "all"
    accepted = "accepted are None, 'mixes', 'cheap', 'blocks'"
    with pytest.raises(ValueError, match=f"recompute is 'all'; {accepted}"):
        rwkv7.apply(params, tokens, recompute=wrong)
    with pytest.raises(ValueError, match="rwkv7: layers is 'pallas'; accepted"):
        rwkv7.apply(params, tokens, layers="pallas")


@pytest.mark.usefixtures("unchecked_types")
def test_segment_ids_of_the_model_are_checked(params: rwkv7.Params, tokens: jax.Array) -> None:
    ids, att = jnp.ones((BATCH, TOKENS + 1), jnp.int32), params.blocks[0].att
    x = jnp.zeros((BATCH, TOKENS, CONFIG.hidden_size))
    with pytest.raises(ValueError, match=r"rwkv7: segment_ids has shape \(2, 38\)"):
        rwkv7.apply(params, tokens, segment_ids=ids)
    with pytest.raises(ValueError, match=r"rwkv7: segment_ids has shape \(2, 38\); .* \[B\] = "):
        rwkv7.apply(params, tokens[:, 0], segment_ids=ids)
    with pytest.raises(ValueError, match="time_mix: segment_ids has shape"):
        rwkv7.time_mix(att, x, segment_ids=ids)
    with pytest.raises(TypeError, match="channel_mix: segment_ids is float32"):
        rwkv7.channel_mix(params.blocks[0].ffn, x, segment_ids=x[..., 0])


def test_names_are_official(initial: rwkv7.Params) -> None:
    assert set(rwkv7.names(initial)) == official_names(CONFIG.num_layers)


def test_official_sizes() -> None:
    """RWKV-7 "Goose" 0.1B: 191 million parameters, and its low ranks."""
    config = rwkv7.Config(num_layers=12, hidden_size=768)
    shapes = jax.eval_shape(functools.partial(rwkv7.init, config=config), jax.random.key(0))
    att = shapes.blocks[1].att
    ranks = [x.shape[1] for x in (att.w1, att.a1, att.v1, att.g1) if x is not None]
    assert ranks == [64, 64, 32, 128]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) == pytest.approx(
        191e6, rel=3e-3
    )


def test_initial_values(initial: rwkv7.Params) -> None:
    for name, x in rwkv7.names(initial).items():
        assert x.dtype == jnp.float32
        assert bool(x.any()) != name.endswith(ZERO_AT_FIRST), name
    first, *_, last = initial.blocks
    assert jnp.allclose(last.att.ln_x.weight, 1)
    assert jnp.allclose(first.att.ln_x.weight, CONFIG.num_layers**-0.7)
    # From hand-evaluated formulas: the two ends of a vector over all channels.
    assert jnp.allclose(first.att.w0[jnp.array([0, -1])], jnp.array([-8.0, 3.0]))
    assert jnp.allclose(last.att.a0[jnp.array([0, -1])], jnp.array([-0.69, 0.31]))
    gram = first.ffn.key.weight.T @ first.ffn.key.weight
    assert jnp.allclose(gram, jnp.eye(CONFIG.hidden_size), atol=1e-5)


def test_initial_loss_is_of_a_uniform_guess(initial: rwkv7.Params, tokens: jax.Array) -> None:
    logits, _ = forward(initial, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    assert float(losses.mean()) == pytest.approx(math.log(CONFIG.vocab_size), abs=0.3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 0, "hidden_size": 64}, "num_layers is 0"),
        (
            {"num_layers": 1, "hidden_size": 100},
            "hidden_size is 100; accepted is a multiple of head_size = 64",
        ),
    ],
)
def test_bad_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rwkv7.Config(**sizes)


def test_later_layer_needs_the_first_value(params: rwkv7.Params) -> None:
    with pytest.raises(ValueError, match="v_first is None"):
        rwkv7.time_mix(params.blocks[1].att, jnp.zeros((1, 2, CONFIG.hidden_size)))


def test_parameters_that_do_not_divide_stay_whole(cpus: list[Any]) -> None:
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=cpus)
    config = rwkv7.Config(num_layers=2, hidden_size=64, head_size=32, vocab_size=250)
    shapes = jax.eval_shape(functools.partial(rwkv7.init, config=config), jax.random.key(0))
    placed = rwkv7.shardings(shapes, mesh, model="model")
    assert placed.emb.weight.spec == P(None, None)
    assert placed.blocks[1].att.r_k.spec == P(None)
    # Half a head would be on each device, of which the operator cannot compute.
    assert placed.blocks[1].att.receptance.weight.spec == P(None, None)
    assert placed.blocks[1].att.w2.spec == P(None, None)
    assert placed.blocks[1].ffn.value.weight.spec == P(None, "model")
    with pytest.raises(ValueError, match="data is 'batch'; accepted"):
        rwkv7.shardings(shapes, mesh, data="batch")


def test_one_head_on_two_devices(cpus: list[Any]) -> None:
    """The operator computes whole heads, so that parameters of half a head would stop it."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=cpus[:2])
    config = rwkv7.Config(num_layers=1, hidden_size=16, head_size=16, vocab_size=8)
    shapes = jax.eval_shape(functools.partial(rwkv7.init, config=config), jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    tokens = jnp.zeros((1, 2), jnp.int32)
    apply = jax.jit(lambda params: rwkv7.apply(params, tokens)[0])
    expected = apply(params)
    placed = jax.device_put(params, rwkv7.shardings(params, mesh, model="model"))
    assert placed.blocks[0].ffn.key.weight.sharding.spec == P("model", None)
    assert_trees_close(apply(placed), expected)


def test_the_sum_of_a_mixing_has_the_shape_of_its_product(
    params: rwkv7.Params, tokens: jax.Array, cpus: list[Any]
) -> None:
    """In a program for one device, where nothing distributes rows and tokens, and with the same
    results."""
    hidden_states = jax.jit(functools.partial(rwkv7.hidden_states, implementation=FFI_OR_REFERENCE))

    def sums(params: rwkv7.Params) -> int:
        """How many sums there are of the shape of a product."""
        shape = f"tensor<{tokens.size}x{CONFIG.hidden_size}xf32>"
        lines = hidden_states.lower(params, tokens).as_text().splitlines()
        return sum("stablehlo.add" in line and line.endswith(shape) for line in lines)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=cpus[:2])
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    assert sums(placed) == 0
    assert sums(params) > 0
    found, expected = (hidden_states(x, tokens) for x in (params, placed))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
