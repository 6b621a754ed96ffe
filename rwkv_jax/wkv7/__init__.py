"""WKV7, the time mixing of RWKV-7 "Goose"."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _check, _dispatch
from rwkv_jax._decay import Decay
from rwkv_jax._dispatch import Options, Stage
from rwkv_jax._partition import alike
from rwkv_jax._typing import Operand
from rwkv_jax.wkv7 import ffi, reference, xla
from rwkv_jax.wkv7.residuals import Residuals

IMPLEMENTATIONS = {"ffi": ffi, "xla": xla, "reference": reference}
DECAYS = ("log", "exp", "sigmoid")

_SEQUENCE = {"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTHK", "b": "BTHK"}
_TOKEN = {name: axes.replace("T", "") for name, axes in _SEQUENCE.items()}

FORWARD = Stage(
    "wkv7",
    "forward",
    operands=_SEQUENCE | {"initial_state": "BHVK"},
    results={"y": "BTHV", "final_state": "BHVK", "states": "BNHVK"},
    implementations=IMPLEMENTATIONS,
)
BACKWARD = Stage(
    "wkv7",
    "backward",
    operands=_SEQUENCE | {"states": "BNHVK", "dy": "BTHV", "dfinal_state": "BHVK"},
    results={f"d{name}": axes for name, axes in FORWARD.operands.items()},
    implementations=IMPLEMENTATIONS,
)
REFERENCE = dataclasses.replace(FORWARD, results={"y": "BTHV", "final_state": "BHVK"})
STEP = Stage(
    "wkv7_step",
    "step",
    operands=_TOKEN | {"state": "BHVK"},
    results={"y": "BHV", "state": "BHVK"},
    implementations=IMPLEMENTATIONS,
)


def wkv7(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    initial_state: Operand | None = None,
    *,
    decay: Decay = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    r"""The recurrence of RWKV-7 over whole sequences.

    For each head, with the state S a [V, K] matrix that starts as `initial_state`::

        S_t = S_{t-1} diag(d_t) + (S_{t-1} a_t) b_t^T + v_t k_t^T
        y_t = S_t r_t

    In the model, `a` is minus the normalised removal key and `b` that key times the in-context
    learning rate; the operator takes any `a` and `b`. Source: "RWKV-7 Goose with Expressive Dynamic
    State Evolution" (arXiv:2503.14456), and the official CUDA kernels of RWKV-LM, with whose state
    layout and (for "sigmoid", their `clampw` form) decay this function agrees.

    Args:
      r: receptance, [B, T, H, K]. Any B >= 0, T >= 0 and H >= 0.
      w: decay, [B, T, H, K], in the form that `decay` names.
      k: key, [B, T, H, K].
      v: value, [B, T, H, V].
      a: what each token reads from the state, [B, T, H, K].
      b: where what was read is written back, [B, T, H, K].
      initial_state: [B, H, V, K], float32; zeros if None. (flash-linear-attention keeps the
        transpose, [B, H, K, V].)
      decay: what `w` is. "log": the log decay itself, <= 0, so d = exp(w). "exp": d = exp(-exp(w)).
        "sigmoid", the form of RWKV-7: d = exp(-exp(-1/2) sigmoid(w)). Any finite `w` is accepted; a
        decay that underflows to 0 clears its channel.
      precision: as `jax.lax.Precision`. HIGHEST computes in float32 throughout; the default may use
        matrix units in lower precision with float32 accumulation.
      implementation: "ffi" (native kernels on CPU and CUDA), "xla", or "reference" (one `lax.scan`
        step, differentiable any number of times and in forward mode). None takes the first of ffi
        and xla that can run where the program is lowered.

    `r`, `w`, `k`, `v`, `a`, `b` share one dtype: float32, bfloat16 or float16. The state is always
    float32 and so is all accumulation.

    Returns:
      `y` [B, T, H, V] in the dtype of `v`, and the final state [B, H, V, K] in float32. Both are
      differentiable once in reverse mode, with respect to all seven array arguments.

    Raises:
      TypeError: an argument is not an array, or has a dtype that is not accepted or not shared.
      ValueError: an argument has a wrong rank or size, or an option is unknown.
      NotImplementedError: the named implementation cannot run this call; the message says why. If
        only the platform is at fault, this is raised when the program is lowered.
    """
    given: dict[str, Any] = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    if initial_state is not None:
        given["initial_state"] = initial_state
    arrays = _check.arrays("wkv7", FORWARD.operands, given, states=("initial_state",))
    options = _dispatch.options(
        FORWARD, decay=decay, precision=precision, implementation=implementation, decays=DECAYS
    )
    if initial_state is None:
        batch, _, heads, keys = arrays["r"].shape
        arrays["initial_state"] = jnp.zeros((batch, heads, arrays["v"].shape[-1], keys))
    operands = alike(FORWARD.operands.values(), *arrays.values())
    if implementation == "reference":
        y, final_state = _dispatch.call(REFERENCE, options, *operands)
        return y, final_state
    return _wkv7(options, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wkv7(options: Options, *operands: Array) -> tuple[Array, Array]:
    y, final_state, _ = _dispatch.call(FORWARD, options, *operands)
    return y, final_state


def _forward(options: Options, *operands: Array) -> tuple[tuple[Array, Array], Residuals]:
    saving = dataclasses.replace(options, save=True)
    y, final_state, states = _dispatch.call(FORWARD, saving, *operands)
    r, w, k, v, a, b, _ = operands
    return (y, final_state), Residuals(r, w, k, v, a, b, states)


def _backward(
    options: Options, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    return _dispatch.call(BACKWARD, options, *residuals, *cotangents)


_wkv7.defvjp(_forward, _backward)


def wkv7_step(
    r: Operand,
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    state: Operand,
    *,
    decay: Decay = "log",
    precision: jax.lax.PrecisionLike = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """One token of `wkv7`, for decoding.

    The arguments are those of `wkv7` without the time axis: `r`, `w`, `k`, `a`, `b` are [B, H, K],
    `v` is [B, H, V] and `state` [B, H, V, K] is float32. Where the caller donates `state`, the
    native kernels update it in place.

    Returns:
      `y` [B, H, V] in the dtype of `v`, and the next state. Equal to `wkv7` on one token,
      derivatives included.

    Raises:
      TypeError, ValueError, NotImplementedError: as `wkv7`.
    """
    given = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b, "state": state}
    arrays = _check.arrays("wkv7_step", STEP.operands, given, states=("state",))
    options = _dispatch.options(
        STEP, decay=decay, precision=precision, implementation=implementation, decays=DECAYS
    )
    operands = alike(STEP.operands.values(), *arrays.values())
    if implementation == "reference":
        y, next_state = _dispatch.call(STEP, options, *operands)
        return y, next_state
    return _wkv7_step(options, *operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wkv7_step(options: Options, *operands: Array) -> tuple[Array, Array]:
    y, state = _dispatch.call(STEP, options, *operands)
    return y, state


def _step_forward(
    options: Options, *operands: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    return _wkv7_step(options, *operands), operands


def _step_backward(
    options: Options, operands: tuple[Array, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, ...]:
    *inputs, state = operands
    dy, dstate = cotangents
    sequence = [x[:, None] for x in (*inputs, state, dy)]
    *dinputs, dinitial_state = _dispatch.call(BACKWARD, options, *sequence, dstate)
    return (*(x[:, 0] for x in dinputs), dinitial_state)


_wkv7_step.defvjp(_step_forward, _step_backward)
