"""Segments of a sequence as maps of the state."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import _dispatch
from support import tolerance
from support.cases import Case
from support.operators import Run, library, runs

CUTS = [0, 7, 24, 24, 41, 48]
CASE = Case(2, CUTS[-1], 2, 32)
EXACT = {"precision": "highest"}

each_run = pytest.mark.parametrize("run", runs(CASE))


def _part(run: Run, inputs: dict, i: int, j: int) -> dict:
    return {n: x if n in run.operator.shared else x[:, i:j] for n, x in inputs.items()}


@pytest.mark.slow
@each_run
@pytest.mark.parametrize("regime", ["model", "mixed"])
def test_states_between_parts(run: Run, regime: str) -> None:
    """Also that of the whole, from maps that are combined first."""
    own, operator = run.operator, library(run.op)
    case = own.suited(Case(2, CUTS[-1], 2, 32, decay="log", regime=regime))
    given, _ = own.make(case)
    inputs = {name: given[name] for name in own.inputs}
    start = state = tuple(jnp.asarray(given[name]) for name in own.states)
    options = operator.options(
        operator.summary, decay="log", implementation=run.implementation, **EXACT
    )
    maps = []
    for i, j in itertools.pairwise(CUTS):
        part = _part(run, inputs, i, j)
        batched = {
            n: np.broadcast_to(x, (case.B, *x.shape)) if n in own.shared else x
            for n, x in part.items()
        }
        maps.append(_dispatch.call(operator.summary, options, *map(jnp.asarray, batched.values())))
        after = operator.segments.apply(maps[-1], state)
        state = run(*part.values(), *state, decay="log", **EXACT)[1:]
        _assert_alike(run, after, state)
    at_once = operator.segments.apply(_combined(operator, maps), start)
    _assert_alike(run, at_once, state)


def _combined(operator: Any, maps: list) -> Any:
    whole = maps[0]
    for x in maps[1:]:
        whole = operator.segments.combine(whole, x)
    return whole


def _assert_alike(run: Run, found: tuple, expected: tuple) -> None:
    names = run.operator.results[1:]
    tolerance.assert_close(
        {n: np.asarray(x) for n, x in zip(names, found, strict=True)},
        {n: np.asarray(x) for n, x in zip(names, expected, strict=True)},
        tolerance.EXACT_FLOAT32,
    )
