"""Summaries: what a run of tokens does to the state."""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from support import internals
from support.cases import Case
from support.harness import assert_right, operands, results
from support.operators import Run, runs

CUTS = [0, 7, 24, 24, 41, 48]
CASE = Case(2, CUTS[-1], 2, 32)
each_run = pytest.mark.parametrize("run", runs(CASE))


@pytest.mark.slow
@each_run
@pytest.mark.parametrize("regime", ["model", "mixed"])
def test_states_between_runs_of_tokens(run: Run, regime: str) -> None:
    """The state after each run of tokens, and after all of them from summaries combined first."""
    own, summaries = run.operator, internals.summaries(run.op)
    case = Case(2, CUTS[-1], 2, 32, decay="log", regime=regime)
    inputs, _ = operands(run.op, case)
    start = after = {name: inputs[name] for name in own.states}
    several = []
    for i, j in itertools.pairwise(CUTS):
        part = {name: inputs[name][:, i:j] for name in own.timed}
        shared = {name: inputs[name] for name in own.shared}
        repeated = {n: np.broadcast_to(x, (case.B, *x.shape)) for n, x in shared.items()}
        given = [jnp.asarray((part | repeated)[name]) for name in own.inputs]
        options = {"decay": "log", "precision": "highest", "implementation": run.implementation}
        several.append(internals.run_pass(run.op, "summary", given, **options))
        found = summaries.apply(several[-1], tuple(map(jnp.asarray, after.values())))
        arguments: dict[str, Any] = {**part, **shared, **after, "decay": "log"}
        _, *states = results(run, **arguments).values()
        after = dict(zip(own.states, states, strict=True))
        assert_right(dict(zip(own.states, found, strict=True)), after)
    whole = functools.reduce(summaries.combine, several)
    at_once = summaries.apply(whole, tuple(map(jnp.asarray, start.values())))
    assert_right(dict(zip(own.states, at_once, strict=True)), after)
