"""The checkpoints of each generation: how to know them, and the shapes of their tensors."""

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax

from rwkv_jax.models import _parameters, rwkv7
from rwkv_jax.models._checkpoints.tensors import quoted

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
OwnAxes: TypeAlias = tuple[str | None, ...]

TIME_STATE = re.compile(r"blocks\.(\d+)\.att\.time_state")
"""The tuned state of a block."""

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


class Generation(NamedTuple):
    """A generation of models.

    Attributes:
      name: its name, as in "RWKV-7".
      module: its module of `rwkv_jax.models`, or None if there is no such module.
      marks: ends of names that this generation has and the ones after it in `GENERATIONS` do not.
      heads: the end of the names of a tensor [H, K], or None if the model has no heads.
      vectors: ends of names of the vectors that are [1, 1, C] in official files.
      own: ends of names of the tensors with sizes that no configuration tells, within a block. An
        axis with a text takes its size from the file, and axes with one text have one size.
      unused: names that official files may have and no formula uses.
    """

    name: str
    module: ModuleType | None
    marks: tuple[str, ...]
    heads: str | None = None
    vectors: tuple[str, ...] = ()
    own: Mapping[str, OwnAxes] = {}
    unused: tuple[str, ...] = ()

    def is_of(self, names: Mapping[str, Any]) -> bool:
        return any(name.endswith(self.marks) for name in names)

    def official_shape(self, name: str, shape: Shape) -> Shape:
        """The shape in official files of a parameter."""
        return (1, 1, *shape) if name.endswith(self.vectors) else shape


GENERATIONS = (
    Generation(
        "RWKV-7",
        rwkv7,
        marks=(".att.r_k",),
        heads=".att.r_k",
        vectors=(
            *(f".att.{name}" for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")),
            *(f".att.{name}" for name in ("w0", "a0", "v0", "k_k", "k_a")),
            ".ffn.x_k",
        ),
        own={
            ".att.w1": (None, "rank of w"),
            ".att.w2": ("rank of w", None),
            ".att.a1": (None, "rank of a"),
            ".att.a2": ("rank of a", None),
            ".att.v1": (None, "rank of v"),
            ".att.v2": ("rank of v", None),
            ".att.g1": (None, "rank of g"),
            ".att.g2": ("rank of g", None),
            ".ffn.key.weight": ("hidden", None),
            ".ffn.value.weight": (None, "hidden"),
        },
        unused=("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"),
    ),
    Generation("RWKV-6", None, marks=(".att.time_maa_x",)),
    Generation("RWKV-5", None, marks=(".att.ln_x.weight",)),
    Generation("RWKV-4", None, marks=(".att.time_first",)),
)


def generation_of(what: str, names: Mapping[str, Any]) -> tuple[Generation, ModuleType]:
    """The generation whose names these are, and its module.

    Raises:
      ValueError: there is none, or it has no module. The message begins with `what`.
    """
    for generation in GENERATIONS:
        if generation.is_of(names):
            if generation.module is not None:
                return generation, generation.module
            known = ", ".join(x.name for x in GENERATIONS if x.module is not None)
            raise ValueError(f"{what}: the model is {generation.name}; accepted is {known}")
    some = ", ".join(quoted(name) for name in list(names)[:3])
    raise ValueError(f"{what}: the names of the tensors, {some} ..., are of no generation of RWKV")


def sizes(what: str, generation: Generation, shapes: Shapes) -> dict[str, int]:
    """The arguments of the `Config` of a model, from the shapes of its tensors.

    Raises:
      ValueError: the tensors that tell them are missing. The message begins with `what`.
    """
    tables = (shapes.get(name, ()) for name in ("emb.weight", "head.weight"))
    vocabulary, width = next((x for x in tables if len(x) == 2), (0, 0))
    found = (_BLOCK.fullmatch(name) for name in shapes)
    layers = len({block[1] for block in found if block})
    told = {"layers": layers, "width": width, "vocabulary": vocabulary}
    if generation.heads is not None:
        heads = (x for name, x in shapes.items() if name.endswith(generation.heads))
        fitting = (x for x in heads if len(x) == 2 and x[0] * x[1] == width)
        _, told["head_size"] = next(fitting, (0, 0))
    if not all(told.values()):
        names = ["emb.weight [vocabulary, C]"]
        if generation.heads is not None:
            names.append(f"blocks.0{generation.heads} [H, K] with H * K = C")
        raise ValueError(
            f"{what}: the sizes of the model cannot be told without {' and '.join(names)}"
        )
    return told


def expected(generation: Generation, module: ModuleType, config: Any, shapes: Shapes) -> Any:
    """The parameters of a model as `jax.ShapeDtypeStruct`, for a file with these shapes."""
    # All blocks but the first one have the same shapes, and two are enough to know them.
    few = type(config)(**vars(config) | {"layers": min(config.layers, 2)})
    params = jax.eval_shape(lambda key: module.init(key, few), jax.random.key(0))
    first, *others = params.blocks
    params = params._replace(blocks=(first, *others * (config.layers - 1)))
    found: dict[str, int] = {}
    own = {
        name: axes
        for name in named(params)
        for end, axes in generation.own.items()
        if name.endswith(end)
    }
    for name, axes in own.items():
        shape = shapes.get(name, ())
        if len(shape) == len(axes):
            for axis, size in zip(axes, shape, strict=True):
                if axis is not None:
                    found.setdefault(_of_block(name, axis), size)

    def with_own(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = _parameters.name(path)
        axes = own.get(name) or (None,) * x.ndim
        shape = tuple(
            found.get(_of_block(name, axis), size) for axis, size in zip(axes, x.shape, strict=True)
        )
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(with_own, params)


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names of the parameters."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_parameters.name(path): x for path, x in leaves}


def _of_block(name: str, axis: str | None) -> str:
    """The name of an axis of the block of a tensor."""
    return f"{name.split('.')[1]} {axis}"
