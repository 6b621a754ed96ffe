"""The public operators, one row each, and how a test calls any of them."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import rwkv_jax
from support import cases, oracle
from support.cases import WKV6_DECAYS, Arrays, Case


@dataclass(frozen=True)
class Operator:
    """An operator as a function of named arrays that returns a tuple of them."""

    function: Callable[..., tuple[jax.Array, ...]]
    oracle: Callable[..., dict[str, np.ndarray]]
    make: Callable[[Case], tuple[Arrays, Arrays]]
    cases: tuple[Case, ...]
    inputs: tuple[str, ...]
    decays: tuple[str, ...] = WKV6_DECAYS
    shared: frozenset[str] = frozenset()
    """The inputs that all sequences of a batch share."""
    states: tuple[str, ...] = ("initial_state",)
    results: tuple[str, ...] = ("y", "final_state")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.states)

    @property
    def timed(self) -> tuple[str, ...]:
        """The inputs that each token has of its own."""
        return tuple(name for name in self.inputs if name not in self.shared)

    def suited(self, case: Case) -> Case:
        """A case with a form of decay that this operator takes."""
        return case if case.decay in self.decays else cases.for_wkv6(case)


def flat(op: str, function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, ...]]:
    """`function`, which has the arguments of the operator `op`, as that is called in tests: with
    the parts of the state of WKV4 as arguments and results of their own, and with a form of decay,
    which the delta rule does not have."""
    if "delta" in op:
        return lambda *operands, decay="log", **named: function(*operands, **named)
    if not op.startswith("wkv4"):
        return function
    form = "{}" if op.endswith("step") else "initial_{}"
    names = [form.format(name) for name in rwkv_jax.Wkv4State._fields]

    def call(*operands: Any, **named: Any) -> tuple[jax.Array, ...]:
        named |= zip((*"wukv", *names), operands, strict=False)
        parts = [named.pop(name) for name in names if name in named]
        if parts:
            named[form.format("state")] = rwkv_jax.Wkv4State(*parts)
        y, state = function(**named)
        return y, *state

    return call


SEQUENCES = {
    "wkv7": Operator(
        *(rwkv_jax.wkv7, oracle.wkv7, cases.wkv7, cases.WKV7, tuple("rwkvab")),
        decays=("log", "exp", "sigmoid"),
    ),
    "wkv6": Operator(
        *(rwkv_jax.wkv6, oracle.wkv6, cases.wkv6, cases.WKV6, tuple("rwkvu")),
        shared=frozenset("u"),
    ),
    "wkv5": Operator(
        *(rwkv_jax.wkv5, oracle.wkv5, cases.wkv5, cases.WKV5, tuple("rwkvu")),
        shared=frozenset("wu"),
    ),
    "wkv4": Operator(
        *(flat("wkv4", rwkv_jax.wkv4), oracle.wkv4, cases.wkv4, cases.WKV4, tuple("wukv")),
        shared=frozenset("wu"),
        states=("initial_num", "initial_den", "initial_log_max"),
        results=("y", "final_num", "final_den", "final_log_max"),
    ),
}
"""The operators on whole sequences."""


def _step(
    sequence: Operator, function: Callable[..., Any], several: tuple[Case, ...] = ()
) -> Operator:
    timed = [x for x in sequence.inputs if x not in sequence.shared]
    return dataclasses.replace(
        sequence,
        function=function,
        oracle=functools.partial(oracle.step, sequence.oracle, timed),
        make=functools.partial(cases.step, sequence.make, timed),
        cases=several,
        states=tuple(x.replace("initial_", "") for x in sequence.states),
        results=tuple(x.replace("final_", "") for x in sequence.results),
    )


STEPS = {
    "wkv7_step": _step(SEQUENCES["wkv7"], rwkv_jax.wkv7_step, cases.WKV7_STEP),
    "wkv6_step": _step(SEQUENCES["wkv6"], rwkv_jax.wkv6_step, cases.WKV6_STEP),
    "wkv5_step": _step(SEQUENCES["wkv5"], rwkv_jax.wkv5_step, cases.WKV6_STEP),
    "wkv4_step": _step(SEQUENCES["wkv4"], flat("wkv4_step", rwkv_jax.wkv4_step), cases.WKV4_STEP),
}
"""The operators on one token."""

OPERATORS = SEQUENCES | STEPS


def _delta_rule(name: str, *, by_head: bool) -> Operator:
    return Operator(
        flat(name, getattr(rwkv_jax, name)),
        oracle.delta_rule,
        functools.partial(cases.delta_rule, by_head=by_head),
        cases=(),
        inputs=("q", "k", "v", "g", "beta"),
        decays=("log",),
    )


DELTA_RULES = {
    "gated_delta_rule": _delta_rule("gated_delta_rule", by_head=True),
    "kimi_delta_attention": _delta_rule("kimi_delta_attention", by_head=False),
}
"""Those of the delta rule, forms of WKV7, which have a file of tests of their own."""

DELTA_STEPS = {
    f"{name}_step": _step(sequence, flat(name, getattr(rwkv_jax, f"{name}_step")))
    for name, sequence in DELTA_RULES.items()
}

IMPLEMENTATIONS = ("ffi", "pallas", "xla", "reference")


def available(
    name: str, case: Case, platform: str | None = None, **packing: np.ndarray
) -> list[str]:
    """The implementations that can run a case on a platform, the default backend's if None."""
    operator = Run(name, None).operator
    case = operator.suited(case)
    made, _ = operator.make(case)
    inputs = (made[n] for n in operator.inputs)
    options: dict[str, Any] = {"platform": platform, **packing}
    if name not in DELTA_RULES:
        options["decay"] = case.decay
    can = rwkv_jax.implementations(name, *inputs, **options)
    return [implementation for implementation, x in can.items() if x.available]


class Run(NamedTuple):
    """An operator on whole sequences and an implementation that can run it."""

    op: str
    implementation: str | None

    @property
    def operator(self) -> Operator:
        return (OPERATORS | DELTA_RULES | DELTA_STEPS)[self.op]

    @property
    def names(self) -> tuple[str, ...]:
        return self.operator.names

    @property
    def public(self) -> Callable[..., Any]:
        """The public function, which takes and returns the state of WKV4 as one."""
        return getattr(rwkv_jax, self.op)

    def __call__(self, *operands: Any, **options: Any) -> tuple[jax.Array, ...]:
        decay = self.operator.decays[-1]
        return self.operator.function(
            *operands, **{"decay": decay, "implementation": self.implementation} | options
        )


def runs(case: Case, platform: str | None = None, *, others: int = 1) -> list[Any]:
    """Runs of a case, as parameters of a test: every implementation of WKV7, and so many of each
    other operator, which has the same rules of batching, partition and differentiation. Slow are
    WKV6, since WKV5 has one more operand that all tokens share, and plain XLA, which compiles for
    seconds, unless it is the first one."""
    return [
        pytest.param(
            Run(op, implementation),
            id=f"{op}-{implementation}",
            marks=[pytest.mark.slow] * (op == "wkv6" or (i > 0 and implementation == "xla")),
        )
        for op in SEQUENCES
        for i, implementation in enumerate(
            available(op, case, platform)[: None if op == "wkv7" else others]
        )
    ]


FAST = {
    op: Run(op, "ffi" if "ffi" in available(op, Case(2, 70, 1, 16)) else "reference")
    for op in SEQUENCES
}
"""For each operator an implementation that compiles in a moment."""


def everything() -> list[tuple[str, Case, str]]:
    """Every operator on every case it has, in every implementation that can run it here."""
    return [
        (name, case, implementation)
        for name, operator in OPERATORS.items()
        for case in operator.cases
        for implementation in available(name, case)
        if not _is_repeated(name, implementation, case)
    ]


def _is_repeated(name: str, implementation: str, case: Case) -> bool:
    """Whether a case compiles for long and shows little. Native kernels differ in all that a case
    has. Plain XLA computes in float32 whatever the dtype and the head size, and the reference one
    token after another; WKV5 runs the code of WKV6 in both."""
    if implementation == "ffi" or case.T <= 1:
        return False
    if case.T in (16, 100) or (case.T == 65 and case.K == 128):
        return True  # 15 and 17 tokens end within a tile, 1000 within a chunk
    if case.T == 1000 and case.dtype != "float32":
        return True  # 16 bits are there with fewer tokens
    if implementation == "reference":
        return case.T in (63, 64)
    if case.T <= 17:
        return False
    if name != "wkv7" and case.T not in (65, 1000):
        return True  # sequences are cut into chunks in one place
    if name in ("wkv6", "wkv7"):
        return case.dtype != "float32" and case.regime != "model"
    return case.dtype != "float32" or (name == "wkv5" and case.T > 33 and case.regime == "model")
