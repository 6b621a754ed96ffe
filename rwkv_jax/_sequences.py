"""Sequences of different lengths one after another in a row, each with a state of its own.

`cu_seqlens` [S + 1] says where: sequence s has the tokens from `cu_seqlens[s]` to
`cu_seqlens[s + 1]`. An implementation may have stages for this. For any other the row is cut into
frames of one chunk, which start anew with each sequence and end in padding where it ends. (Longer
frames are fewer, but their padding costs more than that saves.) Each frame goes on from the state
of its sequence and replaces it; in the backward pass, from the last frame to the first, its
gradient.

Lengths that only the device knows are clamped to the tokens there are and to never decrease.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core, lax

from rwkv_jax import _packing
from rwkv_jax._chunked import CHUNK
from rwkv_jax._dispatch import Differentiated, Options, Stage

Arrays = tuple[Array, ...]

LONG = 8 * CHUNK
"""Tokens that there have to be for each sequence so that native kernels take the longest ones
first: no block of threads is then left with one at the end. Shorter ones gain less than finding out
whose turn it is costs."""


def checked(op: str, cu: Any, batch: int, tokens: int) -> Array:
    if not isinstance(cu, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: cu_seqlens is a {type(cu).__name__}; accepted is a JAX or numpy array"
        )
    if cu.dtype != jnp.int32:
        raise TypeError(f"{op}: cu_seqlens is {cu.dtype}; accepted is int32")
    if cu.ndim != 1 or cu.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens has shape {cu.shape}; accepted is [S + 1]")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens with B = {batch}; accepted is B = 1, all in one row")
    if not isinstance(cu, core.Tracer):
        _check_values(op, np.asarray(cu), tokens)
    return jnp.asarray(cu)


def _check_values(op: str, cu: np.ndarray, tokens: int) -> None:
    accepted = f"accepted are numbers from 0 to T = {tokens} that do not decrease"
    if cu[0] != 0:
        raise ValueError(f"{op}: cu_seqlens starts with {cu[0]}; {accepted}")
    if (down := np.flatnonzero(np.diff(cu) < 0)).size:
        first = down[0]
        raise ValueError(f"{op}: cu_seqlens has {cu[first + 1]} behind {cu[first]}; {accepted}")
    if cu[-1] != tokens:
        raise ValueError(f"{op}: cu_seqlens ends with {cu[-1]}; {accepted}")


def several(axes: Mapping[str, str]) -> dict[str, str]:
    """Axes of operands or results, with S initial and final states in each row."""
    of_state = re.compile("d?(initial|final)_")
    return {n: x.replace("B", "BS") if of_state.match(n) else x for n, x in axes.items()}


def differentiated(operator: Any) -> Differentiated:
    """The stages of an operator on such rows. They are those of one sequence in a row, with a state
    for each sequence and `cu_seqlens` behind the other operands."""

    def stage(name: str, of: Stage, how: Callable[..., Arrays]) -> Stage:
        return dataclasses.replace(
            of,
            name=f"{name}_sequences",
            operands={**several(of.operands), "cu_seqlens": "BZ"},
            results=several(of.results),
            otherwise=(name, functools.partial(how, operator)),
        )

    one = operator.differentiated
    return one._replace(
        forward=stage("forward", one.forward, _forward),
        backward=stage("backward", one.backward, _backward),
        reference=stage("forward", one.reference, _forward),
    )


class _Frames(NamedTuple):
    """Of rows [B, T], in the order of the sequences."""

    sequence: Array
    """Which one each frame belongs to [F, B]."""
    tokens: Array
    """Where its tokens are in the row [F, B, L]."""
    marks: Array
    place: tuple[Array, Array]
    """The frame of each token of the row, and where in it, [B, T] each."""
    there: Array
    """Whether each token is one of a sequence [B, T]."""

    def cut(self, x: Array) -> Array:
        """[B, T, ...] as [F, B, L, ...]."""
        return x[_rows(x, 1, -1, 1), self.tokens]

    def join(self, x: Array) -> Array:
        """[F, B, L, ...] as [B, T, ...], with zeros where no sequence is."""
        frame, offset = self.place
        x = x[frame, lax.broadcasted_iota(jnp.int32, frame.shape, 0), offset]
        there = self.there.reshape(*self.there.shape, *[1] * (x.ndim - 2))
        return jnp.where(there, x, jnp.zeros_like(x))


def _rows(x: Array, *shape: int) -> Array:
    return lax.iota(jnp.int32, x.shape[0]).reshape(shape)


def _find(ends: Array, count: int) -> Array:
    """How many of the ends [B, S] are at or before each number below a count [B, count]."""
    numbers = lax.iota(jnp.int32, count)
    search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
    return jax.vmap(search, in_axes=(0, None))(ends, numbers).astype(jnp.int32)


def owners(cu: Array, tokens: int) -> Array:
    """The sequence of each token of a row [T], S where it is none's."""
    sequences, cu = len(cu) - 1, _clamped(cu[None], tokens)
    owner = _find(cu[:, 1:], tokens)[0]
    return jnp.where(lax.iota(jnp.int32, tokens) < cu[0, 0], sequences, owner)


def _clamped(cu: Array, tokens: int) -> Array:
    return lax.cummax(jnp.clip(cu, 0, tokens), axis=1)


class _Layout(NamedTuple):
    """Where sequences and their frames are in a row of tokens."""

    cu: Array
    """Clamped."""
    length: int
    """Of a frame."""
    first: Array
    """The first frame of each sequence, and the number of all, [B, S + 1]."""
    owner: Array
    """The sequence of each frame, [B, F]."""
    used: Array
    """Whether there is such a frame, [B, F]: F is as many as there can be."""


def _layout(cu: Array, tokens: int) -> _Layout:
    sequences = cu.shape[1] - 1
    length = min(tokens, CHUNK)
    most = (tokens + sequences * (length - 1)) // length
    cu = _clamped(cu, tokens)
    upto = jnp.cumsum(-(-jnp.diff(cu) // length), axis=1, dtype=jnp.int32)
    owner = jnp.minimum(_find(upto, most), sequences - 1)
    used = lax.broadcasted_iota(jnp.int32, owner.shape, 1) < upto[:, -1:]
    return _Layout(cu, length, jnp.pad(upto, ((0, 0), (1, 0))), owner, used)


class Native(NamedTuple):
    """What native kernels take, for which the sequences of all rows are those of one batch [C]."""

    inputs: list[Array]
    """Those of tokens [B, T, ...], and those that all tokens share, for each sequence [C, ...]."""
    states: list[Array]
    """[C, ...]"""
    spans: Array
    """Of each sequence [C, 4]: its first token, how many there are, the first of its frames,
    counted over all rows, and its number. Of long ones [C, 8]: then the same of the one whose turn
    it is to run."""
    owners: Array
    """Of each frame [B, F] its sequence, or -1 if it is none."""


def native(inputs: Sequence[Array], states: Sequence[Array], cu: Array) -> Native:
    """Of inputs [B, ...] and states [B, S, ...]."""
    batch, tokens = max(inputs, key=jnp.ndim).shape[:2]
    cu, _, first, owner, used = _layout(cu, tokens)
    row = lax.broadcasted_iota(jnp.int32, cu[:, 1:].shape, 0)
    frames, sequences = owner.shape[1], cu.shape[1] - 1
    lengths = jnp.diff(cu)
    numbers = row * tokens + cu[:, :-1], lengths, row * frames + first[:, :-1]
    number = lax.iota(jnp.int32, batch * sequences)
    spans = jnp.stack([*(x.reshape(-1) for x in numbers), number], axis=1)
    if tokens >= LONG * sequences:
        in_turn = jnp.argsort(lengths, axis=None, descending=True)
        spans = jnp.concatenate([spans, spans[in_turn]], axis=1)
    owner = lax.broadcasted_iota(jnp.int32, owner.shape, 0) * sequences + owner
    most = max(map(jnp.ndim, inputs))
    return Native(
        [x if x.ndim == most else jnp.repeat(x, sequences, axis=0) for x in inputs],
        [x.reshape(batch * sequences, *x.shape[2:]) for x in states],
        spans,
        jnp.where(used, owner, -1),
    )


def _frames(cu: Array, tokens: int) -> _Frames:
    sequences = cu.shape[1] - 1
    cu, length, first, which, used = _layout(cu, tokens)
    most = which.shape[1]

    def of(numbers: Array, which: Array) -> Array:
        return jnp.take_along_axis(numbers, which, axis=1)

    number = lax.broadcasted_iota(jnp.int32, which.shape, 1)
    start = of(cu, which) + (number - of(first, which)) * length
    end = jnp.where(used, of(cu, which + 1), 0)
    index = start[..., None] + lax.iota(jnp.int32, length)[None, None]
    marks = jnp.where(
        index < end[..., None], jnp.uint8(_packing.GOES_ON), jnp.uint8(_packing.ABSENT)
    )

    own = _find(cu[:, 1:], tokens)
    token = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    there = (own < sequences) & (token >= cu[:, :1])
    own = jnp.minimum(own, sequences - 1)
    behind = jnp.maximum(token - of(cu, own), 0)
    frame = jnp.minimum(of(first, own) + behind // length, most - 1)
    return _Frames(
        which.T,
        jnp.moveaxis(jnp.minimum(index, tokens - 1), 1, 0),
        jnp.moveaxis(marks, 1, 0),
        (frame, behind % length),
        there,
    )


def _forward(
    operator: Any, forward: Callable[..., Arrays], options: Options, platform: str, *operands: Array
) -> Arrays:
    count = len(operator.inputs)
    inputs, states, cu = operands[:count], operands[count:-1], operands[-1]
    call = _OnFrames(operator, inputs, cu)

    def body(states: Arrays, frame: Any) -> tuple[Arrays, Any]:
        inputs, sequence, marks, _ = call.inputs(frame)
        before = _at(states, sequence)
        y, *rest = forward(options, platform, *inputs, *before, marks)
        after, saved = rest[: len(states)], rest[len(states) :]
        return _replaced(states, sequence, after), (y, tuple(saved))

    states, (y, saved) = lax.scan(body, states, call.xs())
    # [F, B, N, ...] as [B, F * N, ...].
    saved = (jnp.moveaxis(x, 0, 1) for x in saved)
    saved = (x.reshape(len(x), x.shape[1] * x.shape[2], *x.shape[3:]) for x in saved)
    return call.frames.join(y), *states, *saved


def _backward(
    operator: Any,
    backward: Callable[..., Arrays],
    options: Options,
    platform: str,
    *operands: Array,
) -> Arrays:
    count, states = len(operator.inputs), len(operator.state)
    inputs, saved, dy = operands[:count], operands[count : count + states], operands[count + states]
    dstates, cu = operands[count + states + 1 : -1], operands[-1]
    call = _OnFrames(operator, inputs, cu)
    frames = len(call.frames.sequence)
    saved = (x.reshape(len(x), frames, x.shape[1] // frames, *x.shape[2:]) for x in saved)
    more = call.frames.cut(dy), *(jnp.moveaxis(x, 1, 0) for x in saved)

    def body(sums: tuple[Arrays, Arrays], frame: Any) -> tuple[tuple[Arrays, Arrays], Arrays]:
        dshared, dstates = sums
        inputs, sequence, marks, (dy, *saved) = call.inputs(frame)
        after = _at(dstates, sequence)
        found = backward(options, platform, *inputs, *saved, dy, *after, marks)
        dtimed, more = call.split(found[:count])
        dshared = tuple(map(jnp.add, dshared, more))
        return (dshared, _replaced(dstates, sequence, found[count:])), dtimed

    none = tuple(map(jnp.zeros_like, call.shared))
    (dshared, dstates), dtimed = lax.scan(body, (none, dstates), call.xs(*more), reverse=True)
    return *call.merged(tuple(map(call.frames.join, dtimed)), dshared), *dstates


class _OnFrames:
    """The inputs of an operator, those of the tokens cut into frames, and the scan over them."""

    def __init__(self, operator: Any, inputs: Sequence[Array], cu: Array) -> None:
        self._timed = ["T" in axes for axes in operator.inputs.values()]
        timed, self.shared = self.split(inputs)
        self.frames = _frames(cu, timed[0].shape[1])
        self._cut = tuple(map(self.frames.cut, timed))

    def xs(self, *more: Array) -> Any:
        return self._cut, self.frames.sequence, self.frames.marks, more

    def inputs(self, frame: Any) -> Any:
        """The inputs of a frame, and what is next to them."""
        timed, *rest = frame
        return self.merged(timed, self.shared), *rest

    def split(self, inputs: Sequence[Array]) -> tuple[Arrays, Arrays]:
        """Those of tokens, and the others."""
        pairs = list(zip(inputs, self._timed, strict=True))
        return tuple(x for x, timed in pairs if timed), tuple(x for x, timed in pairs if not timed)

    def merged(self, timed: Sequence[Array], shared: Sequence[Array]) -> Arrays:
        one, other = iter(timed), iter(shared)
        return tuple(next(one if timed else other) for timed in self._timed)


def _at(states: Arrays, sequence: Array) -> Arrays:
    """Of states [B, S, ...] those of a sequence in each row [B]."""
    return tuple(x[_rows(x, -1), sequence] for x in states)


def _replaced(states: Arrays, sequence: Array, after: Sequence[Array]) -> Arrays:
    return tuple(
        x.at[_rows(x, -1), sequence].set(new) for x, new in zip(states, after, strict=True)
    )
