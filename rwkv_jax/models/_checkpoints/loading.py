"""Parameters and states from files."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from rwkv_jax import _files
from rwkv_jax.models import _parameters, _quantisation
from rwkv_jax.models._checkpoints import config as configuration
from rwkv_jax.models._checkpoints import files
from rwkv_jax.models._checkpoints.layouts import (
    TIME_STATE,
    Layout,
    Shape,
    expected,
    layout_of,
    sizes,
)
from rwkv_jax.models._checkpoints.names import by_official_name
from rwkv_jax.models._checkpoints.tensors import (
    FLOATS,
    Tensor,
    described,
    listed,
    quoted,
)
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._placement import MeshAxes
from rwkv_jax.models._stacking import Stacked

_COMPLETE = {"head.weight", "blocks.0.ln0.weight"}
"""Tensors in place of which a file may have a configuration beside it."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that was loaded.

    Attributes:
      generation: its name, such as "RWKV-7".
      module: the module with the functions of the model, such as `rwkv_jax.models.rwkv7`.
      config: its sizes, a `Config` of the module.
      params: the parameters, a `Params` of the module.
      files: the paths of the files that the parameters are in.
    """

    generation: str
    module: ModuleType
    config: Any
    params: Any
    files: tuple[str, ...]


def inspect(path: str | os.PathLike[str]) -> Checkpoint:
    """The model in a checkpoint without the values of its parameters.

    The generation, the sizes and the parameters are found, and checked, as `load` does it, from the
    names, shapes and dtypes of the tensors. No tensor of more than 16 KiB is read, and those of a
    `.pth` file that are smaller for their checksums alone.

    Args:
      path: the file or the folder, as `load` takes it.

    Returns:
      What `load` returns, with a `jax.ShapeDtypeStruct` in place of each parameter, which has the
      dtype of the file.

    Raises:
      FileNotFoundError, ValueError: as `load` raises them.
    """
    return _found(path)[1]


def _found(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Checkpoint]:
    """The tensors of a checkpoint by their official names, and what `inspect` returns."""
    given = files.read(path)
    tensors = by_official_name(given)
    # Files with the official names are complete in themselves, and what is beside them may be of
    # another model.
    complete = tensors.keys() == given.keys() and tensors.keys() >= _COMPLETE
    description = configuration.in_folder_of if complete else configuration.beside
    beside = description(_files.expanded(path))
    tensors = beside.with_head(tensors)
    shapes = {name: _shape(x) for name, x in tensors.items()}
    layout = layout_of(str(path), tensors, given)
    told = sizes(str(path), layout, shapes)
    beside.check(layout.name, told, shapes)
    config = layout.module.Config(**told)
    params = expected(str(path), layout, config, shapes, fused=beside.fused)
    params = _with_scales(params, shapes)
    wanted = _parameters.names(params)
    parameters = {name: x for name, x in tensors.items() if not TIME_STATE.fullmatch(name)}
    _check(path, layout, config, parameters, wanted)
    params = jax.tree_util.tree_map_with_path(
        lambda key, x: jax.ShapeDtypeStruct(x.shape, tensors[_parameters.name(key)].array.dtype),
        params,
    )
    used = tuple(sorted({tensors[name].file for name in wanted}))
    return tensors, Checkpoint(layout.name, layout.module, config, params, used)


def _with_scales(params: Any, shapes: Mapping[str, Shape]) -> Any:
    """The parameters of a file: a weight is of int8 where the file has a scale of its name, whose
    shape says how many groups there are."""

    def with_scale(path: KeyPath, x: Any) -> Any:
        scale = shapes.get(f"{_parameters.name(path)}.scale")
        if not isinstance(x, Weight) or scale is None:
            return x
        outputs, inputs = x.weight.shape
        groups = scale[1] if len(scale) == 2 and scale[1] and inputs % scale[1] == 0 else 1
        return x._replace(
            weight=jax.ShapeDtypeStruct((outputs, inputs), jnp.int8),
            scale=jax.ShapeDtypeStruct((outputs, groups), jnp.float32),
        )

    return jax.tree_util.tree_map_with_path(
        with_scale, params, is_leaf=lambda x: isinstance(x, Weight)
    )


def loaded_dtype(name: str, of_file: np.dtype, dtype: DTypeLike | None) -> np.dtype:
    """The dtype in which `load` gives a parameter."""
    if dtype is None or of_file == np.int8 or name.endswith(".scale"):
        return jax.dtypes.canonicalize_dtype(of_file)
    return np.dtype(dtype)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    data: MeshAxes = None,
    model: MeshAxes = None,
    quantize: bool = False,
    group: int | None = None,
) -> Checkpoint:
    """The model in a checkpoint. Its generation and its sizes are found from the tensors.

    `path` is one of

    - a file of torch.save (`.pth`), as RWKV-LM writes it. Nothing in it is executed, and PyTorch is
      not needed. It may also be the checkpoint of a training run, which has the model under
      `state_dict`, `model`, `model_state_dict` or `module`.
    - a `.safetensors` file, or the `.safetensors.index.json` of several such files.
    - a folder with one of these, such as one of Hugging Face or flash-linear-attention.

    Names are the official ones, those of the models of Hugging Face, or for RWKV-7 those of
    flash-linear-attention. Before them there may be what training leaves, such as `_orig_mod.` or
    `module.`, several times and in any order. A model of RWKV-5 has the version 5.0, 5.1 or 5.2.

    A `config.json` beside files with other names than the official ones, or of RWKV in a folder
    with those, has to fit the tensors and the formula. Where it says `tie_word_embeddings`, a head
    that is missing is a copy of the embedding; where it says `embedding_layer_norm_fused`, the
    first block has `ln0=None`.

    Tensors are read one after another and go to the devices that need them, so that the memory of
    the host holds one tensor beside the mapped file. Tensors that no formula uses are left out:
    `v0`, `v1` and `v2` of the first block. A tuned state in the file is no parameter; `load_state`
    reads it.

    Args:
      path: the file or the folder.
      dtype: the dtype of the parameters: float32, bfloat16, float16 or, where JAX has 64-bit types
        enabled, float64. If None, it is that of each tensor in the file, where float64 becomes
        float32 unless JAX has 64-bit types enabled. Quantised weights and their scales keep theirs.
      mesh: where the parameters are placed, as `shardings` of the module does it; the default
        device if None.
      data: as `shardings` takes it.
      model: as `shardings` takes it.
      quantize: whether the parameters are those of `rwkv_jax.models.quantize`. Each matrix is
        quantised as soon as it is read, so that the devices hold at most one as the file has it.
      group: as `rwkv_jax.models.quantize` takes it.

    Returns:
      The parameters, with what is known about them.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, or has anything but tensors; or tensors are missing, of no use,
        or have the wrong shape or dtype, all of which the message lists; or the model is a variant
        that no module computes, such as RWKV-7b; or the file is an adapter, such as one of LoRA; or
        `config.json` asks for another formula or other sizes; or `data` or `model` names an axis
        that the mesh does not have, or there is no mesh; or there is a `group` without `quantize`,
        or `rwkv_jax.models.quantize` refuses the parameters, such as those that are int8 in the
        file.
      TypeError: `dtype` is none of these, or `group` is no integer.
    """
    if dtype is not None:
        dtype = _parameters.floating("load", dtype, ("float64",))
    if mesh is None and (data, model) != (None, None):
        raise ValueError("load: mesh is None; data and model name axes of a mesh")
    _quantisation.check_group("load", group)
    if group is not None and not quantize:
        raise ValueError(f"load: group is {group} and quantize is False; accepted is None")
    tensors, found = _found(path)
    sharding: dict[str, NamedSharding] = {}
    if mesh is not None:
        sharding = _parameters.names(
            found.module.shardings(found.params, mesh, data=data, model=model)
        )

    def placed(key: KeyPath, x: jax.ShapeDtypeStruct) -> Array:
        name = _parameters.name(key)
        array = tensors[name].array.reshape(x.shape)
        return _array(array, loaded_dtype(name, array.dtype, dtype), sharding.get(name))

    def quantised(path: KeyPath, x: Any) -> Any:
        wide = jax.tree_util.tree_map_with_path(lambda key, x: placed((*path, *key), x), x)
        return _quantisation.part(path, wide, group=group)

    params = jax.tree_util.tree_map_with_path(
        quantised if quantize else placed,
        found.params,
        is_leaf=lambda x: quantize and isinstance(x, Weight),
    )
    return dataclasses.replace(found, params=params)


def load_state(
    path: str | os.PathLike[str],
    params: Any,
    batch: int = 1,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Any:
    """The state before the first token that state tuning has found, for the parameters of a model.

    A file of a tuned state has `blocks.0.att.time_state` [H, V, K] and so on, beside parameters or
    without. This is the layout of the states of this package. Programs whose states are [H, K, V]
    transpose it, such as the RWKV-5 and 6 of the `rwkv` package. RWKV-4 has no such state.

    Args:
      path: a file or a folder, as `load` takes it.
      params: the parameters of the model, in either form.
      batch: the number of rows, which all start with the same state.
      dtype: the dtype of the activations.

    Returns:
      The state, in the form of `params`: that of `initial_state` with the tuned states of the
      operator.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, or has anything but tensors; or states are missing, of no use,
        or have the wrong shape or dtype, all of which the message lists; or the model is RWKV-4.
      TypeError: `dtype` is no dtype that activations can have.
    """
    dtype = _parameters.floating("load_state", dtype)
    tensors = tuned_states(path)
    layout = layout_of("load_state", _parameters.names(params))
    module = layout.module
    if layout.heads is None:
        raise ValueError(
            f"load_state: the model is {layout.name}; accepted is one whose state is a matrix "
            "for each head"
        )
    state = module.unstacked(module.initial_state(params, batch, dtype))
    wanted = {
        f"blocks.{layer}.att.time_state": jax.ShapeDtypeStruct(block.att.wkv.shape[1:], jnp.float32)
        for layer, block in enumerate(state)
    }
    config = f"{len(state)} blocks"
    _check(path, layout, config, tensors, wanted)
    tuned = tuple(
        block._replace(att=block.att._replace(wkv=_of_rows(tensors[name], batch)))
        for name, block in zip(wanted, state, strict=True)
    )
    return module.stacked(tuned) if isinstance(params.blocks, Stacked) else tuned


def tuned_states(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tuned states in a file or a folder by their official names, whatever their shapes.

    Raises:
      FileNotFoundError, ValueError: as `load_state` raises them for the file.
    """
    tensors = by_official_name(files.read(path))
    return {name: x for name, x in tensors.items() if TIME_STATE.fullmatch(name)}


def _of_rows(x: Tensor, batch: int) -> Array:
    return jnp.tile(_array(x.array, jnp.float32, None), (batch, 1, 1, 1))


def _shape(x: Tensor) -> Shape:
    """The shape without the leading axes of size 1 that official vectors have."""
    shape = x.array.shape
    return shape[2:] if len(shape) == 3 and shape[:2] == (1, 1) else shape


def _array(x: np.ndarray, dtype: DTypeLike, sharding: NamedSharding | None) -> Array:
    """A copy of a tensor in `dtype`, on the devices that need it."""
    if sharding is None:
        return jnp.asarray(np.array(x, dtype)).block_until_ready()
    # Devices with the same part of the tensor share the copy on the host.
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = np.array(x[index], dtype)
        return parts[str(index)]

    return jax.make_array_from_callback(x.shape, sharding, part).block_until_ready()


def _check(
    path: str | os.PathLike[str],
    layout: Layout,
    config: Any,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Any],
) -> None:
    """Raise one error for all tensors that are not as they should be."""
    wrong = list(_wrong(layout, tensors, wanted))
    if wrong:
        raise ValueError(
            f"{path}: {len(wrong)} tensors are not those of {layout.name} with {config}, "
            f"by official names:{listed(wrong)}"
        )


def _wrong(
    layout: Layout, tensors: Mapping[str, Tensor], wanted: Mapping[str, Any]
) -> Iterator[str]:
    """What is wrong with each tensor."""
    for name, x in wanted.items():
        if name not in tensors:
            tied = ", or tie_word_embeddings in config.json" if name == "head.weight" else ""
            yield f"{name} is missing; expected is {described(x.shape)}{tied}"
    for name, x in tensors.items():
        what = f"{quoted(name)} in {x.file}"
        if name not in wanted:
            if name not in layout.unused:
                yield f"{what} is {x.described()}; no tensor of this name is expected"
            continue
        shape = wanted[name].shape
        if x.array.shape not in (shape, layout.official_shape(name, shape)):
            yield f"{what} is {x.described()}; expected is {described(shape)}"
            continue
        quantised = wanted[name].dtype == np.int8
        accepted = {"int8": np.dtype("int8")} if quantised else FLOATS
        if x.array.dtype not in accepted.values():
            yield f"{what} is {x.array.dtype}; expected is one of {', '.join(accepted)}"
