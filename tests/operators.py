"""The public operators, one row each, and how a test calls any of them."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import cases
import oracle
import rwkv_jax
from cases import Arrays, Case


@dataclass(frozen=True)
class Operator:
    function: Callable[..., tuple[jax.Array, jax.Array]]
    oracle: Callable[..., dict[str, np.ndarray]]
    make: Callable[[Case], tuple[Arrays, Arrays]]
    cases: tuple[Case, ...]
    results: tuple[str, ...]


OPERATORS = {
    "wkv7": Operator(rwkv_jax.wkv7, oracle.wkv7, cases.wkv7, cases.WKV7, ("y", "final_state")),
    "wkv7_step": Operator(
        rwkv_jax.wkv7_step, oracle.wkv7_step, cases.wkv7_step, cases.WKV7_STEP, ("y", "state")
    ),
}


def available(name: str, case: Case, platform: str | None = None) -> list[str]:
    """The implementations that can run a case on a platform, the default backend's if None."""
    inputs, _ = OPERATORS[name].make(case)
    can = rwkv_jax.implementations(name, *inputs.values(), decay=case.decay, platform=platform)
    return [implementation for implementation, reason in can.items() if reason is None]


def sequential(
    name: str, implementation: str, inputs: Mapping[str, Any], precision: str | None = None
) -> bool:
    """Whether an implementation takes one token at a time here, in float32."""
    details = rwkv_jax.implementations(name, *inputs.values(), precision=precision, details=True)
    return "one token at a time" in (details[implementation] or "")


def everything() -> list[tuple[str, Case, str]]:
    """Every operator on every case it has, in every implementation that can run it here."""
    return [
        (name, case, implementation)
        for name, operator in OPERATORS.items()
        for case in operator.cases
        for implementation in available(name, case)
    ]


@functools.partial(jax.jit, static_argnames=("name", "options"))
def value_and_gradients(
    name: str, options: tuple[tuple[str, Any], ...], inputs: dict, cotangents: dict
) -> dict[str, jax.Array]:
    """Results and gradients by name, as the oracle has them."""
    operator = OPERATORS[name]

    def call(inputs: dict) -> dict:
        results = operator.function(**inputs, **dict(options))
        return dict(zip(operator.results, results, strict=True))

    results, vjp = jax.vjp(call, inputs)
    (gradients,) = vjp({result: cotangents[f"d{result}"] for result in results})
    return results | {f"d{name}": x for name, x in gradients.items()}
