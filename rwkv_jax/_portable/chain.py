"""An implementation in plain `jax.numpy` of any operator with one state [V, K] for each head.

What a link of some tokens does to the state S before it, from the parts that an operator makes of
its tokens side by side. Row i of U is what token i asks of the state before it:

    U = asks S^T + u_of_u U + u_of_v V
    Y = reads S^T + y_of_u U + y_of_v V
    S_after = S diag(stay) + U^T kept + V^T keys

(`asks`, `kept` and the matrices with u in their name are of operators whose writes depend on the
state.) With the triangular matrix u_of_u solved, only two products a link go along the chain of
states:

    U = solved S^T + own             solved = (I - u_of_u)^-1 asks,  own = (I - u_of_u)^-1 u_of_v V
    S_after = S diag(stay) + U^T kept + added                        added = V^T keys

All else is done for all links of a slab at once, in few, large products. The backward pass makes
the parts of each slab again, from the last to the first. The states before its links follow from
the saved ones. The cotangents of the states after its links, and of U, come from a chain that
starts at the end. With all of these fixed, the three equations at the top are linear in the parts.
So the gradients of the parts are products of two factors each, which needs no derivative of the
inverse.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Operands,
    Options,
    Packing,
    Result,
    Sequences,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import by_chunk, segments
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Einsum, Tokens
from rwkv_jax._portable.slabs import ELSEWHERE, ON_CPU, Sizes, Slabs, length_of_chunks
from rwkv_jax._portable.token_by_token import TokenByToken

PartsFn: TypeAlias = Callable[[Einsum, str, Arrays, Tokens], Arrays]
"""`parts(einsum, decay, inputs, tokens)`: the parts of links by the names above: `stay` [..., K],
matrices of pairs of tokens [..., T, T], and the rest [..., T, K]. The inputs are in float32, those
of tokens [..., T, K], with zeros for tokens that are not there, and parameters [..., 1, K]."""


_ChunkFn: TypeAlias = Callable[[Array, Arrays], tuple[Array, Any]]
_Sums: TypeAlias = tuple[Array, Arrays, Arrays]


class Chain(Implementation):
    """Runs everywhere, for any sizes. One token is computed as `reference` does it."""

    takes_sequences = True

    def __init__(self, signature: Signature, parts: PartsFn, reference: TokenByToken) -> None:
        self._signature, self._parts_of, self._reference = signature, parts, reference

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._reference.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._on_any_platform(functools.partial(self._forward, options, operands), operands)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return self._on_any_platform(functools.partial(self._backward, options, operands), operands)

    def _on_any_platform(self, compute: Callable[["_Call"], Any], operands: Operands) -> Any:
        """A pass with slabs of the sizes that suit the platform that it is lowered for."""
        on_cpu, elsewhere = (
            _Call(self._signature, sizes, operands.inputs, operands.packing)
            for sizes in (ON_CPU, ELSEWHERE)
        )
        if on_cpu.slabs.count == elsewhere.slabs.count:
            return compute(elsewhere)
        return lax.platform_dependent(
            cpu=lambda: compute(on_cpu), default=lambda: compute(elsewhere)
        )

    def _forward(self, options: Options, operands: Forward, call: "_Call") -> Result:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.state
        state, values = operands.state[part], operands.inputs[signature.y]
        save_as = signature.states_dtype(options, operands.inputs)
        slabs = call.slabs

        def slab(number: Any, carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            state, room = carry
            timed, shared, tokens = call.inputs(number)
            v, parts = self._parts(options, tokens, timed, shared)
            solved, _ = _solved(einsum, parts, v)
            solved = _with_reads(einsum, parts, solved, v)
            state, states, asked = _along(einsum, solved, state, call.sequence(number))
            y = _read(einsum, parts, asked).astype(values.dtype)
            room = room | {"y": slabs.put(number, room["y"], y)}
            if options.save:
                saved = states.astype(save_as)
                room |= {"states": slabs.put_chunks(number, room["states"], saved)}
            return state, room

        room = {"y": slabs.room(values)}
        if options.save:
            sizes = {"N": slabs.chunks, **signature.sizes(operands.inputs)}
            shape = [sizes[letter] for letter in "BNHVK"]
            room["states"] = jnp.zeros_like(state, save_as, shape=shape)
        state, room = slabs.run(slab, (state, room))
        states = {part: room["states"][:, : slabs.used]} if options.save else {}
        return Result(call.undo(room["y"]), {part: state}, states)

    def _backward(self, options: Options, operands: Backward, call: "_Call") -> Gradients:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.states
        slabs = call.slabs

        def slab(number: Any, carry: _Sums) -> _Sums:
            dstate, dshared, room = carry
            timed, shared, tokens = call.inputs(number)
            dy = call.at(number, operands.dy).astype(jnp.float32)
            saved = slabs.chunks_at(number, operands.states[part]).astype(jnp.float32)

            of_tokens = functools.partial(self._parts, options, tokens)
            (v, parts), pull_back = jax.vjp(of_tokens, timed, shared)
            solved, inverse = _solved(einsum, parts, v)
            states, u = _within(einsum, solved, saved)
            dstate, dafter, du = _back_along(
                einsum, parts, solved, dy, dstate, call.sequence(number)
            )
            dz = None if inverse is None else einsum("...ij,...iv->...jv", inverse, du)
            dtimed, more = pull_back(_gradients(einsum, parts, v, states, u, dy, dafter, dz))
            room = {name: slabs.put(number, x, dtimed[name]) for name, x in room.items()}
            return dstate, jax.tree.map(jnp.add, dshared, more), room

        room = {name: slabs.room(operands.inputs[name]) for name in signature.timed}
        zeros = jax.tree.map(jnp.zeros_like, call.shared)
        carry = operands.dstate[part], zeros, room
        dstate, dshared, room = slabs.run(slab, carry, reverse=True)
        dtimed = {name: call.undo(dx) for name, dx in room.items()}
        dshared = {name: jnp.squeeze(dx, (0, 1, 4)) for name, dx in dshared.items()}
        return Gradients(dtimed | dshared, {part: dstate})

    def _parts(
        self, options: Options, tokens: Tokens, timed: Arrays, shared: Arrays
    ) -> tuple[Array, Arrays]:
        """The values and the parts of links."""
        inputs = {name: x.astype(jnp.float32) for name, x in (timed | shared).items()}
        parts = self._parts_of(_einsum(options), options.decay, inputs, tokens)
        return inputs[self._signature.y], parts


class _Call:
    """The operands that both passes of a call have, slab by slab. Tokens of sequences are put in
    the order of the chunks of their sequences.

    shared: the inputs that all tokens share.
    chunks: where the chunks of sequences are; None if each row is one sequence.
    """

    def __init__(
        self, signature: Signature, sizes: Sizes, inputs: Arrays, packing: Packing
    ) -> None:
        axes = signature.sizes(inputs)
        self._tokens, self._length = axes["T"], length_of_chunks(axes["T"])
        self._marks = packing.marks if isinstance(packing, Marks) else None
        self.chunks, tokens = None, self._tokens
        if isinstance(packing, Sequences):
            self.chunks = by_chunk.chunks(packing.offsets, tokens)
            self._marks = self._filled(self.chunks.marks, segments.PADDING)
            tokens = self._marks.shape[1]
        self._timed = {name: inputs[name] for name in signature.timed}
        # As arrays [N, R, B, H, T, K].
        self.shared = {name: inputs[name][None, None, :, :, None] for name in signature.shared}
        self.slabs = Slabs(sizes, tokens, self._length, axes["B"] * axes["H"])

    def inputs(self, number: Any) -> tuple[Arrays, Arrays, Tokens]:
        timed = {name: self.at(number, x) for name, x in self._timed.items()}
        tokens = self.slabs.tokens(number, self._marks, self.chunks is None)
        return timed, self.shared, tokens

    def at(self, number: Any, x: Array) -> Array:
        """The tokens of a slab as links, from `x` [B, T, ...] as callers order it."""
        if self.chunks is None:
            here = self.slabs.at(number, x)
        else:
            tokens = self.slabs.chunks_at(number, jnp.moveaxis(self.chunks.tokens, 0, 1))
            here = self._filled(self.chunks._replace(tokens=tokens).cut(x), 0)
        return self.slabs.cut(number, here, self._marks)

    def undo(self, x: Array) -> Array:
        """`x` of all slabs, in the order of callers."""
        if self.chunks is None:
            return x[:, : self._tokens]
        count, _, length = self.chunks.marks.shape
        x = x.reshape(x.shape[0], -1, self._length, *x.shape[2:])
        return self.chunks.join(jnp.moveaxis(x[:, :count, :length], 1, 0))

    def _filled(self, x: Array, value: int) -> Array:
        """Chunks [N, B, T, ...] as rows of chunks of the length of slabs."""
        count, batch, length = x.shape[:3]
        missing = [(0, 0)] * x.ndim
        missing[2] = 0, self._length - length
        x = jnp.moveaxis(jnp.pad(x, missing, constant_values=value), 0, 1)
        return x.reshape(batch, count * self._length, *x.shape[3:])

    def sequence(self, number: Any) -> Array | None:
        """The sequence of each chunk of a slab [N, B]. Chunks behind the end change no state."""
        if self.chunks is None:
            return None
        return self.slabs.chunks_at(number, self.chunks.sequence.T)


def _einsum(options: Options) -> Einsum:
    return functools.partial(jnp.einsum, precision=options.precision)


def _with_reads(einsum: Einsum, parts: Arrays, solved: Arrays, v: Array) -> Arrays:
    """What the chain needs to find `reads S^T + y_of_v V` as well, in the rows below those of U:
    one product with each state in place of two."""
    below = {"solved": parts["reads"], "own": einsum("...ij,...jv->...iv", parts["y_of_v"], v)}
    if "solved" not in solved:
        return solved | below
    return solved | {name: jnp.concatenate([solved[name], below[name]], -2) for name in below}


def _read(einsum: Einsum, parts: Arrays, asked: Array) -> Array:
    """Y."""
    if "asks" not in parts:
        return asked
    u, y = jnp.split(asked, 2, axis=-2)
    return y + einsum("...ij,...jv->...iv", parts["y_of_u"], u)


def _gradients(
    einsum: Einsum,
    parts: Arrays,
    v: Array,
    state: Array,
    u: Array | None,
    dy: Array,
    dafter: Array,
    dz: Array | None,
) -> tuple[Array, Arrays]:
    """The cotangents of the values and of the parts, from those of Y, of the state after links, and
    of U (I - u_of_u)^T."""

    def of_matrix(dx: Array, x: Array) -> Array:
        return einsum("...iv,...jv->...ij", dx, x)

    def of_keys(x: Array, state: Array) -> Array:
        return einsum("...tv,...vk->...tk", x, state)

    def of_values(matrix: Array, dx: Array) -> Array:
        return einsum("...ij,...iv->...jv", matrix, dx)

    dv = of_values(parts["y_of_v"], dy) + einsum("...tk,...vk->...tv", parts["keys"], dafter)
    dparts = {
        # By a product, since some compilers are slow to sum along this axis.
        "stay": jnp.einsum(
            "ov,...vk->...k",
            jnp.ones_like(state, shape=(1, state.shape[-2])),
            state * dafter,
            precision=lax.Precision.HIGHEST,
        ),
        "reads": of_keys(dy, state),
        "y_of_v": of_matrix(dy, v),
        "keys": of_keys(v, dafter),
    }
    if u is not None and dz is not None:
        dv += of_values(parts["u_of_v"], dz)
        dparts |= {
            "asks": of_keys(dz, state),
            "u_of_u": of_matrix(dz, u),
            "u_of_v": of_matrix(dz, v),
            "y_of_u": of_matrix(dy, u),
            "kept": of_keys(u, dafter),
        }
    return dv, dparts


def _written(einsum: Einsum, values: Array, keys: Array) -> Array:
    return einsum("...tv,...tk->...vk", values, keys)


def _solved(einsum: Einsum, parts: Arrays, v: Array) -> tuple[Arrays, Array | None]:
    """What the chain of states needs, and the inverse that solves it."""
    result = {"stay": parts["stay"], "added": _written(einsum, v, parts["keys"])}
    inverse = None
    if "asks" in parts:
        inverse = algebra.inverse(parts["u_of_u"])
        own = einsum("...ij,...jv->...iv", parts["u_of_v"], v)
        result["solved"] = einsum("...ij,...jk->...ik", inverse, parts["asks"])
        result["own"] = einsum("...ij,...jv->...iv", inverse, own)
        result["kept"] = parts["kept"]
    return result, inverse


def _after(einsum: Einsum, solved: Arrays, state: Array) -> tuple[Array, Array | None]:
    """The states after links, and what is asked of those before them: U, and what is below."""
    after = state * solved["stay"][..., None, :] + solved["added"]
    if "solved" not in solved:
        return after, None
    asked = einsum("...tk,...vk->...tv", solved["solved"], state) + solved["own"]
    if "kept" in solved:
        u = asked[..., : solved["kept"].shape[-2], :]
        after += _written(einsum, u, solved["kept"])
    return after, asked


def _along(
    einsum: Einsum, solved: Arrays, state: Array, sequence: Array | None
) -> tuple[Array, Array, Array]:
    """The state after a slab, those before its chunks [N, B, H, V, K], and what is asked of those
    before links."""

    def chunk(state: Array, solved: Arrays) -> tuple[Array, Any]:
        before, found = state, []
        for link in range(solved["stay"].shape[0]):
            state, asked = _after(einsum, {name: x[link] for name, x in solved.items()}, state)
            found.append(asked)
        return state, (before, jnp.stack(found))

    state, (states, asked) = lax.scan(*_of_sequences(chunk, state, solved, sequence))
    return state, states, asked


def _of_sequences(chunk: _ChunkFn, state: Array, xs: Arrays, sequence: Array | None) -> Any:
    """What a scan needs: a function of a chunk, the state, and what the chunks have. If there are
    sequences, the function takes the states of all of them, and replaces the one that the chunk
    continues."""
    if sequence is None:
        return chunk, state, xs

    def of_own(states: Array, chunk_of_one: tuple[Array, Arrays]) -> tuple[Array, Any]:
        sequence, xs = chunk_of_one
        after, found = chunk(by_chunk.at(states, sequence), xs)
        return by_chunk.replaced(states, sequence, after), found

    return of_own, state, (sequence, xs)


def _within(einsum: Einsum, solved: Arrays, saved: Array) -> tuple[Array, Array | None]:
    """The states before the links of chunks, from those before the chunks, and U."""
    found, state = [], saved
    for link in range(solved["stay"].shape[1]):
        after, u = _after(einsum, {name: x[:, link] for name, x in solved.items()}, state)
        found.append((state, u))
        state = after
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *found)


def _back_along(
    einsum: Einsum,
    parts: Arrays,
    solved: Arrays,
    dy: Array,
    dstate: Array,
    sequence: Array | None,
) -> tuple[Array, Array, Array | None]:
    """The cotangents of the state before a slab, of those after its links, and of U."""
    xs = {"stay": parts["stay"], "read": _written(einsum, dy, parts["reads"])}
    if "asks" in parts:
        xs["du"] = einsum("...ij,...iv->...jv", parts["y_of_u"], dy)
        xs |= {name: solved[name] for name in ("kept", "solved")}

    def link(xs: Arrays, dafter: Array) -> tuple[Array, Array | None]:
        dstate = dafter * xs["stay"][..., None, :] + xs["read"]
        if "du" not in xs:
            return dstate, None
        du = einsum("...tk,...vk->...tv", xs["kept"], dafter) + xs["du"]
        return dstate + _written(einsum, du, xs["solved"]), du

    def chunk(dstate: Array, xs: Arrays) -> tuple[Array, Any]:
        found = []
        for i in reversed(range(xs["stay"].shape[0])):
            before, du = link({name: x[i] for name, x in xs.items()}, dstate)
            found.append((dstate, du))
            dstate = before
        return dstate, jax.tree.map(lambda *xs: jnp.stack(xs), *found[::-1])

    dstate, (dafter, du) = lax.scan(*_of_sequences(chunk, dstate, xs, sequence), reverse=True)
    return dstate, dafter, du
