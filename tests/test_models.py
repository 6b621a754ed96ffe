"""`rwkv_jax.models.rwkv7`: what test_generations.py does not ask of all generations."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax.models import Kernels, rwkv7
from support import hlo, internals, meshes
from support.compiler import AS_USERS
from support.models import DOCUMENTS, config_of, parameters, random_like, shapes_of
from support.operators import FAST
from support.tolerance import assert_trees_close

CONFIG = config_of(rwkv7)
BATCH, TOKENS = DOCUMENTS.shape


@pytest.fixture(scope="module")
def params() -> rwkv7.Params:
    return parameters(rwkv7)


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(2), (BATCH, TOKENS), 0, CONFIG.vocab_size)


forward = jax.jit(rwkv7.apply)


def buffers(tree: object) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_decoding_replaces_a_donated_state(params: rwkv7.Params, tokens: jax.Array) -> None:
    """One that was made with `jit` or without."""
    start = functools.partial(rwkv7.initial_state, batch=BATCH)
    step = jax.jit(rwkv7.apply, donate_argnums=2)
    expected = forward(params, tokens[:, :3])
    for initial in (start(params), jax.jit(start)(params)):
        state, logits = initial, []
        for token in tokens.T[:3]:
            assert len(set(buffers(state))) == len(jax.tree.leaves(state))
            last, state = step(params, token, state)
            logits.append(last)
        assert all(x.is_deleted() for x in jax.tree.leaves(initial))
        assert_trees_close((jnp.stack(logits, axis=1), state), expected, 1e-4)


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


@functools.partial(
    jax.jit, static_argnames=("dtype", "kernels", "recompute"), compiler_options=AS_USERS
)
def loss_and_gradients(
    params: rwkv7.Params, tokens: jax.Array, **options: Any
) -> tuple[jax.Array, rwkv7.Params]:
    def loss(params: rwkv7.Params) -> jax.Array:
        logits, _ = rwkv7.apply(params, tokens, **options)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return jax.value_and_grad(loss)(params)


FFI_OR_REFERENCE = Kernels(FAST["wkv7"].implementation)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "dtype", "ceiling"),
    [((None, "xla"), "float32", 1e-5), ((None,), "bfloat16", 3e-2)],
)
def test_layers_in_any_implementation(
    params: rwkv7.Params, tokens: jax.Array, layers: Any, dtype: str, ceiling: float
) -> None:
    """The loss and all gradients are equal, in bfloat16 but for where they are rounded."""
    *found, expected = (
        loss_and_gradients(
            *(params, tokens),
            segment_ids=jnp.asarray(DOCUMENTS, jnp.int32),
            kernels=dataclasses.replace(FFI_OR_REFERENCE, layers=x),
            dtype=dtype,
        )
        for x in (*layers, "reference")
    )
    for one in found:
        assert_trees_close(one, expected, ceiling)


@pytest.mark.slow
def test_gradients_that_are_computed_again(params: rwkv7.Params, tokens: jax.Array) -> None:
    """Also of stacked blocks, in packed rows."""
    ids = jnp.asarray(DOCUMENTS, jnp.int32)
    given: Any = {"kernels": FFI_OR_REFERENCE, "dtype": "float32"}
    call = functools.partial(loss_and_gradients, segment_ids=ids, **given)
    expected = call(params, tokens)
    stacked = rwkv7.stacked(params)
    for form, recompute in ((params, "mixes"), (params, "cheap"), (stacked, "blocks")):
        loss, gradients = call(form, tokens, recompute=recompute)
        assert_trees_close((loss, rwkv7.unstacked(gradients)), expected, 1e-5)


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


@pytest.mark.slow
def test_recompute(params: rwkv7.Params, tokens: jax.Array, pretend: Any) -> None:
    """The more is computed again, the less is kept, and only "blocks" has a second forward pass of
    `wkv7`. JAX is asked, since XLA undoes recomputation on CPUs."""
    pretend("cuda", None)
    (target,) = internals.targets("wkv7", "fwd")
    kept, forwards = [], []
    for recompute in (None, "mixes", "cheap", "blocks"):

        def call(params: rwkv7.Params, recompute: str | None = recompute) -> jax.Array:
            options: Any = {"kernels": Kernels("ffi"), "recompute": recompute}
            return rwkv7.hidden_states(params, tokens, **options)[0].sum()

        residuals = jax.eval_shape(lambda p, call=call: jax.vjp(call, p)[1], params)
        kept.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals)))
        forwards.append(hlo.calls(jax.make_jaxpr(jax.grad(call))(params), target))
    assert all(more > less for more, less in itertools.pairwise(kept))
    # Each platform with kernels has a branch with the target.
    branches = sum(x is None for x in rwkv_jax.build_info()["missing"].values())
    assert forwards == [CONFIG.num_layers * branches * times for times in (1, 1, 1, 2)]


def test_blocks_of_one_shape_are_traced_once(tokens: jax.Array) -> None:
    """The first block, which has parameters of its own, and the others."""
    shapes = shapes_of(rwkv7, dataclasses.replace(CONFIG, num_layers=4))
    program = jax.make_jaxpr(lambda *xs: rwkv7.hidden_states(*xs))(shapes, tokens)
    bodies = [x.params["jaxpr"] for x in program.eqns if x.params.get("name") == "_block"]
    assert len(bodies) == 4
    assert len(set(map(id, bodies))) == 2


@pytest.mark.slow
def test_kernels_add_the_cotangents_of_heads(params: rwkv7.Params, pretend: Any) -> None:
    """On a GPU the sums between kernels are those of the first layer's value, with three uses."""
    pretend("cuda", None)
    tokens = jax.ShapeDtypeStruct((3, 17), jnp.int32)
    with hlo.device("cuda"):
        traced = jax.jit(jax.grad(lambda p, x: rwkv7.apply(p, x)[0].sum())).trace(params, tokens)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
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
    params: rwkv7.Params, tokens: jax.Array, pretend: Any
) -> None:
    """With the kernels of layer functions. All targets of the package are among the checks."""
    checks = rwkv_jax.export_disabled_checks()
    every = internals.other_targets("cpu") | internals.other_targets("cuda")
    assert {export.DisabledSafetyCheck.custom_call(x) for x in every} <= {*checks}
    pretend("cuda", None)
    gradient = jax.jit(jax.grad(lambda p, x: jnp.sum(rwkv7.hidden_states(p, x)[0] ** 2)))
    export_it = export.export(gradient, platforms=["cuda"], disabled_checks=checks)
    found = hlo.targets(export_it(params, tokens).mlir_module())
    assert {"rwkv_wkv7_bwd_v2", "rwkv_read_out_restoring_bwd_v1"} <= found


def test_official_sizes() -> None:
    """RWKV-7 "Goose" 0.1B: 191 million parameters, and its low ranks."""
    shapes = shapes_of(rwkv7, rwkv7.Config(num_layers=12, hidden_size=768))
    att = shapes.blocks[1].att
    ranks = [x.shape[1] for x in (att.w1, att.a1, att.v1, att.g1) if x is not None]
    assert ranks == [64, 64, 32, 128]
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert total == pytest.approx(191e6, rel=3e-3)


@pytest.mark.slow
def test_initial_matrices() -> None:
    """Matrices of all layers come from one loop, and each has a key of its own."""
    init = jax.jit(rwkv7.init, static_argnames="config")
    sizes = [dataclasses.replace(CONFIG, num_layers=layers) for layers in (2, 8)]
    few, many = (init.lower(jax.random.key(1), size).as_text() for size in sizes)
    assert many.count("geqrf") == few.count("geqrf") > 0
    params = init(jax.random.key(1), sizes[0])
    for block, key in zip(params.blocks, jax.random.split(jax.random.key(1), 4)[2:], strict=True):
        att, ffn = jax.random.split(key)
        keys = jax.random.split(att, 7)
        for x, key, scale in (
            (block.att.g2, keys[3], 0.1),
            (block.att.key.weight, keys[5], 0.1),
            (block.ffn.key.weight, ffn, 1.0),
        ):
            expected = jax.nn.initializers.orthogonal(scale)(key, x.shape)
            np.testing.assert_allclose(x, expected, atol=1e-5)


def test_initial_loss_is_of_a_uniform_guess(tokens: jax.Array) -> None:
    initial = jax.jit(lambda: rwkv7.init(jax.random.key(0), CONFIG))()
    key = initial.blocks[0].ffn.key.weight
    assert jnp.allclose(key.T @ key, jnp.eye(CONFIG.hidden_size), atol=1e-5)
    logits, _ = forward(initial, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    assert float(losses.mean()) == pytest.approx(math.log(CONFIG.vocab_size), abs=0.3)


def test_later_layer_needs_the_first_value(params: rwkv7.Params) -> None:
    with pytest.raises(ValueError, match="v_first is None"):
        rwkv7.time_mix(params.blocks[1].att, jnp.zeros((1, 2, CONFIG.hidden_size)))


def test_parameters_that_do_not_divide_stay_whole(cpus: list[Any]) -> None:
    mesh = meshes.mesh("model=4", AxisType.Auto, cpus)
    config = rwkv7.Config(num_layers=2, hidden_size=64, head_size=32, vocab_size=250)
    shapes = shapes_of(rwkv7, config)
    placed = rwkv7.shardings(shapes, mesh, model="model")
    assert placed.emb.weight.spec == P(None, None)
    assert placed.blocks[1].att.r_k.spec == P(None)
    # Half a head would be on each device, of which the operator cannot compute.
    assert placed.blocks[1].att.receptance.weight.spec == P(None, None)
    assert placed.blocks[1].att.w2.spec == P(None, None)
    assert placed.blocks[1].ffn.value.weight.spec == P(None, "model")
    # Where no other axis has the rows, matrices are distributed by rows, but not the embedding.
    # A time mixing has whole heads on each device.
    mesh_of_data = meshes.mesh("data=4", AxisType.Auto, cpus)
    placed = rwkv7.shardings(shapes, mesh_of_data, data="data")
    assert placed.blocks[1].att.receptance.weight.spec == P(None, "data")
    assert placed.blocks[1].ffn.key.weight.spec == P("data")
    assert placed.blocks[1].ffn.value.weight.spec == P("data", None)
    assert placed.emb.weight.spec == placed.head.weight.spec == P(None, "data")
    shapes = shapes_of(rwkv7, dataclasses.replace(config, head_size=16))
    placed = rwkv7.shardings(shapes, mesh_of_data, data="data")
    assert placed.blocks[1].att.receptance.weight.spec == P("data")
    with pytest.raises(ValueError, match="data is 'batch'; accepted"):
        rwkv7.shardings(shapes, mesh, data="batch")
    with pytest.raises(ValueError, match="model is 'model', and data is 'model'; accepted are dif"):
        rwkv7.shardings(shapes, mesh, data="model", model="model")


@pytest.mark.parametrize("head_size", [8, 16])
def test_parameters_that_are_not_gathered(cpus: list[Any], head_size: int) -> None:
    """Four heads, or two, on four devices."""
    config = rwkv7.Config(num_layers=1, hidden_size=32, head_size=head_size, vocab_size=32)
    params = random_like(shapes_of(rwkv7, config))
    places = rwkv7.shardings(params, meshes.mesh("data=4", AxisType.Auto, cpus), data="data")
    tokens = np.arange(12, dtype=np.int32).reshape(1, 12)
    call = jax.jit(lambda params: rwkv7.apply(params, tokens)[0])
    assert_trees_close(call(jax.device_put(params, places)), call(params), 1e-5)


@pytest.mark.slow
def test_the_sum_of_a_mixing_has_the_shape_of_its_product(
    params: rwkv7.Params, tokens: jax.Array, cpus: list[Any]
) -> None:
    """In a program for one device, where nothing distributes rows and tokens, and with the same
    results."""
    hidden_states = jax.jit(functools.partial(rwkv7.hidden_states, kernels=FFI_OR_REFERENCE))

    def sums(params: rwkv7.Params) -> int:
        """How many sums there are of the shape of a product."""
        shape = f"tensor<{tokens.size}x{CONFIG.hidden_size}xf32>"
        lines = hidden_states.lower(params, tokens).as_text().splitlines()
        return sum("stablehlo.add" in line and line.endswith(shape) for line in lines)

    mesh = meshes.mesh("data=2", AxisType.Auto, cpus)
    placed = jax.device_put(params, NamedSharding(mesh, P()))
    assert sums(placed) == 0
    assert sums(params) > 0
    found, expected = (hidden_states(x, tokens) for x in (params, placed))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# The stacked form of blocks.


def stacked_shapes(layers: int) -> rwkv7.Params:
    shapes = shapes_of(rwkv7, dataclasses.replace(CONFIG, num_layers=layers))
    return jax.eval_shape(rwkv7.stacked, shapes)


@pytest.mark.parametrize("layers", [1, 3])
def test_stacked_and_back(layers: int, tokens: jax.Array) -> None:
    """And that both forms give the same results for single tokens."""
    params = random_like(shapes_of(rwkv7, dataclasses.replace(CONFIG, num_layers=layers)))
    stacked, call = rwkv7.stacked(params), jax.jit(rwkv7.apply)
    assert isinstance(stacked.blocks, rwkv7.Stacked)
    assert rwkv7.stacked(stacked) is stacked or rwkv7.stacked(stacked) == stacked
    assert_trees_close(rwkv7.names(rwkv7.unstacked(stacked)), rwkv7.names(params), 0)
    names = rwkv7.names(stacked)
    assert layers == 1 or names["blocks.rest.att.w0"].shape == (layers - 1, CONFIG.hidden_size)
    state = random_like(rwkv7.initial_state(params, BATCH))
    assert rwkv7.names(rwkv7.initial_state(stacked, BATCH)).keys() == (
        rwkv7.names(rwkv7.stacked(state)).keys()
    )
    logits, after = call(stacked, tokens[:, 0], rwkv7.stacked(state))
    expected = call(params, tokens[:, 0], state)
    assert_trees_close((logits, rwkv7.unstacked(after)), expected, 1e-6)


@pytest.mark.slow
def test_program_of_stacked_blocks_does_not_grow_with_layers(tokens: jax.Array) -> None:
    @jax.grad
    def gradient(params: rwkv7.Params) -> jax.Array:
        return rwkv7.hidden_states(params, tokens, recompute="cheap")[0].sum()

    few, many = (jax.jit(gradient).lower(stacked_shapes(n)).as_text() for n in (3, 6))
    assert few.count("wkv7") == many.count("wkv7")
    assert hlo.targets(few) == hlo.targets(many)
    assert few.count("\n") == many.count("\n")


def test_backward_pass_keeps_one_value_of_the_first_block(tokens: jax.Array) -> None:
    """Only the activations between stacked blocks are kept once for each block."""

    def backward(params: rwkv7.Params) -> Any:
        return jax.vjp(lambda x: rwkv7.hidden_states(x, tokens, recompute="blocks")[0], params)[1]

    shapes = jax.eval_shape(backward, stacked_shapes(4))
    kept = [x.shape for x in jax.tree.leaves(shapes) if x.shape[:3] == (3, BATCH, TOKENS)]
    assert kept == [(3, BATCH, TOKENS, CONFIG.hidden_size)]
