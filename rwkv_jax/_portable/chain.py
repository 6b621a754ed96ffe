"""An implementation in plain `jax.numpy` of any operator with one state [V, K] for each head.

What a link of some tokens does to the state S before it, from the parts that follow from its tokens
alone, side by side. Row i of U is what token i asks of the state before it, W has U above V, and
the rows of R and of P are those for U above those for Y:

    (U, Y) = R S^T + P W
    S_after = S diag(stay) + W^T C

(Without U in the operators whose writes do not depend on the state: W is V.) Where decays are
bounded, the factors in R, C and P are relative to the middle of the link. So S is multiplied by the
decay up to there first (`enter`), and S_after by the decay from there on in the end (`leave`). With
the triangular part of P that leads from U to U solved, only two products a link go along the chain
of states:

    U = solved S^T + own             solved = (I - P_uu)^-1 R_u,  own = (I - P_uu)^-1 P_uv V

That is the fewest multiplications. Where a link of the chain takes as long as its kernels take to
start, U is found afterwards, and only one product a link goes along the chain:

    S_after = S diag(stay) + S turned + added + given
    turned = solved^T C_u,           added = own^T C_u,           given = V^T C_v

All else is done for all links of a slab at once, in few, large products. On a CPU the forward pass
goes from token to token instead (see `rwkv_jax._portable.steps`). The backward pass makes
the parts of each slab again, from the last to the first. The states before its links follow from
the saved ones. The cotangents of the states after its links, and of U, come from a chain that
starts at the end. With all of these fixed, the equations at the top are linear in the parts. So the
gradients of the parts are products of two factors each, which needs no derivative of the inverse.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator import check
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
from rwkv_jax._portable import algebra, inverses
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.decay import BOUNDED
from rwkv_jax._portable.operands import Carried, LinksOfRows, Path, links
from rwkv_jax._portable.products import Products, exact, on_matrix_units, stacked
from rwkv_jax._portable.slabs import ELSEWHERE, LONG_LINKS, ON_CPU, Sizes
from rwkv_jax._portable.steps import Steps, steps
from rwkv_jax._portable.terms import TermsFn
from rwkv_jax._portable.token_by_token import TokenByToken

_CHUNKS = 8
"""How many chunks a turn of the loop along the chain takes, unless multiplications are to be saved:
to slice, stack and copy for each chunk takes a GPU time as well. More of them would take longer to
compile."""


class _Parts(NamedTuple):
    """What states meet [..., K] in float32, None where it is 1: the logarithm of the factor from
    the start of a link to its middle, stay, and the logarithm of the factor from the middle to the
    end. R, C, P and V."""

    enter: Array | None
    stay: Array | None
    leave: Array | None
    rows: Array
    columns: Array
    pairs: Array
    values: Array

    def of_asked(self) -> tuple[Array, Array, Array, Array] | None:
        """R_u, C_u, P_uu and P_uv, if there is a U."""
        tokens = self.values.shape[-2]
        if self.rows.shape[-2] == tokens:
            return None
        first, rest = slice(tokens), slice(tokens, None)
        own, others = self.pairs[..., first, first], self.pairs[..., first, rest]
        return self.rows[..., first, :], self.columns[..., first, :], own, others

    def of_read(self) -> tuple[Array, Array | None, Array]:
        """R_y, P_yu, if there is a U, and P_yv."""
        tokens = self.values.shape[-2]
        last, asked = slice(-tokens, None), slice(-tokens)
        own = None if self.pairs.shape[-1] == tokens else self.pairs[..., last, asked]
        return self.rows[..., last, :], own, self.pairs[..., last, last]

    def of_values(self) -> tuple[Array, Array]:
        """The rows of C and the columns of P for V."""
        last = slice(-self.values.shape[-2], None)
        return self.columns[..., last, :], self.pairs[..., last]


_Sums: TypeAlias = tuple[Any, Arrays, Arrays]


class Chain(Implementation):
    """Runs everywhere, for any sizes. One token is computed as `reference` does it."""

    def __init__(self, signature: Signature, terms: TermsFn, reference: TokenByToken) -> None:
        self._signature, self._terms, self._reference = signature, terms, reference

    def why_not(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str | None:
        signature = self._signature
        token = len(inputs[signature.y].shape) < len(signature.inputs[signature.y])
        reason = check.symbolic(signature.sizes(inputs, token=token), "TKV")
        return reason and f"{reason}; xla cuts rows into chunks, whose number it has to know"

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._reference.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._on_any_platform(self._forward, options, operands, goes_by_tokens=True)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return self._on_any_platform(self._backward, options, operands, goes_by_tokens=False)

    def _on_any_platform(
        self,
        compute: Callable[[Options, Any, Products, LinksOfRows], Any],
        options: Options,
        operands: Operands,
        *,
        goes_by_tokens: bool,
    ) -> Any:
        """A pass with the products and slabs that suit the platform that it is lowered for. One
        that does not go by tokens on a CPU is traced once where the slabs are alike."""
        on_cpu = self._links(ON_CPU, operands)
        product, elsewhere = self._on_matrix_units(options, operands)
        alike = on_cpu.slabs.count == elsewhere.slabs.count and not product.rounds
        if alike and not goes_by_tokens:
            return compute(options, operands, product._replace(fewest=True), elsewhere)
        return lax.platform_dependent(
            cpu=lambda: compute(options, operands, exact(options), on_cpu),
            default=lambda: compute(options, operands, product, elsewhere),
        )

    def _links(self, sizes: Sizes, operands: Operands) -> LinksOfRows:
        return links(self._signature, sizes, operands.inputs, operands.packing)

    def _on_matrix_units(
        self, options: Options, operands: Operands
    ) -> tuple[Products, LinksOfRows]:
        """The products and links on platforms with matrix units."""
        inputs = operands.inputs
        key_size = self._signature.sizes(inputs)["K"]
        product = on_matrix_units(options, inputs[self._signature.y].dtype, key_size)
        is_long = product.rounds and options.decay in BOUNDED
        return product, self._links(LONG_LINKS if is_long else ELSEWHERE, operands)

    def _forward(
        self, options: Options, operands: Forward, product: Products, call: LinksOfRows
    ) -> Result:
        signature = self._signature
        slab_of = self._token_by_token
        if not product.fewest:
            slab_of = functools.partial(self._side_by_side, product)
        (part,) = operands.state
        state, values = operands.state[part], operands.inputs[signature.y]
        save_as = signature.states_dtype(options, operands.inputs)

        def slab(number: Any, carry: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            carried, room = carry
            carried, before, y = slab_of(options, call, number, carried, state, save_as)
            room = room | {"y": call.put(number, room["y"], y.astype(values.dtype))}
            if options.save:
                room |= {"states": call.save(number, room["states"], before)}
            return carried, room

        room = {"y": call.room(values)}
        if options.save:
            room["states"] = call.room_for_states(state, save_as)
        carried, room = call.run(slab, (call.start(state), room))
        states = {part: call.states(room["states"])} if options.save else {}
        return Result(call.whole(room["y"]), {part: call.end(carried)}, states)

    def _side_by_side(
        self,
        product: Products,
        options: Options,
        call: LinksOfRows,
        number: Any,
        carried: Any,
        given: Array,
        save_as: Any,
    ) -> tuple[Any, Array, Array]:
        """What is carried on from a slab, the states before its chunks, and Y."""
        timed, shared, tokens = call.inputs(number)
        parts = self._parts(options, product, tokens, timed, shared)
        solved, _ = _solved(product, parts)
        chain = _for_chain(product, solved)
        path = call.path(number)
        carried, before, (states, _) = _along(product, chain, carried, path, given, save_as)
        return carried, before, _read(product, parts, states, _asked(product, solved, states))

    def _token_by_token(
        self,
        options: Options,
        call: LinksOfRows,
        number: Any,
        carried: Any,
        given: Array,
        save_as: Any,
    ) -> tuple[Any, Array, Array]:
        """The same, one token after another."""
        timed, shared, tokens = call.inputs(number)
        own = steps(self._terms, options, timed, shared, tokens, self._signature.y)
        path = call.path(number)
        carried, before, found = _through(Steps.run, own, carried, path, given, save_as)
        return carried, before, own.outputs(found, timed[self._signature.y].shape)

    def _backward(
        self, options: Options, operands: Backward, product: Products, call: LinksOfRows
    ) -> Gradients:
        signature = self._signature
        (part,) = operands.states
        given = operands.dstate[part]

        def slab(number: Any, carry: _Sums) -> _Sums:
            carried, dshared, room = carry
            timed, shared, tokens = call.inputs(number)
            dy = call.at(number, operands.dy).astype(product.dtype)
            saved = call.saved(number, operands.states[part]).astype(jnp.float32)

            of_tokens = functools.partial(self._parts, options, product, tokens)
            parts, pull_back = jax.vjp(of_tokens, timed, shared)
            solved, inverse = _solved(product, parts)
            states, written = _within(product, parts, solved, saved)
            carried, dafter, asked = _back_along(
                product, parts, solved, dy, carried, call.path(number), given
            )
            if inverse is not None:
                du, _ = jnp.split(asked, 2, axis=-2)
                dz = product("...ij,...iv->...jv", inverse, du)
                asked = jnp.concatenate([dz, dy], axis=-2)
            dtimed, more = pull_back(_gradients(product, parts, states, written, asked, dafter))
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
        self, options: Options, product: Products, tokens: Tokens, timed: Arrays, shared: Arrays
    ) -> _Parts:
        inputs = {name: x.astype(jnp.float32) for name, x in (timed | shared).items()}
        w = inputs["w"]
        w = jnp.broadcast_to(w, jnp.broadcast_shapes(w.shape, inputs["k"].shape))
        decays = algebra.decays(w, options.decay, tokens, product)
        terms = self._terms(inputs)
        values = inputs[self._signature.y].astype(product.dtype)
        factors = algebra.factors(product, decays, tokens, *terms)
        return _Parts(decays.enter, decays.stay, decays.leave, *factors, values)


def _read(product: Products, parts: _Parts, states: Array, asked: Array | None) -> Array:
    """Y, from the states before links and U, if there is one."""
    rows, own, others = parts.of_read()
    result = product("...tk,...vk->...tv", rows, states)
    if own is not None and asked is not None:
        result += product("...ij,...jv->...iv", own, asked)
    return result + product("...ij,...jv->...iv", others, parts.values)


def _gradients(
    product: Products, parts: _Parts, state: Array, written: Array, asked: Array, dafter: Array
) -> _Parts:
    """The cotangents of the parts, from the states before links, W, the cotangents of U - P_uu U
    and Y, and those of the states after links."""
    keys, of_values = parts.of_values()
    dvalues = product("...ij,...iv->...jv", of_values, asked)
    columns = product("...tv,...vk->...tk", written, dafter)
    kept = _sum(state, dafter)
    enter, leave = parts.enter, None
    if parts.leave is not None:
        leave = kept if parts.stay is None else kept * parts.stay
        leave += _sum(parts.columns, columns)
    return _Parts(
        # No result depends on where the middle is.
        enter=None if enter is None else jnp.zeros_like(enter),
        stay=None if parts.stay is None else kept,
        leave=leave,
        rows=product("...tv,...vk->...tk", asked, state),
        columns=columns,
        pairs=product("...iv,...jv->...ij", asked, written),
        values=dvalues + product("...tk,...vk->...tv", keys, dafter),
    )


def _sum(x: Array, y: Array) -> Array:
    """The sums of x y [..., n, K] along n, by a product, since some compilers are slow to sum along
    this axis."""
    both = x.astype(jnp.float32) * y.astype(jnp.float32)
    ones = jnp.ones((*both.shape[:-2], 1, both.shape[-2]), jnp.float32)
    return jnp.einsum("...on,...nk->...k", ones, both, precision=lax.Precision.HIGHEST)


def _outer(product: Products, x: Array, y: Array) -> Array:
    """The sums over tokens of the products of x and y [..., T, V] and [..., T, K]."""
    return product.apart("...tv,...tk->...vk", x, y)


def _solved(product: Products, parts: _Parts) -> tuple[Arrays, Array | None]:
    """What the chain of states needs, what `_asked` needs, and the inverse that solves it."""
    result = _met(parts.enter, parts.stay, parts.leave)
    if (asked := parts.of_asked()) is None:
        return result | {"added": _outer(product, parts.values, parts.columns)}, None
    rows, kept, own, others = asked
    inverse = inverses.inverse(product, own.astype(jnp.float32)).astype(product.dtype)
    others = product.apart("...ij,...jv->...iv", others, parts.values)
    result["solved"] = product.apart("...ij,...jk->...ik", inverse, rows)
    result["own"] = product.apart("...ij,...jv->...iv", inverse, others)
    if product.fewest:
        return result | {"values": parts.values, "columns": parts.columns}, inverse
    columns = parts.columns[..., rows.shape[-2] :, :]
    result["turned"] = _outer(product, result["solved"], kept)
    result["added"] = _outer(product, result["own"], kept)
    return result | {"given": _outer(product, parts.values, columns)}, inverse


def _met(enter: Array | None, stay: Array | None, leave: Array | None) -> Arrays:
    """The factors that states meet."""
    factors = {
        "enter": None if enter is None else jnp.exp(enter),
        "stay": stay,
        "leave": None if leave is None else jnp.exp(leave),
    }
    return {name: x for name, x in factors.items() if x is not None}


def _meet(state: Array, factors: Arrays, name: str) -> Array:
    """The states times one of the factors."""
    return state * factors[name][..., None, :] if name in factors else state


def _after(product: Products, solved: Arrays, state: Array) -> tuple[Array, Array | None]:
    """The states after links, from those in their middle, and W if it was needed for them."""
    after, written = _meet(state, solved, "stay"), None
    if "columns" in solved:
        written = _written(product, solved, solved["values"], state)
        after += _outer(product, written, solved["columns"])
    else:
        after += solved["added"].astype(jnp.float32)
    if "turned" in solved:
        after += solved["given"].astype(jnp.float32)
        turned = product("...vj,...jk->...vk", state, solved["turned"])
        after += turned.astype(jnp.float32)
    return _meet(after, solved, "leave"), written


def _written(product: Products, solved: Arrays, values: Array, states: Array) -> Array:
    """W, from the states before links."""
    asked = _asked(product, solved, states)
    return values if asked is None else jnp.concatenate([asked, values], axis=-2)


def _asked(product: Products, solved: Arrays, states: Array) -> Array | None:
    """U, if there is one."""
    if "solved" not in solved:
        return None
    return product("...tk,...vk->...tv", solved["solved"], states) + solved["own"]


def _for_chain(product: Products, solved: Arrays) -> Arrays:
    """What `_after` takes."""
    left_out = () if product.fewest else ("solved", "own")
    return {name: x for name, x in solved.items() if name not in left_out}


def _along(
    product: Products,
    xs: Arrays,
    carried: Any,
    path: Path | None,
    given: Array,
    save_as: Any = jnp.float32,
    *,
    reverse: bool = False,
) -> tuple[Any, Array, tuple[Array, Array | None]]:
    """What is carried on from a slab, the states before its chunks, those in the middle of its
    links, and W if it was needed for them [N, R, B, H, ...], or in reverse what the mirrored chain
    has in their place. One turn of the loop takes whole chunks, since a loop costs kernels and
    copies. No turn reads or writes the states of all sequences."""
    unroll = 1 if product.fewest else _CHUNKS

    def chunk(own: Arrays, state: Array) -> tuple[Array, tuple[Array, Array | None]]:
        return _through_links(product, own, state, 0, reverse=reverse)

    return _through(chunk, xs, carried, path, given, save_as, reverse=reverse, unroll=unroll)


def _through_links(
    product: Products, own: Arrays, state: Array, axis: int, *, reverse: bool = False
) -> tuple[Array, tuple[Array, Array | None]]:
    """The states after chunks, those in the middle of their links, of which there are several along
    this axis, and W if it was needed for them."""
    several = next(iter(own.values())).shape[axis]
    found = list[Any]([None] * several)
    for r in range(several)[:: -1 if reverse else 1]:
        link = {name: lax.index_in_dim(x, r, axis, keepdims=False) for name, x in own.items()}
        middle = _meet(state, link, "enter")
        state, written = _after(product, link, middle)
        found[r] = middle.astype(product.dtype), written
    stack = stacked if product.fewest else jnp.stack
    return state, jax.tree.map(lambda *xs: stack(xs, axis), *found)


def _through(
    chunk: Callable[[Any, Array], tuple[Array, Any]],
    xs: Any,
    carried: Any,
    path: Path | None,
    given: Array,
    save_as: Any,
    *,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Array, Any]:
    """What is carried on from a slab, the states before its chunks, and what `chunk(own, state)`
    found besides the state after each chunk."""
    # On a path the state after the last chunk is kept as it is, for the end of its sequence.
    keep_as = save_as if path is None else jnp.float32

    def one(state: Array, xs: tuple[Any, tuple[Array, Array] | None]) -> tuple[Array, Any]:
        own, enters = xs
        before = state.astype(keep_as)
        if enters is not None:
            state = _choose(*enters, state)
        state, found = chunk(own, state)
        return state, (before, found)

    if path is None:
        carried, (before, found) = lax.scan(
            one, carried, (xs, None), reverse=reverse, unroll=unroll
        )
        return carried, before, found
    rows = lax.iota(jnp.int32, len(given))[None]
    enters = path.enters, given.at[rows, path.sequence].get(mode="promise_in_bounds")
    last, (before, found) = lax.scan(
        one, carried.last, (xs, enters), reverse=reverse, unroll=unroll
    )
    ends = [last[None], before[:-1]] if reverse else [before[1:], last[None]]
    nowhere = given.shape[1] + lax.iota(jnp.int32, len(before))[:, None]
    place = jnp.where(path.exits, path.sequence, nowhere)
    done = carried.done.at[rows, place].set(jnp.concatenate(ends), mode="drop", unique_indices=True)
    return Carried(last, done), _choose(*enters, before), found


def _choose(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.reshape(*condition.shape, 1, 1, 1), x, y)


def _within(product: Products, parts: _Parts, solved: Arrays, saved: Array) -> tuple[Array, Array]:
    """The states in the middle of links and W, from the states before their chunks [N, B, ...]."""
    _, (states, written) = _through_links(product, _for_chain(product, solved), saved, 1)
    if written is None:
        written = _written(product, solved, parts.values, states)
    return states, written


def _back_along(
    product: Products,
    parts: _Parts,
    solved: Arrays,
    dy: Array,
    carried: Any,
    path: Path | None,
    given: Array,
) -> tuple[Any, Array, Array]:
    """What is carried on from a slab, the cotangents of the states in the middle of its links, and
    those of U above those of Y. The chain is that of the states with R and C in each other's place,
    and with the ways to and from the middle."""
    rows, own, _ = parts.of_read()
    mirrored = _met(parts.leave, parts.stay, parts.enter)
    if own is None:
        mirrored["added"] = _outer(product, dy, rows)
    else:
        own = product("...ij,...iv->...jv", own, dy)
        mirrored |= {"solved": parts.columns[..., : dy.shape[-2], :], "own": own}
        if product.fewest:
            rows = jnp.concatenate([solved["solved"], rows], axis=-2)
            mirrored |= {"values": dy, "columns": rows}
        else:
            mirrored["added"] = _outer(product, own, solved["solved"])
            mirrored["given"] = _outer(product, dy, rows)
            mirrored["turned"] = jnp.swapaxes(solved["turned"], -1, -2)

    xs = _for_chain(product, mirrored)
    carried, _, (dafter, asked) = _along(
        product, xs, carried, path and path.reverse(), given, reverse=True
    )
    if asked is None:
        asked = _written(product, mirrored, dy, dafter)
    return carried, dafter, asked
