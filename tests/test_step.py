"""The steps as a decoder uses them; their values and gradients are rows of test_ops.py."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tolerance
from support.cases import Case
from support.operators import SEQUENCES, Run, available, sequential

TOKENS = 20
RUNS = [
    pytest.param(Run(op, implementation), id=f"{op}-{implementation}")
    for op in ("wkv7", "wkv6", "wkv4")
    for implementation in available(f"{op}_step", Case(1, 1, 1, 64))
    if op == "wkv7" or implementation == "ffi"
]


def _given(op: str, case: Case) -> tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]:
    """The inputs that have a time axis, those that do not, and the parts of the state."""
    operator = SEQUENCES[op]
    inputs, _ = operator.make(operator.suited(case))
    state = tuple(inputs.pop(name) for name in operator.states)
    shared = {name: inputs.pop(name) for name in sorted(operator.shared)}
    return inputs, shared, state


def _sequence(run: Run, inputs: dict[str, Any], state: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    return run(**inputs, **dict(zip(run.operator.states, state, strict=True)))


def _step(run: Run, inputs: dict[str, Any], state: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    step = Run(f"{run.op}_step", run.implementation)
    return step(**inputs, **dict(zip(step.operator.states, state, strict=True)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_the_sequence(run: Run, dtype: str) -> None:
    inputs, shared, start = _given(run.op, Case(2, TOKENS, 2, 64, dtype=dtype))

    @jax.jit
    def decode(inputs: dict, state: tuple) -> tuple[jax.Array, ...]:
        def body(state: tuple, token: dict) -> tuple[tuple, jax.Array]:
            y, *after = _step(run, token | shared, state)
            return tuple(after), y

        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items()}
        state, y = jax.lax.scan(body, state, tokens)
        return jnp.moveaxis(y, 0, 1), *state

    expected = _sequence(Run(run.op, "reference"), inputs | shared, start)
    names = run.operator.results
    tolerance.assert_close(
        dict(zip(names, map(np.asarray, decode(inputs, start)), strict=True)),
        dict(zip(names, map(np.asarray, expected), strict=True)),
        tolerance.EXACT_FLOAT32 if dtype == "float32" else tolerance.SEQUENTIAL,
    )


@pytest.mark.parametrize("run", RUNS)
def test_split_sequence_is_the_whole_one(run: Run) -> None:
    inputs, shared, start = _given(run.op, Case(1, 33, 2, 64))
    part = {name: x[:, :32] for name, x in inputs.items()}
    token = {name: x[:, 32] for name, x in inputs.items()}
    first, *middle = _sequence(run, part | shared, start)
    last, *end = _step(run, token | shared, tuple(middle))
    whole, *final = _sequence(run, inputs | shared, start)
    highest = run.implementation not in ("xla", "pallas") or jax.default_backend() == "cpu"
    in_order = {name: (inputs | shared)[name] for name in run.operator.inputs}
    kind = sequential(run.op, str(run.implementation), in_order)
    y, *names = run.operator.results
    tolerance.assert_close(
        {y: np.concatenate([first, last[:, None]], axis=1)}
        | dict(zip(names, map(np.asarray, end), strict=True)),
        {y: np.asarray(whole)} | dict(zip(names, map(np.asarray, final), strict=True)),
        tolerance.ceiling("y", "float32", sequential=kind, highest=highest),
    )


SAME_BITS = {"cpu": ("wkv7", "wkv6", "wkv5"), "gpu": ("wkv7",)}
"""The operators that take a token as such, whether it is one of many or the only one. The exponents
of WKV4 are relative to one of several numbers, and WKV6 takes four tokens at once on a GPU."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5", "wkv4"])
def test_prefill_then_decode(op: str, dtype: str) -> None:
    """On the kernels that take one token at a time."""
    run = Run(op, "ffi" if "ffi" in available(f"{op}_step", Case(1, 1, 1, 64)) else "reference")
    inputs, shared, state = _given(op, Case(2, 37, 2, 64, dtype=dtype))
    call, one = (functools.partial(f, run) for f in (_sequence, _step))
    exact = {"precision": "highest"}
    whole = call(inputs | shared | exact, state)
    y, *after = call({n: x[:, :20] for n, x in inputs.items()} | shared | exact, state)
    rows = [np.asarray(y)]
    for t in range(20, 37):
        y, *after = one({n: x[:, t] for n, x in inputs.items()} | shared | exact, tuple(after))
        rows.append(np.asarray(y)[:, None])
    found = np.concatenate(rows, axis=1), *map(np.asarray, after)
    pairs = list(zip(run.operator.results, found, map(np.asarray, whole), strict=True))
    if op in SAME_BITS[jax.default_backend()]:
        assert all(x.tobytes() == y.tobytes() for _, x, y in pairs)
    tolerance.assert_close(
        {n: x for n, x, _ in pairs},
        {n: y for n, _, y in pairs},
        tolerance.ceiling("y", dtype, sequential=True, highest=True),
    )


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_donated_state_is_updated_in_place(op: str, tokens: int) -> None:
    run = Run(op, None)
    inputs, shared, given = _given(op, Case(2, 1, 2, 64))
    inputs = {name: x[:, 0] for name, x in inputs.items()} | shared
    state = tuple(map(jnp.array, given))

    # The state first: `y` may have its shape, and would get a buffer of it.
    def decode(inputs: dict, state: tuple) -> tuple[jax.Array, ...]:
        y, *after = _step(run, inputs, state)
        for _ in range(tokens - 1):
            y, *after = _step(run, inputs, tuple(after))
        return *after, y

    *expected, _ = jax.jit(decode)(inputs, state)
    step = jax.jit(decode, donate_argnames="state").lower(inputs, state).compile()
    text = step.as_text() or ""
    for part in range(len(state)):
        assert f"{{{part}}}: ({len(inputs) + part}, {{}}, may-alias)" in text
    if "ffi" in available(f"{op}_step", Case(2, 1, 2, 64)):
        shape = ",".join(map(str, state[0].shape))
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if f"f32[{shape}]" in line]

    pointers = [x.unsafe_buffer_pointer() for x in state]
    *after, _ = step(inputs, state)
    assert all(x.is_deleted() for x in state)
    assert [x.unsafe_buffer_pointer() for x in after] == pointers
    for x, right in zip(after, expected, strict=True):
        np.testing.assert_array_equal(x, right)


@pytest.mark.parametrize("run", RUNS)
def test_a_state_that_is_not_donated_stays(run: Run) -> None:
    inputs, shared, given = _given(run.op, Case(2, 1, 2, 64))
    token = {name: x[:, 0] for name, x in inputs.items()}
    state = tuple(map(jnp.array, given))
    before = [np.array(x) for x in state]
    _, *after = _step(run, token | shared, state)
    for x, old, new in zip(state, before, after, strict=True):
        np.testing.assert_array_equal(x, old)
        assert not np.array_equal(new, old)
