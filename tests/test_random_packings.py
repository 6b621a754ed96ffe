"""`segment_ids` of any kind, and JAX's transformations of packed rows."""

import functools
from collections.abc import Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

import rwkv_jax
from support import tolerance
from support.cases import Case
from support.operators import SEQUENCES, Run
from test_packing import expected

CASE = Case(2, 70, 1, 16)


def _fast(op: str) -> Run:
    """What compiles in a moment."""
    own = SEQUENCES[op]
    inputs, _ = own.make(own.suited(CASE))
    ids = np.ones((CASE.B, CASE.T), np.int32)
    decay = own.decays[-1]
    can = rwkv_jax.implementations(op, *inputs.values(), segment_ids=ids, decay=decay)
    return Run(op, "reference" if can["ffi"] else "ffi")


RUNS = {op: _fast(op) for op in SEQUENCES}
each_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
of_two = pytest.mark.parametrize("run", [RUNS["wkv7"], RUNS["wkv4"]], ids=["wkv7", "wkv4"])


@functools.partial(jax.jit, static_argnames="run")
def found_by(run: Run, inputs: dict, cotangents: dict, ids: Any) -> dict:
    def call(inputs: dict) -> dict:
        results = run(**inputs, precision="highest", segment_ids=ids)
        return dict(zip(run.operator.results, results, strict=True))

    results, vjp = jax.vjp(call, inputs)
    (gradients,) = vjp({name: cotangents[f"d{name}"] for name in run.operator.results})
    return results | {f"d{name}": x for name, x in gradients.items()}


def made(run: Run, case: Case = CASE) -> tuple[dict, dict]:
    decay = run.operator.decays[-1]
    return run.operator.make(run.operator.suited(Case(**{**vars(case), "decay": decay})))


def assert_right(run: Run, found: Mapping, inputs: dict, ids: np.ndarray, cotangents: dict) -> None:
    wanted = expected(run.op, inputs, ids, run.operator.decays[-1], cotangents)
    arrays = {name: np.asarray(x) for name, x in found.items()}
    tolerance.assert_close(arrays, {n: wanted[n] for n in arrays}, tolerance.EXACT_FLOAT32)


runs_of_ids = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([0, 0, 1, 2, 3, -1]),
        strategies.sampled_from([1, 1, 2, 5, 16, 30, 48, 64]),
    ),
    max_size=12,
)


def row(several: list[tuple[int, int]]) -> list[int]:
    """Repeated ids among them, next to each other or not, and padding at the end."""
    ids = [one for one, times in several for _ in range(times)]
    return (ids + [0] * CASE.T)[: CASE.T]


@each_run
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
@hypothesis.given(rows=strategies.tuples(runs_of_ids.map(row), runs_of_ids.map(row)))
def test_any_ids(run: Run, rows: tuple[list[int], ...]) -> None:
    inputs, cotangents = made(run)
    ids = np.array(rows, np.int32)
    assert_right(run, found_by(run, inputs, cotangents, ids), inputs, ids, cotangents)


IDS = np.array([row([(1, 20), (2, 45)]), row([(0, 5), (3, 30), (1, 1), (3, 34)])], np.int32)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_any_integers(dtype: str) -> None:
    run = RUNS["wkv7"]
    inputs, _ = made(run)
    found, right = (run(**inputs, segment_ids=ids)[0] for ids in (IDS.astype(dtype), IDS))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    "run", [RUNS["wkv7"], pytest.param(RUNS["wkv4"], marks=pytest.mark.slow)], ids=["wkv7", "wkv4"]
)
def test_vmap(run: Run) -> None:
    """With ids that are mapped and that are not, and an operand that is not."""
    inputs, cotangents = made(run)
    mapped = {**inputs, "v": np.stack([inputs["v"], inputs["v"][:, ::-1]])}
    axes = {name: 0 if name == "v" else None for name in inputs}
    for ids, axis in ((np.stack([IDS, IDS[::-1]]), 0), (IDS, None)):
        call = jax.vmap(functools.partial(found_by, run), in_axes=(axes, None, axis))
        found = call(mapped, cotangents, ids)
        for i in range(2):
            one = {**inputs, "v": mapped["v"][i]}
            own = {name: x[i] for name, x in found.items()}
            assert_right(run, own, one, ids[i] if axis == 0 else ids, cotangents)


def test_remat_inside_a_scan() -> None:
    run = RUNS["wkv7"]
    inputs, cotangents = made(run)

    def loss(v: jax.Array, run: Run, remat: bool) -> jax.Array:
        def layer(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            return run(**{**inputs, "v": v}, segment_ids=IDS, precision="highest")[0], None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, v, None, length=2)
        return jnp.vdot(y, cotangents["dy"])

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    found = np.asarray(gradient(inputs["v"], run, True))
    right = np.asarray(gradient(inputs["v"], Run(run.op, "reference"), False))
    tolerance.assert_close({"dv": found}, {"dv": right}, tolerance.EXACT_FLOAT32)


@of_two
@pytest.mark.parametrize("case", [Case(2, 0, 1, 16), Case(0, 9, 1, 16), Case(1, 1, 1, 16)], ids=str)
def test_few_tokens(run: Run, case: Case) -> None:
    inputs, cotangents = made(run, case)
    ids = np.ones((case.B, case.T), np.int32)
    found = found_by(run, inputs, cotangents, ids)
    if case.B and case.T:
        return assert_right(run, found, inputs, ids, cotangents)
    assert {n: x.shape for n, x in found.items() if n[1:] in inputs} == {
        f"d{n}": x.shape for n, x in inputs.items()
    }
    for state, final in zip(run.operator.states, run.operator.results[1:], strict=True):
        np.testing.assert_array_equal(found[final], inputs[state])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", SEQUENCES)
def test_refusals(op: str) -> None:
    inputs, _ = made(RUNS[op])

    def refuses(error: type[Exception], message: str, ids: Any) -> None:
        with pytest.raises(error, match=rf"^{op}: segment_ids {message}"):
            RUNS[op](**inputs, segment_ids=ids)

    refuses(TypeError, "is a list; accepted is a JAX or numpy array", IDS.tolist())
    refuses(TypeError, "is float32; accepted are integers", IDS.astype(np.float32))
    refuses(TypeError, "is bool; accepted are integers", IDS > 0)
    for wrong in (IDS[:1], IDS[:, 1:], IDS[0], IDS[..., None]):
        shape = str(wrong.shape).replace("(", r"\(").replace(")", r"\)")
        refuses(ValueError, rf"has shape {shape}; accepted is \[B, T\] = \(2, 70\)", wrong)
