"""LoRA in the files of RWKV-PEFT: `blocks.0.att.key.lora_A` and so on, and no configuration.

Source: `merge/merge_lora.py` of RWKV-PEFT.
"""

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from rwkv_jax.finetuning._adapter import Adapter, matrices, numbers
from rwkv_jax.finetuning._files import by_matrix, check_shapes, in_order
from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints import files
from rwkv_jax.models._checkpoints.names import official_name
from rwkv_jax.models._checkpoints.tensors import FLOATS, Tensor, described, quoted
from rwkv_jax.models._trees import Params

_TENSOR = re.compile(r"(.+)\.(lora_[AB])")


def load_rwkv_peft(
    path: str | os.PathLike[str], params: Any, *, alpha: float, dtype: DTypeLike = jnp.float32
) -> tuple[Params, Adapter]:
    """The adapter in a file that RWKV-PEFT has written with `peft` "lora", and the parameters of
    the model with those that were trained beside the adapter, such as normalisations.

    The rank is that of the matrices. Files of PiSSA have the same names, and mean another thing.

    Args:
      path: the `.pth` file.
      params: the parameters of the base model.
      alpha: the `lora_alpha` of the training, which is in no file; the product is multiplied by
        alpha / rank.
      dtype: the dtype of A and B.

    Returns:
      `params` with the arrays of the file in place of theirs, in the dtype of `params`, and the
      adapter.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, or of another method, such as Bone; or it has tensors for
        other matrices, parameters or sizes than those of the model, all of which the message lists.
      TypeError: `dtype` is not float32, bfloat16 or float16, `alpha` is no number, or `params` are
        not the parameters of a model.

    Source: `merge/merge_lora.py` of RWKV-PEFT.
    """
    what = "load_rwkv_peft"
    dtype = _parameters.floating(what, dtype)
    alpha, _ = numbers(what, alpha, 0.0)
    sizes = matrices(what, params)
    found, others, wrong = by_matrix(_TENSOR, files.read(path), sizes)
    rank = next((n for x in found.values() if "lora_A" in x for n in x["lora_A"].array.shape), 0)
    shapes = {name: x.shape for name, x in _parameters.names(params).items() if x.dtype != jnp.int8}
    replaced: dict[str, Tensor] = {}
    for given, x in others.items():
        name, what = official_name(given), f"{quoted(given)} is {x.described()}"
        shape = shapes.get(name, ())
        if name not in shapes or name in replaced:
            wrong.append(f"{what}; no parameter of floats has this name")
        elif x.array.shape not in (shape, (1, 1, *shape)):
            wrong.append(f"{what}; expected is {described(shape)}")
        elif x.array.dtype not in FLOATS.values():
            wrong.append(f"{what} of {x.array.dtype}; expected is one of {', '.join(FLOATS)}")
        else:
            replaced[name] = x
    check_shapes(str(path), found, sizes, rank, wrong)

    def of_file(key: KeyPath, x: Array) -> Array:
        tensor = replaced.get(_parameters.name(key))
        return (
            x if tensor is None else jnp.asarray(np.array(tensor.array, x.dtype)).reshape(x.shape)
        )

    own = jax.tree_util.tree_map_with_path(of_file, params)
    return own, Adapter(in_order(found, sizes, dtype), alpha)
