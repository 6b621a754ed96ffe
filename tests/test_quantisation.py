"""Weights of 8 bits: the models with them, their files, and the commands that take them."""

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
from rwkv_jax.models._linear import Weight
from support import checkpoints, memory, meshes
from support.commands import Command
from support.models import assert_same_model, config_of, parameters, random_like, shapes_of


@pytest.mark.parametrize("group", [None, 8])
def test_integers_and_scales(group: int | None) -> None:
    """Those of numpy in float64, for all matrices of linear maps and the head."""
    before = rwkv7.names(parameters(rwkv7))
    after = rwkv7.names(models.quantize(parameters(rwkv7), group=group))
    linear = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
    expected = {"head", *(f"blocks.{i}.{name}" for i in range(2) for name in linear)}
    assert {name.removesuffix(".scale") for name in after if name.endswith(".scale")} == expected
    for name, x in before.items():
        if (owner := name.removesuffix(".weight")) not in expected:
            np.testing.assert_array_equal(x, after[name], strict=True)
            continue
        wide = np.asarray(x, np.float64).reshape(len(x), -1, group or x.shape[1])
        scale = np.abs(wide).max(-1) / 127
        np.testing.assert_allclose(after[f"{owner}.scale"], scale, rtol=1e-6)
        steps = (wide / scale[..., None]).reshape(x.shape)
        assert after[name].dtype == "int8"
        assert np.abs(np.asarray(after[name]) - steps).max() <= 0.5 + 1e-4


def test_errors() -> None:
    params = parameters(rwkv7)
    with pytest.raises(ValueError, match="group is 7; accepted is a divisor of the 32 inputs of"):
        models.quantize(params, group=7)
    with pytest.raises(ValueError, match="quantize: group is 0; accepted is an integer from 1 on"):
        models.quantize(params, group=0)
    with pytest.raises(ValueError, match="receptance has a scale; accepted are weights"):
        models.quantize(models.quantize(params))
    with pytest.raises(TypeError, match="params is a dict; accepted is a Params"):
        models.quantize({})  # pyright: ignore[reportArgumentType]
    small = models.quantize(params)
    with pytest.raises(TypeError, match="int8"):
        jax.grad(lambda p: jnp.sum(rwkv7.apply(p, jnp.zeros((1, 2), jnp.int32))[0]))(small)


@pytest.mark.parametrize(
    ("version", "dtype", "group", "axes"),
    [
        ("RWKV-7", None, None, None),
        ("RWKV-7", jnp.bfloat16, 8, None),
        ("RWKV-6", None, None, "data=2,model=2"),
        # Three groups of inputs, which two devices cannot share.
        ("RWKV-7", None, 8, "data=2,model=2"),
    ],
)
def test_load(
    tmp_path: Path, cpus: list[Any], version: str, dtype: Any, group: int | None, axes: str | None
) -> None:
    """The arrays are those of `quantize`, and at no time are there more than them and the largest
    matrix of the file. On a mesh they are where `shardings` has them."""
    path, places = checkpoints.write_model(tmp_path, version), {}
    if axes is not None:
        mesh = meshes.mesh(axes, AxisType.Auto, cpus)
        places = {"mesh": mesh, "data": "data", "model": "model"}
    load = functools.partial(models.load, path, dtype=dtype, **places)
    whole = load().params
    expected = models.quantize(whole, group=group)
    found, most = memory.peak(lambda: load(quantize=True, group=group))
    params = found.params
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), params, expected)
    largest = max(x.nbytes for x in jax.tree.leaves(whole))
    assert most <= sum(x.nbytes for x in jax.tree.leaves(params)) + largest
    if axes is not None:
        for x, sharding in zip(
            *map(jax.tree.leaves, (params, found.module.shardings(params, **places))), strict=True
        ):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_errors_of_load(tmp_path: Path) -> None:
    path, small = checkpoints.write_model(tmp_path), tmp_path / "small.safetensors"
    with pytest.raises(ValueError, match="group is 8 and quantize is False; accepted is None"):
        models.load(path, group=8)
    with pytest.raises(TypeError, match="load: group is True; accepted is an integer from 1 on"):
        models.load(path, quantize=True, group=True)
    with pytest.raises(ValueError, match="group is 7; accepted is a divisor of the 24 inputs of"):
        models.load(path, quantize=True, group=7)
    models.save(small, models.load(path, quantize=True).params)
    with pytest.raises(ValueError, match="receptance has a scale; accepted are weights"):
        models.load(small, quantize=True)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(wrong: float) -> None:
    """Integers have none of them. Where nothing can be refused, their group is NaN, and no other
    one."""
    # Large enough for what XLA does with large arrays.
    config = config_of(rwkv7, num_layers=1, hidden_size=96, vocab_size=128)
    params = random_like(shapes_of(rwkv7, config))
    params = params._replace(head=Weight(params.head.weight.at[1, 9].set(wrong)))
    with pytest.raises(ValueError, match="head has NaN or an infinity; accepted are finite"):
        models.quantize(params)
    wide = jax.jit(lambda params: models.quantize(params, group=8).head.wide())(params)
    groups = np.isnan(wide).reshape(len(wide), -1, 8)
    assert groups[1, 1].all()
    assert groups.sum() == 8


@pytest.mark.parametrize("module", [rwkv4, rwkv5, rwkv6, rwkv7], ids=lambda x: x.__name__[-5:])
def test_files_and_models(tmp_path: Path, module: ModuleType) -> None:
    """A file gives back what was saved, whatever dtype is asked for; and a model computes with the
    integers what it computes with the matrices that they stand for."""
    params = models.quantize(parameters(module), group=8 if module is rwkv7 else None)
    path = tmp_path / "small.safetensors"
    models.save(path, params)
    found, shapes = models.load(path, dtype="float32").params, models.inspect(path).params
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, params)
    assert shapes == jax.eval_shape(lambda: params)

    def wide(x: Any) -> Any:
        return Weight(x.wide()) if isinstance(x, Weight) else x

    matrices = jax.tree.map(wide, params, is_leaf=lambda x: isinstance(x, Weight))
    assert_same_model(module, params, matrices)


def test_stacked_and_on_a_mesh() -> None:
    """The stacked form has the same integers, and on a mesh a scale is where its weight is."""
    params = rwkv7.stacked(models.quantize(parameters(rwkv7)))
    stacked = models.quantize(rwkv7.stacked(parameters(rwkv7)))
    jax.tree.map(np.testing.assert_array_equal, stacked, params)
    mesh = meshes.mesh("data=1,model=2", AxisType.Auto, jax.devices("cpu"))
    places = rwkv7.names(rwkv7.shardings(stacked, mesh, model="model"))
    assert places["blocks.rest.ffn.key.scale"].spec == P(None, "model", None)
    assert places["blocks.rest.ffn.value.scale"].spec == P(None, None, None)


def test_commands(tmp_path: Path, command: Command) -> None:
    path, small = checkpoints.write_model(tmp_path), tmp_path / "small.safetensors"
    convert = ("convert", path, small, "--force")
    assert "--group needs --quantize" in command.refused(*convert, "--group", 8)
    done = command(*convert, "--quantize", "int8").out
    assert done == f"{small}: RWKV-7, 18,744 parameters, 32.7 kB\n"
    rows = command.table("inspect", small, "--dtype", "bfloat16")
    assert (rows["parameters"], rows["dtype"]) == ("18,744", "float32, int8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head.weight": ("float32", (37, 24))}, "is float32; expected is one of int8"),
        ({"head.scale": ("float32", (36, 1))}, r"is \[36, 1\]; expected is \[37, 1\]"),
        ({"head.scale": ("float32", (37, 5))}, r"is \[37, 5\]; expected is \[37, 1\]"),
        ({"head.scale": ("int8", (37, 1))}, "is int8; expected is one of bfloat16"),
        ({"head.scale": None}, "is int8; expected is one of bfloat16"),
        ({"emb.scale": ("float32", (37, 1))}, "emb.weight' .* expected is one of int8"),
    ],
)
def test_wrong_files(
    tmp_path: Path, change: dict[str, tuple[str, tuple[int, ...]] | None], message: str
) -> None:
    tensors = checkpoints.rwkv7(layers=1)
    tensors["head.weight"] = np.zeros((37, 24), np.int8)
    tensors["head.scale"] = np.ones((37, 1), np.float32)
    for name, wrong in change.items():
        tensors.pop(name, None)
        if wrong is not None:
            tensors[name] = np.ones(wrong[1], wrong[0])
    path = checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        models.inspect(path)
