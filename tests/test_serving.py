"""`rwkv_jax.serving`: a batch whose sequences come and go."""

import functools
import itertools
import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from rwkv_jax import tokenizers
from rwkv_jax.generation import Sampling
from rwkv_jax.models import rwkv4, rwkv7
from rwkv_jax.serving import Pool, Request, _slots
from support.models import VOCABULARY, formulas, parameters

LENGTH, PIECES = 12, (4, 8)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, VOCABULARY, n).tolist() for n in (3, 30, 8, 17, 1, 12)]
GREEDY = Sampling(temperature=0)
PRESENCE = Sampling(top_p=0.8, presence_penalty=0.5, uncounted=(1, 2))
FREQUENCY = Sampling(top_k=9, frequency_penalty=0.3, decay=0.9)
SETTINGS = [Sampling(), GREEDY, PRESENCE, FREQUENCY, Sampling(temperature=1.5), Sampling()]
NUMBERS = range(len(PROMPTS))
MESH = jax.make_mesh(
    *((2, 2), ("data", "model")), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")
)
# Every token of the model is a letter.
LETTERS = tokenizers.Tokenizer(
    "letters", VOCABULARY, {n: b"%c" % (65 + n) for n in range(VOCABULARY)}, lambda text: [0]
)


@pytest.fixture(scope="module")
def params() -> rwkv7.Params:
    return parameters(rwkv7)


def pool_of(params: Any, slots: int = 3, **options: Any) -> Pool:
    """With the programs that these tests share."""
    return Pool(rwkv7, params, slots, **{"prefill_chunks": PIECES, "steps": 5} | options)


def submit(pool: Pool, number: int, **options: Any) -> Request:
    given = {"max_new_tokens": LENGTH, "sampling": SETTINGS[number], "seed": number} | options
    return pool.submit(given.pop("prompt", PROMPTS[number]), **given)


def compiled_programs() -> list[int]:
    """How many programs of each kind have been compiled."""
    programs: tuple[Any, ...] = (_slots.start, _slots.read, _slots.decode, _slots.state_of)
    return [program._cache_size() for program in programs]


def in_threads(*actions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=action) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def session_of(pool: Pool, slot: int) -> list[np.ndarray]:
    """What a slot has on the device."""
    assert pool._scheduler._slots is not None
    return [np.asarray(x)[slot] for x in jax.tree.leaves(pool._scheduler._slots.session)]


@pytest.fixture(scope="module")
def alone(params: rwkv7.Params) -> list[tuple[list[int], list[np.ndarray]]]:
    """The tokens of each request, and what its slot has at the end, in a pool without others."""
    found = []
    for number in NUMBERS:
        pool = pool_of(params)
        request = submit(pool, number)
        assert list(request) == request.tokens
        assert (request.finish_reason, request.cached) == ("length", 0)
        found.append((request.tokens, session_of(pool, 0)))
    return found


def assert_alone(
    pool: Pool, requests: dict[int, Request], alone: Any, slots: dict[int, int] | None = None
) -> None:
    """Requests have the bits that they have alone: their tokens, and those of `slots` all."""
    for number, request in requests.items():
        assert request.tokens == alone[number][0]
    for number, slot in (slots or {}).items():
        for x, expected in zip(session_of(pool, slot), alone[number][1], strict=True):
            np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("module", [rwkv7, rwkv4], ids=lambda x: x.__name__[-5:])
def test_greedy_tokens(module: ModuleType) -> None:
    """Those of the formulas in float64."""
    params = parameters(module)
    pool = Pool(module, params, 3, prefill_chunks=PIECES, steps=5)
    requests = [submit(pool, number, sampling=GREEDY) for number in (0, 1, 2, 3)]
    pool.run()
    rows = [[*request.prompt.tolist(), *request.tokens] for request in requests]
    for request, logits in zip(requests, formulas(module, params, rows), strict=True):
        expected = np.argmax(logits[len(request.prompt) - 1 : -1], axis=-1)
        assert request.tokens == expected.tolist()


def test_requests_do_not_depend_on_each_other(params: rwkv7.Params, alone: Any) -> None:
    """Whatever slots they have, whenever they come, and whoever had the slot before."""
    pool = pool_of(params, cache_bytes=0)
    requests = {number: submit(pool, number) for number in (5, 4, 3)}
    pool.run()
    requests |= {number: submit(pool, number) for number in (1, 0, 2)}
    pool.run()
    assert_alone(pool, requests, alone, {1: 0, 0: 1, 2: 2})
    assert pool.totals.read == sum(map(len, PROMPTS))
    assert pool.totals.written == LENGTH * len(PROMPTS)

    late = {}
    for number in (4, 1, 5, 0, 3, 2):
        late[number] = submit(pool, number)
        pool.step()
    assert pool.running == 3
    assert pool.waiting > 0
    pool.run()
    assert (pool.running, pool.waiting) == (0, 0)
    assert_alone(pool, late, alone)


@pytest.mark.slow
def test_prompts_side_by_side(params: rwkv7.Params, alone: Any) -> None:
    """Two prompts in a call, also where their prefill chunks are of different lengths."""
    pool = pool_of(params, readers=2)
    requests = {number: submit(pool, number) for number in (3, 1, 5, 0)}
    pool.run()
    assert_alone(pool, requests, alone)


def test_kept_states(params: rwkv7.Params, alone: Any) -> None:
    """A prompt with a known beginning reads only the rest, with the bits of the whole prompt."""
    pool = pool_of(params)
    first = submit(pool, 1)
    pool.run()
    again = submit(pool, 1)
    pool.run()
    assert (first.cached, again.cached) == (0, 24)
    assert_alone(pool, {1: again}, alone, {1: 0})
    turn = [*PROMPTS[1], *again.tokens, *PROMPTS[0]]
    expected = submit(pool_of(params, cache_bytes=0), 1, prompt=turn)
    found = submit(pool, 1, prompt=turn)
    assert list(found) == list(expected)
    assert (found.cached, expected.cached) == (24, 0)
    assert pool.totals.cached == 24 + 24


def test_sequences_start_from_a_given_state(params: rwkv7.Params, alone: Any) -> None:
    """The state after 8 tokens of a prompt, before the rest of it."""
    _, state = jax.jit(rwkv7.apply)(params, np.array([PROMPTS[1][:8]]))
    request = submit(pool_of(params, state=state), 1, prompt=PROMPTS[1][8:])
    assert list(request) == alone[1][0]
    with pytest.raises(ValueError, match=r"Pool: state is not one .* one row[^$]*1\.ffn is miss"):
        pool_of(params, state=state[:1])


def test_which_states_are_kept(params: rwkv7.Params) -> None:
    """Those that were used last, as many as there is room for, and none without room."""
    size = sum(x.nbytes for x in jax.tree.leaves(rwkv7.initial_state(params, 1)))

    def cached(room: int, beginnings: list[list[int]]) -> list[int]:
        pool, found = pool_of(params, cache_bytes=room * size), []
        for beginning in beginnings:
            request = submit(pool, 4, prompt=[*beginning, 0], max_new_tokens=1)
            request.wait()
            found.append(request.cached)
        return found

    a, b, c = ([token] * 8 for token in (1, 2, 3))
    assert cached(2, [a, a, b, a, c, a, b, c]) == [0, 8, 0, 8, 0, 8, 0, 0]
    assert cached(1, [a, a + b, a + b, b + b, c + b]) == [0, 8, 16, 0, 0]
    assert cached(0, [a, a]) == [0, 0]


def test_a_long_prompt_does_not_stop_others(params: rwkv7.Params) -> None:
    """Each scheduler step reads one prefill chunk of it, and decodes tokens of the others."""
    pool = pool_of(params, steps=1)
    first = submit(pool, 4)
    pool.step()
    long = submit(pool, 1)
    for _ in range(3):
        before = len(first.tokens)
        pool.step()
        assert (len(first.tokens), len(long.tokens)) == (before + 1, 0)
    pool.step()
    assert len(long.tokens) == 1


def test_nothing_is_compiled_again(params: rwkv7.Params, alone: Any) -> None:
    """Whatever comes and goes."""
    compiled = compiled_programs()
    pool = pool_of(params, tokenizer=LETTERS)
    for length in range(1, 40, 3):
        submit(
            pool, length % 6, prompt=[length] * length, max_new_tokens=length, stop_tokens=[length]
        )
        if length % 2:
            pool.step()
    pool.run()
    assert compiled_programs() == compiled


def test_ends(params: rwkv7.Params, alone: Any) -> None:
    """Stop tokens, stop strings and cancelled requests. The others do not notice."""
    tokens = [x for x, _ in alone]
    pool = pool_of(params, tokenizer=LETTERS)
    stopped = submit(pool, 0, stop_tokens=[tokens[0][6], VOCABULARY - 1])
    cut = tokens[0].index(tokens[0][6])
    word = LETTERS.decode(tokens[3][4:6])
    text = submit(pool, 3, stop=["no letters", word])
    cancelled, other = submit(pool, 1), submit(pool, 5)
    waiting = submit(pool, 2)
    waiting.cancel()
    assert pool.waiting == 4
    while not cancelled.tokens:
        pool.step()
    cancelled.cancel()
    number = len(cancelled.tokens)
    assert list(text.texts())
    assert pool.running
    pool.run()
    assert (stopped.finish_reason, stopped.tokens) == ("stop token", tokens[0][:cut])
    assert stopped.text == LETTERS.decode(tokens[0][:cut])
    before = LETTERS.decode(tokens[3]).split(word)[0]
    assert (text.finish_reason, text.text) == ("stop string", before)
    assert LETTERS.decode(text.tokens) == text.text + word
    assert (cancelled.finish_reason, len(cancelled.tokens)) == ("cancelled", number)
    assert (waiting.finish_reason, waiting.tokens) == ("cancelled", [])
    assert (other.finish_reason, other.tokens) == ("length", tokens[5])


def test_times(params: rwkv7.Params) -> None:
    pool = pool_of(params)
    request = submit(pool, 0, max_new_tokens=7)
    with pytest.raises(ValueError, match="the pool has no tokenizer"):
        _ = request.text
    assert request.time_to_first_token is None
    assert not request.wait(timeout=0.0)
    assert request.wait()
    assert request.time_to_first_token is not None
    assert request.time_to_first_token > 0
    gaps = np.asarray(request.times_between_tokens)
    assert gaps[[0, 1, 2, 3, 5]].tolist() == [0] * 5  # calls of 5 and of 2 tokens
    assert gaps[4] > 0
    assert pool.totals.steps == 2
    assert pool.totals.seconds > gaps[4]


def test_threads(params: rwkv7.Params, alone: Any) -> None:
    """One does the scheduler steps, others submit and wait."""
    found: dict[int, Request] = {}

    def one(number: int) -> None:
        found[number] = submit(pool, number)
        assert list(found[number]) == found[number].tokens

    with pool_of(params) as pool:
        pool.start()
        with pytest.raises(RuntimeError, match="the pool is closed or has a thread"):
            pool.start()
        in_threads(*(functools.partial(one, number) for number in NUMBERS))
        assert_alone(pool, found, alone)
        endless = submit(pool, 0, max_new_tokens=10**6)
        next(iter(endless))
    assert endless.finish_reason == "cancelled"
    with pytest.raises(RuntimeError, match="submit: the pool is closed"):
        submit(pool, 0)
    with pytest.raises(RuntimeError, match="start: the pool is closed"):
        pool.start()


def test_closed_while_it_starts(params: rwkv7.Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits until the thread has begun, and then for its end."""
    pool, start = pool_of(params), threading.Thread.start
    closing = threading.Thread(target=pool.close)

    def start_late(thread: threading.Thread) -> None:
        start(closing)
        closing.join(0.1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    pool.start()
    closing.join()
    with pytest.raises(RuntimeError, match="submit: the pool is closed"):
        submit(pool, 0)


ACTIONS: dict[str, Callable[[Pool, Request], object]] = {
    "start": lambda pool, request: pool.start(),
    "close": lambda pool, request: pool.close(),
    "submit": lambda pool, request: submit(pool, 1, max_new_tokens=10**6),
    "cancel": lambda pool, request: request.cancel(),
}


@pytest.mark.parametrize("begun", [False, True], ids=["new", "begun"])
@pytest.mark.parametrize(
    "both", [*itertools.combinations_with_replacement(ACTIONS, 2)], ids=" and ".join
)
def test_two_threads(params: rwkv7.Params, both: tuple[str, str], begun: bool) -> None:
    """A closed pool has no requests, whatever they did in whatever order."""
    pool, barrier = pool_of(params), threading.Barrier(2)
    requests, errors = [submit(pool, 0, max_new_tokens=10**6)], list[str]()
    if begun:
        pool.step()

    def do(name: str) -> None:
        barrier.wait()
        try:
            result = ACTIONS[name](pool, requests[0])
            requests.extend([result] if isinstance(result, Request) else [])
        except RuntimeError as error:
            errors.append(str(error))

    in_threads(*(functools.partial(do, name) for name in both))
    pool.close()
    assert (pool.running, pool.waiting, pool.step()) == (0, 0, False)
    assert {request.finish_reason for request in requests} == {"cancelled"}
    closed = "the pool is closed"
    assert set(errors) <= {f"submit: {closed}", f"start: {closed} or has a thread"}


def test_a_scheduler_step_that_fails(
    params: rwkv7.Params, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with slots fail with its error, and requests without go on."""
    pool = pool_of(params)
    requests = [submit(pool, number) for number in NUMBERS]
    pool.step()
    decode = _slots.decode

    def failing(*args: Any, **options: Any) -> Any:
        decode(*args, **options)
        raise MemoryError("there is no memory")

    with monkeypatch.context() as patch:
        patch.setattr(_slots, "decode", failing)
        with pytest.raises(MemoryError, match="there is no memory"):
            pool.step()
        for request in requests[:3]:
            assert_failed(request, MemoryError, "there is no memory")
    again = submit(pool, 1)
    pool.run()
    assert_alone(pool, {number: requests[number] for number in (3, 4, 5)} | {1: again}, alone)
    assert again.cached == 0  # the failed scheduler step may have made the states that were kept


def assert_failed(request: Request, error: type[Exception], message: str) -> None:
    assert request.finish_reason == "failed"
    with pytest.raises(RuntimeError, match=f"the request failed: .*{message}") as raised:
        request.wait()
    assert isinstance(raised.value.__cause__, error)


def test_a_request_that_fails(
    params: rwkv7.Params, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose text cannot be made, also by its last token."""
    wrong = tokenizers.Tokenizer("wrong", VOCABULARY, {}, lambda text: [0])
    monkeypatch.setattr(wrong, "decode_bytes", lambda tokens: 1 // 0)
    pool = pool_of(params, tokenizer=wrong)
    requests = [submit(pool, 0, max_new_tokens=length) for length in (LENGTH, 1)]
    pool.run()
    for request in requests:
        assert_failed(request, ZeroDivisionError, "by zero")


def test_a_request_without_a_next_token(params: rwkv7.Params, alone: Any) -> None:
    """It fails alone, and those that have its slot after it do not notice."""
    others = {x for number in NUMBERS for x in (*PROMPTS[number], *alone[number][0])}
    token = min(set(range(1, VOCABULARY)) - others)
    pool = pool_of(params._replace(emb=rwkv7.Weight(params.emb.weight.at[token].set(np.nan))))
    failing = [submit(pool, 1, prompt=[*PROMPTS[1], token]) for _ in range(2)]
    requests = {number: submit(pool, number) for number in NUMBERS}
    pool.run()
    assert_alone(pool, requests, alone)
    for request in failing:
        assert request.tokens == []
        assert_failed(request, FloatingPointError, "no token can be sampled after 0 new ones")


@pytest.mark.slow
def test_slots_over_a_mesh(params: rwkv7.Params, alone: Any) -> None:
    """Rows over two devices, heads and the vocabulary over two; stacked parameters."""
    stacked = rwkv7.stacked(params)
    placed = jax.device_put(stacked, rwkv7.shardings(stacked, MESH, model="model"))
    pool = pool_of(placed, 4, mesh=MESH, data="data", model="model")
    before = compiled_programs()
    requests = {number: submit(pool, number) for number in NUMBERS}
    requests[1].wait()
    again = submit(pool, 1)
    pool.run()
    assert_alone(pool, requests | {1: again}, alone)
    assert again.cached == 24
    assert np.subtract(compiled_programs(), before).tolist() == [1, 2, 1, 1]


WRONG = [
    ({"prompt": []}, ValueError, "prompt is empty"),
    ({"prompt": [61]}, ValueError, "prompt has the token 61; accepted are tokens below 61"),
    ({"prompt": [0.5]}, TypeError, "accepted are integers"),
    ({"prompt": "text"}, ValueError, "prompt is 'text'; accepted without Pool(tokenizer=...)"),
    ({"stop": ["x"]}, ValueError, "stop is ('x',); accepted without Pool(tokenizer=...)"),
    ({"stop": [""]}, ValueError, "submit: stop is ['']"),
    ({"max_new_tokens": 0}, ValueError, "is 0; accepted is an integer from 1 to 2147483644"),
    ({"max_new_tokens": 2**31 - 3}, ValueError, "max_new_tokens is 2147483645; accepted is an int"),
    ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens is 2.5; accepted is an integer from 1"),
    ({"seed": -1}, ValueError, "from 0 to 2^31 - 1"),
    ({"seed": 0.5}, TypeError, "submit: seed is [0.5]; accepted are integers"),
    ({"sampling": 0.5}, TypeError, "sampling is 0.5; accepted is a Sampling or None"),
    ({"sampling": Sampling(top_p=[1, 1])}, ValueError, "top_p has 2 numbers"),
    ({"stop_tokens": [61]}, ValueError, "stop_tokens has the token 61"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG, ids=lambda x: str(x)[:30])
@pytest.mark.usefixtures("unchecked_types")
def test_wrong_requests(
    params: rwkv7.Params, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    pool = pool_of(params)
    with pytest.raises(error) as raised:
        submit(pool, 0, **options)
    assert message in str(raised.value)
    assert pool.waiting == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "Pool: slots is 0"),
        ({"prefill_chunks": ()}, "Pool: prefill_chunks is ()"),
        ({"prefill_chunks": (0,)}, "Pool: a length of prefill_chunks is 0; accepted is an integer"),
        ({"tokenizer": "world"}, "Pool: tokenizer is 'world'; accepted are None and a tokenizers"),
        ({"mesh": 5}, "Pool: mesh is a int; accepted is a jax.sharding.Mesh"),
        ({"readers": 4}, "Pool: readers is 4; accepted is an integer from 1 to 3"),
        ({"steps": 33}, "Pool: steps is 33; accepted is an integer from 1 to 32"),
        ({"cache_bytes": -1}, "Pool: cache_bytes is -1"),
        ({"kernels": "fast"}, "Pool: kernels is 'fast'; accepted are None, 'xla', 'reference'"),
        ({"data": "data"}, "Pool: data is 'data'; accepted without mesh is None"),
        ({"mesh": MESH, "data": "rows"}, "Pool: data is 'rows'; accepted are 'data', 'model'"),
        ({"mesh": MESH, "data": "data"}, "Pool: slots is 3; accepted is a multiple of 2"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked_types")
def test_wrong_pools(params: rwkv7.Params, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        pool_of(params, **options)
