"""States by the beginning of a prompt, so that prompts with the same beginning read it once.

The key of a state is a hash of the prefill chunks that were read to make it: of their tokens, and
of where one ends and the next begins. A prompt therefore goes on from a kept state only if it would
have computed the same bits itself, and the tokens of a request do not depend on what is kept.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rwkv_jax.generation._prefill import lengths_of_prefill_chunks


class PrefillChunk(NamedTuple):
    """A part of a prompt, as it is read.

    Attributes:
      key: of all prefill chunks up to this one.
      tokens: its tokens, without padding.
      length: the length with padding.
    """

    key: bytes
    tokens: np.ndarray
    length: int


def cut(prompt: np.ndarray, lengths: Sequence[int]) -> list[PrefillChunk]:
    """The prefill chunks of a prompt."""
    found, begin, key = [], 0, b""
    for length in lengths_of_prefill_chunks(len(prompt), lengths):
        tokens = prompt[begin : begin + length]
        key = hashlib.sha256(b"%b%d:%b" % (key, length, tokens.tobytes())).digest()
        found.append(PrefillChunk(key, tokens, length))
        begin += length
    return found


class Prefixes:
    """The states after prefill chunks, of which those are dropped first that were not used for
    longest."""

    def __init__(self, most_bytes: int):
        self._most, self._bytes = most_bytes, 0
        self._states: OrderedDict[bytes, Any] = OrderedDict()

    def find(self, chunks: Sequence[PrefillChunk]) -> tuple[int, Any]:
        """The largest number of the first prefill chunks of a prompt after which there is a state,
        and the state; 0 and None if there is none. The last prefill chunk is always left to read,
        because a state has no logits."""
        for number in range(len(chunks) - 1, 0, -1):
            if (state := self._states.get(chunks[number - 1].key)) is not None:
                self._states.move_to_end(chunks[number - 1].key)
                return number, state
        return 0, None

    def wants(self, key: bytes) -> bool:
        """Whether a state is to be kept."""
        return self._most > 0 and key not in self._states

    def keep(self, key: bytes, state: Any) -> None:
        """Keep a state, and drop others until all fit."""
        self._states[key] = state
        self._bytes += _size(state)
        while self._bytes > self._most:
            _, dropped = self._states.popitem(last=False)
            self._bytes -= _size(dropped)

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()
        self._bytes = 0


def _size(state: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(state))
