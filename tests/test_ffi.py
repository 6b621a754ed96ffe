"""The native kernels of the default platform, called by themselves."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rwkv_jax
from rwkv_jax import _ffi, _packing
from rwkv_jax._chunked import states_dtype
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import ABSENT, GOES_ON, STARTS
from support import cases
from support.cases import Case
from support.internals import operator as library
from support.operators import OPERATORS

PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
CASE = Case(2, 65, 2, 32)


OPS = ("wkv7", "wkv6", "wkv4")
"""Those of WKV5 are the kernels of WKV6."""

STAGES = {"forward": "{}", "backward": "{} backward", "step": "{}_step"}
"""And the name by which an error calls each."""


def _call(
    op: str, stage: str, case: Case
) -> tuple[Callable[..., tuple[jax.Array, ...]], dict[str, jax.Array]]:
    """A stage of the native implementation, and operands for it by name."""
    rng = np.random.default_rng(0)
    operator = OPERATORS[f"{op}_step" if stage == "step" else op]
    described, implementation = getattr(library(op), stage), library(op).implementations["ffi"]
    case = operator.suited(case)
    options = Options(operator.decays[-1], lax.Precision.DEFAULT, "ffi", save=True)
    inputs, cotangents = operator.make(case)
    operands: dict[str, Any] = inputs | cotangents
    for name in operator.shared:
        shape = (case.B, *operands[name].shape)
        operands[name] = np.broadcast_to(operands[name], shape).astype(np.float32)
    for name, axes in described.operands.items():
        if "N" in axes:
            batch, *rest = operands[f"dfinal_{name[:-1]}"].shape
            # Positive, since the states of WKV4 are divided by.
            saved = rng.uniform(0.5, 2, (batch, -(-case.T // 64), *rest))
            dtype = states_dtype(options, operands["k"].dtype) if "K" in axes else np.float32
            operands[name] = saved.astype(dtype)

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return getattr(implementation, stage)(options, PLATFORM, *operands)

    return call, {name: jnp.asarray(operands[name]) for name in described.operands}


SPOILED = {
    "rank": lambda x: x[0],
    "shape": lambda x: jnp.concatenate([x, x], axis=-1),
    "batch": lambda x: jnp.concatenate([x, x], axis=0),
    "dtype": lambda x: x.astype(jnp.int32),
    "float": lambda x: x.astype(jnp.float16),
}


def _spoilings() -> list[tuple[str, str, str, str]]:
    """Everything for WKV7; for the others what tells whether the axes and the type are right."""
    return [
        (op, stage, name, wrong)
        for op in OPS
        for stage in STAGES
        for name in getattr(library(op), stage).operands
        for wrong in (SPOILED if op == "wkv7" else ("shape", "float"))
    ]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("op", "stage", "name", "wrong"), _spoilings())
def test_wrong_operands(
    op: str, stage: str, name: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call itself is spoiled, behind all checks of the package."""
    call, operands = _call(op, stage, CASE)
    position, through = list(operands).index(name), _ffi.call

    def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        spoiled = list(operands)
        spoiled[position] = SPOILED[wrong](spoiled[position])
        # An alias has to match the operand that it replaces, which is no longer so.
        return through(
            target, results, *spoiled, **{n: x for n, x in rest.items() if n != "aliases"}
        )

    monkeypatch.setattr(_ffi, "call", spoil)
    # The first operand that has an axis sets its size, or its dtype: a later one is then odd.
    expected = rf"INVALID_ARGUMENT: {STAGES[stage].format(op)}: .*\b{name}\b (has|is)\b"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(call(*operands.values()))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("op", OPS)
def test_wrong_results_attributes_and_numbers(
    op: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, operands = _call(op, stage, CASE)
    through = _ffi.call

    def error(change: Callable[[list, list, dict], None]) -> str:
        def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
            results, given = list(results), list(operands)
            rest.pop("aliases", None)
            change(results, given, rest)
            # Waited for here, before the caller meets a wrong number of results.
            return jax.block_until_ready(through(target, results, *given, **rest))

        monkeypatch.setattr(_ffi, "call", spoil)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as raised:
            call(*operands.values())
        return str(raised.value)

    forms = len(OPERATORS[op].decays)
    assert f"decay is {forms}" in error(lambda results, given, rest: rest.update(decay=forms))
    assert "decay is -1" in error(lambda results, given, rest: rest.update(decay=-1))
    assert "attributes" in error(lambda results, given, rest: rest.pop("decay"))
    assert "attributes" in error(lambda results, given, rest: rest.update(unknown=1))
    missing = error(lambda results, given, rest: given.pop())
    assert list(operands)[-1] in missing or "operands given" in missing
    more = error(lambda results, given, rest: given.append(given[0]))
    assert "operands given" in more or "marks is F32; expected U32" in more
    error(lambda results, given, rest: results.pop())
    error(lambda results, given, rest: results.append(results[0]))

    def wrong_state(results: list, given: list, rest: dict) -> None:
        shape, _ = results[-1]
        results[-1] = (shape, jnp.bfloat16)

    error(wrong_state)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("saved", [1, 3])
@pytest.mark.parametrize("op", OPS)
def test_wrong_number_of_states(op: str, saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    through = _ffi.call
    forward, backward = (
        [place for place, axes in enumerate(several.values()) if "N" in axes]
        for several in (library(op).forward.results, library(op).backward.operands)
    )

    def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        results, given = list(results), list(operands)
        if target.endswith("_bwd_v1"):
            for place in backward:
                given[place] = jnp.zeros((given[place].shape[0], saved, *given[place].shape[2:]))
        else:
            for place in forward:
                shape, dtype = results[place]
                results[place] = ((shape[0], saved, *shape[2:]), dtype)
        return jax.block_until_ready(through(target, results, *given, **rest))

    for stage in ("forward", "backward"):
        call, operands = _call(op, stage, CASE)
        monkeypatch.setattr(_ffi, "call", spoil)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"states has N = {saved}; expected"):
            call(*operands.values())
        monkeypatch.undo()


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", ["wkv6", "wkv4"])
def test_wrong_number_of_partial_sums(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    through, results = _ffi.call, list(library(op).backward.results)
    places = [results.index(f"d{name}") for name in OPERATORS[op].shared]

    def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        results = list(results)
        for place in places:
            shape, dtype = results[place]
            results[place] = ((shape[0], 99, *shape[2:]), dtype)
        return jax.block_until_ready(through(target, results, *operands, **rest))

    call, operands = _call(op, "backward", CASE)
    monkeypatch.setattr(_ffi, "call", spoil)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.* 99\b"):
        call(*operands.values())


def _marks(case: Case) -> jax.Array:
    """Of rows that all begin with a start, and have all kinds of marks."""
    marks = np.random.default_rng(0).choice([GOES_ON, STARTS, ABSENT], (case.B, case.T))
    marks[:, :1] = STARTS
    return jnp.asarray(marks, jnp.uint8)


SPOILED_MARKS = {
    "dtype": (lambda x: x.astype(jnp.float32), "marks is F32; expected U32"),
    "tokens": (
        lambda x: jnp.concatenate([x, x], axis=1),
        "marks has M = 16; expected 8 for 65 tokens",
    ),
    "fewer tokens": (lambda x: x[:, :-1], "marks has M = 7; expected 8 for 65 tokens"),
    "rank": (lambda x: x[0], r"marks has shape \[8\]; expected \[B, M\]"),
    "batch": (lambda x: x[:1], r"marks has shape \[1, 8\], so B = 1, where r has B = 2"),
}


def _spoil_last(spoil: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operands of a native kernel, behind all checks of the package."""
    through = _ffi.call

    def spoiled(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        *others, last = operands
        return through(target, results, *others, spoil(last), **rest)

    monkeypatch.setattr(_ffi, "call", spoiled)


SPOILED_SPANS = {
    "dtype": (lambda x: x.astype(jnp.float32), r".* so B = \d, where \w+ has B = \d"),
    "rank": (lambda x: x[0], r"spans has shape \[4\]; expected \[S, W\]"),
    "size": (lambda x: x[:, :3], "spans has W = 3; expected 4 or 8"),
    "fewer": (lambda x: x[:2], r"spans has shape \[2, 4\], so S = 2, where .* has S = 4"),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("wrong", SPOILED_SPANS)
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_wrong_spans(op: str, stage: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sequences in each of two rows."""
    _, operands = _call(op, stage, CASE)
    implementation = library(op).implementations["ffi"]
    options = Options(OPERATORS[op].decays[-1], lax.Precision.DEFAULT, "ffi", save=True)
    several = [
        jnp.stack([x, x], axis=1) if name.startswith(("initial_", "dfinal_")) else x
        for name, x in operands.items()
    ]
    cu = jnp.asarray([[0, 30, CASE.T], [0, 0, CASE.T]], jnp.int32)
    call = functools.partial(getattr(implementation, f"{stage}_sequences"), options, PLATFORM)
    jax.block_until_ready(call(*several, cu))
    spoil, expected = SPOILED_SPANS[wrong]
    _spoil_last(spoil, monkeypatch)
    expected = f"INVALID_ARGUMENT: {STAGES[stage].format(op)}: {expected}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(call(*several, cu))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("wrong", SPOILED_MARKS)
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_wrong_marks(op: str, stage: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, operands = _call(op, stage, CASE)
    spoil, expected = SPOILED_MARKS[wrong]
    if op == "wkv4":
        expected = expected.replace("where r", "where w")
    _spoil_last(spoil, monkeypatch)
    expected = f"INVALID_ARGUMENT: {STAGES[stage].format(op)}: {expected}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(call(*operands.values(), _marks(CASE)))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", OPS)
def test_a_step_has_no_marks(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, operands = _call(op, "step", CASE)
    (words,), through = _packing.operand(_marks(Case(CASE.B, 1, 1, 1))), _ffi.call
    monkeypatch.setattr(_ffi, "call", lambda *x, **rest: through(*x, words, **rest))
    expected = rf"INVALID_ARGUMENT: {op}_step: {len(operands) + 1} operands given; expected"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(call(*operands.values()))


def _mark(op: str, operands: dict[str, jax.Array], case: Case = CASE) -> dict[str, jax.Array]:
    """The operands with marks, if the kernels take them."""
    stage, options = library(op).forward.marked, Options("log", lax.Precision.DEFAULT, "ffi")
    marked = operands | {"marks": _marks(case)}
    if reason := stage.implementations["ffi"].why_not(PLATFORM, "forward", options, marked):
        pytest.skip(reason)
    return marked


@pytest.mark.parametrize("op", OPS)
def test_a_start_at_the_first_token(op: str) -> None:
    """As where a sequence goes on on another device: what was before is not read."""
    call, operands = _call(op, "forward", CASE)
    operands = _mark(op, operands)
    nothing = {n: jnp.full_like(x, jnp.nan) for n, x in operands.items() if "initial" in n}
    assert nothing
    for given in (operands, operands | nothing):
        y, *finals = call(*given.values())[: 1 + len(nothing)]
        assert all(np.isfinite(x).all() for x in (y, *finals))
    call, operands = _call(op, "backward", CASE)
    results = call(*_mark(op, operands).values())
    for name, x in zip(library(op).backward.results, results, strict=True):
        assert np.isfinite(x).all()
        assert np.any(x) != name.startswith("dinitial"), name


@pytest.mark.parametrize("size", [8, 24, 48, 512])
@pytest.mark.parametrize("op", ["wkv7", "wkv6"])
def test_a_head_size_that_it_lacks(op: str, size: int) -> None:
    call, operands = _call(op, "forward", Case(1, 2, 1, size))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*K = {size}"):
        jax.block_until_ready(call(*operands.values()))


POISONED = (
    Case(1, 0, 2, 64),
    Case(2, 1, 2, 32),
    Case(2, 65, 2, 32, dtype="bfloat16"),
    Case(1, 128, 3, 64),
    Case(1, 63, 1, 16, dtype="float16"),
)


@pytest.mark.parametrize(
    ("op", "case"),
    [(op, case) for op in OPS for case in POISONED] + [("wkv4", Case(1, 65, 3, 7))],
    ids=str,
)
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("marked", [False, True], ids=["alone", "marked"])
def test_outputs_are_written_whole(op: str, stage: str, case: Case, marked: bool) -> None:
    """Every output goes to a donated buffer full of NaN: what is not written stays NaN."""
    call, operands = _call(op, stage, case)
    if marked:
        operands = _mark(op, operands, case)
    given = tuple(operands.values())
    types = jax.eval_shape(call, *given)
    poison = tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in types)
    pointers = {x.unsafe_buffer_pointer() for x in poison if x.size}

    def poisoned(poison: tuple, *given: jax.Array) -> tuple[jax.Array, ...]:
        return call(*given)

    outputs = jax.jit(poisoned, donate_argnums=0, keep_unused=True)(poison, *given)
    assert {x.unsafe_buffer_pointer() for x in outputs if x.size} == pointers
    for x in outputs:
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize(
    "case", [Case(2, 65, 4, 64), Case(1, 1000, 2, 64, dtype="bfloat16")], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_three_runs_are_bitwise_equal(op: str, case: Case) -> None:
    for stage in STAGES:
        call, operands = _call(op, stage, case)
        jitted = jax.jit(call)
        first, *others = [jax.device_get(jitted(*operands.values())) for _ in range(3)]
        for other in others:
            for x, y in zip(first, other, strict=True):
                assert x.tobytes() == y.tobytes()


def test_threads_share_one_program() -> None:
    several = [cases.wkv7(Case(2, 65, 2, 32, seed=seed))[0] for seed in range(8)]

    @jax.jit
    def gradients(inputs: dict) -> dict:
        def loss(inputs: dict) -> jax.Array:
            y, state = rwkv_jax.wkv7(**inputs, decay="sigmoid", implementation="ffi")
            return jnp.sum(jnp.sin(y)) + jnp.sum(state)

        return jax.grad(loss)(inputs)

    expected = [jax.device_get(gradients(inputs)) for inputs in several]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            results = list(pool.map(lambda x: jax.device_get(gradients(x)), several))
            for result, right in zip(results, expected, strict=True):
                for name in right:
                    np.testing.assert_array_equal(result[name], right[name])
