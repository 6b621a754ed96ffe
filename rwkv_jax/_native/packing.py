"""How native kernels are told of the packing: marks as words of bits, sequences as spans."""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK
from rwkv_jax._packing import segments, sequences

WORD = 16
"""The tokens whose marks are in one word."""

LONG = 8 * CHUNK
"""Tokens per sequence, on average, from which on native kernels take the longest sequences first,
so that no block of threads is left with a long one at the end. With shorter sequences that gains
less than the look-up of whose turn it is costs."""


def words(marks: Array) -> Array:
    """Marks [B, T] as words [B, M] of uint32, for whole chunks of tokens. A word has a bit for each
    token that starts a segment, and above these a bit for each token that is padding."""
    batch, tokens = marks.shape
    missing = -tokens % CHUNK
    marks = jnp.pad(marks, ((0, 0), (0, missing)), constant_values=segments.PADDING)
    marks = marks.reshape(batch, (tokens + missing) // WORD, WORD)
    place = lax.broadcasted_iota(jnp.uint32, marks.shape, 2)
    bits = ((marks == segments.STARTS).astype(jnp.uint32) << place) | (
        (marks == segments.PADDING).astype(jnp.uint32) << (place + WORD)
    )
    return jnp.sum(bits, axis=2, dtype=jnp.uint32)


def spans(offsets: Array, tokens: int) -> tuple[Array, Array]:
    """Where the sequences of all rows of so many tokens are, from offsets [B, Z]: `spans` and
    `owners`. S counts the sequences of all rows here.

    spans [S, 4]: of each sequence its first token and its first chunk, both counted over all rows,
      with the number of its tokens between the two, and the number of the sequence. If sequences
      are long, [S, 8]: columns 4 to 7 have the same fields, in the order in which sequences run.
    owners [B, N]: the sequence of each chunk, or -1 for a chunk that is not used.
    """
    clamped, _, first, owner, used = sequences.layout(offsets, tokens)
    batch, count = clamped.shape[0], clamped.shape[1] - 1
    row = lax.broadcasted_iota(jnp.int32, (batch, count), 0)
    lengths = jnp.diff(clamped)
    numbers = row * tokens + clamped[:, :-1], lengths, row * owner.shape[1] + first[:, :-1]
    number = lax.iota(jnp.int32, batch * count)
    spans = jnp.stack([*(x.reshape(-1) for x in numbers), number], axis=1)
    if tokens >= LONG * count:
        in_turn = jnp.argsort(lengths, axis=None, descending=True)
        spans = jnp.concatenate([spans, spans[in_turn]], axis=1)
    owner = lax.broadcasted_iota(jnp.int32, owner.shape, 0) * count + owner
    return spans, jnp.where(used, owner, -1)
