"""An implementation in plain `jax.numpy` of any operator with one state [V, K] for each head.

What a link of some tokens does to the state S before it, from the parts that follow from its tokens
alone, side by side. Row i of U is what token i asks of the state before it, W has U above V, and
the rows of R and of P are those for U above those for Y:

    (U, Y) = R S^T + P W
    S_after = S diag(stay) + W^T C

(Without U in the operators whose writes do not depend on the state: W is V.) With the triangular
part of P that leads from U to U solved, only two products a link go along the chain of states:

    U = solved S^T + own             solved = (I - P_uu)^-1 R_u,  own = (I - P_uu)^-1 P_uv V

That is the fewest multiplications. Where a link of the chain takes as long as its kernels take to
start, U is found afterwards, and only one product a link goes along the chain:

    S_after = S diag(stay) + S turned + added
    turned = solved^T C_u,           added = (own, V)^T C

All else is done for all links of a slab at once, in few, large products. On a CPU the forward pass
goes from token to token instead (see `rwkv_jax._portable.steps`). The backward pass makes
the parts of each slab again, from the last to the first. The states before its links follow from
the saved ones. The cotangents of the states after its links, and of U, come from a chain that
starts at the end. With all of these fixed, the equations at the top are linear in the parts. So the
gradients of the parts are products of two factors each, which needs no derivative of the inverse.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

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
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.decay import BOUNDED
from rwkv_jax._portable.operands import Carried, LinksOfRows, Path, links
from rwkv_jax._portable.products import Products, exact, on_matrix_units
from rwkv_jax._portable.slabs import ELSEWHERE, LONG_LINKS, ON_CPU, Sizes
from rwkv_jax._portable.steps import Steps, Terms, steps
from rwkv_jax._portable.token_by_token import TokenByToken

TermsFn: TypeAlias = Callable[[Array, Arrays], Terms]
"""`terms(own, inputs)` from the decay factor of each token. All are in float32, those of tokens
[..., T, K], with zeros for tokens that are not there, and parameters [..., 1, K]."""


_CHUNKS = 8
"""How many chunks a turn of the loop along the chain takes, unless multiplications are to be saved:
to slice, stack and copy for each chunk takes a GPU as long as the products. More of them would take
longer to compile."""


class _Parts(NamedTuple):
    """stay [..., K] in float32, R, C, P and V."""

    stay: Array
    rows: Array
    columns: Array
    pairs: Array
    values: Array

    def of_asked(self) -> tuple[Array, Array, Array, Array] | None:
        """R_u, C_u, P_uu and P_uv, if there is a U."""
        tokens = self.values.shape[-2]
        if self.rows.shape[-2] == tokens:
            return None
        pairs = self.pairs[..., :tokens, :]
        own, others = pairs[..., :tokens], pairs[..., tokens:]
        return self.rows[..., :tokens, :], self.columns[..., :tokens, :], own, others

    def of_read(self) -> tuple[Array, Array]:
        """The rows of R and P for Y."""
        tokens = self.values.shape[-2]
        return self.rows[..., -tokens:, :], self.pairs[..., -tokens:, :]

    def of_values(self) -> tuple[Array, Array]:
        """The rows of C and the columns of P for V."""
        tokens = self.values.shape[-2]
        return self.columns[..., -tokens:, :], self.pairs[..., -tokens:]


_Sums: TypeAlias = tuple[Any, Arrays, Arrays]


class Chain(Implementation):
    """Runs everywhere, for any sizes. One token is computed as `reference` does it."""

    def __init__(self, signature: Signature, terms: TermsFn, reference: TokenByToken) -> None:
        self._signature, self._terms, self._reference = signature, terms, reference

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

        def slab(number: Any, carry: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            carried, room = carry
            carried, states, y = slab_of(options, call, number, carried, state)
            room = room | {"y": call.put(number, room["y"], y.astype(values.dtype))}
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

    def _side_by_side(
        self,
        product: Products,
        options: Options,
        call: LinksOfRows,
        number: Any,
        carried: Any,
        given: Array,
    ) -> tuple[Any, Array, Array]:
        """What is carried on from a slab, the states before its links, and Y."""
        timed, shared, tokens = call.inputs(number)
        parts = self._parts(options, product, tokens, timed, shared)
        solved, _ = _solved(product, parts)
        chain = _for_chain(product, solved)
        carried, states, written = _along(product, chain, carried, call.path(number), given)
        if written is None:
            written = _written(product, solved, parts.values, states)
        return carried, states, _read(product, parts, states, written)

    def _token_by_token(
        self, options: Options, call: LinksOfRows, number: Any, carried: Any, given: Array
    ) -> tuple[Any, Array, Array]:
        """The same, as if each chunk were one link."""
        timed, shared, tokens = call.inputs(number)
        own = steps(self._terms, options, timed, shared, tokens, self._signature.y)
        carried, states, found = _through(Steps.run, own, carried, call.path(number), given)
        return carried, states, own.outputs(found, timed[self._signature.y].shape)

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
        terms = self._terms(decays.own, inputs)

        def joined(several: Sequence[Array], decay: Array) -> Array:
            return jnp.concatenate([(x * decay).astype(product.dtype) for x in several], axis=-2)

        return _Parts(
            decays.stay,
            joined(terms.rows, decays.before),
            joined(terms.columns, decays.after),
            algebra.pairs(product, decays, *terms),
            inputs[self._signature.y].astype(product.dtype),
        )


def _read(product: Products, parts: _Parts, states: Array, written: Array) -> Array:
    """Y."""
    rows, pairs = parts.of_read()
    before = product("...tk,...vk->...tv", rows, states)
    return before + product("...ij,...jv->...iv", pairs, written)


def _gradients(
    product: Products, parts: _Parts, state: Array, written: Array, asked: Array, dafter: Array
) -> _Parts:
    """The cotangents of the parts, from the states before links, W, the cotangents of U - P_uu U
    and Y, and those of the states after links."""
    keys, pairs = parts.of_values()
    dvalues = product("...ij,...iv->...jv", pairs, asked)
    return _Parts(
        # By a product, since some compilers are slow to sum along this axis.
        stay=jnp.einsum(
            "ov,...vk->...k",
            jnp.ones((1, state.shape[-2])),
            state.astype(jnp.float32) * dafter.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        ),
        rows=product("...tv,...vk->...tk", asked, state),
        columns=product("...tv,...vk->...tk", written, dafter),
        pairs=product("...iv,...jv->...ij", asked, written),
        values=dvalues + product("...tk,...vk->...tv", keys, dafter),
    )


def _outer(product: Products, x: Array, y: Array) -> Array:
    """The sums over tokens of the products of x and y [..., T, V] and [..., T, K]."""
    return product("...tv,...tk->...vk", x, y)


def _solved(product: Products, parts: _Parts) -> tuple[Arrays, Array | None]:
    """What the chain of states needs, what `_written` needs, and the inverse that solves it."""
    result = {"stay": parts.stay}
    if (asked := parts.of_asked()) is None:
        return result | {"added": _outer(product, parts.values, parts.columns)}, None
    rows, kept, own, others = asked
    inverse = algebra.inverse(own.astype(jnp.float32)).astype(product.dtype)
    others = product("...ij,...jk->...ik", inverse, others)
    result["solved"] = product("...ij,...jk->...ik", inverse, rows)
    result["own"] = product("...ij,...jv->...iv", others, parts.values)
    if product.fewest:
        return result | {"values": parts.values, "columns": parts.columns}, inverse
    alone = jnp.concatenate([result["own"], parts.values], axis=-2)
    result["added"] = _outer(product, alone, parts.columns)
    result["turned"] = _outer(product, result["solved"], kept)
    return result, inverse


def _after(product: Products, solved: Arrays, state: Array) -> tuple[Array, Array | None]:
    """The states after links, and W if it was needed for them."""
    after, written = state * solved["stay"][..., None, :], None
    if "columns" in solved:
        written = _written(product, solved, solved["values"], state)
        return after + _outer(product, written, solved["columns"]), written
    after += solved["added"].astype(jnp.float32)
    if "turned" in solved:
        turned = product("...vj,...jk->...vk", state, solved["turned"])
        after += turned.astype(jnp.float32)
    return after, None


def _written(product: Products, solved: Arrays, values: Array, states: Array) -> Array:
    """W, from the states before links."""
    if "solved" not in solved:
        return values
    u = product("...tk,...vk->...tv", solved["solved"], states) + solved["own"]
    return jnp.concatenate([u, values], axis=-2)


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
    *,
    reverse: bool = False,
) -> tuple[Any, Array, Array | None]:
    """What is carried on from a slab, the states before its links, and W if it was needed for them
    [N, R, B, H, ...], or in reverse what the mirrored chain has in their place. One turn of the
    loop takes whole chunks, since a loop costs kernels and copies. No turn reads or writes the
    states of all sequences."""
    several = xs["stay"].shape[1]
    order = range(several)[:: -1 if reverse else 1]
    # On a path the state after the last chunk is kept as it is, for the end of its sequence.
    dtype = product.dtype if path is None else jnp.float32

    def chunk(own: Arrays, state: Array, before: Array) -> tuple[Array, tuple[Array, Any]]:
        states, written = [before] * several, list[Any]([None] * several)
        for r in order:
            if r != order[0]:
                states[r] = state
            state, written[r] = _after(product, {name: x[r] for name, x in own.items()}, state)
        found = jnp.stack(states).astype(dtype)
        return state, (found, jax.tree.map(lambda *xs: jnp.stack(xs), *written))

    carried, states, written = _through(
        chunk,
        xs,
        carried,
        path,
        given,
        first=order[0],
        reverse=reverse,
        unroll=1 if product.fewest else _CHUNKS,
    )
    return carried, states.astype(product.dtype), written


def _through(
    chunk: Callable[[Any, Array, Array], tuple[Array, tuple[Array, Any]]],
    xs: Any,
    carried: Any,
    path: Path | None,
    given: Array,
    *,
    first: int = 0,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Array, Any]:
    """What is carried on from a slab, and what the chunks of `xs` found.

    `chunk(own, state, before)` gives the state after a chunk, the states before its links, in which
    the one before the link `first` is `before`, and more. On a path `state` may be that of another
    sequence than `before`, which is corrected here.
    """

    def one(state: Array, xs: tuple[Any, tuple[Array, Array] | None]) -> tuple[Array, Any]:
        own, enters = xs
        before = state
        if enters is not None:
            state = _choose(*enters, state)
        return chunk(own, state, before)

    if path is None:
        carried, (states, more) = lax.scan(one, carried, (xs, None), reverse=reverse, unroll=unroll)
        return carried, states, more
    rows = lax.iota(jnp.int32, len(given))[None]
    enters = path.enters, given.at[rows, path.sequence].get(mode="promise_in_bounds")
    last, (states, more) = lax.scan(one, carried.last, (xs, enters), reverse=reverse, unroll=unroll)
    before = states[:, first]
    ends = [last[None], before[:-1]] if reverse else [before[1:], last[None]]
    nowhere = given.shape[1] + lax.iota(jnp.int32, len(before))[:, None]
    place = jnp.where(path.exits, path.sequence, nowhere)
    done = carried.done.at[rows, place].set(jnp.concatenate(ends), mode="drop", unique_indices=True)
    states = states.at[:, first].set(_choose(*enters, before))
    return Carried(last, done), states, more


def _choose(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.reshape(*condition.shape, 1, 1, 1), x, y)


def _within(product: Products, parts: _Parts, solved: Arrays, saved: Array) -> tuple[Array, Array]:
    """The states before links and W, from the states before their chunks [N, B, ...]."""
    found, state = [], saved
    for link in range(solved["stay"].shape[1]):
        own = {name: x[:, link] for name, x in _for_chain(product, solved).items()}
        after, written = _after(product, own, state)
        found.append((state.astype(product.dtype), written))
        state = after
    states, written = jax.tree.map(lambda *xs: jnp.stack(xs, axis=1), *found)
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
    """What is carried on from a slab, the cotangents of the states after its links, and those of U
    above those of Y. The chain is that of the states with R and C in each other's place."""
    rows, pairs = parts.of_read()
    mirrored = {"stay": parts.stay}
    if (asked := parts.of_asked()) is None:
        mirrored["added"] = _outer(product, dy, rows)
    else:
        own = product("...ij,...iv->...jv", pairs[..., : dy.shape[-2]], dy)
        mirrored |= {"solved": asked[1], "own": own}
        rows = jnp.concatenate([solved["solved"], rows], axis=-2)
        if product.fewest:
            mirrored |= {"values": dy, "columns": rows}
        else:
            mirrored["added"] = _outer(product, jnp.concatenate([own, dy], axis=-2), rows)
            mirrored["turned"] = jnp.swapaxes(solved["turned"], -1, -2)

    xs = _for_chain(product, mirrored)
    carried, dafter, asked = _along(
        product, xs, carried, path and path.reverse(), given, reverse=True
    )
    if asked is None:
        asked = _written(product, mirrored, dy, dafter)
    return carried, dafter, asked
