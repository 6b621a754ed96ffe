"""`load` and `save` of `rwkv_jax.models` with the layouts of other programs: Hugging Face,
flash-linear-attention, what training leaves, and adapters."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import models
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.checkpoints import UNUSED, Tensors, prefixed
from support.tolerance import assert_trees_close

SIZES: dict[str, Any] = {"heads": 1, "head_size": 64}
CONFIG = {
    "model_type": "rwkv7",
    "vocab_size": 37,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "head_size": 64,
    "num_attention_heads": 1,
    "layer_norm_epsilon": 1e-5,
    "group_norm_epsilon": 64e-5,
    "rescale_every": 0,
    "tie_word_embeddings": False,
    "embedding_layer_norm_fused": False,
    "decay_low_rank_dim": 7,
    "a_low_rank_dim": 5,
    "v_low_rank_dim": 3,
    "gate_low_rank_dim": 9,
    "wkv_state_dtype": "float32",
    "context_length": 8192,
}
FLA_CONFIG = {
    "model_type": "rwkv7",
    "vocab_size": 37,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": None,
    "head_dim": 64,
    "num_heads": 32,
    "norm_eps": 1e-5,
    "hidden_act": "sqrelu",
    "hidden_ratio": 4.0,
    "value_dim": [64, 64],
    "norm_first": True,
    "norm_bias": True,
    "decay_low_rank_dim": 7,
    "tie_word_embeddings": False,
    "attn": None,
}
RENAMED = {"model.emb.weight": "model.embeddings.weight"}


def hugging_face(tensors: Tensors) -> Tensors:
    there = prefixed("model.", tensors, "head.weight")
    return {name: x for name, x in there.items() if name.removeprefix("model.") not in UNUSED}


LAYOUTS: dict[str, tuple[dict[str, Any] | None, Callable[[Tensors], Tensors]]] = {
    "official": (None, lambda x: x),
    "hugging face": (CONFIG, hugging_face),
    "embeddings": (CONFIG, lambda x: {RENAMED.get(n, n): y for n, y in hugging_face(x).items()}),
    "rwkv7.": (
        CONFIG | {"model_type": "rwkv", "architecture_version": "rwkv7"},
        lambda x: prefixed("rwkv7.", x, "head.weight"),
    ),
    "transformers": (CONFIG | {"model_type": "rwkv"}, checkpoints.transformers),
    "fla": (FLA_CONFIG, checkpoints.fla),
}


def written(folder: Path, config: dict[str, Any] | None, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def assert_same(params: Any, tensors: Tensors) -> None:
    """Equal names and bits."""
    found = rwkv7.names(params)
    assert found.keys() == tensors.keys() - set(UNUSED)
    for name, x in found.items():
        assert np.asarray(x).tobytes() == tensors[name].tobytes(), name


@pytest.mark.quick
def test_all_layouts_of_a_model_give_the_same_logits(tmp_path: Path) -> None:
    """Bit for bit."""
    tensors = checkpoints.rwkv7(**SIZES)
    tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    apply = jax.jit(lambda params: rwkv7.apply(params, tokens)[0])
    expected = apply(models.load(checkpoints.write_pth(tmp_path / "model.pth", tensors)).params)
    assert np.isfinite(expected).all()
    for name, (config, there) in LAYOUTS.items():
        path = written(tmp_path / name, config, there(tensors))
        found = models.load(path)
        assert_same(found.params, tensors)
        np.testing.assert_array_equal(apply(found.params), expected)
        for names in ("official", "hf", "fla"):
            path = tmp_path / f"{name} {names}{'.pth' if names == 'official' else ''}"
            models.save(path, found.params, names=names)
            assert_same(models.load(path).params, tensors)


@pytest.mark.quick
def test_saved_for_hugging_face(tmp_path: Path) -> None:
    """The names and shapes, and a configuration with what its class needs."""
    tensors = checkpoints.rwkv7(dtype="bfloat16")
    params = models.load(checkpoints.write_pth(tmp_path / "model.pth", tensors)).params
    models.save(tmp_path / "folder", rwkv7.stacked(params), names="hf")
    assert {x.name for x in (tmp_path / "folder").iterdir()} == {"config.json", "model.safetensors"}
    content = (tmp_path / "folder" / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    del header["__metadata__"]
    there = hugging_face(tensors)
    assert {x: tuple(y["shape"]) for x, y in header.items()} == {
        x: y.shape for x, y in there.items()
    }
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    of_sizes = {
        "hidden_size": 24,
        "intermediate_size": 96,
        "head_size": 8,
        "num_attention_heads": 3,
    }
    for name, value in (CONFIG | of_sizes).items():
        if name not in ("context_length", "wkv_state_dtype"):
            assert config[name] == value, name
    assert (config["architectures"], config["dtype"]) == (["Rwkv7ForCausalLM"], "bfloat16")


@pytest.mark.quick
@pytest.mark.parametrize("names", ["hf", "fla"])
def test_a_folder_with_another_checkpoint(tmp_path: Path, names: Any) -> None:
    """It would be read in place of the one that is written."""
    tensors = checkpoints.rwkv7(**SIZES)
    params = models.load(written(tmp_path, None, tensors)).params
    models.save(tmp_path, jax.tree.map(lambda x: -x, params), names=names)
    assert_same(models.load(tmp_path).params, {name: -x for name, x in tensors.items()})
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "old.pth"):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match=f"which has the checkpoint '{name}'; accepted"):
            models.save(tmp_path, params, names=names)
        (tmp_path / name).unlink()


@pytest.mark.quick
def test_embedding_with_its_normalisation(tmp_path: Path) -> None:
    """The model computes no `ln0` then, in any form, and is saved as it is."""
    tensors = {name: x for name, x in checkpoints.rwkv7(**SIZES).items() if name not in UNUSED}
    params = models.load(written(tmp_path / "plain", None, tensors)).params
    weight, bias = (tensors.pop(f"blocks.0.ln0.{x}") for x in ("weight", "bias"))
    x = tensors["emb.weight"]
    centred = x - x.mean(1, keepdims=True)
    normal = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-5)
    tensors["emb.weight"] = (normal * weight + bias).astype(np.float32)
    config = CONFIG | {"embedding_layer_norm_fused": True}
    found = models.load(written(tmp_path / "fused", config, hugging_face(tensors)))
    assert_same(found.params, tensors)
    tokens = jnp.arange(10, dtype=jnp.int32).reshape(2, 5)
    expected, state = rwkv7.apply(params, tokens)
    for form in (found.params, rwkv7.stacked(found.params), models.for_decoding(found.params)):
        logits, next_state = rwkv7.apply(form, tokens)
        assert_trees_close(logits, expected, 1e-5)
        assert_trees_close(rwkv7.unstacked(next_state), state, 1e-5)
    models.save(tmp_path / "again", found.params, names="hf")
    assert_same(models.load(tmp_path / "again").params, tensors)
    for names in ("official", "fla"):
        with pytest.raises(ValueError, match=f"names is {names}, and the embedding is normalised"):
            models.save(tmp_path / "model.pth", found.params, names=names)
    config["embedding_layer_norm_fused"] = False
    with pytest.raises(ValueError, match=r"blocks\.0\.ln0\.weight is missing"):
        models.load(written(tmp_path / "fused", config, hugging_face(tensors)))


@pytest.mark.quick
@pytest.mark.parametrize("layout", ["official", "hugging face", "transformers", "fla"])
def test_tied_head(tmp_path: Path, layout: str) -> None:
    tensors = checkpoints.rwkv7(**SIZES)
    tensors["head.weight"] = tensors["emb.weight"]
    config, there = LAYOUTS[layout]
    stored = dict(there(tensors))
    del stored["lm_head.weight" if "lm_head.weight" in stored else "head.weight"]
    tied = (config or {}) | {"tie_word_embeddings": True}
    assert_same(models.load(written(tmp_path, tied, stored)).params, tensors)
    message = r"head\.weight is missing; expected is \[37, 64\], or tie_word_embeddings in config"
    with pytest.raises(ValueError, match=message):
        models.load(written(tmp_path, tied | {"tie_word_embeddings": False}, stored))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("prefix", "without"),
    [
        ("_orig_mod.", ()),
        ("module.", ()),
        ("model.", ()),
        ("_forward_module.", ()),
        ("base_model.model.", ()),
        ("_forward_module._orig_mod.model.module.", ()),
        ("_orig_mod.model.", ("head.weight",)),
    ],
)
def test_prefixes(tmp_path: Path, prefix: str, without: tuple[str, ...]) -> None:
    tensors = checkpoints.rwkv7(**SIZES)
    stored = prefixed(prefix, tensors, *without)
    assert_same(models.load(written(tmp_path, None, stored)).params, tensors)
    stored = prefixed(prefix, checkpoints.fla(tensors))
    assert_same(models.load(written(tmp_path, FLA_CONFIG, stored)).params, tensors)


@pytest.mark.quick
def test_wrapped_blocks(tmp_path: Path) -> None:
    tensors = checkpoints.rwkv7()
    wrapper = r"\g<0>_orig_mod._checkpoint_wrapped_module."
    stored = {re.sub(r"blocks\.\d\.", wrapper, name): x for name, x in tensors.items()}
    assert_same(models.load(written(tmp_path, None, stored)).params, tensors)
    tuned = {f"model.blocks.{i}.att.time_state": np.ones((3, 8, 8), np.float32) for i in range(2)}
    path = checkpoints.write_pth(tmp_path / "state.pth", tuned)
    state = models.load_state(path, models.load(tmp_path / "model.safetensors").params)
    assert all(bool((block.att.wkv == 1).all()) for block in state)


@pytest.mark.quick
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("key", [None, "model", "state_dict", "model_state_dict", "module"])
def test_checkpoints_of_training(tmp_path: Path, key: str | None, protocol: int) -> None:
    tensors = checkpoints.rwkv7()
    value: Any = checkpoints.state_dict(prefixed("_orig_mod.", tensors))
    step = checkpoints.tensor(checkpoints.Storage("step", np.ones(1, np.float32)), (), ())
    if key is not None:
        group = {"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1], "fused": None, "max": False}
        optimizer = {"state": {0: {"step": step}, 1: {"step": step}}, "param_groups": [group]}
        value = {"epoch": 3, key: value, "optimizer": optimizer, "optimizer_states": [optimizer]}
    (tmp_path / "model.pth").write_bytes(checkpoints.torch_file(value, protocol=protocol))
    assert_same(models.load(tmp_path / "model.pth").params, tensors)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.attn.r_proj.lora_A.weight",
        "blocks.0.att.receptance.lora_B",
        "base_model.model.blocks.0.ffn.key.lora_magnitude_vector.default.weight",
        "blocks.0.att.key.bone",
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_adapters(tmp_path: Path, name: str, alone: bool) -> None:
    tensors = {} if alone else checkpoints.rwkv7(**SIZES)
    path = tmp_path / "adapter_model.safetensors"
    checkpoints.write_safetensors(path, tensors | {name: np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError, match=f"'{re.escape(name)}' is of an adapter .* merge_and_un"):
        models.load(tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "changed", "message"),
    [
        (
            "fla",
            {"attn": {"layers": [5], "num_heads": 4}},
            "some layers softmax attention; accepted",
        ),
        ("fla", {"attn": {"num_heads": 4}}, "attn is .* softmax attention"),
        ("fla", {"norm_eps": 1e-6}, "norm_eps is 1e-06; accepted is 1e-05$"),
        ("fla", {"hidden_size": 128}, "hidden_size is 128, and the tensors have 64$"),
        ("fla", {"head_dim": None}, "num_heads is 32, and the tensors have 1$"),
        (
            "fla",
            {"num_hidden_layers": 3, "decay_low_rank_dim": 8},
            "num_hidden_layers is 3, .* 2; decay_low_rank_dim is 8, and the tensors have 7$",
        ),
        ("hugging face", {"model_type": "qwen3"}, "'qwen3'; accepted is 'rwkv7' or 'rwkv'$"),
        ("hugging face", {"architecture_version": "rwkv8"}, "'rwkv8'; accepted is 'rwkv7'$"),
        ("hugging face", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        ("hugging face", {"group_norm_epsilon": 1e-5}, "is 1e-05; accepted is 0.00064$"),
        ("hugging face", {"rescale_every": 6}, "rescale_every is 6, .*; accepted is 0, with the"),
        ("hugging face", {"vocab_size": 65536}, "vocab_size is 65536, and the tensors have 37$"),
        ("hugging face", {"head_size": 32}, "head_size is 32, and the tensors have 64$"),
        ("hugging face", {"num_attention_heads": 2}, "num_attention_heads is 2, and the tensors"),
        ("hugging face", {"intermediate_size": 224}, "intermediate_size is 224, .* have 256$"),
        ("hugging face", {"vocab_size": "37"}, "vocab_size is '37', and the tensors have 37$"),
        ("fla", {"hidden_ratio": 8}, "intermediate_size is 512, and the tensors have 256$"),
        ("fla", {"value_dim": [64, 128]}, r"value_dim is \[64, 128\], and the tensors have 64$"),
        ("fla", {"norm_first": False}, "norm_first is False; accepted is True$"),
        ("fla", {"norm_bias": False}, "norm_bias is False; accepted is True$"),
        ("official", CONFIG | {"rescale_every": 6}, "rescale_every is 6, .*; accepted is 0, with"),
        ("hugging face", {"a_low_rank_dim": 6}, "a_low_rank_dim is 6, and the tensors have 5$"),
        ("hugging face", {"v_low_rank_dim": 5}, "v_low_rank_dim is 5, and the tensors have 3$"),
    ],
)
def test_configurations_that_are_not_those_of_the_tensors(
    tmp_path: Path, layout: str, changed: dict[str, Any], message: str
) -> None:
    config, there = LAYOUTS[layout]
    folder = written(tmp_path, (config or {}) | changed, there(checkpoints.rwkv7(**SIZES)))
    with pytest.raises(ValueError, match=message) as error:
        models.load(folder)
    assert str(error.value).startswith(str(folder / "config.json"))


@pytest.mark.quick
def test_what_is_beside_official_names(tmp_path: Path) -> None:
    """They are complete in themselves: a configuration of another model is not looked at."""
    tensors = checkpoints.rwkv7()
    for content in (b"{", b'{"model_type": "llama"}', b'{"model_type": [1], "vocab_size": 3}'):
        (tmp_path / "config.json").write_bytes(content)
        assert_same(models.load(written(tmp_path, None, tensors)).params, tensors)
