"""Parameters for decoding: the models with them, their files and their places on a mesh."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import models
from rwkv_jax.models import rwkv7
from support import checkpoints, meshes
from support.tolerance import EXACT_FLOAT32, rms_error


def _saved(path: Path, version: str = "RWKV-7", **sizes: Any) -> Path:
    checkpoints.write_safetensors(path, checkpoints.official(version, **sizes))
    return path


@pytest.mark.parametrize("version", ["RWKV-4", "RWKV-5.2", "RWKV-6", "RWKV-7"])
def test_models(tmp_path: Path, version: str) -> None:
    """A sequence and a token have the results that they have with the parameters of a file. Of
    RWKV-7 the weights are quantised and stacked as well."""
    found = models.load(_saved(tmp_path / "model.safetensors", version))
    params, apply = found.params, jax.jit(found.module.apply)
    if version == "RWKV-7":
        params = found.module.stacked(models.quantize(params, group=8))
    prepared = models.for_decoding(params)
    assert jax.tree.structure(models.for_decoding(prepared)) == jax.tree.structure(prepared)
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6]])
    (sequence, state), (expected, after) = (apply(p, tokens) for p in (prepared, params))
    assert rms_error(sequence, expected) < EXACT_FLOAT32
    one = tokens[:, 0]
    single, expected = apply(prepared, one, state)[0], apply(params, one, after)[0]
    assert rms_error(single, expected) < EXACT_FLOAT32


def test_other_parameters_are_shared(tmp_path: Path) -> None:
    params = models.load(_saved(tmp_path / "model.safetensors")).params
    before, after = rwkv7.names(params), rwkv7.names(models.for_decoding(params))
    values = {f"blocks.{i}.ffn.value" for i in range(2)}
    assert {x.removesuffix(".by_input") for x in after.keys() - before.keys()} == values
    for name, x in after.items():
        if name in before:
            assert x is before[name]
        else:
            np.testing.assert_array_equal(x.T, before[name.replace("by_input", "weight")])
    with pytest.raises(TypeError, match="for_decoding: params is a dict; accepted is a Params"):
        models.for_decoding({})


def test_quantised_before_or_after(tmp_path: Path) -> None:
    params = models.load(_saved(tmp_path / "model.safetensors")).params
    first = models.for_decoding(models.quantize(params, group=8))
    last = models.quantize(models.for_decoding(params), group=8)
    assert rwkv7.names(first)["blocks.1.ffn.value.by_input"].dtype == jnp.int8
    assert jax.tree.structure(first) == jax.tree.structure(last)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("target", ["model.safetensors", "model.pth", "fla", "small.safetensors"])
def test_files_have_the_official_layout(tmp_path: Path, target: str) -> None:
    sizes: dict[str, Any] = {"heads": 1, "head_size": 64} if target == "fla" else {}
    params = models.load(_saved(tmp_path / "source.safetensors", **sizes)).params
    if target.startswith("small"):
        params = models.quantize(params)
    path = tmp_path / target
    models.save(path, models.for_decoding(params), names="fla" if target == "fla" else "official")
    found = models.load(path).params
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.slow
def test_on_a_mesh(tmp_path: Path) -> None:
    """Inputs and outputs are where they are in the official layout."""
    params = models.load(_saved(tmp_path / "model.safetensors")).params
    params = models.for_decoding(models.quantize(params, group=24))
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, jax.devices("cpu"))
    shardings = rwkv7.shardings(params, mesh, data="data", model="model")
    places = rwkv7.names(shardings)
    assert places["blocks.1.ffn.value.by_input"].spec == P("model", "data")
    assert places["blocks.1.ffn.value.scale"].spec == P("data", "model")
    tokens = jnp.asarray([1, 2])
    placed = jax.device_put(params, shardings)
    expected, found = (jax.jit(rwkv7.apply)(p, tokens)[0] for p in (params, placed))
    assert rms_error(found, expected) < EXACT_FLOAT32
