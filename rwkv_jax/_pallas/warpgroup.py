"""Experimental kernels for Hopper GPUs, in which one warpgroup scans over the chunks of a head.

The carry of the scan is in registers, in float32, and the arrays of chunks are in shared memory, as
`rwkv_jax._pallas.chunk` says.

Where rows have several sequences, there is a program for each head of each sequence, which has
chunks of its own. Any token may then be the first of a chunk. The last chunk of a sequence may also
have tokens of the next one: operands get idle numbers in their place, and only the rows of the
sequence are copied to results.

Who waits for whom: each stage has a barrier, at which the warpgroup waits for the copies into the
arrays of the stage. The next copies into a stage begin when all copies out of it have been read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from rwkv_jax._operator.call import CHUNK, Arrays
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax._pallas.chunk import (
    SIZE,
    SQUARE,
    Chunk,
    Shared,
    copy_rows,
    places_of_elements,
    plgpu,
)
from rwkv_jax._pallas.lowering import FROM_END, Operands, Results

SEQUENCES = "sequences"
"""The operand [B, S, 6] of int32 for rows of several sequences, with six numbers for each program
of a head:

    NUMBER         the sequence
    START, END     its first token, and the place behind its last one
    SAVED          the place of its first chunk among the saved states
    BEFORE, UNTIL  the program also writes zeros for the tokens of no sequence from BEFORE to START
                   and from END to UNTIL
"""

NUMBER, START, END, SAVED, BEFORE, UNTIL = range(6)

BodyFn: TypeAlias = Callable[[Chunk, Array], Array]
"""`body(chunk, carry)` computes a chunk and gives what it carries to the next one."""


class Kernel(NamedTuple):
    """A walk over the chunks of each head.

    scratch: the dtypes of scratch arrays, by name.
    stages: chunks that are in shared memory at the same time.
    order: FROM_START or FROM_END of `rwkv_jax._pallas.lowering`.
    """

    body: BodyFn
    scratch: Mapping[str, Any]
    stages: int
    order: str

    def run(
        self,
        platform: str,
        decay: str,
        operands: Operands,
        carry: Array,
        results: Results,
        identity_token: Mapping[str, float],
        chunks: int,
    ) -> tuple[Arrays, Array]:
        """The results by name, and the final carry [B, H, V, K], or [B, S, H, V, K] with SEQUENCES.

        Axes are BTH or BNH and one more, and BHK for parameters. Operands that are no parameters
        have 16 bits and whole chunks, but for SEGMENTS and SEQUENCES. `identity_token` has the
        inputs of padding. N is the number of `chunks`.
        """
        packed = operands.get(SEQUENCES)
        operands = {name: x for name, x in operands.items() if name != SEQUENCES}
        sizes = {a: n for axes, x in operands.values() for a, n in zip(axes, x.shape, strict=True)}
        sizes |= {"N": chunks, "S": 1 if packed is None else packed[1].shape[1]}
        copied = {n: (axes, x) for n, (axes, x) in operands.items() if "T" in axes or "N" in axes}
        stages = min(self.stages, chunks)
        is_interpreted = platform == "cpu"
        by_rows = packed is not None and not is_interpreted
        # Arrays of one shape and dtype share a reference, so that a loop can choose among them.
        first_places, counts = {}, dict[Any, int]()
        for name in (*copied, *self.scratch):
            kind, number = (SQUARE, self.scratch.get(name)), 1
            if name in copied:
                kind, number = (_of_chunk(*copied[name]), copied[name][1].dtype), stages
            kind = kind[0], jnp.dtype(kind[1])
            first_places[name] = kind, counts.get(kind, 0)
            counts[kind] = counts.get(kind, 0) + number

        def kernel(*refs: Any) -> None:
            numbers, refs = (None, refs) if packed is None else (refs[0], refs[1:])
            given, (start, *others) = refs[: len(operands)], refs[len(operands) :]
            made, (end, *others) = others[: len(results)], others[len(results) :]
            *buffers, unknown, barriers = others
            unknown[0] = jnp.int32(0)  # The compiler has to read it again behind each barrier.
            # Each reference, and what copies see of it.
            buffers = [tuple(x) if by_rows else (x, x) for x in buffers]
            buffers = dict(zip(counts, buffers, strict=True))
            given = dict(zip(operands, given, strict=True))
            made = {
                n: (axes, ref) for (n, (axes, _)), ref in zip(results.items(), made, strict=True)
            }
            walk = _Walk(numbers, lax.axis_index("head"), sizes, self.order)

            def unknown_zero() -> Any:
                return 0 if is_interpreted else unknown[0]

            def placed(name: str) -> tuple[Any, Any, Any]:
                """The reference that has the arrays of this name, what copies see of it, and the
                place of the first."""
                kind, first = first_places[name]
                return *buffers[kind], first

            def load(n: Any, stage: Any) -> None:
                for name, (axes, _) in copied.items():
                    own, rows, first = placed(name)
                    to = (rows if "T" in axes else own).at[first + stage]
                    source = walk.of_chunk(n, axes, given[name])
                    plgpu.copy_gmem_to_smem(source, to, barriers.at[stage])

            places = places_of_elements(is_interpreted)
            parameters = {
                name: walk.of_head(axes, given[name])
                for name, (axes, _) in operands.items()
                if name not in copied
            }

            def one(n: Any, carry: Array) -> Array:
                stage = lax.rem(n, stages) if stages > 1 else 0

                def shared(name: str) -> Shared:
                    own, rows, first = placed(name)
                    first += stage if name in copied else 0
                    return Shared(own, rows, lambda: first + unknown_zero())

                writes = {
                    name: (walk.of_chunk(n, axes, ref), "T" in axes)
                    for name, (axes, ref) in made.items()
                }
                arrays = {name: shared(name) for name in (*copied, *self.scratch)}
                chunk = Chunk(
                    *(decay, arrays, parameters, writes, places, unknown_zero),
                    *(walk.tokens(n), is_interpreted),
                )
                plgpu.barrier_wait(barriers.at[stage])
                chunk.put_identity_tokens(
                    {n: identity_token.get(n, 0.0) for n in copied if "T" in copied[n][0]}
                )
                carry = self.body(chunk, carry)
                chunk.wait()

                @pl.when(n + stages < walk.chunks)
                def _():
                    load(n + stages, stage)

                return carry

            if packed is not None:
                own, rows, _ = placed(next(iter(copied)))
                walk.clear(own.at[0], rows.at[0], made.values(), unknown_zero)
            for n in range(stages):
                if packed is None:
                    load(n, n)
                    continue

                @pl.when(n < walk.chunks)
                def _(n: int = n):
                    load(n, n)

            first = _first(walk.of_state(start), is_interpreted)
            carry = lax.fori_loop(0, walk.chunks, one, first)
            walk.of_state(end)[...] = carry
            plgpu.wait_smem_to_gmem(0)

        def memory(shape: Sequence[int], dtype: Any) -> Any:
            return _two_views(shape, dtype) if by_rows else plgpu.SMEM(shape, dtype)

        shapes = {n: [sizes[a] for a in axes] for n, (axes, _) in results.items()}
        types = [jax.ShapeDtypeStruct(shapes[n], dtype) for n, (_, dtype) in results.items()]
        call = plgpu.kernel(
            kernel,
            out_type=[*types, jax.ShapeDtypeStruct(carry.shape, carry.dtype)],
            grid=(sizes["B"] * sizes["S"] * sizes["H"],),
            grid_names=("head",),
            kernel_name="_".join(("wkv", *results)),
            scratch_types=[
                *(memory((n, *shape), dtype) for (shape, dtype), n in counts.items()),
                plgpu.SMEM((1,), jnp.int32),
                plgpu.Barrier(num_arrivals=len(copied), num_barriers=stages),
            ],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if is_interpreted else False,
        )
        numbers = () if packed is None else packed[1:]
        with jax.enable_x64(False):  # for the type of indices
            found = call(*numbers, *(x for _, x in operands.values()), carry)
        # Mosaic GPU does not know of mesh axes.
        _, *found, carry = vary_alike(carry, *found)
        return dict(zip(results, found, strict=True)), carry


class _Walk:
    """Where the chunks of a program are: those of a row, or of one of its SEQUENCES `numbers`."""

    def __init__(self, numbers: Any, program: Any, sizes: Mapping[str, int], order: str) -> None:
        self._order = order
        head, before = lax.rem(program, sizes["H"]), lax.div(program, sizes["H"])
        self._where = {"B": before, "H": head}
        self._numbers = None
        self.chunks = sizes["N"]
        if numbers is not None:
            row, place = lax.div(before, sizes["S"]), lax.rem(before, sizes["S"])
            self._numbers = [numbers[row, place, i] for i in range(numbers.shape[-1])]
            self._where |= {"B": row, "S": self._numbers[NUMBER]}
            self.chunks = _chunks(self._numbers[END] - self._numbers[START])

    def of_head(self, axes: str, ref: Any) -> Any:
        return ref.at[tuple(self._where[a] for a in axes if a in self._where)]

    def of_state(self, ref: Any) -> Any:
        return self.of_head("BHVK" if self._numbers is None else "BSHVK", ref)

    def _chunk(self, n: Any) -> Any:
        """The place among the chunks of the program of the one that is step n of the walk."""
        return self.chunks - 1 - n if self._order == FROM_END else n

    def of_chunk(self, n: Any, axes: str, ref: Any) -> Any:
        """The part of an array that belongs to step n of the walk."""
        chunk = self._chunk(n)
        token = chunk * CHUNK
        if self._numbers is not None:
            chunk, token = chunk + self._numbers[SAVED], token + self._numbers[START]
        where = self._where | {"N": chunk, "T": pl.ds(token, CHUNK)}
        return ref.at[tuple(where[a] for a in axes if a in where)]

    def tokens(self, n: Any) -> Any:
        """How many tokens there are from the first one of step n of the walk on, or None where rows
        have no sequences."""
        if self._numbers is None:
            return None
        return self._numbers[END] - self._numbers[START] - self._chunk(n) * CHUNK

    def clear(
        self,
        own: Any,
        rows: Any,
        results: Collection[tuple[str, Any]],
        unknown_zero: Callable[[], Any],
    ) -> None:
        """Write zeros for tokens of no sequence, by an array in shared memory and its rows."""
        assert self._numbers is not None
        _, start, end, _, before, until = self._numbers
        results = [x for x in results if "T" in x[0]]

        def on_side(side: Any, _: Any) -> Any:
            first, last = (lax.select(side == 0, *x) for x in ((before, end), (start, until)))

            def some(_: Any, token: Any) -> Any:
                where = self._where | {"T": pl.ds(token, CHUNK)}
                places = [tuple(where[a] for a in axes if a in where) for axes, _ in results]
                to = [ref.at[i] for i, (_, ref) in zip(places, results, strict=True)]
                count = lax.min(last - token, jnp.int32(CHUNK))
                copy_rows([(rows, x) for x in to], count, unknown_zero)
                return token + CHUNK

            lax.fori_loop(0, _chunks(last - first), some, first)
            return _

        @pl.when((before < start) | (end < until))
        def _():
            own[...] = jnp.zeros(SQUARE, own.dtype)
            plgpu.commit_smem()
            lax.fori_loop(0, 2, on_side, 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _chunks(tokens: Any) -> Any:
    """How many chunks so many tokens have, a number that only the device knows."""
    return lax.div(tokens + (CHUNK - 1), jnp.int32(CHUNK))


def _two_views(shape: Sequence[int], dtype: Any) -> Any:
    """An array in shared memory, and the same bytes as an array of which copies take any rows.

    Products need tiles of 8 rows, and copies into tiles have to start with a multiple of 8 tokens.
    A row of a tile has 128 bytes, one behind the other, in both views.
    """

    def view(rows: int) -> Any:
        transforms = plgpu.TilingTransform((rows, SIZE)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    return plgpu.RefUnion(view(8), view(1))


def _of_chunk(axes: str, x: Array) -> tuple[int, ...]:
    """The shape of the part of an operand that belongs to a chunk."""
    sizes = zip(axes, x.shape, strict=True)
    return tuple(CHUNK if a == "T" else n for a, n in sizes if a not in "BNH")


def _first(ref: Any, is_interpreted: bool) -> Array:
    """The carry of the first chunk, in the layout of products."""
    x = ref[...] if is_interpreted else plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
    return x * 1.0  # whose type does not vary over mesh axes, as that of a reference does
