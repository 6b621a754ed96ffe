"""How a walk over tiles becomes a kernel on each platform.

On a GPU one program walks along the sequence of one head; where a row has several sequences, there
is a program for each. On a TPU, whose blocks are copied to its memory as a whole, the last axis of
the grid walks.

Arrays have the axis letters of `rwkv_jax._typing`, and three more:

    J    tiles of TILE tokens
    W    tokens of a whole row, of which a kernel of tiles takes any TILE consecutive ones
    1    an axis of size 1
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from rwkv_jax._operator.call import CHUNK, chunks
from rwkv_jax._pallas.algebra import TILE

PARAMETERS = {"cuda": "jax.experimental.pallas.triton", "tpu": "jax.experimental.pallas.tpu"}
"""For each platform the module with the parameters of its compiler, without which JAX has no such
compiler. JAX 0.11 announced that the one of "cuda" will be removed."""

PLATFORMS = tuple(PARAMETERS)

INTERPRET: str | None = None
"""The platform whose kernels the interpreter of Pallas runs on CPUs, for tests: it is slow. This is
the only switch; None outside tests."""

HEAD_SIZES = (16, 32, 64, 128)
"""The blocks of a GPU program are powers of two, and 16 is the smallest size of a product."""

WALKED_ROWS = 64
"""Rows of a state, or of its gradient, that one GPU program keeps along a sequence. Rows do not
depend on each other, so more value channels are more programs."""

STATE_BYTES = 64 * 1024
"""Shared memory of a GPU block for the rows of a state and of its gradient that are in products at
the same time.

Triton keeps the operands of products in shared memory from their first use to their last. For the
gradients of a tile these are a state, its gradient, and factors [T, K] of each level of decays.
With products of float32, K = V = 128 and decays that are not bounded, all rows of WKV7 at the same
time take 128 KiB and the other operands 105 KiB: 238592 bytes in all, as XLA of JAX 0.10 reports,
where a block has 232448 bytes on a Hopper GPU. Half of the rows at a time take 158720 bytes in all,
which also fit the 166912 of an A100."""


class Tuning(NamedTuple):
    """How a GPU program is compiled: warps of 32 threads, and stages of loads in flight."""

    num_warps: int = 4
    num_stages: int = 1


ALONE = {16: Tuning(), 32: Tuning(), 64: Tuning(), 128: Tuning(num_warps=8)}
"""For kernels with one tile for each program, by the larger of K and V, as measured on an H200."""

WALKS = {size: Tuning(num_stages=3) for size in (16, 32, 64)} | {128: Tuning(num_stages=2)}
FLOAT32_WALKS = WALKS | {128: Tuning(num_warps=8)}
"""For walks along a sequence; more stages do not fit every GPU with K or V = 128."""

Carry: TypeAlias = tuple[Array, ...]
Refs: TypeAlias = dict[str, Any]

Operands: TypeAlias = dict[str, tuple[str, Array]]
"""The axes of each array, and the array."""

Results: TypeAlias = dict[str, tuple[str, Any]]
"""The axes of each result, and its dtype."""


class Span(NamedTuple):
    """The consecutive tiles that a program computes.

    first, end: where the first one is in the blocks of the program, and the place behind the last.
    number: the number in the row of the first tile of the blocks.
    """

    first: Any
    end: Any
    number: Any


Body: TypeAlias = Callable[[Refs, Span, Carry], Carry]
"""`body(refs, span, carry)` computes the tiles of a span on references by name, and gives what it
carries to the next tiles."""

FIRST, END = "first", "end"
"""Operands with one number for each program, if its span is not all tiles of its blocks."""

FROM_START, FROM_END, SIDE_BY_SIDE = "from start", "from end", "side by side"


def rows_at_once(key_size: int, value_size: int, dtype: Any) -> int:
    """How many rows of a state and of its gradient are in products at the same time, on a GPU."""
    return min(value_size, STATE_BYTES // (2 * key_size * jnp.dtype(dtype).itemsize))


def why_not(platform: str) -> str | None:
    """Why kernels cannot be lowered for a platform, or None."""
    if platform not in PLATFORMS and not (platform == "cpu" and INTERPRET):
        return "pallas kernels exist for CUDA GPUs and for TPUs"
    made_for = compiler(platform)
    try:
        _parameters(made_for)
    except (ImportError, AttributeError) as error:
        return f"JAX {jax.__version__} does not compile pallas kernels for {made_for!r}: {error}"
    if platform == "cuda" and not _lowers_for_gpus():
        return (
            "JAX lowers pallas kernels for the kind of GPU that is here, and there is none; "
            "jax.sharding.use_abstract_mesh takes an abstract device"
        )
    return None


def _lowers_for_gpus() -> bool:
    known = jax.sharding.get_abstract_mesh().abstract_device is not None
    return known or jax.default_backend() == "gpu" or jax.__version_info__ < (0, 11)


def _parameters(compiler: str) -> Any:
    return importlib.import_module(PARAMETERS[compiler]).CompilerParams


def compiler(platform: str) -> str:
    """The platform that kernels are made for, though perhaps interpreted."""
    return INTERPRET if platform == "cpu" and INTERPRET else platform


def is_tpu(platform: str) -> bool:
    """Whether kernels are made as for a TPU, though perhaps interpreted."""
    return compiler(platform) == "tpu"


def run(
    body: Body,
    platform: str,
    operands: Operands,
    carried: Operands,
    results: Results,
    *,
    rows: int,
    tuning: Tuning,
    order: str,
    tokens_per_step: int = CHUNK,
) -> dict[str, Array]:
    """The results and the final carry, by name.

    Tokens are cut into steps of the grid. Side by side, with nothing carried, each step is a
    program of its own. In order, a single GPU program takes all tokens, while a TPU copies one step
    after another to the chip, where the carry stays in between. Where the carry has an axis S, each
    sequence has a GPU program. A GPU program has at most `rows` rows of a state.
    """
    on_tpu = is_tpu(platform)
    given = operands | carried
    made = results | {name: (axes, x.dtype) for name, (axes, x) in carried.items()}
    sizes = {a: n for axes, x in given.values() for a, n in zip(axes, x.shape, strict=True)}
    sizes |= {"1": 1, "W": max(sizes.get("W", 0), TILE)}
    tokens, whole = sizes["T"], not on_tpu and order != SIDE_BY_SIDE

    def cut(length: int) -> dict[str, int]:
        """The sizes of the axes along which a number of tokens is counted."""
        return {"T": length, "N": length // CHUNK, "J": length // TILE}

    padded = chunks(tokens) * CHUNK
    length = padded if whole else tokens_per_step
    tiles, steps = length // TILE, padded // length
    sizes |= cut(padded)
    block = sizes | cut(length) | {"B": None, "H": None, "S": None}

    def number(n: Any) -> Any:
        """The number, from the start of the sequence, of step n of the grid."""
        return steps - 1 - n if order == FROM_END else n

    groups, heads = 1, sizes["H"]
    if not on_tpu:
        block["V"] = min(sizes["V"], rows)
        groups = sizes["V"] // block["V"]

    def place(i: Any, n: Any = 0) -> dict[str, Any]:
        head = lax.div(i, groups)
        here = {"B": lax.div(head, heads), "H": lax.rem(head, heads), "V": lax.rem(i, groups)}
        return here | ({"S": n} if whole else dict.fromkeys("TNJ", number(n)))

    def arranged(axes: str) -> str:
        """On a TPU the two axes of a block have to be the last ones."""
        return "".join(sorted(axes, key=lambda a: a not in "BH")) if on_tpu else axes

    def spec(axes: str) -> pl.BlockSpec:
        shape = tuple(block[a] for a in arranged(axes))
        return pl.BlockSpec(shape, lambda *i: tuple(place(*i).get(a, 0) for a in arranged(axes)))

    def laid_out(axes: str, x: Array) -> Array:
        missing = [sizes[a] - n for a, n in zip(axes, x.shape, strict=True)]
        if any(missing):
            x = jnp.pad(x, [(0, n) for n in missing])
        return x.transpose([axes.index(a) for a in arranged(axes)])

    def taken(axes: str, x: Array) -> Array:
        x = x.transpose([arranged(axes).index(a) for a in axes])
        return x[:, :tokens] if "T" in axes else x

    def kernel(*refs: Any) -> None:
        starts, ends = refs[len(operands) : len(given)], refs[len(refs) - len(carried) :]
        inner = (*refs[: len(operands)], *refs[len(given) :])
        named = dict(zip((*operands, *results), inner, strict=False))

        def bound(name: str, otherwise: int) -> Any:
            return named[name][(0,) * len(named[name].shape)] if name in named else otherwise

        first = 0 if whole else number(pl.program_id(1)) * tiles
        span = Span(bound(FIRST, 0), bound(END, tiles), first)
        if on_tpu:
            step = pl.program_id(1)

            @pl.when(step == 0)
            def _():
                for start, end in zip(starts, ends, strict=True):
                    end[...] = start[...]

            starts = ends
        carry = body(named, span, tuple(start[...] for start in starts))
        for end, x in zip(ends, carry, strict=True):
            end[...] = x

    if on_tpu:
        along = "parallel" if order == SIDE_BY_SIDE else "arbitrary"
        parameters = _parameters("tpu")(dimension_semantics=("parallel", along))
    else:
        parameters = _parameters("cuda")(tuning.num_warps, tuning.num_stages)
    beside = [sizes["S"]] if "S" in sizes else [] if whole else [steps]
    first, *_ = (x for _, x in given.values())
    call = pl.pallas_call(
        kernel,
        [_type(first, [sizes[a] for a in arranged(axes)], dtype) for axes, dtype in made.values()],
        grid=(sizes["B"] * heads * groups, *beside),
        in_specs=[spec(axes) for axes, _ in given.values()],
        out_specs=[spec(axes) for axes, _ in made.values()],
        compiler_params=parameters,
        interpret=platform == "cpu",
        name="_".join(("wkv", *results)),
    )
    with jax.enable_x64(False):  # for the type of indices
        out = call(*(laid_out(axes, x) for axes, x in given.values()))
    return {n: taken(axes, x) for (n, (axes, _)), x in zip(made.items(), out, strict=True)}


def _type(like: Array, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an array that varies over the same mesh axes as `like`."""
    return jax.eval_shape(lambda x: jnp.zeros_like(x, shape=shape, dtype=dtype), like)
