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
import rwkv_jax
import tolerance
from cases import Case
from operators import OPERATORS, value_and_gradients

OPTIONS = (("decay", "sigmoid"), ("implementation", "ffi"), ("precision", "highest"))


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
        {n: tolerance.ceiling(n, "ffi", dtype, highest=True) for n in results},
    )


def test_the_kernels_run_on_the_gpu() -> None:
    inputs, cotangents = cases.wkv7(Case(2, 65, 2, 64))
    compiled = value_and_gradients.lower("wkv7", OPTIONS, inputs, cotangents).compile()
    assert hlo.targets(compiled.as_text()) == {"rwkv_wkv7_fwd_v1", "rwkv_wkv7_bwd_v1"}
    results = compiled(inputs, cotangents)
    assert {d.platform for x in results.values() for d in x.devices()} == {"gpu"}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_three_runs_on_a_full_gpu_are_bitwise_equal(dtype: str, size: int) -> None:
    inputs, cotangents = jax.device_put(cases.wkv7(Case(8, 300, 32, size, dtype=dtype)))
    first, *others = [
        jax.device_get(value_and_gradients("wkv7", OPTIONS, inputs, cotangents)) for _ in range(3)
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
state = jnp.zeros((2, 4, 64, 64))

@jax.jit
def gradients(*operands):
    def loss(*xs):
        y, final_state = rwkv_jax.wkv7(*xs, decay="sigmoid", implementation="ffi")
        return jnp.sum(y * y) + jnp.sum(final_state)
    return jax.grad(loss, argnums=range(7))(*operands)

@jax.jit
def decode(state, *operands):
    for t in range(6):
        token = [x[:, t] for x in operands]
        y, state = rwkv_jax.wkv7_step(*token, state, decay="sigmoid", implementation="ffi")
    return y, state

results = []
for _ in range(4):  # captured, then replayed
    results.append(jax.device_get((gradients(*operands, state), decode(state, *operands))))
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
