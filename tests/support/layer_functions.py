"""The functions of `rwkv_jax.layers`: their formulas and gradients in numpy float64, by hand and
independent of the package, and how a test calls any of them.

Arrays are named after the arguments. The results have names of their own where an argument has the
same: `key` is the result `k` of `wkv7_keys`, and `passed` is an input that is given back. A
cotangent of a result and the gradient of an input have a `d` in front.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rwkv_jax import layers
from support import tolerance
from support.cases import DTYPES, Arrays

TOKEN, NOTHING, STATE = range(3)


@dataclass(frozen=True)
class Case:
    """A call. The width D of `norm_shift_mix` is H * K, and it has so many mixes."""

    B: int = 2
    T: int = 65
    H: int = 2
    K: int = 16
    dtype: str = "float32"
    mixes: int = 6
    origin: bool = False
    seed: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {"B": self.B, "T": self.T, "H": self.H, "K": self.K}
        return sizes | {"D": self.H * self.K, "I": self.mixes}

    def __str__(self) -> str:
        more = f"-I{self.mixes}" + ("-origin" if self.origin else "")
        return f"B{self.B}-T{self.T}-H{self.H}-K{self.K}-{self.dtype}{more}"


@dataclass(frozen=True)
class LayerFunction:
    """A function of named arrays.

    call: the public function; its results by name.
    oracle: results from float64 inputs, and gradients where there are cotangents.
    tensors, parameters, results: the axes of arrays by name.
    float32: tensors and results that are float32 whatever the dtype of the others.
    """

    call: Callable[..., dict[str, jax.Array]]
    oracle: Callable[..., dict[str, np.ndarray]]
    tensors: Mapping[str, str]
    parameters: Mapping[str, str]
    results: Mapping[str, str]
    float32: tuple[str, ...] = ()

    @property
    def inputs(self) -> dict[str, str]:
        return {**self.tensors, **self.parameters}

    def dtype(self, name: str, dtype: str) -> np.dtype:
        """The dtype of an array, or of a gradient, where the tensors have `dtype`."""
        exact = {*self.parameters, *self.float32}
        return np.dtype("float32" if {name, name[1:]} & exact else DTYPES[dtype])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _normalised(x: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """The normalised array, and what it was multiplied by."""
    x = x - x.mean(-1, keepdims=True)
    scale = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return x * scale, scale


def _normalised_backward(z: np.ndarray, scale: np.ndarray, dz: np.ndarray) -> np.ndarray:
    mean = functools.partial(np.mean, axis=-1, keepdims=True)
    return scale * (dz - mean(dz) - z * mean(dz * z))


def _origin(inputs: Arrays) -> np.ndarray:
    rows, tokens, _ = inputs["x"].shape
    if "origin" in inputs:
        origin = np.array(inputs["origin"])
        origin[:, :1] = np.where(origin[:, :1] == TOKEN, NOTHING, origin[:, :1])
        return origin
    origin = np.full((rows, tokens), TOKEN)
    origin[:, :1] = STATE
    return origin


def norm_shift_mix(inputs: Arrays, d: Arrays | None = None) -> dict[str, np.ndarray]:
    x, before, weight, bias, mix = (inputs[n] for n in ("x", "before", "weight", "bias", "mix"))
    origin = _origin(inputs)[..., None]
    z, scale = _normalised(x, 1e-5)
    n = z * weight + bias
    earlier = np.where(origin == STATE, before[:, None], 0)
    earlier[:, 1:] += np.where(origin[:, 1:] == TOKEN, n[:, :-1], 0)
    found = {f"mixed{i}": n + (earlier - n) * share for i, share in enumerate(mix)}
    found["passed"] = x
    if d is None:
        return found
    dmixed = [d[f"dmixed{i}"] for i in range(len(mix))]
    dn, dearlier = np.zeros_like(x), np.zeros_like(x)
    for dm, share in zip(dmixed, mix, strict=True):
        dn += dm * (1 - share)
        dearlier += dm * share
    dn[:, :-1] += np.where(origin[:, 1:] == TOKEN, dearlier[:, 1:], 0)
    return found | {
        "dx": _normalised_backward(z, scale, dn * weight) + d["dpassed"],
        "dbefore": np.where(origin == STATE, dearlier, 0).sum(1),
        "dweight": (dn * z).sum((0, 1)),
        "dbias": dn.sum((0, 1)),
        "dmix": np.stack([((earlier - n) * dm).sum((0, 1)) for dm in dmixed]),
    }


def wkv7_keys(inputs: Arrays, d: Arrays | None = None) -> dict[str, np.ndarray]:
    k, rate, r = (inputs[n] for n in ("k", "rate", "r"))
    k_k, k_a, a0, r_k = (inputs[n] for n in ("k_k", "k_a", "a0", "r_k"))
    alpha = _sigmoid(a0 + rate)
    u = k * k_k
    length = np.linalg.norm(u, axis=-1, keepdims=True)
    kk = u / np.maximum(length, 1e-12)
    key = k * (1 + (alpha - 1) * k_a)
    bonus = (r * key * r_k).sum(-1)
    found = {"key": key, "a": -kk, "b": kk * alpha, "bonus": bonus, "passed": r}
    if d is None:
        return found
    dbonus = d["dbonus"][..., None]
    dkey, dkk = d["dkey"] + dbonus * r * r_k, d["db"] * alpha - d["da"]
    inner = np.where(length > 1e-12, kk * (kk * dkk).sum(-1, keepdims=True), 0)
    du = (dkk - inner) / np.maximum(length, 1e-12)
    drate = (d["db"] * kk + dkey * k * k_a) * alpha * (1 - alpha)
    return found | {
        "dk": dkey * (1 + (alpha - 1) * k_a) + du * k_k,
        "drate": drate,
        "dr": d["dpassed"] + dbonus * key * r_k,
        "dk_k": (du * k).sum((0, 1)),
        "dk_a": (dkey * k * (alpha - 1)).sum((0, 1)),
        "da0": drate.sum((0, 1)),
        "dr_k": (dbonus * r * key).sum((0, 1)),
    }


def value_residual(inputs: Arrays, d: Arrays | None = None) -> dict[str, np.ndarray]:
    v, rate, first, v0 = (inputs[n] for n in ("v", "rate", "first", "v0"))
    share = _sigmoid(v0 + rate)
    value = v + (first - v) * share
    found = {"value": value, "value_again": value, "passed": first}
    if d is None:
        return found
    dvalue = d["dvalue"] + d["dvalue_again"]
    drate = dvalue * (first - v) * share * (1 - share)
    return found | {
        "dv": dvalue * (1 - share),
        "drate": drate,
        "dfirst": dvalue * share + d["dpassed"],
        "dv0": drate.sum((0, 1)),
    }


def read_out(inputs: Arrays, d: Arrays | None = None) -> dict[str, np.ndarray]:
    y, v, gate, weight, bias = (inputs[n] for n in ("y", "v", "gate", "weight", "bias"))
    z, scale = _normalised(y, 64e-5)
    bonus = inputs["bonus"][..., None]
    inner = z * weight + bias + bonus * v
    found = {"out": inner * gate}
    if d is None:
        return found
    dinner = d["dout"] * gate
    return found | {
        "dy": _normalised_backward(z, scale, dinner * weight),
        "dbonus": (dinner * v).sum(-1),
        "dv": dinner * bonus,
        "dgate": d["dout"] * inner,
        "dweight": (dinner * z).sum((0, 1)),
        "dbias": dinner.sum((0, 1)),
    }


def _call_norm_shift_mix(**arguments: Any) -> dict[str, jax.Array]:
    found = layers.norm_shift_mix(**arguments)
    return {f"mixed{i}": x for i, x in enumerate(found.mixed)} | {"passed": found.x}


def _call_wkv7_keys(**arguments: Any) -> dict[str, jax.Array]:
    found = layers.wkv7_keys(**arguments)
    return {"key": found.k, "a": found.a, "b": found.b, "bonus": found.bonus, "passed": found.r}


def _call_value_residual(**arguments: Any) -> dict[str, jax.Array]:
    found = layers.value_residual(**arguments)
    return {"value": found.value, "value_again": found.value_again, "passed": found.first}


def _call_read_out(**arguments: Any) -> dict[str, jax.Array]:
    return {"out": layers.read_out(**arguments)}


def _of_heads(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "BTHK")


def _by_head(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "HK")


LAYER_FUNCTIONS = {
    "norm_shift_mix": LayerFunction(
        *(_call_norm_shift_mix, norm_shift_mix, {"x": "BTD", "before": "BD"}),
        {"weight": "D", "bias": "D", "mix": "ID"},
        {f"mixed{i}": "BTD" for i in range(6)} | {"passed": "BTD"},
    ),
    "wkv7_keys": LayerFunction(
        *(_call_wkv7_keys, wkv7_keys, _of_heads("k", "rate", "r")),
        _by_head("k_k", "k_a", "a0", "r_k"),
        {**_of_heads("key", "a", "b"), "bonus": "BTH", **_of_heads("passed")},
        float32=("bonus",),
    ),
    "value_residual": LayerFunction(
        *(_call_value_residual, value_residual, _of_heads("v", "rate", "first"), _by_head("v0")),
        _of_heads("value", "value_again", "passed"),
    ),
    "read_out": LayerFunction(
        *(_call_read_out, read_out, {"y": "BTHK", "bonus": "BTH", "v": "BTHK", "gate": "BTHK"}),
        *(_by_head("weight", "bias"), _of_heads("out")),
        float32=("bonus",),
    ),
}


def operands(name: str, case: Case) -> tuple[Arrays, Arrays]:
    """Inputs, rounded to their dtype, and cotangents of unit variance."""
    own, sizes = LAYER_FUNCTIONS[name], case.sizes
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])

    def normal(n: str, axes: str) -> np.ndarray:
        x = rng.standard_normal([sizes[letter] for letter in axes])
        return x.astype(own.dtype(n, case.dtype))

    inputs = {n: normal(n, axes) for n, axes in own.inputs.items()}
    results = [n for n in own.results if not n[5:].isdigit() or int(n[5:]) < case.mixes]
    cotangents = {f"d{n}": normal(n, own.results[n]) for n in results}
    if name == "norm_shift_mix":
        # A mean that a token has besides its variance, as activations do.
        x = inputs["x"]
        inputs["x"] = (1.5 * x.astype(np.float32) + 0.7).astype(x.dtype)
        if case.origin:
            kinds = rng.choice([TOKEN, NOTHING], (case.B, case.T), p=[0.8, 0.2])
            # One state in a row at most; the first row has it before its first token.
            for i, row in enumerate(kinds):
                row[3 * i : 3 * i + 1] = STATE
            inputs["origin"] = kinds.astype(np.int32)
    return inputs, cotangents


def expected(name: str, inputs: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
    """Results and gradients by the oracle."""

    def wide(arrays: Arrays) -> Arrays:
        return {n: x if n == "origin" else np.asarray(x, np.float64) for n, x in arrays.items()}

    return LAYER_FUNCTIONS[name].oracle(wide(inputs), wide(cotangents))


@functools.partial(jax.jit, static_argnames=("name", "implementation", "function"))
def value_and_gradients(
    name: str,
    implementation: str | None,
    inputs: Arrays,
    cotangents: Arrays,
    *,
    function: Callable[..., Any] | None = None,
) -> dict[str, jax.Array]:
    """Results and gradients by name, of `function` in place of the public one if it is given."""
    call = function or LAYER_FUNCTIONS[name].call
    indices = {n: x for n, x in inputs.items() if n == "origin"}
    floats = {n: x for n, x in inputs.items() if n not in indices}
    found, vjp = jax.vjp(lambda x: call(**x, **indices, implementation=implementation), floats)
    (gradients,) = vjp({n: cotangents[f"d{n}"] for n in found})
    return found | {f"d{n}": x for n, x in gradients.items()}


def ceiling(dtype: str) -> float:
    """Every implementation computes in float32 throughout and rounds what it gives."""
    return tolerance.ceiling("", dtype, sequential=True, highest=True)


def assert_right(found: Mapping[str, Any], right: Mapping[str, Any], dtype: str) -> None:
    """Arrays are close to the expected ones, in the dtype of the tensors or of the parameters."""
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, ceiling(dtype))


def check(
    name: str,
    implementation: str | None,
    case: Case,
    function: Callable[..., Any] | None = None,
) -> dict[str, jax.Array]:
    """Run a case: results and gradients have the right dtypes and are close to the oracle's."""
    inputs, cotangents = operands(name, case)
    found = value_and_gradients(name, implementation, inputs, cotangents, function=function)
    assert_right(found, expected(name, inputs, cotangents), case.dtype)
    for n, x in found.items():
        assert x.dtype == LAYER_FUNCTIONS[name].dtype(n, case.dtype), n
    return found
