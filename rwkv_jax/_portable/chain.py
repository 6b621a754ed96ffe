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
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.saved import chunks
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Einsum, Tokens
from rwkv_jax._portable.slabs import Slabs
from rwkv_jax._portable.token_by_token import TokenByToken

PartsFn: TypeAlias = Callable[[Einsum, str, Arrays, Tokens], Arrays]
"""`parts(einsum, decay, inputs, tokens)`: the parts of links by the names above: `stay` [..., K],
matrices of pairs of tokens [..., T, T], and the rest [..., T, K]. The inputs are in float32, those
of tokens [..., T, K], with zeros for tokens that are not there, and parameters [..., 1, K]."""


_Sums: TypeAlias = tuple[Array, Arrays, Arrays]


class Chain(Implementation):
    """Runs everywhere, for any sizes. One token is computed as `reference` does it."""

    def __init__(self, signature: Signature, parts: PartsFn, reference: TokenByToken) -> None:
        self._signature, self._parts_of, self._reference = signature, parts, reference

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._reference.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.state
        state, values = operands.state[part], operands.inputs[signature.y]
        save_as = signature.states_dtype(options, operands.inputs)
        call = _Call(signature, operands.inputs, operands.packing)
        slabs = call.slabs

        def slab(number: Any, carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            state, room = carry
            timed, shared, tokens = call.at(number)
            v, parts = self._parts(options, tokens, timed, shared)
            solved, _ = _solved(einsum, parts, v)
            state, states, u = _along(einsum, solved, state)
            y = _linear(einsum, parts, v, states, u)["y"].astype(values.dtype)
            room = room | {"y": slabs.put(number, room["y"], y)}
            if options.save:
                saved = states[:, 0].astype(save_as)
                room |= {"states": slabs.put_chunks(number, room["states"], saved)}
            return state, room

        room = {"y": slabs.room(values)}
        if options.save:
            empty = jnp.zeros_like(state, save_as)
            room["states"] = jnp.repeat(empty[:, None], slabs.chunks, axis=1)
        state, room = slabs.run(slab, (state, room))
        count = chunks(values.shape[1])
        states = {part: room["states"][:, :count]} if options.save else {}
        return Result(room["y"][:, : values.shape[1]], {part: state}, states)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.states
        call = _Call(signature, operands.inputs, operands.packing)
        slabs = call.slabs

        def slab(number: Any, carry: _Sums) -> _Sums:
            dstate, dshared, room = carry
            timed, shared, tokens = call.at(number)
            dy = slabs.at(number, operands.dy, call.marks).astype(jnp.float32)
            saved = slabs.chunks_at(number, operands.states[part]).astype(jnp.float32)

            of_tokens = functools.partial(self._parts, options, tokens)
            (v, parts), pull_back = jax.vjp(of_tokens, timed, shared)
            solved, inverse = _solved(einsum, parts, v)
            states, u = _within(einsum, solved, saved)
            dstate, dafter, du = _back_along(einsum, parts, solved, dy, dstate)
            cotangents = {"y": dy, "after": dafter}
            if inverse is not None:
                cotangents["u"] = einsum("...ij,...iv->...jv", inverse, du)

            def linear(v: Array, parts: Arrays) -> Arrays:
                return _linear(einsum, parts, v, states, u)

            _, pull_back_linear = jax.vjp(linear, v, parts)
            dtimed, more = pull_back(pull_back_linear(cotangents))
            room = {name: slabs.put(number, x, dtimed[name]) for name, x in room.items()}
            return dstate, jax.tree.map(jnp.add, dshared, more), room

        room = {name: slabs.room(operands.inputs[name]) for name in signature.timed}
        zeros = jax.tree.map(jnp.zeros_like, call.shared)
        carry = operands.dstate[part], zeros, room
        dstate, dshared, room = slabs.run(slab, carry, reverse=True)
        shapes = {name: x.shape for name, x in operands.inputs.items()}
        dtimed = {name: dx[:, : shapes[name][1]] for name, dx in room.items()}
        dshared = {name: dx.reshape(shapes[name]) for name, dx in dshared.items()}
        return Gradients(dtimed | dshared, {part: dstate})

    def _parts(
        self, options: Options, tokens: Tokens, timed: Arrays, shared: Arrays
    ) -> tuple[Array, Arrays]:
        """The values and the parts of links."""
        inputs = {name: x.astype(jnp.float32) for name, x in (timed | shared).items()}
        parts = self._parts_of(_einsum(options), options.decay, inputs, tokens)
        return inputs[self._signature.y], parts


class _Call:
    """The operands of a call that are the same in both passes, slab by slab."""

    def __init__(self, signature: Signature, inputs: Arrays, packing: Packing) -> None:
        sizes = signature.sizes(inputs)
        self._timed = {name: inputs[name] for name in signature.timed}
        # As an array [N, R, B, H, T, K].
        self.shared = {name: inputs[name][None, None, :, :, None] for name in signature.shared}
        self.marks = packing.marks if isinstance(packing, Marks) else None
        self.slabs = Slabs(sizes["T"], sizes["B"] * sizes["H"])

    def at(self, number: Any) -> tuple[Arrays, Arrays, Tokens]:
        timed = {name: self.slabs.at(number, x, self.marks) for name, x in self._timed.items()}
        tokens = self.slabs.tokens(number, self.marks, True)
        return timed, self.shared, tokens


def _einsum(options: Options) -> Einsum:
    return functools.partial(jnp.einsum, precision=options.precision)


def _linear(einsum: Einsum, parts: Arrays, v: Array, state: Array, u: Array | None) -> Arrays:
    """`y`, the state after links and, where there is one, U."""

    def rows(reads: str, of_u: str, of_v: str) -> Array:
        result = einsum("...tk,...vk->...tv", parts[reads], state)
        result += einsum("...ij,...jv->...iv", parts[of_v], v)
        return result if u is None else result + einsum("...ij,...jv->...iv", parts[of_u], u)

    after = state * parts["stay"][..., None, :] + _written(einsum, v, parts["keys"])
    result = {"y": rows("reads", "y_of_u", "y_of_v"), "after": after}
    if u is not None:
        result["after"] += _written(einsum, u, parts["kept"])
        result["u"] = rows("asks", "u_of_u", "u_of_v")
    return result


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
    """The states after links, and U."""
    after = state * solved["stay"][..., None, :] + solved["added"]
    if "solved" not in solved:
        return after, None
    u = einsum("...tk,...vk->...tv", solved["solved"], state) + solved["own"]
    return after + _written(einsum, u, solved["kept"]), u


def _along(einsum: Einsum, solved: Arrays, state: Array) -> tuple[Array, Array, Array | None]:
    """The state after a slab, and those before its links [N, R, B, H, V, K], and U."""

    def chunk(state: Array, solved: Arrays) -> tuple[Array, Any]:
        found = []
        for link in range(solved["stay"].shape[0]):
            after, u = _after(einsum, {name: x[link] for name, x in solved.items()}, state)
            found.append((state, u))
            state = after
        return state, jax.tree.map(lambda *xs: jnp.stack(xs), *found)

    state, (states, u) = lax.scan(chunk, state, solved)
    return state, states, u


def _within(einsum: Einsum, solved: Arrays, saved: Array) -> tuple[Array, Array | None]:
    """The states before the links of chunks, from those before the chunks, and U."""
    found, state = [], saved
    for link in range(solved["stay"].shape[1]):
        after, u = _after(einsum, {name: x[:, link] for name, x in solved.items()}, state)
        found.append((state, u))
        state = after
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *found)


def _back_along(
    einsum: Einsum, parts: Arrays, solved: Arrays, dy: Array, dstate: Array
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

    dstate, (dafter, du) = lax.scan(chunk, dstate, xs, reverse=True)
    return dstate, dafter, du
