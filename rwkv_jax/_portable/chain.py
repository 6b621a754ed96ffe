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
    Operands,
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import pieces
from rwkv_jax._packing.pieces import Path
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Einsum, Tokens
from rwkv_jax._portable.operands import LinksOfRows, links
from rwkv_jax._portable.slabs import ELSEWHERE, ON_CPU
from rwkv_jax._portable.token_by_token import TokenByToken

PartsFn: TypeAlias = Callable[[Einsum, str, Arrays, Tokens], Arrays]
"""`parts(einsum, decay, inputs, tokens)`: the parts of links by the names above: `stay` [..., K],
matrices of pairs of tokens [..., T, T], and the rest [..., T, K]. The inputs are in float32, those
of tokens [..., T, K], with zeros for tokens that are not there, and parameters [..., 1, K]."""


_Sums: TypeAlias = tuple[Any, Arrays, Arrays]


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

    def _on_any_platform(self, compute: Callable[[LinksOfRows], Any], operands: Operands) -> Any:
        """A pass with slabs of the sizes that suit the platform that it is lowered for."""
        on_cpu, elsewhere = (
            links(self._signature, sizes, operands.inputs, operands.packing)
            for sizes in (ON_CPU, ELSEWHERE)
        )
        if on_cpu.slabs.count == elsewhere.slabs.count:
            return compute(elsewhere)
        return lax.platform_dependent(
            cpu=lambda: compute(on_cpu), default=lambda: compute(elsewhere)
        )

    def _forward(self, options: Options, operands: Forward, call: LinksOfRows) -> Result:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.state
        state, values = operands.state[part], operands.inputs[signature.y]

        def slab(number: Any, carry: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            carried, room = carry
            timed, shared, tokens = call.inputs(number)
            v, parts = self._parts(options, tokens, timed, shared)
            solved, _ = _solved(einsum, parts, v)
            solved = _with_reads(einsum, parts, solved, v)
            carried, states, asked = _along(einsum, solved, carried, call.path(number), state)
            y = _read(einsum, parts, asked).astype(values.dtype)
            room = room | {"y": call.put(number, room["y"], y)}
            if options.save:
                room |= {"states": call.save(number, room["states"], states)}
            return carried, room

        room = {"y": call.room(values)}
        if options.save:
            save_as = signature.states_dtype(options, operands.inputs)
            room["states"] = call.room_for_states(state, save_as)
        carried, room = call.run(slab, (call.start(state), room))
        states = {part: call.states(room["states"])} if options.save else {}
        return Result(call.whole(room["y"]), {part: call.end(carried)}, states)

    def _backward(self, options: Options, operands: Backward, call: LinksOfRows) -> Gradients:
        signature, einsum = self._signature, _einsum(options)
        (part,) = operands.states
        given = operands.dstate[part]

        def slab(number: Any, carry: _Sums) -> _Sums:
            carried, dshared, room = carry
            timed, shared, tokens = call.inputs(number)
            dy = call.at(number, operands.dy).astype(jnp.float32)
            saved, opens = call.saved(number, operands.states[part])

            of_tokens = functools.partial(self._parts, options, tokens)
            (v, parts), pull_back = jax.vjp(of_tokens, timed, shared)
            solved, inverse = _solved(einsum, parts, v)
            states, u = _within(einsum, solved, saved.astype(jnp.float32), opens)
            carried, dafter, du = _back_along(
                einsum, parts, solved, dy, carried, call.path(number), given
            )
            dz = None if inverse is None else einsum("...ij,...iv->...jv", inverse, du)
            dtimed, more = pull_back(_gradients(einsum, parts, v, states, u, dy, dafter, dz))
            room = {name: call.put(number, x, dtimed[name]) for name, x in room.items()}
            return carried, jax.tree.map(jnp.add, dshared, more), room

        room = {name: call.room(operands.inputs[name]) for name in signature.timed}
        zeros = jax.tree.map(jnp.zeros_like, call.shared)
        carry = call.start(given), zeros, room
        carried, dshared, room = call.run(slab, carry, reverse=True)
        dtimed = {name: call.whole(dx) for name, dx in room.items()}
        dshared = {name: jnp.squeeze(dx, (0, 1, 4)) for name, dx in dshared.items()}
        return Gradients(dtimed | dshared, {part: call.end(carried)})

    def _parts(
        self, options: Options, tokens: Tokens, timed: Arrays, shared: Arrays
    ) -> tuple[Array, Arrays]:
        """The values and the parts of links."""
        inputs = {name: x.astype(jnp.float32) for name, x in (timed | shared).items()}
        parts = self._parts_of(_einsum(options), options.decay, inputs, tokens)
        return inputs[self._signature.y], parts


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
    einsum: Einsum, solved: Arrays, carried: Any, path: Path | None, given: Array
) -> tuple[Any, Array, Array]:
    """What is carried on from a slab, the states before its chunks [N, 1, B, H, V, K] or, on a
    path, before its links [N, R, B, H, V, K], and what is asked of those before links."""

    def chunk(carried: Any, xs: tuple[Arrays, Path | None]) -> tuple[Any, Any]:
        states, found = [], []
        for link in range(xs[0]["stay"].shape[0]):
            solved, path = _link(xs, link)
            before = _enter(carried, path, given)
            after, asked = _after(einsum, solved, before)
            if not states or path is not None:
                states.append(before)
            found.append(asked)
            carried = _leave(carried, path, after)
        return carried, (jnp.stack(states), jnp.stack(found))

    carried, (states, asked) = lax.scan(chunk, carried, (solved, path))
    return carried, states, asked


def _link(xs: tuple[Arrays, Path | None], link: int) -> tuple[Arrays, Path | None]:
    """What one link of a chunk has."""
    return jax.tree.map(lambda x: x[link], xs)


def _enter(carried: Any, path: Path | None, given: Array) -> Array:
    """The state that a link continues."""
    return carried if path is None else pieces.enter(carried, path, given)


def _leave(carried: Any, path: Path | None, after: Array) -> Any:
    """What is carried on from a link, from the state after it."""
    return after if path is None else pieces.leave(carried, path, after)


def _within(
    einsum: Einsum, solved: Arrays, saved: Array, opens: Array | None
) -> tuple[Array, Array | None]:
    """The states before links and U, from the states before their chunks. `opens` says which links
    do not continue the one before them."""
    found, state = [], saved[:, 0]
    for link in range(solved["stay"].shape[1]):
        if link and opens is not None:
            state = jnp.where(opens[:, link, :, None, None, None], saved[:, link], state)
        after, u = _after(einsum, {name: x[:, link] for name, x in solved.items()}, state)
        found.append((state, u))
        state = after
    return jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *found)


def _back_along(
    einsum: Einsum,
    parts: Arrays,
    solved: Arrays,
    dy: Array,
    carried: Any,
    path: Path | None,
    given: Array,
) -> tuple[Any, Array, Array | None]:
    """What is carried on from a slab, and the cotangents of the states after its links, and of
    U."""
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

    def chunk(carried: Any, xs: tuple[Arrays, Path | None]) -> tuple[Any, Any]:
        found = []
        for i in reversed(range(xs[0]["stay"].shape[0])):
            own, path = _link(xs, i)
            dafter = _enter(carried, path, given)
            before, du = link(own, dafter)
            found.append((dafter, du))
            carried = _leave(carried, path, before)
        return carried, jax.tree.map(lambda *xs: jnp.stack(xs), *found[::-1])

    path = path and path.reverse()
    carried, (dafter, du) = lax.scan(chunk, carried, (xs, path), reverse=True)
    return carried, dafter, du
