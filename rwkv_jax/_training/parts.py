"""What of a model is trained, and what stays as it is."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import PyTree

from rwkv_jax import finetuning, models

ALL, LORA, STATES = "all", "lora", "states"
"""What --train names, beside patterns of parameters."""

TRAINED = "trained"


class Parts(NamedTuple):
    """A model with what is beside its parameters. Where it is taken apart by `finetuning.split`,
    one tree has what is trained and another one what is frozen.

    Attributes:
      params: the parameters, a `Params` of a generation.
      adapter: a `finetuning.Adapter`, or None.
      states: states before the first token, as `finetuning.initial_states` has them, or None.
    """

    params: Any
    adapter: Any = None
    states: Any = None

    def effective(self, key: Array | None = None) -> Any:
        """The parameters that the functions of the model take. `key` is that of dropout."""
        if self.adapter is None:
            return self.params
        return finetuning.adapted(self.params, self.adapter, key=key)

    def initial_state(self, rows: int, dtype: str) -> Any:
        """The state before the first token of so many rows, or None for an empty one."""
        if self.states is None:
            return None
        return finetuning.state_of(self.params, self.states, rows, dtype=dtype)


def targets(train: str) -> list[str]:
    """What --train asks for."""
    return [x.strip() for x in train.split(",")]


def patterns(train: str) -> list[str]:
    """The patterns of parameters among the targets."""
    found = [x for x in targets(train) if x not in (LORA, STATES)]
    return ["*"] if ALL in found else found


def labels(parts: Parts, train: str) -> Parts:
    """Which leaves are trained, for `finetuning.split`.

    Raises:
      ValueError: a pattern is that of no parameter, or of one that is quantised.
    """
    groups = {TRAINED: found} if (found := patterns(train)) else {}
    params = finetuning.labels(parts.params, groups)
    beside = jax.tree.map(lambda _: TRAINED, (parts.adapter, parts.states))
    return Parts(params, *beside)


def load(args: argparse.Namespace, mesh: Mesh) -> tuple[Parts, Parts]:
    """The model of --model with what is trained beside it, and the labels of its leaves. What is
    trained is float32. All other parameters are as --base says, or as the file has them.

    Raises:
      OSError, ValueError: a file cannot be read, or does not fit the model.
    """
    places = {"mesh": mesh, "data": "data", "model": "model"} if mesh.size > 1 else {}
    is_int8 = models.inspect(args.model).params.head.scale is not None
    if is_int8 and args.base not in (None, "int8"):
        raise ValueError(f"--base is {args.base} where {args.model} is int8; accepted is int8")
    quantize, trains = args.base == "int8" and not is_int8, patterns(args.train)
    if (quantize or is_int8) and trains:
        raise ValueError(
            f"--train is {args.train} where the base is int8; accepted are lora and states"
        )
    # What is trained is not rounded to the dtype of what is not.
    dtype = None if args.base == "int8" or trains else args.base
    params = models.load(args.model, dtype=dtype, quantize=quantize, **places).params
    named = targets(args.train)
    adapter = _adapter(args, params) if LORA in named else None
    states = _states(args, params) if STATES in named else None
    parts = Parts(params, adapter, states)
    chosen = labels(parts, args.train)

    def in_dtype(x: Array, label: str) -> Array:
        if label == TRAINED:
            return x.astype(jnp.float32)
        keeps = args.base in (None, "int8") or not jnp.issubdtype(x.dtype, jnp.floating)
        return x if keeps else x.astype(args.base)

    return parts._replace(params=jax.tree.map(in_dtype, params, chosen.params)), chosen


def _adapter(args: argparse.Namespace, params: PyTree[Array]) -> finetuning.Adapter:
    if args.adapter is None:
        return finetuning.init_adapter(
            jax.random.key(args.seed),
            params,
            rank=args.lora_rank,
            alpha=float(args.lora_alpha or args.lora_rank),
            targets=_split(args.lora_targets),
            rslora=args.rslora,
            dropout=args.lora_dropout,
            dora=args.dora,
        )
    adapter = finetuning.load_adapter(args.adapter, params)
    return dataclasses.replace(adapter, dropout=args.lora_dropout)


def _states(args: argparse.Namespace, params: PyTree[Array]) -> dict[str, Array]:
    state = None
    if args.initial_state is not None:
        state = models.load_state(args.initial_state, params)
    return finetuning.initial_states(params, state)


def _split(given: str) -> Sequence[str]:
    return [x.strip() for x in given.split(",")]
