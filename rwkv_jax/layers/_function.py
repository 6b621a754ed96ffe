"""The machinery of layer functions: what stands around an operator in a layer.

A layer function is computed token by token, besides the token before. It has one formula in plain
JAX, and may have native kernels. Its backward pass computes what it needs again from the inputs, so
that little but the inputs is saved, and each pass of a kernel reads and writes an array once. On a
mesh each device computes its own tokens.

Gradients of parameters are summed in float32: parameters are given to the passes once for each row,
as those of operators are.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from rwkv_jax._native import library
from rwkv_jax._operator import check, dispatch
from rwkv_jax._operator.call import Arrays, Leaf, Options
from rwkv_jax._operator.dispatch import Computation, Pass
from rwkv_jax._operator.partition import SHARDED, match_shardings, repeated

Formula: TypeAlias = Callable[[Arrays], Arrays]
Limits: TypeAlias = Callable[[Mapping[str, int]], str | None]

RUN = 64
"""The tokens of a row over which a kernel adds up the gradients of parameters."""

MAX_TOKENS = 2**31 - 1
"""The most tokens, those of all rows together, that a grid of the kernels has blocks for."""

VERSION = "v1"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The operands of a pass. `kept` and `cotangents` are for the backward pass."""

    inputs: dict[str, Leaf]
    kept: dict[str, Leaf] = field(default_factory=dict)
    cotangents: dict[str, Leaf] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Function(Computation):
    """A layer function.

    name: the public function's.
    tensors: the axes of the inputs that have gradients. They share a dtype, but for those of
      `float32`.
    parameters: the axes of the parameters, without B. Kernels and formulas get them with B.
    results: the axes of what `compute` makes from its inputs.
    compute: the formula of the results, in float32 and rounded to the dtype of the tensors, but for
      those of `float32`.
    limits: why there are no kernels for given sizes of the axes, or None.
    indices: the axes of inputs of int32, which have no gradient.
    kept: the axes of results of float32 that the backward pass of kernels needs. Callers may use
      them as well, without gradients.
    again: results that are given twice, because they have two uses. Their cotangents come apart and
      are added where they are read.
    passed: inputs that are results as well, because they have another use: the cotangent from there
      is added to the gradient where that is written.
    float32: the tensors and results that are float32 whatever the dtype of the other tensors. The
      first tensor is none of them.
    restored: results that the backward pass gives with the gradients, so that whoever has another
      use for them there need not keep them. No input has the name of one.
    """

    name: str
    tensors: Mapping[str, str]
    parameters: Mapping[str, str]
    results: Mapping[str, str]
    compute: Formula
    limits: Limits
    indices: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    restored: tuple[str, ...] = ()

    sharded = SHARDED + "T"
    varies_alike = True

    def __post_init__(self) -> None:
        library.register_export_targets(*self.targets)

    @functools.cached_property
    def inputs(self) -> dict[str, str]:
        """The axes of the inputs as the passes get them."""
        parameters = {name: f"B{axes}" for name, axes in self.parameters.items()}
        return {**self.tensors, **parameters, **self.indices}

    @functools.cached_property
    def gradients(self) -> dict[str, str]:
        return {name: axes for name, axes in self.inputs.items() if name not in self.indices}

    @functools.cached_property
    def given(self) -> dict[str, str]:
        """The axes of the results as callers get them."""
        return self.give(self.tensors, self.results)

    def give(self, inputs: Mapping[str, Leaf], results: Mapping[str, Leaf]) -> dict[str, Leaf]:
        again = {f"{name}_again": results[name] for name in self.again}
        return {**results, **again, **{name: inputs[name] for name in self.passed}}

    @property
    def targets(self) -> tuple[str, ...]:
        backward = "restoring_bwd" if self.restored else "bwd"
        return tuple(f"rwkv_{self.name}_{name}_{VERSION}" for name in ("fwd", backward))

    # The forward pass gives the results and what is kept, the backward pass the gradients and what
    # is restored.

    def axes(self, name: Pass, options: Options, operands: Operands) -> tuple[Any, Any]:
        if name == "forward":
            return Operands(self.inputs), (dict(self.results), dict(self.kept))
        restored = {name: self.results[name] for name in self.restored}
        # What all tokens share gets its gradient from the tokens of all devices.
        summed = {n: axes if "T" in axes else f"{axes}+T" for n, axes in self.gradients.items()}
        return Operands(self.inputs, dict(self.kept), self.given), {**summed, **restored}

    def why_no_kernel(self, name: Pass, options: Options, operands: Operands) -> str | None:
        sizes = check.sizes(self.inputs, operands.inputs)
        if reason := check.symbolic(sizes, "BT"):
            return f"{reason}; the cuda kernels have grids of numbers"
        if sizes["B"] * sizes["T"] > MAX_TOKENS:
            return (
                f"B = {sizes['B']} and T = {sizes['T']}; the cuda kernels take up to {MAX_TOKENS} "
                "tokens in all"
            )
        return self.limits(sizes)

    def formula(self, name: Pass, options: Options, operands: Operands) -> Any:
        inputs = operands.inputs
        if name == "forward":
            found = self.compute(inputs)
            kept = {name: found.pop(name) for name in self.kept}
            return found, kept

        def given(floats: Arrays) -> Arrays:
            found = self.compute(inputs | floats)
            return self.give(floats, {name: found[name] for name in self.results})

        found, pullback = jax.vjp(given, {name: inputs[name] for name in self.gradients})
        (gradients,) = pullback(operands.cotangents)
        return gradients | {name: found[name] for name in self.restored}

    def kernel(self, name: Pass, options: Options, operands: Operands) -> Any:
        inputs = {name: operands.inputs[name] for name in self.inputs}
        if name == "forward":
            return self._native_forward(inputs)
        return self._native_backward(inputs, operands)

    def _shapes(self, inputs: Arrays, results: Iterable[str]) -> list[tuple[list[int], Any]]:
        sizes, dtype = check.sizes(self.inputs, inputs), inputs[next(iter(self.tensors))].dtype
        return [
            ([sizes[x] for x in self.results[name]], jnp.float32 if name in self.float32 else dtype)
            for name in results
        ]

    def _native_forward(self, inputs: Arrays) -> tuple[Arrays, Arrays]:
        sizes, shapes = check.sizes(self.inputs, inputs), self._shapes(inputs, self.results)
        kept = [([sizes.get(x, 2) for x in axes], jnp.float32) for axes in self.kept.values()]
        found = library.call(self.targets[0], [*shapes, *kept], *self._native_inputs(inputs))
        results = dict(zip(self.results, found, strict=False))
        return results, dict(zip(self.kept, found[len(results) :], strict=True))

    def _native_backward(self, inputs: Arrays, operands: Operands) -> Arrays:
        cotangents = [operands.cotangents[x] for x in self.given]
        shapes = [(inputs[name].shape, inputs[name].dtype) for name in self.tensors]
        found = library.call(
            self.targets[1],
            [*shapes, self.partials(inputs), *self._shapes(inputs, self.restored)],
            *self._native_inputs(inputs),
            *operands.kept.values(),
            *cotangents,
        )
        gradients = dict(zip(self.tensors, found, strict=False))
        partials, *restored = found[len(shapes) :]
        gradients |= self.sums(inputs, partials)
        return gradients | dict(zip(self.restored, restored, strict=True))

    def partials(self, inputs: Arrays) -> tuple[tuple[int, ...], Any]:
        """The shape and the dtype of the partial sums of the gradients of all parameters. They are
        one array [B, runs, J, ...], as the parameters are."""
        sizes, vectors = check.sizes(self.inputs, inputs), self._vectors(inputs)
        count = sum(x.shape[1] for x in vectors)
        return (sizes["B"], -(-sizes["T"] // RUN), count, *vectors[0].shape[2:]), jnp.float32

    def sums(self, inputs: Arrays, partials: Array) -> Arrays:
        """The gradients of the parameters, from their partial sums."""
        sums, at, gradients = jnp.sum(partials, axis=1), 0, {}
        for name, vectors in zip(self.parameters, self._vectors(inputs), strict=True):
            count = vectors.shape[1]
            part = lax.slice_in_dim(sums, at, at + count, axis=1)
            gradients[name] = part.reshape(inputs[name].shape)
            at += count
        return gradients

    def native_parameters(self, inputs: Arrays) -> Array:
        """The parameters as one array [B, J, ...]. One array is repeated for each row in one
        kernel, and a kernel takes a GPU microseconds."""
        return jnp.concatenate(self._vectors(inputs), axis=1)

    def _vectors(self, inputs: Arrays) -> list[Array]:
        """Each parameter as so many vectors: [B, n, D] or [B, n, H, K]."""
        single = 1 + min(len(axes) for axes in self.parameters.values())
        given = [inputs[name] for name in self.parameters]
        return [x[:, None] if x.ndim == single else x for x in given]

    def _native_inputs(self, inputs: Arrays) -> list[Array]:
        tensors, indices = ([inputs[x] for x in names] for names in (self.tensors, self.indices))
        return [*tensors, self.native_parameters(inputs), *indices]


def run(
    function: Function,
    tensors: Mapping[str, Any],
    parameters: Mapping[str, Any],
    implementation: str | None,
    indices: Mapping[str, Array] | None = None,
) -> Arrays:
    """The results of a layer function and what it keeps, by name, from the arguments of a public
    function. All that it computes has its name for `jax.checkpoint_policies`."""
    op = function.name
    options, inputs = prepared(op, function, tensors, parameters, implementation, indices)
    both: tuple[Arrays, Arrays]
    if implementation == "reference":
        both = _given(function, options, inputs)
    else:
        both = _run(function, options, inputs)
    results, kept = both
    found = {**results, **jax.tree.map(lax.stop_gradient, kept)}
    return {
        name: x if name in function.passed else checkpoint_name(x, function.name)
        for name, x in found.items()
    }


def prepared(
    op: str,
    function: Function,
    tensors: Mapping[str, Any],
    parameters: Mapping[str, Any],
    implementation: str | None,
    indices: Mapping[str, Array] | None = None,
) -> tuple[Options, Arrays]:
    """The options and the checked inputs of the passes, from the arguments of the public function
    `op`."""
    if implementation is not None:
        check.choice(op, "implementation", implementation, function.implementations)
    both = {**function.tensors, **function.parameters}
    wide = (*function.parameters, *function.float32)
    given = check.arrays(op, both, {**tensors, **parameters}, states=wide)
    given |= indices or {}
    letters = {**both, **function.indices}
    names = list(function.inputs)
    axes = [letters[name] for name in names]
    placed = match_shardings(axes, *(given[name] for name in names), sharded=function.sharded)
    inputs = dict(zip(names, placed, strict=True))
    like = next(iter(function.tensors))
    for name, axes in function.parameters.items():
        inputs[name] = repeated(inputs[name], axes, inputs[like], function.tensors[like])
    return Options(implementation=implementation), inputs


def _given(function: Function, options: Options, inputs: Arrays) -> tuple[Arrays, Arrays]:
    """The results as callers get them, and what is kept."""
    results, kept = dispatch.run(function, "forward", options, Operands(inputs))
    return function.give(inputs, results), kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(function: Function, options: Options, inputs: Arrays) -> tuple[Arrays, Arrays]:
    return _given(function, options, inputs)


def _forward(
    function: Function, options: Options, inputs: Arrays
) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
    results, kept = _given(function, options, inputs)
    return (results, kept), (inputs, kept)


def _backward(
    function: Function,
    options: Options,
    residuals: tuple[Arrays, Arrays],
    of_both: tuple[Arrays, Arrays],
) -> tuple[dict[str, Array | None]]:
    operands = Operands(*residuals, of_both[0])
    found = dispatch.run(function, "backward", options, operands)
    return ({**found, **dict.fromkeys(function.indices)},)


_run.defvjp(_forward, _backward)


def per_token(parameter: Array) -> Array:
    """A parameter [B, ...] of a formula, for tensors [B, T, ...]."""
    return parameter[:, None]


def head_sizes(sizes: Mapping[str, int]) -> str | None:
    """The limits of the kernels that have a head in neighbouring lanes."""
    if sizes["K"] in (16, 32, 64, 128, 256):
        return None
    return f"K = {sizes['K']}; the cuda kernels take 16, 32, 64, 128 or 256"
