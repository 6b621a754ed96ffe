"""Several sequences in a row: each as if it were alone."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import rwkv_jax
import tolerance
from cases import Case
from operators import SEQUENCES, Run, sequential

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
    if implementation == "ffi" or case.dtype == "float32"
]


def parts_of(ids: np.ndarray) -> list[slice]:
    """The segments of a row."""
    cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    parts = [slice(i, j) for i, j in itertools.pairwise(cuts)]
    return [part for part in parts if ids[part.start] != 0]


def expected(op: str, inputs: dict, ids: np.ndarray, decay: str, cotangents: dict) -> dict:
    """By the oracle, from each segment of each row on its own."""
    own = SEQUENCES[op]
    timed = [n for n in own.inputs if n not in own.shared]
    _, *finals = own.results
    whole = {n: np.zeros(np.shape(inputs[n])) for n in own.inputs}
    found = {"y": np.zeros(np.shape(cotangents["dy"]))} | {f"d{n}": x for n, x in whole.items()}
    for name in finals:
        found[name] = np.zeros(cotangents[f"d{name}"].shape)
    initial = {n: np.float64(inputs[n]) for n in own.states if n in inputs}
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


def _check(run: Run, case: Case, ids: np.ndarray, poison: float = 3.0) -> None:
    inputs, cotangents = run.operator.make(case)
    for name in run.operator.inputs:
        if name not in run.operator.shared:
            inputs[name][ids == 0] = poison
    options = {
        "decay": case.decay,
        "implementation": run.implementation,
        "segment_ids": ids,
        "precision": "highest" if case.dtype == "float32" else None,
    }
    call = functools.partial(_value_and_gradients, run, options)
    found = {n: np.asarray(x) for n, x in call(inputs, cotangents).items()}
    kind = sequential(run.op, str(run.implementation), inputs)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=kind, highest=True) for n in found}
    wanted = expected(run.op, inputs, ids, case.decay, cotangents)
    tolerance.assert_close(found, {n: wanted[n] for n in found}, limits)
    for name in ("y", *(f"d{n}" for n in run.operator.inputs if n not in run.operator.shared)):
        assert not found[name][ids == 0].any(), name


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
    _check(run, case, ROWS)
