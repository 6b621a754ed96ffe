"""The forward pass of an operator with one state [V, K] for each head, one token after another.

A CPU takes this way. It needs no products of pairs of tokens, and no copies between the layouts of
many small products: of a token there is one elementwise pass over the state, and a product of the
state and a vector for each thing that the token reads. With the names of `rwkv_jax._portable.chain`
and with the decay d of the token before, token i is

    S = S diag(d) + w_(i-1) c_(i-1)^T        what the token before has written, of U and of V
    u = S a        y = S q + (z . b) u + (z . k) v

The state is written right before it is read. In the other order XLA would copy it for each token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.decay import LOG_DECAY, NO_DECAY
from rwkv_jax._portable.terms import TermsFn


class _Written(NamedTuple):
    """The decay factors of tokens, the columns for U and V, and V, [N, T, B, H, ...]."""

    stay: Array
    columns: Sequence[Array]
    values: Array

    def write(self, state: Array, asked: Sequence[Array]) -> Array:
        """The states after tokens [B, H, ...], with U of these."""
        state = state * self.stay[..., None, :]
        for x, column in zip([*asked, self.values], self.columns, strict=True):
            state += x[..., None] * column[..., None, :]
        return state


class Steps(NamedTuple):
    """The tokens of chunks [N, T, B, H, ...].

    rows: what meets the state.
    written: what each token writes.
    goes_on: whether what is before a token is in its segment [N, T, B, 1, 1]; None if all is.
    now: what meets U and V of the token itself [N, T, B, H].
    """

    rows: Sequence[Array]
    written: _Written
    goes_on: Array | None
    now: Sequence[Array]

    def run(self, state: Array) -> tuple[Array, list[Array]]:
        """Of one chunk: the state after it, and U, if there is one, and the products of the states
        and the rows for Y [T, B, H, V]."""
        tokens = len(self.written.values)

        def at(x: Any, token: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, token, keepdims=False), x)

        def one(
            carry: tuple[Array, list[Array]], token: Array
        ) -> tuple[tuple[Array, list[Array]], list[Array]]:
            state, asked = carry
            before = at(self.written, jnp.maximum(token - 1, 0))
            state = jnp.where(token == 0, state, before.write(state, asked))
            if self.goes_on is not None:
                state = jnp.where(at(self.goes_on, token)[..., None], state, 0.0)
            found = [_read(state, row) for row in at(self.rows, token)]
            return (state, found[:-1]), found

        nothing = [jnp.zeros_like(state[..., 0]) for _ in self.rows[1:]]
        (state, asked), found = lax.scan(one, (state, nothing), lax.iota(jnp.int32, tokens))
        return at(self.written, tokens - 1).write(state, asked), found

    def outputs(self, found: list[Array], shape: Sequence[int]) -> Array:
        """Y as links, from what `run` has found of all chunks."""
        *asked, y = found
        for now, x in zip(self.now, [*asked, self.written.values], strict=True):
            y += now[..., None] * x
        chunks, several, batch, heads, tokens, size = shape
        y = y.reshape(chunks, several, tokens, batch, heads, size)
        return jnp.moveaxis(y, 2, 4)


def _read(state: Array, row: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, row, precision=lax.Precision.HIGHEST)


def steps(
    terms_of: TermsFn,
    options: Options,
    timed: Arrays,
    shared: Arrays,
    tokens: Tokens,
    values: str,
) -> Steps:
    """The tokens of a slab, from those of its links, of which the input `values` is V."""
    inputs = {name: _of_chunks(x.astype(jnp.float32)) for name, x in timed.items()}
    inputs |= {name: jnp.squeeze(x.astype(jnp.float32), 4) for name, x in shared.items()}
    w = jnp.broadcast_to(inputs["w"], inputs["k"].shape)
    if tokens.there is not None:
        w = jnp.where(_of_chunks(tokens.there)[..., None], w, NO_DECAY[options.decay])
    own = jnp.exp(LOG_DECAY[options.decay](w))
    (reads, columns), v = terms_of(inputs), inputs[values]
    goes_on = None
    if tokens.segment is not None:
        goes_on = _of_chunks(jnp.diff(tokens.segment, axis=-1, prepend=0) == 0)[..., None]
    z = reads[-1].x if reads[-1].after else reads[-1].now
    assert z is not None
    now = [_sums(z * column) for column in columns]
    rows = [read.x * own if read.after else read.x for read in reads]
    return Steps(rows, _Written(own, columns, v), goes_on, now)


def _sums(x: Array) -> Array:
    """The sums along the last axis, by a product, since some compilers are slow to sum."""
    ones = jnp.ones(x.shape[-1], jnp.float32)
    return jnp.einsum("...k,k->...", x, ones, precision=lax.Precision.HIGHEST)


def _of_chunks(x: Array) -> Array:
    """The tokens of links [N, R, B, H, T, ...] as those of chunks [N, T, B, H, ...]."""
    chunks, links, batch, heads, tokens, *rest = x.shape
    return jnp.moveaxis(x, 4, 2).reshape(chunks, links * tokens, batch, heads, *rest)
