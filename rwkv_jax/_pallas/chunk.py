"""What the experimental kernels for Hopper GPUs can do with a chunk of a head.

A chunk has CHUNK tokens, and all of its arrays are 64 x 64. What is being computed is in registers,
in float32. Parameters [B, H, K] stay in global memory, in float32. All else is in shared memory:

    operands   one array of 16 bits for each stage; while a chunk is computed, later ones are copied
    scratch    one array each
    segments   where rows have several segments, the SEGMENTS of each stage

Products and copies see what was put into shared memory before `Chunk.commit`.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from rwkv_jax._operator.call import CHUNK

plgpu: Any = mosaic_gpu
"""Versions of JAX differ in what it has, so that no type checker knows its names."""

SIZE = CHUNK
"""Rows and columns of all arrays of a chunk."""

SQUARE = (SIZE, SIZE)

SEGMENTS = "segments"
"""The operand [B, N, 3, CHUNK] of int32 for rows of several segments, with three numbers for each
token of a chunk:

    FIRST    the place in the chunk where the segment of the token starts, negative if it starts in
             an earlier chunk
    NEXT     the place in the chunk where the next segment starts, at least CHUNK if none does
    THERE    how many tokens of the chunk are there, or 0 if this one is not
"""

FIRST, NEXT, THERE = range(3)

ROWS = 8, 1
"""Rows that are copied at once of a chunk that is not whole, first as often as 8 fit."""

LOG2E = 1.4426950408889634
"""Exponents are to the base 2 in these kernels, for which GPUs have an instruction."""


@dataclasses.dataclass(frozen=True)
class Shared:
    """An array in shared memory.

    `place` computes its place among the arrays of `ref`, at each use again and so that the compiler
    cannot know the result. It would otherwise compute the addresses of all arrays before the walk
    and keep them in registers throughout. `rows` is `ref` as copies see it.
    """

    ref: Any
    rows: Any
    place: Callable[[], Any]
    is_transposed: bool = False

    @property
    def T(self) -> "Shared":
        """The transpose, as an operand of products."""
        return dataclasses.replace(self, is_transposed=not self.is_transposed)

    def here(self) -> Any:
        return self.ref.at[self.place()]

    def operand(self) -> Any:
        return self.here().transpose((1, 0)) if self.is_transposed else self.here()

    def value(self) -> Array:
        return self.here()[...].T if self.is_transposed else self.here()[...]

    def read(self) -> Array:
        return self.here()[...].astype(jnp.float32)

    def put(self, x: Array) -> None:
        self.here()[...] = x.astype(self.ref.dtype)


def chosen(n: Any, *arrays: Shared) -> Shared:
    """The array with this number, of some that share a reference."""

    def place() -> Any:
        found, *others = (x.place() for x in arrays)
        for number, other in enumerate(others, start=1):
            found = jnp.where(n == number, other, found)
        return found

    return dataclasses.replace(arrays[0], place=place)


MaskFn: TypeAlias = Callable[[Array, Array], Array]
"""Which elements to keep, by their rows and columns."""

READS, WRITES = "reads", "writes"
"""The tokens that read the state before the chunk, and those that write the state after it."""

Pair: TypeAlias = tuple[Array | Shared, Shared] | tuple[Array | Shared, Shared, str]
"""Matrices x and y of a product. With READS or WRITES it counts only in the rows of these tokens,
which are the rows of x."""

Terms: TypeAlias = Sequence[Pair | Array]
"""A sum of products and of at most one array."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk and what can be done with it. `chunk["r"]` is the operand or scratch of this name.

    decay: the form of decay.
    parameters: the part of each parameter that belongs to the head.
    results: where the chunk is in each result, and whether its axis of rows are the tokens.
    elements: the row and the column of each element.
    count: how many tokens of the chunk are of its sequence, at least SIZE if all are, or None if
      rows have no sequences.
    """

    decay: str
    _shared: Mapping[str, Shared]
    _parameters: Mapping[str, Any]
    _results: Mapping[str, tuple[Any, bool]]
    _elements: tuple[Array, Array]
    _unknown_zero: Callable[[], Any]
    _count: Any
    _is_interpreted: bool

    def __getitem__(self, name: str) -> Shared:
        return self._shared[name]

    def _segments(self, kind: int) -> Array:
        """One of the SEGMENTS of the tokens, in all columns."""
        ref = self[SEGMENTS].here().at[kind]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return in_all_columns(ref[...] if self._is_interpreted else plgpu.load(ref, layout=layout))

    def _segments_of(self, kind: int, token: int) -> Array:
        return self[SEGMENTS].here().at[kind][token]

    @property
    def _start_of_last(self) -> Array:
        """The FIRST of the last token, negative if no segment starts in the chunk."""
        return self._segments_of(FIRST, SIZE - 1)

    def _are(self, tokens: str) -> Array:
        """Whether tokens, the rows of a matrix, are among READS or WRITES."""
        if tokens == READS:
            return self._segments(FIRST) < 0
        return self._segments(NEXT) >= SIZE

    def of(self, tokens: str, x: Array) -> Array:
        """`x` with zeros for tokens that are not among READS or WRITES."""
        return x if SEGMENTS not in self._shared else jnp.where(self._are(tokens), x, 0.0)

    def put_of(self, tokens: str, *xs: Shared) -> None:
        """Put zeros into each x for tokens that are not among READS or WRITES."""
        if SEGMENTS not in self._shared:
            return

        @pl.when(self._start_of_last >= 0)
        def _():
            for x in xs:
                x.put(jnp.where(self._are(tokens), x.read(), 0.0))

    def stays(self, x: Array) -> Array:
        """`x`, or zeros if the state after the chunk does not depend on the state before it."""
        if SEGMENTS not in self._shared:
            return x
        return jnp.where(lax.broadcast(self._start_of_last, SQUARE) < 0, x, 0.0)

    def there(self, x: Array) -> Array:
        """`x` with zeros for tokens that are not there."""
        return x if SEGMENTS not in self._shared else jnp.where(self._segments(THERE) > 0, x, 0.0)

    def put_identity_tokens(self, numbers: Mapping[str, float]) -> None:
        """Put these numbers in place of the operands of tokens that are not there."""
        count = self._segments_of(THERE, 0) if SEGMENTS in self._shared else self._count
        if count is None:
            return

        def is_there() -> Array:
            row, _ = self.places()
            return self._segments(THERE) > 0 if SEGMENTS in self._shared else row < count

        def put(n: Any, _: None) -> None:
            x, number = chosen(n, *(self[name] for name in numbers)), 0.0
            for place, other in enumerate(numbers.values()):
                number = jnp.where(n == place, other, number) if other else number
            x.put(jnp.where(is_there(), x.read(), number))

        @pl.when(count < SIZE)
        def _():
            # The compiler unrolls no loop whose number of steps it does not know.
            lax.fori_loop(0, len(numbers) + self._unknown_zero(), put, None)

    def parameter(self, name: str) -> Array:
        """A number for each column."""
        ref = self._parameters[name]
        if self._is_interpreted:
            return ref[...]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def places(self) -> tuple[Array, Array]:
        """The row and the column of each element. The compiler would keep masks that it knows in
        registers throughout the walk."""
        zero, (rows, columns) = self._unknown_zero(), self._elements
        return rows + zero, columns + zero

    def kept(self, mask: MaskFn, x: Array | float) -> Array:
        """`x` with zeros where the mask is not."""
        return jnp.where(mask(*self.places()), x, 0.0)

    def related(self, part: "Triangle | None", x: Array) -> Array:
        """`x` with zeros outside a part of the matrix, and between tokens of different segments."""
        if SEGMENTS not in self._shared:
            return x if part is None else self.kept(part, x)
        row, column = self.places()
        start = self._segments(FIRST) if part is None or not part.is_upper else row + part.shift
        end = self._segments(NEXT) if part is None or part.is_upper else row + part.shift
        # Of unsigned numbers, for which one comparison of each element is enough.
        is_kept = (column - start).astype(jnp.uint32) < (end - start).astype(jnp.uint32)
        return jnp.where(is_kept, x, 0.0)

    def product(self, *terms: Pair | Array) -> Array:
        (result,) = self.products(terms)
        return result

    def products(self, *sums: Terms) -> list[Array]:
        """The sum of x @ y over the pairs (x, y) of each element, and of its array, all computed at
        the same time."""
        return self._products(sums if SEGMENTS not in self._shared else self._masked(sums))

    def _masked(self, sums: Sequence[Terms]) -> Sequence[Terms]:
        """The sums with an array in place of each pair that counts for READS or WRITES only."""

        def tokens_of(x: Pair | Array) -> str | None:
            return x[2] if isinstance(x, tuple) and len(x) == 3 else None

        found = iter(self._products([[x] for terms in sums for x in terms if tokens_of(x)]))
        return [
            [self.of(tokens, next(found)) if (tokens := tokens_of(x)) else x for x in terms]
            for terms in sums
        ]

    def _products(self, sums: Sequence[Terms]) -> list[Array]:
        if not sums:
            return []
        arrays = [[x for x in terms if not isinstance(x, tuple)] for terms in sums]
        starts = [sum(x[1:], x[0]) if x else jnp.zeros(SQUARE, jnp.float32) for x in arrays]
        pairs = [[x for x in terms if isinstance(x, tuple)] for terms in sums]
        if self._is_interpreted:  # The interpreter has no products with x in registers.
            return [
                sum((_dot(x, y) for x, y, *_ in own), start)
                for start, own in zip(starts, pairs, strict=True)
            ]

        def add(accumulators: Any) -> None:
            for accumulator, own in zip(accumulators, pairs, strict=True):
                for x, y, *_ in own:
                    x = x.operand() if isinstance(x, Shared) else x
                    plgpu.wgmma(accumulator, x, y.operand())

        return [pinned(x) for x in pl.run_state(add)([plgpu.ACC.init(x) for x in starts])]

    def commit(self) -> None:
        """Let products and copies see what was put into shared memory."""
        plgpu.commit_smem()

    def write(self, **arrays: Shared) -> None:
        """Begin to copy arrays to the results of these names, those that the call has."""
        count, by_rows = self._count, []
        for name in (name for name in arrays if name in self._results):
            x, (to, of_tokens) = arrays[name], self._results[name]
            if count is None or not of_tokens:
                plgpu.copy_smem_to_gmem(x.here(), to)
            else:
                by_rows.append((x.rows.at[x.place()], to))
        if count is None or not by_rows:
            return

        @pl.when(count >= SIZE)
        def _():
            for x, to in by_rows:
                plgpu.copy_smem_to_gmem(x, to)

        @pl.when(count < SIZE)
        def _():
            copy_rows(by_rows, count, self._unknown_zero)

    def write_row(self, name: str, x: Array) -> None:
        """Write a number for each column to a result [B, N, H, K]."""
        to, _ = self._results[name]
        to[...] = x

    def wait(self) -> None:
        """Wait until all that is being copied to results may be overwritten."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def copy_rows(
    pairs: Collection[tuple[Any, Any]], count: Any, unknown_zero: Callable[[], Any]
) -> None:
    """Begin to copy the first rows of x to those of y, for each pair of x and y.

    The compiler unrolls no loop whose step it does not know, and so the instructions are few.
    """
    done = jnp.int32(0)
    for rows in ROWS:

        def some(done: Any, rows: int = rows) -> Any:
            for x, y in pairs:
                plgpu.copy_smem_to_gmem(x.at[pl.ds(done, rows)], y.at[pl.ds(done, rows)])
            return done + (rows + unknown_zero())

        done = lax.while_loop(lambda done, rows=rows: done + rows <= count, some, done)


def places_of_elements(is_interpreted: bool) -> tuple[Array, Array]:
    """The row and the column of each element."""

    def numbers(axis: int) -> Array:
        if is_interpreted:
            return jnp.arange(SIZE)
        layout = plgpu.Layout.WGMMA.reduce(axis)
        return plgpu.broadcasted_iota(jnp.int32, (SIZE,), 0, layout=layout)

    return in_all_columns(numbers(1)), in_all_rows(numbers(0))


def _dot(x: Array | Shared, y: Shared) -> Array:
    x = x.value() if isinstance(x, Shared) else x
    return jnp.dot(x, y.value(), preferred_element_type=jnp.float32)


def pinned(x: Array) -> Array:
    """`x`, which the compiler has to compute here. It would otherwise delay parts of the
    computation, for which it needs more registers. It would also begin what uses a product before
    the wait for all products of the group, which then run one by one."""
    return lax.optimization_barrier(x)


def in_all_rows(x: Array) -> Array:
    return lax.broadcast_in_dim(x, SQUARE, [1])


def in_all_columns(x: Array) -> Array:
    return lax.broadcast_in_dim(x, SQUARE, [0])


def sum_in_all_rows(x: Shared, unit: float) -> list[Pair]:
    """The product that gives the sum over the rows of x, times `unit`, in all rows. A sum over rows
    takes more instructions."""
    return [(jnp.full(SQUARE, unit, x.ref.dtype), x)]


class Triangle(NamedTuple):
    """The part of a matrix on the one side of a diagonal, or else on the other: in each row, the
    columns from row + shift on, or those before."""

    is_upper: bool
    shift: Any

    def __call__(self, row: Array, column: Array) -> Array:
        return column >= row + self.shift if self.is_upper else column < row + self.shift


below, not_above = Triangle(False, 0), Triangle(False, 1)
not_below, above = Triangle(True, 0), Triangle(True, 1)


def inverse(chunk: Chunk, x: Array, factor: Shared, scratch: Shared) -> Array:
    """(I - x)^-1 for an x below the diagonal, for pieces of two tokens, of four, and so on, as
    `rwkv_jax._portable.inverses.by_whole_matrices` does it.

    The levels are a loop, since a kernel should be smaller than the cache of instructions. They
    overwrite `factor` and `scratch`.
    """
    factor.put(x)
    i, j = chunk.places()
    result = jnp.where(i == j, 1.0, jnp.where((i ^ j) == 1, x, 0.0))

    def level(n: Any, result: Array) -> Array:
        half = lax.shift_left(jnp.int32(2), jnp.int32(n))

        def of_halves(i: Array, j: Array) -> Array:
            differ = i ^ j
            return (half <= differ) & (differ < 2 * half)

        whole = result.astype(jnp.bfloat16)
        scratch.put(whole)
        chunk.commit()
        # `whole` is zero between pieces, so that no other elements of x are in what is kept.
        between = pinned(chunk.kept(of_halves, chunk.product((whole, factor)))).astype(jnp.bfloat16)
        return chunk.product(result, (between, scratch))

    return lax.fori_loop(0, SIZE.bit_length() - 2, level, result)
