import numpy as np
import pytest

from support import oracle
from support.cases import Case
from support.operators import SEQUENCES

pytestmark = pytest.mark.quick("op")


@pytest.mark.parametrize(
    ("op", "decay", "name"),
    [
        (op, decay, name)
        for op, operator in SEQUENCES.items()
        for decay in operator.decays
        for name in operator.names
    ],
)
def test_backward_is_the_derivative_of_forward(op: str, decay: str, name: str) -> None:
    inputs, cotangents = SEQUENCES[op].make(Case(2, 5, 2, 3, V=4))
    inputs = {n: x.astype(np.float64) for n, x in inputs.items()}
    if decay == "log":
        inputs["w"] = -np.abs(inputs["w"])
    gradient = SEQUENCES[op].oracle(inputs, decay, cotangents)[f"d{name}"]

    def objective(x: np.ndarray) -> float:
        results = SEQUENCES[op].oracle(inputs | {name: x}, decay)
        return sum(float(np.sum(y * cotangents[f"d{n}"])) for n, y in results.items())

    numeric, step = np.zeros_like(gradient), 1e-5
    for index in np.ndindex(gradient.shape):
        change = np.zeros_like(gradient)
        change[index] = step
        ends = objective(inputs[name] + change), objective(inputs[name] - change)
        numeric[index] = (ends[0] - ends[1]) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5"])
def test_one_token_by_hand(op: str) -> None:
    one = np.ones((1, 1, 1, 1))
    inputs = {"r": 2 * one, "k": 3 * one, "v": 5 * one, "initial_state": 8 * one}
    inputs["w"] = np.log(0.5) * (one[0, 0] if op == "wkv5" else one)
    if op == "wkv7":
        inputs |= {"a": -one, "b": 0.25 * one}
        state = 8 * 0.5 + (8 * -1) * 0.25 + 5 * 3
        y = 2 * state
    else:
        inputs["u"] = 0.25 * one[0, 0]
        state, y = 8 * 0.5 + 5 * 3, (8 + 5 * 0.25 * 3) * 2
    results = SEQUENCES[op].oracle(inputs, "log")
    np.testing.assert_allclose(results["final_state"], state)
    np.testing.assert_allclose(results["y"], y)


@pytest.mark.parametrize(
    ("form", "w", "factor", "slope"),
    [
        ("log", -1e30, 0.0, 0.0),
        ("log", 0.0, 1.0, 1.0),
        ("exp", 1e30, 0.0, 0.0),
        ("exp", -1e30, 1.0, 0.0),
        ("exp", 0.0, np.exp(-1), -np.exp(-1)),
        ("sigmoid", 1e30, np.exp(-np.exp(-0.5)), 0.0),
        ("sigmoid", -1e30, 1.0, 0.0),
        ("sigmoid", 0.0, np.exp(-np.exp(-0.5) / 2), -np.exp(-0.5) / 4 * np.exp(-np.exp(-0.5) / 2)),
    ],
)
def test_decay_forms(form: str, w: float, factor: float, slope: float) -> None:
    np.testing.assert_allclose(oracle.decay(form, np.array(w)), (factor, slope), rtol=1e-14)
