"""Parameters for decoding: the models with them, their files and their places on a mesh."""

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import models
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from support import checkpoints, meshes
from support.models import assert_same_model, parameters


@pytest.mark.parametrize("module", [rwkv4, rwkv5, rwkv6, rwkv7], ids=lambda x: x.__name__[-5:])
def test_models(module: ModuleType) -> None:
    """Of RWKV-7 with weights that are quantised and stacked as well."""
    params = parameters(module)
    if module is rwkv7:
        params = rwkv7.stacked(models.quantize(params, group=8))
    prepared = models.for_decoding(params)
    assert jax.tree.structure(models.for_decoding(prepared)) == jax.tree.structure(prepared)
    assert_same_model(module, prepared, params)


def test_other_parameters_are_shared() -> None:
    params = parameters(rwkv7)
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


def test_quantised_before_or_after() -> None:
    first = models.for_decoding(models.quantize(parameters(rwkv7), group=8))
    last = models.quantize(models.for_decoding(parameters(rwkv7)), group=8)
    assert rwkv7.names(first)["blocks.1.ffn.value.by_input"].dtype == jnp.int8
    assert jax.tree.structure(first) == jax.tree.structure(last)
    jax.tree.map(np.testing.assert_array_equal, first, last)


@pytest.mark.parametrize("target", ["model.safetensors", "model.pth", "fla", "small.safetensors"])
def test_files_have_the_official_layout(tmp_path: Path, target: str) -> None:
    sizes: dict[str, Any] = {"heads": 1, "head_size": 64} if target == "fla" else {}
    params = models.load(checkpoints.write_model(tmp_path, **sizes)).params
    if target.startswith("small"):
        params = models.quantize(params)
    path = tmp_path / target
    models.save(path, models.for_decoding(params), names="fla" if target == "fla" else "official")
    found = models.load(path).params
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, params)


@pytest.mark.slow
def test_on_a_mesh() -> None:
    """Inputs and outputs are where they are in the official layout."""
    params = models.for_decoding(models.quantize(parameters(rwkv7), group=32))
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, jax.devices("cpu"))
    shardings = rwkv7.shardings(params, mesh, data="data", model="model")
    places = rwkv7.names(shardings)
    assert places["blocks.1.ffn.value.by_input"].spec == P("model", "data")
    assert places["blocks.1.ffn.value.scale"].spec == P("data", "model")
    assert_same_model(rwkv7, jax.device_put(params, shardings), params)
