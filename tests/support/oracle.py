"""The operators in numpy float64, one token at a time, forwards and backwards by hand.

Written from the recurrence and independent of the package. `tests/test_oracle.py` checks the
backward pass against finite differences of the forward pass.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray
Arrays: TypeAlias = Mapping[str, Array]

RATE = np.exp(-0.5)


def _sigmoid(w: Array) -> Array:
    e = np.exp(-np.abs(w))
    return np.where(w >= 0, 1.0, e) / (1.0 + e)


def decay(form: str, w: Array) -> tuple[Array, Array]:
    """The decay factor of a form, and its derivative."""
    with np.errstate(over="ignore", under="ignore"):
        if form == "log":
            return np.exp(w), np.exp(w)
        if form == "exp":
            # The slope as one exponential: its two factors are infinity and 0 where w is large.
            return np.exp(-np.exp(w)), -np.exp(w - np.exp(w))
        d = np.exp(-RATE * _sigmoid(w))
        return d, -RATE * _sigmoid(w) * _sigmoid(-w) * d


def _matvec(matrix: Array, x: Array) -> Array:
    return (matrix @ x[..., None])[..., 0]


def _outer(x: Array, y: Array) -> Array:
    return x[..., :, None] * y[..., None, :]


def _started(inputs: Arrays, form: str) -> tuple[dict[str, Array], Array, Array, Array]:
    """The inputs, the decay factors, their slopes, and states [T + 1, B, H, V, K], of which the
    first one is there."""
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    batch, tokens, heads, keys = inputs["r"].shape
    states = np.zeros((tokens + 1, batch, heads, inputs["v"].shape[-1], keys))
    states[0] = inputs.get("initial_state", 0.0)
    return inputs, *decay(form, inputs["w"]), states


def wkv7(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`y` and `final_state`; with the cotangents `dy` and `dfinal_state`, every gradient as well.

    The arrays have the operator's own layout: [B, T, H, K] and [B, H, V, K]. Without an
    `initial_state` the state starts as zeros. Gradients are named after their inputs: `dr`, `dw`.
    """
    inputs, d, slope, states = _started(inputs, form)
    r, k, v, a, b = (inputs[name] for name in "rkvab")
    tokens, y = len(states) - 1, np.zeros(v.shape)
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
    inputs, d, slope, states = _started(inputs, form)
    r, k, v, u = (inputs[name] for name in "rkvu")
    tokens, y = len(states) - 1, np.zeros(v.shape)
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


def delta_rule(
    inputs: Arrays, form: str, cotangents: Arrays | None = None, *, scale: float | None = None
) -> dict[str, Array]:
    """As `wkv7`. `g` [B, T, H] or [B, T, H, K] is the log decay; heads of `q` and `k` may serve
    several heads of `v`."""
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    v, beta = inputs["v"], inputs["beta"]
    repeats = v.shape[2] // inputs["q"].shape[2]
    q, k = (np.repeat(inputs[name], repeats, axis=2) for name in "qk")
    by_head = inputs["g"].ndim < k.ndim
    g = inputs["g"][..., None] + np.zeros(k.shape) if by_head else inputs["g"]
    alpha = decay(form, g)[0]
    factor = k.shape[-1] ** -0.5 if scale is None else scale
    tokens, y = v.shape[1], np.zeros(v.shape)
    states = np.zeros((tokens + 1, v.shape[0], *v.shape[2:], k.shape[-1]))
    states[0] = inputs.get("initial_state", 0.0)
    error = np.zeros(v.shape)
    for t in range(tokens):
        decayed = states[t] * alpha[:, t, :, None, :]
        error[:, t] = v[:, t] - _matvec(decayed, k[:, t])
        states[t + 1] = decayed + _outer(beta[:, t, :, None] * error[:, t], k[:, t])
        y[:, t] = factor * _matvec(states[t + 1], q[:, t])
    results = {"y": y, "final_state": states[tokens]}
    if cotangents is None:
        return results

    dy = factor * np.asarray(cotangents["dy"], np.float64)
    dstate = np.asarray(cotangents["dfinal_state"], np.float64)
    gradients = {name: np.zeros(x.shape) for name, x in zip("qkvg", (q, k, v, k), strict=True)}
    dbeta = np.zeros(beta.shape)
    for t in reversed(range(tokens)):
        dstate = dstate + _outer(dy[:, t], q[:, t])
        decayed = states[t] * alpha[:, t, :, None, :]
        gradients["q"][:, t] = _matvec(np.swapaxes(states[t + 1], -1, -2), dy[:, t])
        written = _matvec(dstate, k[:, t])
        dbeta[:, t] = np.sum(written * error[:, t], axis=-1)
        dvalue = beta[:, t, :, None] * written
        gradients["v"][:, t] = dvalue
        wrote = beta[:, t, :, None] * error[:, t]
        gradients["k"][:, t] = _matvec(np.swapaxes(dstate, -1, -2), wrote)
        gradients["k"][:, t] -= _matvec(np.swapaxes(decayed, -1, -2), dvalue)
        dstate = dstate - _outer(dvalue, k[:, t])
        gradients["g"][:, t] = np.sum(dstate * decayed, axis=-2)
        dstate = dstate * alpha[:, t, :, None, :]
    for name in "qk":
        grouped = *inputs[name].shape[:3], repeats, k.shape[-1]
        gradients[name] = np.sum(gradients[name].reshape(grouped), axis=3)
    if by_head:
        gradients["g"] = np.sum(gradients["g"], axis=-1)
    gradients |= {"beta": dbeta}
    if "initial_state" in inputs:
        gradients["initial_state"] = dstate
    return results | {f"d{name}": x for name, x in gradients.items()}


def wkv5(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`wkv6` with the same `w` [H, K] for all tokens."""
    everywhere = np.broadcast_to(np.asarray(inputs["w"], np.float64), inputs["r"].shape)
    results = wkv6({**inputs, "w": everywhere}, form, cotangents)
    if cotangents is not None:
        results["dw"] = results["dw"].sum(axis=(0, 1))
    return results


def wkv4(inputs: Arrays, form: str, cotangents: Arrays | None = None) -> dict[str, Array]:
    """`y` and `final_num`, `final_den`, `final_log_max`; without an initial state there is nothing.
    The largest weight is one of two, and its gradient goes to that one."""
    inputs = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    w, u, k, v = (inputs[name] for name in ("w", "u", "k", "v"))
    if form == "exp":
        w, slope = -np.exp(np.minimum(w, 500.0)), -np.exp(np.minimum(w, 500.0))
    else:
        slope = np.ones(w.shape)
    batch, tokens, channels = k.shape
    states = np.zeros((tokens + 1, 3, batch, channels))
    states[0, 2] = -1e38
    for i, name in enumerate(("initial_num", "initial_den", "initial_log_max")):
        states[0, i] = inputs.get(name, states[0, i])

    def weights(before: Array, now: Array) -> tuple[Array, Array, Array]:
        largest = np.maximum(before, now)
        return np.exp(before - largest), np.exp(now - largest), largest

    y = np.zeros(v.shape)
    for t in range(tokens):
        num, den, log_max = states[t]
        past, own, _ = weights(log_max, u + k[:, t])
        y[:, t] = (past * num + own * v[:, t]) / (past * den + own)
        past, own, largest = weights(log_max + w, k[:, t])
        states[t + 1] = past * num + own * v[:, t], past * den + own, largest
    num, den, log_max = states[tokens]
    results = {"y": y, "final_num": num, "final_den": den, "final_log_max": log_max}
    if cotangents is None:
        return results

    dy, dnum, dden, dlog_max = (np.asarray(cotangents[f"d{x}"], np.float64) for x in results)
    gradients = {f"d{name}": np.zeros(x.shape) for name, x in inputs.items()}
    for t in reversed(range(tokens)):
        num, den, log_max = states[t]
        past, own, _ = weights(log_max + w, k[:, t])
        dpast = (dnum * num + dden * den) * past
        down = (dnum * v[:, t] + dden) * own
        dlargest = dlog_max - dpast - down
        decayed = log_max + w >= k[:, t]
        dpast += np.where(decayed, dlargest, 0.0)
        down += np.where(decayed, 0.0, dlargest)
        gradients["dw"] += np.sum(dpast, axis=0)
        gradients["dk"][:, t] = down
        gradients["dv"][:, t] = dnum * own
        dnum, dden, dlog_max = dnum * past, dden * past, dpast

        past, own, _ = weights(log_max, u + k[:, t])
        total = past * den + own
        dsum, dtotal = dy[:, t] / total, -dy[:, t] * y[:, t] / total
        down = (dsum * v[:, t] + dtotal) * own
        gradients["du"] += np.sum(down, axis=0)
        gradients["dk"][:, t] += down
        gradients["dv"][:, t] += dsum * own
        dnum, dden = dnum + dsum * past, dden + dtotal * past
        dlog_max = dlog_max + (dsum * num + dtotal * den) * past
    gradients["dw"] *= slope
    if "initial_num" in inputs:
        gradients |= {"dinitial_num": dnum, "dinitial_den": dden, "dinitial_log_max": dlog_max}
    return results | gradients


def step(
    sequence: Callable[..., dict[str, Array]],
    timed: Iterable[str],
    inputs: Arrays,
    form: str,
    cotangents: Arrays | None = None,
) -> dict[str, Array]:
    """An operator on one token, without the time axis that the inputs `timed` have. The initial and
    the final state of the sequence have the same name here."""
    timed = {"y", *timed}

    def in_sequence(named: Arrays, form: str) -> dict[str, Array]:
        return {
            name if name in {*timed, "w", "u"} else form.format(name): (
                x[:, None] if name in timed else x
            )
            for name, x in named.items()
        }

    given = in_sequence(inputs, "initial_{}")
    if cotangents is not None:
        bare = {name.removeprefix("d"): x for name, x in cotangents.items()}
        cotangents = {f"d{n}": x for n, x in in_sequence(bare, "final_{}").items()}
    renamed = {}
    for name, x in sequence(given, form, cotangents).items():
        short = name.replace("initial_", "").replace("final_", "")
        renamed[short] = x[:, 0] if name.removeprefix("d") in timed else x
    return renamed
