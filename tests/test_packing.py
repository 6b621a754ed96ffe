"""Several sequences in a row: each as if it were alone."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import rwkv_jax
from support import tolerance
from support.cases import Case
from support.operators import SEQUENCES, Run, sequential

IDS = {
    "one": [3] * 70,
    "several": [1] * 5 + [2] * 30 + [1] * 1 + [7] * 34,
    "short": [1, 2, 3, 3, 4, 5, 5, 5] + [6, 7] * 20 + [8] * 22,
    "at boundaries": [1] * 16 + [2] * 48 + [3] * 6,
    "padding": [0] * 3 + [4] * 20 + [0] * 10 + [4] * 18 + [0] * 2 + [9] * 10 + [0] * 7,
    "padding alone": [0] * 70,
}


def _available(op: str, case: Case, ids: np.ndarray) -> list[str]:
    own = SEQUENCES[op]
    inputs, _ = own.make(case)
    can = rwkv_jax.implementations(op, *inputs.values(), segment_ids=ids, decay=case.decay)
    return [name for name, reason in can.items() if reason is None]


def _cases(op: str) -> list[Case]:
    """Rows of 70 tokens: more than a chunk, and not whole ones."""
    own = SEQUENCES[op]
    several = [
        Case(len(IDS), 70, 2, 64),
        Case(len(IDS), 70, 2, 64, dtype="bfloat16"),
        Case(len(IDS), 70, 1, 64, dtype="float16", decay="exp", regime="mixed", state=False),
    ]
    return [own.suited(case) for case in several]


ROWS = np.array(list(IDS.values()), np.int32)
RUNS = [
    pytest.param(Run(op, implementation), case, id=f"{op}-{implementation}-{case.dtype}")
    for op in SEQUENCES
    for case in _cases(op)
    for implementation in _available(op, case, ROWS)
    if implementation == "ffi" or (case.dtype == "float32" and op in ("wkv7", "wkv6", "wkv4"))
]
"""Of WKV5 all but the kernels is that of WKV6."""


def parts_of(ids: np.ndarray) -> list[slice]:
    """The segments of a row."""
    cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    parts = [slice(i, j) for i, j in itertools.pairwise(cuts)]
    return [part for part in parts if ids[part].any()]


def expected(op: str, inputs: dict, ids: np.ndarray, decay: str, cotangents: dict) -> dict:
    """By the oracle, from each segment of each row on its own."""
    own = SEQUENCES[op]
    timed = [n for n in own.inputs if n not in own.shared]
    _, *finals = own.results
    whole = {n: np.zeros(np.shape(inputs[n])) for n in own.inputs}
    found = {"y": np.zeros(np.shape(cotangents["dy"]))} | {f"d{n}": x for n, x in whole.items()}
    for name in finals:
        found[name] = np.zeros(cotangents[f"d{name}"].shape)
    initial: dict[str, Any] = {n: np.float64(inputs[n]) for n in own.states if n in inputs}
    found |= {f"d{n}": np.zeros(x.shape) for n, x in initial.items()}
    empty = own.oracle(_none(own, inputs), decay)
    for row, marks in enumerate(ids):
        one = slice(row, row + 1)
        parts = parts_of(marks)
        for state, final in zip(own.states, finals, strict=True):
            if not parts:
                found[final][row] = initial[state][row] if initial else empty[final][0]
                if initial:
                    found[f"d{state}"][row] = cotangents[f"d{final}"][row]
        for part in parts:
            given = {n: inputs[n][one, part] if n in timed else inputs[n] for n in own.inputs}
            first, last = part is parts[0], part is parts[-1]
            given |= {n: x[one] for n, x in initial.items() if first}
            d = {"dy": np.float64(cotangents["dy"][one, part])}
            for final in finals:
                d[f"d{final}"] = np.float64(cotangents[f"d{final}"][one]) * last
            results = own.oracle(given, decay, d)
            found["y"][one, part] = results["y"]
            for name in timed:
                found[f"d{name}"][one, part] = results[f"d{name}"]
            for name in own.shared:
                found[f"d{name}"] += results[f"d{name}"]
            for state in initial if first else ():
                found[f"d{state}"][one] = results[f"d{state}"]
            for final in finals if last else ():
                found[final][one] = results[final]
    return found


def _none(own: Any, inputs: dict) -> dict:
    """One row without tokens."""
    return {n: inputs[n] if n in own.shared else inputs[n][:1, :0] for n in own.inputs}


def check(run: Run, case: Case, ids: np.ndarray) -> None:
    inputs, cotangents = run.operator.make(case)
    for name in run.operator.inputs:
        if name not in run.operator.shared:
            inputs[name][ids == 0] = np.nan
    cotangents["dy"][ids == 0] = np.nan
    found = _found(run, case, ids, inputs, cotangents)
    kind = sequential(run.op, str(run.implementation), inputs)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=kind, highest=True) for n in found}
    wanted = expected(run.op, inputs, ids, case.decay, cotangents)
    tolerance.assert_close(found, {n: wanted[n] for n in found}, limits)
    for name in ("y", *(f"d{n}" for n in run.operator.inputs if n not in run.operator.shared)):
        assert not found[name][ids == 0].any(), name


def _found(run: Run, case: Case, ids: np.ndarray, inputs: dict, cotangents: dict) -> dict:
    options = {
        "decay": case.decay,
        "implementation": run.implementation,
        "segment_ids": ids,
        "precision": "highest" if case.dtype == "float32" else None,
    }
    results = _value_and_gradients(run, options, inputs, cotangents)
    return {name: np.asarray(x) for name, x in results.items()}


def _value_and_gradients(run: Run, options: dict, inputs: dict, cotangents: dict) -> dict:
    ids = options.pop("segment_ids")
    names = run.operator.results

    @jax.jit
    def both(inputs: dict, cotangents: dict, ids: jax.Array) -> dict:
        def call(inputs: dict) -> dict:
            results = run.operator.function(**inputs, **options, segment_ids=ids)
            return dict(zip(names, results, strict=True))

        results, vjp = jax.vjp(call, inputs)
        (gradients,) = vjp({name: cotangents[f"d{name}"] for name in names})
        return results | {f"d{name}": x for name, x in gradients.items()}

    return both(inputs, cotangents, ids)


@pytest.mark.parametrize(("run", "case"), RUNS)
def test_segments_are_as_if_alone(run: Run, case: Case) -> None:
    check(run, case, ROWS)


SIZES = (
    Case(1, 0, 2, 64),
    Case(0, 17, 2, 64),
    Case(3, 1, 2, 16),
    Case(3, 200, 1, 16, dtype="float16"),
    Case(3, 130, 1, 32, decay="log"),
    Case(2, 33, 2, 128, state=False),
    Case(2, 17, 1, 256, dtype="bfloat16"),
    Case(1, 70, 1, 7),
)


def _native(several: tuple[Case, ...]) -> list[Any]:
    """Native kernels that can run these, for which no shape takes long to compile."""
    return [
        pytest.param(Run(op, "ffi"), case, id=f"{op}-{case}")
        for op, own in SEQUENCES.items()
        for case in map(own.suited, several)
        if "ffi" in _available(op, case, np.ones((case.B, case.T), np.int32))
    ]


@pytest.mark.parametrize(("run", "case"), _native(SIZES))
def test_rows_of_any_size(run: Run, case: Case) -> None:
    """Parts of any length, among them chunks that are padding alone."""
    rng = np.random.default_rng(case.T)
    ids = np.zeros((case.B, case.T), np.int32)
    for row in ids:
        cuts = np.sort(rng.integers(0, case.T + 1, max(3, case.T // 20)))
        for i, part in enumerate(np.split(row, cuts)):
            part[:] = i * (rng.random() < 0.7)
    if case.T > 128:
        ids[0, 64:128] = 0
    check(run, case, ids)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("run", "case"), _native((Case(2, 150, 1, 32),)))
def test_what_is_not_finite_stays_in_its_segment(run: Run, case: Case, value: float) -> None:
    ids = np.repeat(np.array([[1, 2, 0, 3], [1, 2, 3, 0]], np.int32), [20, 50, 10, 70], axis=1)
    inputs, cotangents = run.operator.make(case)
    right = _found(run, case, ids, inputs, cotangents)
    timed = [n for n in run.operator.inputs if n not in run.operator.shared]
    for name in timed:
        inputs[name][ids == 2] = value
    cotangents["dy"][ids == 2] = value
    found = _found(run, case, ids, inputs, cotangents)
    assert not np.isfinite(found["y"][ids == 2]).all()
    for name in right.keys() - {f"d{n}" for n in run.operator.shared}:
        x, y = found[name], right[name]
        if name == "y" or name[1:] in timed:
            x, y = x[ids != 2], y[ids != 2]
        np.testing.assert_array_equal(x, y, err_msg=name)
