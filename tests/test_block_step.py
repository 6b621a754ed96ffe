"""The step of a whole block of RWKV-7 by CUDA kernels: where it is taken, where not, and why not.
`test_emulation.py` has what the kernels compute."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import models as all_models
from rwkv_jax.generation import TokenStream, generate
from rwkv_jax.models import Kernels, rwkv6, rwkv7
from support import hlo, internals, meshes, models
from support.tolerance import assert_trees_close

ROWS = 2
BLOCKS = {"rwkv_rwkv7_first_block_v1", "rwkv_rwkv7_block_v1"}
DEFERRED = {"rwkv_rwkv7_first_block_deferred_v1", "rwkv_rwkv7_block_deferred_v1"}
BY_INPUT = {"rwkv_rwkv7_first_block_by_input_v1", "rwkv_rwkv7_block_by_input_v1"}


@pytest.fixture(scope="module", autouse=True)
def _on_a_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def params() -> rwkv7.Params:
    return models.with_heads_of_64(64, "float32")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.pretend(monkeypatch, "cuda", None)


def _lowered(params: Any, rows: int = ROWS, platform: str = "cuda", **options: Any) -> str:
    options = {"kernels": "fused"} | options
    dtype = options.get("dtype", jnp.float32)
    state = jax.eval_shape(lambda p: rwkv7.initial_state(p, rows, dtype), params)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def step(params: Any, tokens: Any, state: Any) -> Any:
        return rwkv7.apply(params, tokens, state, **options)

    with hlo.device(platform):
        traced = jax.jit(step, donate_argnums=2).trace(params, tokens, state)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("form", [rwkv7.unstacked, rwkv7.stacked])
def test_a_token_is_a_call_for_each_block(params: rwkv7.Params, form: Any) -> None:
    """The three states of a block are changed in place, also where rows may have no token. One row
    of blocks that are not stacked gets the kernels, more only if somebody asks."""
    text = _lowered(form(params), segment_ids=jnp.arange(ROWS))
    calls = [line for line in text.splitlines() if "custom_call @rwkv" in line]
    assert hlo.targets(text) == BLOCKS
    assert len(calls) == 2
    for call in calls:
        assert call.count("output_operand_alias<") == 3
    for rows, own in ((1, BLOCKS if form is rwkv7.unstacked else set()), (ROWS, set())):
        assert hlo.targets(_lowered(form(params), rows, kernels=None)) & BLOCKS == own


@pytest.mark.slow
@pytest.mark.usefixtures("on_cuda")
def test_which_rows_get_the_kernels(params: rwkv7.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, also with int8 weights or as stored for decoding, and several of 16-bit floats,
    where they can run, the program is for one device, whatever else JAX has, blocks are not
    stacked, and nobody asks for anything else."""

    def targets(params: Any, rows: int = 1, kernels: Any = None, **options: Any) -> set[str]:
        text = _lowered(params, rows, kernels=kernels, **options)
        return hlo.targets(text) & (BLOCKS | BY_INPUT)

    assert targets(params) == BLOCKS
    mesh = meshes.mesh("data=2", AxisType.Auto, jax.devices("cpu"))
    assert not targets(jax.device_put(params, NamedSharding(mesh, P())))
    assert targets(params, segment_ids=jnp.ones(1, jnp.int32)) == BLOCKS
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert targets(narrow, rows=32, dtype=jnp.bfloat16) == BLOCKS
    most = internals.block_step.MAX_MANY_ROWS
    assert targets(narrow, rows=most, dtype=jnp.bfloat16) == BLOCKS
    assert not targets(narrow, rows=most + 1, dtype=jnp.bfloat16)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    assert targets(half, rows=32, dtype=jnp.float16) == BLOCKS
    assert not targets(half, rows=33, dtype=jnp.float16)
    with monkeypatch.context() as other:
        other.setattr(internals.gpus, "why_not_hopper", lambda: "it is another GPU")
        assert not targets(narrow, rows=33, dtype=jnp.bfloat16)
    assert not targets(params, rows=2)
    assert not targets(params, platform="cpu")
    for kernels in ("xla", "reference", Kernels("ffi")):
        assert not targets(params, kernels=kernels)
    assert not targets(params, dtype=jnp.bfloat16)
    assert not targets(rwkv7.stacked(params))
    assert targets(all_models.quantize(params)) == BLOCKS
    assert not targets(all_models.quantize(params, group=32))
    assert not targets(all_models.quantize(narrow), rows=2, dtype=jnp.bfloat16)
    assert targets(all_models.for_decoding(params)) == BY_INPUT
    assert targets(all_models.for_decoding(all_models.quantize(params))) == BY_INPUT
    assert not targets(all_models.for_decoding(narrow), rows=2, dtype=jnp.bfloat16)
    tokens = jnp.zeros(1, jnp.int32)
    found, expected = (rwkv7.apply(params, tokens, kernels=x) for x in (None, "reference"))
    assert_trees_close(found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cuda")
def test_where_updates_are_deferred(params: rwkv7.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """In loops over tokens with more than 32 rows of bfloat16. A program for a CPU gives the same
    tokens and the same session as without the kernels."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def targets(rows: int, model: Any = rwkv7, **options: Any) -> set[str]:
        with hlo.device("cuda"):
            text = internals.lowered_decoding(model, narrow, rows, jnp.bfloat16, **options)
        return hlo.targets(text) & (BLOCKS | DEFERRED)

    assert targets(33) == DEFERRED
    assert targets(32) == targets(33, defers=False) == BLOCKS
    assert targets(33, kernels=Kernels(blocks="fused")) == DEFERRED
    for kernels in (Kernels("xla"), Kernels(layers="xla"), Kernels(blocks="separate")):
        assert not targets(33, kernels=kernels)
    assert not targets(33, model=all_models.Invariant(rwkv7, 33)) & DEFERRED
    with monkeypatch.context() as other:
        other.setattr(internals.gpus, "why_not_hopper", lambda: "it is another GPU")
        assert not targets(33)

    def generated() -> Any:
        prompts = [[row % 11] for row in range(33)]
        made = generate(rwkv7, narrow, prompts, 6, stop_tokens=[3], dtype=jnp.bfloat16)
        return made.tokens, made.session

    (tokens, session), _ = generated(), internals.pretend(monkeypatch, "cuda", "it is not there")
    expected_tokens, expected = generated()
    assert tokens == expected_tokens
    assert jax.tree.structure(session) == jax.tree.structure(expected)
    assert_trees_close(session, expected)


def test_a_platform_without_the_kernels_refuses(params: rwkv7.Params) -> None:
    reason = "rwkv7_block: implementation 'fused' cannot run this call on .*for CUDA GPUs"
    with pytest.raises(NotImplementedError, match=reason):
        _lowered(params, platform="cpu")


@pytest.mark.usefixtures("on_cuda")
def test_why_not(params: rwkv7.Params) -> None:
    config = rwkv7.Config(1, 64, head_size=32, vocab_size=11)
    params = params._replace(blocks=params.blocks[:1])
    att, quantised = params.blocks[0].att, all_models.quantize(params)

    def with_att(params: Any, **changes: Any) -> rwkv7.Params:
        (block,) = params.blocks
        return params._replace(blocks=(block._replace(att=block.att._replace(**changes)),))

    scale = jnp.ones((64, 1), jnp.bfloat16)
    receptance = rwkv7.Weight(att.receptance.weight.astype(jnp.int8), scale)
    narrow_scale = with_att(quantised, receptance=receptance)
    rank_of_4 = with_att(params, a1=att.a1[:, :4], a2=att.a2[:4])
    groups = all_models.quantize(params, group=32)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (params, {"rows": 33}, "B = 33; the kernels take 1 to 32 rows"),
        (params, {"rows": 0}, "B = 0; the kernels take 1 to 32 rows"),
        (params, {"dtype": jnp.bfloat16}, "ln1.weight is float32 where x is bfloat16; the"),
        (quantised, {}, "B = 2; the kernels take 1 row with int8 weights"),
        (all_models.for_decoding(params), {}, "B = 2; the kernels take 1 row with ffn.value by in"),
        (narrow_scale, {"rows": 1}, "att.receptance.scale is bfloat16; the kernels take float32"),
        (groups, {"rows": 1}, r"att\.receptance\.scale is stored in another"),
        (models.shapes_of(rwkv7, config), {}, "K = 32; the kernels take heads of 64 channels"),
        (rank_of_4, {}, "att.a1 has a rank of 4; the kernels take multiples of 8 up"),
    ]
    for model, options, reason in cases:
        with pytest.raises(NotImplementedError, match=f"on cuda: .*{reason}"):
            _lowered(model, **options)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    state = internals.deferred(half, rwkv7.initial_state(half, ROWS, "float16"))
    state = internals.at_step(state, jnp.int32(0), jnp.bool(False))
    step = jax.jit(functools.partial(rwkv7.apply, dtype="float16", kernels="fused"))
    reason = "x is float16; the kernels that defer updates of states take bfloat16"
    with hlo.device("cuda"), pytest.raises(NotImplementedError, match=reason):
        step.trace(half, jnp.zeros(ROWS, jnp.int32), state).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("name", ["layers", "blocks"])
def test_wrong_kernels(name: str) -> None:
    with pytest.raises(ValueError, match=f"Kernels: {name} is 'fast'; accepted are '"):
        dataclasses.replace(Kernels(), **{name: "fast"})


def test_fused_blocks_have_no_total() -> None:
    with pytest.raises(ValueError, match="Kernels: total is a function; accepted with fused"):
        Kernels(blocks="fused", total=jnp.negative)


def test_generation_reads_prompts_by_separate_blocks(params: rwkv7.Params) -> None:
    """Unless they are read by one token at a time. The blocks of new tokens are refused here."""
    stream = TokenStream(rwkv7, params, [[1, 2]], 1, prefill_chunks=[2], kernels="fused")
    with pytest.raises(NotImplementedError, match="implementation 'fused' cannot run this call"):
        next(stream)
    with pytest.raises(NotImplementedError, match="implementation 'fused' cannot run this call"):
        TokenStream(all_models.Invariant(rwkv7, 1), params, [[1]], 1, kernels="fused")


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_options(params: rwkv7.Params) -> None:
    tokens = jnp.zeros((ROWS, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"blocks = 'fused' where tokens has shape \(2, 3\)"):
        rwkv7.apply(params, tokens, kernels="fused")
    for name in ("operator", "layers"):
        kernels = dataclasses.replace(Kernels(blocks="fused"), **{name: "xla"})
        with pytest.raises(ValueError, match=rf"rwkv7: kernels is .*{name}='xla'.* None and 'ffi'"):
            rwkv7.apply(params, tokens[:, 0], kernels=kernels)
    with pytest.raises(ValueError, match=r"rwkv6: .* blocks = 'fused' .*for whole models"):
        rwkv6.apply(models.parameters(rwkv6), tokens[:, 0], kernels="fused")
    with pytest.raises(ValueError, match=r"time_mix: .* blocks = 'fused' .*for whole models"):
        rwkv7.time_mix(params.blocks[0].att, jnp.zeros((ROWS, 64)), kernels="fused")
    state = rwkv7.initial_state(params, ROWS + 1)
    with pytest.raises(ValueError, match="rwkv7: state is not one of this model with 2 rows"):
        rwkv7.apply(params, tokens[:, 0], state, kernels="fused")


@pytest.mark.slow
@pytest.mark.usefixtures("on_cuda")
def test_transformations_take_the_usual_way(params: rwkv7.Params) -> None:
    """On a platform for which the kernels cannot be lowered."""
    tokens = jnp.arange(ROWS, dtype=jnp.int32)
    state = jax.tree.map(lambda x: x + 0.5, rwkv7.initial_state(params, ROWS))

    def results(kernels: str | None) -> Any:
        def loss(params: rwkv7.Params, state: Any) -> jax.Array:
            found = jax.tree.leaves(rwkv7.apply(params, tokens, state, kernels=kernels))
            return sum((jnp.vdot(x, x) for x in found), jnp.float32(0))

        def row(token: jax.Array, state: Any) -> Any:
            alone = jax.tree.map(lambda x: x[None], state)
            return rwkv7.apply(params, token[None], alone, kernels=kernels)

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, state)
        return gradients, jax.jit(jax.vmap(row))(tokens, state)

    assert_trees_close(results("fused"), results(None))


@pytest.mark.slow
@pytest.mark.usefixtures("on_cuda")
def test_inside_shard_map(params: rwkv7.Params) -> None:
    mesh = meshes.mesh("data=2", AxisType.Auto, jax.devices("cpu"))
    tokens = jnp.arange(ROWS, dtype=jnp.int32)
    step = jax.shard_map(
        lambda params, tokens: rwkv7.apply(params, tokens, kernels="fused"),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
    )
    assert_trees_close(jax.jit(step)(params, tokens), rwkv7.apply(params, tokens))
