"""Argument errors.

Every message names the operator and the argument, what was given and what is accepted. A wrong
shape or value raises ValueError, a wrong type or dtype TypeError. Nothing is cast.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPES = ("float32", "bfloat16", "float16")
STATE_DTYPE = "float32"


def array(op: str, name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{op}: {name} is a {type(x).__name__}; accepted is a JAX or numpy array")


def dtype(op: str, name: str, x: Any) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{op}: {name} is {x.dtype}; accepted are {', '.join(DTYPES)}")


def integers(op: str, name: str, x: Any) -> jax.Array:
    """`x` as a JAX array, which without 64-bit types would silently wrap larger numbers."""
    array(op, name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} is {x.dtype}; accepted are integers")
    if isinstance(x, np.ndarray) and x.size:
        held = jnp.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
        wrong = x.max() if x.max() > held.max else x.min()
        if not held.min <= wrong <= held.max:
            raise ValueError(
                f"{op}: {name} has {wrong}; accepted are integers from {held.min} to {held.max}"
            )
    return jnp.asarray(x)


def arrays(
    op: str, axes: Mapping[str, str], given: Mapping[str, Any], states: Iterable[str]
) -> dict[str, jax.Array]:
    """Check `given` against the axis letters in `axes` and return it as JAX arrays.

    Operands named in `states` are float32; all others share one dtype of `DTYPES`. Nothing is cast.
    """
    for name, x in given.items():
        array(op, name, x)
    shapes(op, axes, given, states)
    return {name: jnp.asarray(x) for name, x in given.items()}


def shapes(
    op: str, axes: Mapping[str, str], given: Mapping[str, Any], states: Iterable[str]
) -> None:
    """The checks of `arrays`, on anything that has a shape and a dtype."""
    for name in states:
        if name in given and given[name].dtype != STATE_DTYPE:
            raise TypeError(f"{op}: {name} is {given[name].dtype}; accepted is {STATE_DTYPE}")
    share_dtype(op, {name: x for name, x in given.items() if name not in states})
    share_sizes(op, axes, given)


def share_dtype(op: str, given: Mapping[str, Any]) -> None:
    accepted = f"accepted are {', '.join(DTYPES)}, the same for {', '.join(given)}"
    for name, x in given.items():
        if x.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} is {x.dtype}; {accepted}")
    if not given:
        return
    usual = Counter(str(x.dtype) for x in given.values()).most_common(1)[0][0]
    for name, x in given.items():
        if x.dtype != usual:
            raise TypeError(f"{op}: {name} is {x.dtype} where the others are {usual}; {accepted}")


def share_sizes(op: str, axes: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Check that an axis letter has the same size wherever it occurs."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, x in given.items():
        layout = f"[{', '.join(axes[name])}]"
        if x.ndim != len(axes[name]):
            raise ValueError(f"{op}: {name} has shape {x.shape}; accepted is {layout}")
        for letter, size in zip(axes[name], x.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{op}: {name} has shape {x.shape}, so {letter} = {size}, where "
                    f"{first[letter]} has {letter} = {sizes[letter]}; accepted is {layout} of "
                    "matching sizes"
                )
            first.setdefault(letter, name)
    for letter in "KV":
        if sizes.get(letter) == 0:
            raise ValueError(
                f"{op}: {first[letter]} has shape {given[first[letter]].shape}, so {letter} = 0; "
                "accepted are head sizes of at least 1"
            )


def sizes(axes: Mapping[str, str], arrays: Mapping[str, Any]) -> dict[str, int]:
    """The size of each axis letter of arrays with these axes."""
    found: dict[str, int] = {}
    for name, letters in axes.items():
        found |= zip(letters, arrays[name].shape, strict=True)
    return found


def symbolic(sizes: Mapping[str, Any], letters: str) -> str | None:
    """Which of these axes has no number as its size, as in an export with a symbolic shape."""
    which = (f"{x} = {sizes[x]}" for x in letters if not isinstance(sizes.get(x, 0), int))
    return next((f"{one} is symbolic" for one in which), None)


def choice(op: str, name: str, value: Any, accepted: Iterable[str | None]) -> Any:
    accepted = tuple(accepted)
    if value not in accepted:
        raise ValueError(
            f"{op}: {name} is {value!r}; accepted are {', '.join(map(repr, accepted))}"
        )
    return value


def number(what: str, name: str, given: Any, least: int, most: int | None = None) -> None:
    """Raise an error that begins with `what` unless `given` is an integer between two others."""
    accepted = f"an integer from {least} " + ("on" if most is None else f"to {most}")
    if not isinstance(given, int | np.integer) or isinstance(given, bool):
        raise TypeError(f"{what}: {name} is {given!r}; accepted is {accepted}")
    if given < least or (most is not None and given > most):
        raise ValueError(f"{what}: {name} is {given}; accepted is {accepted}")


def real(what: str, name: str, given: Any) -> float:
    """`given` as a float: a finite number, known while a call is traced."""
    if not isinstance(given, int | float | np.integer | np.floating) or isinstance(given, bool):
        raise TypeError(f"{what}: {name} is {given!r}; accepted is a number")
    if not np.isfinite(given):
        raise ValueError(f"{what}: {name} is {given!r}; accepted is a finite number")
    return float(given)


def precision_of(op: str, value: Any) -> lax.Precision:
    try:
        return lax.Precision.DEFAULT if value is None else lax.Precision(value)
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{op}: precision is {value!r}; accepted are None, 'default', 'high', 'highest' and "
            "jax.lax.Precision"
        ) from None
