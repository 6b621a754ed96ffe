"""The states of an operator with one state [V, K] for each head, from sub-chunk to sub-chunk.

What a sub-chunk of some tokens does to the state S before it, from the parts that follow from its
tokens alone, side by side. Row i of U is what token i asks of the state before it, W has U above V,
and the rows of R and of P are those for U above those for Y:

    (U, Y) = R S^T + P W
    S_after = S diag(stay) + W^T C

(Without U in the operators whose writes do not depend on the state: W is V.) Where decays are
bounded, the factors in R, C and P are relative to the middle of the sub-chunk. So S is multiplied
by the decay up to there first (`enter`), and S_after by the decay from there on in the end
(`leave`). With the triangular part of P that leads from U to U solved, only two products a
sub-chunk go along the chain of states:

    U = solved S^T + own             solved = (I - P_uu)^-1 R_u,  own = (I - P_uu)^-1 P_uv V

That is the fewest multiplications. Where a sub-chunk of the chain takes as long as its kernels take
to start, U is found afterwards, and only one product a sub-chunk goes along the chain:

    S_after = S diag(stay) + S turned + added + given
    turned = solved^T C_u,           added = own^T C_u,           given = V^T C_v
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays
from rwkv_jax._portable import inverses
from rwkv_jax._portable.products import Products, stacked
from rwkv_jax._portable.sub_chunks import Carried, Path

_CHUNKS = 8
"""How many chunks a turn of the loop along the chain takes, unless multiplications are to be saved:
to slice, stack and copy for each chunk takes a GPU time as well. More of them would take longer to
compile."""


class Parts(NamedTuple):
    """What states meet [..., K] in float32, None where it is 1: the logarithm of the factor from
    the start of a sub-chunk to its middle, stay, and the logarithm of the factor from the middle to
    the end. R, C, P and V."""

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


def _outer(product: Products, x: Array, y: Array) -> Array:
    """The sums over tokens of the products of x and y [..., T, V] and [..., T, K]."""
    return product.apart("...tv,...tk->...vk", x, y)


def solve(product: Products, parts: Parts) -> tuple[Arrays, Array | None]:
    """What the chain of states needs, what `ask` needs, and the inverse that solves it."""
    result = _decay_factors(parts.enter, parts.stay, parts.leave)
    if (asked := parts.of_asked()) is None:
        return result | {"added": _outer(product, parts.values, parts.columns)}, None
    rows, kept, own, others = asked
    inverse = inverses.inverse(product, own.astype(jnp.float32)).astype(product.dtype)
    others = product.apart("...ij,...jv->...iv", others, parts.values)
    result["solved"] = product.apart("...ij,...jk->...ik", inverse, rows)
    result["own"] = product.apart("...ij,...jv->...iv", inverse, others)
    if product.minimize_flops:
        return result | {"values": parts.values, "columns": parts.columns}, inverse
    columns = parts.columns[..., rows.shape[-2] :, :]
    result["turned"] = _outer(product, result["solved"], kept)
    result["added"] = _outer(product, result["own"], kept)
    return result | {"given": _outer(product, parts.values, columns)}, inverse


def _decay_factors(enter: Array | None, stay: Array | None, leave: Array | None) -> Arrays:
    factors = {
        "enter": None if enter is None else jnp.exp(enter),
        "stay": stay,
        "leave": None if leave is None else jnp.exp(leave),
    }
    return {name: x for name, x in factors.items() if x is not None}


def _apply_decay(state: Array, factors: Arrays, name: str) -> Array:
    """The states times one of the factors."""
    return state * factors[name][..., None, :] if name in factors else state


def _after(product: Products, solved: Arrays, state: Array) -> tuple[Array, Array | None]:
    """The states after sub-chunks, from those in their middle, and W if it was needed for them."""
    after, written = _apply_decay(state, solved, "stay"), None
    if "columns" in solved:
        written = _written(product, solved, solved["values"], state)
        after += _outer(product, written, solved["columns"])
    else:
        after += solved["added"].astype(jnp.float32)
    if "turned" in solved:
        after += solved["given"].astype(jnp.float32)
        turned = product("...vj,...jk->...vk", state, solved["turned"])
        after += turned.astype(jnp.float32)
    return _apply_decay(after, solved, "leave"), written


def _written(product: Products, solved: Arrays, values: Array, states: Array) -> Array:
    """W, from the states before sub-chunks."""
    asked = ask(product, solved, states)
    return values if asked is None else jnp.concatenate([asked, values], axis=-2)


def ask(product: Products, solved: Arrays, states: Array) -> Array | None:
    """U, if there is one."""
    if "solved" not in solved:
        return None
    return product("...tk,...vk->...tv", solved["solved"], states) + solved["own"]


def for_chain(product: Products, solved: Arrays) -> Arrays:
    """What `_after` takes."""
    left_out = () if product.minimize_flops else ("solved", "own")
    return {name: x for name, x in solved.items() if name not in left_out}


def along(
    product: Products,
    xs: Arrays,
    carried: Any,
    path: Path | None,
    given: Array,
    save_as: Any = jnp.float32,
    *,
    reverse: bool = False,
) -> tuple[Any, Array, tuple[Array, Array | None]]:
    """What is carried on from a chunk group, the states before its chunks, those in the middle of
    its sub-chunks, and W if it was needed for them [N, R, B, H, ...], or in reverse what the
    mirrored chain has in their place. One turn of the loop takes whole chunks, since a loop costs
    kernels and copies. No turn reads or writes the states of all sequences."""
    unroll = 1 if product.minimize_flops else _CHUNKS
    chunk = functools.partial(_through_sub_chunks, product, 0, reverse=reverse)
    return through(chunk, xs, carried, path, given, save_as, reverse=reverse, unroll=unroll)


def _through_sub_chunks(
    product: Products, axis: int, own: Arrays, state: Array, *, reverse: bool = False
) -> tuple[Array, tuple[Array, Array | None]]:
    """The states after chunks, those in the middle of their sub-chunks, of which there are several
    along this axis, and W if it was needed for them."""
    several = next(iter(own.values())).shape[axis]
    found = list[Any]([None] * several)
    for r in range(several)[:: -1 if reverse else 1]:
        sub_chunk = {name: lax.index_in_dim(x, r, axis, keepdims=False) for name, x in own.items()}
        middle = _apply_decay(state, sub_chunk, "enter")
        state, written = _after(product, sub_chunk, middle)
        found[r] = middle.astype(product.dtype), written
    stack = stacked if product.minimize_flops else jnp.stack
    return state, jax.tree.map(lambda *xs: stack(xs, axis), *found)


def through(
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
    """What is carried on from a chunk group, the states before its chunks, and what
    `chunk(own, state)` found besides the state after each chunk."""
    # On a path the state after the last chunk is kept as it is, for the end of its sequence.
    keep_as = save_as if path is None else jnp.float32

    def one(state: Array, xs: tuple[Any, tuple[Array, Array] | None]) -> tuple[Array, Any]:
        own, enters = xs
        before = state.astype(keep_as)
        if enters is not None:
            state = _choose(*enters, state)
        state, found = chunk(own, state)
        return state, (before, found)

    scan = functools.partial(lax.scan, one, reverse=reverse, unroll=unroll)
    if path is None:
        carried, (before, found) = scan(carried, (xs, None))
        return carried, before, found
    rows = lax.iota(jnp.int32, len(given))[None]
    enters = path.enters, given.at[rows, path.sequence].get(mode="promise_in_bounds")
    last, (before, found) = scan(carried.last, (xs, enters))
    ends = [last[None], before[:-1]] if reverse else [before[1:], last[None]]
    nowhere = given.shape[1] + lax.iota(jnp.int32, len(before))[:, None]
    place = jnp.where(path.exits, path.sequence, nowhere)
    done = carried.done.at[rows, place].set(jnp.concatenate(ends), mode="drop", unique_indices=True)
    return Carried(last, done), _choose(*enters, before), found


def _choose(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.reshape(*condition.shape, 1, 1, 1), x, y)


def within(product: Products, parts: Parts, solved: Arrays, saved: Array) -> tuple[Array, Array]:
    """The states in the middle of sub-chunks and W, from the states before their chunks
    [N, B, ...]."""
    _, (states, written) = _through_sub_chunks(product, 1, for_chain(product, solved), saved)
    if written is None:
        written = _written(product, solved, parts.values, states)
    return states, written


def back_along(
    product: Products,
    parts: Parts,
    solved: Arrays,
    dy: Array,
    carried: Any,
    path: Path | None,
    given: Array,
) -> tuple[Any, Array, Array]:
    """What is carried on from a chunk group, the cotangents of the states in the middle of its
    sub-chunks, and those of U above those of Y. The chain is that of the states with R and C in
    each other's place, and with the ways to and from the middle."""
    rows, own, _ = parts.of_read()
    mirrored = _decay_factors(parts.leave, parts.stay, parts.enter)
    if own is None:
        mirrored["added"] = _outer(product, dy, rows)
    else:
        own = product("...ij,...iv->...jv", own, dy)
        mirrored |= {"solved": parts.columns[..., : dy.shape[-2], :], "own": own}
        if product.minimize_flops:
            rows = jnp.concatenate([solved["solved"], rows], axis=-2)
            mirrored |= {"values": dy, "columns": rows}
        else:
            mirrored["added"] = _outer(product, own, solved["solved"])
            mirrored["given"] = _outer(product, dy, rows)
            mirrored["turned"] = jnp.swapaxes(solved["turned"], -1, -2)

    xs = for_chain(product, mirrored)
    carried, _, (dafter, asked) = along(
        product, xs, carried, path and path.reverse(), given, reverse=True
    )
    if asked is None:
        asked = _written(product, mirrored, dy, dafter)
    return carried, dafter, asked
