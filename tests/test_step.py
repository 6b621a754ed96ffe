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


def _given(op: str, case: Case) -> tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]:
    """The inputs that each token has of its own, the ones that all share, and the state."""
    own, (inputs, _) = SEQUENCES[op], operands(op, case)
    timed, shared = ({name: inputs[name] for name in names} for names in (own.timed, own.shared))
    return timed, shared, tuple(inputs[name] for name in own.states)


def _call(run: Run, inputs: dict, state: tuple) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """`y`, and the state afterwards."""
    y, *after = run(**inputs, **dict(zip(run.operator.states, state, strict=True)))
    return y, tuple(after)


SAME_BITS = {"cpu": ("wkv7", "wkv6", "wkv5"), "gpu": ("wkv7",)}
"""The operators that take a token as such, whether it is one of many or the only one. The exponents
of WKV4 are relative to one of several numbers, and WKV6 takes four tokens at once on a GPU."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5", "wkv4"])
def test_prefill_then_decode(op: str, dtype: str) -> None:
    """On the kernels that take one token at a time."""
    native = "ffi" in available(f"{op}_step", Case(1, 1, 1, 64))
    sequence, step = (Run(x, "ffi" if native else "reference") for x in (op, f"{op}_step"))
    inputs, shared, start = _given(op, Case(2, 37, 2, 64, dtype=dtype))
    shared["precision"] = "highest"
    whole_y, end = _call(sequence, inputs | shared, start)
    y, state = _call(sequence, {n: x[:, :20] for n, x in inputs.items()} | shared, start)
    rows = [y]
    for t in range(20, 37):
        y, state = _call(step, {n: x[:, t] for n, x in inputs.items()} | shared, state)
        rows.append(y[:, None])
    results = sequence.operator.results
    found = dict(zip(results, (np.concatenate(rows, axis=1), *state), strict=True))
    whole = dict(zip(results, (whole_y, *end), strict=True))
    if op in SAME_BITS[jax.default_backend()]:
        for name, x in found.items():
            assert np.asarray(x).tobytes() == np.asarray(whole[name]).tobytes(), name
    ceiling = tolerance.ceiling("y", dtype, sequential=True, highest=True)
    assert_right(found, whole, ceiling)


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv4"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_donated_state_is_updated_in_place(op: str, tokens: int) -> None:
    """One that is not donated stays as it is."""
    step = Run(f"{op}_step", None)
    inputs, shared, given = _given(op, Case(2, 1, 2, 64))
    inputs = {name: x[:, 0] for name, x in inputs.items()} | shared
    state = tuple(map(jnp.array, given))

    # The state first: `y` may have its shape, and would get a buffer of it.
    def decode(inputs: dict, state: tuple) -> tuple[jax.Array, ...]:
        y, after = _call(step, inputs, state)
        for _ in range(tokens - 1):
            y, after = _call(step, inputs, after)
        return *after, y

    *expected, _ = jax.jit(decode)(inputs, state)
    for x, before in zip(state, given, strict=True):
        np.testing.assert_array_equal(x, before)
    compiled = jax.jit(decode, donate_argnames="state").lower(inputs, state).compile()
    text = compiled.as_text() or ""
    for i in range(len(state)):
        assert f"{{{i}}}: ({len(inputs) + i}, {{}}, may-alias)" in text
    if "ffi" in available(step.op, Case(2, 1, 2, 64)):
        shape = ",".join(map(str, state[0].shape))
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if f"f32[{shape}]" in line]

    pointers = [x.unsafe_buffer_pointer() for x in state]
    *after, _ = compiled(inputs, state)
    assert all(x.is_deleted() for x in state)
    assert [x.unsafe_buffer_pointer() for x in after] == pointers
    for x, right in zip(after, expected, strict=True):
        np.testing.assert_array_equal(x, right)


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
