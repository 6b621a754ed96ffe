"""Which states the forward pass saves for the backward pass.

All implementations of an operator save the same states, so that any forward pass can feed any
backward pass.
"""

CHUNK = 64
"""Tokens between two saved states: `states[:, n]` is the state before token `n * CHUNK`. The native
kernels have the same number as `kChunk`."""


def chunks(tokens: int) -> int:
    """How many states a sequence saves: one before each chunk, also before a short last one."""
    return -(-tokens // CHUNK)
