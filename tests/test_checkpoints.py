"""`load`, `load_state` and `save` of `rwkv_jax.models`, on files that tests write."""

import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from rwkv_jax import models
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from support import checkpoints, meshes
from support.checkpoints import UNUSED, Storage, Tensor, Tensors
from support.tolerance import assert_trees_close

SIZES = {"num_layers": 2, "hidden_size": 24, "vocab_size": 37}
CONFIG = rwkv7.Config(**SIZES, head_size=8)
CONFIGS = {
    "RWKV-4": rwkv4.Config(**SIZES),
    "RWKV-5.0": rwkv5.Config(**SIZES, head_size=8),
    "RWKV-5.1": rwkv5.Config(**SIZES, head_size=8),
    "RWKV-5.2": rwkv5.Config(**SIZES, head_size=8),
    "RWKV-6": rwkv6.Config(**SIZES, head_size=8, mix_rank=3, decay_rank=7),
    "RWKV-7": CONFIG,
}
"""The sizes of the tensors in `checkpoints.official`, by version."""
EARLIER = [version for version in CONFIGS if version != "RWKV-7"]


def as_vector(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1) if x.shape[:2] == (1, 1) else x


def assert_same(params: Any, tensors: Tensors) -> None:
    """Equal names, shapes, dtypes and bits."""
    found = {name: np.asarray(x) for name, x in rwkv7.names(params).items()}
    expected = {name: as_vector(x) for name, x in tensors.items() if name not in UNUSED}
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
        assert x.tobytes() == expected[name].tobytes(), name


def write_pth(path: Path, tensors: Tensors) -> Path:
    checkpoints.write_pth(path / "model.pth", checkpoints.state_dict(tensors))
    return path / "model.pth"


def write_parameters(path: Path, tensors: Tensors) -> Path:
    parameters = checkpoints.state_dict(tensors, checkpoints.Parameter)
    checkpoints.write_pth(path / "model.pth", dict(parameters))
    return path / "model.pth"


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    checkpoints.write_safetensors(path / "model.safetensors", tensors)
    return path / "model.safetensors"


def write_shards(path: Path, tensors: Tensors) -> Path:
    checkpoints.write_shards(path / "shards", tensors, 3)
    return path / "shards"


def write_index(path: Path, tensors: Tensors) -> Path:
    return write_shards(path, tensors) / "model.safetensors.index.json"


def write_fla(path: Path, tensors: Tensors) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": "rwkv7", "norm_eps": 1e-5}))
    return write_safetensors(path, checkpoints.fla(tensors)).parent


def write_fla_shards(path: Path, tensors: Tensors) -> Path:
    return write_shards(path, checkpoints.fla(tensors))


def write_first_fla(path: Path, tensors: Tensors) -> Path:
    """Its first version had the mixes of the token shift in one array."""
    there = checkpoints.fla(tensors)
    for i in range(2):
        att = f"model.layers.{i}.attn"
        mixes = [there.pop(f"{att}.x_{x}").reshape(-1) for x in "rwkvag"]
        there[f"{att}.x_x"] = np.stack(mixes)
    return write_safetensors(path, there)


FLA_WRITERS = (write_fla, write_fla_shards, write_first_fla)
WRITERS = (
    write_pth,
    write_parameters,
    write_safetensors,
    write_shards,
    write_index,
    *FLA_WRITERS,
)
FLA_SIZES: dict[str, Any] = {"heads": 1, "head_size": 64}
"""Of tensors for flash-linear-attention, which has the formula of RWKV-LM for this head size."""
FLA_CONFIG = dataclasses.replace(CONFIG, hidden_size=64, head_size=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_load(tmp_path: Path, write: Callable[[Path, Tensors], Path], dtype: str) -> None:
    sizes, config = (FLA_SIZES, FLA_CONFIG) if write in FLA_WRITERS else ({}, CONFIG)
    tensors = checkpoints.rwkv7(**sizes, dtype=dtype)
    found = models.load(write(tmp_path, tensors))
    assert (found.generation, found.module, found.config) == ("RWKV-7", rwkv7, config)
    assert_same(found.params, tensors)


def write_hugging_face(path: Path, tensors: Tensors) -> Path:
    config = {"model_type": "rwkv", "layer_norm_epsilon": 1e-5, "rescale_every": 6}
    (path / "config.json").write_text(json.dumps(config))
    return write_safetensors(path, checkpoints.hugging_face(tensors)).parent


@pytest.mark.parametrize("write", [write_pth, write_hugging_face], ids=lambda f: f.__name__)
@pytest.mark.parametrize("version", EARLIER)
def test_load_earlier_generations(
    tmp_path: Path, version: str, write: Callable[[Path, Tensors], Path]
) -> None:
    tensors = checkpoints.official(version, dtype="bfloat16")
    found = models.load(write(tmp_path, tensors))
    generation = version.partition(".")[0]
    assert (found.generation, found.config) == (generation, CONFIGS[version])
    assert found.module.Config is type(found.config)
    assert_same(found.params, tensors)


def test_one_block_without_unused_tensors(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7(layers=1, heads=1, head_size=6, vocabulary=1)
    tensors = {name: x for name, x in tensors.items() if name not in UNUSED}
    found = models.load(write_pth(tmp_path, tensors))
    assert found.config == rwkv7.Config(num_layers=1, hidden_size=6, head_size=6, vocab_size=1)
    assert_same(found.params, tensors)


def test_views_of_a_storage(tmp_path: Path) -> None:
    """A transposed tensor, one in the middle of a storage, and two that share one."""
    tensors = checkpoints.rwkv7()
    value = checkpoints.state_dict(tensors)
    key, output = "blocks.0.att.key.weight", "blocks.0.att.output.weight"
    storage = Storage("x", np.concatenate([np.zeros(5, np.float32), tensors[key].T.ravel()]))
    value[key] = Tensor(storage, (24, 24), (1, 24), offset=5)
    value[output] = Tensor(storage, (24, 24), (24, 1), offset=5)
    tensors[output] = tensors[key].T
    checkpoints.write_pth(tmp_path / "model.pth", value)
    assert_same(models.load(tmp_path / "model.pth").params, tensors)


def test_dtype(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    found = models.load(write_pth(tmp_path, tensors), dtype=jnp.bfloat16)
    assert_same(found.params, {n: x.astype(jnp.bfloat16) for n, x in tensors.items()})


@pytest.mark.parametrize(
    ("version", "write"),
    [("RWKV-7", write_pth), ("RWKV-7", write_fla), ("RWKV-6", write_pth), ("RWKV-5.0", write_pth)],
)
def test_mesh(
    tmp_path: Path, cpus: list[Any], version: str, write: Callable[[Path, Tensors], Path]
) -> None:
    tensors = checkpoints.official(version, heads=4, head_size=64 if write is write_fla else 8)
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, cpus)
    places = {"data": "data", "model": "model"}
    found = models.load(write(tmp_path, tensors), mesh=mesh, **places)
    params = found.params
    assert_same(params, tensors)
    expected = jax.tree.leaves(found.module.shardings(params, mesh, **places))
    for x, sharding in zip(jax.tree.leaves(params), expected, strict=True):
        assert x.sharding == sharding
    assert params.emb.weight.addressable_shards[0].data.shape != params.emb.weight.shape


def test_mesh_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mesh is None; data and model name axes"):
        models.load(tmp_path, model="model")


def params_of(tensors: Tensors) -> rwkv7.Params:
    """The tree of the tensors, made without `load`."""
    shapes = jax.eval_shape(lambda key: rwkv7.init(key, CONFIG), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(
            as_vector(tensors[jax.tree_util.keystr(path, simple=True, separator=".")])
        ),
        shapes,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["tuple", "stacked"])
@pytest.mark.parametrize("file", ["model.safetensors", "model.pth", "model"])
def test_saved_parameters_load_bit_for_bit(
    tmp_path: Path, file: str, form: str, dtype: str
) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES, dtype=dtype)
    bits = np.random.default_rng(1).integers(0, 2**16, 64, np.uint16)
    bits[:2] = 0x8000, 0x7FC1  # -0, and a NaN of bfloat16 that is not the usual one
    tensors["ln_out.bias"] = bits.view(jnp.bfloat16).astype(jnp.dtype(dtype))
    params = params_of(tensors)
    path, names = tmp_path / file, "official" if "." in file else "fla"
    models.save(path, rwkv7.stacked(params) if form == "stacked" else params, names=names)
    assert_same(models.load(path).params, tensors)


def assert_file(path: Path, tensors: Tensors) -> None:
    """A `.safetensors` file has the names, shapes and bits of bfloat16 tensors."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    assert size % 64 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert header.keys() == tensors.keys()
    for name, entry in header.items():
        begin, end = (size + offset for offset in entry["data_offsets"])
        assert (entry["dtype"], tuple(entry["shape"])) == ("BF16", tensors[name].shape), name
        assert content[begin:end] == np.ascontiguousarray(tensors[name]).tobytes(), name


@pytest.mark.parametrize("version", CONFIGS)
def test_saved_names_and_shapes(tmp_path: Path, version: str) -> None:
    """Other programs find what they expect, and so does `load`."""
    tensors = checkpoints.official(version, dtype="bfloat16")
    found = models.load(write_pth(tmp_path, tensors))
    path = tmp_path / "model.safetensors"
    models.save(path, found.module.stacked(found.params))
    assert_file(path, {name: x for name, x in tensors.items() if name not in UNUSED})
    assert_same(models.load(path).params, tensors)


def test_saved_for_fla(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES, dtype="bfloat16")
    models.save(tmp_path / "model", params_of(tensors), names="fla")
    assert_file(tmp_path / "model" / "model.safetensors", checkpoints.fla(tensors))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["head_dim"]) == (64, 2, 64)
    assert (config["decay_low_rank_dim"], config["v_low_rank_dim"]) == (7, 3)
    params = models.load(write_pth(tmp_path, checkpoints.official("RWKV-4"))).params
    with pytest.raises(ValueError, match="save: names is fla; accepted for RWKV-4 is official"):
        models.save(tmp_path / "model", params, names="fla")


def test_saved_archive(tmp_path: Path) -> None:
    """The pickle module, given the functions of PyTorch, finds tensors with official shapes."""
    tensors = checkpoints.rwkv7(dtype="bfloat16")
    path = tmp_path / "model.pth"
    models.save(path, params_of(tensors))
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        contents = {name.removeprefix("archive/"): archive.read(name) for name in names}
        for info in archive.infolist():
            header = path.read_bytes()[info.header_offset : info.header_offset + 30]
            sizes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:], "little")
            assert (info.header_offset + 30 + sum(sizes)) % 64 == 0
    functions = {
        "BFloat16Storage": jnp.bfloat16,
        "OrderedDict": dict,
        "_rebuild_tensor_v2": lambda x, offset, shape, strides, *_: np.lib.stride_tricks.as_strided(
            x[offset:], shape, tuple(2 * stride for stride in strides)
        ),
    }

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return functions[name]

        def persistent_load(self, pid: Any) -> np.ndarray:
            kind, dtype, key, device, size = pid
            assert (kind, device) == ("storage", "cpu")
            return np.frombuffer(contents[f"data/{key}"], dtype, size)

    found = Unpickler(io.BytesIO(contents["data.pkl"])).load()
    assert found.keys() == tensors.keys() - set(UNUSED)
    for name, x in found.items():
        np.testing.assert_array_equal(x, tensors[name], strict=True)
    assert contents["byteorder"] == b"little"


def test_save_to_the_file_of_the_parameters(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    path = write_safetensors(tmp_path, tensors)
    params = models.load(path).params
    models.save(path, jax.tree.map(lambda x: -x, params))
    assert_same(params, tensors)
    assert_same(models.load(path).params, {name: -x for name, x in tensors.items()})
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("file", "names", "message"),
    [
        ("model", "official", r"path is .*model; accepted is a file \.safetensors or \.pth"),
        ("model.pth", "fla", "save: path is .*; accepted is a folder"),
        ("model.safetensors", "fla", "save: path is .*; accepted is a folder"),
        ("model.safetensors", "other", "names is 'other'; accepted are 'official', 'fla'"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_save_errors(tmp_path: Path, file: str, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.save(tmp_path / file, params_of(checkpoints.rwkv7(**FLA_SIZES)), names=names)


def test_save_a_rank_that_differs(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES)
    for name, shape in {"g1": (64, 2), "g2": (2, 64)}.items():
        tensors[f"blocks.1.att.{name}"] = np.zeros(shape, np.float32)
    params = models.load(write_pth(tmp_path, tensors)).params
    assert_same(params, tensors)
    with pytest.raises(ValueError, match=r"the ranks of g1 are \[2, 9\]"):
        models.save(tmp_path / "model", params, names="fla")


def test_logits_of_loaded_parameters(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    loaded = models.load(write_pth(tmp_path, tensors))
    tokens = jnp.array([1, 36], jnp.int32)
    apply = jax.jit(loaded.module.apply, static_argnames="implementation")
    found, expected = (
        apply(p, tokens, implementation="reference")[0] for p in (loaded.params, params_of(tensors))
    )
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (2, 37)


@pytest.mark.parametrize(
    ("version", "form"),
    [("RWKV-7", "tuple"), ("RWKV-7", "stacked"), ("RWKV-6", "tuple"), ("RWKV-5.0", "stacked")],
)
def test_tuned_state(tmp_path: Path, version: str, form: str) -> None:
    tensors = checkpoints.official(version)
    rng = np.random.default_rng(2)
    tuned = {
        f"blocks.{i}.att.time_state": rng.standard_normal((3, 8, 8)).astype(np.float32)
        for i in range(2)
    }
    alone, merged = tmp_path / "state.pth", tmp_path / "merged.pth"
    checkpoints.write_pth(alone, checkpoints.state_dict(tuned))
    checkpoints.write_pth(merged, checkpoints.state_dict(tensors | tuned))
    found = models.load(merged)
    module, params = found.module, found.params
    assert_same(params, tensors)
    params = module.stacked(params) if form == "stacked" else params
    for path in (alone, merged):
        state = models.load_state(path, params, 2, dtype=jnp.bfloat16)
        empty = module.initial_state(params, 2, jnp.bfloat16)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, empty)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, empty)
        for i, block in enumerate(module.unstacked(state)):
            expected = tuned[f"blocks.{i}.att.time_state"]
            np.testing.assert_array_equal(block.att.wkv, [expected, expected])
            assert not block.att.shift.any()
    for path in (tmp_path / "saved.safetensors", tmp_path / "saved.pth"):
        models.save_state(path, models.load_state(merged, params))
        again = models.load_state(path, params, 2, dtype=jnp.bfloat16)
        assert_trees_close(again, models.load_state(alone, params, 2, dtype=jnp.bfloat16), 0.0)
    tuned["blocks.0.att.time_state"] = np.zeros((3, 8, 7), np.float32)
    del tuned["blocks.1.att.time_state"]
    checkpoints.write_pth(alone, checkpoints.state_dict(tuned))
    with pytest.raises(ValueError, match=r"2 tensors are not") as error:
        models.load_state(alone, params)
    assert "blocks.1.att.time_state is missing; expected is [3, 8, 8]" in str(error.value)
    assert "is [3, 8, 7]; expected is [3, 8, 8]" in str(error.value)


def test_a_state_that_is_no_matrix(tmp_path: Path) -> None:
    path = write_pth(tmp_path, checkpoints.official("RWKV-4"))
    with pytest.raises(ValueError, match="the model is RWKV-4; accepted is one whose state"):
        models.load_state(path, models.load(path).params)


@pytest.mark.usefixtures("unchecked_types")
def test_states_that_are_not_saved(tmp_path: Path) -> None:
    params = params_of(checkpoints.rwkv7())
    state = rwkv7.initial_state(params, 2)
    path = tmp_path / "state.safetensors"
    with pytest.raises(ValueError, match="save_state: state has 2 rows; accepted is one"):
        models.save_state(path, state)
    with pytest.raises(TypeError, match="save_state: state is a Params; accepted is a State"):
        models.save_state(path, params)
    with pytest.raises(
        ValueError, match=r"path is .*state\.npz; accepted is a file \.safetensors or"
    ):
        models.save_state(tmp_path / "state.npz", state)
    old = models.load(write_pth(tmp_path, checkpoints.official("RWKV-4")))
    with pytest.raises(ValueError, match="save_state: state is of RWKV-4; accepted"):
        models.save_state(path, old.module.initial_state(old.params, 1))


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_more_tensors_than_are_read(tmp_path: Path, ending: str) -> None:
    params = params_of(checkpoints.rwkv7())
    first, second = params.blocks
    large = params._replace(blocks=(first, *[second] * 300))
    with pytest.raises(ValueError, match=rf"model\.{ending}: with its \d+ tensors or members"):
        models.save(tmp_path / f"model.{ending}", large)
    assert not any(tmp_path.glob("model*"))


def test_one_error_lists_all_tensors(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    del tensors["blocks.1.att.w1"], tensors["emb.weight"]
    tensors["blocks.1.ffn.key.weight"] = np.zeros((96, 23), np.float32)
    tensors["blocks.1.att.g2"] = np.zeros((8, 24), np.float32)
    tensors["blocks.0.ln1.bias"] = np.zeros(24, np.int64)
    tensors["blocks.0.ffn.receptance.weight"] = np.zeros((24, 24), np.float32)
    path = write_pth(tmp_path, tensors)
    with pytest.raises(ValueError, match="are not those of RWKV-7") as error:
        models.load(path)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{path}: 6 tensors are not those of RWKV-7 with Config(num_layers=2, ")
    assert sorted(line.strip() for line in lines) == sorted(
        [
            "blocks.1.att.w1 is missing; expected is [24, 7]",
            "emb.weight is missing; expected is [37, 24]",
            f"'blocks.1.ffn.key.weight' in {path} is [96, 23]; expected is [96, 24]",
            f"'blocks.1.att.g2' in {path} is [8, 24]; expected is [9, 24]",
            f"'blocks.0.ln1.bias' in {path} is int64; expected is one of bfloat16, float16, "
            "float32, float64",
            f"'blocks.0.ffn.receptance.weight' in {path} is [24, 24]; no tensor of this name is "
            "expected",
        ]
    )


def test_tensors_that_disagree(tmp_path: Path) -> None:
    """The sizes of RWKV-6 are those of the first tensors that tell them."""
    tensors = checkpoints.official("RWKV-6")
    tensors["blocks.1.att.time_maa_w2"] = np.zeros((5, 4, 24), np.float32)
    tensors["blocks.1.att.time_decay_w1"] = np.zeros((24, 6), np.float32)
    path = write_pth(tmp_path, tensors)
    with pytest.raises(ValueError, match="2 tensors are not those of RWKV-6") as error:
        models.load(path)
    assert f"time_maa_w2' in {path} is [5, 4, 24]; expected is [5, 3, 24]" in str(error.value)
    assert f"time_decay_w1' in {path} is [24, 6]; expected is [24, 7]" in str(error.value)


def test_a_size_of_no_elements(tmp_path: Path) -> None:
    """A tensor without elements may have any size."""
    tensors = checkpoints.official("RWKV-6", layers=1)
    tensors["blocks.0.att.time_maa_w2"] = np.zeros((0, 2**40, 24), np.float32)
    with pytest.raises(ValueError, match=r"told without .*time_maa_w2 \[5, mix_rank, C\]"):
        models.load(write_safetensors(tmp_path, tensors))


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7() | {f"x{i}": np.zeros(1, np.float32) for i in range(50)}
    with pytest.raises(ValueError, match=r"50 tensors are not.*\n(.*\n){20}  and 30 more$"):
        models.load(write_safetensors(tmp_path, tensors))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["blocks.0.att.r_k", "blocks.0.ffn.s_emb.weight"],
            r"RWKV-7 with DeepEmbed \(rwkv7a\); accepted is RWKV-4, RWKV-5, RWKV-6, RWKV-7",
        ),
        (["blocks.0.ffn.s_emb.weight", "blocks.0.qkv.k_emb.weight"], "DeepEmbed and attention"),
        (["blocks.0.att.time_maa_x", "blocks.0.att.gate_w1"], "RWKV-6 with a gate of low rank"),
        (["model.layers.0.attn.x_bias"], "RWKV-6 in the layout of flash-linear-attention"),
        (["wte"], "no generation of RWKV"),
        (["blocks.0.att.r_k"], "cannot be told without .* and blocks.0.att.r_k"),
        (["blocks.0.att.time_maa_x"], r"blocks.0.att.time_maa_w2 \[5, mix_rank, C\] and .*w2 \["),
        (["blocks.0.att.time_decay", "blocks.0.att.ln_x.weight"], r"att.time_decay \[H, K\] with"),
        (["blocks.0.att.time_first"], r"without emb.weight \[vocabulary, C\]$"),
    ],
)
def test_other_models(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(write_safetensors(tmp_path, {name: np.zeros(4, np.float32) for name in names}))


@pytest.mark.parametrize(
    ("version", "write", "name", "value", "accepted"),
    [
        ("RWKV-7", write_fla, "hidden_act", "relu", "'sqrelu'"),
        ("RWKV-4", write_hugging_face, "model_type", "x", "'rwkv' or 'rwkv5' or 'rwkv6'"),
    ],
)
def test_a_configuration_with_another_formula(
    tmp_path: Path, version: str, write: Any, name: str, value: str, accepted: str
) -> None:
    folder = write(tmp_path, checkpoints.official(version))
    (folder / "config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name} is '{value}'; accepted is {accepted}"):
        models.load(folder)


@pytest.mark.parametrize("also", ["emb.weight", "blocks.1.att.w1"])
def test_two_names_of_one_tensor(tmp_path: Path, also: str) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES)
    path = write_safetensors(tmp_path, checkpoints.fla(tensors) | {also: tensors[also]})
    with pytest.raises(ValueError, match=f"second tensor with the official name '{also}'"):
        models.load(path)


class Call:
    """A value that a pickle makes by calling a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, key: str = "0"
) -> Tensor:
    """A tensor of a storage with 12 elements."""
    return Tensor(Storage(key, np.zeros(12, np.float32)), shape, strides, offset)


LARGE = 2**62
PLAIN = tensor((3, 4), (4, 1))
SHARED = Storage("0", np.zeros(1000, np.float32))
HOSTILE_PICKLES = {
    "system": (Call(os.system, "false"), r"refers to '(posix|nt).system', which was not executed"),
    "eval": ({"x": Call(eval, "1")}, "refers to '__builtin__.eval', which was not executed"),
    "nested": ({"x": PLAIN, "y": {"z": Call(exec, "")}}, "refers to '__builtin__.exec'"),
    "class": ({"x": Path("/")}, "refers to 'pathlib"),
    "number": ({"x": 1.5}, "has a float under 'x'; accepted are tensors"),
    "nested tensors": ({"model": {"x": PLAIN}}, "has a dict under 'model'"),
    "list": ([PLAIN], "is a list; accepted is a dictionary"),
    "key": ({1: PLAIN}, "has a int as a key"),
    "offset": ({"x": tensor((3, 4), (4, 1), 1)}, "leaves its storage"),
    "negative offset": ({"x": tensor((3, 4), (4, 1), -1)}, "without a storage, an offset"),
    "strides": ({"x": tensor((3, 4), (5, 1))}, "leaves its storage"),
    "negative strides": ({"x": tensor((3, 4), (-4, 1))}, "without a storage"),
    "large strides": ({"x": tensor((2, 2), (LARGE, LARGE))}, "leaves its storage"),
    "sizes": ({"x": tensor((LARGE, LARGE), (1, 1))}, "leaves its storage"),
    "repeated": ({"x": tensor((LARGE,), (0,))}, "more elements than its storage"),
    "negative sizes": ({"x": tensor((-3, -4), (4, 1))}, "without a storage"),
    "ranks": ({"x": tensor((3, 4), (1,))}, "without a storage"),
    "shared": (
        {str(i): Tensor(SHARED, (1000,), (1,)) for i in range(9)},
        "the tensors have 36000 bytes together; accepted is up to twice",
    ),
}


@pytest.mark.parametrize("case", HOSTILE_PICKLES)
def test_hostile_values(tmp_path: Path, case: str) -> None:
    value, message = HOSTILE_PICKLES[case]
    checkpoints.write_pth(tmp_path / "model.pth", value)
    with pytest.raises(ValueError, match=message) as error:
        models.load(tmp_path / "model.pth")
    assert str(error.value).startswith(f"{tmp_path / 'model.pth'}: ")


def global_(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


ORDERED = global_("collections OrderedDict")
HOSTILE_PROGRAMS = {
    "function": (ORDERED + b"}\x85R.", "calls collections.OrderedDict with other arguments"),
    "tensor": (global_("torch._utils _rebuild_tensor_v2") + b")R.", "with other arguments"),
    "text": (b"X\x01\x00\x00\x00x)R.", "calls a str"),
    "lookup": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "instruction SHORT_BINUNICODE"),
    "instance": (b"(ios\nsystem\n.", "instruction INST"),
    "attributes": (b"]}b.", "sets attributes of a list"),
    "twice": (b"}(X\x01\x00\x00\x00xNX\x01\x00\x00\x00xNu.", "has 'x' twice"),
    "memo": (b"}h\x07.", "is damaged"),
    "large memo": (b"}r\xff\xff\xff\x7f0.", "instruction POP"),
    "stack": (b"R.", "is damaged"),
    "mark": (b"}u.", "is damaged"),
    "end": (b"}", "pickle exhausted"),
    "length": (b"X\xff\xff\xff\x7fx.", "expected 2147483647 bytes"),
    "persistent": (b"X\x01\x00\x00\x00xQ.", "that is no storage"),
    "empty": (b"", "pickle exhausted"),
    "storage": (
        checkpoints.torch_pickle({"x": tensor((3, 4), (4, 1), key="../0")})[0],
        "'x' is in the member 'model/data/../0', which is missing",
    ),
    "complex": (global_("torch ComplexFloatStorage") + b".", "'torch.ComplexFloatStorage'"),
    "deep": (b")" + b"\x85" * 20_000 + b".", "is a tuple; accepted is a dictionary"),
}


@pytest.mark.parametrize("case", HOSTILE_PROGRAMS)
def test_hostile_pickles(tmp_path: Path, case: str) -> None:
    program, message = HOSTILE_PROGRAMS[case]
    checkpoints.write_archive(tmp_path / "model.pth", program, {})
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "model.pth")


def edited(old: bytes, new: bytes, count: int = -1) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, count))

    return edit


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def bomb(path: Path) -> None:
    checkpoints.write_pth(path, {"x": PLAIN}, compression=zipfile.ZIP_DEFLATED)


def two(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("model/data/0", b"")


def two_pickles(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/data.pkl", b"}.")


def other_byte_order(path: Path) -> None:
    checkpoints.write_pth(path, {"x": PLAIN}, byteorder=b"big")


def longer_storage(path: Path) -> None:
    pickled, storages = checkpoints.torch_pickle({"x": PLAIN})
    checkpoints.write_archive(path, pickled, {key: x + b"0" for key, x in storages.items()})


def overlapping(path: Path) -> None:
    """The directory says that one member is where another is."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = {info.filename: info.header_offset for info in archive.infolist()}
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"model/version"))
    content[at + 42 : at + 46] = places["model/byteorder"].to_bytes(4, "little")
    path.write_bytes(content)


HOSTILE_ARCHIVES = {
    "compressed": (bomb, "'model/data.pkl' is compressed"),
    "twice": (two, "'model/data/0' occurs twice"),
    "two pickles": (two_pickles, "2 members are a data.pkl"),
    "no pickle": (edited(b"data.pkl", b"dat_.pkl"), "0 members are a data.pkl"),
    "byte order": (other_byte_order, "byte order is not little-endian"),
    "storage": (longer_storage, "has 49 bytes; its storage has 48"),
    "cut off": (cut(300), "the zip archive is damaged or cut off"),
    "short": (cut(6), "damaged or cut off"),
    "overlapping": (overlapping, "overlap"),
    "no header": (edited(b"PK\x03\x04", b"PK\x03\x05", 2), "neither a file of torch.save nor"),
    "empty": (cut(0), "the file is empty"),
}


@pytest.mark.parametrize("case", HOSTILE_ARCHIVES)
def test_hostile_archives(tmp_path: Path, case: str) -> None:
    damage, message = HOSTILE_ARCHIVES[case]
    path = tmp_path / "model.pth"
    checkpoints.write_pth(path, {"x": PLAIN})
    damage(path)
    with pytest.raises(ValueError, match=message):
        models.load(path)


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE_HEADERS = {
    "huge": (b"", 0, 2**63, "its header would have 9223372036854775808 bytes"),
    "long": (b"{}", 0, 3, "its header would have 3 bytes"),
    "no JSON": (b"{...", 0, None, "no valid JSON"),
    "no text": (b"{\xff}", 0, None, "no valid JSON"),
    "deep": (b"[" * 200_000, 0, None, "no valid JSON"),
    "list": (b"[]", 0, None, "no JSON object"),
    "twice": (b'{"x": 1, "x": 2}', 0, None, "a name occurs twice"),
    "no entry": ({"x": 1}, 0, None, "other entries than"),
    "dtype": ({"x": entry([1], 0, 4, "F31")}, 4, None, "has the dtype 'F31'"),
    "dtype list": ({"x": entry([1], 0, 4, [])}, 4, None, "has the dtype a list"),
    "outside": ({"x": entry([2], 0, 8)}, 4, None, "ends at byte 8 of the tensors; they have 4"),
    "overlap": ({"x": entry([2], 0, 8), "y": entry([2], 4, 12)}, 12, None, "begins at byte 4"),
    "same": ({"x": entry([2], 0, 8), "y": entry([2], 0, 8)}, 8, None, "begins at byte 0"),
    "gap": ({"x": entry([1], 4, 8)}, 8, None, "begins at byte 4"),
    "rest": ({"x": entry([1], 0, 4)}, 8, None, "end at byte 4, and the file has 8 bytes"),
    "negative shape": ({"x": entry([-1, -1], 0, 4)}, 4, None, "no list of up to 32 sizes"),
    "float shape": ({"x": entry([1.0], 0, 4)}, 4, None, "no list of up to 32 sizes"),
    "axes": ({"x": entry([1] * 99, 0, 4)}, 4, None, "no list of up to 32 sizes"),
    "large shape": ({"x": entry([2**40, 2**40], 0, 4)}, 4, None, "its dtype and shape need"),
    "backwards": ({"x": entry([1], 4, 0)}, 4, None, "has -4 bytes"),
    "negative": ({"x": entry([1], -4, 0)}, 4, None, "no list of two offsets"),
    "boolean": ({"x": entry([True], False, 4)}, 4, None, "no list of up to 32 sizes"),
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_hostile_safetensors(tmp_path: Path, case: str) -> None:
    header, contents, size, message = HOSTILE_HEADERS[case]
    path = tmp_path / "model.safetensors"
    checkpoints.write_header(path, header, bytes(contents), size)
    with pytest.raises(ValueError, match=message) as error:
        models.load(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": "../model.safetensors"}, "names '../model.safetensors'; accepted are names of"),
        ({"x": "/model.safetensors"}, "names '/model.safetensors'"),
        ({"x": "a\\b"}, "accepted are names of files beside it"),
        ({"x": ".."}, "names '..'"),
        ({"x": 1}, "names ''"),
        ({"x": "other.safetensors"}, "there is no file 'other.safetensors' beside the index"),
        ({}, "the index has no weight_map"),
        ([], "the index has no weight_map"),
        ({"x": "a.safetensors", "y": "b.safetensors"}, "'x' is in .* and in b.safetensors"),
    ],
)
def test_hostile_indices(tmp_path: Path, files: Any, message: str) -> None:
    for name in ("model", "folder/a", "folder/b"):
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        checkpoints.write_safetensors(path, {"x": np.zeros(3, np.float32)})
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ValueError, match=message):
        models.load(index)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder has no file"):
        models.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        models.load(tmp_path / "model.pth")
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"the folder has several checkpoints, 'a\.pth', 'b\.pth'"):
        models.load(tmp_path)


STATE_DICT = (
    b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00xq\x02ctorch._utils\n"
    b"_rebuild_tensor_v2\nq\x03((X\x07\x00\x00\x00storageq\x04ctorch\nFloatStorage\nq\x05X\x01\x00"
    b"\x00\x000q\x06X\x03\x00\x00\x00cpuq\x07K\x0ctq\x08QK\x00K\x03K\x04\x86q\tK\x04K\x01\x86q\n\x89h\x00"
    b")Rq\x0btq\x0cRq\rX\x01\x00\x00\x00yq\x0eh\x03((h\x04ctorch\nBFloat16Storage\nq\x0fX\x01\x00\x00\x00"
    b"1q\x10h\x07K\x02tq\x11QK\x00K\x02\x85q\x12K\x01\x85q\x13\x89h\x00)Rq\x14tq\x15Rq\x16u}q\x17X\t\x00\x00"
    b"\x00_metadataq\x18h\x00)Rq\x19X\x00\x00\x00\x00q\x1a}q\x1bX\x07\x00\x00\x00versionq\x1cK\x01sssb."
)
"""What torch.save of PyTorch 2.13 writes of a module with the parameters `x` and `y`."""


def test_pickles_of_these_tests_are_those_of_torch() -> None:
    tensors = {"x": np.zeros((3, 4), np.float32), "y": np.ones(2, jnp.bfloat16)}
    assert checkpoints.torch_pickle(checkpoints.state_dict(tensors))[0] == STATE_DICT
