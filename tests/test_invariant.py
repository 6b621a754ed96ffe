"""`models.Invariant`: the same bits in any batch and in any pieces."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax.generation import Sampling, generate
from rwkv_jax.models import Invariant, rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.serving import Pool
from support.compiler import AS_USERS
from support.models import (
    VOCABULARY,
    config_of,
    formulas,
    parameters,
    random_like,
    shapes_of,
)
from support.tolerance import assert_trees_close, rms_error

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (5, 9), np.int32))
ROWS = 3


def read(
    model: Any, params: Any, rows: Sequence[int], pieces: Sequence[int], dtype: str
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The logits of rows of `TOKENS`, read in pieces, and the state after them. A piece of one
    token has no axis of time."""
    state = model.initial_state(params, len(rows), dtype)
    found, begin = [], 0
    apply = jax.jit(
        lambda params, tokens, state: model.apply(params, tokens, state, dtype=dtype),
        compiler_options=AS_USERS,
    )
    for piece in pieces:
        tokens = TOKENS[np.array(rows), begin : begin + piece]
        logits, state = apply(params, tokens[:, 0] if piece == 1 else tokens, state)
        found.append(logits[:, None] if piece == 1 else logits)
        begin += piece
    return np.concatenate(found, axis=1), [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (rwkv4, "float32"),
        pytest.param(rwkv5, "bfloat16", marks=pytest.mark.slow),
        (rwkv6, "float32"),
        (rwkv7, "bfloat16"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.GENERATION.name,
)
def test_bits(module: ModuleType, dtype: str) -> None:
    """Only the second block of RWKV-7 differs by more than a norm."""
    config = config_of(module, num_layers=2 if module is rwkv7 else 1)
    params = random_like(shapes_of(module, config))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    model = Invariant(module, ROWS)
    whole, state = read(model, params, range(5), [9], dtype)
    for rows, pieces in (([4], [1] * 9), ([2, 0, 3, 1], [4, 1, 4])):
        logits, after = read(model, params, rows, pieces, dtype)
        assert np.array_equal(logits, whole[rows])
        for found, expected in zip(after, state, strict=True):
            assert np.array_equal(found, expected[rows])
    expected = np.stack(formulas(module, params, np.asarray(TOKENS)))
    assert rms_error(whole, expected) < {"float32": 1e-5, "bfloat16": 2e-2}[dtype]


@pytest.mark.slow
def test_stacked_blocks() -> None:
    """In groups of rows, of which the last one is not full."""
    params = parameters(rwkv7)
    model, stacked = Invariant(rwkv7, ROWS), rwkv7.stacked(params)
    found = model.apply(stacked, TOKENS, rwkv7.initial_state(stacked, 5))
    logits, state = rwkv7.apply(params, TOKENS)
    assert_trees_close(found, (logits, rwkv7.stacked(state)))


def test_no_tokens() -> None:
    params = parameters(rwkv7)
    for tokens in (TOKENS[:0], TOKENS[:, :0]):
        logits, state = Invariant(rwkv7).apply(params, tokens)
        assert logits.shape == (*tokens.shape, VOCABULARY)
        assert_trees_close(state, rwkv7.initial_state(params, len(tokens)))


@pytest.mark.slow
def test_segments() -> None:
    """Every document has the bits that it has alone, and padding changes no state."""
    params, model = parameters(rwkv7), Invariant(rwkv7, ROWS)
    ids = np.array([[1, 1, 1, 0, 2, 2, 0, 3, 0], [0, 4, 4, 4, 4, 4, 4, 4, 4]], np.int32)
    logits, state = model.apply(params, TOKENS[:2], segment_ids=jnp.asarray(ids))
    for row, number in ((0, 1), (0, 2), (0, 3), (1, 4)):
        places = ids[row] == number
        alone, after = model.apply(params, TOKENS[row : row + 1, places])
        assert np.array_equal(logits[row, places], alone[0])
        if number >= 3:
            for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
                assert np.array_equal(x[row], y[0])


@pytest.mark.slow
def test_generation_and_serving() -> None:
    """The same tokens and logits alone, with others, in other pieces and in a pool."""
    params, model = parameters(rwkv7), Invariant(rwkv7, ROWS)
    prompts = [row[: 9 - 2 * i].tolist() for i, row in enumerate(np.asarray(TOKENS))]
    given: dict[str, Any] = {"sampling": Sampling(temperature=0.8)}
    together = generate(model, params, prompts, 6, seed=range(5), **given)
    for row in (0, 4):
        alone = generate(model, params, [prompts[row]], 6, seed=[row], prefill_chunks=[2], **given)
        assert alone.tokens[0] == together.tokens[row]
        assert np.array_equal(alone.session.logits[0], together.session.logits[row])
    with Pool(model, params, 2, prefill_chunks=(4,), steps=3) as pool:
        requests = [pool.submit(prompts[i], 6, seed=i, **given) for i in range(5)]
        pool.run()
    assert [request.tokens for request in requests] == together.tokens


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_arguments() -> None:
    message = r"Invariant: rows is .*; accepted is an integer from 1 on"
    cases: list[tuple[Any, type[Exception]]] = [(0, ValueError), (2.0, TypeError)]
    for rows, error in cases:
        with pytest.raises(error, match=message):
            Invariant(rwkv7, rows)
    with pytest.raises(TypeError, match="Invariant: module is a int; accepted are rwkv4 to rwkv7"):
        Invariant(5, rows=2)  # pyright: ignore[reportArgumentType]
    ids = jnp.ones(5, jnp.int32)
    with pytest.raises(ValueError, match=r"Invariant: segment_ids has shape \(5,\)"):
        Invariant(rwkv7).hidden_states(parameters(rwkv7), TOKENS, segment_ids=ids)
