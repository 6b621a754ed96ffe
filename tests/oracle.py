"""The operators in numpy float64, one token at a time, forwards and backwards by hand.

Written from the recurrence and independent of the package. `tests/test_oracle.py` checks the
backward pass against finite differences of the forward pass.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray
Arrays: TypeAlias = Mapping[str, Array]

RATE = np.exp(-0.5)


def _sigmoid(w: Array) -> Array:
    e = np.exp(-np.abs(w))
    return np.where(w >= 0, 1.0, e) / (1.0 + e)


def _log(w: Array) -> tuple[Array, Array]:
    return np.exp(w), np.exp(w)


def _exp(w: Array) -> tuple[Array, Array]:
    # The slope as one exponential: its two factors are infinity and 0 where w is large.
    return np.exp(-np.exp(w)), -np.exp(w - np.exp(w))


def _sigmoid_rate(w: Array) -> tuple[Array, Array]:
    d = np.exp(-RATE * _sigmoid(w))
    return d, -RATE * _sigmoid(w) * _sigmoid(-w) * d


DECAY: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "log": _log,
    "exp": _exp,
    "sigmoid": _sigmoid_rate,
}
"""The decay factor of each form, and its derivative."""


def decay(form: str, w: Array) -> tuple[Array, Array]:
    with np.errstate(over="ignore", under="ignore"):
        return DECAY[form](w)


def _matvec(matrix: Array, x: Array) -> Array:
    return (matrix @ x[..., None])[..., 0]


def _outer(x: Array, y: Array) -> Array:
    return x[..., :, None] * y[..., None, :]


def wkv7(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`y` and `final_state`; with the cotangents `dy` and `dfinal_state`, every gradient as well.

    The arrays have the operator's own layout: [B, T, H, K] and [B, H, V, K]. Without an
    `initial_state` the state starts as zeros. Gradients are named after their inputs: `dr`, `dw`.
    """
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    r, w, k, v, a, b = (inputs[name] for name in ("r", "w", "k", "v", "a", "b"))
    batch, tokens, heads, keys = r.shape
    d, slope = decay(form, w)

    states = np.zeros((tokens + 1, batch, heads, v.shape[-1], keys))
    states[0] = inputs.get("initial_state", 0.0)
    y = np.zeros(v.shape)
    for t in range(tokens):
        before = states[t]
        read = _matvec(before, a[:, t])
        states[t + 1] = (
            before * d[:, t, :, None, :] + _outer(read, b[:, t]) + _outer(v[:, t], k[:, t])
        )
        y[:, t] = _matvec(states[t + 1], r[:, t])
    results = {"y": y, "final_state": states[tokens]}
    if cotangents is None:
        return results

    dy = np.asarray(cotangents["dy"], np.float64)
    dstate = np.asarray(cotangents["dfinal_state"], np.float64)
    gradients = {f"d{name}": np.zeros(x.shape) for name, x in inputs.items()}
    for t in reversed(range(tokens)):
        before, after = states[t], states[t + 1]
        dstate = dstate + _outer(dy[:, t], r[:, t])
        transposed = np.swapaxes(dstate, -1, -2)
        gradients["dr"][:, t] = _matvec(np.swapaxes(after, -1, -2), dy[:, t])
        gradients["dk"][:, t] = _matvec(transposed, v[:, t])
        gradients["dv"][:, t] = _matvec(dstate, k[:, t])
        gradients["db"][:, t] = _matvec(transposed, _matvec(before, a[:, t]))
        dread = _matvec(dstate, b[:, t])
        gradients["da"][:, t] = _matvec(np.swapaxes(before, -1, -2), dread)
        gradients["dw"][:, t] = slope[:, t] * np.sum(dstate * before, axis=-2)
        dstate = dstate * d[:, t, :, None, :] + _outer(dread, a[:, t])
    if "initial_state" in inputs:
        gradients["dinitial_state"] = dstate
    return results | gradients


def wkv7_step(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`wkv7` on one token, without the time axis; the state goes in and comes out as `state`."""

    def in_time(named: Arrays) -> dict[str, Array]:
        return {name: x if "state" in name else x[:, None] for name, x in named.items()}

    sequence = in_time(inputs)
    sequence["initial_state"] = sequence.pop("state")
    if cotangents is not None:
        cotangents = {"dy": cotangents["dy"][:, None], "dfinal_state": cotangents["dstate"]}
    results = wkv7(sequence, form, cotangents)
    renamed = {"final_state": "state", "dinitial_state": "dstate"}
    return {
        renamed.get(name, name): x if "state" in name else x[:, 0] for name, x in results.items()
    }
