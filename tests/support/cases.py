"""The shapes, dtypes, decays and seeds that tests and benchmarks use, and inputs made from them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Arrays: TypeAlias = dict[str, Any]
"""Numpy arrays by the name of an argument, which `**` hands on; `Any`, since no type checker could
tell them from the options beside them."""

BENCH_SHAPES = {
    "8x4096x64x64": (8, 4096, 64, 64),
    "1x32768x64x64": (1, 32768, 64, 64),
    "1x4096x32x64": (1, 4096, 32, 64),
    "8x4096x32x128": (8, 4096, 32, 128),
    "1x1024x12x64": (1, 1024, 12, 64),
}
"""Benchmark shapes [B, T, H, K]; the last one is the CPU's."""

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

LARGEST = {"float32": 1e30, "bfloat16": 1e30, "float16": 6e4}
"""The extreme of each dtype that a decay has to survive."""


GPUS = {
    "8.0": (108, 166912),
    "8.9": (142, 101376),
    "9.0": (132, 232448),
    "10.0": (148, 232448),
    "12.0": (170, 101376),
}
"""For each compute capability with a shared memory of its own size, the multiprocessors of a GPU,
and the bytes of shared memory of a block."""

CU_SEQLENS = np.array([0, 0, 64, 65, 65, 193, 257, 300], np.int32)
"""Sequences of no tokens, of whole chunks, and of whole chunks and a token."""


@dataclass(frozen=True)
class Case:
    """One call. `V` is the value size where it differs from the key size."""

    B: int
    T: int
    H: int
    K: int
    V: int | None = None
    dtype: str = "float32"
    decay: str = "sigmoid"
    regime: str = "model"
    state: bool = True
    seed: int = 0

    @property
    def values(self) -> int:
        return self.K if self.V is None else self.V

    def __str__(self) -> str:
        sizes = f"B{self.B}-T{self.T}-H{self.H}-K{self.K}" + (f"-V{self.V}" if self.V else "")
        start = "state" if self.state else "zeros"
        return f"{sizes}-{self.dtype}-{self.decay}-{self.regime}-{start}"


SHAPES = (
    Case(1, 1000, 2, 64),
    Case(3, 63, 1, 32, dtype="bfloat16", decay="log"),
    Case(3, 65, 2, 16, dtype="float16", decay="exp"),
    Case(3, 1, 2, 16, state=False),
    Case(1, 15, 3, 32, decay="exp"),
    Case(3, 16, 2, 64, dtype="bfloat16", state=False),
    Case(1, 17, 2, 128, dtype="float16"),
    Case(1, 64, 2, 64, decay="log", state=False),
    Case(1, 65, 1, 128, dtype="bfloat16", decay="exp", state=False),
    Case(1, 1000, 2, 64, dtype="bfloat16", decay="exp"),
    Case(2, 100, 1, 256, decay="log"),
    Case(1, 0, 2, 64),
    Case(0, 17, 2, 64, dtype="bfloat16"),
)
"""Every length around a tile or a chunk, every batch size and every head size, at least once; first
one of each data type that shows most."""

GENERAL = (
    Case(2, 33, 2, 48),
    Case(2, 33, 1, 1, V=5, dtype="bfloat16"),
    Case(1, 65, 2, 32, V=64, decay="exp"),
)
"""Head sizes that no native kernel has."""

REGIMES = tuple(
    Case(2, 65, 2, 32, dtype=dtype, decay=decay, regime=regime)
    for dtype, decay, regimes in (
        ("float32", "log", ("near 0", "near 1", "extreme", "mixed")),
        ("float32", "exp", ("near 0", "near 1", "extreme", "mixed")),
        ("float32", "sigmoid", ("near 0", "extreme", "mixed")),
        ("bfloat16", "log", ("mixed",)),
        ("bfloat16", "exp", ("extreme",)),
        ("bfloat16", "sigmoid", ("near 1",)),
        ("float16", "log", ("extreme",)),
        ("float16", "exp", ("mixed",)),
        ("float16", "sigmoid", ("near 0",)),
    )
    for regime in regimes
)
"""Decays that vanish, stay or jump, in every form and dtype; one shape, so programs are shared."""

WKV7 = (*SHAPES, *GENERAL, *REGIMES)

WKV6_DECAYS = ("log", "exp")


def for_wkv6(case: Case) -> Case:
    """A case with a form of decay that WKV5 and WKV6 take."""
    return case if case.decay in WKV6_DECAYS else replace(case, decay="exp")


WKV6 = tuple(dict.fromkeys(map(for_wkv6, WKV7)))
WKV5 = tuple(case for case in WKV6 if case.regime in ("model", "mixed"))
"""Fewer, since its arithmetic is that of WKV6."""

WKV4 = (
    *(case for case in WKV6 if case.V is None),
    Case(2, 17, 3, 7, decay="log"),
    Case(2, 17, 3, 7, dtype="bfloat16", decay="exp"),
)
"""With numbers of channels that no vector and no warp divides."""

WKV7_STEP = (
    Case(3, 1, 2, 64),
    Case(1, 1, 3, 32, dtype="bfloat16", decay="exp"),
    Case(2, 1, 2, 128, dtype="float16", decay="log"),
    Case(0, 1, 2, 64),
    Case(2, 1, 2, 16, decay="exp", regime="extreme"),
    Case(2, 1, 2, 16, decay="log", regime="mixed"),
    Case(1, 1, 2, 24, V=40, dtype="bfloat16"),
)
WKV6_STEP = tuple(dict.fromkeys(map(for_wkv6, WKV7_STEP)))
WKV4_STEP = tuple(case for case in WKV6_STEP if case.V is None)


def _log_decay(form: str, rate: np.ndarray) -> np.ndarray:
    """The `w` of a form whose decay factor is `exp(-rate)`."""
    if form == "log":
        return -rate
    if form == "exp":
        return np.log(rate)
    share = np.minimum(rate / np.exp(-0.5), 0.999)
    return np.log(share / (1 - share))


def decays(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """`w` of one regime: as in the model, steep, steeper (16 tokens leave about 2^-127 of a state),
    factors near 0 or 1, or extremes of the dtype."""
    ranges = {
        "near 0": (15.0, 30.0),
        "steep": (1.0, 4.0),
        "steeper": (4.0, 7.0),
        "near 1": (1e-5, 1e-3),
    }
    low, high = ranges.get(case.regime, (0.005, 0.6))
    w = _log_decay(case.decay, rng.uniform(low, high, shape))
    extremes = np.array([-LARGEST[case.dtype], -100.0, 100.0, LARGEST[case.dtype]])
    if case.decay == "log":
        extremes = -np.abs(extremes)
    if case.regime == "extreme":
        return rng.choice(extremes, shape)
    if case.regime == "mixed":
        return np.where(rng.random(shape) < 0.2, rng.choice(extremes, shape), w)
    return w


def wkv7(case: Case) -> tuple[Arrays, Arrays]:
    """The operands of `rwkv_jax.wkv7`, rounded to their dtype, and cotangents of unit variance.

    As in the model, `a` is minus a unit vector and `b` that vector times a learning rate.
    """
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])
    keys = (case.B, case.T, case.H, case.K)
    values = (case.B, case.T, case.H, case.values)
    states = (case.B, case.H, case.values, case.K)
    dtype = DTYPES[case.dtype]

    kk = rng.standard_normal(keys)
    kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
    inputs = {
        "r": rng.standard_normal(keys),
        "w": decays(case, rng, keys),
        "k": rng.standard_normal(keys) / np.sqrt(case.K),
        "v": rng.standard_normal(values),
        "a": -kk,
        "b": kk * rng.uniform(0, 1, keys),
    }
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    if case.state:
        inputs["initial_state"] = rng.standard_normal(states).astype(np.float32)
    cotangents = {
        "dy": rng.standard_normal(values).astype(dtype),
        "dfinal_state": rng.standard_normal(states).astype(np.float32),
    }
    return inputs, cotangents


def wkv6(case: Case, *, constant: bool = False) -> tuple[Arrays, Arrays]:
    """The operands of `rwkv_jax.wkv6`, or with a constant decay of `rwkv_jax.wkv5`, as `wkv7`."""
    case = for_wkv6(case)
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])
    given, cotangents = wkv7(case)
    inputs = {name: given[name] for name in ("r", "w", "k", "v")}
    shared = (case.H, case.K)
    if constant:
        inputs["w"] = decays(case, rng, shared).astype(DTYPES[case.dtype])
    inputs["u"] = rng.standard_normal(shared).astype(DTYPES[case.dtype])
    return inputs | {n: x for n, x in given.items() if n == "initial_state"}, cotangents


def wkv5(case: Case) -> tuple[Arrays, Arrays]:
    return wkv6(case, constant=True)


def delta_rule(case: Case, *, by_head: bool) -> tuple[Arrays, Arrays]:
    """The operands of `rwkv_jax.gated_delta_rule`, or of `rwkv_jax.kimi_delta_attention`, as
    `wkv7`: keys of unit length, and half as many heads of them where their number is even."""
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])
    given, cotangents = wkv7(case)
    heads = case.B, case.T, case.H
    groups = slice(0, case.H, 2 if case.H % 2 == 0 else 1)
    inputs = {
        "q": given["r"][:, :, groups],
        "k": -given["a"][:, :, groups],
        "v": given["v"],
        "g": decays(case, rng, heads if by_head else (*heads, case.K)),
        "beta": rng.uniform(0, 1, heads),
    }
    inputs = {name: x.astype(DTYPES[case.dtype]) for name, x in inputs.items()}
    return inputs | {n: x for n, x in given.items() if n == "initial_state"}, cotangents


def wkv4(case: Case) -> tuple[Arrays, Arrays]:
    """The operands of `rwkv_jax.wkv4`, with the parts of the state by their names, in H * K
    channels; keys that are large where decays are extreme. (Larger ones would leave a weight fewer
    digits than the ceilings ask for: an exponent of 100 in float32 has an error of 4e-6.)"""
    case = for_wkv6(case)
    rng = np.random.default_rng([case.seed, case.B, case.T, case.H, case.K])
    channels, dtype = case.H * case.K, DTYPES[case.dtype]
    tokens, part = (case.B, case.T, channels), (case.B, channels)
    large = 10.0 if case.regime in ("extreme", "mixed") else 1.0
    inputs = {
        "w": decays(case, rng, (channels,)),
        "u": rng.standard_normal(channels),
        "k": large * rng.standard_normal(tokens),
        "v": rng.standard_normal(tokens),
    }
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}

    def parts(form: str, den: np.ndarray) -> Arrays:
        sums = {"num": rng.standard_normal(part), "den": den, "log_max": rng.standard_normal(part)}
        return {form.format(name): x.astype(np.float32) for name, x in sums.items()}

    cotangents = {"dy": rng.standard_normal(tokens).astype(dtype)}
    cotangents |= parts("dfinal_{}", rng.standard_normal(part))
    if case.state:
        inputs |= parts("initial_{}", rng.uniform(0.5, 2, part))
    return inputs, cotangents


def step(
    make: Callable[[Case], tuple[Arrays, Arrays]], timed: Iterable[str], case: Case
) -> tuple[Arrays, Arrays]:
    """The operands of an operator for one token, and cotangents."""
    inputs, cotangents = make(case)
    token = {n.replace("initial_", ""): x[:, 0] if n in timed else x for n, x in inputs.items()}
    dtoken = {n.replace("final_", ""): x for n, x in cotangents.items()}
    return token, dtoken | {"dy": cotangents["dy"][:, 0]}
