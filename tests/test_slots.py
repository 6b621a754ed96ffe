"""`slots`: a call continues some rows of a pool of states."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import Case
from support.harness import assert_right, results
from support.operators import OPERATORS, SEQUENCES, STEPS, Run, available

POOL, SLOTS = 5, np.array([4, -1, 0], np.int32)
CASES = {op: Case(3, 1 if op in STEPS else 5, 2, 16) for op in OPERATORS}
RUNS = [
    pytest.param(Run(op, implementation), id=f"{op}-{implementation}")
    for op in OPERATORS
    for implementation in available(op, CASES[op])
    if implementation == "ffi" or op == "wkv7_step"
]

each_run = pytest.mark.parametrize("run", RUNS)


def _given(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of three rows, and a pool of states by name."""
    inputs, _ = run.operator.make(CASES[run.op])
    rng = np.random.default_rng(0)
    pool = {
        name: rng.uniform(0.5, 2, (POOL, *inputs.pop(name).shape[1:])).astype(np.float32)
        for name in run.operator.states
    }
    return inputs, pool


def _expected(run: Run, inputs: dict, pool: dict, slots: list[int]) -> dict[str, np.ndarray]:
    """Row by row, the later ones over the earlier, each from the pool as it was."""
    per_row = {n: x for n, x in inputs.items() if n not in run.operator.shared}
    shared = {n: x for n, x in inputs.items() if n in run.operator.shared}
    y, *states = run.operator.results
    found = {state: x.copy() for state, x in zip(states, pool.values(), strict=True)}
    rows = []
    for row, slot in enumerate(slots):
        own = {n: x[row : row + 1] for n, x in per_row.items()}
        start = {n: x[max(slot, 0)][None] for n, x in pool.items()}
        after = results(run, **own, **shared, **start)
        rows.append(after[y] if 0 <= slot < POOL else np.zeros_like(after[y]))
        for state in states if 0 <= slot < POOL else ():
            found[state][slot] = after[state][0]
    return {y: np.concatenate(rows)} | found


@each_run
def test_rows_of_a_pool(run: Run) -> None:
    inputs, pool = _given(run)
    found = results(run, **inputs, **pool, slots=SLOTS)
    assert_right(found, _expected(run, inputs, pool, list(SLOTS)))
    for state, x in zip(run.operator.results[1:], pool.values(), strict=True):
        np.testing.assert_array_equal(found[state][1:4], x[1:4])
    assert not found["y"][1].any()


@each_run
@pytest.mark.parametrize("slots", [[2, 2, 2], [3, 7, 3], [-5, 1, 2**31 - 1]], ids=str)
def test_slots_that_only_the_device_knows(run: Run, slots: list[int]) -> None:
    """The last of equal slots is kept, and rows with a slot outside the pool are not active."""
    inputs, pool = _given(run)
    call = jax.jit(lambda slots: results(run, **inputs, **pool, slots=slots))
    found = call(np.array(slots, np.int32))
    inside = [slot if slot < POOL else -1 for slot in slots]
    assert_right(found, _expected(run, inputs, pool, inside))


@pytest.mark.parametrize("op", [*STEPS, "wkv7"])
def test_a_donated_pool_is_updated_in_place(op: str) -> None:
    run = Run(op, None)
    inputs, pool = _given(run)
    names = list(pool)

    # The parts of a state in their order, in which donated ones are matched with results.
    def call(inputs: dict, pool: tuple, slots: Any) -> tuple[jax.Array, ...]:
        y, *after = run(**inputs, **dict(zip(names, pool, strict=True)), slots=slots)
        return *after, y

    expected = call(inputs, tuple(pool.values()), SLOTS)
    given = tuple(map(jnp.array, pool.values()))
    compiled = jax.jit(call, donate_argnames="pool").lower(inputs, given, SLOTS).compile()
    shape = ",".join(map(str, next(iter(pool.values())).shape))
    text = compiled.as_text() or ""
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", text)
    before = [x.unsafe_buffer_pointer() for x in given]
    *after, y = compiled(inputs, given, SLOTS)
    assert [x.unsafe_buffer_pointer() for x in after] == before
    for x, right in zip((*after, y), expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["wkv7", "wkv4"])
def test_gradients_of_a_pool(op: str) -> None:
    """The gradient of a row that is replaced comes from the new state, any other from the row."""
    run = Run(op, None)
    inputs, pool = _given(run)

    def loss(pool: dict) -> jax.Array:
        several = run(**inputs, **pool, slots=SLOTS)
        return sum((jnp.sum(jnp.sin(x)) for x in several), start=jnp.zeros(()))

    def by_hand(pool: dict) -> jax.Array:
        rows = {n: jnp.asarray(x)[np.maximum(SLOTS, 0)] for n, x in pool.items()}
        y, *states = run(**inputs, **rows)
        total = jnp.sum(jnp.sin(y[np.array([0, 2])]))
        for x, after in zip(pool.values(), states, strict=True):
            total += jnp.sum(jnp.sin(jnp.asarray(x).at[SLOTS[[0, 2]]].set(after[np.array([0, 2])])))
        return total

    found, expected = (jax.device_get(jax.grad(f)(pool)) for f in (loss, by_hand))
    assert_right(found, expected)


@pytest.mark.parametrize("op", SEQUENCES)
@pytest.mark.parametrize("cu", [[0, 2, 2, 5], [1, 4, 3, 9], [-7, 0, 2, 3]], ids=str)
def test_sequences_in_a_row(op: str, cu: list[int]) -> None:
    """A prompt goes into each slot, also where `cu_seqlens` are wrong."""
    run = Run(op, None)
    inputs, pool = _given(run)
    row = {n: x if n in run.operator.shared else x[:1] for n, x in inputs.items()}
    places = np.array(cu, np.int32)

    @jax.jit
    def call(pool: dict, slots: Any, places: Any) -> Any:
        return results(run, **row, **pool, slots=slots, cu_seqlens=places)

    found = call(pool, SLOTS, places)
    y, *states = run.operator.results
    given = {n: x[np.maximum(SLOTS, 0)] for n, x in pool.items()}
    alone = jax.jit(lambda cu: results(run, **row, **given, cu_seqlens=cu))(places)
    alone = {name: np.array(x) for name, x in alone.items()}
    first, last = np.maximum.accumulate(np.clip(cu, 0, 5))[1:3]
    alone[y][:, first:last] = 0
    for state, x in zip(states, pool.values(), strict=True):
        after = x.copy()
        after[SLOTS[[0, 2]]] = alone[state][[0, 2]]
        alone[state] = after
    assert_right(found, alone)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", ["wkv7", "wkv7_step", "wkv4_step"])
def test_refusals(op: str) -> None:
    run = Run(op, None)
    inputs, pool = _given(run)
    state = next(iter(pool))

    def call(slots: Any, **more: Any) -> None:
        run(**{**inputs, **pool, **more}, slots=slots)

    with pytest.raises(ValueError, match=f"{op}: slots has 5 where the pool has 5 rows"):
        call(np.array([5, 0, 1], np.int32))
    with pytest.raises(ValueError, match=f"{op}: slots has 2 more than once"):
        call(np.array([2, 0, 2], np.int32))
    with pytest.raises(ValueError, match=rf"{op}: slots has shape \(2,\); accepted is one for"):
        call(np.array([2, 0], np.int32))
    with pytest.raises(TypeError, match=f"{op}: slots is float32; accepted is int32"):
        call(np.array([2, 0, 1], np.float32))
    with pytest.raises(TypeError, match=f"{op}: slots is a list"):
        call([2, 0, 1])
    with pytest.raises(TypeError, match=rf"{op}: \w+(\.num)? is float16; accepted is float32"):
        call(SLOTS, **{state: pool[state].astype(np.float16)})
    with pytest.raises(ValueError, match=rf"{op}: \w+(\.num)? has shape"):
        call(SLOTS, **{state: pool[state][0]})


def test_refusals_of_sequences() -> None:
    run = Run("wkv7", None)
    inputs, pool = _given(run)
    with pytest.raises(ValueError, match="wkv7: initial_state is None; accepted with slots"):
        run(**inputs, slots=SLOTS)
    row = {n: x[:1] for n, x in inputs.items()}
    with pytest.raises(
        ValueError, match=r"wkv7: slots has shape \(3,\); accepted is one for .*\(2"
    ):
        run(**row, **pool, slots=SLOTS, cu_seqlens=np.array([0, 1, 5], np.int32))
