"""Summaries: what a run of tokens does to the state."""

import dataclasses
import functools
import itertools

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
    own, summary = run.operator, internals.summary(run.op)
    case = Case(2, CUTS[-1], 2, 32, decay="log", regime=regime)
    inputs, _ = operands(run.op, case)
    start = internals.state_of(run.op, inputs)
    options = {"decay": "log", "precision": "highest", "implementation": run.implementation}
    after, several = start, []
    for i, j in itertools.pairwise(CUTS):
        part = {n: x[:, i:j] if n in own.timed else x for n, x in inputs.items()}
        part |= internals.named_state(run.op, after)
        forward = internals.forward_operands(run.op, part)
        without_state = dataclasses.replace(forward, state={})
        several.append(internals.run_pass(run.op, "summary", without_state, **options))
        found = results(run, **part, decay="log")
        after = internals.state_of(run.op, found, "final_{}")
        assert_right(summary.apply(several[-1], forward.state), after)
    whole = functools.reduce(summary.combine, several)
    assert_right(summary.apply(whole, start), after)
