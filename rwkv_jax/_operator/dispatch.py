"""The way of a computation from its operands to the implementation that runs it.

In the order in which they apply, below the derivative that each kind of computation has:

1. `run`: the refusal of further derivatives, the rule for `vmap`, then that for meshes
   (`partition.py`). Operands become flat lists of arrays there, because both rules know arrays by
   the letters of their axes alone.
2. the choice of an implementation for each platform, among those that can run the call.
3. `at_lowering`: where the program is lowered, its platform picks one of these choices.
"""

import abc
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, core, lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from rwkv_jax._native import library
from rwkv_jax._operator.partition import (
    SHARDED,
    Shards,
    explicit_mesh,
    partitioned,
    vary_alike,
)

OTHER = "other"

ORDER = {
    "cpu": ("ffi", "xla"),
    "cuda": ("fused", "ffi", "pallas", "xla"),
    "tpu": ("xla",),
    OTHER: ("xla",),
}
"""The implementations that `None` tries on each platform, first to last: pallas only where it was
measured to be faster than xla. The reference of an operator saves no states for a backward pass."""

PLATFORMS = tuple(platform for platform in ORDER if platform != OTHER)
"""Platforms with implementations of their own; all others share what runs on `OTHER`."""


def platform_of(platform: str) -> str:
    """The name of a platform in `ORDER`, from that of a JAX backend or device."""
    return {"gpu": "cuda"}.get(platform, platform)


Pass: TypeAlias = Literal["forward", "backward", "step", "transition", "reverse_transition"]


class Computation(abc.ABC):
    """What has implementations to choose from: an operator, a layer function, the step of a block,
    a loss, a product of rows.

    As it stands here, it has native kernels for one platform, which take some calls, and a formula
    in plain JAX, which takes all. It may have several passes.
    """

    name: str
    """The public function, of which messages speak."""

    implementations: Any = ("ffi", "xla", "reference")
    """Their names, or what is known of each by its name."""

    left_to_jax: Collection[str] = ("xla", "reference")
    """The implementations that, asked for by name, have no rules: JAX maps and differentiates them,
    and the compiler partitions them."""

    vmap: ClassVar[Literal["fold", "in turn", "formula"]] = "fold"
    """What `vmap` does: fold the mapped axis into B, run one call after another, or map the
    formula."""

    mesh: ClassVar[Literal["all", "kernels", "none"]] = "all"
    """What each device of a mesh runs on its own part: every implementation; the kernels, where the
    compiler partitions the formula as it sees fit; or nothing, since operands are on no mesh."""

    sharded: str = SHARDED
    """The letters of axes along which arrays stay distributed on a mesh."""

    kernels_on: ClassVar[str] = "cuda"
    """The platform with native kernels."""

    only_alone: ClassVar[bool] = False
    """Whether kernels that were not asked for run only in a program for a single device."""

    varies_alike: ClassVar[bool] = False
    """Whether all operands on a device of an Explicit mesh vary over the same axes of the mesh."""

    higher_derivatives: ClassVar[str] = "implementation='reference' has derivatives of any order"
    """What has the derivatives that are not first ones in reverse mode."""

    def title(self, name: Pass) -> str:
        """The public function that a pass belongs to."""
        return self.name

    @abc.abstractmethod
    def axes(self, name: Pass, options: Any, operands: Any) -> tuple[Any, Any]:
        """The axes of the operands and of the results of a pass, as trees like theirs."""

    def why_no_kernel(self, name: Pass, options: Any, operands: Any) -> str | None:
        """Why the kernels do not take a call, or None."""
        return None

    def kernel(self, name: Pass, options: Any, operands: Any) -> Any:
        """The results of a pass by native kernels."""
        raise NotImplementedError

    def formula(self, name: Pass, options: Any, operands: Any) -> Any:
        """The results of a pass in plain JAX."""
        raise NotImplementedError

    def why_not(
        self, name: Pass, choice: str, options: Any, platform: str, operands: Any
    ) -> str | None:
        """Why the implementation `choice` cannot run a call on a platform, or None."""
        if choice in self.left_to_jax:
            return None
        if platform != self.kernels_on:
            where = {"cuda": "CUDA GPUs", "cpu": "CPUs"}[self.kernels_on]
            return f"{self.name} has native kernels for {where}"
        return self.why_no_kernel(name, options, operands) or library.why_not(platform)

    def implementation(
        self, name: Pass, choice: str, options: Any, platform: str, shards: Shards
    ) -> Callable[[Any], Any]:
        """`results(operands)` of a pass by the implementation `choice`, on a device that has parts
        of the operands along the mesh axes `shards`."""
        compute = self.formula if choice in self.left_to_jax else self.kernel
        return functools.partial(compute, name, options)


# 1. The rules for vmap and for meshes.


def compute(computation: Computation, name: Pass, options: Any, operands: Any) -> Any:
    """The results of a pass. `options` has the name of the only `implementation` to use, or None;
    the platform that the program is lowered for then decides."""
    operand_axes, result_axes = computation.axes(name, options, operands)
    operands, structure = jax.tree.flatten(operands)
    letters, found = jax.tree.leaves(operand_axes), jax.tree.leaves(result_axes)
    has_rules = options.implementation not in computation.left_to_jax

    def one_device(shards: Shards, *parts: Array) -> tuple[Array, ...]:
        parts = vary_alike(*parts) if computation.varies_alike else parts
        given = jax.tree.unflatten(structure, parts)
        branches = _branches(computation, name, options, shards, given)
        alone = computation.only_alone and options.implementation is None
        return tuple(jax.tree.leaves(at_lowering(branches, given, only_alone=alone)))

    def formula(*operands: Array) -> tuple[Array, ...]:
        compute = computation.implementation(name, "xla", options, OTHER, {})
        return tuple(jax.tree.leaves(compute(jax.tree.unflatten(structure, operands))))

    call = functools.partial(one_device, {})
    if computation.mesh != "none":
        rule = has_rules and computation.mesh == "all"
        sharded, title = computation.sharded, computation.title(name)
        call = partitioned(
            title, one_device, named(operand_axes), found, sharded=sharded, rule=rule
        )
    if has_rules and computation.vmap == "fold":
        call = _folded(call, letters, found)
    elif has_rules:
        call = with_vmap_rule(call, formula if computation.vmap == "formula" else None)
    if has_rules:
        call = _not_differentiated(computation, name, call)
    return jax.tree.unflatten(jax.tree.structure(result_axes), call(*operands))


run = jax.jit(compute, static_argnums=(0, 1, 2))
"""`compute`, which is traced and compiled once for equal calls."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def run_with_jvp(computation: Computation, name: Pass, options: Any, operands: Any) -> Any:
    """`run`, with the derivative of the formula."""
    return run(computation, name, options, operands)


@run_with_jvp.defjvp
def _(
    computation: Computation, name: Pass, options: Any, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    results = run_with_jvp(computation, name, options, *primals)
    formula = functools.partial(computation.formula, name, options)
    return results, jax.jvp(formula, primals, tangents)[1]


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of operands, each with the name under which messages speak of it."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [(jax.tree_util.keystr(path[-1:], simple=True), leaf) for path, leaf in leaves]


FlatFn: TypeAlias = Callable[..., tuple[Array, ...]]


def _not_differentiated(computation: Computation, name: Pass, fn: FlatFn) -> FlatFn:
    """`fn` with an error as its derivative. Each kind of computation has its first derivatives
    around `run`, so that JAX differentiates `fn` for those of a higher order alone."""
    call = jax.custom_jvp(fn)

    @call.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise NotImplementedError(
            f"{computation.title(name)}: a second derivative is asked for; accepted are first "
            f"derivatives in reverse mode; {computation.higher_derivatives}"
        )

    return call


def _folded(fn: FlatFn, operand_axes: Sequence[str], result_axes: Sequence[str]) -> FlatFn:
    """`fn` with a rule for `vmap` that folds the mapped axis into B. Operands that are not mapped
    are broadcast."""
    call = custom_vmap(fn)

    def fold(x: Array, axes: str, size: int, mapped: bool) -> Array:
        batch = axes.index("B")
        # After B, not before it: a batch sharded over devices stays where it is.
        x = jnp.moveaxis(x, 0, batch + 1) if mapped else jnp.expand_dims(x, batch + 1)
        shape = (*x.shape[: batch + 1], size, *x.shape[batch + 2 :])
        rows = shape[batch] * size
        return jnp.broadcast_to(x, shape).reshape(*shape[:batch], rows, *shape[batch + 2 :])

    def unfold(x: Array, axes: str, size: int) -> Array:
        batch = axes.index("B")
        shape = (*x.shape[:batch], x.shape[batch] // size, size, *x.shape[batch + 1 :])
        return jnp.moveaxis(x.reshape(shape), batch + 1, 0)

    @call.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Array) -> Any:
        if size == 0:
            operands = tuple(
                jnp.zeros_like(x, shape=(1, *x.shape[1:])) if m else x
                for x, m in zip(operands, mapped, strict=True)
            )
        one = max(size, 1)
        folded = [
            fold(x, axes, one, m) for x, axes, m in zip(operands, operand_axes, mapped, strict=True)
        ]
        results = zip(call(*folded), result_axes, strict=True)
        return tuple(unfold(x, axes, one)[:size] for x, axes in results), (True,) * len(result_axes)

    return call


def with_vmap_rule(fn: FlatFn, formula: FlatFn | None) -> FlatFn:
    """`fn` with a rule for `vmap` that maps the formula or, without one, runs one call after
    another."""
    call = custom_vmap(fn)

    @call.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Array) -> Any:
        del size
        if formula is not None:
            results = jax.vmap(formula, [0 if m else None for m in mapped])(*operands)
            return results, (True,) * len(results)

        def one(own: Sequence[Array]) -> tuple[Array, ...]:
            of_one = iter(own)
            mine = (next(of_one) if m else x for x, m in zip(operands, mapped, strict=True))
            return with_vmap_rule(fn, None)(*mine)

        results = lax.map(one, [x for x, m in zip(operands, mapped, strict=True) if m])
        return results, (True,) * len(results)

    return call


# 2. The choice of an implementation for each platform.


Branches: TypeAlias = Mapping[str | None, Callable[..., Any] | str]
"""What a program runs where it is lowered for a platform, OTHER or None being any other one; or the
reason why nothing can run there."""


def _branches(
    computation: Computation, name: Pass, options: Any, shards: Shards, operands: Any
) -> Branches:
    wanted = options.implementation
    choices: dict[str, str | None] = {}
    reasons: dict[str, str] = {}
    for platform, order in ORDER.items():
        names = [wanted] if wanted else [x for x in order if x in computation.implementations]
        whys = {x: computation.why_not(name, x, options, platform, operands) for x in names}
        choices[platform] = next((x for x, reason in whys.items() if reason is None), None)
        reasons[platform] = "; ".join(dict.fromkeys(reason for reason in whys.values() if reason))
    title = computation.title(name)

    def refusal(platforms: Iterable[str]) -> str:
        """Each reason with the platforms that have it."""
        where: dict[str, list[str]] = {}
        for platform in platforms:
            name = "others" if platform == OTHER else platform
            where.setdefault(reasons[platform], []).append(name)
        parts = [f"on {', '.join(names)}: {reason}" for reason, names in where.items()]
        sizes = {type(n) for x in jax.tree.leaves(operands) for n in x.shape}
        if sizes - {int} and "reference" in computation.implementations:
            parts.append("implementation='reference' takes symbolic sizes")
        which = f"implementation {wanted!r} cannot" if wanted else "no implementation can"
        return f"{title}: {which} run this call {'; '.join(parts)}"

    if not any(choices.values()):
        raise NotImplementedError(refusal(ORDER))

    branches: dict[str | None, Any] = {}
    for platform, choice in choices.items():
        where = None if platform == OTHER else platform
        if choice is None:
            branches[where] = refusal([platform])
        elif where is None or choice != choices[OTHER]:
            compute = computation.implementation(name, choice, options, platform, shards)
            if computation.mesh == "kernels" and choice not in computation.left_to_jax:
                compute = _by_each_device(computation, name, options, compute, operands)
            branches[where] = compute
    return branches


def _by_each_device(
    computation: Computation, name: Pass, options: Any, compute: Callable[[Any], Any], operands: Any
) -> Callable[[Any], Any]:
    """`compute` with a rule for meshes of its own."""
    operand_axes, result_axes = computation.axes(name, options, operands)
    structure = jax.tree.structure(operands)

    def one_device(shards: Shards, *parts: Array) -> tuple[Array, ...]:
        del shards
        return tuple(jax.tree.leaves(compute(jax.tree.unflatten(structure, parts))))

    call = partitioned(
        *(computation.title(name), one_device, named(operand_axes), jax.tree.leaves(result_axes)),
        sharded=computation.sharded,
    )
    return lambda operands: call(*jax.tree.leaves(operands))


# 3. The choice of a branch where the program is lowered.


def at_lowering(branches: Branches, *operands: Any, only_alone: bool = False) -> Any:
    """The results of the branch for the platform that the program is lowered for. With `only_alone`
    all branches but that of None are for programs for a single device. Unlike those of
    `jax.lax.platform_dependent`, branches are lowered for no other platform, also where a program
    is exported for several. JAX does not differentiate or map this, and branches take all traced
    arrays as operands."""
    only, *others = branches.values()
    if not others and not isinstance(only, str):
        return only(*operands)
    leaves = jax.tree.leaves(operands)
    if not any(isinstance(x, core.Tracer) for x in leaves):
        return _suitable_for(branches, leaves, only_alone)(*operands)
    jaxprs: list[Any] = []
    numbers: list[tuple[str | None, int | str]] = []
    shape = None
    for platform, compute in branches.items():
        if isinstance(compute, str):
            numbers.append((platform, compute))
            continue
        jaxpr, shape = jax.make_jaxpr(compute, return_shape=True)(*operands)
        numbers.append((platform, len(jaxprs)))
        jaxprs.append(jaxpr)
    results = _choice.bind(
        *leaves, jaxprs=tuple(jaxprs), branches=tuple(numbers), only_alone=only_alone
    )
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def in_program_of_one_device(
    alone: Callable[..., Array], otherwise: Callable[..., Array], *operands: Array
) -> Array:
    """`alone(*operands)` in a program for a single device, and `otherwise(*operands)`, which is the
    same, in one that the compiler distributes, on an Explicit mesh, or under `vmap`."""
    if explicit_mesh(operands):
        return otherwise(*operands)
    branches = {OTHER: alone, None: otherwise}

    def chosen(*operands: Array) -> tuple[Array, ...]:
        return (at_lowering(branches, *operands, only_alone=True),)

    def formula(*operands: Array) -> tuple[Array, ...]:
        return (otherwise(*operands),)

    return with_vmap_rule(chosen, formula)(*operands)[0]


LOWERED_AS: dict[str, str] = {}
"""For tests: the platform whose branches are taken in programs for another one, by the other's
name. With "cuda" for "cpu", an emulation runs the CUDA kernels."""


def _suitable(branches: Mapping[str | None, Any], platform: str, distributed: bool) -> Any:
    """The branch for a platform; in a distributed program the one without a platform."""
    places = () if distributed else (LOWERED_AS.get(platform, platform), OTHER)
    found = branches[next((x for x in places if x in branches), None)]
    if isinstance(found, str):
        raise NotImplementedError(found)
    return found


_choice = Primitive("rwkv_jax_choice")
"""Its parameters are jaxprs and, for each platform with a branch, the number of its jaxpr or the
reason why there is none."""

_choice.multiple_results = True


@_choice.def_impl
def _(*operands: Array, jaxprs: Sequence[Any], branches: Any, only_alone: bool) -> list[Array]:
    """Without `jit`, from where JAX has traced a call to evaluate it, as for `vmap`."""
    number = _suitable_for(dict(branches), operands, only_alone)
    return jaxpr_as_fun(jaxprs[number])(*operands)


def _suitable_for(branches: Mapping[str | None, Any], operands: Any, only_alone: bool) -> Any:
    """The branch for operands that are evaluated where they are."""
    devices = {d for x in operands if isinstance(x, Array) for d in x.sharding.device_set}
    platform = next((d.platform for d in devices), jax.default_backend())
    return _suitable(branches, platform_of(platform), only_alone and len(devices) > 1)


@_choice.def_abstract_eval
def _types(*_: Any, jaxprs: Sequence[Any], **__: Any) -> list[Any]:
    return list(jaxprs[0].out_avals)


def _lower(
    platform: str, ctx: Any, *values: Any, jaxprs: Sequence[Any], branches: Any, only_alone: bool
) -> Any:
    distributed = only_alone and _devices(ctx) > 1
    compute = jaxpr_as_fun(jaxprs[_suitable(dict(branches), platform, distributed)])
    return mlir.lower_fun(compute, multiple_results=True)(ctx, *values)


def _devices(ctx: Any) -> int:
    """The devices over which the compiler distributes the program that is being lowered."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return getattr(context, "num_devices", 1) or 1
    return 1 if set(context.manual_axes) == set(mesh.axis_names) else mesh.size


mlir.register_lowering(_choice, functools.partial(_lower, OTHER))
for _platform in PLATFORMS:
    mlir.register_lowering(_choice, functools.partial(_lower, _platform), platform=_platform)
