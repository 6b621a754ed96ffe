"""Which implementation of an operator runs, and why another cannot.

`run` is the one way from the machinery to an implementation. Trees of operands become flat lists of
arrays here, because the vmap and partition rules know arrays by the letters of their axes alone.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, overload, runtime_checkable

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from rwkv_jax._operator.batching import batched
from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Operands,
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.operator import Operator, Pass
from rwkv_jax._operator.partition import partitioned

OTHER = "other"

ORDER = {
    "cpu": ("ffi", "xla", "reference"),
    "cuda": ("ffi", "pallas", "xla", "reference"),
    "tpu": ("xla", "reference"),
    OTHER: ("xla", "reference"),
}
"""The implementations that `None` tries on each platform, first to last: pallas only where it was
measured to be faster than xla."""

PLATFORMS = tuple(platform for platform in ORDER if platform != OTHER)
"""Platforms with implementations of their own; all others share what runs on `OTHER`."""


@runtime_checkable
class Dispatched(Protocol):
    """What has implementations to choose from: an operator or a layer function."""

    @property
    def implementations(self) -> Collection[str]: ...

    def title(self, name: Pass) -> str: ...

    def axes(self, name: Pass, options: Options, packing: Any) -> tuple[Any, Any]: ...

    def compute(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Any
    ) -> Any: ...

    def why_not(
        self, choice: str, platform: str, options: Options, operands: Any
    ) -> str | None: ...

    def has_rule(self, options: Options) -> bool: ...


@overload
def run(
    operator: Operator, name: Literal["forward", "step"], options: Options, operands: Forward
) -> Result: ...
@overload
def run(
    operator: Operator, name: Literal["backward"], options: Options, operands: Backward
) -> Gradients: ...
@overload
def run(
    operator: Operator, name: Literal["summary"], options: Options, operands: Forward
) -> Arrays: ...
@overload
def run(
    operator: Operator, name: Literal["reverse_summary"], options: Options, operands: Backward
) -> Arrays: ...
def run(operator: Operator, name: Pass, options: Options, operands: Operands) -> Any:
    """Run a pass; the platform that the program is lowered for decides the implementation."""
    return dispatched(operator, name, options, operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def dispatched(operator: Dispatched, name: Pass, options: Options, operands: Any) -> Any:
    """`run` for whatever has implementations, from a tree of operands with a `packing`."""
    operand_axes, result_axes = operator.axes(name, options, operands.packing)
    leaves, structure = jax.tree.flatten(operands)

    def flat(*leaves: Array) -> tuple[Array, ...]:
        return _on_any_platform(operator, name, options, structure, leaves)

    rule = operator.has_rule(options)
    call = partitioned(
        operator.title(name),
        flat,
        named(operand_axes),
        jax.tree.leaves(result_axes),
        rule=rule,
    )
    if rule:
        call = batched(call, jax.tree.leaves(operand_axes), jax.tree.leaves(result_axes))
    return jax.tree.unflatten(jax.tree.structure(result_axes), call(*leaves))


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of operands, each with the name under which messages speak of it."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [(jax.tree_util.keystr(path[-1:], simple=True), leaf) for path, leaf in leaves]


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Why no implementation that the caller admits runs on a platform."""

    reason: str


def _on_any_platform(
    operator: Dispatched, name: Pass, options: Options, structure: Any, leaves: Sequence[Array]
) -> tuple[Array, ...]:
    operands = jax.tree.unflatten(structure, leaves)
    chosen = {platform: _choose(operator, options, platform, operands) for platform in ORDER}
    if all(isinstance(choice, Unavailable) for choice in chosen.values()):
        raise NotImplementedError(_cannot_run(operator.title(name), options, chosen))

    def compute(platform: str, choice: str, *leaves: Array) -> tuple[Array, ...]:
        operands = jax.tree.unflatten(structure, leaves)
        results = operator.compute(name, choice, options, platform, operands)
        return tuple(jax.tree.leaves(results))

    @functools.cache
    def types() -> tuple[Any, ...]:
        """The types of the results, which are the same on all platforms."""
        able = next(x for x in chosen.items() if not isinstance(x[1], Unavailable))
        return tuple(jax.make_jaxpr(functools.partial(compute, *able))(*leaves).out_avals)

    def branch(platform: str, choice: str | Unavailable, *leaves: Array) -> tuple[Array, ...]:
        if isinstance(choice, Unavailable):
            # Never lowered for a platform that has the implementation.
            reason = _cannot_run(operator.title(name), options, {platform: choice})
            return tuple(_refused.bind(*leaves, reason=reason, types=types()))
        return compute(platform, choice, *leaves)

    branches = {
        platform: functools.partial(branch, platform, choice)
        for platform, choice in chosen.items()
        if platform == OTHER or choice != chosen[OTHER]
    }
    default = branches.pop(OTHER)
    if not branches:
        return default(*leaves)
    return lax.platform_dependent(*leaves, **branches, default=default)


def _cannot_run(op: str, options: Options, chosen: Mapping[str, Any]) -> str:
    where = "; ".join(f"on {platform}: {choice.reason}" for platform, choice in chosen.items())
    return f"{op}: implementation {options.implementation!r} cannot run this call {where}"


def _choose(
    operator: Dispatched, options: Options, platform: str, operands: Any
) -> str | Unavailable:
    """The name of the implementation for a platform, or why there is none."""
    order = [name for name in ORDER[platform] if name in operator.implementations]
    reasons = []
    for name in [options.implementation] if options.implementation else order:
        reason = operator.why_not(name, platform, options, operands)
        if reason is None:
            return name
        reasons.append(reason)
    return Unavailable("; ".join(reasons))


_refused = Primitive("rwkv_jax_refused")
_refused.multiple_results = True
_refused.def_abstract_eval(lambda *_, reason, types: list(types))


def _refuse(ctx: Any, *_: Any, reason: str, types: tuple[Any, ...]):
    raise NotImplementedError(reason)


mlir.register_lowering(_refused, _refuse)


def reasons(
    operator: Operator,
    options: Options,
    platform: str,
    inputs: Mapping[str, Any],
    packing: Packing,
    *,
    details: bool,
) -> dict[str, str | None]:
    """For each implementation, None (with details, how it runs) where it can run a call, or the
    reason why it cannot."""
    platform = platform if platform in PLATFORMS else OTHER

    def describe(implementation: Implementation) -> str | None:
        reason = implementation.why_not(platform, options, inputs, packing)
        if reason or not details:
            return reason
        return implementation.describe(platform, options, inputs, packing)

    return {name: describe(x) for name, x in operator.implementations.items()}
