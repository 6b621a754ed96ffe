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


def wkv6(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """As `wkv7`; `u` is [H, K]."""
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    r, w, k, v, u = (inputs[name] for name in ("r", "w", "k", "v", "u"))
    batch, tokens, heads, keys = r.shape
    d, slope = decay(form, w)

    states = np.zeros((tokens + 1, batch, heads, v.shape[-1], keys))
    states[0] = inputs.get("initial_state", 0.0)
    y = np.zeros(v.shape)
    for t in range(tokens):
        written = _outer(v[:, t], k[:, t])
        y[:, t] = _matvec(states[t] + written * u[:, None, :], r[:, t])
        states[t + 1] = states[t] * d[:, t, :, None, :] + written
    results = {"y": y, "final_state": states[tokens]}
    if cotangents is None:
        return results

    dy = np.asarray(cotangents["dy"], np.float64)
    dstate = np.asarray(cotangents["dfinal_state"], np.float64)
    gradients = {f"d{name}": np.zeros(x.shape) for name, x in inputs.items()}
    for t in reversed(range(tokens)):
        before = states[t]
        own = np.sum(v[:, t] * dy[:, t], axis=-1, keepdims=True)
        gradients["dr"][:, t] = _matvec(np.swapaxes(before, -1, -2), dy[:, t]) + own * u * k[:, t]
        gradients["dk"][:, t] = _matvec(np.swapaxes(dstate, -1, -2), v[:, t]) + own * u * r[:, t]
        read = np.sum(r[:, t] * u * k[:, t], axis=-1, keepdims=True)
        gradients["dv"][:, t] = _matvec(dstate, k[:, t]) + read * dy[:, t]
        gradients["du"] += np.sum(own * r[:, t] * k[:, t], axis=0)
        gradients["dw"][:, t] = slope[:, t] * np.sum(dstate * before, axis=-2)
        dstate = dstate * d[:, t, :, None, :] + _outer(dy[:, t], r[:, t])
    if "initial_state" in inputs:
        gradients["dinitial_state"] = dstate
    return results | gradients


def wkv5(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`wkv6` with the same `w` [H, K] for all tokens."""
    everywhere = np.broadcast_to(np.asarray(inputs["w"], np.float64), inputs["r"].shape)
    results = wkv6({**inputs, "w": everywhere}, form, cotangents)
    if cotangents is not None:
        results["dw"] = results["dw"].sum(axis=(0, 1))
    return results


def step(
    sequence: Callable[..., dict[str, Array]],
    inputs: Arrays,
    form: str,
    cotangents: Arrays | None = None,
) -> dict[str, Array]:
    """An operator on one token, without the time axis; the state is called `state`, both ways."""

    def has_time(name: str) -> bool:
        return name == "y" or ("state" not in name and inputs[name.removeprefix("d")].ndim == 3)

    given = {name: x[:, None] if has_time(name) else x for name, x in inputs.items()}
    given["initial_state"] = given.pop("state")
    if cotangents is not None:
        cotangents = {"dy": cotangents["dy"][:, None], "dfinal_state": cotangents["dstate"]}
    results = sequence(given, form, cotangents)
    renamed = {"final_state": "state", "dinitial_state": "dstate"}
    return {
        renamed.get(name, name): x[:, 0] if has_time(name) else x for name, x in results.items()
    }
