"""The steps of training: a training step with what it changes, and an evaluation."""

import argparse
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import finetuning
from rwkv_jax._training import copies
from rwkv_jax._training.accumulation import accumulated
from rwkv_jax._training.ahead import in_thread
from rwkv_jax._training.by_block import joined, parts
from rwkv_jax._training.clipping import global_norm, scaled
from rwkv_jax._training.clocks import Start
from rwkv_jax._training.compilation import compiled
from rwkv_jax._training.data import Batch
from rwkv_jax._training.devices import place
from rwkv_jax._training.language_model import Model, mean_loss
from rwkv_jax._training.optimizer import learning_rate, updated
from rwkv_jax._training.parts import Parts
from rwkv_jax.models import rwkv7


class State(NamedTuple):
    """Everything that a training step computes with, but for the batch.

    Attributes:
      params: what is trained.
      optimizer: the state of the optimizer for each part of `_training.by_block`.
      copies: the copies of `_training.copies` that steps compute with, and that devices exchange;
        None for parts of a model on several devices, and for other generations than RWKV-7.
      frozen: what no step changes. A step gives back the arrays that it gets.
    """

    params: Parts
    optimizer: tuple[optax.OptState, ...]
    copies: Any
    frozen: Parts


class Measures(NamedTuple):
    """What a step measures, each a float32 scalar: the mean loss before the step, in nats, the norm
    of its gradients before they are clipped, and its learning rate."""

    loss: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array


def _copies(model: Model, params: Parts) -> Any:
    if model.module is rwkv7 and (model.mesh.size == 1 or model.exchanges):
        return copies.rounded(params, model.dtype)
    return None


def state_shapes(model: Model, optimizer: optax.GradientTransformation) -> State:
    """The shapes of a state, and where its arrays are on the mesh."""

    def initial(parts: Parts) -> Any:
        params, frozen = model.split(parts)
        return params, optimizer.init(params), _copies(model, params), frozen

    shapes = jax.eval_shape(initial, model.shapes)
    whole = NamedSharding(model.mesh, P())

    def is_parts(x: Any) -> bool:
        return isinstance(x, Parts)

    def places(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: model.shardings(x) if is_parts(x) else whole, tree, is_leaf=is_parts
        )

    params, moments, copied, frozen = shapes
    # Moments and copies are where their parameters are.
    of_copies = copies.places(copied, model.shardings(params))
    params, moments, copied, frozen = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        (places(params), places(moments), of_copies, places(frozen)),
    )
    return State(params, tuple(parts(moments)), copied, frozen)


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
    initial: Parts | None = None,
) -> State:
    """The state before the first step, with the parts `initial`, or with new parameters from the
    seed, where `shapes` say. It may share arrays with `initial`; the first step deletes these."""

    def new(seed: jax.Array) -> Parts:
        # The key that Flax NNX makes of a seed.
        key = jax.random.fold_in(jax.random.key(seed), 0)
        return Parts(rwkv7.init(key, model.config))

    def begin(params: Parts) -> Any:
        return optimizer.init(params), _copies(model, params)

    if initial is None:
        params = jax.jit(new, out_shardings=_places(shapes.params))(np.uint32(seed))
        frozen = shapes.frozen
    else:
        params, frozen = map(_placed, model.split(initial), (shapes.params, shapes.frozen))
    found = [
        jax.jit(begin, out_shardings=_places((moments, copied)))(part)
        for (part, copied), moments in zip(
            parts((params, shapes.copies)), shapes.optimizer, strict=True
        )
    ]
    moments, copied = zip(*found, strict=True)
    return State(params, moments, joined(copied), frozen)


def named(state: State) -> dict[str, Any]:
    """The arrays of a state that checkpoints have, by name: those that steps change."""
    found = rwkv7.names({"model": state.params, "optimizer": joined(state.optimizer)})
    return {name.replace(".params.", ".", 1): x for name, x in found.items()}


def restored(
    model: Model, shapes: State, arrays: dict[str, jax.Array], frozen: Parts | None = None
) -> State:
    """The state of which `named` gives these arrays. What is frozen is that of the parts `frozen`,
    or is left as shapes if these are None."""
    structure = jax.tree.structure((shapes.params, joined(shapes.optimizer)))
    params, moments = jax.tree.unflatten(structure, [arrays[name] for name in named(shapes)])
    # A step deletes the arrays of one part after another, and each part has the scalars.
    of_parts = jax.tree.map(lambda x: x.copy() if x.ndim == 0 else x, parts(moments))
    copy = jax.jit(functools.partial(_copies, model), out_shardings=_places(shapes.copies))
    there = shapes.frozen if frozen is None else _placed(model.split(frozen)[1], shapes.frozen)
    return State(params, tuple(of_parts), copy(params), there)


Step: TypeAlias = Callable[[State, Batch], tuple[State, Measures]]


class StepInParts(NamedTuple):
    """A training step: a function from a state and a batch to the next state, and what it measures.
    The arrays of the given state are deleted, but for those that are frozen.

    It has one program for the gradients, and one for each part of a state that changes its
    parameters, moments and copies. Those of the blocks are the same program.
    """

    gradients: Any
    updates: Sequence[Any]

    def __call__(self, state: State, batch: Batch) -> tuple[State, Measures]:
        loss, norm, gradients = self.gradients(state.params, state.copies, state.frozen, batch)
        changed = [
            # A block of which nothing is trained stays as it is.
            update(*part, norm) if i == 0 or jax.tree.leaves(part[0]) else (*part[:3], None)
            for i, (update, part) in enumerate(
                zip(self.updates, _parts(state, gradients), strict=True)
            )
        ]
        params, moments, copied, rates = zip(*changed, strict=True)
        after = State(joined(params), moments, joined(copied), state.frozen)
        return after, Measures(loss, norm, rates[0])

    def trace(self, shapes: State, batch: Batch) -> "StepInParts":
        """The same step, traced, of which `lower` gives the lowered one, and its `compile` one that
        can be called."""
        gradients = self.gradients.trace(shapes.params, shapes.copies, shapes.frozen, batch)
        norm = gradients.out_info[1]
        of_parts = zip(self.updates, _parts(shapes, shapes.params), strict=True)
        return StepInParts(gradients, [update.trace(*part, norm) for update, part in of_parts])

    def lower(self) -> "StepInParts":
        return StepInParts(self.gradients.lower(), [x.lower() for x in self.updates])

    def compile(self) -> "StepInParts":
        updates = in_thread(lambda: [x.compile() for x in self.updates])
        return StepInParts(compiled(self.gradients), updates.result())


def _parts(state: State, gradients: Parts) -> list[Any]:
    """Of each part the parameters, the moments, the copies and the gradients."""
    found = parts((state.params, state.copies, gradients))
    return [
        (params, moments, *others)
        for (params, *others), moments in zip(found, state.optimizer, strict=True)
    ]


def train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    l2_wrap: float,
    accumulate: int = 1,
    clip: float = 0.0,
) -> StepInParts:
    """The training step. It computes the batch in `accumulate` parts, one after another, and scales
    gradients of which the global norm is larger than `clip`, if that is not 0. The optimizer has to
    change each array by itself. The next state is where `shapes` say."""
    whole, places = NamedSharding(model.mesh, P()), _places(shapes.params)

    def gradients(
        params: Parts, copies: Any, frozen: Parts, batch: Batch
    ) -> tuple[jax.Array, jax.Array, Parts]:
        def loss(params: Parts, batch: Batch) -> jax.Array:
            return mean_loss(
                *(model, finetuning.join(params, frozen), batch),
                copies=copies,
                l2_wrap=l2_wrap,
                training=True,
            )

        loss_before, found = accumulated(loss, params, batch, accumulate)
        return loss_before, global_norm(found, places), found

    def update(
        params: Parts, moments: Any, copies: Any, gradients: Parts, norm: jax.Array
    ) -> tuple[Parts, Any, Any, jax.Array]:
        gradients = scaled(gradients, norm, clip)
        params, moments = updated(optimizer, gradients, moments, params)
        return params, moments, _copies(model, params), learning_rate(moments)

    return StepInParts(
        jax.jit(gradients, out_shardings=(whole, whole, places)),
        [
            # The new copies take the memory of the old ones, which are else not used.
            jax.jit(
                update,
                donate_argnums=(0, 1, 2),
                keep_unused=True,
                out_shardings=(*_places(part[:3]), whole),
            )
            for part in _parts(shapes, shapes.params)
        ],
    )


FEW = 13
"""Up to how many parts of a state are changed in one program with the gradients. The programs for
the parts of a small model would take longer to start than to run, and one for all of them compiles
soon."""


def compiled_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    shapes: State,
    batch: Batch,
    args: argparse.Namespace,
    start: Start,
) -> Future[Step]:
    """The step that the options ask for, for batches like `batch` on the mesh, which a thread
    compiles. It may be made before the devices have memory."""
    step = train_step(model, optimizer, shapes, args.l2_wrap, args.accumulate, args.clip)
    program: Any = step
    if len(step.updates) <= FEW:
        # It deletes the frozen arrays as well, which are those of the next state.
        program = jax.jit(lambda state, batch: step(state, batch), donate_argnums=0)
    rows = NamedSharding(model.mesh, P("data"))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
    traced = program.trace(shapes, like)
    start.part("trace")
    lowered = traced.lower()
    start.part("lower")
    if program is step:
        return in_thread(lowered.compile)
    return in_thread(lambda: compiled(lowered))


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

    @jax.jit
    def losses(parts: Parts, batches: Batch) -> jax.Array:
        return jax.lax.map(functools.partial(mean_loss, model, parts), batches)

    placed: Any = None
    program: Any = None

    def evaluate(parts: Parts) -> float:
        nonlocal placed, program
        if program is None:
            placed = on_mesh(batches, model.mesh, None)
            program = compiled(losses.lower(parts, placed))
        return float(np.average(program(parts, placed), weights=weights))

    return evaluate


def on_mesh(batch: Batch, mesh: Mesh, *before: None) -> Batch:
    """The same batch, whose rows are distributed over the mesh. They are the first axis, or come
    after so many others as `before` has."""
    rows = NamedSharding(mesh, P(*before, "data"))
    return jax.tree.map(lambda x: place(x, rows), batch)
