"""What the layers Gated DeltaNet and Kimi Delta Attention share: parameters by the names of
checkpoints, the state, and the way from the projections through the operator."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Key

from rwkv_jax._operator import check
from rwkv_jax._operator.call import Arrays
from rwkv_jax._packing import segments
from rwkv_jax.layers.delta_gates import l2_norm
from rwkv_jax.layers.short_convolution import short_convolution

Params: TypeAlias = dict[str, Any]
"""Arrays in nested dictionaries: `params["out_proj"]["weight"]` is `out_proj.weight`."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shape of each parameter by its name."""


class DeltaNetState(NamedTuple):
    """The state of a layer: the last W - 1 tokens of the short convolution, in the order q, k, v of
    their channels D, and the state of the operator."""

    conv: Float[Array, "B before D"]
    recurrent: Float32[Array, "B H V K"]


# Configurations.


def check_sizes(op: str, config: Any, sizes: Sequence[str]) -> None:
    """Raise an error that names the configuration unless each of its sizes is a positive integer,
    and its `norm_eps` and `initializer_range` are numbers from 0 on."""
    for name in sizes:
        check.number(op, name, getattr(config, name), 1)
    for name in ("norm_eps", "initializer_range"):
        if check.real(op, name, getattr(config, name)) < 0:
            raise ValueError(f"{op}: {name} is {getattr(config, name)}; accepted is 0 or more")


def read_config(op: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The fields `names` of a `config.json`, by the names that they have here.

    Raises:
      ValueError: one is missing, or the activation is not SiLU.
    """
    if missing := [name for name in names.values() if name not in config]:
        raise ValueError(f"{op} has no {missing[0]}; accepted is one with {_and(names)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{op}: hidden_act is {config['hidden_act']!r}; accepted is 'silu'")
    return {own: config[name] for own, name in names.items()}


def _and(names: Mapping[str, str]) -> str:
    *most, last = names.values()
    return f"{', '.join(most)} and {last}"


# Parameters.


def initialised(
    key: Key[Array, ""],
    shapes: Shapes,
    deviation: float,
    others: Mapping[str, Callable[[Array, tuple[int, ...]], Array]],
) -> Params:
    """Parameters of float32: those of `others` by their functions, and normal ones."""

    def normal(key: Array, shape: tuple[int, ...]) -> Array:
        return deviation * jax.random.normal(key, shape, jnp.float32)

    keys = jax.random.split(key, len(shapes))
    return nested(
        {
            name: others.get(name, normal)(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
    )


def ones(key: Array, shape: tuple[int, ...]) -> Array:
    return jnp.ones(shape, jnp.float32)


def log_uniform(least: float, most: float) -> Callable[[Array, tuple[int, ...]], Array]:
    """The logarithm of numbers that are uniform between two others."""
    return lambda key, shape: jnp.log(jax.random.uniform(key, shape, minval=least, maxval=most))


def nested(tensors: Mapping[str, Any]) -> Params:
    """The tree of parameters whose paths are these names."""
    tree: Params = {}
    for name, x in tensors.items():
        *outer, last = name.split(".")
        functools.reduce(lambda level, part: level.setdefault(part, {}), outer, tree)[last] = x
    return tree


def from_tensors(
    op: str, shapes: Shapes, tensors: Mapping[str, Any], prefix: str, also: Shapes
) -> Params:
    """The parameters of the tensors whose names begin with `prefix`. A shape of `also` is accepted
    as well, for a tensor that checkpoints have in two shapes.

    Raises:
      TypeError: a tensor is no array, or has another dtype.
      ValueError: a tensor is missing, has another shape, or is none of the layer.
    """
    given = {x.removeprefix(prefix): tensors[x] for x in tensors if x.startswith(prefix)}
    for name, shape in shapes.items():
        if name not in given:
            raise ValueError(
                f"{op}: {prefix}{name} is missing; accepted is a tensor of shape {shape}"
            )
    for name, x in given.items():
        what = f"{prefix}{name}"
        if name not in shapes:
            raise ValueError(f"{op}: {what} is given; accepted are {', '.join(shapes)}")
        _check(op, what, x, shapes[name], also.get(name))
    return nested({name: jnp.asarray(given[name]) for name in shapes})


def by_name(op: str, shapes: Shapes, params: Any, also: Shapes) -> Arrays:
    """The parameters of a tree by their names, after the checks of `from_tensors`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    names = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
    if names.keys() != shapes.keys():
        raise ValueError(f"{op}: params are {', '.join(names)}; accepted are {', '.join(shapes)}")
    for name, x in names.items():
        _check(op, name, x, shapes[name], also.get(name))
    return {name: jnp.asarray(x) for name, x in names.items()}


def _check(
    op: str, what: str, x: Any, shape: tuple[int, ...], also: tuple[int, ...] | None
) -> None:
    check.array(op, what, x)
    check.dtype(op, what, x)
    if x.shape not in (shape, also):
        accepted = f"{shape}" if also is None else f"{shape} or {also}"
        raise ValueError(f"{op}: {what} has shape {x.shape}; accepted is {accepted}")


# The computation.


class Tokens(NamedTuple):
    """The input as sequences [B, T, C], with zeros in place of padding. A single token of each row
    is a sequence of one token."""

    x: Array
    segment_ids: Array | None
    single: bool

    def as_given(self, y: Array) -> Array:
        return y[:, 0] if self.single else y


def tokens(op: str, x: Any, width: int, segment_ids: Any) -> Tokens:
    check.array(op, "x", x)
    check.dtype(op, "x", x)
    if x.ndim not in (2, 3) or x.shape[-1] != width:
        raise ValueError(
            f"{op}: x has shape {x.shape}; accepted is [B, T, C] or [B, C] with C = {width}"
        )
    single = x.ndim == 2
    if segment_ids is not None:
        segment_ids = segments.checked(op, segment_ids, *x.shape[:-1])
        segment_ids = segment_ids[:, None] if single else segment_ids
    x = jnp.asarray(x)
    x = x[:, None] if single else x
    if segment_ids is not None:
        x = jnp.where((segment_ids != 0)[..., None], x, jnp.zeros_like(x))
    return Tokens(x, segment_ids, single)


def check_state(op: str, state: Any, conv: tuple[int, ...], recurrent: tuple[int, ...]) -> None:
    """Check a state against the shapes of its parts."""
    if state is None:
        return
    if not isinstance(state, DeltaNetState):
        raise TypeError(f"{op}: state is a {type(state).__name__}; accepted is a DeltaNetState")
    for name, x, axes, shape in (
        ("state.conv", state.conv, "[B, W - 1, D]", conv),
        ("state.recurrent", state.recurrent, "[B, H, V, K]", recurrent),
    ):
        check.array(op, name, x)
        check.dtype(op, name, x)
        if x.shape != shape:
            raise ValueError(f"{op}: {name} has shape {x.shape}; accepted is {axes} = {shape}")
    if state.recurrent.dtype != check.STATE_DTYPE:
        raise TypeError(
            f"{op}: state.recurrent is {state.recurrent.dtype}; accepted is {check.STATE_DTYPE}"
        )


def linear(weight: Array, x: Array) -> Array:
    """The product with a matrix [outputs, inputs], in the dtype of `x`."""
    return jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype))


def heads(x: Array, size: int) -> Array:
    """Channels [..., H K] as heads [..., H, K]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


class Projections(NamedTuple):
    """What belongs to q, k and v each: arrays [B, T, D] or filters [D, 1, W]."""

    q: Array
    k: Array
    v: Array


def delta_rule(
    sequence: Callable[..., tuple[Array, Array]],
    step: Callable[..., tuple[Array, Array]],
    tokens: Tokens,
    projected: Projections,
    filters: Projections,
    key_size: int,
    value_size: int,
    g: Array,
    beta: Array,
    state: DeltaNetState | None,
    implementation: str | None,
) -> tuple[Array, DeltaNetState]:
    """The short convolution of q, k and v, the normalisation of q and k, and the operator."""
    before: Sequence[Array | None] = (None, None, None)
    if state is not None:
        ends = np.cumsum([x.shape[-1] for x in projected])[:-1]
        before = jnp.split(state.conv, ends, axis=-1)
    convolved = [
        short_convolution(x, weight, x_before, segment_ids=tokens.segment_ids)
        for x, weight, x_before in zip(projected, filters, before, strict=True)
    ]
    (q, k, v), after = zip(*convolved, strict=True)
    inputs = {
        "q": l2_norm(heads(q, key_size)),
        "k": l2_norm(heads(k, key_size)),
        "v": heads(v, value_size),
        "g": g,
        "beta": beta,
    }
    recurrent = None if state is None else state.recurrent
    if tokens.single:
        inputs = {name: x[:, 0] for name, x in inputs.items()}
        if recurrent is None:
            # Distributed over devices as `v` and `k` are.
            recurrent = jnp.zeros_like(inputs["v"], jnp.float32)[..., None]
            recurrent = jnp.broadcast_to(recurrent, (*recurrent.shape[:-1], key_size))
        active = None if tokens.segment_ids is None else tokens.segment_ids[:, 0] != 0
        y, recurrent = step(**inputs, state=recurrent, active=active, implementation=implementation)
        y = y[:, None]
    else:
        y, recurrent = sequence(
            **inputs,
            initial_state=recurrent,
            segment_ids=tokens.segment_ids,
            implementation=implementation,
        )
    return y, DeltaNetState(jnp.concatenate(after, axis=-1), recurrent)
