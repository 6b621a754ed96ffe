"""What only a CUDA device can show. All other test files run there as well, on the CUDA kernels."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from rwkv_jax import layers
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import rwkv7
from support import (
    cases,
    hlo,
    internals,
    language_models,
    layer_functions,
    models,
    tolerance,
)
from support.cases import Case
from support.harness import ON_MATRIX_UNITS as OPS_ON_MATRIX_UNITS
from support.harness import assert_right, check, expected, operands, results, value_and_gradients
from support.operators import DELTA_RULES, DELTA_STEPS, OPERATORS, SEQUENCES, STEPS, Run

ON_MATRIX_UNITS = [(op, size) for op, sizes in OPS_ON_MATRIX_UNITS.items() for size in sizes]


def _run(op: str, case: Case, precision: str | None = None) -> dict:
    arrays, decay = operands(op, case), OPERATORS[op].suited(case).decay
    found = value_and_gradients(Run(op, "ffi"), *arrays, decay=decay, precision=precision)
    return jax.device_get(found)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("op", OPERATORS)
def test_every_dtype_and_head_size(op: str, dtype: str, size: int) -> None:
    case = Case(3, 1 if op in STEPS else 150, 3, size, dtype=dtype)
    check(Run(op, "ffi"), case)


@pytest.mark.parametrize("tokens", [16, 17, 63, 64, 65, 150, 1000])
@pytest.mark.parametrize(("op", "size"), ON_MATRIX_UNITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrix_units(dtype: str, op: str, size: int, tokens: int) -> None:
    check(Run(op, "ffi"), Case(2, tokens, 3, size, dtype=dtype), precision=None)


@pytest.mark.parametrize(
    ("op", "size", "decay"),
    [(op, size, decay) for op, size in ON_MATRIX_UNITS for decay in OPERATORS[op].decays],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("regime", ["model", "steep", "near 0", "near 1", "mixed", "extreme"])
def test_matrix_units_with_any_decay(
    regime: str, dtype: str, op: str, size: int, decay: str
) -> None:
    """Where they go too far for a tile, its tokens are multiplied in smaller parts. The gradients
    of WKV7 leave such a chunk to another kernel."""
    case = Case(1, 130, 3, size, dtype=dtype, decay=decay, regime=regime)
    check(Run(op, "ffi"), case, precision=None)


@pytest.mark.parametrize(
    ("op", "decay"), [(op, decay) for op in OPS_ON_MATRIX_UNITS for decay in OPERATORS[op].decays]
)
@pytest.mark.parametrize("regime", ["model", "steep", "near 0", "near 1", "mixed", "extreme"])
def test_float32_on_matrix_units(regime: str, op: str, decay: str) -> None:
    case = Case(1, 1000, 3, 64, decay=decay, regime=regime)
    right = expected(op, *operands(op, case), decay=decay)
    assert_right(_run(op, case), right, tolerance.TWO_TERMS)


@pytest.mark.parametrize(
    ("keys", "values"), [(16, 16), (32, 48), (64, 128), (128, 64), (96, 96), (24, 120)]
)
@pytest.mark.parametrize("decay", OPERATORS["wkv7"].decays)
@pytest.mark.parametrize("regime", ["model", "steep", "mixed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_heads_that_do_not_fill_a_kernel(
    dtype: str, regime: str, decay: str, keys: int, values: int
) -> None:
    case = Case(2, 150, 3, keys, V=values, dtype=dtype, decay=decay, regime=regime)
    ids = np.repeat([[1, 0, 2, 3], [4, 5, 5, 0]], [20, 9, 71, 50], axis=1)
    check(Run("wkv7", "ffi"), case, precision=None)
    check(Run("wkv7", "ffi"), case, precision=None, segment_ids=ids)


def _delta_rule(B: int, T: int, H: int, K: int, **more: Any) -> Case:
    return Case(B, T, H, K, decay="log", **{"dtype": "bfloat16", **more})


@pytest.mark.parametrize("op", DELTA_RULES)
@pytest.mark.parametrize(
    "case",
    [
        *(_delta_rule(2, t, 3, k) for t in (15, 16, 17, 63, 64, 65, 1000) for k in (64, 128)),
        *(_delta_rule(1, 130, 4, k, dtype="float16") for k in (64, 128)),
        *(_delta_rule(2, 150, 4, k, V=v) for k, v in ((16, 16), (64, 128), (128, 64), (24, 120))),
        *(
            _delta_rule(1, 130, 3, k, regime=regime)
            for k in (64, 128)
            for regime in ("steep", "steeper", "near 0", "near 1", "mixed", "extreme")
        ),
        _delta_rule(1, 65, 300, 64),
        _delta_rule(0, 65, 2, 64),
        _delta_rule(1, 0, 2, 128),
    ],
    ids=str,
)
def test_delta_rules(op: str, case: Case) -> None:
    check(Run(op, "ffi"), case, precision=None)


@pytest.mark.parametrize("op", DELTA_RULES)
@pytest.mark.parametrize("size", [64, 128])
def test_delta_rules_with_packing(op: str, size: int) -> None:
    ids = np.repeat([[1, 0, 2, 3], [4, 5, 5, 0]], [20, 9, 71, 50], axis=1)
    check(Run(op, "ffi"), _delta_rule(2, 150, 4, size), precision=None, segment_ids=ids)
    for cu in (cases.CU_SEQLENS, TRACED):
        _check_sequences(op, _delta_rule(1, 300, 2, size), cu)


@pytest.mark.parametrize("op", DELTA_RULES)
def test_delta_rules_run_their_own_kernels(op: str) -> None:
    inputs, cotangents = operands(op, _delta_rule(2, 65, 2, 64))
    lowered = value_and_gradients.lower(Run(op, None), inputs, cotangents, precision=None)
    own = {f"rwkv_{op}_{name}_v1" for name in ("fwd", "bwd")}
    assert hlo.targets(lowered.compile().as_text()) == own
    one = f"{op}_step"
    token, _ = operands(one, _delta_rule(2, 1, 2, 64))
    lowered = jax.jit(getattr(rwkv_jax, one)).lower(**token)
    assert hlo.targets(lowered.compile().as_text()) == {f"rwkv_{one}_v1"}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("op", DELTA_STEPS)
def test_steps_of_delta_rules(op: str, size: int, dtype: str) -> None:
    for case in (_delta_rule(3, 1, 4, size, dtype=dtype), _delta_rule(70, 1, 33, size)):
        check(Run(op, "ffi"), case)


@pytest.mark.parametrize("op", OPS_ON_MATRIX_UNITS)
def test_one_head_that_decays_too_far_changes_no_other(op: str) -> None:
    case = Case(2, 100, 3, 64, dtype="bfloat16", decay="log")
    inputs, cotangents = operands(op, case)
    call = functools.partial(value_and_gradients, Run(op, "ffi"), decay="log", precision=None)
    before = jax.device_get(call(inputs, cotangents))
    inputs["w"] = inputs["w"].copy()
    place = (2,) if "w" in OPERATORS[op].shared else (1, slice(70, None), 2)
    inputs["w"][place] = -50
    after = jax.device_get(call(inputs, cotangents))
    right = expected(op, inputs, cotangents, decay="log")
    for name, x in before.items():
        if name.removeprefix("d") in OPERATORS[op].shared:
            continue  # sums over the batch
        axis = 1 if "state" in name else 2
        others = np.ones((2, 3), bool)
        others[slice(None) if "w" in OPERATORS[op].shared else 1, 2] = False
        np.testing.assert_array_equal(
            np.moveaxis(x, axis, 1)[others], np.moveaxis(after[name], axis, 1)[others]
        )
        changed = [np.moveaxis(y[name], axis, 1)[~others] for y in (after, right)]
        tolerance.assert_close(
            {name: changed[0]}, {name: changed[1]}, tolerance.CHUNKED["gradient"]
        )


@pytest.mark.parametrize(("op", "size"), ON_MATRIX_UNITS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("tokens", [64, 129, 500, 1000])
def test_splits(
    tokens: int, share: float, op: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer splits than chunks. Where they do not divide the chunks, some may be empty."""
    internals.pretend_scratch(monkeypatch, share)
    for decay in {"exp", OPERATORS[op].decays[-1]}:
        case = Case(1, tokens, 2, size, dtype="bfloat16", decay=decay)
        check(Run(op, "ffi"), case, precision=None)
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.parametrize(
    "case",
    [Case(2, 100, 3, 64), Case(1, 16, 3, 64), Case(1, 70, 3, 64, decay="exp", regime="mixed")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("op", "size"), ON_MATRIX_UNITS)
def test_transitions(op: str, size: int, dtype: str, case: Case) -> None:
    """Close to transitions in float32 throughout, from runs on zeros and on the identity."""
    own = OPERATORS[op]
    case = own.suited(dataclasses.replace(case, K=size, dtype=dtype))
    inputs, cotangents = operands(op, case)
    forward = internals.forward_operands(op, inputs)
    options = {"decay": case.decay, "implementation": "ffi"}
    states = internals.run_pass(op, "forward", forward, **options, precision=None, save=True).states
    passes = {
        "transition": dataclasses.replace(forward, state={}),
        "reverse_transition": internals.backward_operands(op, inputs, states, cotangents),
    }
    for name, given in passes.items():
        found = {}
        for precision in (None, "highest"):
            call = functools.partial(internals.run_pass, op, name, **options, precision=precision)
            compiled = jax.jit(call).lower(given).compile()
            native = internals.targets(op, name) <= hlo.targets(compiled.as_text())
            assert native == (precision is None)
            found[precision] = compiled(given)
        assert_right(found[None], found["highest"], tolerance.CHUNKED["gradient"])


@pytest.mark.parametrize("op", OPS_ON_MATRIX_UNITS)
@pytest.mark.parametrize(("decay", "regime"), [("sigmoid", "model"), ("exp", "steep")])
def test_a_long_sequence_stays_accurate(op: str, decay: str, regime: str) -> None:
    """Against the exact kernels, which agree with the oracle on shorter ones."""
    case = Case(1, 32768, 2, 64, dtype="bfloat16", decay=decay, regime=regime)
    found, exact = _run(op, case), _run(op, case, "highest")
    limits = {n: tolerance.CHUNKED["gradient" if n[0] == "d" else "output"] for n in found}
    assert_right(found, exact, limits)


@pytest.mark.parametrize("op", OPS_ON_MATRIX_UNITS)
def test_matrix_units_run_and_save_nothing_without_a_gradient(op: str) -> None:
    case = Case(2, 65, 2, 64, dtype="bfloat16")
    inputs, cotangents = operands(op, case)
    lowered = value_and_gradients.lower(Run(op, "ffi"), inputs, cotangents, precision=None)
    compiled = lowered.compile()
    assert hlo.targets(compiled.as_text()) == internals.targets(op, "fwd", "bwd")
    function, decay = OPERATORS[op].function, OPERATORS[op].decays[-1]
    forward = jax.jit(lambda xs: function(**xs, decay=decay)).lower(inputs).compile()
    assert hlo.targets(forward.as_text()) == internals.targets(op, "fwd")
    assert "bf16[2,0,2,64,64]" in (forward.as_text() or "")
    assert "bf16[2,2,2,64,64]" in (compiled.as_text() or "")

    found = rwkv_jax.implementations(op, *inputs.values())
    forward_pass = str(found["ffi"].description).partition(";")[0]
    assert forward_pass == "CUDA kernels on matrix units, bfloat16 with float32 sums"
    exact = rwkv_jax.implementations(op, *inputs.values(), precision="highest")
    by_token = "CUDA kernels, one token at a time in float32"
    assert exact["ffi"].description == f"{by_token}: precision is 'highest'"


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv4", *DELTA_RULES])
@pytest.mark.parametrize(("batch", "precision"), [(8, "highest"), (8, None), (1, None)])
def test_three_runs_on_a_full_gpu_are_bitwise_equal(
    batch: int, precision: str | None, op: str, dtype: str, size: int
) -> None:
    case = Case(batch, 300, 32, size, dtype=dtype)
    if op in DELTA_RULES:
        case = dataclasses.replace(case, decay="log")
    arrays, decay = jax.device_put(operands(op, case)), Run(op, None).operator.suited(case).decay
    options = {"decay": decay, "precision": precision}
    first, *others = [
        jax.device_get(value_and_gradients(Run(op, "ffi"), *arrays, **options)) for _ in range(3)
    ]
    for other in others:
        for name, x in first.items():
            assert x.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("op", SEQUENCES)
def test_more_heads_than_a_grid_axis_holds(op: str) -> None:
    """65,535 is the limit of the second and third axis."""
    inputs, _ = operands(op, Case(1, 1, 70_000, 16))
    found = results(Run(op, "ffi"), **inputs, precision=None)
    assert_right(found, results(Run(op, "xla"), **inputs))


GRAPH = """
import jax, numpy as np, jax.numpy as jnp
import rwkv_jax

rng = np.random.default_rng(0)
operands = [jnp.asarray(rng.standard_normal((2, 130, 4, 64), np.float32) / 8) for _ in range(6)]
halves = [x.astype(jnp.bfloat16) for x in operands]
state = jnp.zeros((2, 4, 64, 64))

@jax.jit
def gradients(*operands):
    def loss(*xs):
        y, final_state = rwkv_jax.wkv7(*xs, decay="log", implementation="ffi")
        return jnp.sum(y * y).astype(jnp.float32) + jnp.sum(final_state)
    return jax.grad(loss, argnums=range(7))(*operands)

@jax.jit
def others(r, w, k, v, *_):
    def loss(r, w, k, v):
        u, flat = r[0, 0], lambda x: x.reshape(2, 130, -1)
        y6, s6 = rwkv_jax.wkv6(r, -jnp.abs(w), k, v, u, decay="log", implementation="ffi")
        y5, s5 = rwkv_jax.wkv5(r, -jnp.abs(w[0, 0]), k, v, u, decay="log", implementation="ffi")
        w4, u4 = -jnp.abs(w[0, 0].ravel()), u.ravel()
        y4, s4 = rwkv_jax.wkv4(w4, u4, flat(k), flat(v), decay="log", implementation="ffi")
        sums = [jnp.sum(x.astype(jnp.float32) ** 2) for x in (y6, s6, y5, s5, y4, *s4[:2])]
        return sum(sums)
    return jax.grad(loss, argnums=range(4))(r, w, k, v)

@jax.jit
def delta(q, w, k, v, *_):
    def loss(q, w, k, v):
        g, beta = -jnp.abs(w), jax.nn.sigmoid(w[..., 0])
        y1, s1 = rwkv_jax.gated_delta_rule(q, k, v, g[..., 0], beta, implementation="ffi")
        y2, s2 = rwkv_jax.kimi_delta_attention(q, k, v, g, beta, implementation="ffi")
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in (y1, s1, y2, s2))
    return jax.grad(loss, argnums=range(4))(q, w, k, v)

@jax.jit
def decode(state, *operands):
    for t in range(6):
        token = [x[:, t] for x in operands]
        y, state = rwkv_jax.wkv7_step(*token, state, decay="sigmoid", implementation="ffi")
    return y, state

results = []
for _ in range(4):  # captured, then replayed
    results.append(jax.device_get((
        gradients(*operands, state), gradients(*halves, state), decode(state, *operands),
        others(*operands), others(*halves), delta(*halves),
    )))
for other in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, results[0], other)
leaves = jax.tree.leaves(results[0])
print(repr([float(np.linalg.norm(x.astype(np.float64))) for x in leaves]))
"""


def _graph(flags: str) -> list[float]:
    run = subprocess.run(
        [sys.executable, "-c", GRAPH],
        env={**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [float(x) for x in run.stdout.strip().strip("[]").split(",")]


def test_cuda_graphs() -> None:
    """Captured in a graph from the first kernel on, and with graphs off: the same numbers."""
    captured = _graph("--xla_gpu_graph_min_graph_size=1")
    launched = _graph("--xla_gpu_enable_command_buffer=")
    assert captured == launched


TRACED = np.array([-3, 20, 18, 150, 150, 290, 7], np.int32)
"""Lengths that only the device knows, and that are wrong."""


@pytest.mark.parametrize("cu", [cases.CU_SEQLENS, TRACED], ids=["long", "wrong"])
@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("wkv7", Case(1, 300, 2, 64, dtype="bfloat16")),
        ("wkv7", Case(1, 300, 70, 64, dtype="float16", state=False)),
        ("wkv7", Case(1, 300, 1, 128, dtype="bfloat16")),
        ("wkv6", Case(1, 300, 2, 64, dtype="bfloat16", decay="exp")),
        ("wkv6", Case(1, 300, 1, 64, dtype="float16", decay="log", regime="mixed")),
        ("wkv5", Case(1, 300, 2, 64, dtype="bfloat16", decay="exp")),
        ("wkv6", Case(1, 300, 2, 128, dtype="bfloat16", decay="log", regime="mixed")),
        *((op, Case(1, 300, 2, 32, decay="exp")) for op in ("wkv7", "wkv6", "wkv5", "wkv4")),
        ("wkv7", Case(1, 300, 200, 16, decay="log", regime="mixed")),
        ("wkv7", Case(1, 300, 2, 64, dtype="bfloat16", decay="log", regime="mixed")),
        ("wkv6", Case(1, 300, 200, 128, decay="log")),
        ("wkv4", Case(1, 300, 1, 39, dtype="float16", decay="log", regime="mixed")),
        ("wkv4", Case(1, 300, 16, 64, dtype="bfloat16", decay="log", state=False)),
    ],
    ids=str,
)
def test_kernels_on_sequences(op: str, case: Case, cu: np.ndarray) -> None:
    """On matrix units and by token; more heads than the backward pass by token takes at a time."""
    _check_sequences(op, case, cu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wkv4_on_very_many_sequences(dtype: str) -> None:
    """A warp runs each sequence, but for the long ones."""
    lengths = np.random.default_rng(0).integers(0, 20, 1000)
    lengths[[0, 500]] = 1024, 1500
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    _check_sequences("wkv4", Case(1, int(cu[-1]), 1, 257, dtype=dtype, decay="log"), cu)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_wkv4_on_very_many_rows(dtype: str, tokens: int) -> None:
    case = Case(2000, tokens, 1, 66, dtype=dtype, decay="exp")
    check(Run("wkv4", "ffi"), case, precision=None)


def _check_sequences(op: str, case: Case, cu: np.ndarray) -> None:
    run, options = Run(op, "ffi"), {"decay": case.decay, "cu_seqlens": cu}
    inputs, cotangents = operands(op, case, cu_seqlens=cu)
    found = value_and_gradients(run, inputs, cotangents, precision="default", **options)
    exact = case.dtype == "float32"
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=exact, highest=exact) for n in found}
    assert_right(found, expected(op, inputs, cotangents, **options), limits)


WHY_NOT_HOPPER = internals.gpus.why_not_hopper()
HOPPER = pytest.mark.skipif(WHY_NOT_HOPPER is not None, reason=str(WHY_NOT_HOPPER))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *itertools.product([1, 3, 8, 20], cases.DTYPES),
        *(pytest.param(rows, "bfloat16", marks=HOPPER) for rows in (33, 130)),
    ],
)
def test_whole_blocks(rows: int, dtype: str) -> None:
    """In a loop, with a state that is changed in place."""
    params = models.with_heads_of_64(1024, dtype)
    tokens = np.random.default_rng(rows).integers(0, 11, (rows, 3), np.int32)

    def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
        logits, state = rwkv7.apply(params, token, state, dtype=dtype, kernels="fused")
        return state, logits

    loop = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    with jax.default_matmul_precision("highest"):
        _, found = loop(rwkv7.initial_state(params, rows, dtype), tokens.T)
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(params).items()}
    right = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens], axis=1)
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    assert tolerance.rms_error(np.asarray(found), right) < limit


@HOPPER
@pytest.mark.parametrize("rows", [2, 9, 17, 33])
def test_rows_in_tiles_have_the_same_bits(rows: int) -> None:
    """Whatever the tile is, and however many rows there are, up to 64."""
    params = models.with_heads_of_64(1024, "bfloat16")
    tokens = np.random.default_rng(0).integers(0, 11, 64, np.int32)

    def step(rows: int) -> tuple[jax.Array, Any]:
        state = rwkv7.initial_state(params, rows, "bfloat16")
        call = functools.partial(rwkv7.apply, dtype="bfloat16", kernels="fused")
        return jax.jit(call)(params, tokens[:rows], state)

    # The head is not among the kernels.
    found, of_all = step(rows)[1], step(64)[1]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[:rows]), found, of_all)


def _poison(*shapes: tuple[int, ...]) -> None:
    """Memory has NaN when it is taken again."""
    jax.block_until_ready([jnp.full(shape, np.nan, "bfloat16") for shape in shapes])


def _check_products(
    call: Callable[[Any, str], Any], given: tuple[Any, Any], targets: set[str], sizes: list[int]
) -> None:
    """Outputs and gradients of a layer function, in memory that had NaN before, are close to those
    in float32. It has arrays of the tokens with so many channels."""

    @functools.partial(jax.jit, static_argnums=2)
    def run(inputs: Any, dy: Any, implementation: str) -> Any:
        y, vjp = jax.vjp(lambda x: call(x, implementation), inputs)
        return y, vjp(dy)

    compiled = run.lower(*given, "ffi").compile()
    assert targets <= hlo.targets(compiled.as_text())
    wide = jax.tree.map(lambda x: x.astype("float32"), given)
    with jax.default_matmul_precision("highest"):
        right = jax.device_get(run(*wide, "xla"))
    rows, tokens, _ = jax.tree.leaves(given[1])[0].shape
    _poison(*((rows * tokens, n) for n in sizes for _ in range(8)))
    found = jax.device_get(compiled(*given))
    for either in (found, jax.device_get(run(*given, "xla"))):
        tolerance.assert_trees_close(either, right, tolerance.PRODUCTS["bfloat16"])


def _arrays(name: str, rows: int, tokens: int, width: int, **more: Any) -> tuple[Any, Any]:
    """Inputs and the cotangent."""
    case = layer_functions.Case(rows, tokens, 1, width, "bfloat16", **more)
    inputs, cotangents = layer_functions.operands(name, case)
    return inputs, cotangents["dy"]


@HOPPER
@pytest.mark.parametrize(
    ("rows", "tokens", "width", "hidden"),
    [(1, 1, 512, 256), (3, 37, 576, 768), (1, 1001, 1024, 512), (5, 1639, 768, 3072)],
)
def test_products_with_an_epilogue(rows: int, tokens: int, width: int, hidden: int) -> None:
    def call(inputs: Any, implementation: str) -> jax.Array:
        return layers.feed_forward(**inputs, implementation=implementation)

    arrays = _arrays("feed_forward", rows, tokens, width, others={"F": hidden})
    _check_products(call, arrays, {*internals.feed_forward.TARGETS.values()}, [hidden])


@HOPPER
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "l2_wrap", "chunk_size"),
    [
        (1024, 64, 256, 0.0, None),
        (1500, 128, 1024, 0.03, None),
        (4097, 576, 2048, 0.0, 2049),
        (2300, 768, 16384, 1e-3, None),
    ],
)
def test_loss_of_a_head(
    tokens: int, width: int, vocabulary: int, l2_wrap: float, chunk_size: int | None
) -> None:
    """The loss and its gradients, in memory that had NaN before, are close to the definition in
    float64: also for tokens that do not count, for tokens that are sure of their target, and for
    tokens so far from it that the exponentials leave their range."""
    rng = np.random.default_rng(tokens)
    hidden_states = rng.standard_normal((tokens, width))
    weight = rng.standard_normal((vocabulary, width)) * 2 * width**-0.5
    targets = rng.integers(0, vocabulary, tokens, np.int32)
    mask = rng.random(tokens) < 0.8
    sure, far, outside = np.arange(40, 90), np.array([3, 700, tokens - 1]), 5
    hidden_states[sure] = 4 * weight[targets[sure]]
    hidden_states[far] = -40 * weight[targets[far]]
    mask[sure] = mask[far] = True
    x, w = hidden_states.astype("bfloat16"), weight.astype("bfloat16").astype("float32")

    @jax.jit
    def run(x: jax.Array, w: jax.Array, targets: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return cross_entropy(x, w, targets, mask=mask, l2_wrap=l2_wrap, chunk_size=chunk_size)

        return jax.value_and_grad(loss, (0, 1))(x, w)

    right_targets = targets.copy()
    targets[outside], mask[outside] = -100, False
    compiled = run.lower(x, w, targets).compile()
    assert internals.of_losses.OF_HIDDEN_STATES in hlo.targets(compiled.as_text())
    _poison((tokens, vocabulary))
    value, (dx, dw) = jax.device_get(compiled(x, w, targets))

    x64, w64, scale = x.astype(np.float64), w.astype(np.float64), mask / mask.sum()
    z, every = x64 @ w64.T, np.arange(tokens)
    of_others = np.exp(z - z[every, right_targets][:, None])
    of_others[every, right_targets] = 0.0
    losses = np.log1p(of_others.sum(1))
    dz = of_others * np.exp(-losses)[:, None]
    dz[every, right_targets] = -dz.sum(1)
    dz[every, z.argmax(1)] += l2_wrap * z.max(1)
    dz *= scale[:, None]
    np.testing.assert_allclose(value, (losses * scale).sum(), rtol=2e-5)
    # Each kind of tokens by itself: the far ones have the largest gradients.
    for kind in (sure, far, np.setdiff1d(every, far)):
        tolerance.assert_close({"dx": dx[kind]}, {"dx": dz[kind] @ w64}, 5e-3)
    tolerance.assert_close({"dw": dw}, {"dw": dz.T @ x64}, 5e-3)
    again = jax.device_get(compiled(x, w, targets))
    np.testing.assert_array_equal(again[1][1], dw)


@HOPPER
@pytest.mark.parametrize(
    ("rows", "tokens", "width", "rank", "activation", "offset"),
    [
        (1, 1, 128, 8, "tanh", True),
        (3, 37, 384, 40, "sigmoid", False),
        (1, 1001, 768, 64, "identity", True),
        (1, 1001, 768, 96, "tanh", True),
        (2, 4099, 2048, 128, "tanh", True),
        (5, 163, 2560, 160, "identity", False),
        (7, 111, 4096, 200, "sigmoid", True),
        (3, 6000, 1024, 224, "sigmoid", False),
        (1, 40001, 768, 256, "tanh", True),
    ],
)
def test_low_rank(
    rows: int, tokens: int, width: int, rank: int, activation: str, offset: bool
) -> None:
    def call(inputs: Any, implementation: str) -> jax.Array:
        return layers.low_rank(**inputs, activation=activation, implementation=implementation)

    without = () if offset else ("offset",)
    arrays = _arrays("low_rank", rows, tokens, width, others={"R": rank}, without=without)
    targets = {internals.low_rank.TARGETS[activation, name] for name in ("forward", "backward")}
    _check_products(call, arrays, targets, [width, rank, rank + 8])


@HOPPER
@pytest.mark.parametrize(
    ("rows", "tokens", "width", "maps"),
    [
        (1, 1, 64, [(64, "tanh", True)]),
        (3, 37, 384, [(40, "sigmoid", False), (264, "tanh", True)]),
        (1, 64, 72, [(24, "identity", True), (64, "sigmoid", True), (72, "tanh", False)]),
        (2, 555, 2048, [(96, "tanh", True), (96, "identity", False), (256, "sigmoid", False)]),
        (1, 2048, 4096, [(160, "tanh", True), (320, "sigmoid", False), (96, "identity", True)]),
        (5, 163, 128, [(8 * i, "tanh", i % 2 == 0) for i in range(1, 8)]),
    ],
)
def test_low_rank_maps(
    rows: int, tokens: int, width: int, maps: list[tuple[int, str, bool]]
) -> None:
    def call(inputs: Any, implementation: str) -> tuple[jax.Array, ...]:
        each = [
            layers.LowRankMap(**one, activation=activation)
            for one, (_, activation, _) in zip(inputs, maps, strict=True)
        ]
        return layers.low_rank_maps(each, implementation=implementation)

    inputs, dys = [], []
    for seed, (rank, _, offset) in enumerate(maps):
        without = () if offset else ("offset",)
        own, dy = _arrays(
            *("low_rank", rows, tokens, width), others={"R": rank}, without=without, seed=seed
        )
        inputs.append(own)
        dys.append(dy)
    ranks = [rank for rank, *_ in maps]
    _check_products(call, (inputs, tuple(dys)), {internals.low_rank_maps.TARGET}, [*ranks, width])


def _repeat(width: int, device: Any, seconds: float) -> Any:
    """Run kernels whose shared memory depends on the width, over and over: a layer function and its
    gradient, and the step of a model by fused blocks. The results, always the same."""
    case = layer_functions.Case(2, 70, 1, width, dtype="bfloat16", origin=True)
    params = models.with_heads_of_64(width, "bfloat16")
    arrays = layer_functions.operands("norm_shift_mix", case)
    step = jax.jit(functools.partial(rwkv7.apply, dtype="bfloat16", kernels="fused"))
    end, first = time.monotonic() + seconds, None
    with jax.default_device(device):
        arrays, params = jax.device_put((arrays, params), device)
        state = rwkv7.initial_state(params, 1, "bfloat16")
        while first is None or time.monotonic() < end:
            found = layer_functions.value_and_gradients("norm_shift_mix", "ffi", *arrays)
            found = jax.device_get((found, step(params, jnp.zeros(1, jnp.int32), state)))
            first = found if first is None else first
            jax.tree.map(np.testing.assert_array_equal, found, first)
    return first


def _at_once(*calls: tuple[int, Any, float]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return [x.result() for x in [threads.submit(_repeat, *call) for call in calls]]


def test_threads_with_models_of_two_widths() -> None:
    gpu = jax.devices("gpu")[0]
    _at_once((256, gpu, 20), (1024, gpu, 20))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus_with_models_of_two_widths() -> None:
    one, other = jax.devices("gpu")[:2]
    expected = [_repeat(256, one, 0), _repeat(1024, one, 0)]
    for gpus in ((one, other), (other, one)):
        found = _at_once((256, gpus[0], 5), (1024, gpus[1], 5))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
