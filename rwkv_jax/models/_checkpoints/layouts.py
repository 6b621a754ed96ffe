"""The layouts of checkpoints, one for each generation: how to know them, and the shapes of their
tensors."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax

from rwkv_jax.models import _parameters, rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._checkpoints.tensors import quoted
from rwkv_jax.models._linear import Table

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
OwnAxes: TypeAlias = tuple[str | None, ...]

TIME_STATE = re.compile(r"blocks\.(\d+)\.att\.time_state")
"""The tuned state of a block."""

_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")


def _same(params: Any, shapes: Shapes) -> Any:
    return params


class Layout(NamedTuple):
    """How the checkpoints of a generation look.

    Attributes:
      name: the name of the generation, as in "RWKV-7".
      module: its module of `rwkv_jax.models`.
      marks: ends of names that this layout has and the ones after it in `LAYOUTS` do not.
      vectors: ends of names of the vectors that are [1, 1, C] in official files.
      heads: the end of the names of a tensor [H, K], or None if the model has no heads.
      of_heads: whether the tensor of `heads` is [H] in early versions.
      sizes: arguments of `Config`, each with the end of the names of a tensor and the axes of this
        tensor: a number, the argument, or "C".
      own: ends of names of the tensors with sizes that no configuration tells, within a block. An
        axis with a text takes its size from the file, and axes with one text have one size.
      unused: names that official files may have and no formula uses.
      version: from the parameters of the newest version and the shapes of a file, the parameters of
        the version of the file. Both are trees of `jax.ShapeDtypeStruct`.
    """

    name: str
    module: ModuleType
    marks: tuple[str, ...]
    vectors: tuple[str, ...]
    heads: str | None = None
    of_heads: bool = False
    sizes: Mapping[str, tuple[str, tuple[str | int, ...]]] = {}
    own: Mapping[str, OwnAxes] = {}
    unused: tuple[str, ...] = ()
    version: Callable[[Any, Shapes], Any] = _same

    def is_of(self, names: Mapping[str, Any]) -> bool:
        return any(name.endswith(self.marks) for name in names)

    def official_shape(self, name: str, shape: Shape) -> Shape:
        """The shape in official files of a parameter."""
        return (1, 1, *shape) if name.endswith(self.vectors) else shape


def _version_of_rwkv5(params: rwkv5.Params, shapes: Shapes) -> rwkv5.Params:
    """The parameters of a file of RWKV-5: before 5.2, decay and bonus are [H]; some versions have
    the logarithm of the bonus, `time_first`; and 5.0 has no gate."""

    def has(*ends: str) -> bool:
        return any(name.endswith(ends) for name in shapes)

    heads = next(x for name, x in shapes.items() if name.endswith(".att.time_decay"))

    def version(att: rwkv5.TimeMixParams) -> rwkv5.TimeMixParams:
        per_head = jax.ShapeDtypeStruct(att.time_decay.shape[: len(heads)], att.time_decay.dtype)
        att = att._replace(time_decay=per_head, time_faaaa=per_head)
        if has(".att.time_first") and not has(".att.time_faaaa"):
            att = att._replace(time_faaaa=None, time_first=per_head)
        if not has(".att.gate.weight", ".att.time_mix_g"):
            att = att._replace(time_mix_g=None, gate=None)
        return att

    return params._replace(
        blocks=tuple(block._replace(att=version(block.att)) for block in params.blocks)
    )


def _version_of_rwkv7(params: rwkv7.Params, shapes: Shapes) -> rwkv7.Params:
    """The parameters of a file of RWKV-7, or of RWKV-7a, which has DeepEmbed as well."""
    if not any(name.endswith(".ffn.s_emb.weight") for name in shapes):
        return params
    vocabulary, width = params.emb.weight.shape

    def version(layer: int, ffn: rwkv7.ChannelMixParams) -> rwkv7.ChannelMixParams:
        hidden, _ = ffn.key.weight.shape
        s1 = shapes.get(f"blocks.{layer}.ffn.s1", ())
        size = s1[1] if len(s1) == 2 else 32  # that of the published models

        def like(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, ffn.x_k.dtype)

        return ffn._replace(
            s0=like(hidden),
            s1=like(width, size),
            s2=like(size, hidden),
            s_emb=Table(like(vocabulary, size * size)),
            s_emb_x=rwkv7.Weight(like(size * size, width)),
        )

    return params._replace(
        blocks=tuple(
            block._replace(ffn=version(layer, block.ffn))
            for layer, block in enumerate(params.blocks)
        )
    )


_HIDDEN: Mapping[str, OwnAxes] = {
    ".ffn.key.weight": ("ffn size", None),
    ".ffn.value.weight": (None, "ffn size"),
}

LAYOUTS = (
    Layout(
        "RWKV-7",
        rwkv7,
        marks=(".att.r_k",),
        vectors=(
            *(f".att.{name}" for name in ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")),
            *(f".att.{name}" for name in ("w0", "a0", "v0", "k_k", "k_a")),
            ".ffn.x_k",
            ".ffn.s0",
        ),
        heads=".att.r_k",
        own={
            ".att.w1": (None, "rank of w"),
            ".att.w2": ("rank of w", None),
            ".att.a1": (None, "rank of a"),
            ".att.a2": ("rank of a", None),
            ".att.v1": (None, "rank of v"),
            ".att.v2": ("rank of v", None),
            ".att.g1": (None, "rank of g"),
            ".att.g2": ("rank of g", None),
            **_HIDDEN,
            ".ffn.s0": ("ffn size",),
            ".ffn.s1": (None, "rank of s"),
            ".ffn.s2": ("rank of s", "ffn size"),
        },
        unused=("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2"),
        version=_version_of_rwkv7,
    ),
    Layout(
        "RWKV-6",
        rwkv6,
        marks=(".att.time_maa_x",),
        vectors=(
            *(f".att.time_maa_{x}" for x in "xwkvrg"),
            *(f".ffn.time_maa_{x}" for x in "kr"),
            ".att.time_decay",
        ),
        heads=".att.time_faaaa",
        sizes={
            "mix_rank": (".att.time_maa_w2", (5, "mix_rank", "C")),
            "decay_rank": (".att.time_decay_w2", ("decay_rank", "C")),
        },
        own=_HIDDEN,
    ),
    Layout(
        "RWKV-5",
        rwkv5,
        marks=(".att.ln_x.weight",),
        vectors=(".time_mix_k", ".time_mix_v", ".time_mix_r", ".time_mix_g"),
        heads=".att.time_decay",
        of_heads=True,
        own=_HIDDEN,
        version=_version_of_rwkv5,
    ),
    Layout(
        "RWKV-4",
        rwkv4,
        marks=(".att.time_first",),
        vectors=(".time_mix_k", ".time_mix_v", ".time_mix_r"),
        own=_HIDDEN,
    ),
)

_REFUSED = {
    ".qkv.k_emb.weight": "RWKV-7 with DeepEmbed and attention (rwkv7b)",
    ".ffn.enn.weight": "a preview of RWKV-8 with DeepEmbed",
    ".att.gate_w1": "RWKV-6 with a gate of low rank (x060a)",
    ".att.time_maa_rkvw_w1": "RWKV-6 without a gate (x060b or x060c)",
    ".att.x_bias": "RWKV-6 in the layout of flash-linear-attention",
}
"""Ends of names of tensors that only other models have than those of `LAYOUTS`."""


def layout_of(what: str, names: Mapping[str, Any], given: Iterable[str] = ()) -> Layout:
    """The layout whose names these are.

    Raises:
      ValueError: there is none, or it is a variant without a module. The message begins with
        `what`, and has names of `given`, if there are any.
    """
    for end, model in _REFUSED.items():
        if any(name.endswith(end) for name in names):
            known = ", ".join(x.name for x in reversed(LAYOUTS))
            raise ValueError(f"{what}: the model is {model}; accepted is {known}")
    for layout in LAYOUTS:
        if layout.is_of(names):
            return layout
    some = ", ".join(quoted(name) for name in list(given or names)[:3])
    raise ValueError(f"{what}: the names of the tensors, {some} ..., are of no generation of RWKV")


def sizes(what: str, layout: Layout, shapes: Shapes) -> dict[str, int]:
    """The arguments of the `Config` of a model, from the shapes of its tensors.

    Raises:
      ValueError: the tensors that tell them are missing. The message begins with `what`.
    """

    def of(end: str) -> list[Shape]:
        return [x for name, x in shapes.items() if name.endswith(end)]

    tables = (shapes.get(name, ()) for name in ("emb.weight", "head.weight"))
    vocabulary, width = next((x for x in tables if len(x) == 2), (0, 0))
    found = (_BLOCK.fullmatch(name) for name in shapes)
    layers = len({block[1] for block in found if block})
    told = {"num_layers": layers, "hidden_size": width, "vocab_size": vocabulary}
    needed = ["emb.weight [vocabulary, C]"]
    if layout.heads is not None:
        of_heads = of(layout.heads)
        if layout.of_heads:
            of_heads = [(*x, width // max(*x, 1)) if len(x) == 1 else x for x in of_heads]
        fitting = (x for x in of_heads if len(x) == 2 and math.prod(x) == width)
        _, told["head_size"] = next(fitting, (0, 0))
        needed.append(f"blocks.0{layout.heads} [H, K] with H * K = C")
    for argument, (end, axes) in layout.sizes.items():
        place = axes.index(argument)
        fixed = tuple(width if axis == "C" else axis for axis in axes if axis != argument)
        fitting = (x[place] for x in of(end) if (*x[:place], *x[place + 1 :]) == fixed)
        told[argument] = next(fitting, 0)
        needed.append(f"blocks.0{end} [{', '.join(map(str, axes))}]")
    if not all(told.values()):
        raise ValueError(
            f"{what}: the sizes of the model cannot be told without {' and '.join(needed)}"
        )
    if max(told.values()) >= 2**31:
        raise ValueError(f"{what}: the sizes are {told}; accepted are sizes below 2^31")
    return told


def expected(what: str, layout: Layout, config: Any, shapes: Shapes, *, fused: bool = False) -> Any:
    """The parameters of a model as `jax.ShapeDtypeStruct`, for a file with these shapes. If
    `fused`, the normalisation of the embedding is part of the embedding.

    Raises:
      ValueError: the file has less than half of them, which are too many to list. The message
        begins with `what`.
    """
    # All blocks but the first one have the same shapes, and two are enough to know them.
    few = type(config)(**vars(config) | {"num_layers": min(config.num_layers, 2)})
    params = jax.eval_shape(lambda key: layout.module.init(key, few), jax.random.key(0))
    params = layout.version(params, shapes)
    first, *others = params.blocks
    first = first._replace(ln0=None) if fused else first
    count = len(jax.tree.leaves(params)) + (config.num_layers - 2) * len(jax.tree.leaves(others))
    if count > 2 * len(shapes):
        raise ValueError(f"{what}: {len(shapes)} tensors; {layout.name} with {config} has {count}")
    params = params._replace(blocks=(first, *others * (config.num_layers - 1)))
    found: dict[str, int] = {}
    own = {
        name: axes
        for name in _parameters.names(params)
        for end, axes in layout.own.items()
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


def _of_block(name: str, axis: str | None) -> str:
    """The name of an axis of the block of a tensor."""
    return f"{name.split('.')[1]} {axis}"
