"""Segments of a sequence as maps of the state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import oracle
import rwkv_jax
import tolerance
from cases import Case
from operators import available
from rwkv_jax.wkv7 import segments

CASE = Case(2, 48, 2, 32)
CUTS = [0, 7, 24, 41, 48]

each_implementation = pytest.mark.parametrize("implementation", available("wkv7", CASE))


def _parts(implementation: str, inputs: dict) -> segments.Segment:
    """The summaries of all parts, stacked."""
    parts = [
        segments.summarize(
            *(inputs[name][:, i:j] for name in "wkvab"),
            decay="sigmoid",
            precision="highest",
            implementation=implementation,
        )
        for i, j in itertools.pairwise(CUTS)
    ]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *parts)


@each_implementation
def test_the_states_between_parts(implementation: str) -> None:
    inputs, _ = cases.wkv7(CASE)
    upto = jax.lax.associative_scan(segments.combine, _parts(implementation, inputs))
    states = segments.apply(upto, inputs["initial_state"])
    zeros = {"dy": np.zeros_like(inputs["v"]), "dfinal_state": np.zeros_like(states[0])}
    for cut, state in zip(CUTS[1:], states, strict=True):
        part = {n: x if n == "initial_state" else x[:, :cut] for n, x in inputs.items()}
        cotangents = zeros | {"dy": zeros["dy"][:, :cut]}
        expected = oracle.wkv7(part, CASE.decay, cotangents)["final_state"]
        tolerance.assert_close(
            {"state": np.asarray(state)}, {"state": expected}, tolerance.EXACT_FLOAT32
        )


@each_implementation
def test_gradients_pass_through_the_summaries(implementation: str) -> None:
    inputs, cotangents = cases.wkv7(CASE)

    def by_parts(inputs: dict) -> jax.Array:
        parts = _parts(implementation, inputs)
        state = inputs["initial_state"]
        for i in range(len(CUTS) - 1):
            state = segments.apply(jax.tree.map(lambda x, i=i: x[i], parts), state)
        return jnp.sum(state * cotangents["dfinal_state"])

    def at_once(inputs: dict) -> jax.Array:
        _, state = rwkv_jax.wkv7(
            **inputs, decay="sigmoid", precision="highest", implementation="reference"
        )
        return jnp.sum(state * cotangents["dfinal_state"])

    tolerance.assert_close(
        jax.device_get(jax.grad(by_parts)(inputs)),
        jax.device_get(jax.grad(at_once)(inputs)),
        tolerance.EXACT_FLOAT32,
    )
