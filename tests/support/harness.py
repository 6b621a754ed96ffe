"""Results and gradients of an operator by name, and what the oracle says that they are.

Arrays are named after the arguments and results of the operator: `r`, `initial_state`, `y`. A
cotangent of a result and the gradient of an input have a `d` in front: `dy`, `dr`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

import rwkv_jax
from support import internals, tolerance
from support.cases import Arrays, Case
from support.operators import DELTA_RULES, DELTA_STEPS, Operator, Run, flat

ON_MATRIX_UNITS: dict[str, tuple[int, ...]] = dict.fromkeys(("wkv7", "wkv6", "wkv5"), (64, 128))
"""The head sizes that have CUDA kernels on matrix units. Those of WKV7 take others too."""


def operands(
    op: str, case: Case, *, segment_ids: Any = None, cu_seqlens: Any = None, active: Any = None
) -> tuple[Arrays, Arrays]:
    """Inputs and cotangents of a case in the form of decay that the operator takes. Padding, which
    is where `segment_ids` are 0 or rows not `active`, is NaN. With `cu_seqlens` each sequence has
    states of its own."""
    own = Run(op, None).operator
    inputs, cotangents = own.make(own.suited(case))
    if cu_seqlens is not None:
        each = Case(len(cu_seqlens) - 1, 1, case.H, case.K, V=case.V, state=case.state)
        states, dstates = own.make(own.suited(each))
        inputs |= {name: states[name] for name in own.states if name in states}
        cotangents |= {name: x for name, x in dstates.items() if name != "dy"}
    there = active if segment_ids is None else segment_ids != 0
    if there is not None:
        for x in (*(inputs[name] for name in own.timed), cotangents["dy"]):
            x[~there] = np.nan
    return inputs, cotangents


def results(
    run: Run, function: Callable[..., Any] | None = None, **arguments: Any
) -> dict[str, jax.Array]:
    """What an operator returns, by name. `function` is called in place of the public function of
    the operator, with the same arguments."""
    call = run if function is None else flat(run.op, function)
    options = {"decay": run.operator.decays[-1], "implementation": run.implementation}
    values = call(**{**options, "precision": "highest", **arguments})
    return dict(zip(run.operator.results, values, strict=True))


@functools.partial(jax.jit, static_argnames=("run", "function", "decay", "precision"))
def value_and_gradients(
    run: Run,
    inputs: Arrays,
    cotangents: Arrays,
    *,
    function: Callable[..., Any] | None = None,
    decay: str | None = None,
    precision: str | None = "highest",
    **packing: Any,
) -> dict[str, jax.Array]:
    """Results and the gradients of all inputs, by name.

    There is no loss, whose sum would be a collective of its own on several devices.
    """
    options = {"decay": decay or run.operator.decays[-1], "precision": precision, **packing}
    found, vjp = jax.vjp(lambda inputs: results(run, function, **inputs, **options), inputs)
    (gradients,) = vjp({n: _sharded_as(cotangents[f"d{n}"], x) for n, x in found.items()})
    return found | {f"d{name}": x for name, x in gradients.items()}


def _sharded_as(x: Any, like: jax.Array) -> Any:
    """On an Explicit mesh a cotangent has to be sharded as the result is."""
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


class Piece(NamedTuple):
    """Consecutive tokens of one row, and the rows of the initial and of the final states that they
    begin and end with, where they do."""

    row: int
    tokens: slice
    initial: int | None
    final: int | None


def segments_of(ids: np.ndarray) -> list[slice]:
    """The segments of one row of `segment_ids`."""
    cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    runs = [slice(i, j) for i, j in itertools.pairwise(cuts)]
    return [run for run in runs if ids[run].any()]


def _segments(ids: np.ndarray) -> Iterator[Piece]:
    """The first segment of a row begins with its initial state, and the last one gives the final
    state; a row of padding alone returns its state."""
    for row, own in enumerate(ids):
        several = segments_of(own) or [slice(0, 0)]
        for tokens in several:
            initial, final = (row if tokens is several[i] else None for i in (0, -1))
            yield Piece(row, tokens, initial, final)


def _sequences(cu: np.ndarray, tokens: int) -> Iterator[Piece]:
    """Offsets that are wrong are clamped to the tokens there are, and to never decrease."""
    clamped = np.maximum.accumulate(np.clip(cu, 0, tokens))
    for number, (start, end) in enumerate(itertools.pairwise(clamped)):
        yield Piece(0, slice(start, end), number, number)


def expected(
    op: str,
    inputs: Arrays,
    cotangents: Arrays,
    *,
    decay: str | None = None,
    segment_ids: np.ndarray | None = None,
    cu_seqlens: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Results and gradients by the oracle; of packed rows from each segment, or each sequence, on
    its own, and zeros for tokens of none."""
    own = Run(op, None).operator
    decay = decay or own.decays[-1]
    if segment_ids is not None:
        return _from_pieces(own, inputs, cotangents, decay, _segments(segment_ids))
    if cu_seqlens is not None:
        pieces = _sequences(cu_seqlens, cotangents["dy"].shape[1])
        return _from_pieces(own, inputs, cotangents, decay, pieces)
    return own.oracle(inputs, decay, cotangents)


def _from_pieces(
    own: Operator, inputs: Arrays, cotangents: Arrays, decay: str, pieces: Iterator[Piece]
) -> dict[str, np.ndarray]:
    finals = own.results[1:]
    given = {name: x for name, x in inputs.items() if name in own.names}
    found = {name.removeprefix("d"): np.zeros(x.shape) for name, x in cotangents.items()}
    found |= {f"d{name}": np.zeros(x.shape) for name, x in given.items()}
    for row, tokens, initial, final in pieces:
        place = slice(row, row + 1), tokens
        one = {name: given[name] for name in own.shared}
        one |= {name: given[name][place] for name in own.timed}
        if initial is not None:
            one |= {name: given[name][initial][None] for name in own.states if name in given}
        d = {"dy": cotangents["dy"][place]}
        for name in finals:
            x = cotangents[f"d{name}"]
            d[f"d{name}"] = np.zeros_like(x[:1]) if final is None else x[final][None]
        results = own.oracle(one, decay, d)
        for name in ("y", *(f"d{name}" for name in own.timed)):
            found[name][place] = results[name]
        for name in own.shared:
            found[f"d{name}"] += results[f"d{name}"]
        for name in finals if final is not None else ():
            found[name][final] = results[name][0]
        for name in own.states:
            if name in one:
                found[f"d{name}"][initial] = results[f"d{name}"][0]
    return found


def ceilings(
    run: Run, inputs: Arrays, *, precision: str | None = "highest", **options: Any
) -> dict[str, float]:
    """How far each result and gradient of a call may be from the oracle."""
    is_delta_rule = run.op in DELTA_RULES | DELTA_STEPS
    if is_delta_rule:
        options.pop("decay", None)
    can = rwkv_jax.implementations(run.op, *inputs.values(), precision=precision, **options)
    on_gpu = jax.default_backend() == "gpu"
    on_matrix_units = on_gpu and suits_matrix_units(run.op, inputs, precision=precision, **options)
    chosen = run.implementation or next(name for name, x in can.items() if x.available)
    # Of the delta rule the operands of WKV7 are rounded, which are products.
    rounds = on_matrix_units or (is_delta_rule and precision != "highest")
    kind = {
        "sequential": chosen == "reference" or (chosen == "ffi" and not rounds),
        "highest": precision == "highest",
    }
    names = (*run.operator.results, *(f"d{name}" for name in inputs))
    dtype = str(inputs["v"].dtype)
    return {name: tolerance.ceiling(name, dtype, **kind) for name in names}


def suits_matrix_units(op: str, inputs: Arrays, *, precision: str | None, **_: Any) -> bool:
    """Whether a call suits CUDA kernels on matrix units, for which a GPU may still have too little
    shared memory. All other native kernels take one token at a time in float32."""
    k = inputs["k"]
    if k.dtype == np.float32 or precision == "highest" or k.shape[1] < internals.TILE:
        return False
    sizes = {k.shape[-1], inputs["v"].shape[-1]}
    if op == "wkv7" or op in DELTA_RULES:
        return all(16 <= size <= 128 and size % 8 == 0 for size in sizes)
    return len(sizes) == 1 and sizes <= {*ON_MATRIX_UNITS.get(op, ())}


def assert_right(
    found: Mapping[str, Any],
    expected: Mapping[str, Any],
    ceilings: float | Mapping[str, float] = tolerance.EXACT_FLOAT32,
) -> None:
    """Every array found is close to the expected one of its name."""
    tolerance.assert_close(
        {name: np.asarray(x) for name, x in found.items()},
        {name: np.asarray(expected[name]) for name in found},
        ceilings,
    )


def check(
    run: Run,
    case: Case,
    *,
    precision: str | None = "highest",
    function: Callable[..., Any] | None = None,
    **packing: Any,
) -> dict[str, jax.Array]:
    """Run a case: results and gradients have the right dtypes and are close to the oracle's."""
    own, decay = run.operator, run.operator.suited(case).decay
    inputs, cotangents = operands(run.op, case, **packing)
    options = {"decay": decay, "precision": precision, **packing}
    found = value_and_gradients(run, inputs, cotangents, function=function, **options)
    right = expected(run.op, inputs, cotangents, decay=decay, **packing)
    assert_right(found, right, ceilings(run, inputs, **options))
    states = {*own.states, *own.results[1:]}
    assert {name: str(x.dtype) for name, x in found.items()} == {
        name: "float32" if states & {name, name[1:]} else case.dtype for name in found
    }
    return found
