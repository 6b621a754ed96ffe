"""The targets of the native kernels of the default platform, called by themselves."""

import concurrent.futures
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from support import cases, internals
from support.cases import Case
from support.operators import OPERATORS, SEQUENCES

pytestmark = pytest.mark.quick("op", "case.dtype")

PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
CASE = Case(2, 65, 2, 32)

PASSES = {"forward": "{}", "backward": "{} backward", "step": "{}_step"}
"""The passes, and the name by which an error calls each."""

each_op = pytest.mark.parametrize("op", SEQUENCES)
each_pass = pytest.mark.parametrize("name", PASSES)
each_long_pass = pytest.mark.parametrize("name", ["forward", "backward"])


def _run(op: str, name: str, operands: Any) -> Any:
    options = {"decay": OPERATORS[op].decays[-1], "precision": None, "save": name == "forward"}
    return internals.run_native_pass(op, name, PLATFORM, operands, **options)


def _operands(op: str, name: str, case: Case = CASE, packing: Any = None) -> Any:
    """The operands of a pass. Each row has two sequences if there are any."""
    own = OPERATORS[f"{op}_step" if name == "step" else op]
    inputs, cotangents = own.make(own.suited(case))
    if name == "step":
        return internals.step_operands(op, inputs)
    if isinstance(packing, internals.Sequences):
        for arrays in (inputs, cotangents):
            states = {n: x for n, x in arrays.items() if "initial" in n or "final" in n}
            arrays |= {n: np.stack([x, x], axis=1) for n, x in states.items()}
    forward = internals.forward_operands(op, inputs, packing)
    if name == "forward":
        return forward
    states = _run(op, "forward", forward).states
    return internals.backward_operands(op, inputs, states, cotangents, packing)


def _names(op: str, name: str) -> list[str]:
    """The operands of a target but those of the packing, in order."""
    own = internals.signature(op)
    states = {
        "forward": [f"initial_{part}" for part in own.state],
        "backward": [*(f"{x}s" for x in own.state), "dy", *(f"dfinal_{x}" for x in own.state)],
        "step": [*own.state],
    }
    return [*own.inputs, *states[name]]


class Call(NamedTuple):
    """A call of a target, to be changed in place: results as shapes and dtypes."""

    results: list[Any]
    operands: list[Any]
    attributes: dict[str, Any]


def _refusal(op: str, name: str, operands: Any, change: Callable[[Call], Any]) -> str:
    """What a target says of a call that is changed behind all checks of the package."""

    def changed(target: str, results: Any, *given: Any, aliases: Any = None, **more: Any) -> Any:
        # An alias has to match the operand that it replaces, which may be no longer so.
        change(call := Call(list(results), list(given), more))
        found = through(target, call.results, *call.operands, **call.attributes)
        # Waited for here, before the caller meets a wrong number of results.
        return jax.block_until_ready(found)

    with pytest.MonkeyPatch.context() as patch:
        through = internals.intercept_native_calls(patch, changed)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: ") as error:
            _run(op, name, operands)
    return str(error.value)


SPOILED = {
    "rank": lambda x: x[0],
    "shape": lambda x: jnp.concatenate([x, x], axis=-1),
    "batch": lambda x: jnp.concatenate([x, x], axis=0),
    "dtype": lambda x: x.astype(jnp.int32),
    "float": lambda x: x.astype(jnp.float16),
}


@pytest.mark.parametrize(
    ("op", "name", "operand", "wrong"),
    [
        (op, name, operand, wrong)
        for op in SEQUENCES
        for name in PASSES
        for operand in _names(op, name)
        # For other operators what tells whether the axes and the type of an operand are right.
        for wrong in (SPOILED if op == "wkv7" else ("shape", "float"))
    ],
)
def test_wrong_operands(op: str, name: str, operand: str, wrong: str) -> None:
    place = _names(op, name).index(operand)

    def spoil(call: Call) -> None:
        call.operands[place] = SPOILED[wrong](call.operands[place])

    error = _refusal(op, name, _operands(op, name), spoil)
    # The first operand that has an axis sets its size, or its dtype: a later one is then odd.
    assert f"INVALID_ARGUMENT: {PASSES[name].format(op)}: " in error
    assert re.search(rf"\b{operand} (has|is)\b", error)


def _attributes(**changed: Any) -> Callable[[Call], Any]:
    return lambda call: call.attributes.update(changed)


def _results(shape: Any = None, dtype: Any = None) -> Callable[[Call], Any]:
    """Another shape or dtype of the last result."""

    def change(call: Call) -> None:
        own_shape, own_dtype = call.results[-1]
        call.results[-1] = (shape or own_shape, dtype or own_dtype)

    return change


Wrong = dict[str, tuple[Callable[[Call], Any], str]]

WRONG_CALLS: Wrong = {
    "a decay too many": (_attributes(decay=9), "decay is 9"),
    "a negative decay": (_attributes(decay=-1), "decay is -1"),
    "an attribute more": (_attributes(unknown=1), "attributes"),
    "no decay": (lambda call: call.attributes.pop("decay"), "attributes"),
    "an operand less": (lambda call: call.operands.pop(), "{operand} is missing"),
    "an operand more": (lambda call: call.operands.append(call.operands[0]), "{more} operands"),
    "a result less": (lambda call: call.results.pop(), "{result} is missing"),
    "a result more": (lambda call: call.results.append(call.results[0]), "results given"),
    "a rounded result": (_results(dtype=jnp.bfloat16), "{result} is BF16; expected F32"),
}
"""A change of a call, and what is said of it."""

WRONG_LONG_CALLS: Wrong = {
    "no precision": (lambda call: call.attributes.pop("exact"), "attributes"),
    "no packing": (lambda call: call.attributes.pop("packing"), "attributes"),
    "precision": (_attributes(exact=2), "exact is 2; expected 0 or 1"),
    "packing": (_attributes(packing=3), "packing is 3; expected 0 (none), 1 (marks) or 2 (seq"),
    "no marks": (_attributes(packing=1), "marks is missing"),
    "no spans": (_attributes(packing=2), "spans is missing"),
    "scratch": (_results(shape=(1, 1)), "scratch has shape [1, 1]; expected [X]"),
}
"""Those of calls that are no step."""


@pytest.mark.quick("name")
@each_pass
@each_op
def test_wrong_calls(op: str, name: str) -> None:
    operands, names = _operands(op, name), _names(op, name)
    words = {"operand": names[-1], "more": len(names) + 1}
    words["result"] = names[-1] if name == "step" else "scratch"
    changes = WRONG_CALLS | ({} if name == "step" else WRONG_LONG_CALLS)
    for wrong, (change, message) in changes.items():
        assert message.format(**words) in _refusal(op, name, operands, change), wrong


@pytest.mark.parametrize("saved", [1, 3])
@each_op
def test_wrong_number_of_states(op: str, saved: int) -> None:
    states = internals.signature(op).state

    def of_results(call: Call) -> None:
        # `y` and the final state come first, and scratch is last.
        for i in range(1 + len(states), len(call.results) - 1):
            (rows, _, *shape), dtype = call.results[i]
            call.results[i] = ((rows, saved, *shape), dtype)

    def of_operands(call: Call) -> None:
        for place in (_names(op, "backward").index(f"{part}s") for part in states):
            x = call.operands[place][:, :1]
            call.operands[place] = jnp.repeat(x, saved, axis=1)

    for name, change in (("forward", of_results), ("backward", of_operands)):
        error = _refusal(op, name, _operands(op, name), change)
        assert f"states has N = {saved}; expected" in error


if PLATFORM == "cuda":

    @pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5"])
    def test_scratch_that_is_too_small(op: str) -> None:
        """Less scratch makes fewer splits, but some is needed at least."""

        error = _refusal(op, "backward", _operands(op, "backward"), _results(shape=(64,)))
        assert "scratch has X = 64; expected at least " in error


def _marks(case: Case) -> Any:
    """Rows that all begin with a start, and have all kinds of marks."""
    kinds = [internals.CONTINUES, internals.STARTS, internals.PADDING]
    marks = np.random.default_rng(0).choice(kinds, (case.B, case.T))
    marks[:, :1] = internals.STARTS
    return internals.Marks(jnp.asarray(marks, jnp.uint8))


def _sequences(case: Case) -> Any:
    """Two sequences in each of two rows."""
    cu = [[0, 30, case.T], [0, 0, case.T]]
    return internals.Sequences(jnp.asarray(cu, jnp.int32))


WRONG_PACKING = [
    (_marks, -1, lambda x: x.astype(jnp.float32), "marks is F32; expected U32"),
    (_marks, -1, lambda x: x[:, :-1], "marks has M = 7; expected 8 for 65 tokens"),
    (_marks, -1, lambda x: x[0], "marks has shape [8]; expected [B, M]"),
    (_marks, -1, lambda x: x[:1], "marks has shape [1, 8], so B = 1, where "),
    (_sequences, -2, lambda x: x.astype(jnp.float32), "spans is F32; expected S32"),
    (_sequences, -2, lambda x: x[0], "spans has shape [4]; expected [S, W]"),
    (_sequences, -2, lambda x: x[:, :3], "spans has W = 3; expected 4 or 8"),
    (_sequences, -2, lambda x: x[:2], "spans has shape [2, 4], so S = 2, where "),
    (_sequences, -1, lambda x: x.astype(jnp.int8), "owners is S8; expected S32"),
    (_sequences, -1, lambda x: x[:1], "owners has shape [1, 2], so B = 1, where "),
    (_sequences, -1, lambda x: x[:, 1:], "owners has O = 1; expected 2 for 65"),
]
"""A packing, the place of one of its operands, how it is spoiled, and what is said of that."""


@each_long_pass
@each_op
def test_wrong_packing(op: str, name: str) -> None:
    operands = {make: _operands(op, name, packing=make(CASE)) for make in (_marks, _sequences)}
    for right in operands.values():
        jax.block_until_ready(_run(op, name, right))
    for make, place, spoiled, message in WRONG_PACKING:

        def spoil(call: Call, place: int = place, spoiled: Any = spoiled) -> None:
            call.operands[place] = spoiled(call.operands[place])

        assert f"{PASSES[name].format(op)}: {message}" in _refusal(op, name, operands[make], spoil)


@each_op
def test_a_start_at_the_first_token(op: str) -> None:
    """As where a sequence continues on another device: what was before is not read."""
    forward = _operands(op, "forward", packing=_marks(CASE))
    unknown = {part: jnp.full_like(x, jnp.nan) for part, x in forward.state.items()}
    for state in (forward.state, unknown):
        result = _run(op, "forward", internals.Forward(forward.inputs, state, forward.packing))
        assert all(np.isfinite(x).all() for x in (result.y, *result.state.values()))
    gradients = _run(op, "backward", _operands(op, "backward", packing=_marks(CASE)))
    for name, x in gradients.inputs.items():
        assert np.isfinite(x).all(), name
        assert np.any(x), name
    assert not any(np.any(x) for x in gradients.state.values())


@pytest.mark.parametrize("size", [8, 24, 48, 512])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5"])
def test_a_head_size_that_it_lacks(op: str, size: int) -> None:
    operands = _operands(op, "forward", Case(1, 2, 1, size))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*K = {size}"):
        jax.block_until_ready(_run(op, "forward", operands))


POISONED = (
    Case(1, 0, 2, 64),
    Case(2, 1, 2, 32),
    Case(2, 65, 2, 32, dtype="bfloat16"),
    Case(1, 128, 3, 64),
    Case(1, 63, 1, 16, dtype="float16"),
)


@pytest.mark.parametrize(
    ("op", "case", "marked"),
    [
        *((op, case, False) for op in SEQUENCES for case in POISONED),
        *((op, case, True) for op in SEQUENCES for case in POISONED[1:3]),
        *(("wkv4", Case(1, 65, 3, 7), marked) for marked in (False, True)),
    ],
    ids=str,
)
@each_long_pass
def test_outputs_are_written_whole(op: str, name: str, case: Case, marked: bool) -> None:
    """Every output goes to a donated buffer full of NaN: what is not written stays NaN."""
    operands = _operands(op, name, case, _marks(case) if marked else None)
    types = jax.eval_shape(functools.partial(_run, op, name), operands)
    poison = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), types)

    def pointers(tree: Any) -> set[int]:
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size}

    given = pointers(poison)
    run = jax.jit(lambda _, operands: _run(op, name, operands), donate_argnums=0, keep_unused=True)
    outputs = run(poison, operands)
    assert pointers(outputs) == given
    for x in jax.tree.leaves(outputs):
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(2, 65, 4, 64), Case(1, 1000, 2, 64, dtype="bfloat16")], ids=str
)
@each_op
def test_three_runs_are_bitwise_equal(op: str, case: Case) -> None:
    for name in PASSES:
        operands, run = _operands(op, name, case), jax.jit(functools.partial(_run, op, name))
        first, *others = [jax.tree.leaves(jax.device_get(run(operands))) for _ in range(3)]
        for several in zip(first, *others, strict=True):
            assert len({x.tobytes() for x in several}) == 1


def test_threads_share_one_program() -> None:
    several = [cases.wkv7(Case(2, 65, 2, 32, seed=seed))[0] for seed in range(8)]

    @jax.jit
    def gradients(inputs: dict) -> dict:
        def loss(inputs: dict) -> jax.Array:
            y, state = rwkv_jax.wkv7(**inputs, decay="sigmoid", implementation="ffi")
            return jnp.sum(jnp.sin(y)) + jnp.sum(state)

        return jax.grad(loss)(inputs)

    expected = [jax.device_get(gradients(inputs)) for inputs in several]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            results = list(pool.map(lambda x: jax.device_get(gradients(x)), several))
            jax.tree.map(np.testing.assert_array_equal, results, expected)


if PLATFORM == "cpu":

    @pytest.mark.parametrize("packed", ["alone", "marks", "sequences"])
    @each_op
    def test_few_heads_among_many(op: str, packed: str) -> None:
        """The gradients of a head have the same bits whether threads share the head or each thread
        has heads of its own."""
        heads, case = 8, Case(1, 600, 8, 64)
        cu = internals.Sequences(jnp.asarray([[0, 130, case.T]], jnp.int32))
        packing = {"alone": None, "marks": _marks(case), "sequences": cu}[packed]
        operands = _operands(op, "backward", case, packing)

        def first(x: jax.Array) -> jax.Array:
            """The part of the first head, of which `wkv4` has channels."""
            axis = next((i for i, n in enumerate(x.shape) if n in (heads, heads * case.K)), None)
            return x if axis is None else jnp.split(x, heads, axis)[0]

        expected = jax.tree.map(first, _run(op, "backward", operands))
        for _ in range(3):
            found = _run(op, "backward", jax.tree.map(first, operands))
            jax.tree.map(np.testing.assert_array_equal, found, expected)

    def test_special_values_of_float16() -> None:
        """Of `wkv4` y is the first v, and without weights of tokens it is num / den: all float16
        are loaded as they are, and float32 is rounded to nearest even."""
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        exact = halves.astype(np.float32)
        finite = exact[:0x7C00]
        middle = (finite + np.append(finite[1:], np.float32(65536))) / 2
        near = [np.nextafter(middle, np.float32(end)) for end in (0, np.inf)]
        rounded = np.concatenate([exact, middle, -middle, *near])

        def y(v: np.ndarray, k: float, num: np.ndarray, den: float, log_max: float) -> Any:
            inputs = {"k": np.full_like(v, k), "v": v}
            inputs = {name: x[None, None].astype(np.float16) for name, x in inputs.items()}
            state = {"num": num, "den": np.full_like(v, den), "log_max": np.full_like(v, log_max)}
            inputs |= {f"initial_{part}": x[None] for part, x in state.items()}
            inputs |= {"w": np.zeros_like(v), "u": np.zeros_like(v)}
            return _run("wkv4", "forward", internals.forward_operands("wkv4", inputs)).y[0, 0]

        loaded = y(exact, 0, np.zeros_like(exact), 0, -1e38)
        np.testing.assert_array_equal(loaded, halves)
        stored = y(np.zeros_like(rounded), -200, rounded, 1, 0)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(stored, rounded.astype(np.float16))
