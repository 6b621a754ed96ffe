"""Arguments that are refused, by name, and unusual ones that work."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from support.cases import Case
from support.harness import operands, value_and_gradients
from support.operators import OPERATORS, Run, runs

pytestmark = [pytest.mark.usefixtures("unchecked_types"), pytest.mark.quick("op", "run.op")]

CASE = Case(2, 16, 2, 32)
ARGUMENTS = [(op, name) for op, x in OPERATORS.items() for name in x.names]
WITH_HEADS = [op for op in OPERATORS if "wkv4" not in op]

each_operator = pytest.mark.parametrize("op", OPERATORS)
each_argument = pytest.mark.parametrize(("op", "name"), ARGUMENTS)
each_run = pytest.mark.parametrize("run", runs(CASE, others=2))


def _inputs(op: str) -> list[Any]:
    return list(OPERATORS[op].make(CASE)[0].values())


def _arguments(op: str, **changed: Any) -> dict[str, Any]:
    inputs, _ = OPERATORS[op].make(CASE)
    return inputs | {"decay": OPERATORS[op].decays[-1]} | changed


def _refuses(op: str, error: type[Exception], message: str, **changed: Any) -> None:
    """The message is matched as it stands, behind the operator's name."""
    with pytest.raises(error, match=re.escape(f"{op}: {message}")):
        OPERATORS[op].function(**_arguments(op, **changed))


@each_argument
def test_wrong_rank(op: str, name: str) -> None:
    x = _arguments(op)[name]
    for wrong in (x[0], x[None], np.float32(0) * x.sum()):
        wrong = np.asarray(wrong)
        _refuses(op, ValueError, f"{name} has shape {wrong.shape}; accepted is [", **{name: wrong})


def _decided_before(op: str, name: str, axis: int) -> bool:
    """Whether an argument before this one has an axis of the same kind."""
    operator = OPERATORS[op]
    first_timed = next(x for x in operator.inputs if x not in operator.shared)
    last = operator.make(CASE)[0][name].ndim - 1
    return name != operator.inputs[0] and (name != first_timed or axis == last)


@each_argument
def test_mismatched_sizes(op: str, name: str) -> None:
    x = _arguments(op)[name]
    for axis in range(x.ndim):
        if not _decided_before(op, name, axis):
            continue
        changed, wrong = {name: np.concatenate([x, x], axis)}, name
        if name == "v" and op in WITH_HEADS and axis == x.ndim - 1:
            # V is v's own to choose: the state disagrees with it.
            changed, wrong = {"v": x[..., :-1]}, OPERATORS[op].states[0]
        with pytest.raises(ValueError, match=rf"^{op}: {wrong} has shape \(.*\), so [BTHKVC] = "):
            OPERATORS[op].function(**_arguments(op, **changed))


@each_operator
def test_the_odd_dtype_is_named(op: str) -> None:
    for name in OPERATORS[op].inputs:
        x = _arguments(op)[name].astype(jnp.bfloat16)
        _refuses(op, TypeError, f"{name} is bfloat16 where the others are float32", **{name: x})


@each_operator
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64", "float64"])
def test_dtypes_that_are_not_accepted(op: str, dtype: str) -> None:
    arrays = _arguments(op)
    for names in (["k"], OPERATORS[op].inputs):
        changed = {name: arrays[name].astype(dtype) for name in names}
        _refuses(op, TypeError, f"{names[0]} is {dtype}; accepted are float32", **changed)


@each_operator
def test_float64_under_x64(op: str) -> None:
    """Refused, and never made of what is not given."""
    arrays, states = _arguments(op), OPERATORS[op].states
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(arrays[name], "float64") for name in OPERATORS[op].inputs}
        _refuses(op, TypeError, f"{next(iter(wide))} is float64; accepted are float32", **wide)
        step = op.endswith("_step")
        given = {name: x for name, x in arrays.items() if step or name not in states}
        for implementation in (None, "xla", "reference"):
            call = functools.partial(OPERATORS[op].function, implementation=implementation)
            result = jax.eval_shape(lambda call=call: call(**given))
            assert {x.dtype.name for x in jax.tree.leaves(result)} == {"float32"}
        if not step:
            ids = jnp.ones(given["k"].shape[:2], jnp.int32)
            packed = functools.partial(OPERATORS[op].function, segment_ids=ids)
            result = jax.eval_shape(lambda: packed(**given))
            assert {x.dtype.name for x in jax.tree.leaves(result)} == {"float32"}


@each_operator
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "float64"])
def test_state_of_a_wrong_dtype(op: str, dtype: str) -> None:
    for name in OPERATORS[op].states:
        x = _arguments(op)[name].astype(dtype)
        _refuses(op, TypeError, f"{name} is {dtype}; accepted is float32", **{name: x})


@each_operator
def test_operands_that_are_no_arrays(op: str) -> None:
    for value in ([1.0, 2.0], 1.0, None, "r", (np.ones(2),)):
        kind = type(value).__name__
        _refuses(op, TypeError, f"k is a {kind}; accepted is a JAX or numpy", k=value)


UNKNOWN = {
    "decay": ("Log", "", None, 0, "softplus", ["log"]),
    "precision": ("best", 7, "float32x", ["high"]),
    "implementation": ("FFI", "cuda", "", 0, ["xla"]),
}


@each_operator
@pytest.mark.parametrize("option", UNKNOWN)
def test_unknown_options(op: str, option: str) -> None:
    first = {
        "decay": ", ".join(map(repr, OPERATORS[op].decays)),
        "precision": "None",
        "implementation": repr(next(iter(rwkv_jax.implementations(op, *_inputs(op))))),
    }
    for value in UNKNOWN[option]:
        message = f"{option} is {value!r}; accepted are {first[option]}"
        _refuses(op, ValueError, message, **{option: value})


@each_operator
def test_decay_has_no_default(op: str) -> None:
    arrays = _arguments(op)
    del arrays["decay"]
    missing = rf"^{op}\(\) missing 1 required keyword-only argument: 'decay'$"
    with pytest.raises(TypeError, match=missing):
        OPERATORS[op].function(**arrays)


@each_operator
def test_options_are_keywords(op: str) -> None:
    arrays = _arguments(op)
    parts = [arrays.pop(name) for name in OPERATORS[op].states]
    decay, state = arrays.pop("decay"), parts[0] if op in WITH_HEADS else rwkv_jax.Wkv4State(*parts)
    operands = (*arrays.values(), state)
    call = getattr(rwkv_jax, op)
    jax.eval_shape(functools.partial(call, decay=decay), *operands)
    number = len(operands)
    refused = rf"^{op}\(\) takes .*{number} positional arguments but {number + 1} were given$"
    with pytest.raises(TypeError, match=refused):
        call(*operands, decay)


@pytest.mark.slow
@each_run
def test_no_heads(run: Run) -> None:
    """Rows and tokens may be none as well: test_ops.py has such cases."""
    inputs, cotangents = operands(run.op, Case(2, 16, 0, 32))
    found = value_and_gradients(run, inputs, cotangents)
    assert {name: found[f"d{name}"].shape for name in inputs} == {
        name: x.shape for name, x in inputs.items()
    }


@pytest.mark.parametrize("op", WITH_HEADS)
@pytest.mark.parametrize("axis", ["K", "V"])
def test_heads_without_channels(op: str, axis: str) -> None:
    arrays, (state,) = _arguments(op), OPERATORS[op].states
    keys = [name for name in OPERATORS[op].inputs if name != "v"]
    names = [*keys, state] if axis == "K" else ["v"]
    changed = {name: arrays[name][..., :0] for name in names}
    if axis == "V":
        changed[state] = arrays[state][..., :0, :]
    name = "r" if axis == "K" else "v"
    _refuses(op, ValueError, f"{name} has shape {changed[name].shape}, so {axis} = 0", **changed)


@pytest.mark.parametrize(
    ("run", "decay", "name"),
    [
        (run, decay, name)
        for run in (x.values[0] for x in runs(CASE, others=2))
        for decay in run.operator.decays
        for name in run.names
        if name not in run.operator.shared
    ],
)
def test_nan_reaches_its_own_head_only(run: Run, decay: str, name: str) -> None:
    """Or, in an operator without heads, its own channel."""
    operator, own = run.operator, 0 if run.op in WITH_HEADS else 5
    inputs, cotangents = operands(run.op, dataclasses.replace(CASE, decay=decay))
    inputs[name] = inputs[name].copy()
    place = (1, own) if name in operator.states else (1, 7, own)
    inputs[name][(*place, *[3] * (inputs[name].ndim - len(place)))] = np.nan
    found = value_and_gradients(run, inputs, cotangents, decay=decay, precision=None)
    results = jax.device_get(found)

    assert np.isnan(results["y"][1, 8 if name == "w" else 7, own]).any()
    ends = [results[end][1, own] for end in operator.results[1:]]
    assert name == "r" or any(np.isnan(end).any() for end in ends)
    for label, x in results.items():
        others = np.ones(x.shape, bool)
        if label.removeprefix("d") in operator.shared:
            others[own] = False
        elif {label, label.removeprefix("d")} & {*operator.states, *operator.results[1:]}:
            others[1, own] = False
        else:
            others[1, :, own] = False
        assert np.isfinite(x[others]).all(), label
