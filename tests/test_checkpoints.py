"""`load`, `load_state` and `save` of `rwkv_jax.models`, on files that tests write."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from rwkv_jax import models
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._linear import Weight
from support import checkpoints, meshes
from support.checkpoints import UNUSED, Storage, Tensors
from support.models import config_of, shapes_of
from support.tolerance import assert_trees_close

SIZES = {"hidden_size": 24, "head_size": 8, "vocab_size": 37, "mix_rank": 3, "decay_rank": 7}
EARLIER = [version for version in checkpoints.MIXINGS if version != "RWKV-7"]
MODULES = {"RWKV-4": rwkv4, "RWKV-5": rwkv5, "RWKV-6": rwkv6, "RWKV-7": rwkv7}


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


Writer: TypeAlias = Callable[[Path, Tensors], Path]


def write_pth(path: Path, tensors: Tensors) -> Path:
    return checkpoints.write_pth(path / "model.pth", tensors)


def write_parameters(path: Path, tensors: Tensors) -> Path:
    parameters = checkpoints.state_dict(tensors, checkpoints.parameter)
    (path / "model.pth").write_bytes(checkpoints.torch_file(dict(parameters)))
    return path / "model.pth"


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    return checkpoints.write_safetensors(path / "model.safetensors", tensors)


def write_shards(path: Path, tensors: Tensors) -> Path:
    """Three files and their index, in a folder."""
    files = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        checkpoints.write_safetensors(path / f"model-{i}.safetensors", part)
        files |= dict.fromkeys(part, f"model-{i}.safetensors")
    return checkpoints.write_index(path, files).parent


def with_config(path: Path, **config: Any) -> None:
    (path / "config.json").write_text(json.dumps(config))


def write_fla(path: Path, tensors: Tensors) -> Path:
    with_config(path, model_type="rwkv7", norm_eps=1e-5)
    return write_safetensors(path, checkpoints.fla(tensors)).parent


def write_hugging_face(path: Path, tensors: Tensors) -> Path:
    with_config(path, model_type="rwkv", layer_norm_epsilon=1e-5, rescale_every=6)
    return write_safetensors(path, checkpoints.hugging_face(tensors)).parent


def first_fla(tensors: Tensors) -> Tensors:
    """Its first version had the mixes of the token shift in one array."""
    there = checkpoints.fla(tensors)
    for i in range(2):
        att = f"model.layers.{i}.attn"
        mixes = [there.pop(f"{att}.x_{x}").reshape(-1) for x in "rwkvag"]
        there[f"{att}.x_x"] = np.stack(mixes)
    return there


WRITERS: dict[str, Writer] = {
    "pth": write_pth,
    "parameters": write_parameters,
    "safetensors": write_safetensors,
    "shards": write_shards,
    "index": lambda path, tensors: write_shards(path, tensors) / checkpoints.INDEX,
    "hugging face": write_hugging_face,
    "fla": write_fla,
    "shards of fla": lambda path, tensors: write_shards(path, checkpoints.fla(tensors)),
    "first fla": lambda path, tensors: write_safetensors(path, first_fla(tensors)),
}
FLA_SIZES: dict[str, Any] = {"heads": 1, "head_size": 64}
"""Of tensors for flash-linear-attention, which has the formula of RWKV-LM for this head size."""
FLA_CONFIG = config_of(rwkv7, **SIZES | {"hidden_size": 64, "head_size": 64})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("version", "form"),
    [
        *(("RWKV-7", form) for form in WRITERS if form != "hugging face"),
        *((x, form) for x in EARLIER for form in ("pth", "hugging face")),
    ],
)
def test_load(tmp_path: Path, version: str, form: str, dtype: str) -> None:
    generation = version.partition(".")[0]
    tensors = checkpoints.official(version, **FLA_SIZES if "fla" in form else {}, dtype=dtype)
    config = FLA_CONFIG if "fla" in form else config_of(MODULES[generation], **SIZES)
    found = models.load(WRITERS[form](tmp_path, tensors))
    assert (found.generation, found.module) == (generation, MODULES[generation])
    assert found.config == config
    assert_same(found.params, tensors)


def test_one_block_without_unused_tensors(tmp_path: Path) -> None:
    """And in another dtype."""
    tensors = checkpoints.rwkv7(layers=1, heads=1, head_size=6, vocabulary=1)
    tensors = {name: x for name, x in tensors.items() if name not in UNUSED}
    found = models.load(write_pth(tmp_path, tensors), dtype=jnp.bfloat16)
    assert found.config == rwkv7.Config(num_layers=1, hidden_size=6, head_size=6, vocab_size=1)
    assert_same(found.params, {name: x.astype(jnp.bfloat16) for name, x in tensors.items()})


def test_views_of_a_storage(tmp_path: Path) -> None:
    """A transposed tensor, one in the middle of a storage, and two that share one."""
    tensors = checkpoints.rwkv7()
    value = checkpoints.state_dict(tensors)
    key, output = "blocks.0.att.key.weight", "blocks.0.att.output.weight"
    storage = Storage("x", np.concatenate([np.zeros(5, np.float32), tensors[key].T.ravel()]))
    value[key] = checkpoints.tensor(storage, (24, 24), (1, 24), 5)
    value[output] = checkpoints.tensor(storage, (24, 24), (24, 1), 5)
    tensors[output] = tensors[key].T
    (tmp_path / "model.pth").write_bytes(checkpoints.torch_file(value))
    assert_same(models.load(tmp_path).params, tensors)


@pytest.mark.parametrize(
    ("version", "write"),
    [("RWKV-7", write_pth), ("RWKV-7", write_fla), ("RWKV-6", write_pth), ("RWKV-5.0", write_pth)],
)
def test_mesh(tmp_path: Path, cpus: list[Any], version: str, write: Writer) -> None:
    tensors = checkpoints.official(version, heads=4, head_size=64 if write is write_fla else 8)
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, cpus)
    places: dict[str, Any] = {"data": "data", "model": "model"}
    found = models.load(write(tmp_path, tensors), mesh=mesh, **places)
    params = found.params
    assert_same(params, tensors)
    expected = jax.tree.leaves(found.module.shardings(params, mesh, **places))
    for x, sharding in zip(jax.tree.leaves(params), expected, strict=True):
        assert x.sharding == sharding
    assert params.emb.weight.addressable_shards[0].data.shape != params.emb.weight.shape


def params_of(tensors: Tensors) -> rwkv7.Params:
    """The tree of the tensors, made without `load`."""
    shapes = shapes_of(rwkv7, config_of(rwkv7, **SIZES))
    leaves = [jnp.asarray(as_vector(tensors[name])) for name in rwkv7.names(shapes)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


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


@pytest.mark.parametrize("version", checkpoints.MIXINGS)
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


def test_saved_archive(tmp_path: Path) -> None:
    """The pickle module, given the functions of PyTorch, finds tensors with official shapes."""
    tensors = checkpoints.rwkv7(dtype="bfloat16")
    path = tmp_path / "model.pth"
    models.save(path, params_of(tensors))
    with zipfile.ZipFile(path) as archive:
        contents = {x.filename: archive.read(x) for x in archive.infolist()}
        for info in archive.infolist():
            sizes = struct.unpack_from("<2H", path.read_bytes(), info.header_offset + 26)
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
            return np.frombuffer(contents[f"archive/data/{key}"], dtype, size)

    found = Unpickler(io.BytesIO(contents["archive/data.pkl"])).load()
    assert found.keys() == tensors.keys() - set(UNUSED)
    for name, x in found.items():
        np.testing.assert_array_equal(x, tensors[name], strict=True)
    assert contents["archive/byteorder"] == b"little"
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"\xff" * 65535
    assert_same(models.load(path).params, tensors)


def test_save_to_the_file_of_the_parameters(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    path = write_safetensors(tmp_path, tensors)
    params = models.load(path).params
    models.save(path, jax.tree.map(lambda x: -x, params))
    assert_same(params, tensors)
    assert_same(models.load(path).params, {name: -x for name, x in tensors.items()})
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_what_is_beside_a_file_that_is_saved(tmp_path: Path, name: str) -> None:
    """Nothing else changes, and an error names the folder that the caller named."""
    params = params_of(checkpoints.rwkv7())
    (tmp_path / f"{name}.part").write_text("of someone else")
    models.save(tmp_path / name, params)
    assert (tmp_path / f"{name}.part").read_text() == "of someone else"
    assert len(os.listdir(tmp_path)) == 2
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none'$"):
        models.save(tmp_path / "none" / name, params)


@pytest.mark.usefixtures("unchecked_types")
def test_what_is_not_saved(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES)
    params = params_of(tensors)
    for name, shape in {"g1": (64, 2), "g2": (2, 64)}.items():
        tensors[f"blocks.1.att.{name}"] = np.zeros(shape, np.float32)
    other_rank = models.load(write_pth(tmp_path, tensors)).params
    assert_same(other_rank, tensors)
    small = params_of(checkpoints.rwkv7())
    old = models.load(write_pth(tmp_path, checkpoints.official("RWKV-4"))).params
    refused: list[Any] = [
        (params, "model", "official", r"path is .*model; accepted is a file \.safetensors or"),
        (params, "model.pth", "fla", "save: path is .*; accepted is a folder"),
        (params, "model.safetensors", "fla", "save: path is .*; accepted is a folder"),
        (params, "model.pth", "other", "names is 'other'; accepted are 'official', 'fla'"),
        (small, "model", "fla", r"save: names is fla and r_k is \[3, 8\]; accepted is \[H, 64\]"),
        (other_rank, "model", "fla", r"the ranks of g1 are \[2, 9\]"),
        (old, "model", "fla", "save: names is fla; accepted for RWKV-4 is official"),
    ]
    for saved, file, names, message in refused:
        with pytest.raises(ValueError, match=message):
            models.save(tmp_path / file, saved, names=names)
    floats = "accepted are bfloat16, float16, float32, float64"
    quantised = models.quantize(small)
    of_float32 = quantised.head._replace(weight=small.head.weight)
    wrong_types: list[tuple[Any, str]] = [
        (params._replace(emb=Weight(jnp.zeros((37, 64), jnp.int32))), f"int32; {floats}"),
        (rwkv7.stacked(jax.tree.map(lambda x: x.astype("float8_e4m3fn"), params)), floats),
        (jax.eval_shape(lambda: params), "ShapeDtypeStruct; accepted is a JAX or numpy"),
        (quantised._replace(head=of_float32), "float32; accepted are int8$"),
    ]
    for saved, message in wrong_types:
        with pytest.raises(TypeError, match=rf"^save: [\w.]+ is .*{message}"):
            models.save(tmp_path / "other.safetensors", saved)
    assert {x.name for x in tmp_path.iterdir()} == {"model.pth"}
    with pytest.raises(ValueError, match="mesh is None; data and model name axes"):
        models.load(tmp_path, model="model")


@pytest.mark.parametrize(
    ("version", "form"),
    [("RWKV-7", "tuple"), ("RWKV-7", "stacked"), ("RWKV-6", "tuple"), ("RWKV-5.0", "stacked")],
)
def test_tuned_state(tmp_path: Path, version: str, form: str) -> None:
    tensors = checkpoints.official(version)
    values = np.random.default_rng(2).standard_normal((2, 3, 8, 8), np.float32)
    tuned = {f"blocks.{i}.att.time_state": x for i, x in enumerate(values)}
    alone = checkpoints.write_pth(tmp_path / "alone.pth", tuned)
    merged = checkpoints.write_pth(tmp_path / "merged.pth", tensors | tuned)
    found = models.load(merged)
    module, params = found.module, found.params
    assert_same(params, tensors)
    params = module.stacked(params) if form == "stacked" else params
    for path in (alone, merged):
        state = models.load_state(path, params, 2, dtype=jnp.bfloat16)
        empty = module.initial_state(params, 2, jnp.bfloat16)
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, empty)
        assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, empty)
        for block, expected in zip(module.unstacked(state), values, strict=True):
            np.testing.assert_array_equal(block.att.wkv, [expected, expected])
            assert not block.att.shift.any()
    for path in (tmp_path / "saved.safetensors", tmp_path / "saved.pth"):
        models.save_state(path, models.load_state(merged, params))
        again = models.load_state(path, params, 2, dtype=jnp.bfloat16)
        assert_trees_close(again, models.load_state(alone, params, 2, dtype=jnp.bfloat16), 0.0)
    tuned["blocks.0.att.time_state"] = np.zeros((3, 8, 7), np.float32)
    tuned["blocks.2.att.time_state"] = tuned.pop("blocks.1.att.time_state")
    checkpoints.write_pth(alone, tuned)
    with pytest.raises(ValueError, match=r"3 tensors are not") as error:
        models.load_state(alone, params)
    for message in (
        "blocks.1.att.time_state is missing; expected is [3, 8, 8]",
        "is [3, 8, 7]; expected is [3, 8, 8]",
        "is [3, 8, 8]; no tensor of this name is expected",
    ):
        assert message in str(error.value)


@pytest.mark.usefixtures("unchecked_types")
def test_states_that_are_not_saved(tmp_path: Path) -> None:
    path = write_pth(tmp_path, checkpoints.official("RWKV-4"))
    old, params = models.load(path), params_of(checkpoints.rwkv7())
    with pytest.raises(ValueError, match="the model is RWKV-4; accepted is one whose state"):
        models.load_state(path, old.params)
    state = rwkv7.initial_state(params, 2)
    of_old = old.module.initial_state(old.params, 1)
    for file, value, error, message in (
        ("state.pth", state, ValueError, "save_state: state has 2 rows; accepted is one"),
        ("state.pth", params, TypeError, "save_state: state is a Params; accepted is a State"),
        ("state.npz", state, ValueError, r"state\.npz; accepted is a file \.safetensors or"),
        ("state.pth", of_old, ValueError, "save_state: state is of RWKV-4; accepted"),
    ):
        with pytest.raises(error, match=message):
            models.save_state(tmp_path / file, value)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_more_tensors_than_are_read(tmp_path: Path, ending: str) -> None:
    params = params_of(checkpoints.rwkv7())
    first, second = params.blocks
    large = params._replace(blocks=(first, *[second] * 300))
    with pytest.raises(ValueError, match=rf"model\.{ending}: with its \d+ (tensors|members)"):
        models.save(tmp_path / f"model.{ending}", large)
    assert not any(tmp_path.glob("model*"))


def test_one_error_lists_all_tensors(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    del tensors["blocks.1.att.w1"], tensors["emb.weight"]
    tensors["blocks.0.ln1.bias"] = np.zeros(24, np.int64)
    for name, shape in {
        "blocks.1.ffn.key.weight": (96, 23),
        "blocks.1.att.g2": (8, 24),
        "blocks.0.ffn.receptance.weight": (24, 24),
    }.items():
        tensors[name] = np.zeros(shape, np.float32)
    path = write_pth(tmp_path, tensors)
    with pytest.raises(ValueError, match="are not those of RWKV-7") as error:
        models.load(path)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{path}: 6 tensors are not those of RWKV-7 with Config(num_layers=2, ")
    dtypes = "expected is one of bfloat16, float16, float32, float64"
    assert {line.strip() for line in lines} == {
        "blocks.1.att.w1 is missing; expected is [24, 7]",
        "emb.weight is missing; expected is [37, 24]",
        f"'blocks.1.ffn.key.weight' in {path} is [96, 23]; expected is [96, 24]",
        f"'blocks.1.att.g2' in {path} is [8, 24]; expected is [9, 24]",
        f"'blocks.0.ln1.bias' in {path} is int64; {dtypes}",
        f"'blocks.0.ffn.receptance.weight' in {path} is [24, 24]; no tensor of this name is "
        "expected",
    }


@pytest.mark.parametrize(
    ("version", "changed", "message"),
    [
        (
            "RWKV-6",  # of which the first tensors tell the sizes
            {"blocks.1.att.time_maa_w2": (5, 4, 24), "blocks.1.att.time_decay_w1": (24, 6)},
            r"2 tensors are not those of RWKV-6 .*\n.*time_maa_w2' in .* is \[5, 4, 24\]; expected "
            r"is \[5, 3, 24\]\n.*time_decay_w1' in .* is \[24, 6\]; expected is \[24, 7\]",
        ),
        (
            "RWKV-6",  # a tensor without elements may have any size
            {f"blocks.{i}.att.time_maa_w2": (0, 2**40, 24) for i in range(2)},
            r"told without .*time_maa_w2 \[5, mix_rank, C\]",
        ),
        ("RWKV-7", {f"x{i}": (1,) for i in range(50)}, r"50 tensors.*\n(.*\n){20}  and 30 more$"),
    ],
)
def test_wrong_tensors(
    tmp_path: Path, version: str, changed: dict[str, tuple[int, ...]], message: str
) -> None:
    wrong = {name: np.zeros(shape, np.float32) for name, shape in changed.items()}
    with pytest.raises(ValueError, match=message):
        models.load(write_safetensors(tmp_path, checkpoints.official(version) | wrong))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["blocks.0.ffn.s_emb.weight", "blocks.0.qkv.k_emb.weight"],
            r"DeepEmbed and attention \(rwkv7b\); accepted is RWKV-4, RWKV-5, RWKV-6, RWKV-7",
        ),
        (["model.blocks.0.qkv.k_emb.weight"], "DeepEmbed and attention"),
        (["blocks.0.att.time_maa_x", "blocks.0.att.gate_w1"], "RWKV-6 with a gate of low rank"),
        (["model.layers.0.attn.x_bias"], "RWKV-6 in the layout of flash-linear-attention"),
        (["model.embed_tokens.weight"], "'model.embed_tokens.weight' ..., are of no generation of"),
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
    folder = write(tmp_path, checkpoints.official(version, **FLA_SIZES))
    with_config(folder, **{name: value})
    with pytest.raises(ValueError, match=f"{name} is '{value}'; accepted is {accepted}"):
        models.load(folder)


@pytest.mark.parametrize("also", ["emb.weight", "blocks.1.att.w1"])
def test_two_names_of_one_tensor(tmp_path: Path, also: str) -> None:
    tensors = checkpoints.rwkv7(**FLA_SIZES)
    path = write_safetensors(tmp_path, checkpoints.fla(tensors) | {also: tensors[also]})
    with pytest.raises(ValueError, match=f"second tensor with the official name '{also}'"):
        models.load(path)


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
