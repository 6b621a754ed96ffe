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
from typing import NamedTuple

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
    """The tokens of chunks [N, T + 1, B, H, ...], with a last one that reads nothing.

    rows: what meets the state.
    before: what the token before each has written.
    now: what meets U and V of the token itself [N, T, B, H].
    values: V [N, T, B, H, V].
    """

    rows: Sequence[Array]
    before: _Written
    now: Sequence[Array]
    values: Array

    def run(self, state: Array) -> tuple[Array, list[Array]]:
        """Of one chunk: the state after it, and U, if there is one, and the products of the states
        and the rows for Y [T + 1, B, H, V]."""

        def one(
            carry: tuple[Array, list[Array]], token: tuple[Sequence[Array], _Written]
        ) -> tuple[tuple[Array, list[Array]], list[Array]]:
            (state, asked), (rows, written) = carry, token
            state = written.write(state, asked)
            found = [_read(state, row) for row in rows]
            return (state, found[:-1]), found

        nothing = [jnp.zeros_like(state[..., 0]) for _ in self.rows[1:]]
        (after, _), found = lax.scan(one, (state, nothing), (self.rows, self.before))
        return after, found

    def outputs(self, found: list[Array], shape: Sequence[int]) -> Array:
        """Y as sub-chunks, from what `run` has found of all chunks."""
        *asked, y = (x[:, :-1] for x in found)
        for now, x in zip(self.now, [*asked, self.values], strict=True):
            y += now[..., None] * x
        chunks, several, batch, heads, tokens, size = shape
        y = y.reshape(chunks, several, tokens, batch, heads, size)
        return jnp.moveaxis(y, 2, 4)


def _read(state: Array, row: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, row, precision=lax.Precision.HIGHEST)


def steps(
    terms_of: TermsFn,
    options: Options,
    per_token: Arrays,
    shared: Arrays,
    tokens: Tokens,
    values: str,
) -> Steps:
    """The tokens of a chunk group, from those of its sub-chunks, of which the input `values` is
    V."""
    inputs = {name: _of_chunks(x.astype(jnp.float32)) for name, x in per_token.items()}
    inputs |= {name: jnp.squeeze(x.astype(jnp.float32), 4) for name, x in shared.items()}
    w = jnp.broadcast_to(inputs["w"], inputs["k"].shape)
    if tokens.there is not None:
        w = jnp.where(_of_chunks(tokens.there)[..., None], w, NO_DECAY[options.decay])
    own = jnp.exp(LOG_DECAY[options.decay](w))
    (reads, columns), v = terms_of(inputs), inputs[values]
    before = _Written(
        _padded(own, first=1.0),
        [_padded(x, first=0.0) for x in columns],
        _padded(v, first=0.0),
    )
    if tokens.segment is not None:
        # A segment starts from nothing: what is before it is multiplied by 0.
        starts = _of_chunks(jnp.diff(tokens.segment, axis=-1, prepend=0) != 0)[..., None]
        starts = _padded(starts, last=0.0)
        before = jax.tree.map(lambda x: jnp.where(starts, 0.0, x), before)
    z = reads[-1].x if reads[-1].after else reads[-1].now
    assert z is not None, "the last read, for Y, has neither `after` nor `now`"
    now = [_sums(z * column) for column in columns]
    rows = [_padded(read.x * own if read.after else read.x, last=0.0) for read in reads]
    return Steps(rows, before, now, v)


def _sums(x: Array) -> Array:
    """The sums along the last axis, by a product, since some compilers are slow to sum."""
    ones = jnp.ones(x.shape[-1], jnp.float32)
    return jnp.einsum("...k,k->...", x, ones, precision=lax.Precision.HIGHEST)


def _of_chunks(x: Array) -> Array:
    """The tokens of sub-chunks [N, R, B, H, T, ...] as those of chunks [N, T, B, H, ...]."""
    chunks, sub_chunks, batch, heads, tokens, *rest = x.shape
    return jnp.moveaxis(x, 4, 2).reshape(chunks, sub_chunks * tokens, batch, heads, *rest)


def _padded(x: Array, **by: float) -> Array:
    """With one token more, which has the number `first` or `last` everywhere."""
    widths, (number,) = [(0, 0)] * x.ndim, by.values()
    widths[1] = ("first" in by, "last" in by)
    return jnp.pad(x, widths, constant_values=number)
