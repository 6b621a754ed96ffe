"""The operators' operands, distributed as in the models, and a check of results against the
package's `implementation="reference"`.

Axes: B batch rows, S states (one for each row, or for each sequence of `cu_seqlens`), T time,
H heads, K key channels, V value channels (as many as K unless given), C channels of WKV4 (H * K).
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import rwkv_jax

Named = Mapping[str, Any]
"""Arrays by the name of an argument or a result. The state of WKV4 is a `Wkv4State` of arrays."""

Shape = Sequence[int]
"""B, T, H, K, or without T for the operator on a single token."""

DIRECTIONS = ("forward", "forward+backward")

HEADS = 2
"""How many heads have operands of their own. The other heads repeat these."""

CACHE = 256e6
"""Bytes that exceed the cache of any GPU. Smaller operands are made several times, so that a call
does not find its operands in the cache."""

EXACT_FLOAT32 = 1e-5
SEQUENTIAL = 2e-3
CHUNKED = {"output": 7e-3, "gradient": 8e-3}
"""The largest relative RMS errors that are accepted: of an implementation that computes one token
at a time in float32, with float32 operands and with others, and of any other implementation."""

LOG_DECAY: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "log": lambda rate: -rate,
    "exp": jnp.log,
    "sigmoid": lambda rate: jax.scipy.special.logit(jnp.minimum(rate / math.exp(-0.5), 0.999)),
}
"""For each form of decay, the `w` whose decay factor is `exp(-rate)`."""

FORGETS = 1e4
"""The rate of a token that forgets all."""

FORGETTING: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "model": lambda token: token < 0,
    "one token of each head": lambda token: token == 21,
    "one token in 64": lambda token: token % 64 == 21,
    "one token in 4": lambda token: token % 4 == 1,
    "every token": lambda token: token >= 0,
}
"""Which tokens forget all, in every channel, where the others have rates as in the models."""

NORMAL = {"log": jax.nn.softplus, "exp": jnp.exp, "sigmoid": jax.nn.sigmoid}
"""For each form of decay, the rates of a normally distributed number."""

TIMES_NORMAL = {"normal": 1, "5 x normal": 5}
"""The kinds of rates that are so many times those of `NORMAL`."""

RATES = (*FORGETTING, *TIMES_NORMAL)


@dataclass(frozen=True)
class Operator:
    inputs: Mapping[str, str]
    """The axes of each input, in the order of the arguments. `y` has the axes of `v`."""
    state: str = "SHVK"
    decays: tuple[str, ...] = ("log", "exp")
    """The forms of decay. The last one is that of the official models."""
    rate: str = "w"
    """The input that gives the decay."""
    options: Sequence[str] = ("decay",)
    """The option that says in which form, if there is one."""


TOKENS, VALUES = "BTHK", "BTHV"
OPERATORS = {
    "wkv7": Operator(
        dict.fromkeys("rwkvab", TOKENS) | {"v": VALUES}, decays=("log", "exp", "sigmoid")
    ),
    "wkv6": Operator(dict.fromkeys("rwkv", TOKENS) | {"v": VALUES, "u": "HK"}),
    "wkv5": Operator({"r": TOKENS, "w": "HK", "k": TOKENS, "v": VALUES, "u": "HK"}),
    "wkv4": Operator({"w": "C", "u": "C", "k": "BTC", "v": "BTC"}, state="SC"),
}
OPERATORS |= {
    op: Operator(
        {"q": TOKENS, "k": TOKENS, "v": VALUES, "g": axes, "beta": "BTH"},
        decays=("log",),
        rate="g",
        options=(),
    )
    for op, axes in {"gated_delta_rule": "BTH", "kimi_delta_attention": TOKENS}.items()
}


def options_of(op: str, decay: str) -> dict[str, str]:
    """The options of a public function, by name, that say what form of decay it gets."""
    return dict.fromkeys(OPERATORS[op.removesuffix("_step")].options, decay)


class WrongResult(Exception):
    """The result of a contestant is too far from the reference."""


def programs(function: Callable[..., Any], state: str = "final_state") -> dict[str, Any]:
    """For each direction, the jitted program that calls `function` with inputs, cotangents and
    packing operands by name. It returns results, and gradients as well if it goes backward."""

    def forward(inputs: Named, cotangents: Named, packing: Named) -> Named:
        return dict(zip(("y", state), function(**inputs, **packing), strict=True))

    def backward(inputs: Named, cotangents: Named, packing: Named) -> Named:
        results, vjp = jax.vjp(lambda inputs: forward(inputs, cotangents, packing), inputs)
        (gradients,) = vjp({name: cotangents[f"d{name}"] for name in results})
        return {**results, **{f"d{name}": x for name, x in gradients.items()}}

    return dict(zip(DIRECTIONS, map(jax.jit, (forward, backward)), strict=True))


class Operands:
    """The operands of one call in any form of decay, and what the reference computes from them.

    Without packing, all rows repeat one row. The heads of a row repeat its first `HEADS` heads. The
    reference computes what is not repeated, and with that every row and head of a result is
    compared.
    """

    def __init__(
        self,
        op: str,
        shape: Shape,
        dtype: str,
        packing: Named | None = None,
        rates: str = "model",
        values: int | None = None,
    ):
        batch, *tokens, heads, keys = shape
        self.op, self.inputs = op, OPERATORS[op].inputs
        self.state, self.final_state = "initial_state", "final_state"
        if not tokens:
            self.op, self.state, self.final_state = f"{op}_step", "state", "state"
            self.inputs = {name: axes.replace("T", "") for name, axes in self.inputs.items()}
        self.dtype, self.packing, self.rates = dtype, packing or {}, rates
        axes = {**self.inputs, self.state: OPERATORS[op].state}
        axes |= {"y": self.inputs["v"], self.final_state: OPERATORS[op].state}
        self.axes = axes | {f"d{name}": x for name, x in axes.items()}

        states = len(self.packing.get("cu_seqlens", range(batch + 1))) - 1
        rows, own = (batch, states) if self.packing else (1, 1), math.gcd(heads, HEADS)
        self.sizes = {"B": rows[0], "S": rows[1], "T": math.prod(tokens), "H": own, "C": own * keys}
        self.sizes |= {"K": keys, "V": values or keys}
        self.copies = {"B": batch // rows[0], "S": states // rows[1]}
        self.copies |= {"H": heads // own, "C": heads // own}

        self.distinct = jax.jit(self._distinct, static_argnums=0)
        self.expected = functools.cache(self._expected)
        self.sets = functools.cache(self._sets)
        self.shapes, cotangents = jax.eval_shape(lambda: self.make("log"))
        operands, results = (
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
            for arrays in (self.shapes, cotangents)
        )
        self.bytes = {
            "forward": operands + results,
            "forward+backward": 3 * operands + 2 * results,
        }
        """How many bytes operands and results have. The backward pass is a call of its own."""
        self.rotation = math.ceil(CACHE / operands) if jax.default_backend() == "gpu" else 1

    def repeats(self, name: str) -> list[int]:
        """How often an array repeats along each axis what it has once."""
        return [self.copies.get(letter, 1) for letter in self.axes[name]]

    def _distinct(self, decay: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The inputs and cotangents that the others repeat."""
        keys = iter(jax.random.split(jax.random.key(seed), 32))

        def shape(name: str) -> list[int]:
            return [self.sizes[letter] for letter in self.axes[name]]

        def normal(name: str) -> jax.Array:
            return jax.random.normal(next(keys), shape(name))

        def uniform(name: str, low: float, high: float) -> jax.Array:
            return jax.random.uniform(next(keys), shape(name), minval=low, maxval=high)

        inputs: dict[str, Any] = {name: normal(name) for name in self.inputs}
        w = OPERATORS[self.op.removesuffix("_step")].rate
        rate = uniform(w, 0.005, 0.6)
        if self.rates in TIMES_NORMAL:
            rate = TIMES_NORMAL[self.rates] * NORMAL[decay](inputs[w])
        elif self.rates != "model":
            token = jnp.arange(self.sizes["T"]).reshape(-1, *[1] * (rate.ndim - 2))
            rate = jnp.where(FORGETTING[self.rates](token), FORGETS, rate)
        inputs[w] = LOG_DECAY[decay](rate)
        if "q" in inputs:
            for name in "qk":
                inputs[name] /= jnp.linalg.norm(inputs[name], axis=-1, keepdims=True)
            inputs["beta"] = jax.nn.sigmoid(inputs["beta"])
        if "r" in inputs:
            inputs["k"] /= math.sqrt(self.sizes["K"])
        if "a" in inputs:
            # `a` is minus the normalized removal key, `b` is that key times a learning rate.
            inputs["a"] /= -jnp.linalg.norm(inputs["a"], axis=-1, keepdims=True)
            inputs["b"] = -inputs["a"] * uniform("b", 0, 1)
        # One number for each head is float32, as in the models of the delta rule.
        inputs = {
            name: x if self.axes[name][-1] == "H" else x.astype(self.dtype)
            for name, x in inputs.items()
        }
        cotangents: dict[str, Any] = {"dy": normal("dy").astype(self.dtype)}
        state, dstate = self.state, f"d{self.final_state}"
        if "C" in self.axes[state]:
            inputs[state] = rwkv_jax.Wkv4State(normal(state), uniform(state, 0.5, 2), normal(state))
            cotangents[dstate] = rwkv_jax.Wkv4State(*(normal(state) for _ in range(3)))
        else:
            inputs[state], cotangents[dstate] = normal(state), normal(state)
        return inputs, cotangents

    def make(self, decay: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
        """All inputs and cotangents."""

        def repeated(arrays: Named) -> dict[str, Any]:
            return {
                name: jax.tree.map(lambda x, name=name: jnp.tile(x, self.repeats(name)), value)
                for name, value in arrays.items()
            }

        inputs, cotangents = self.distinct(decay, seed)
        return repeated(inputs), repeated(cotangents)

    def _sets(self, decay: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Inputs and cotangents, as many times as it takes to exceed the cache."""
        return [self.make(decay, seed) for seed in range(self.rotation)]

    def _expected(self, decay: str) -> dict[str, Any]:
        """The reference's results and gradients in float32, of the operands that the others repeat
        and that have been rounded to their dtype."""
        options = {"precision": "highest", "implementation": "reference"}
        options |= options_of(self.op, decay)
        reference = functools.partial(getattr(rwkv_jax, self.op), **options)
        operands = jax.tree.map(lambda x: x.astype(jnp.float32), self.distinct(decay, 0))
        both = programs(reference, self.final_state)["forward+backward"]
        return named_leaves(both(*operands, self.packing))

    def implementations(self, decay: str) -> dict[str, rwkv_jax.Availability]:
        """What `rwkv_jax.implementations` says of this call."""
        inputs = [self.shapes[name] for name in self.inputs]
        options = options_of(self.op, decay)
        return rwkv_jax.implementations(self.op, *inputs, **options, **self.packing)

    def sequential(self, decay: str, implementation: str | None) -> bool:
        """Whether an implementation computes one token at a time in float32. None stands for the
        one that runs if none is named."""
        can = self.implementations(decay)
        name = implementation or next(n for n, x in can.items() if x.available)
        return name in can and "one token at a time" in (can[name].description or "")

    def check(self, decay: str, results: Named, *, sequential: bool) -> float:
        """The largest relative RMS error in the results of the first set of operands: of gradients
        if there are any, else of outputs. Raises WrongResult where one is above its ceiling."""
        expected, errors, wrong = self.expected(decay), {}, []
        for name, x in named_leaves(results).items():
            reference, gradient = expected[name], name.startswith("d")
            whole = name.partition(".")[0]
            axes, repeats = self.axes[whole], self.repeats(whole)
            shape = tuple(n * size for n, size in zip(repeats, reference.shape, strict=True))
            if x.shape != shape:
                raise WrongResult(f"{name} has shape {x.shape}, expected {shape}")
            if not {"B", "S"} & {*axes}:
                reference = reference * self.copies["B"]  # the gradient is a sum over rows
            heads = next(i for i, letter in enumerate(axes) if letter in "HC")
            error, rounding = map(float, _error(x, reference, heads))
            ceiling = CHUNKED["gradient" if gradient else "output"]
            if sequential:
                ceiling = EXACT_FLOAT32 if self.dtype == "float32" else SEQUENTIAL
            if not error <= ceiling + rounding:  # NaN is not
                wrong.append(f"{name}: relative RMS error {error:.3g}, accepted {ceiling:.3g}")
            errors[gradient] = max(error, errors.get(gradient, 0.0))
        if wrong:
            raise WrongResult("; ".join(wrong))
        return errors[max(errors)]


def named_leaves(named: Named) -> dict[str, jax.Array]:
    """Arrays by name, the parts of a `Wkv4State` as `final_state.num` and so on."""
    leaves = jax.tree_util.tree_leaves_with_path(dict(named))
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


@functools.partial(jax.jit, static_argnums=2)
def _error(x: jax.Array, expected: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """The largest relative RMS error of a copy of `expected` along the axis `heads` of `x`, and
    along the rows if `expected` has only one; and the error of rounding it to the dtype of `x`."""
    size = jnp.linalg.norm(expected.ravel())
    # XLA may leave out a conversion to another dtype and back.
    rounded = jax.lax.reduce_precision(expected, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
    rounding = jnp.linalg.norm((rounded - expected).ravel())
    x = x.reshape(*x.shape[:heads], -1, expected.shape[heads], *x.shape[heads + 1 :])
    expected = jnp.expand_dims(expected, heads)
    copies = {heads, 0} if expected.shape[0] == 1 else {heads}
    rest = tuple(i for i in range(x.ndim) if i not in copies)
    distance = jnp.sqrt(jnp.max(jnp.sum((x.astype(jnp.float32) - expected) ** 2, rest)))
    size = jnp.where(size > 0, size, 1)  # a gradient of decays that forget all is 0
    return distance / size, rounding / size
