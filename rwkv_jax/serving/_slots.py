"""The slots on the device, and the programs that change them.

A slot is a row of a `Session`, with settings of its own. Every program has a fixed shape, and takes
the numbers of slots as data.
"""

import functools
import math
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Int32

from rwkv_jax._operator.partition import axis_names
from rwkv_jax._typing import Operand
from rwkv_jax.generation import _decoding, _prefill
from rwkv_jax.generation._decoding import Controls
from rwkv_jax.generation._session import Model, Session, started
from rwkv_jax.models import _parameters
from rwkv_jax.models._placement import MeshAxes
from rwkv_jax.models._stacking import block_axes

Number: TypeAlias = Int32[Array, ""] | np.int32
Numbers: TypeAlias = Int32[Operand, " B"]

_WHOLE = ("shift", "ffn")
"""The last names of the arrays of a state that have no heads."""


Tree = TypeVar("Tree")


class Placement(NamedTuple):
    """The slots over a mesh: rows along `data`, and heads and the vocabulary along `model`."""

    mesh: Mesh
    data: MeshAxes
    model: MeshAxes

    def shardings(self, tree: Tree) -> Tree:
        """The sharding of each array of rows."""
        devices = devices_along(self.mesh, self.model)

        def sharding(path: KeyPath, x: Array | jax.ShapeDtypeStruct) -> NamedSharding:
            spec = [None] * block_axes(path) + [self.data]
            whole = _parameters.name(path).endswith(_WHOLE)
            if not whole and x.ndim > len(spec) and x.shape[len(spec)] % devices == 0:
                spec.append(self.model)
            # As compiled programs give it back: another notation would be another sharding.
            while spec and spec[-1] is None:
                spec.pop()
            return NamedSharding(self.mesh, PartitionSpec(*spec))

        return jax.tree_util.tree_map_with_path(sharding, tree)


class Slots(NamedTuple):
    """A session and the settings of each slot [P]."""

    session: Session
    controls: Controls


class Start(NamedTuple):
    """What a sequence starts from: a state of one row and how many tokens it has read, and the
    settings of one row."""

    state: Any
    position: np.int32
    seed: np.int32
    controls: Controls


def empty(
    model: Model, params: Any, size: int, controls: Controls, placement: Placement | None
) -> Slots:
    """Slots that no sequence has used, with `controls` of a row in each of them."""
    rows = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), size, axis=0), controls)
    slots = Slots(started(model, params, size), rows)
    return placed(slots, placement)


def placed(tree: Tree, placement: Placement | None, *, slots: bool = True) -> Tree:
    """The arrays of all slots, or of one row, where they have to be after every program, so that no
    program is compiled for another placement."""
    if placement is None:
        return tree
    placement = placement if slots else placement._replace(data=None)
    return jax.lax.with_sharding_constraint(tree, placement.shardings(tree))


@functools.partial(jax.jit, static_argnames="placement", donate_argnames="slots")
def start(slots: Slots, slot: Number, begin: Start, placement: Placement | None) -> Slots:
    """A sequence takes a slot. Logits and penalties are those before until it reads a prefill
    chunk, which replaces them."""
    session, row = slots.session, jnp.asarray(slot)[None]
    after = Slots(
        session._replace(
            state=_put(session.state, begin.state, row),
            seeds=session.seeds.at[slot].set(begin.seed),
            positions=session.positions.at[slot].set(begin.position),
        ),
        _put(slots.controls, begin.controls, row),
    )
    return placed(after, placement)


@functools.partial(jax.jit, static_argnames=("model", "placement"), donate_argnames="slots")
def read(
    model: Model,
    params: Any,
    slots: Slots,
    rows: Numbers,
    tokens: Int32[Operand, "B T"],
    lengths: Numbers,
    placement: Placement | None,
) -> Slots:
    """Each of some slots, `rows`, reads the first `lengths` tokens of a row of `tokens`. A number
    that no slot has marks a row with nothing to read."""
    before = jax.tree_util.tree_map_with_path(functools.partial(_at, rows), slots.session)
    after = _prefill.read_prefill_chunk(model, params, before, tokens, lengths)
    return placed(slots._replace(session=_put(slots.session, after, rows)), placement)


@functools.partial(jax.jit, static_argnames=("model", "placement"), donate_argnames="slots")
def decode(
    model: Model,
    params: Any,
    slots: Slots,
    left: Numbers,
    steps: Number,
    min_active_rows: Number,
    placement: Placement | None,
) -> tuple[Slots, Array, Array]:
    """As `generation._decoding.decode`, for all slots.

    No update is deferred: when a state is updated would depend on the other requests, and so
    would the rounding of logits."""
    session, tokens, count, _ = _decoding.decode(
        *(model, params, slots.session, slots.controls, left, steps, min_active_rows),
        defers=False,
    )
    return placed(slots._replace(session=session), placement), tokens, count


@functools.partial(jax.jit, static_argnames="placement")
def state_of(slots: Slots, slot: Number, placement: Placement | None) -> Any:
    """A copy of the state of a slot, with one row."""
    at = functools.partial(_at, jnp.asarray(slot)[None])
    state = jax.tree_util.tree_map_with_path(at, slots.session.state)
    return placed(state, placement, slots=False)


def devices_along(mesh: Mesh, axes: MeshAxes) -> int:
    """The number of parts into which an axis is split."""
    return math.prod(mesh.shape[name] for name in axis_names(axes))


def _at(rows: Array | np.ndarray, path: KeyPath, x: Array) -> Array:
    return jnp.take(x, rows, axis=block_axes(path), mode="clip")


def _put(tree: Tree, new: Tree, rows: Array | np.ndarray) -> Tree:
    """The tree with other rows, in place where it is donated."""

    def put(path: KeyPath, x: Array, new: Array) -> Array:
        if block_axes(path):
            return x.at[:, rows].set(new, mode="drop")
        return x.at[rows].set(new, mode="drop")

    return jax.tree_util.tree_map_with_path(put, tree, new)
