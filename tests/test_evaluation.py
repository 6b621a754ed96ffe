"""`rwkv_jax.evaluation` against the losses of the model in numpy."""

import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import evaluation
from rwkv_jax.evaluation._scores import _read
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from support.models import VOCABULARY, formulas, parameters, predicted
from support.tolerance import EXACT_FLOAT32, rms_error

CONTEXT = 11
OPTIONS: Any = {"context": CONTEXT, "batch": 3, "chunk_size": 4, "kernels": "reference"}


def expected(module: ModuleType, params: Any, tokens: np.ndarray) -> evaluation.Evaluation:
    """Window after window, and the softmax of the logits of each token."""
    losses, counts = np.zeros(CONTEXT), np.zeros(CONTEXT, np.int64)
    for start in range(0, len(tokens) - 1, CONTEXT):
        inputs = tokens[start : start + CONTEXT + 1][:-1]
        targets = tokens[start + 1 : start + CONTEXT + 1]
        (logits,) = formulas(module, params, [inputs])
        for i, (z, target) in enumerate(zip(logits, targets, strict=True)):
            losses[i] += np.log(np.exp(z).sum()) - z[target]
            counts[i] += 1
    return evaluation.Evaluation(losses, counts)


def test_as_in_numpy() -> None:
    """Windows in parts, of which the last one has padding, and in batches, of which the last one
    has a single short window."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 37)
    for module in (rwkv5, rwkv6):
        params, seen = parameters(module), list[int]()
        found = evaluation.evaluate(module, params, tokens, progress=seen.append, **OPTIONS)
        correct = expected(module, params, tokens)
        np.testing.assert_array_equal(found.counts, correct.counts)
        np.testing.assert_allclose(found.losses, correct.losses, rtol=1e-5)
        assert found.tokens == 36
        assert seen == [12, 12, 9, 3]


LENGTHS = (2, 9, 30, 3, 17, 5, 12, 2, 8)
PIECES: Any = {"batch": 3, "chunk_size": 8}


@pytest.mark.parametrize("module", [rwkv7, rwkv6, rwkv5, rwkv4], ids=lambda x: x.__name__[-5:])
def test_scores(module: ModuleType) -> None:
    """Documents that share rows and pieces, and those that begin or end with a piece. Some tokens
    are the likeliest ones. There is one program."""
    params, rng = parameters(module), np.random.default_rng(2)
    documents = [rng.integers(0, VOCABULARY, n) for n in LENGTHS]
    for document in documents:
        document[-1] = formulas(module, params, [document[:-1]])[0][-1].argmax()
    read: Any = _read
    seen, programs = list[int](), read._cache_size()
    found = evaluation.score(module, params, documents, progress=seen.append, **PIECES)
    assert read._cache_size() == programs + 1
    for document, score in zip(documents, found, strict=True):
        log_probs, greedy = predicted(module, params, document)
        assert rms_error(score.log_probs, log_probs) < EXACT_FLOAT32
        np.testing.assert_array_equal(score.greedy, greedy)
        assert score.greedy[-1]
    assert sum(seen) == sum(LENGTHS) - len(LENGTHS)
    assert max(seen) == 24
    assert evaluation.score(module, params, []) == []


def test_scores_from_a_state() -> None:
    """As of the documents that begin with the tokens that made it. It is still there afterwards."""
    params, rng = parameters(rwkv7), np.random.default_rng(3)
    documents = [rng.integers(0, VOCABULARY, n) for n in LENGTHS]
    _, state = rwkv7.apply(params, np.array([[3, 1]]))
    text = evaluation.evaluate(rwkv7, params, documents[2], state=state, **OPTIONS)
    windows = [np.append([3, 1], documents[2][i:][:12]) for i in range(0, 29, CONTEXT)]
    scores = evaluation.score(rwkv7, params, windows)
    assert text.loss == pytest.approx(-sum(x.log_probs[2:].sum() for x in scores) / 29)
    whole = evaluation.score(rwkv7, params, [np.append([3, 1], x) for x in documents], **PIECES)
    for form in (rwkv7.unstacked, rwkv7.stacked):
        found = evaluation.score(rwkv7, form(params), documents, state=form(state), **PIECES)
        for score, expected in zip(found, whole, strict=True):
            np.testing.assert_allclose(score.log_probs, expected.log_probs[2:], rtol=2e-6)
            np.testing.assert_array_equal(score.greedy, expected.greedy[2:])


def test_scores_that_are_not_finite() -> None:
    params = parameters(rwkv5)
    wrong = params._replace(emb=rwkv5.Weight(params.emb.weight.at[7].set(jnp.nan)))
    documents = [[1] * 20, [1, 2, 7, 3], [1] * 20]
    with pytest.raises(FloatingPointError, match=r"document 1: .* NaN or infinite after 3 tokens"):
        evaluation.score(rwkv5, wrong, documents, **PIECES)


def test_losses_that_are_not_finite() -> None:
    """From a token on whose embedding is NaN, the sixth one of a window."""
    params, tokens, seen = parameters(rwkv5), np.ones(37, np.int32), list[int]()
    wrong = params._replace(emb=rwkv5.Weight(params.emb.weight.at[7].set(jnp.nan)))
    tokens[16] = 7
    with pytest.raises(FloatingPointError, match="NaN or infinite after 6 tokens of context"):
        evaluation.evaluate(rwkv5, wrong, tokens, progress=seen.append, **OPTIONS)
    assert seen == [12]


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
        ([1, 61], {}, "tokens are from 1 to 61; accepted are 0 to 60"),
        ([-1, 2], {}, "tokens are from -1 to 2; accepted are 0 to 60"),
        ([1, 2], {"context": 0}, "context is 0; accepted is an integer from 1 on"),
        ([1, 2], {"batch": -1}, "batch is -1; accepted is an integer from 1 on"),
        *(
            ([1, 2], {"chunk_size": x}, f"chunk_size is {x!r}; accepted is an integer from 1 on")
            for x in (0, 2.9, True, None, "3", math.nan)
        ),
        ([1, 2], {"kernels": "fast"}, "evaluate: kernels is 'fast'; accepted are None, 'xla'"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_wrong_arguments(tokens: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        evaluation.evaluate(rwkv5, parameters(rwkv5), np.asarray(tokens), **options)


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[1, 2], []], {}, r"document 1: tokens is float64 \[0\]; accepted are integers \[T\]"),
        ([[1, 2], [3]], {}, r"document 1: tokens is int64 \[1\]; .* T of at least 2"),
        ([[1, 61]], {}, "score: document 0: tokens are from 1 to 61; accepted are 0 to 60"),
        ([[1, 2]], {"batch": 0}, "score: batch is 0; accepted is an integer from 1 on"),
        ([[1, 2]], {"chunk_size": 2.5}, "score: chunk_size is 2.5; accepted is an integer"),
        ([[1, 2]], {"state": ()}, "score: state is not one of this model with one row"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_documents_that_are_refused(documents: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        evaluation.score(rwkv5, parameters(rwkv5), documents, **options)
