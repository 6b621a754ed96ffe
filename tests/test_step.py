"""`wkv7_step` as a decoder uses it; its values and gradients are rows of test_ops.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import rwkv_jax
import tolerance
from cases import Case
from operators import available, sequential

TOKENS = 20
INPUTS = ("r", "w", "k", "v", "a", "b")

each_implementation = pytest.mark.parametrize(
    "implementation", available("wkv7_step", Case(1, 1, 1, 64))
)


@each_implementation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_the_sequence(implementation: str, dtype: str) -> None:
    inputs, _ = cases.wkv7(Case(2, TOKENS, 2, 64, dtype=dtype))
    state = inputs.pop("initial_state")

    @jax.jit
    def decode(inputs: dict, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(state: jax.Array, token: dict) -> tuple[jax.Array, jax.Array]:
            y, state = rwkv_jax.wkv7_step(
                **token, state=state, decay="sigmoid", implementation=implementation
            )
            return state, y

        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in inputs.items()}
        state, y = jax.lax.scan(body, state, tokens)
        return jnp.moveaxis(y, 0, 1), state

    y, final_state = decode(inputs, state)
    expected = rwkv_jax.wkv7(
        **inputs, initial_state=state, decay="sigmoid", implementation="reference"
    )
    ceiling = tolerance.EXACT_FLOAT32 if dtype == "float32" else tolerance.SEQUENTIAL
    tolerance.assert_close(
        {"y": np.asarray(y), "final_state": np.asarray(final_state)},
        {"y": np.asarray(expected[0]), "final_state": np.asarray(expected[1])},
        ceiling,
    )


@each_implementation
def test_split_sequence_is_the_whole_one(implementation: str) -> None:
    inputs, _ = cases.wkv7(Case(1, 33, 2, 64))
    state = inputs.pop("initial_state")

    def run(part: slice, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens = {name: x[:, part] for name, x in inputs.items()}
        return rwkv_jax.wkv7(
            **tokens, initial_state=state, decay="sigmoid", implementation=implementation
        )

    first, middle = run(slice(0, 32), state)
    token = {name: x[:, 32] for name, x in inputs.items()}
    last, end = rwkv_jax.wkv7_step(
        **token, state=middle, decay="sigmoid", implementation=implementation
    )
    whole, final_state = run(slice(0, 33), state)
    highest = implementation != "xla" or jax.default_backend() == "cpu"
    kind = sequential("wkv7", implementation, inputs)
    ceiling = tolerance.ceiling("y", "float32", sequential=kind, highest=highest)
    tolerance.assert_close(
        {"y": np.concatenate([first, last[:, None]], axis=1), "state": np.asarray(end)},
        {"y": np.asarray(whole), "state": np.asarray(final_state)},
        ceiling,
    )


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_donated_state_is_updated_in_place(tokens: int) -> None:
    inputs, _ = cases.wkv7_step(Case(2, 1, 2, 64))
    state = jnp.array(inputs.pop("state"))

    def decode(inputs: dict, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, state = rwkv_jax.wkv7_step(**inputs, state=state)
        for _ in range(tokens - 1):
            y, state = rwkv_jax.wkv7_step(**inputs, state=state)
        return y, state

    expected = jax.jit(decode)(inputs, state)[1]
    step = jax.jit(decode, donate_argnames="state").lower(inputs, state).compile()
    text = step.as_text() or ""
    assert "input_output_alias={ {1}: (6, {}, may-alias) }" in text
    if "ffi" in available("wkv7_step", Case(2, 1, 2, 64)):
        copies = [line for line in text.splitlines() if " copy(" in line]
        assert not [line for line in copies if "f32[2,2,64,64]" in line]

    pointer = state.unsafe_buffer_pointer()
    _, after = step(inputs, state)
    assert state.is_deleted()
    assert after.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(after, expected)


@each_implementation
def test_a_state_that_is_not_donated_stays(implementation: str) -> None:
    inputs, _ = cases.wkv7_step(Case(2, 1, 2, 64))
    state = jnp.array(inputs.pop("state"))
    before = np.array(state)
    _, after = rwkv_jax.wkv7_step(**inputs, state=state, implementation=implementation)
    np.testing.assert_array_equal(state, before)
    assert not np.array_equal(after, before)
