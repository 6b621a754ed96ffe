"""Arguments that are refused, by name, and unusual ones that work."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import rwkv_jax
from rwkv_jax import sharding
from support import meshes
from support.cases import Case
from support.harness import operands, value_and_gradients
from support.operators import OPERATORS, SEQUENCES, STEPS, Run, flat, runs

pytestmark = [pytest.mark.usefixtures("unchecked_types"), pytest.mark.quick("op", "run.op")]

CASE = Case(2, 16, 2, 32)
WITH_HEADS = [op for op in OPERATORS if "wkv4" not in op]

each_operator = pytest.mark.parametrize("op", OPERATORS)
each_argument = pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, x in OPERATORS.items() for name in x.names]
)


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
def test_wrong_dtypes(op: str) -> None:
    arrays, inputs = _arguments(op), OPERATORS[op].inputs

    def refuses(message: str, dtype: str, *names: str) -> None:
        changed = {name: arrays[name].astype(jnp.dtype(dtype)) for name in names}
        _refuses(op, TypeError, f"{names[0]} is {dtype}{message}", **changed)

    for name in inputs:
        refuses(" where the others are float32", "bfloat16", name)
    for dtype in ("int32", "uint8", "bool", "complex64", "float64"):
        refuses("; accepted are float32", dtype, "k")
        refuses("; accepted are float32", dtype, *inputs)
    for dtype in ("bfloat16", "float16", "int32", "float64"):
        for name in OPERATORS[op].states:
            refuses("; accepted is float32", dtype, name)


@each_operator
def test_float64_under_x64(op: str) -> None:
    """Refused, and never made of what is not given."""
    arrays, states = _arguments(op), OPERATORS[op].states
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(arrays[name], "float64") for name in OPERATORS[op].inputs}
        _refuses(op, TypeError, f"{next(iter(wide))} is float64; accepted are float32", **wide)
        several: list[dict[str, Any]] = [{"implementation": x} for x in (None, "xla", "reference")]
        given = arrays
        if not op.endswith("_step"):
            given = {name: x for name, x in arrays.items() if name not in states}
            several.append({"segment_ids": jnp.ones(given["k"].shape[:2], jnp.int32)})
        for options in several:
            call = functools.partial(OPERATORS[op].function, **given, **options)
            assert {x.dtype.name for x in jax.tree.leaves(jax.eval_shape(call))} == {"float32"}


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
    inputs, _ = OPERATORS[op].make(CASE)
    first = {
        "decay": ", ".join(map(repr, OPERATORS[op].decays)),
        "precision": "None",
        "implementation": repr(next(iter(rwkv_jax.implementations(op, *inputs.values())))),
    }
    for value in UNKNOWN[option]:
        message = f"{option} is {value!r}; accepted are {first[option]}"
        _refuses(op, ValueError, message, **{option: value})


@each_operator
def test_options_are_keywords_and_decay_has_no_default(op: str) -> None:
    arrays, call = _arguments(op), getattr(rwkv_jax, op)
    parts = [arrays.pop(name) for name in OPERATORS[op].states]
    decay, state = arrays.pop("decay"), parts[0] if op in WITH_HEADS else rwkv_jax.Wkv4State(*parts)
    operands = (*arrays.values(), state)
    jax.eval_shape(functools.partial(call, decay=decay), *operands)
    number = len(operands)
    refused = rf"^{op}\(\) takes .*{number} positional arguments but {number + 1} were given$"
    with pytest.raises(TypeError, match=refused):
        call(*operands, decay)
    missing = rf"^{op}\(\) missing 1 required keyword-only argument: 'decay'$"
    with pytest.raises(TypeError, match=missing):
        call(*operands)


@pytest.mark.slow
@pytest.mark.parametrize("run", runs(CASE, others=2))
def test_no_heads(run: Run) -> None:
    """Rows and tokens may be none as well: test_ops.py has such cases."""
    inputs, cotangents = operands(run.op, Case(2, 16, 0, 32))
    found = value_and_gradients(run, inputs, cotangents)
    for name, x in inputs.items():
        assert found[f"d{name}"].shape == x.shape


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
        # Forms of decay are read in one place, but for native kernels.
        if decay == run.operator.decays[-1]
        or (name == "w" and (run.op == "wkv7" or run.implementation == "ffi"))
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


@pytest.mark.parametrize("op", STEPS)
def test_wrong_active(op: str) -> None:
    for error, message, active in (
        (TypeError, "is a list; accepted is a JAX or numpy array", [True, False]),
        (TypeError, "is int32; accepted is bool", np.ones(2, np.int32)),
        (ValueError, "has shape (3,); accepted is [B] = (2,)", np.ones(3, bool)),
    ):
        _refuses(op, error, f"active {message}", active=active)


@pytest.mark.parametrize("op", SEQUENCES)
def test_wrong_segment_ids(op: str) -> None:
    ids = np.ones((2, 16), np.int32)
    for error, message, wrong in (
        (TypeError, "is a list; accepted is a JAX or numpy array", ids.tolist()),
        (TypeError, "is float32; accepted are integers", ids.astype(np.float32)),
        (TypeError, "is bool; accepted are integers", ids > 0),
        (
            ValueError,
            "has 4294967297; accepted are integers from -2147483648",
            np.int64(2**32) + ids,
        ),
        (
            ValueError,
            "has -4294967295; accepted are integers from -2147483648",
            ids - np.int64(2**32),
        ),
        *(
            (ValueError, f"has shape {x.shape}; accepted is [B, T] = (2, 16)", x)
            for x in (ids[:1], ids[:, 1:], ids[0], ids[..., None])
        ),
    ):
        _refuses(op, error, f"segment_ids {message}", segment_ids=wrong)


@pytest.mark.parametrize("op", SEQUENCES)
def test_wrong_cu_seqlens(op: str, cpus: list[Any]) -> None:
    inputs, _ = operands(op, Case(1, 8, 2, 16), cu_seqlens=[0, 3, 8])
    right, accepted = np.array([0, 3, 8], np.int32), "accepted are numbers from 0 to T = 8"
    for error, message, wrong in (
        (TypeError, "is a list; accepted is a JAX or numpy array", [0, 3, 8]),
        (TypeError, "is int64; accepted is int32", right.astype(np.int64)),
        (TypeError, "is float32; accepted is int32", right.astype(np.float32)),
        (ValueError, "has shape (1, 3); accepted is [S + 1]", right[None]),
        (ValueError, "has shape (0,); accepted is [S + 1]", right[:0]),
        (ValueError, f"starts with 1; {accepted}", np.array([1, 3, 8], np.int32)),
        (ValueError, f"has 5 behind 9; {accepted}", np.array([0, 9, 5], np.int32)),
        (ValueError, f"ends with 7; {accepted}", np.array([0, 3, 7], np.int32)),
        (ValueError, "with B = 2; accepted is B = 1", right),
    ):
        rows = {} if "B = 2" in message else inputs
        _refuses(op, error, f"cu_seqlens {message}", **rows, cu_seqlens=wrong)
    state = OPERATORS[op].states[0]
    message = f"{state} has shape {inputs[state].shape}, so S = 2, where cu_seqlens has S + 1 = 4"
    _refuses(op, ValueError, message, **inputs, cu_seqlens=np.array([0, 3, 3, 8], np.int32))
    both = {"segment_ids": np.ones((1, 8), np.int32), "cu_seqlens": right}
    _refuses(op, ValueError, "segment_ids with cu_seqlens; accepted is None", **inputs, **both)

    mesh, public = meshes.mesh("x=2", AxisType.Auto, cpus), Run(op, None).public
    for function, message in (
        (sharding.shard(public, mesh, sequence="x"), "with sequence = 'x'; accepted with it"),
        (sharding.sequence_parallel(public, "x"), "along 'x'; accepted is None"),
    ):
        with pytest.raises(ValueError, match=f"{op}: cu_seqlens {message}"):
            flat(op, function)(**inputs, decay="exp", cu_seqlens=right)
