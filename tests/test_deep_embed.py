"""RWKV-7a: the DeepEmbed of the channel mixing against the published formula in numpy, in files,
and wherever parameters go."""

import dataclasses
import functools
import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import finetuning, models
from rwkv_jax.models import Kernels, rwkv7
from support import checkpoints, language_models, meshes
from support.models import DOCUMENTS
from support.operators import FAST
from support.tolerance import EXACT_FLOAT32, assert_close

KERNELS = Kernels(FAST["wkv7"].implementation)
TENSORS = checkpoints.rwkv7a(heads=2, head_size=16)
TOKENS = np.random.default_rng(2).integers(0, 37, DOCUMENTS.shape)
TABLES = ("emb", "blocks.0.ffn.s_emb", "blocks.1.ffn.s_emb")


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> rwkv7.Params:
    path = tmp_path_factory.mktemp("rwkv7a") / "model.pth"
    return models.load(checkpoints.write_pth(path, TENSORS)).params


apply = functools.partial(rwkv7.apply, kernels=KERNELS)


def formula(tensors: Any, rows: Any) -> np.ndarray:
    vectors = {name: x.reshape(-1) for name, x in tensors.items() if x.shape[:2] == (1, 1)}
    return np.stack([language_models.logits("rwkv7", tensors | vectors, row) for row in rows])


def test_logits(params: rwkv7.Params) -> None:
    """Of tokens one by one, and of packed documents that go on from a state."""

    @jax.jit
    def run(params: rwkv7.Params) -> tuple[jax.Array, jax.Array]:
        def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            logits, state = apply(params, token, state)
            return state, logits

        tokens = jnp.asarray(TOKENS)
        state, logits = jax.lax.scan(step, rwkv7.initial_state(params, 2), tokens[:, :5].T)
        packed, _ = apply(params, tokens, state, segment_ids=DOCUMENTS)
        return jnp.moveaxis(logits, 0, 1), packed

    decoded, packed = run(models.for_decoding(params))
    whole = np.concatenate([TOKENS[1, :5], TOKENS[1, :6]])
    first, second = formula(TENSORS, [whole])[0], formula(TENSORS, [TOKENS[1, 6:13]])[0]
    found = {"decoded": decoded[1], "first": packed[1, :6], "second": packed[1, 6:13]}
    right = {"decoded": first[:5], "first": first[5:], "second": second}
    assert_close(found, right, EXACT_FLOAT32)


def test_tables_are_no_linear_maps(params: rwkv7.Params) -> None:
    """Neither in int8 nor with an adapter, and training makes no copies of them."""
    copies = importlib.import_module("rwkv_jax._training.copies")
    assert copies.rounded(params, "bfloat16").blocks[1].ffn.s_emb.weight is None
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=2, targets=["ffn.s_*"])
    assert set(adapter.matrices) == {"blocks.0.ffn.s_emb_x", "blocks.1.ffn.s_emb_x"}
    small = models.quantize(params)
    named: dict[str, Any] = rwkv7.names(small)
    scales = {name.removesuffix(".scale") for name in named if name.endswith(".scale")}
    assert scales.isdisjoint(TABLES)
    assert "blocks.1.ffn.s_emb_x" in scales
    assert named["blocks.1.ffn.s_emb.weight"] is params.blocks[1].ffn.s_emb.weight
    adapted = finetuning.adapted(small, adapter)
    logits, _ = jax.eval_shape(apply, adapted, TOKENS[:, 0], rwkv7.initial_state(small, 2))
    assert logits.shape == (2, 37)


def test_gradients(params: rwkv7.Params) -> None:
    """Of every parameter, in stacked form with blocks that are computed again."""
    tokens = TOKENS[:, :6]
    weights = np.random.default_rng(3).standard_normal((*tokens.shape, 37))

    @jax.jit
    @jax.grad
    def gradient(params: rwkv7.Params) -> jax.Array:
        logits, _ = apply(rwkv7.stacked(params), tokens, recompute="blocks")
        return jnp.vdot(logits, jnp.asarray(weights, jnp.float32))

    slope = rwkv7.names(gradient(params))
    assert all(np.isfinite(x).all() and x.any() for x in slope.values())
    named = rwkv7.names(params)

    def value(step: float) -> float:
        moved = {
            n: np.asarray(x, np.float64) + step * np.asarray(slope[n], np.float64)
            for n, x in named.items()
        }
        return float(np.vdot(formula(moved, tokens), weights))

    square = sum(float(np.square(x, dtype=np.float64).sum()) for x in slope.values())
    step = 1e-6 / math.sqrt(square)
    assert (value(step) - value(-step)) / (2 * step) == pytest.approx(square, rel=1e-4)


def test_files(tmp_path: Path) -> None:
    """Saved and loaded parameters have the names, shapes and bits of the official file."""
    tensors = checkpoints.rwkv7a(dtype="bfloat16")
    found = models.load(checkpoints.write_pth(tmp_path / "old.pth", tensors))
    assert (found.generation, found.config) == ("RWKV-7", rwkv7.Config(2, 24, 8, 37))
    models.save(tmp_path / "new.pth", found.params)
    models.save(tmp_path / "new.safetensors", found.params)
    saved = [models.load(tmp_path / f"new.{end}").params for end in ("pth", "safetensors")]
    for params in (found.params, *saved):
        named = rwkv7.names(params)
        assert named.keys() == tensors.keys() - set(checkpoints.UNUSED)
        for name, x in named.items():
            assert np.asarray(x).tobytes() == tensors[name].tobytes(), name
    content = (tmp_path / "new.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert {n: tuple(x["shape"]) for n, x in header.items() if ".s" in n} == {
        n: x.shape for n, x in tensors.items() if ".s" in n
    }


def test_what_is_refused(tmp_path: Path, params: rwkv7.Params) -> None:
    x = jnp.ones((2, 3, 32))
    with pytest.raises(ValueError, match="channel_mix: params has tables for tokens"):
        rwkv7.channel_mix(params.blocks[0].ffn, x)
    state = rwkv7.initial_state(params, 2)
    with pytest.raises(NotImplementedError, match="RWKV-7a; the kernels have no DeepEmbed"):
        rwkv7.apply(params, TOKENS[:, 0], state, kernels="fused")
    for name in ("gather", "embed", "total"):
        kernels = dataclasses.replace(KERNELS, **{name: lambda *x: x[0]})
        with pytest.raises(ValueError, match="kernels has gather, embed or total, and params has"):
            rwkv7.apply(params, TOKENS, kernels=kernels)
    for names in ("fla", "hf"):
        with pytest.raises(ValueError, match=f"names is {names}; .* RWKV-7 with DeepEmbed is off"):
            models.save(tmp_path / names, params, names=names)
    left_out = ("blocks.1.ffn.s1", "blocks.0.ffn.s0")
    incomplete = {name: x for name, x in TENSORS.items() if name not in left_out}
    incomplete["blocks.0.ffn.s_emb.weight"] = np.zeros((37, 15), np.float32)
    path = checkpoints.write_safetensors(tmp_path / "model.safetensors", incomplete)
    with pytest.raises(ValueError, match=r"(?s)ffn.s0 is missing.*ffn.s1 is missing.*\[37, 16\]"):
        models.load(path)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_tables_by_columns(params: rwkv7.Params, cpus: list[Any]) -> None:
    """Where they are distributed along the axis of the batch, as the embedding."""
    mesh = meshes.mesh("data=2", AxisType.Auto, cpus)
    names = rwkv7.names(rwkv7.shardings(params, mesh, data="data"))
    assert {names[f"{table}.weight"].spec for table in TABLES} == {P(None, "data")}
    assert names["head.weight"].spec == P(None, "data")
    assert names["blocks.1.ffn.key.weight"].spec == P("data")


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_training_on_several_devices(train: ModuleType, tmp_path: Path) -> None:
    """Takes the way of models of which a part is trained, and not that of RWKV-7."""
    tensors = checkpoints.rwkv7a(layers=1, heads=2, head_size=16, vocabulary=256)
    path = checkpoints.write_pth(tmp_path / "model.pth", tensors)
    options = [f"--model={path}", "--train=all", "--batch=4", "--mesh=data=2,model=2"]
    model, parts = train.prepare(train.options.parse(options))
    batch = train.data.windows(np.zeros((4, 9), np.int32))
    loss = functools.partial(train.language_model.mean_loss, model)
    assert jax.eval_shape(loss, parts, batch).shape == ()
