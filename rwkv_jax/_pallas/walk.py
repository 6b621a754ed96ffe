"""The passes of any operator whose tiles do to a state what PREPARED says.

What a tile does to the state before it follows from the tile's tokens alone, so it is prepared for
all tiles side by side. Then a walk along the sequence, with the state on the chip, takes few
products for each tile. The backward pass walks from the end with the gradient of the state. With
these gradients, and with the states before all tiles, computed again from the saved states, the
gradients of all tiles are computed side by side.

A tile may have tokens of several segments: what is prepared has zeros between them. A tile has
tokens of one sequence of `cu_seqlens` alone (see `rwkv_jax._pallas.sequences`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from rwkv_jax._operator.call import (
    CHUNK,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Options,
    Result,
    Sequences,
)
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._pallas import lowering, sequences
from rwkv_jax._pallas.algebra import TILE, TILES, Product, Tokens, product
from rwkv_jax._pallas.lowering import Carry, Operands, Refs, Results, Span

BEGIN = "begin"
"""The operand [B, J, 1] that says where in a row the tokens of tiles begin."""

VALUES, DY = "values", "dy"
"""The input that `y` is made of, and the cotangent of `y`, as walks know them. Walks read both as
they were given, with zeros in place of padding; kernels clear all other inputs themselves, which
would cost a walk as much as the rest of its work. Those of sequences are copied into tiles."""

COPIED = "copied_"
"""What the names of these copies begin with."""

PREPARED = {
    "stay": "BJH1K",
    "reads": "BTHK",
    "fresh": "BTHV",
    "keys": "BTHK",
    "solved": "BTHK",
    "own": "BTHV",
    "kept": "BTHK",
}
"""What is prepared for a tile, and its axes. With the state S before the tile and its values X:

    Y = reads S^T + fresh
    S_after = S diag(stay) + X^T keys + U^T kept,    U = solved S^T + own

`solved`, `own` and `kept` are of operators whose writes depend on the state."""

AFTER = ("stay", VALUES, "keys", "solved", "own", "kept")
"""What the state after a tile is computed from."""

BEFORE = ("stay", DY, "reads", "solved", "kept")
"""What the gradient of the state before a tile is computed from."""


class Rows(NamedTuple):
    """Some value channels of a tile. R is their number.

    values: of the tokens [T, R].
    state: before the tile [R, K].
    dy: the cotangent of `y` [T, R].
    dstate: the gradient of the state after the tile [R, K].
    """

    values: Array
    state: Array
    dy: Array
    dstate: Array


PrepareFn: TypeAlias = Callable[[Product, str, Arrays, Tokens], Arrays]
"""`prepare(product, decay, inputs, tokens)`: what is prepared for a tile, from inputs [T, ...], or
[1, K] where all tokens share them, which are 0 for tokens that are not there. What no kernel reads
is not computed."""

GradientFn: TypeAlias = Callable[
    [Product, str, Arrays, Tokens, Iterable[Rows]], tuple[Arrays, list[Array]]
]
"""`gradient(product, decay, inputs, tokens, rows)`: the gradients of the inputs of a tile, and
of its values [T, R] for each group of rows. The values come with the rows, not with the inputs."""


@dataclass(frozen=True, eq=False)
class Operator:
    """What the kernels of an operator consist of."""

    signature: Signature
    prepare: PrepareFn
    gradient: GradientFn


def forward(operator: Operator, options: Options, platform: str, operands: Forward) -> Result:
    tiles = _Tiles(operator, options, platform, operands)
    (part,) = operands.state
    given = tiles.given(operands.inputs)
    read = tiles.prepared(given, ("reads", "fresh", *AFTER))

    def body(refs: Refs, span: Span, carry: Carry) -> Carry:
        def one(i: Any, state: Array) -> Array:
            if options.save:

                @pl.when(lax.rem(i, TILES) == 0)
                def _():
                    tiles.put(refs, results, i, states=state)

            here = tiles.at(refs, read, i)
            y = tiles.product(state, here["reads"], (1, 1)) + here["fresh"].T.astype(jnp.float32)
            tiles.put(refs, results, i, y=y.T)
            return _after(tiles.product, here, state)

        return (lax.fori_loop(span.first, span.end, one, *carry),)

    signature = operator.signature
    results: Results = {"y": (signature.inputs[signature.y], given[VALUES][1].dtype)}
    if options.save:
        results["states"] = "BNHVK", signature.states_dtype(options, operands.inputs)
    carried: Operands = {"state": (signature.state[part], operands.state[part])}
    found = tiles.walk(body, read, carried, results, lowering.FROM_START)
    states = {part: found["states"]} if options.save else {}
    return Result(tiles.join(found["y"]), {part: found["state"]}, states)


def backward(operator: Operator, options: Options, platform: str, operands: Backward) -> Gradients:
    tiles = _Tiles(operator, options, platform, operands)
    (part,) = operands.states
    states, dstate = operands.states[part], operands.dstate[part]
    given = tiles.given(operands.inputs, operands.dy)
    prepared = tiles.prepared(given, {*AFTER, *BEFORE})
    read: Operands = _only(prepared, BEFORE)
    results: Results = {"dstates": ("BJHVK", states.dtype)}

    def body(refs: Refs, span: Span, carry: Carry) -> Carry:
        def one(n: Any, dstate: Array) -> Array:
            i = span.end - 1 - n
            tiles.put(refs, results, i, dstates=dstate)
            return _before(tiles.product, tiles.at(refs, read, i), dstate)

        return (lax.fori_loop(0, span.end - span.first, one, *carry),)

    carried: Operands = {"dstate": (operator.signature.state[part], dstate)}
    found = tiles.walk(body, read, carried, results, lowering.FROM_END)
    given |= _only(prepared, (VALUES, DY))
    given["dstates"] = "BJHVK", found["dstates"]
    given["states"] = "BJHVK", _states(tiles, _only(prepared, AFTER), states)
    gradients = tiles.gradients(given)
    shaped = {name: gradients[name].reshape(x.shape) for name, x in operands.inputs.items()}
    return Gradients(shaped, {part: found["dstate"]})


def _only(operands: Operands, names: Iterable[str]) -> Operands:
    return {name: operands[name] for name in names if name in operands}


def _after(product: Product, here: Arrays, state: Array) -> Array:
    result = state * here["stay"] + product(here[VALUES], here["keys"], (0, 0))
    if "solved" in here:
        u = product(state, here["solved"], (1, 1)) + here["own"].T.astype(jnp.float32)
        result += product(u, here["kept"])
    return result


def _before(product: Product, here: Arrays, dstate: Array) -> Array:
    """The gradient of the state before a tile."""
    result = dstate * here["stay"] + product(here[DY], here["reads"], (0, 0))
    if "solved" in here:
        result += product(product(dstate, here["kept"], (1, 1)), here["solved"])
    return result


def _states(tiles: "_Tiles", prepared: Operands, states: Array) -> Array:
    """The states before each tile, from the states before each chunk."""
    results: Results = {"result": ("BJHVK", states.dtype)}

    def body(refs: Refs, span: Span, carry: Carry) -> Carry:
        def one(i: Any, state: Array) -> Array:
            tiles.put(refs, results, i, result=state)
            return _after(tiles.product, tiles.at(refs, prepared, i), state)

        lax.fori_loop(span.first, span.end, one, refs["states"][0].astype(jnp.float32))
        return ()

    operands = prepared | {"states": ("BNHVK", states)}
    return tiles.walk(body, operands, {}, results, lowering.SIDE_BY_SIDE)["result"]


class _Tiles:
    """The tiles of a call, and the kernels that run on them."""

    def __init__(
        self, operator: Operator, options: Options, platform: str, operands: Forward | Backward
    ) -> None:
        inputs, packing = operands.inputs, operands.packing
        self._operator, self._options, self._platform = operator, options, platform
        self._sizes = operator.signature.sizes(inputs)
        self._marks = packing.marks if isinstance(packing, Marks) else None
        self._layout = None
        if isinstance(packing, Sequences):
            self._layout = sequences.layout(packing.offsets, self._sizes["T"])
        self.product = product(options, inputs[operator.signature.y].dtype)
        size = max(self._sizes["K"], self._sizes["V"])
        exact = self.product.dtype == jnp.float32
        walks = lowering.FLOAT32_WALKS if exact else lowering.WALKS
        self._alone, self._walk = lowering.ALONE[size], walks[size]

    def given(self, inputs: Mapping[str, Array], dy: Array | None = None) -> Operands:
        """The inputs as operands of kernels, `dy` where it is given, and what `here` reads of the
        packing. Blocks have two axes, so an input that all tokens share gets one more."""
        signature, marks, layout = self._operator.signature, self._marks, self._layout
        operands: Operands = {}
        for name in signature.inputs:
            axes, x = signature.rows[name], inputs[name]
            if name == signature.y:
                operands[VALUES] = axes, segments.cleared(marks, [x])[0]
            else:
                operands[name] = (axes, x) if "T" in axes else ("BH1K", x[:, :, None])
        if dy is not None:
            operands[DY] = signature.inputs[signature.y], segments.cleared(marks, [dy])[0]
        if layout is not None:
            operands = {n: (axes.replace("T", "W"), x) for n, (axes, x) in operands.items()}
            operands[BEGIN] = "BJ1", layout.begin[:, :, None]
            operands["tokens"] = "BT1", layout.there[:, :, None]
        if marks is not None:
            operands["tokens"] = "BT1", _numbered(marks)[:, :, None]
        return operands

    def join(self, x: Array) -> Array:
        """The tokens of the rows, from those of all tiles."""
        return x if self._layout is None else self._layout.join(x)

    def at(self, refs: Refs, operands: Operands, i: Any) -> Arrays:
        """The arrays of tile `i` of a kernel."""
        begin = refs[BEGIN][i, 0] if BEGIN in operands else None
        return {
            name: refs[name][_place(axes, i, begin=begin)]
            for name, (axes, _) in operands.items()
            if name != BEGIN
        }

    def put(self, refs: Refs, results: Results, i: Any, **arrays: Array) -> None:
        """Write results of tile `i` of a kernel, or of its chunk."""
        for name, x in arrays.items():
            refs[name][_place(results[name][0], i)] = x.astype(refs[name].dtype)

    def here(self, refs: Refs, operands: Operands, number: Any) -> tuple[Arrays, Tokens]:
        """The arrays of the only tile of a kernel, which has this number in the sequence, with
        zeros for tokens that are not there, and which tokens are there."""
        arrays = self.at(refs, operands, 0)
        if "tokens" in arrays:
            numbers = arrays.pop("tokens")
            there = numbers > 0
            for name in arrays:
                axes = operands[name][0]
                if "W" in axes or ("T" in axes and name not in (VALUES, DY)):
                    arrays[name] = jnp.where(there, arrays[name], jnp.zeros_like(arrays[name]))
            if self._layout is not None:
                return arrays, Tokens(there)
            return arrays, Tokens(there, jnp.maximum(jnp.abs(numbers), 1) - 1)
        if self._sizes["T"] % CHUNK == 0:
            return arrays, Tokens()
        place = lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        return arrays, Tokens(number * TILE + place < self._sizes["T"])

    def prepared(self, operands: Operands, names: Collection[str]) -> Operands:
        """What walks read: what is prepared, as far as it is named, the values, and `dy` if it is
        there."""
        copied = _only(operands, () if self._layout is None else (VALUES, DY))
        inputs = {name: x for name, x in operands.items() if name != DY} | copied
        tile = {n: jax.ShapeDtypeStruct(_of_tile(*x), x[1].dtype) for n, x in inputs.items()}
        found = jax.eval_shape(lambda tile: self._prepare(tile, Tokens()), tile)
        results: Results = {n: (PREPARED[n], self.product.dtype) for n in found if n in names}
        results["stay"] = PREPARED["stay"], jnp.float32
        results |= {COPIED + n: ("BTHV", x.dtype) for n, (_, x) in copied.items()}

        def body(refs: Refs, span: Span, carry: Carry) -> Carry:
            here, tokens = self.here(refs, inputs, span.number)
            self.put(refs, results, 0, **{COPIED + n: here[n] for n in copied})
            found = self._prepare(here, tokens)
            self.put(refs, results, 0, **{n: found[n] for n in results if n in found})
            return ()

        made = self._each(body, inputs, results)
        prepared = {n.removeprefix(COPIED): (results[n][0], x) for n, x in made.items()}
        return _only(operands, (VALUES, DY)) | prepared

    def _prepare(self, arrays: Arrays, tokens: Tokens) -> Arrays:
        inputs = {self._operator.signature.y if n == VALUES else n: x for n, x in arrays.items()}
        return self._operator.prepare(self.product, self._options.decay, inputs, tokens)

    def gradients(self, operands: Operands) -> Arrays:
        """The gradients of the inputs."""
        signature = self._operator.signature
        of_tokens = {n: operands[VALUES if n == signature.y else n] for n in signature.per_token}
        results: Results = {
            f"d{n}": (signature.rows[n], x.dtype) for n, (_, x) in of_tokens.items()
        }
        results |= {f"d{n}": ("BJH1K", jnp.float32) for n in signature.shared}
        by_rows = {VALUES, DY, "states", "dstates"}
        inputs = {n: x for n, x in operands.items() if n not in by_rows}

        def body(refs: Refs, span: Span, carry: Carry) -> Carry:
            here, tokens = self.here(refs, inputs, span.number)
            found, dvalues = self._operator.gradient(
                self.product, self._options.decay, here, tokens, self._rows(refs, operands)
            )
            self.put(refs, results, 0, **{f"d{name}": x for name, x in found.items()})
            axes, ref = results[f"d{signature.y}"][0], refs[f"d{signature.y}"]
            for rows, x in zip(self._groups(), dvalues, strict=True):
                ref[_place(axes, 0, rows)] = x.astype(ref.dtype)
            return ()

        found = self._each(body, operands, results)

        def of_row(name: str) -> Array:
            x = found[f"d{name}"]
            if name in signature.per_token:
                return self.join(x)
            if self._layout is not None:
                used = self._layout.begin >= 0
                x = jnp.where(jnp.expand_dims(used, range(2, x.ndim)), x, 0.0)
            return jnp.sum(x, 1)

        return {name: of_row(name) for name in signature.inputs}

    def _groups(self) -> list[Any]:
        """The rows of a state that are in products at the same time, None for all."""
        sizes = self._sizes
        if lowering.is_tpu(self._platform):
            return [None]
        rows = lowering.rows_at_once(sizes["K"], sizes["V"], self.product.dtype)
        if rows == sizes["V"]:
            return [None]
        return [pl.ds(start, rows) for start in range(0, sizes["V"], rows)]

    def _rows(self, refs: Refs, operands: Operands) -> Iterator[Rows]:
        """The rows of the only tile of a kernel, read when they are asked for."""
        for rows in self._groups():
            values, state, dy, dstate = (
                refs[name][_place(operands[name][0], 0, rows)]
                for name in (VALUES, "states", DY, "dstates")
            )
            yield Rows(values, state.astype(jnp.float32), dy, dstate.astype(jnp.float32))

    def _each(self, body: lowering.Body, operands: Operands, results: Results) -> Arrays:
        """One tile for each program. Where no tile is, nothing is computed or written."""

        def of_tile(refs: Refs, span: Span, carry: Carry) -> Carry:
            if BEGIN not in refs:
                return body(refs, span, carry)

            @pl.when(refs[BEGIN][0, 0] >= 0)
            def _():
                body(refs, span, carry)

            return ()

        return lowering.run(
            *(of_tile, self._platform, operands, {}, results),
            rows=max(lowering.HEAD_SIZES),
            tuning=self._alone,
            order=lowering.SIDE_BY_SIDE,
            tokens_per_step=TILE,
        )

    def walk(
        self,
        body: lowering.Body,
        operands: Operands,
        carried: Operands,
        results: Results,
        order: str,
    ) -> Arrays:
        if self._layout is not None:
            operands = operands | self._layout.spans(of_chunks=order == lowering.SIDE_BY_SIDE)
            carried = {n: (axes.replace("B", "BS"), x) for n, (axes, x) in carried.items()}
        return lowering.run(
            *(body, self._platform, operands, carried, results),
            rows=lowering.WALKED_ROWS,
            tuning=self._walk,
            order=order,
        )


def _numbered(marks: Array) -> Array:
    """The segment of each token, counted from 1 in each tile, and negative for tokens that are not
    there; 0 is what arrays are filled up with."""
    tokens = marks.shape[1]
    whole = jnp.pad(marks, ((0, 0), (0, -tokens % TILE)))
    number = 1 + segments.numbers(whole.reshape(-1, TILE)).reshape(whole.shape)[:, :tokens]
    return jnp.where(marks == segments.PADDING, -number, number)


def _place(axes: str, i: Any, rows: Any = None, *, begin: Any = None) -> Any:
    """Where tile `i` of a kernel is in an array with these axes, or some of its rows. `begin`
    is where its tokens are in a whole row."""
    of_chunk = lax.div(i, TILES) if "N" in axes else 0
    where = {"T": pl.ds(i * TILE, TILE), "J": i, "N": of_chunk}
    if begin is not None:
        where["W"] = pl.ds(begin, TILE)
    place = next((where[a] for a in axes if a in where), ...)
    return place if rows is None else (place, rows)


def _of_tile(axes: str, x: Array) -> tuple[int, ...]:
    sizes = dict(zip(axes, x.shape, strict=True)) | {"T": TILE, "W": TILE}
    return tuple(sizes[a] for a in axes if a not in "BH")
