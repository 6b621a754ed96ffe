"""The arguments of a loss, checked: the messages are those of `_operator.check`."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator import check
from rwkv_jax._operator.partition import axis_names
from rwkv_jax.losses._derivative import Operands
from rwkv_jax.losses._options import Axis, Options


def operands(op: str, hidden_states: Any, weight: Any, targets: Any, mask: Any) -> Operands:
    """The arrays of a call. Without a mask all tokens count."""
    given = {"hidden_states": hidden_states, "weight": weight, "targets": targets}
    given |= {} if mask is None else {"mask": mask}
    for name, x in given.items():
        check.array(op, name, x)
    for name in ("hidden_states", "weight"):
        check.dtype(op, name, given[name])
    targets = check.integers(op, "targets", targets)
    if mask is not None and mask.dtype not in (bool, jnp.float32):
        raise TypeError(f"{op}: mask is {mask.dtype}; accepted are bool and float32")
    if hidden_states.ndim == 0:
        raise ValueError(f"{op}: hidden_states has shape (); accepted is [..., C]")
    if weight.ndim != 2 or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: weight has shape {weight.shape}; accepted is [vocabulary, C] with a vocabulary "
            "of at least 1"
        )
    if weight.shape[1] != hidden_states.shape[-1]:
        raise ValueError(
            f"{op}: weight has shape {weight.shape}, so C = {weight.shape[1]}, where hidden_states "
            f"has C = {hidden_states.shape[-1]}; accepted is [vocabulary, C] of matching sizes"
        )
    for name in ("targets", "mask"):
        if name in given and given[name].shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"{op}: {name} has shape {given[name].shape}; accepted is that of "
                f"hidden_states without C, {hidden_states.shape[:-1]}"
            )
    if mask is None:
        mask = jnp.ones(targets.shape, bool)
    return Operands(*map(jnp.asarray, (hidden_states, weight, targets, mask)))


def count(mask: Any, tokens: int) -> Array:
    """What the mean over `tokens` tokens divides by: how many of them count, or the sum of their
    weights; 1 if that is 0."""
    found = jnp.asarray(tokens) if mask is None else jnp.sum(jax.lax.stop_gradient(mask))
    return jnp.where(found > 0, found, 1).astype(jnp.float32)


def options(
    op: str, *, z_loss: Any, l2_wrap: Any, soft_cap: Any, chunk_size: Any, precision: Any
) -> Options:
    for name, value in {"z_loss": z_loss, "l2_wrap": l2_wrap}.items():
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"{op}: {name} is {value!r}; accepted is a number of at least 0")
    if soft_cap is not None and (not _is_number(soft_cap) or not 0 < soft_cap < math.inf):
        raise ValueError(f"{op}: soft_cap is {soft_cap!r}; accepted are None and a number above 0")
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(
            f"{op}: chunk_size is {chunk_size!r}; accepted are None and an integer of at least 1"
        )
    return Options(
        z_loss=float(z_loss),
        l2_wrap=float(l2_wrap),
        soft_cap=None if soft_cap is None else float(soft_cap),
        precision=None if precision is None else check.precision_of(op, precision),
        chunk_size=chunk_size,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def axis(op: str, value: Any) -> Axis:
    """The mesh axes of the vocabulary."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    names = axis_names(value) if isinstance(value, str | tuple) else ()
    if value is None or (names and all(name in manual for name in names)):
        return value
    here = ", ".join(map(repr, manual)) or "none here"
    raise ValueError(
        f"{op}: axis_name is {value!r}; accepted are None and mesh axes of the shard_map around "
        f"the call: {here}"
    )
