"""The steps of training: a training step with what it changes, and an evaluation."""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import finetuning
from rwkv_jax._training import copies
from rwkv_jax._training.accumulation import accumulated
from rwkv_jax._training.clocks import Start
from rwkv_jax._training.data import Batch
from rwkv_jax._training.devices import place
from rwkv_jax._training.language_model import Model, mean_loss
from rwkv_jax._training.optimizer import measured, updated
from rwkv_jax._training.parts import Parts
from rwkv_jax.models import rwkv7

T = TypeVar("T")


class State(NamedTuple):
    """Everything that a training step computes with, but for the batch.

    Attributes:
      params: what is trained.
      optimizer: the state of the optimizer.
      copies: the copies of `_training.copies` that steps compute with, and that devices exchange;
        None for parts of a model on several devices, and for other generations than RWKV-7.
      frozen: what no step changes. A step gives back the arrays that it gets.
    """

    params: Parts
    optimizer: optax.OptState
    copies: Any
    frozen: Parts


class Measures(NamedTuple):
    """What a step measures, each a float32 scalar: the mean loss before the step, in nats, the norm
    of its gradients before they are clipped, and its learning rate."""

    loss: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


def state_of(model: Model, params: Parts, optimizer: optax.OptState, frozen: Parts) -> State:
    """The state with copies of the parameters that are trained."""
    made = None
    if model.module is rwkv7 and (model.mesh.size == 1 or model.exchanges):
        made = copies.rounded(params, model.dtype)
    return State(params, optimizer, made, frozen)


def _initial(model: Model, optimizer: optax.GradientTransformation, parts: Parts) -> State:
    params, frozen = model.split(parts)
    return state_of(model, params, optimizer.init(params), frozen)


def state_shapes(model: Model, optimizer: optax.GradientTransformation) -> State:
    """The shapes of a state, and where its arrays are on the mesh."""
    shapes = jax.eval_shape(functools.partial(_initial, model, optimizer), model.shapes)
    whole = NamedSharding(model.mesh, P())

    def is_parts(x: Any) -> bool:
        return isinstance(x, Parts)

    def places(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: model.shardings(x) if is_parts(x) else whole, tree, is_leaf=is_parts
        )

    # Moments and copies are where their parameters are.
    of_copies = copies.places(shapes.copies, model.shardings(shapes.params))
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        State(places(shapes.params), places(shapes.optimizer), of_copies, places(shapes.frozen)),
    )


def _places(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)


def _placed(parts: Parts, shapes: Parts) -> Parts:
    """The arrays where the shapes say, without a copy of those that are there already."""

    def placed(x: jax.Array, to: Any) -> jax.Array:
        there = x.sharding.is_equivalent_to(to.sharding, x.ndim)
        return jax.device_put(x, to.sharding) if there else place(x, to.sharding)

    return jax.tree.map(placed, parts, shapes)


def initial_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    *,
    seed: int,
    parts: Parts | None = None,
) -> State:
    """The state before the first step, with `parts`, or with initial parameters from the seed,
    where `shapes` say. The arrays of `parts` are deleted or those of the state."""
    if parts is None:
        return new_state(model, optimizer, shapes, seed).result()
    params, frozen = model.split(parts)
    placed = _placed(params, shapes.params)

    def begin(params: Parts) -> State:
        nothing = jax.tree.map(lambda _: None, frozen)
        return state_of(model, params, optimizer.init(params), nothing)

    without = _places(shapes)._replace(frozen=jax.tree.map(lambda _: None, frozen))
    state = jax.jit(begin, donate_argnums=0, out_shardings=without)(placed)
    return state._replace(frozen=_placed(frozen, shapes.frozen))


def new_state(
    model: Model, optimizer: optax.GradientTransformation, shapes: State, seed: int
) -> Future[State]:
    """The state before the first step of a new model, which a thread computes."""

    def new(seed: jax.Array) -> State:
        # The key that Flax NNX makes of a seed.
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return _initial(model, optimizer, Parts(rwkv7.init(key, model.config)))

    lowered = jax.jit(new, out_shardings=_places(shapes)).lower(np.uint32(seed))
    return in_thread(lambda: jax.block_until_ready(lowered.compile()(np.uint32(seed))))


def named(state: State) -> dict[str, Any]:
    """The arrays of a state that checkpoints have, by name: those that steps change."""
    found = rwkv7.names({"model": state.params, "optimizer": state.optimizer})
    return {name.replace(".params.", ".", 1): x for name, x in found.items()}


def restored(
    model: Model, shapes: State, arrays: dict[str, jax.Array], parts: Parts | None = None
) -> State:
    """The state of which `named` gives these arrays. What is frozen is that of `parts`."""
    structure = jax.tree.structure((shapes.params, shapes.optimizer))
    params, optimizer = jax.tree.unflatten(structure, [arrays[name] for name in named(shapes)])
    frozen = shapes.frozen
    if parts is not None:
        frozen = _placed(model.split(parts)[1], shapes.frozen)
    make = jax.jit(
        lambda params, optimizer: state_of(model, params, optimizer, Parts(None)),
        donate_argnums=(0, 1),
        out_shardings=_places(shapes)._replace(frozen=Parts(None)),
    )
    return make(params, optimizer)._replace(frozen=frozen)


def train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    l2_wrap: float,
    accumulate: int = 1,
) -> Any:
    """The jitted training step: from a state and a batch to the next state, which is where `shapes`
    say, and what it measures. It computes the batch in `accumulate` parts, one after another. The
    arrays of the given state are deleted."""

    def step(state: State, batch: Batch) -> tuple[State, Measures]:
        def loss(params: Parts, batch: Batch) -> jax.Array:
            return mean_loss(
                *(model, finetuning.join(params, state.frozen), batch),
                copies=state.copies,
                l2_wrap=l2_wrap,
                training=True,
            )

        loss_before, gradients = accumulated(loss, state.params, batch, accumulate)
        params, moments = updated(optimizer, gradients, state.optimizer, state.params)
        after = state_of(model, params, moments, state.frozen)
        return after, Measures(loss_before, *measured(moments))

    return jax.jit(step, donate_argnums=0, out_shardings=(_places(shapes), None))


Step: TypeAlias = Callable[[State, Batch], tuple[State, Measures]]


def compiled_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    batch: Batch,
    l2_wrap: float,
    accumulate: int,
    start: Start,
) -> Future[Step]:
    """`train_step` for batches like `batch`, which a thread compiles."""
    traced = train_step(model, optimizer, shapes, l2_wrap, accumulate).trace(shapes, batch)
    start.part("trace")
    lowered = traced.lower()
    start.part("lower")
    return in_thread(lowered.compile)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """What a thread of its own computes."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(work)
    pool.shutdown(wait=False)
    return found


def evaluation(model: Model, held_out: Batch, rows: int) -> Callable[[Parts], float]:
    """A function of the parts of a model that gives their mean loss of all of `held_out`, by one
    program that goes through batches of `rows` rows. Rows of zeros, which do not count, fill up the
    last one."""
    mask = held_out.mask
    if mask is None:
        mask = np.ones_like(held_out.tokens, bool)
    held_out = held_out._replace(mask=mask)
    rows = min(rows, len(mask) + -len(mask) % model.mesh.shape["data"])
    padding = (0, -len(mask) % rows), (0, 0)
    batches = jax.tree.map(lambda x: np.pad(x, padding).reshape(-1, rows, x.shape[1]), held_out)
    weights = batches.mask.sum((1, 2))
    placed = on_mesh(batches, model.mesh, None)

    @jax.jit
    def losses(parts: Parts, batches: Batch) -> jax.Array:
        return jax.lax.map(functools.partial(mean_loss, model, parts), batches)

    return lambda parts: float(np.average(losses(parts, placed), weights=weights))


def on_mesh(batch: Batch, mesh: Mesh, *before: None) -> Batch:
    """The same batch, whose rows are distributed over the mesh. They are the first axis, or come
    after so many others as `before` has."""
    rows = NamedSharding(mesh, P(*before, "data"))
    return jax.tree.map(lambda x: place(x, rows), batch)
