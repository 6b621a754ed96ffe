"""The functions of `rwkv_jax.layers`: their formulas and gradients in numpy float64, by hand and
independent of the package, and how a test calls any of them.

Arrays are named after the arguments. The results have names of their own where an argument has the
same: `key` is the result `k` of `wkv7_keys`, and `passed` is an input that is given back. A
cotangent of a result and the gradient of an input have a `d` in front.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rwkv_jax
from rwkv_jax import layers
from support import cases, harness, tolerance
from support.cases import DTYPES, Arrays

TOKEN, NOTHING, STATE = range(3)


@dataclass(frozen=True)
class Case:
    """A call. The width D of `norm_shift_mix` is H * K, and it has so many mixes. Every other
    function takes as many channels.

    origin: whether `norm_shift_mix` has this argument, and `keyed_wkv7` has `segment_ids`.
    without: the optional arguments that are not given.
    matrices: the dtype of matrices, if it is not that of the tensors.
    others: sizes of axes that differ from what they usually are.
    """

    B: int = 2
    T: int = 65
    H: int = 2
    K: int = 16
    dtype: str = "float32"
    mixes: int = 6
    origin: bool = False
    seed: int = 0
    without: tuple[str, ...] = ()
    matrices: str | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = {"B": self.B, "T": self.T, "H": self.H, "K": self.K, "V": self.K}
        sizes |= {"D": self.H * self.K, "C": self.H * self.K, "I": self.mixes, "O": 24}
        return {**sizes, "F": 256, "R": 24, "Q": 8, "U": 16, **self.others}

    def __str__(self) -> str:
        more = f"-I{self.mixes}" + ("-origin" if self.origin else "")
        more += "".join(f"-{name}{size}" for name, size in self.others.items())
        more += "".join(f"-no {name}" for name in self.without)
        return f"B{self.B}-T{self.T}-H{self.H}-K{self.K}-{self.dtype}{more}"


_one_by_one = functools.partial(tolerance.ceiling, sequential=True, highest=True)
"""In float32 throughout, whatever the implementation, and what it gives is rounded."""

_chunked = functools.partial(tolerance.ceiling, sequential=False, highest=True)


def _products(name: str, dtype: str) -> float:
    return tolerance.PRODUCTS[dtype]


@dataclass(frozen=True)
class LayerFunction:
    """A function of named arrays.

    function: the public function, or what makes its results of named arrays.
    oracle: results and gradients from inputs and cotangents in float64.
    tensors, parameters, results: the axes of arrays by name.
    float32: tensors and results that are float32 whatever the dtype of the others.
    matrices: the axes of parameters of any dtype, and of the vectors that are added to products.
    integers: the axes of arguments without gradients, which few tests have.
    ceiling: how far an array of a name may be from the oracle, for a dtype of the tensors.
    public: the name of arrays in error messages, where it is another one.
    """

    function: Callable[..., Any]
    oracle: Callable[..., dict[str, np.ndarray]]
    tensors: Mapping[str, str]
    parameters: Mapping[str, str]
    results: Mapping[str, str]
    float32: tuple[str, ...] = ()
    matrices: Mapping[str, str] = field(default_factory=dict)
    integers: Mapping[str, str] = field(default_factory=dict)
    ceiling: Callable[[str, str], float] = _one_by_one
    public: Callable[[str], str] = str

    def call(self, **arguments: Any) -> dict[str, jax.Array]:
        """The results by name."""
        found = self.function(**arguments)
        if isinstance(found, dict):
            return found
        return dict(zip(self.results, jax.tree.leaves(found), strict=True))

    @property
    def inputs(self) -> dict[str, str]:
        return {**self.tensors, **self.parameters, **self.matrices}

    @property
    def axes(self) -> dict[str, str]:
        """The axes of all arrays."""
        named = {**self.inputs, **self.results}
        return {**named, **{f"d{n}": axes for n, axes in named.items()}, **self.integers}

    def dtype(self, name: str, dtype: str) -> np.dtype:
        """The dtype of an array, or of a gradient, where the tensors and matrices have `dtype`."""
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


def norm_shift_mix(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    x, before, weight, bias, mix = (inputs[n] for n in ("x", "before", "weight", "bias", "mix"))
    origin = _origin(inputs)[..., None]
    z, scale = _normalised(x, 1e-5)
    n = z * weight + bias
    earlier = np.where(origin == STATE, before[:, None], 0)
    earlier[:, 1:] += np.where(origin[:, 1:] == TOKEN, n[:, :-1], 0)
    found = {f"mixed{i}": n + (earlier - n) * share for i, share in enumerate(mix)}
    dmixed = [d[f"dmixed{i}"] for i in range(len(mix))]
    dn, dearlier = np.zeros_like(x), np.zeros_like(x)
    for dm, share in zip(dmixed, mix, strict=True):
        dn += dm * (1 - share)
        dearlier += dm * share
    dn[:, :-1] += np.where(origin[:, 1:] == TOKEN, dearlier[:, 1:], 0)
    return found | {
        "passed": x,
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


def value_residual(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    v, rate, first, v0 = (inputs[n] for n in ("v", "rate", "first", "v0"))
    share = _sigmoid(v0 + rate)
    value = v + (first - v) * share
    dvalue = d["dvalue"] + d["dvalue_again"]
    drate = dvalue * (first - v) * share * (1 - share)
    return {
        "value": value,
        "value_again": value,
        "passed": first,
        "dv": dvalue * (1 - share),
        "drate": drate,
        "dfirst": dvalue * share + d["dpassed"],
        "dv0": drate.sum((0, 1)),
    }


def read_out(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    y, v, gate, weight, bias = (inputs[n] for n in ("y", "v", "gate", "weight", "bias"))
    z, scale = _normalised(y, 64e-5)
    bonus = inputs["bonus"][..., None]
    inner = z * weight + bias + bonus * v
    dinner = d["dout"] * gate
    return {
        "out": inner * gate,
        "dy": _normalised_backward(z, scale, dinner * weight),
        "dbonus": (dinner * v).sum(-1),
        "dv": dinner * bonus,
        "dgate": d["dout"] * inner,
        "dweight": (dinner * z).sum((0, 1)),
        "dbias": dinner.sum((0, 1)),
    }


def feed_forward(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    x, key, value = (inputs[n] for n in ("x", "key", "value"))
    positive = np.maximum(x @ key.T, 0)
    dproduct = 2 * positive * (d["dy"] @ value)
    return {
        "y": positive**2 @ value.T,
        "dx": dproduct @ key,
        "dkey": np.einsum("btf,btc->fc", dproduct, x),
        "dvalue": np.einsum("btc,btf->cf", d["dy"], positive**2),
    }


def low_rank(inputs: Arrays, d: Arrays, activation: str = "tanh") -> dict[str, np.ndarray]:
    x, first, second = (inputs[n] for n in ("x", "first", "second"))
    product = x @ first
    hidden, slope = {
        "identity": (product, np.ones_like(product)),
        "tanh": (np.tanh(product), 1 / np.cosh(product) ** 2),
        "sigmoid": (_sigmoid(product), 1 / (2 + 2 * np.cosh(product))),
    }[activation]
    dproduct = d["dy"] @ second.T * slope
    found = {
        "y": hidden @ second + inputs.get("offset", 0),
        "dx": dproduct @ first.T,
        "dfirst": np.einsum("btc,btr->cr", x, dproduct),
        "dsecond": np.einsum("btr,btc->rc", hidden, d["dy"]),
    }
    return found | ({"doffset": d["dy"].sum((0, 1))} if "offset" in inputs else {})


MAPS = (("tanh", "R", True), ("identity", "Q", False), ("sigmoid", "U", False))
"""The activation of each map of `low_rank_maps`, its rank, and whether it has an offset."""


def of_map(i: int, arrays: Arrays) -> Arrays:
    """The arrays of a map by the names that they have in `low_rank`."""
    return {name[:-1]: x for name, x in arrays.items() if name[-1] == str(i)}


def low_rank_maps(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    found = {}
    for i, (activation, *_) in enumerate(MAPS):
        results = low_rank(of_map(i, inputs), of_map(i, d), activation)
        found |= {f"{name}{i}": x for name, x in results.items()}
    return found


def projected_read_out(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    dprojected, matrix = d["dprojected"], inputs["matrix"]
    dout = (dprojected @ matrix).reshape(inputs["y"].shape)
    found = read_out(inputs, {"dout": dout})
    out = found.pop("out").reshape(*dout.shape[:2], matrix.shape[1])
    dmatrix = np.einsum("btd,btc->dc", dprojected, out)
    return {**found, "projected": out @ matrix.T, "dmatrix": dmatrix}


def keyed_wkv7(inputs: Arrays, d: Arrays) -> dict[str, np.ndarray]:
    keys = wkv7_keys(inputs)
    recurrent = {n: inputs[n] for n in ("r", "w", "v", "initial_state") if n in inputs}
    recurrent |= {"k": keys["key"], "a": keys["a"], "b": keys["b"]}
    outer, ids = {n: d[n] for n in ("dy", "dfinal_state")}, inputs.get("segment_ids")
    found = harness.expected("wkv7", recurrent, outer, decay="sigmoid", segment_ids=ids)
    inner = {"dkey": found.pop("dk"), "da": found.pop("da"), "db": found.pop("db")}
    inner |= {"dbonus": d["dbonus"], "dpassed": found.pop("dr")}
    of_keys = wkv7_keys(inputs, inner)
    gradients = {n: of_keys[n] for n in ("dk", "drate", "dr", *(f"d{x}" for x in OF_KEYS))}
    return {**found, **gradients, "bonus": keys["bonus"]}


def _call_norm_shift_mix(**arguments: Any) -> dict[str, jax.Array]:
    found = layers.norm_shift_mix(**arguments)
    return {f"mixed{i}": x for i, x in enumerate(found.mixed)} | {"passed": found.x}


def _of_heads(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "BTHK")


def _by_head(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "HK")


def _call_low_rank_maps(implementation: str | None = None, **arguments: Any) -> Any:
    maps = [
        layers.LowRankMap(**of_map(i, arguments), activation=activation)
        for i, (activation, *_) in enumerate(MAPS)
    ]
    return layers.low_rank_maps(maps, implementation=implementation)


def read_out_and_product(
    *, matrix: Any, implementation: str | None = None, **inputs: Any
) -> dict[str, jax.Array]:
    """The two functions of `projected_read_out`, one after the other."""
    out = layers.read_out(**inputs, implementation=implementation)
    out = out.reshape(*out.shape[:2], matrix.shape[1])
    narrow = matrix.astype(out.dtype)
    projected = jnp.einsum("btc,dc->btd", out, narrow, preferred_element_type=out.dtype)
    return {"projected": projected}


def keys_and_wkv7(
    *, segment_ids: Any = None, implementation: str | None = None, **inputs: Any
) -> dict[str, jax.Array]:
    """The two functions of `keyed_wkv7`, one after the other."""
    of_keys = {name: inputs[name] for name in ("k", "rate", "r", *OF_KEYS)}
    keys = layers.wkv7_keys(**of_keys, implementation=implementation)
    y, last = rwkv_jax.wkv7(
        *(keys.r, inputs["w"], keys.k, inputs["v"], keys.a, keys.b, inputs.get("initial_state")),
        segment_ids=segment_ids,
        decay="sigmoid",
        implementation=implementation,
    )
    return {"y": y, "bonus": keys.bonus, "final_state": last}


IN_TWO = {"projected_read_out": read_out_and_product, "keyed_wkv7": keys_and_wkv7}

OF_KEYS = ("k_k", "k_a", "a0", "r_k")
"""The parameters of `wkv7_keys`."""

ELEMENTWISE = {
    "norm_shift_mix": LayerFunction(
        *(_call_norm_shift_mix, norm_shift_mix, {"x": "BTD", "before": "BD"}),
        {"weight": "D", "bias": "D", "mix": "ID"},
        {f"mixed{i}": "BTD" for i in range(6)} | {"passed": "BTD"},
        integers={"origin": "BT"},
    ),
    "wkv7_keys": LayerFunction(
        *(layers.wkv7_keys, wkv7_keys, _of_heads("k", "rate", "r")),
        _by_head(*OF_KEYS),
        {**_of_heads("key", "a", "b"), "bonus": "BTH", **_of_heads("passed")},
        float32=("bonus",),
    ),
    "value_residual": LayerFunction(
        *(layers.value_residual, value_residual, _of_heads("v", "rate", "first"), _by_head("v0")),
        _of_heads("value", "value_again", "passed"),
    ),
    "read_out": LayerFunction(
        *(layers.read_out, read_out, {"y": "BTHK", "bonus": "BTH", "v": "BTHK", "gate": "BTHK"}),
        *(_by_head("weight", "bias"), _of_heads("out")),
        float32=("bonus",),
    ),
}
"""Functions whose kernels go over the tokens, and which are emulated."""

_READ_OUT = ELEMENTWISE["read_out"]


def _each_map(axes: Mapping[str, str]) -> dict[str, str]:
    return {
        f"{name}{i}": letters.replace("R", rank)
        for i, (_, rank, offset) in enumerate(MAPS)
        for name, letters in axes.items()
        if offset or name != "offset"
    }


_OF_MAP = {"first": "CR", "second": "RD", "offset": "D"}

LAYER_FUNCTIONS = ELEMENTWISE | {
    "projected_read_out": LayerFunction(
        *(layers.projected_read_out, projected_read_out, _READ_OUT.tensors, _READ_OUT.parameters),
        {"projected": "BTO"},
        float32=("bonus",),
        matrices={"matrix": "OC"},
        ceiling=_products,
    ),
    "keyed_wkv7": LayerFunction(
        *(layers.keyed_wkv7, keyed_wkv7),
        {**_of_heads("r", "w", "k"), "v": "BTHV", **_of_heads("rate"), "initial_state": "BHVK"},
        _by_head(*OF_KEYS),
        {"y": "BTHV", "bonus": "BTH", "final_state": "BHVK"},
        float32=("initial_state", "bonus", "final_state"),
        integers={"segment_ids": "BT"},
        ceiling=_chunked,
    ),
    "feed_forward": LayerFunction(
        *(layers.feed_forward, feed_forward, {"x": "BTC"}, {}, {"y": "BTC"}),
        matrices={"key": "FC", "value": "CF"},
        ceiling=_products,
    ),
    "low_rank": LayerFunction(
        *(functools.partial(layers.low_rank, activation="tanh"), low_rank),
        *({"x": "BTC"}, {}, {"y": "BTD"}),
        matrices=_OF_MAP,
        ceiling=_products,
    ),
    "low_rank_maps": LayerFunction(
        *(_call_low_rank_maps, low_rank_maps, _each_map({"x": "BTC"}), {}),
        _each_map({"y": "BTD"}),
        matrices=_each_map(_OF_MAP),
        ceiling=_products,
        public=lambda name: f"maps[{name[-1]}].{name[:-1]}",
    ),
}

PRODUCTS = ("feed_forward", "low_rank", "low_rank_maps")
"""Functions whose kernels are for GPUs of compute capability 9.0 alone, and are not emulated."""


def shapes(name: str, case: Case) -> tuple[Any, Any]:
    """The shapes and dtypes of inputs and cotangents."""
    inputs, cotangents = jax.eval_shape(lambda: _made(name, case, jnp.zeros))
    for n in LAYER_FUNCTIONS[name].integers if case.origin else ():
        inputs[n] = jax.ShapeDtypeStruct((case.B, case.T), jnp.int32)
    return inputs, cotangents


def operands(name: str, case: Case) -> tuple[Arrays, Arrays]:
    """Inputs, rounded to their dtype, and cotangents of unit variance."""
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])
    inputs, cotangents = _made(name, case, rng.standard_normal)
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
    if name == "keyed_wkv7":
        w = inputs["w"]
        as_in_a_model = cases.decays(cases.Case(1, 1, 1, 1, dtype=case.dtype), rng, w.shape)
        inputs["w"] = as_in_a_model.astype(w.dtype)
        if case.origin:
            ids = np.repeat(rng.integers(0, 4, (case.B, case.T)), 3, axis=1)
            inputs["segment_ids"] = ids[:, : case.T].astype(np.int32)
    return inputs, cotangents


def _made(name: str, case: Case, make: Callable[..., Any]) -> tuple[Arrays, Arrays]:
    own, sizes = LAYER_FUNCTIONS[name], case.sizes

    def array(n: str, axes: str) -> Any:
        x = make([sizes[letter] for letter in axes])
        if n not in own.matrices:
            return x.astype(own.dtype(n, case.dtype))
        by_input = n.startswith(("first", "second"))
        inputs = x.shape[0 if by_input else -1] if x.ndim == 2 else 1
        return (x * inputs**-0.5).astype(DTYPES[case.dtype]).astype(case.matrices or case.dtype)

    inputs = {n: array(n, axes) for n, axes in own.inputs.items() if n not in case.without}
    results = [n for n in own.results if not n.startswith("mixed") or int(n[5:]) < case.mixes]
    return inputs, {f"d{n}": array(n, own.results[n]) for n in results}


def expected(
    name: str, inputs: Arrays, cotangents: Arrays, **options: Any
) -> dict[str, np.ndarray]:
    """Results and gradients by the oracle."""
    own = LAYER_FUNCTIONS[name]

    def wide(arrays: Arrays) -> Arrays:
        return {n: x if n in own.integers else np.float64(x) for n, x in arrays.items()}

    return own.oracle(wide(inputs), wide(cotangents), **options)


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
    own = LAYER_FUNCTIONS[name]
    call = function or own.call
    integers = {n: x for n, x in inputs.items() if n in own.integers}
    floats = {n: x for n, x in inputs.items() if n not in own.integers}
    found, vjp = jax.vjp(lambda x: call(**x, **integers, implementation=implementation), floats)
    (gradients,) = vjp({n: cotangents[f"d{n}"] for n in found})
    return found | {f"d{n}": x for n, x in gradients.items()}


def assert_right(name: str, found: Mapping[str, Any], right: Mapping[str, Any], dtype: str) -> None:
    """Arrays are close to the expected ones, in the dtype of the tensors or of the parameters."""
    own = LAYER_FUNCTIONS[name]
    limits = {n: own.ceiling(n, dtype) for n in found}
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, limits)
    for n, x in found.items():
        if n[1:] not in own.matrices:
            assert x.dtype == own.dtype(n, dtype), n


def check(
    name: str, implementation: str | None, case: Case, function: Callable[..., Any] | None = None
) -> dict[str, jax.Array]:
    """Run a case: results and gradients have the right dtypes and are close to the oracle's."""
    inputs, cotangents = operands(name, case)
    found = value_and_gradients(name, implementation, inputs, cotangents, function=function)
    assert_right(name, found, expected(name, inputs, cotangents), case.dtype)
    for n in LAYER_FUNCTIONS[name].matrices.keys() & inputs.keys():
        assert found[f"d{n}"].dtype == inputs[n].dtype, n
    return found
