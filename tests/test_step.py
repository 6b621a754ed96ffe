"""The steps as a decoder uses them; their values and gradients are rows of test_ops.py."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tolerance
from support.cases import Case
from support.harness import assert_right, expected, operands, value_and_gradients
from support.operators import SEQUENCES, STEPS, Run, available

pytestmark = pytest.mark.quick("run", "op")

RUNS = [
    pytest.param(Run(op, implementation), id=f"{op}-{implementation}")
    for op in ("wkv7", "wkv6", "wkv4")
    for implementation in available(f"{op}_step", Case(1, 1, 1, 64))
    if op == "wkv7" or implementation == "ffi"
]


def _given(op: str, case: Case) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The inputs that each token has of its own, the ones that all share, and the state."""
    own, (inputs, _) = SEQUENCES[op], operands(op, case)
    several = own.timed, sorted(own.shared), own.states
    timed, shared, state = ({name: inputs[name] for name in names} for names in several)
    return timed, shared, state


def _sequence(run: Run, inputs: dict, state: dict) -> tuple[jax.Array, dict[str, Any]]:
    """`y` of whole sequences, and the state after them under the names of the initial one."""
    y, *after = run(**inputs, **state)
    return y, dict(zip(run.operator.states, after, strict=True))


def _step(run: Run, inputs: dict, state: dict) -> tuple[jax.Array, dict[str, Any]]:
    """As `_sequence`, for one token."""
    step = Run(f"{run.op}_step", run.implementation)
    y, *after = step(**inputs, **{n.replace("initial_", ""): x for n, x in state.items()})
    return y, dict(zip(run.operator.states, after, strict=True))


def _named(y: Any, state: dict) -> dict[str, Any]:
    """`y` and the state in one."""
    return {"y": y, **state}


SAME_BITS = {"cpu": ("wkv7", "wkv6", "wkv5"), "gpu": ("wkv7",)}
"""The operators that take a token as such, whether it is one of many or the only one. The exponents
of WKV4 are relative to one of several numbers, and WKV6 takes four tokens at once on a GPU."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5", "wkv4"])
def test_prefill_then_decode(op: str, dtype: str) -> None:
    """On the kernels that take one token at a time."""
    run = Run(op, "ffi" if "ffi" in available(f"{op}_step", Case(1, 1, 1, 64)) else "reference")
    inputs, shared, start = _given(op, Case(2, 37, 2, 64, dtype=dtype))
    shared["precision"] = "highest"
    whole = _named(*_sequence(run, inputs | shared, start))
    y, state = _sequence(run, {n: x[:, :20] for n, x in inputs.items()} | shared, start)
    rows = [y]
    for t in range(20, 37):
        y, state = _step(run, {n: x[:, t] for n, x in inputs.items()} | shared, state)
        rows.append(y[:, None])
    found = _named(np.concatenate(rows, axis=1), state)
    if op in SAME_BITS[jax.default_backend()]:
        for name, x in found.items():
            assert np.asarray(x).tobytes() == np.asarray(whole[name]).tobytes(), name
    ceiling = tolerance.ceiling("y", dtype, sequential=True, highest=True)
    assert_right(found, whole, ceiling)


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_donated_state_is_updated_in_place(op: str, tokens: int) -> None:
    run = Run(op, None)
    inputs, shared, given = _given(op, Case(2, 1, 2, 64))
    inputs = {name: x[:, 0] for name, x in inputs.items()} | shared
    state = tuple(map(jnp.array, given.values()))

    # The state first: `y` may have its shape, and would get a buffer of it.
    def decode(inputs: dict, state: tuple) -> tuple[jax.Array, ...]:
        y, after = _step(run, inputs, dict(zip(given, state, strict=True)))
        for _ in range(tokens - 1):
            y, after = _step(run, inputs, after)
        return *after.values(), y

    *expected, _ = jax.jit(decode)(inputs, state)
    step = jax.jit(decode, donate_argnames="state").lower(inputs, state).compile()
    text = step.as_text() or ""
    for i in range(len(state)):
        assert f"{{{i}}}: ({len(inputs) + i}, {{}}, may-alias)" in text
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
    state = {name: jnp.array(x) for name, x in given.items()}
    _, after = _step(run, token | shared, state)
    for name, x in given.items():
        np.testing.assert_array_equal(state[name], x)
        assert not np.array_equal(after[name], x)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", STEPS)
def test_a_mask_that_is_refused(op: str) -> None:
    inputs, _ = operands(op, Case(3, 1, 2, 64))

    def refuses(error: type[Exception], message: str, active: Any) -> None:
        with pytest.raises(error, match=rf"^{op}: active {message}"):
            Run(op, None)(**inputs, active=active)

    refuses(TypeError, "is a list; accepted is a JAX or numpy array", [True, False, True])
    refuses(TypeError, "is int32; accepted is bool", np.ones(3, np.int32))
    refuses(ValueError, r"has shape \(2,\); accepted is \[B\] = \(3,\)", np.ones(2, bool))


@pytest.mark.parametrize(
    ("run", "decay"),
    [
        pytest.param(Run(step, name), decay, id=f"{step}-{name}-{decay}")
        for step, own in STEPS.items()
        for name in available(step, Case(3, 1, 2, 64))
        if name in ("ffi", "reference")
        for decay in own.decays
        if name == "ffi" or decay == own.decays[-1]
    ],
)
def test_a_row_without_a_token_keeps_its_state(run: Run, decay: str) -> None:
    active, idle, rows = np.array([True, False, True]), 1, [0, 2]
    inputs, cotangents = operands(run.op, Case(3, 1, 2, 64, decay=decay), active=active)
    found = value_and_gradients(run, inputs, cotangents, decay=decay, active=active)

    def others(x: dict[str, Any]) -> dict[str, Any]:
        shared = {n for name in run.operator.shared for n in (name, f"d{name}")}
        return {name: a if name in shared else np.asarray(a)[rows] for name, a in x.items()}

    right = expected(run.op, others(inputs), others(cotangents), decay=decay)
    assert_right(others(found), right)
    for name in ("y", *(f"d{name}" for name in run.operator.timed)):
        assert not np.asarray(found[name])[idle].any(), name
    for name in run.operator.states:
        np.testing.assert_array_equal(found[name][idle], inputs[name][idle])
        np.testing.assert_array_equal(found[f"d{name}"][idle], cotangents[f"d{name}"][idle])
