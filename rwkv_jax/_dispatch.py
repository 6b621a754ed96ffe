"""Which implementation of an operator runs, and why another cannot."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from rwkv_jax import _check
from rwkv_jax._batching import batched
from rwkv_jax._partition import partitioned

OTHER = "other"

ORDER = {
    "cpu": ("ffi", "xla"),
    "cuda": ("ffi", "pallas", "xla"),
    "tpu": ("xla",),
    OTHER: ("xla",),
}
"""The implementations that `None` tries on each platform, first to last: pallas only where it was
measured to be faster than xla."""

PLATFORMS = tuple(platform for platform in ORDER if platform != OTHER)
"""Platforms with implementations of their own; all others share what runs on `OTHER`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller chooses, hashable, so that it can be a static argument."""

    decay: Any
    precision: lax.Precision
    implementation: str | None
    save: bool = False


class Implementation(Protocol):
    """A module with one function for each stage it has, the reason where it cannot run, and in a
    few words how it does where it can."""

    def why_not(
        self, platform: str, stage: str, options: Options, operands: Mapping[str, Any]
    ) -> str | None: ...

    def how(self, platform: str, options: Options, operands: Mapping[str, Any]) -> str: ...


class Lazy:
    """An implementation whose module is imported when it is first asked for."""

    def __init__(self, module: str) -> None:
        self._name = module

    @functools.cached_property
    def _module(self) -> Any:
        try:
            return importlib.import_module(self._name)
        except ImportError as error:
            return error

    def why_not(
        self, platform: str, stage: str, options: Options, operands: Mapping[str, Any]
    ) -> str | None:
        if isinstance(self._module, ImportError):
            return f"{self._name} cannot be imported: {self._module}"
        return self._module.why_not(platform, stage, options, operands)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """A call that all implementations of an operator have: the axes of its operands and results."""

    op: str
    name: str
    operands: Mapping[str, str]
    results: Mapping[str, str]
    implementations: Mapping[str, Any]
    otherwise: tuple[str, Callable[..., Any]] | None = None
    """For an implementation without this stage, or one that returns NotImplemented for a call: a
    stage that it has, and how that does it."""

    @functools.cached_property
    def marked(self) -> "Stage":
        """The same of several sequences in a row, with a mark for each token."""
        return dataclasses.replace(self, operands={**self.operands, "marks": "BT"})

    def of(self, operands: Sequence[Any]) -> "Stage":
        """This, or where there are marks behind its own operands, `marked`."""
        return self if len(operands) == len(self.operands) else self.marked

    def run(self, implementation: str, *call: Any) -> tuple[Array, ...]:
        module = self.implementations[implementation]
        if self.otherwise is None:
            return getattr(module, self.name)(*call)
        results = getattr(module, self.name, lambda *_: NotImplemented)(*call)
        if results is NotImplemented:
            other, how = self.otherwise
            results = how(getattr(module, other), *call)
        return results

    def why_not(
        self, implementation: str, platform: str, options: Options, operands: Sequence[Any]
    ) -> str | None:
        named = dict(zip(self.operands, operands, strict=False))
        if "cu_seqlens" in named:
            named["marks"] = named["cu_seqlens"]  # what it is done with, where it is not a stage
        module = self.implementations[implementation]
        return module.why_not(platform, self.name, options, named)


class Differentiated(NamedTuple):
    """The stages of a function and of its derivative."""

    forward: Stage
    """From inputs and states to `y`, states and what the backward pass needs."""
    backward: Stage
    """From inputs, what was saved and the cotangents to the gradients of inputs and states."""
    reference: Stage
    """The forward pass of the reference, which JAX differentiates."""
    inputs: int
    states: int


def options(
    stage: Stage, *, decay: Any, precision: Any, implementation: Any, decays: Sequence[str]
) -> Options:
    """The checked options of a call."""
    if implementation is not None:
        _check.choice(stage.op, "implementation", implementation, stage.implementations)
    return Options(
        decay=_check.choice(stage.op, "decay", decay, decays),
        precision=_check.precision(stage.op, precision),
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def call(stage: Stage, options: Options, *operands: Array) -> tuple[Array, ...]:
    """Run a stage; the platform that the program is lowered for decides the implementation."""
    named = stage.op, functools.partial(_run, stage, options), stage.operands, stage.results
    if options.implementation == "reference":
        return partitioned(*named, rule=False)(*operands)
    axes = tuple(stage.operands.values()), tuple(stage.results.values())
    return batched(partitioned(*named), *axes)(*operands)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Why no implementation that the caller admits runs on a platform."""

    reason: str


def _run(stage: Stage, options: Options, *operands: Array) -> tuple[Array, ...]:
    chosen = {p: _choose(stage, options, p, operands) for p in ORDER}
    if all(isinstance(choice, Unavailable) for choice in chosen.values()):
        raise NotImplementedError(_cannot_run(stage, options, chosen))
    branches = {
        platform: functools.partial(_branch, stage, options, platform, choice)
        for platform, choice in chosen.items()
        if platform == OTHER or choice != chosen[OTHER]
    }
    default = branches.pop(OTHER)
    if not branches:
        return default(*operands)
    return lax.platform_dependent(*operands, **branches, default=default)


def _cannot_run(stage: Stage, options: Options, chosen: Mapping[str, Any]) -> str:
    where = "; ".join(f"on {platform}: {choice.reason}" for platform, choice in chosen.items())
    return f"{stage.op}: implementation {options.implementation!r} cannot run this call {where}"


def _choose(stage: Stage, options: Options, platform: str, operands: Sequence[Any]) -> Any:
    """The name of the implementation for a platform, or why there is none."""
    name = options.implementation
    order = (n for n in ORDER[platform] if n in stage.implementations)
    candidates = [name] if name else order
    reasons = []
    for candidate in candidates:
        reason = stage.why_not(candidate, platform, options, operands)
        if reason is None:
            return candidate
        reasons.append(reason)
    return Unavailable("; ".join(reasons))


def _branch(
    stage: Stage, options: Options, platform: str, choice: Any, *operands: Array
) -> tuple[Array, ...]:
    if isinstance(choice, Unavailable):
        # Never lowered for a platform that has the implementation; xla only gives the result types.
        first, *rest = operands
        reason = _cannot_run(stage, options, {platform: choice})
        operands = _refused.bind(first, reason=reason), *rest
        choice = "xla"
    return stage.run(choice, options, platform, *operands)


_refused = Primitive("rwkv_jax_refused")
_refused.def_abstract_eval(lambda x, *, reason: x)


def _refuse(ctx: Any, x: Any, *, reason: str):
    raise NotImplementedError(reason)


mlir.register_lowering(_refused, _refuse)


def implementations(
    stages: Sequence[Stage],
    options: Options,
    named: Mapping[str, Any],
    platform: str,
    details: bool,
) -> dict[str, str | None]:
    """For each implementation, None (with details, how it runs) where it can run every stage, or
    the reason why it cannot."""
    platform = platform if platform in PLATFORMS else OTHER

    def describe(module: Any) -> str | None:
        reasons = (module.why_not(platform, stage.name, options, named) for stage in stages)
        reason = next((reason for reason in reasons if reason), None)
        return reason if reason or not details else module.how(platform, options, named)

    return {name: describe(module) for name, module in stages[0].implementations.items()}
