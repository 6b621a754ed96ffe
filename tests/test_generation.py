"""`rwkv_jax.generation`: sampling, reading prompts, decoding, sessions and text."""

import dataclasses
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from rwkv_jax import generation, tokenizers
from rwkv_jax.generation import Sampling, Session, TextStream, TokenStream, _session
from rwkv_jax.generation._decoding import Controls, decode
from rwkv_jax.generation._prefill import lengths_of_prefill_chunks, read_prefill_chunk
from rwkv_jax.generation._sampling import (
    NO_DISTRIBUTION,
    Occurrences,
    _exponential,
    sample,
    settings,
)
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from support.cases import Case
from support.models import VOCABULARY, formulas, parameters
from support.operators import available
from support.tolerance import EXACT_FLOAT32, assert_close, assert_trees_close

LENGTH, PIECES = 6, (4,)
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCABULARY, n).tolist() for n in (1, 3, 4, 5, 8, 11)]
BATCH = len(PROMPTS)
MIXED = Sampling(
    temperature=[0, 1, 2, 0.5, 1, 1],
    top_p=[1, 0.5, 0.9, 1, 1, 0.95],
    top_k=[0, 0, 5, 0, 10, 3],
    presence_penalty=0.5,
    frequency_penalty=0.25,
    decay=0.9,
    uncounted=(1, 2),
)


@pytest.fixture(scope="module")
def params() -> rwkv7.Params:
    return parameters(rwkv7)


def generate(params: Any, max_new_tokens: int = LENGTH, **options: Any) -> generation.Generated:
    """With the programs that these tests share."""
    given = {"prompts": PROMPTS, "sampling": MIXED, "prefill_chunks": PIECES} | options
    return generation.generate(rwkv7, params, max_new_tokens=max_new_tokens, **given)


def stream_of(params: Any) -> TokenStream:
    return TokenStream(rwkv7, params, PROMPTS, LENGTH, sampling=MIXED, prefill_chunks=PIECES)


def assert_same(one: Session, other: Session, row: int | None = None) -> None:
    """Bit for bit, all rows or one of them."""
    rows = slice(None) if row is None else row
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(y)[rows])


@pytest.mark.parametrize("module", [rwkv7, rwkv6, rwkv5, rwkv4], ids=lambda x: x.__name__[-5:])
def test_greedy_tokens_and_logits(module: ModuleType) -> None:
    """After prompts of all lengths in prefill chunks, against the model over the whole rows."""
    params = parameters(module)
    found = generation.generate(
        *(module, params, PROMPTS, LENGTH), sampling=Sampling(temperature=0), prefill_chunks=PIECES
    )
    rows = [prompt + new for prompt, new in zip(PROMPTS, found.tokens, strict=True)]
    expected = formulas(module, params, rows)
    for prompt, new, logits, last in zip(
        PROMPTS, found.tokens, expected, found.session.logits, strict=True
    ):
        total = len(prompt) + LENGTH
        assert np.argmax(logits[len(prompt) - 1 : total - 1], axis=-1).tolist() == new
        assert_close({"logits": last}, {"logits": logits[total - 1]}, EXACT_FLOAT32)
    assert found.finish_reasons == ["length"] * BATCH
    assert found.session.positions.tolist() == [len(tokens) for tokens in rows]


@pytest.mark.parametrize("form", [rwkv7.unstacked, rwkv7.stacked])
def test_rows_start_from_a_state(form: Any, params: rwkv7.Params) -> None:
    """As they go on after the tokens that made it. It is still there afterwards."""
    whole = generate(params, 0, prompts=[[3, 1, *prompt] for prompt in PROMPTS]).session
    _, state = rwkv7.apply(params, np.array([[3, 1]]))
    for _ in range(2):
        found = generation.generate(rwkv7, form(params), PROMPTS, 0, state=form(state)).session
        assert_trees_close(rwkv7.unstacked(found.state), whole.state, EXACT_FLOAT32)
        assert_trees_close(found.logits, whole.logits, EXACT_FLOAT32)


@pytest.mark.parametrize("number", [3, 0, VOCABULARY])
def test_log_probabilities(number: int, params: rwkv7.Params) -> None:
    """Of each token, also where one stops a row, before penalties and other settings. A stream
    gives the same, and the tokens are those of a call without."""
    stop = generate(params).tokens[2][4]
    expected, found = (generate(params, stop_tokens=[stop], logprobs=x) for x in (None, number))
    assert (found.tokens, expected.logprobs) == (expected.tokens, None)
    stream = TokenStream(
        *(rwkv7, params, PROMPTS, LENGTH),
        sampling=MIXED,
        prefill_chunks=PIECES,
        stop_tokens=[stop],
        logprobs=number,
    )
    text = TextStream(stream, tokenizers.load("bytes"))
    list(text)
    assert found.logprobs == text.logprobs
    assert found.logprobs is not None
    rows = [prompt + new for prompt, new in zip(PROMPTS, found.tokens, strict=True)]
    for prompt, row, logits, given in zip(
        PROMPTS, rows, formulas(rwkv7, params, rows), found.logprobs, strict=True
    ):
        assert len(given) == len(row) - len(prompt)
        for i, said in enumerate(given, len(prompt)):
            log_probs = logits[i - 1] - np.log(np.exp(logits[i - 1]).sum())
            likeliest = np.argsort(-log_probs)[:number]
            assert list(said.likeliest) == likeliest.tolist()
            right = log_probs[[row[i], *likeliest]]
            np.testing.assert_allclose([said.chosen, *said.likeliest.values()], right, rtol=1e-4)


def test_lengths_of_prefill_chunks() -> None:
    tokens = (0, 1, 16, 33, 64, 65, 129, 600, 1000)
    chunks = [[], [16], [16], [64], [64], [64, 16], [256], [256, 256, 64, 16, 16], [256] * 4]
    assert [
        lengths_of_prefill_chunks(number, generation.PREFILL_CHUNKS) for number in tokens
    ] == chunks


def test_nothing_is_compiled_again(params: rwkv7.Params) -> None:
    """For other lengths, settings, seeds, sessions and tokens that stop."""
    session = generate(params).session
    compiled: tuple[Any, ...] = (read_prefill_chunk, decode)
    programs = [x._cache_size() for x in compiled]
    prompts = [[1] * n for n in (20, 1, 2, 3, 4, 9)]
    generate(params, 3, prompts=prompts, sampling=Sampling(top_p=0.3), seed=7, stop_tokens=[5, 6])
    generate(params, 2, prompts=[[]] * 5 + [[1, 2]], session=session)
    assert [x._cache_size() for x in compiled] == programs


def test_a_token_goes_over_the_states_once(params: rwkv7.Params) -> None:
    """In place, where a native kernel does it: rows without a token keep their states without a
    selection."""
    model = _session.Model(rwkv7, np.dtype("float32"))
    session = jax.eval_shape(lambda: _session.started(model, params, BATCH))
    batch, heads, _, size = shape = session.state[0].att.wkv.shape
    if "ffi" not in available("wkv7_step", Case(batch, 1, heads, size)):
        pytest.skip("no native kernels of wkv7_step run here")
    controls = Controls(settings(MIXED, BATCH, VOCABULARY), np.zeros((BATCH, VOCABULARY), bool))
    left, one = np.ones(BATCH, np.int32), np.int32(1)
    lowered = decode.lower(model, params, session, controls, left, one, one, defers=True)
    text = lowered.compile().as_text()
    state = ",".join(map(str, shape))
    results = set(re.findall(rf"= f32\[{state}\]\S* ([a-z-]+)\(", text or ""))
    assert results == {"get-tuple-element", "parameter"}


def test_rows_do_not_depend_on_each_other(params: rwkv7.Params) -> None:
    order = [3, 1, 5, 0, 2, 4]
    one = generate(params, sampling=Sampling(), seed=[7, 8, 9, 10, 11, 12])
    assert one.tokens == generate(params, sampling=Sampling(), seed=7).tokens
    prompts, seeds = [PROMPTS[row] for row in order], [7 + row for row in order]
    other = generate(params, prompts=prompts, sampling=Sampling(), seed=seeds)
    assert other.tokens == [one.tokens[row] for row in order]
    assert one.tokens != generate(params, sampling=Sampling(), seed=70).tokens


def test_sessions_go_on(params: rwkv7.Params, tmp_path: Path) -> None:
    """In memory and on disk, and they outlast every call that they are given to."""
    whole = generate(params, seed=3)
    begun = generate(params, 2, seed=3)
    path = tmp_path / "session.safetensors"
    generation.save(path, begun.session)
    loaded = generation.load(path, rwkv7, params)
    assert_same(begun.session, loaded)
    stacked = loaded._replace(state=rwkv7.stacked(loaded.state))
    generation.save(path, stacked)
    assert_same(begun.session, generation.load(path, rwkv7, params))
    assert_same(stacked, generation.load(path, rwkv7, rwkv7.stacked(params)))
    for session in (begun.session, loaded, begun.session):
        rest = generate(params, LENGTH - 2, prompts=[[]] * BATCH, session=session)
        assert [a + b for a, b in zip(begun.tokens, rest.tokens, strict=True)] == whole.tokens
        assert_same(rest.session, whole.session)
    again = generate(params, 2, prompts=PROMPTS, session=begun.session, seed=9)
    assert again.session.seeds.tolist() == list(range(9, 9 + BATCH))
    # Penalties are those of the tokens since the last prompt.
    np.testing.assert_array_equal(np.sum(np.asarray(again.session.seen), axis=1) <= 2, True)


def test_prompts_in_two_calls(params: rwkv7.Params) -> None:
    """The second one adds nothing to some rows."""
    session = generate(params, 0, prompts=[prompt[:3] for prompt in PROMPTS]).session
    halves = generate(params, 0, prompts=[prompt[3:] for prompt in PROMPTS], session=session)
    assert_trees_close(halves.session, generate(params, 0).session, EXACT_FLOAT32)


def test_a_stream_donates_its_session(params: rwkv7.Params) -> None:
    stream = stream_of(params)
    before, kept = stream._session, stream.session
    given = next(stream)
    assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))
    assert [[token] for token in given] == stream.tokens == generate(params, 1).tokens


def test_stops(params: rwkv7.Params) -> None:
    """Rows that end at different times keep the sessions that they have when they end."""
    free = generate(params)
    stops = sorted({free.tokens[1][2], free.tokens[2][4]})
    found = generate(params, stop_tokens=stops)
    assert {"stop token"} < set(found.finish_reasons)
    for row, tokens in enumerate(free.tokens):
        cut = next((i for i, token in enumerate(tokens) if token in stops), LENGTH)
        assert found.tokens[row] == tokens[:cut]
        assert found.finish_reasons[row] == ("length" if cut == LENGTH else "stop token")
        assert_same(found.session, generate(params, cut).session, row)
    rest = generate(params, 3, prompts=[[]] * BATCH, session=found.session, stop_tokens=stops)
    ended = [reason == "stop token" for reason in found.finish_reasons]
    assert not any(tokens for tokens, end in zip(rest.tokens, ended, strict=True) if end)

    stream = stream_of(params)
    given = [next(stream)]
    stream.stop(0)
    given += stream
    assert [x[0] for x in given] == [free.tokens[0][0]] + [None] * (LENGTH - 1)
    assert stream.tokens == [free.tokens[0][:1], *free.tokens[1:]]
    assert stream.finish_reasons == ["stopped"] + ["length"] * (BATCH - 1)
    assert_same(stream.session, generate(params, 1).session, 0)


@pytest.mark.slow
def test_stacked_parameters_on_a_mesh(params: rwkv7.Params, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=cpus[:2])
    stacked = rwkv7.stacked(params)
    placed = jax.device_put(stacked, rwkv7.shardings(stacked, mesh, model="model"))
    # One prefill chunk, because another one would go on from placed states, and be compiled for
    # them.
    prompts = [prompt[:4] for prompt in PROMPTS]
    found, expected = (generate(x, prompts=prompts, logprobs=2) for x in (placed, params))
    assert found.tokens == expected.tokens
    assert found.logprobs
    assert expected.logprobs
    for row, right in zip(found.logprobs, expected.logprobs, strict=True):
        assert [list(x.likeliest) for x in row] == [list(x.likeliest) for x in right]
        np.testing.assert_allclose([x.chosen for x in row], [x.chosen for x in right], rtol=1e-5)
    session = found.session._replace(state=rwkv7.unstacked(found.session.state))
    assert_trees_close(session.state, expected.session.state, EXACT_FLOAT32)
    with pytest.raises(ValueError, match=r"state\.first\.att\.shift is missing"):
        generate(placed, session=expected.session)


def test_wrong_files(params: rwkv7.Params, tmp_path: Path) -> None:
    session = generate(params, 0).session
    path = tmp_path / "session.safetensors"
    with pytest.raises(FileNotFoundError):
        generation.load(path, rwkv7, params)
    with pytest.raises(ValueError, match=r"path is session\.npz; accepted is a file"):
        generation.save("session.npz", session)

    def refused(message: str, of: Any = params, dtype: Any = "float32") -> None:
        with pytest.raises(ValueError, match=message):
            generation.load(path, rwkv7, of, dtype=dtype)

    generation.save(path, session)
    message = r"4 arrays .* 6 rows and bfloat16[^$]*state\.1\.ffn is .* float32; .* in bfloat16"
    refused(message, dtype="bfloat16")
    deeper = params._replace(blocks=(*params.blocks, params.blocks[1]))
    refused(r"3 arrays[^$]*state\.2\.ffn is missing", deeper)
    shallower = params._replace(blocks=params.blocks[:1])
    refused(r"3 arrays[^$]*'state\.1\.ffn' is expected nowhere", shallower)
    generation.save(path, session._replace(positions=session.positions.reshape(2, 3)))
    refused("arrays are not those of a session")
    generation.save(path, session._replace(positions=session.positions - 100))
    refused("positions and seeds have a negative number")
    path.write_bytes(path.read_bytes()[:-1])
    refused("ends at byte")


def reference(
    logits: np.ndarray, row: dict[str, Any], seen: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """The distribution of the next token, by sorting, in float64."""
    logits = logits - np.where(seen, row["presence_penalty"] + row["frequency_penalty"] * counts, 0)
    if row["temperature"] == 0:
        return np.eye(len(logits))[logits.argmax()]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    descending = np.sort(p)[::-1]
    enough = np.cumsum(descending) >= row["top_p"]
    stays = p >= (descending[enough.argmax()] if row["top_p"] < 1 else 0)
    if 0 < row["top_k"] < len(p):
        stays &= p >= descending[row["top_k"] - 1]
    q = np.where(stays, p, 0) ** (1 / row["temperature"])
    return q / q.sum()


sampled = jax.jit(sample)


def next_tokens(
    logits: np.ndarray,
    sampling: Sampling,
    seen: Any = False,
    counts: Any = 0.0,
    seeds: Any = 0,
    positions: Any = 0,
) -> np.ndarray:
    """Of rows that have had no token, unless they are said to have had some."""
    seen, counts = (np.broadcast_to(x, logits.shape) for x in (seen, np.float32(counts)))
    seeds, positions = (np.broadcast_to(np.int32(x), len(logits)) for x in (seeds, positions))
    given = settings(sampling, *logits.shape)
    return np.asarray(sampled(logits, given, Occurrences(seen, counts), seeds, positions))


def test_sampling_against_the_formula() -> None:
    """Each token of rows with settings of their own, and the frequencies of the tokens of a row."""
    rng, rows = np.random.default_rng(2), 512
    logits = (2 * rng.standard_normal((rows, VOCABULARY))).astype(np.float32)
    seen = rng.random(logits.shape) < 0.3
    counts = np.where(seen, rng.integers(0, 4, logits.shape), 0).astype(np.float32)
    choices = {
        "temperature": [0, 0.3, 1, 2.5],
        "top_p": [0, 0.2, 0.7, 1],
        "top_k": [0, 1, 7, VOCABULARY, 10**6],
        "presence_penalty": [0, 0.4],
        "frequency_penalty": [0, 0.7],
    }
    chosen: dict[str, Any] = {name: rng.choice(x, rows) for name, x in choices.items()}
    seeds, positions = (rng.integers(0, 2**31 - 1, rows, np.int32) for _ in range(2))
    found = next_tokens(logits, Sampling(**chosen), seen, counts, seeds, positions)
    noise = np.asarray(_exponential(jnp.asarray(seeds), jnp.asarray(positions), VOCABULARY))
    for i in range(rows):
        row = {name: x[i] for name, x in chosen.items()}
        q = reference(logits[i].astype(np.float64), row, seen[i], counts[i])
        with np.errstate(divide="ignore"):
            assert found[i] == np.argmax(np.log(q) - np.log(noise[i].astype(np.float64)))

    row: dict[str, Any] = dict(zip(choices, (1.5, 0.9, 20, 0.4, 0.7), strict=True))
    q = reference(logits[0].astype(np.float64), row, seen[0], counts[0])
    same = np.broadcast_to(logits[0], logits.shape)
    number = np.zeros(VOCABULARY)
    for call in range(16):
        where = np.arange(rows) + call * rows
        found = next_tokens(same, Sampling(**row), seen[0], counts[0], positions=where)
        number += np.bincount(found, minlength=VOCABULARY)
    assert not number[q == 0].any()
    expected = (q * 16 * rows)[q > 0]
    deviation = np.sum((number[q > 0] - expected) ** 2 / expected)
    assert deviation < len(expected) + 4 * np.sqrt(2 * len(expected))


@pytest.mark.parametrize("warm", [0, 1], ids=["all rows", "some rows"])
def test_temperature_0_takes_the_first_of_the_largest(warm: int) -> None:
    rng, nan, inf = np.random.default_rng(3), np.nan, np.inf
    logits = rng.integers(0, 3, (40, VOCABULARY)).astype(np.float32)
    logits[:3] = -inf
    logits[0, 5:7], logits[1, [4, 9]], logits[2, 8] = 1, nan, inf
    found = next_tokens(logits, Sampling(temperature=[*[0] * 39, warm]))
    expected = np.argmax(logits, axis=-1)
    expected[1:3] = NO_DISTRIBUTION
    np.testing.assert_array_equal(found[:39], expected[:39])


@pytest.mark.parametrize("vocabulary", [3, 8192])
def test_logits_without_a_distribution(vocabulary: int) -> None:
    """With all kinds of settings. A logit may be -inf, as long as another one is finite."""
    nan, inf = np.nan, np.inf
    wrong = [[nan, 0, 1], [0, -nan, 1], [inf, 0, 1], [1, inf, inf], [-inf, nan, -inf], [-inf] * 3]
    rows = np.array([*wrong, [-inf, 0, -inf]], np.float32)
    rows = np.pad(rows, ((0, 0), (0, vocabulary - 3)), constant_values=-inf)
    choices = [(0, 1, 0), (1, 1, 0), (0.5, 0.5, 0), (1, 0, 0), (1, 1, 2)]
    each = np.repeat(np.array(choices), len(rows), axis=0).T
    sampling = Sampling(temperature=each[0], top_p=each[1], top_k=each[2].astype(int))
    found = next_tokens(np.tile(rows, (len(choices), 1)), sampling)
    assert found.tolist() == ([NO_DISTRIBUTION] * len(wrong) + [1]) * len(choices)


def test_a_row_without_a_next_token(params: rwkv7.Params) -> None:
    """It fails, also where another token would stop it. The others go on with their bits."""
    whole = generate(params)
    token = whole.tokens[1][3]
    others = (0, *range(2, BATCH))
    assert all(token not in PROMPTS[row] + whole.tokens[row] for row in others)
    wrong = params._replace(emb=rwkv7.Weight(params.emb.weight.at[token].set(jnp.nan)))
    message = "generate: row 1: no token can be sampled after 4 new ones.*small for float16"
    with pytest.raises(FloatingPointError, match=message):
        generate(wrong, stop_tokens=[VOCABULARY + NO_DISTRIBUTION])
    text = TextStream(stream_of(wrong), tokenizers.load("bytes"))
    with pytest.raises(FloatingPointError, match=message):
        list(text)
    assert text.finish_reasons == ["length", "failed", *["length"] * 4]
    assert text.tokens[1] == whole.tokens[1][:4]
    for row in others:
        assert text.tokens[row] == whole.tokens[row]
        assert text.texts[row] == tokenizers.load("bytes").decode(whole.tokens[row])
        assert_same(text.session, whole.session, row)


def test_the_last_position(params: rwkv7.Params, tmp_path: Path) -> None:
    """A session never has a position that no int32 can hold."""
    session, path = generate(params, 0).session, tmp_path / "session.safetensors"
    nothing: list[list[int]] = [[]] * BATCH
    late = session._replace(positions=jnp.full(BATCH, 2**31 - 1 - LENGTH, jnp.int32))
    last = generate(params, prompts=nothing, session=late).session
    generation.save(path, last)
    assert generation.load(path, rwkv7, params).positions.tolist() == [2**31 - 1] * BATCH
    for prompts, length in ((nothing, 1), ([*nothing[1:], [1]], 0), (PROMPTS, LENGTH)):
        row = max(range(BATCH), key=lambda row: len(prompts[row]))
        total = 2**31 - 1 + len(prompts[row]) + length
        with pytest.raises(ValueError, match=f"row {row} would have {total} tokens, .* 2147483647"):
            generate(params, length, prompts=prompts, session=last)


def test_penalties_of_occurrences(params: rwkv7.Params) -> None:
    """Counts decay, and tokens that do not count still have been seen."""
    # The first token of a row is the same with any of these settings.
    firsts = {tokens[0] for tokens in generate(params).tokens}
    found = generate(params, sampling=dataclasses.replace(MIXED, uncounted=tuple(firsts)))
    assert {tokens[0] for tokens in found.tokens} == firsts
    seen, counts = np.asarray(found.session.seen), np.asarray(found.session.counts)
    for row, tokens in enumerate(found.tokens):
        expected = np.zeros(VOCABULARY)
        for token in tokens:
            expected *= 0.9
            expected[token] += token not in firsts
        np.testing.assert_allclose(counts[row], expected, rtol=1e-6)
        assert set(np.flatnonzero(seen[row])) == set(tokens)
    assert counts.any()


def test_random_numbers_are_the_same_everywhere() -> None:
    """With any settings of JAX. The words of Threefry are those of a computation by hand."""

    def numbers() -> np.ndarray:
        compiled = jax.jit(_exponential, static_argnums=2)
        return np.asarray(compiled(jnp.array([0, 123456]), jnp.array([0, 2**31 - 1]), 4))

    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        one = numbers()
    with jax.threefry_partitionable(True):
        np.testing.assert_array_equal(one, numbers())
    words = [
        [0x28B634DE, 0xD27B7B07, 0xEFB19F56, 0xDB45B23B],
        [0x1C357FAA, 0x15BADD4B, 0xA3EDEDF5, 0x0C504102],
    ]
    np.testing.assert_allclose(one, -np.log1p(-(np.array(words) + 0.5) / 2**32), rtol=1e-6)


WRONG = [
    ({"prompts": []}, ValueError, "there are no prompts"),
    ({"prompts": [[1], []]}, ValueError, "the prompt of row 1 is empty"),
    ({"prompts": [[1], [61]]}, ValueError, "row 1 has the token 61; accepted are tokens below 61"),
    ({"prompts": [[-1]]}, ValueError, "accepted are tokens, from 0 on"),
    ({"prompts": [[0.5]]}, TypeError, "accepted are integers"),
    ({"max_new_tokens": -1}, ValueError, "max_new_tokens is -1"),
    ({"max_new_tokens": 2**31}, ValueError, "2147483648; accepted is an integer from 0 to 21474"),
    ({"max_new_tokens": 2**31 - 11}, ValueError, "row 5 would have 2147483648 tokens"),
    ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens is 2.5; accepted is an integer from 0"),
    ({"logprobs": -1}, ValueError, "logprobs is -1; accepted is an integer from 0 to 61"),
    ({"logprobs": 62}, ValueError, "logprobs is 62; accepted is an integer from 0 to 61"),
    ({"prefill_chunks": ()}, ValueError, "prefill_chunks is ()"),
    ({"prefill_chunks": (0, 4)}, ValueError, "a length of prefill_chunks is 0; accepted is an int"),
    ({"prefill_chunks": [1.5]}, TypeError, "a length of prefill_chunks is 1.5; accepted is an int"),
    ({"prefill_chunks": 5}, ValueError, "prefill_chunks is 5; accepted are lengths"),
    ({"sampling": {}}, TypeError, "sampling is {}; accepted is a Sampling or None"),
    ({"stop_tokens": [99]}, ValueError, "stop_tokens has the token 99"),
    ({"seed": [1, 2]}, ValueError, "seed has the shape (2,); accepted is one integer, or 6"),
    ({"seed": 2**31 - 1}, ValueError, "from 0 to 2^31 - 6"),
    ({"seed": [0] * 5 + [2**31]}, ValueError, "from 0 to 2^31 - 1"),
    ({"session": 0, "state": 0}, ValueError, "state with a session; accepted is None for one"),
    ({"state": ()}, ValueError, "state is not one of this model with one row"),
    ({"seed": 0.5}, TypeError, "accepted are integers"),
    ({"sampling": Sampling(top_p=[0.1, 0.2])}, ValueError, "top_p has 2 numbers; accepted is one"),
    ({"sampling": Sampling(uncounted=[61])}, ValueError, "uncounted has the token 61"),
    ({"kernels": "fast"}, ValueError, "generate: kernels is 'fast'; accepted are None, 'xla'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda x: str(x)[:30])
@pytest.mark.usefixtures("unchecked_types")
def test_wrong_arguments(
    params: rwkv7.Params, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        generate(params, **options)
    assert message in str(raised.value)


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_models(params: rwkv7.Params, tmp_path: Path) -> None:
    wrong: Any = (
        ("rwkv4", params, "generate: module is a str; accepted are rwkv4 to rwkv7"),
        (params, rwkv7, "generate: module is a Params; accepted are rwkv4 to rwkv7"),
        (rwkv7, {}, "rwkv7: params is a dict; accepted is a Params"),
    )
    for module, given, message in wrong:
        with pytest.raises(TypeError, match=message):
            generation.generate(module, given, [[1]], 1)
    with pytest.raises(TypeError, match="save: session is a int; accepted is a Session"):
        generation.save(tmp_path / "x.safetensors", 5)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_settings() -> None:
    nan, inf = float("nan"), float("inf")
    wrong: list[tuple[type[Exception], list[tuple[str, Any]]]] = [
        (ValueError, [("temperature", x) for x in (-1, 1e-9, nan, [1, -1], [[1.0]])]),
        (ValueError, [("top_p", -0.1), ("top_p", 1.5), ("top_k", -1), ("top_k", 2**31)]),
        (ValueError, [("presence_penalty", inf), ("frequency_penalty", nan)]),
        (ValueError, [("decay", 1.1), ("uncounted", [-1])]),
        (TypeError, [("top_k", 0.5), ("top_p", "1"), ("temperature", None), ("uncounted", [0.5])]),
    ]
    for error, several in wrong:
        for name, value in several:
            with pytest.raises(error, match=f"Sampling: {name} is .*; accepted"):
                Sampling(**{name: value})


class Spoken(TokenStream):
    """A stream of given tokens, each row up to a stop token."""

    def __init__(self, rows: Sequence[bytes]):
        self.tokens, self.finish_reasons = [[] for _ in rows], [None for _ in rows]
        self.logprobs = None
        self._active, self._left = np.ones(len(rows), bool), 100
        self._columns = zip_longest(*([*row, -1] for row in rows), fillvalue=-1)

    def _decoded(self, left: int, *, all_steps: bool = False) -> Any:
        return np.array([next(self._columns)]), 1, None


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("plain", (), "plain", "stop token"),
        ("to the stop!", ("stop",), "to the ", "stop string"),
        ("a\n\nUse of\n\nUser: b", ("\n\nUser:",), "a\n\nUse of", "stop string"),
        ("aabaab", ("aaab",), "aabaab", "stop token"),
        ("ababac", ("abac",), "ab", "stop string"),
        ("one two", ("e two three", "two"), "one ", "stop string"),
        ("held at the en", ("end",), "held at the en", "stop token"),
        ("é€😀", ("€",), "é", "stop string"),
        ("stop at once", ("s",), "", "stop string"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str, reason: str) -> None:
    """With one byte for each token, and a second row that goes on."""
    stream = TextStream(Spoken([text.encode(), b"1" * 30]), tokenizers.load("bytes"), stop)
    given = list(stream)
    assert "".join(x[0] for x in given) == expected == stream.texts[0]
    assert "".join(x[1] for x in given) == "1" * 30
    assert stream.finish_reasons == [reason, "stop token"]
    assert text.startswith(expected + stream.rests[0])
    assert stream.rests[0] == next((s for s in stop if text.startswith(expected + s)), "")


def test_a_tokenizer_with_fewer_tokens(params: rwkv7.Params) -> None:
    """What it does not have is no text."""
    few = tokenizers.Tokenizer("few", 3, {1: b"a", 2: b"b"}, lambda text: [1])
    text = TextStream(stream_of(params), few)
    list(text)
    assert max(map(max, text.tokens)) > 2
    for tokens, found in zip(text.tokens, text.texts, strict=True):
        assert found == "".join({1: "a", 2: "b"}.get(x, "") for x in tokens)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    stream = TextStream(Spoken(["x\n\né\n".encode()]), tokenizers.load("bytes"), ["\n\nU"])
    assert [x for (x,) in stream] == ["x", "", "", "", "\n\né", "", "\n"]
    stream = TextStream(Spoken([b"ab\nc", b"\xc3"]), tokenizers.load("bytes"), ["\nU"])
    assert [next(stream) for _ in range(3)] == [["a", ""], ["b", "\ufffd"], ["", ""]]
    assert stream.stop(0) == "\n"
    assert stream.texts == ["ab\n", "\ufffd"]
    assert stream.finish_reasons == ["stopped", "stop token"]
    with pytest.raises(ValueError, match="stop is \\[''\\]"):
        TextStream(Spoken([b"a"]), tokenizers.load("bytes"), [""])
