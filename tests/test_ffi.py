"""The native kernels of the default platform, called by themselves."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cases
import rwkv_jax
from cases import Case
from rwkv_jax import _ffi
from rwkv_jax._chunked import states_dtype
from rwkv_jax._dispatch import Options
from rwkv_jax.wkv7 import ffi

PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
CASE = Case(2, 65, 2, 32)


OPTIONS = Options("sigmoid", lax.Precision.DEFAULT, "ffi", save=True)


def _call(stage: str, case: Case) -> tuple[Callable[..., tuple[jax.Array, ...]], dict]:
    """A stage of the native implementation, and operands for it by name."""
    rng = np.random.default_rng(0)
    inputs, cotangents = cases.wkv7(case)
    if stage == "step":
        operands, _ = cases.wkv7_step(case)
    elif stage == "forward":
        operands = inputs
    else:
        states = rng.standard_normal(
            (case.B, -(-case.T // 64), case.H, case.values, case.K), np.float32
        )
        operands = {n: x for n, x in inputs.items() if n != "initial_state"}
        dtype = states_dtype(OPTIONS, operands["r"].dtype)
        operands |= {"states": states.astype(dtype)} | cotangents

    def call(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return getattr(ffi, stage)(OPTIONS, PLATFORM, *operands)

    return call, {name: jnp.asarray(x) for name, x in operands.items()}


SPOILED = {
    "rank": lambda x: x[0],
    "shape": lambda x: jnp.concatenate([x, x], axis=-1),
    "batch": lambda x: jnp.concatenate([x, x], axis=0),
    "dtype": lambda x: x.astype(jnp.int32),
    "float": lambda x: x.astype(jnp.float16),
}
OPERANDS = {
    "forward": ("r", "w", "k", "v", "a", "b", "initial_state"),
    "backward": ("r", "w", "k", "v", "a", "b", "states", "dy", "dfinal_state"),
    "step": ("r", "w", "k", "v", "a", "b", "state"),
}
OPS = {"forward": "wkv7", "backward": "wkv7 backward", "step": "wkv7_step"}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("wrong", SPOILED)
@pytest.mark.parametrize(
    ("stage", "name"), [(s, n) for s, names in OPERANDS.items() for n in names]
)
def test_wrong_operands(stage: str, name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself is spoiled, behind all checks of the package."""
    call, operands = _call(stage, CASE)
    position, through = list(operands).index(name), _ffi.call

    def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        spoiled = list(operands)
        spoiled[position] = SPOILED[wrong](spoiled[position])
        # An alias has to match the operand that it replaces, which is no longer so.
        return through(
            target, results, *spoiled, **{n: x for n, x in rest.items() if n != "aliases"}
        )

    monkeypatch.setattr(_ffi, "call", spoil)
    # The first operand that has an axis sets its size, and r the dtype: a later one is then odd.
    expected = rf"INVALID_ARGUMENT: {OPS[stage]}: .*\b{name}\b (has|is)\b"
    with pytest.raises(jax.errors.JaxRuntimeError, match=expected):
        jax.block_until_ready(call(*operands.values()))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("stage", OPERANDS)
def test_wrong_results_attributes_and_numbers(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, operands = _call(stage, CASE)
    through = _ffi.call

    def error(change: Callable[[list, list, dict], None]) -> str:
        def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
            results, given = list(results), list(operands)
            rest.pop("aliases", None)
            change(results, given, rest)
            # Waited for here, before the caller meets a wrong number of results.
            return jax.block_until_ready(through(target, results, *given, **rest))

        monkeypatch.setattr(_ffi, "call", spoil)
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as raised:
            call(*operands.values())
        return str(raised.value)

    assert "decay is 7" in error(lambda results, given, rest: rest.update(decay=7))
    assert "decay is -1" in error(lambda results, given, rest: rest.update(decay=-1))
    assert "attributes" in error(lambda results, given, rest: rest.pop("decay"))
    assert "attributes" in error(lambda results, given, rest: rest.update(unknown=1))
    missing = error(lambda results, given, rest: given.pop())
    assert OPERANDS[stage][-1] in missing or "operands given" in missing
    assert "operands given" in error(lambda results, given, rest: given.append(given[0]))
    error(lambda results, given, rest: results.pop())
    error(lambda results, given, rest: results.append(results[0]))

    def wrong_state(results: list, given: list, rest: dict) -> None:
        shape, _ = results[-1]
        results[-1] = (shape, jnp.bfloat16)

    error(wrong_state)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("saved", [1, 3])
def test_wrong_number_of_states(saved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    through = _ffi.call

    def spoil(target: str, results: Any, *operands: jax.Array, **rest: Any) -> Any:
        if target == ffi.FORWARD:
            shape, dtype = results[2]
            results = [*results[:2], ((shape[0], saved, *shape[2:]), dtype)]
        else:
            given = list(operands)
            given[6] = jnp.zeros((given[6].shape[0], saved, *given[6].shape[2:]))
            operands = tuple(given)
        return jax.block_until_ready(through(target, results, *operands, **rest))

    for stage in ("forward", "backward"):
        call, operands = _call(stage, CASE)
        monkeypatch.setattr(_ffi, "call", spoil)
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"states has N = {saved}; expected"):
            call(*operands.values())
        monkeypatch.undo()


@pytest.mark.parametrize("size", [8, 24, 48, 512])
def test_a_head_size_that_it_lacks(size: int) -> None:
    call, operands = _call("forward", Case(1, 2, 1, size))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*K = {size}"):
        jax.block_until_ready(call(*operands.values()))


POISONED = (
    Case(1, 0, 2, 64),
    Case(2, 1, 2, 32),
    Case(2, 65, 2, 32, dtype="bfloat16"),
    Case(1, 128, 3, 64),
    Case(1, 63, 1, 16, dtype="float16"),
)


@pytest.mark.parametrize("case", POISONED, ids=str)
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_outputs_are_written_whole(stage: str, case: Case) -> None:
    """Every output goes to a donated buffer full of NaN: what is not written stays NaN."""
    call, operands = _call(stage, case)
    given = tuple(operands.values())
    types = jax.eval_shape(call, *given)
    poison = tuple(jnp.full(x.shape, jnp.nan, x.dtype) for x in types)
    pointers = {x.unsafe_buffer_pointer() for x in poison if x.size}

    def poisoned(poison: tuple, *given: jax.Array) -> tuple[jax.Array, ...]:
        return call(*given)

    outputs = jax.jit(poisoned, donate_argnums=0, keep_unused=True)(poison, *given)
    assert {x.unsafe_buffer_pointer() for x in outputs if x.size} == pointers
    for x in outputs:
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize(
    "case", [Case(2, 65, 4, 64), Case(1, 1000, 2, 64, dtype="bfloat16")], ids=str
)
def test_three_runs_are_bitwise_equal(case: Case) -> None:
    for stage in ("forward", "backward", "step"):
        call, operands = _call(stage, case)
        jitted = jax.jit(call)
        first, *others = [jax.device_get(jitted(*operands.values())) for _ in range(3)]
        for other in others:
            for x, y in zip(first, other, strict=True):
                assert x.tobytes() == y.tobytes()


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
            for result, right in zip(results, expected, strict=True):
                for name in right:
                    np.testing.assert_array_equal(result[name], right[name])
