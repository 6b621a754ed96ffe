"""The steps of training: a training step with what it changes, and an evaluation."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._training import copies
from rwkv_jax._training.accumulation import accumulated
from rwkv_jax._training.clocks import Start
from rwkv_jax._training.data import Batch
from rwkv_jax._training.devices import place
from rwkv_jax._training.language_model import Model, mean_loss
from rwkv_jax._training.optimizer import measured, updated
from rwkv_jax.models import rwkv7


class State(NamedTuple):
    """Everything that a training step changes.

    Attributes:
      params: the parameters.
      optimizer: the state of the optimizer.
      copies: the copies of `training.copies` that steps compute with, or None. Several devices have
        none: gradients are added up over devices, and those of copies are rounded.
    """

    params: rwkv7.Params
    optimizer: optax.OptState
    copies: Any


class Measures(NamedTuple):
    """What a step measures, each a float32 scalar: the mean loss before the step, in nats, the norm
    of its gradients before they are clipped, and its learning rate."""

    loss: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


def state_of(model: Model, params: rwkv7.Params, optimizer: optax.OptState) -> State:
    """The state with copies of the parameters."""
    made = copies.rounded(params, model.dtype) if model.mesh.size == 1 else None
    return State(params, optimizer, made)


def _initial(model: Model, optimizer: optax.GradientTransformation, params: Any) -> State:
    return state_of(model, params, optimizer.init(params))


def state_shapes(model: Model, optimizer: optax.GradientTransformation) -> State:
    """The shapes of a state, and where its arrays are on the mesh."""
    shapes = jax.eval_shape(functools.partial(_initial, model, optimizer), model.shapes())
    whole = NamedSharding(model.mesh, P())

    def is_params(x: Any) -> bool:
        return isinstance(x, rwkv7.Params)

    def places(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: model.shardings(x) if is_params(x) else whole, tree, is_leaf=is_params
        )

    # Moments are where their parameters are. Only one device has copies.
    copied = jax.tree.map(lambda _: whole, shapes.copies)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        State(places(shapes.params), places(shapes.optimizer), copied),
    )


def _places(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)


def initial_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    *,
    seed: int,
    params: rwkv7.Params | None = None,
) -> State:
    """The state before the first step, with `params`, or with initial parameters from the seed. It
    is made by one program, where `shapes` say."""
    initial = functools.partial(_initial, model, optimizer)
    places = _places(shapes)
    if params is not None:
        given = jax.tree.map(place, params, places.params)
        return jax.jit(initial, donate_argnums=0, out_shardings=places)(given)

    def new(seed: jax.Array) -> State:
        # The key that Flax NNX makes of a seed.
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return initial(rwkv7.init(key, model.config))

    return jax.jit(new, out_shardings=places)(np.uint32(seed))


def named(state: State) -> dict[str, Any]:
    """The arrays of a state that checkpoints have, by name."""
    return rwkv7.names({"model": state.params, "optimizer": state.optimizer})


def restored(model: Model, shapes: State, arrays: dict[str, jax.Array]) -> State:
    """The state of which `named` gives these arrays."""
    structure = jax.tree.structure((shapes.params, shapes.optimizer))
    params, optimizer = jax.tree.unflatten(structure, [arrays[name] for name in named(shapes)])
    return jax.jit(functools.partial(state_of, model), donate_argnums=(0, 1))(params, optimizer)


def train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    l2_wrap: float,
    parts: int = 1,
) -> Any:
    """The jitted training step: from a state and a batch to the next state, which is where `shapes`
    say, and what it measures. It computes so many parts of the batch one after another. The arrays
    of the given state are deleted."""

    def step(state: State, batch: Batch) -> tuple[State, Measures]:
        def loss(params: rwkv7.Params, batch: Batch) -> jax.Array:
            return mean_loss(model, params, batch, copies=state.copies, l2_wrap=l2_wrap)

        loss_before, gradients = accumulated(loss, state.params, batch, parts)
        params, moments = updated(optimizer, gradients, state.optimizer, state.params)
        return state_of(model, params, moments), Measures(loss_before, *measured(moments))

    return jax.jit(step, donate_argnums=0, out_shardings=(_places(shapes), None))


Step: TypeAlias = Callable[[State, Batch], tuple[State, Measures]]


def compiled_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    batch: Batch,
    l2_wrap: float,
    parts: int,
    start: Start,
) -> Future[Step]:
    """`train_step` for batches like `batch`, which a thread compiles."""
    traced = train_step(model, optimizer, shapes, l2_wrap, parts).trace(shapes, batch)
    start.part("trace")
    lowered = traced.lower()
    start.part("lower")
    pool = ThreadPoolExecutor(1)
    compiling = pool.submit(lowered.compile)
    pool.shutdown(wait=False)
    return compiling


def evaluation(model: Model, held_out: Batch, rows: int) -> Callable[[rwkv7.Params], float]:
    """A function of parameters that gives their mean loss of all of `held_out`, by one program that
    goes through batches of `rows` rows. Rows of zeros, which do not count, fill up the last one."""
    mask = held_out.mask
    if mask is None:
        mask = np.ones_like(held_out.tokens[:, 1:], bool)
    held_out = held_out._replace(mask=mask)
    rows = min(rows, len(mask) + -len(mask) % model.mesh.shape["data"])
    padding = (0, -len(mask) % rows), (0, 0)
    batches = jax.tree.map(lambda x: np.pad(x, padding).reshape(-1, rows, x.shape[1]), held_out)
    weights = batches.mask.sum((1, 2))
    placed = on_mesh(batches, model.mesh, None)

    @jax.jit
    def losses(params: rwkv7.Params, batches: Batch) -> jax.Array:
        return jax.lax.map(functools.partial(mean_loss, model, params), batches)

    return lambda params: float(np.average(losses(params, placed), weights=weights))


def on_mesh(batch: Batch, mesh: Mesh, *before: None) -> Batch:
    """The same batch, whose rows are distributed over the mesh. They are the first axis, or come
    after so many others as `before` has."""
    rows = NamedSharding(mesh, P(*before, "data"))
    return jax.tree.map(lambda x: place(x, rows), batch)
