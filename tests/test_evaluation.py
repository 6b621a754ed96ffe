"""`rwkv_jax.evaluation` against the losses of the model in numpy."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import evaluation
from rwkv_jax.models import rwkv5
from support.models import formulas, random_like, shapes_of

CONFIG = rwkv5.Config(layers=2, width=16, head_size=8, vocabulary=23)
CONTEXT = 11


@pytest.fixture(scope="module")
def params() -> Any:
    return random_like(shapes_of(rwkv5, CONFIG), 1.0)


def expected(params: Any, tokens: np.ndarray, context: int) -> evaluation.Evaluation:
    """Window after window, and the softmax of the logits of each token."""
    losses, counts = np.zeros(context), np.zeros(context, np.int64)
    for start in range(0, len(tokens) - 1, context):
        inputs = tokens[start : start + context + 1][:-1]
        targets = tokens[start + 1 : start + context + 1]
        (logits,) = formulas(rwkv5, params, [inputs])
        for i, (z, target) in enumerate(zip(logits, targets, strict=True)):
            losses[i] += np.log(np.exp(z).sum()) - z[target]
            counts[i] += 1
    return evaluation.Evaluation(losses, counts)


def evaluate(params: Any, tokens: np.ndarray) -> tuple[evaluation.Evaluation, list[int]]:
    """And what was said of the progress."""
    options: Any = {"context": CONTEXT, "batch": 3, "at_once": 4, "implementation": "reference"}
    seen: list[int] = []
    try:
        return evaluation.evaluate(rwkv5, params, tokens, progress=seen.append, **options), seen
    finally:
        assert seen[0] == 12


def test_as_in_numpy(params: Any) -> None:
    """Windows in parts, of which the last one has padding, and in batches, of which the last one
    has a single short window."""
    tokens = np.random.default_rng(1).integers(0, 23, 37)
    found, seen = evaluate(params, tokens)
    correct = expected(params, tokens, CONTEXT)
    np.testing.assert_array_equal(found.counts, correct.counts)
    np.testing.assert_allclose(found.losses, correct.losses, rtol=1e-5)
    assert found.tokens == 36
    assert seen == [12, 12, 9, 3]


def test_losses_that_are_not_finite(params: Any) -> None:
    """From a token on whose embedding is NaN, the sixth one of a window."""
    wrong = params._replace(emb=rwkv5.Weight(params.emb.weight.at[7].set(jnp.nan)))
    tokens = np.ones(37, np.int32)
    tokens[16] = 7
    with pytest.raises(FloatingPointError, match="NaN or infinite after 6 tokens of context"):
        evaluate(wrong, tokens)


def test_figures() -> None:
    result = evaluation.Evaluation(np.array([5.0, 3, 4, 2, 1]), np.array([2, 2, 2, 1, 0]))
    assert result.loss == 15 / 7
    assert result.perplexity == pytest.approx(math.exp(15 / 7))
    assert result.bits_per_byte(30) == pytest.approx(0.5 / math.log(2))
    assert result.buckets() == [(1, 1, 2, 2.5), (2, 2, 2, 1.5), (3, 4, 3, 2.0)]
    assert evaluation.Evaluation(np.array([1e9]), np.array([1])).perplexity == math.inf
    assert evaluation.Evaluation(np.array([2.0]), np.array([1])).buckets() == [(1, 1, 1, 2.0)]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([1], {}, r"tokens is int64 \[1\]; accepted are integers \[T\] with T of at least 2"),
        ([[1, 2]], {}, r"tokens is int64 \[1, 2\]; accepted"),
        ([1.0, 2.0], {}, r"tokens is float64 \[2\]; accepted"),
        ([1, 23], {}, "tokens are from 1 to 23; accepted are 0 to 22"),
        ([-1, 2], {}, "tokens are from -1 to 2; accepted are 0 to 22"),
        ([1, 2], {"context": 0}, "context is 0; accepted is a positive integer"),
        ([1, 2], {"batch": -1}, "batch is -1; accepted is a positive integer"),
        ([1, 2], {"at_once": 0}, "at_once is 0; accepted is a positive integer"),
    ],
)
def test_wrong_arguments(params: Any, tokens: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(rwkv5, params, np.asarray(tokens), **options)
