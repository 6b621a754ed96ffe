"""What only a CUDA device can show. All other test files run there as well, on the CUDA kernels."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import hlo
import oracle
import rwkv_jax
import tolerance
from cases import Case
from operators import OPERATORS, value_and_gradients
from rwkv_jax.wkv7 import ffi

OPTIONS = (("decay", "sigmoid"), ("implementation", "ffi"), ("precision", "highest"))
ON_MATRIX_UNITS = (*OPTIONS[:2], ("precision", None))
MATRIX_TARGETS = {"rwkv_wkv7_chunk_fwd_v1", "rwkv_wkv7_chunk_bwd_v1"}


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_dtype_and_head_size(name: str, dtype: str, size: int) -> None:
    case = Case(3, 1 if name == "wkv7_step" else 150, 3, size, dtype=dtype)
    operator = OPERATORS[name]
    inputs, cotangents = operator.make(case)
    results = value_and_gradients(name, OPTIONS, inputs, cotangents)
    tolerance.assert_close(
        jax.device_get(results),
        operator.oracle(inputs, case.decay, cotangents),
        {n: tolerance.ceiling(n, dtype, sequential=True, highest=True) for n in results},
    )


def test_the_kernels_run_on_the_gpu() -> None:
    inputs, cotangents = cases.wkv7(Case(2, 65, 2, 64))
    compiled = value_and_gradients.lower("wkv7", OPTIONS, inputs, cotangents).compile()
    assert hlo.targets(compiled.as_text()) == {"rwkv_wkv7_fwd_v1", "rwkv_wkv7_bwd_v1"}
    results = compiled(inputs, cotangents)
    assert {d.platform for x in results.values() for d in x.devices()} == {"gpu"}


def _assert_close_to_the_oracle(case: Case) -> None:
    inputs, cotangents = cases.wkv7(case)
    options = (("decay", case.decay), *ON_MATRIX_UNITS[1:])
    results = jax.device_get(value_and_gradients("wkv7", options, inputs, cotangents))
    tolerance.assert_close(
        results,
        oracle.wkv7(inputs, case.decay, cotangents),
        {n: tolerance.ceiling(n, case.dtype, sequential=False, highest=False) for n in results},
    )


@pytest.mark.parametrize("tokens", [16, 17, 63, 64, 65, 150, 1000])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrix_units(dtype: str, size: int, tokens: int) -> None:
    _assert_close_to_the_oracle(Case(2, tokens, 3, size, dtype=dtype))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("decay", ["log", "exp", "sigmoid"])
@pytest.mark.parametrize("regime", ["model", "near 0", "near 1", "mixed", "extreme"])
def test_matrix_units_with_any_decay(regime: str, decay: str, dtype: str, size: int) -> None:
    """Frames that decay too far are left to the other kernels, by the head."""
    _assert_close_to_the_oracle(Case(1, 130, 3, size, dtype=dtype, decay=decay, regime=regime))


def test_one_head_that_decays_too_far_changes_no_other() -> None:
    case = Case(2, 100, 3, 64, dtype="bfloat16", decay="log")
    inputs, cotangents = cases.wkv7(case)
    options = (("decay", "log"), *ON_MATRIX_UNITS[1:])
    before = value_and_gradients("wkv7", options, inputs, cotangents)
    inputs["w"] = inputs["w"].copy()
    inputs["w"][1, 70:, 2] = -50
    after = jax.device_get(value_and_gradients("wkv7", options, inputs, cotangents))
    expected = oracle.wkv7(inputs, "log", cotangents)
    for name, x in jax.device_get(before).items():
        axis = 1 if "state" in name else 2
        others = np.ones((2, 3), bool)
        others[1, 2] = False
        np.testing.assert_array_equal(
            np.moveaxis(x, axis, 1)[others], np.moveaxis(after[name], axis, 1)[others]
        )
        changed = [np.moveaxis(y[name], axis, 1)[~others] for y in (after, expected)]
        tolerance.assert_close({name: changed[0]}, {name: changed[1]}, tolerance.SEQUENTIAL)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("tokens", "segments"), [(64, 1), (129, 2), (500, 3), (1000, 7), (130, 9)])
def test_segments(tokens: int, segments: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More segments than frames among them: some are empty."""
    monkeypatch.setattr(ffi, "_scan_segments", lambda *_: segments)
    jax.clear_caches()
    for decay in ("sigmoid", "exp"):
        _assert_close_to_the_oracle(Case(1, tokens, 2, size, dtype="bfloat16", decay=decay))
    jax.clear_caches()


def test_a_long_sequence_stays_accurate() -> None:
    """Against the exact kernels, which agree with the oracle on shorter ones."""
    inputs, cotangents = jax.device_put(cases.wkv7(Case(1, 32768, 2, 64, dtype="bfloat16")))
    results, exact = (
        jax.device_get(value_and_gradients("wkv7", options, inputs, cotangents))
        for options in (ON_MATRIX_UNITS, OPTIONS)
    )
    limits = {n: tolerance.CHUNKED["gradient" if n[0] == "d" else "output"] for n in results}
    tolerance.assert_close(results, exact, limits)


def test_matrix_units_run_and_save_nothing_without_a_gradient() -> None:
    inputs, cotangents = cases.wkv7(Case(2, 65, 2, 64, dtype="bfloat16"))
    lowered = value_and_gradients.lower("wkv7", ON_MATRIX_UNITS, inputs, cotangents)
    assert hlo.targets(lowered.compile().as_text()) == MATRIX_TARGETS
    forward = jax.jit(lambda xs: rwkv_jax.wkv7(**xs, decay="sigmoid")).lower(inputs).compile()
    assert hlo.targets(forward.as_text()) == {"rwkv_wkv7_chunk_fwd_v1"}
    assert "bf16[2,0,2,64,64]" in (forward.as_text() or "")
    assert "bf16[2,2,2,64,64]" in (lowered.compile().as_text() or "")

    details = rwkv_jax.implementations("wkv7", *inputs.values(), details=True)
    assert details["ffi"] == "CUDA kernels on matrix units, bfloat16 with float32 sums"
    exact = rwkv_jax.implementations("wkv7", *inputs.values(), precision="highest", details=True)
    assert exact["ffi"] == "CUDA kernels, one token at a time in float32"


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize(
    ("batch", "options"), [(8, OPTIONS), (8, ON_MATRIX_UNITS), (1, ON_MATRIX_UNITS)]
)
def test_three_runs_on_a_full_gpu_are_bitwise_equal(
    batch: int, options: tuple, dtype: str, size: int
) -> None:
    inputs, cotangents = jax.device_put(cases.wkv7(Case(batch, 300, 32, size, dtype=dtype)))
    first, *others = [
        jax.device_get(value_and_gradients("wkv7", options, inputs, cotangents)) for _ in range(3)
    ]
    for other in others:
        for name, x in first.items():
            assert x.tobytes() == other[name].tobytes(), name


def test_the_gpu_agrees_with_the_cpu() -> None:
    inputs, cotangents = cases.wkv7(Case(2, 200, 2, 64))
    on_gpu = value_and_gradients("wkv7", OPTIONS, inputs, cotangents)
    options = (*OPTIONS[:1], ("implementation", None), *OPTIONS[2:])
    on_cpu = value_and_gradients(
        "wkv7", options, *jax.device_put((inputs, cotangents), jax.devices("cpu")[0])
    )
    tolerance.assert_close(jax.device_get(on_gpu), jax.device_get(on_cpu), tolerance.EXACT_FLOAT32)


def test_more_heads_than_a_grid_axis_holds() -> None:
    """65,535 is the limit of the second and third axis."""
    inputs, _ = cases.wkv7(Case(1, 1, 70_000, 16))
    y, state = rwkv_jax.wkv7(**inputs, decay="sigmoid", implementation="ffi")
    expected = rwkv_jax.wkv7(**inputs, decay="sigmoid", implementation="xla", precision="highest")
    tolerance.assert_close(
        {"y": np.asarray(y), "state": np.asarray(state)},
        {"y": np.asarray(expected[0]), "state": np.asarray(expected[1])},
        tolerance.EXACT_FLOAT32,
    )


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
def decode(state, *operands):
    for t in range(6):
        token = [x[:, t] for x in operands]
        y, state = rwkv_jax.wkv7_step(*token, state, decay="sigmoid", implementation="ffi")
    return y, state

results = []
for _ in range(4):  # captured, then replayed
    results.append(jax.device_get((
        gradients(*operands, state), gradients(*halves, state), decode(state, *operands)
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


def test_a_program_of_many_steps() -> None:
    """A scan of calls, each on the result of the last: launches are ordered by the stream alone."""
    inputs, _ = jax.device_put(cases.wkv7_step(Case(4, 1, 8, 64)))
    state = inputs.pop("state")

    def decode(implementation: str) -> jax.Array:
        def body(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            y, state = rwkv_jax.wkv7_step(
                **inputs, state=state, decay="sigmoid", implementation=implementation
            )
            return state, jnp.sum(y)

        return jax.jit(lambda s: jax.lax.scan(body, s, None, length=200)[0])(state)

    tolerance.assert_close(
        {"state": np.asarray(decode("ffi"))},
        {"state": np.asarray(decode("reference"))},
        tolerance.EXACT_FLOAT32,
    )
