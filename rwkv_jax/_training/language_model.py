"""The model on a mesh, and its loss."""

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from rwkv_jax import finetuning
from rwkv_jax._training import exchange
from rwkv_jax._training.copies import in_place, rounded
from rwkv_jax._training.data import Batch
from rwkv_jax._training.embedding import of_weight
from rwkv_jax._training.parts import ALL, TRAINED, Parts, labels
from rwkv_jax.losses import cross_entropy, in_pieces
from rwkv_jax.models import Kernels, rwkv7
from rwkv_jax.models._trees import has_tables
from rwkv_jax.sharding import shard
from rwkv_jax.wkv7 import wkv7


class Model(NamedTuple):
    """All of a model but its parameters.

    Attributes:
      module: the functions of its generation, such as `rwkv7`.
      config: its sizes, a `Config` of the module.
      mesh: the devices.
      dtype: the dtype of the activations.
      kernels: the kernels that compute it.
      recompute: what the backward pass computes again.
      shapes: the shapes of its parameters and of what is trained beside them.
      labels: which of these are trained, for `finetuning.split`.
      piece: how many tokens of a row are read at once; all of them if None.
      truncate: whether gradients stop at the states between pieces.
    """

    module: ModuleType
    config: Any
    mesh: Mesh
    dtype: str
    kernels: Kernels
    recompute: rwkv7.Recompute | None
    shapes: Parts
    labels: Parts
    piece: int | None
    truncate: bool

    @property
    def generation(self) -> str:
        """Its name, such as RWKV-7."""
        return f"RWKV-{self.module.__name__[-1]}"

    def split(self, parts: Parts) -> tuple[Parts, Parts]:
        """What is trained of the parts, and what is frozen."""
        return finetuning.split(parts, self.labels)

    def shardings(self, parts: Parts) -> Any:
        """Where the arrays of parts are, some of which may be None."""
        params = self.module.shardings(
            self.shapes.params, self.mesh, data=exchange.OVER, model=self.inner
        )
        named = rwkv7.names(Parts(params))
        whole = NamedSharding(self.mesh, P())

        def place(path: KeyPath, _: Any) -> NamedSharding:
            return named.get(jax.tree_util.keystr(path, simple=True, separator="."), whole)

        return jax.tree_util.tree_map_with_path(place, parts)

    @property
    def inner(self) -> str | None:
        """The mesh axis along which heads and inner channels are distributed, if there is one."""
        return "model" if self.mesh.shape["model"] > 1 else None

    @property
    def exchanges(self) -> bool:
        """Whether devices exchange parameters and gradients as `_training.exchange` has it: where
        all parameters of RWKV-7 are trained, and nothing beside them, on whole rows. Those of
        RWKV-7a are not exchanged so, since its blocks need the embedding."""
        if self.mesh.size == 1 or self.module is not rwkv7 or self.piece:
            return False
        if has_tables(self.shapes.params):
            return False
        beside = self.shapes.adapter, self.shapes.states, self.split(self.shapes)[1]
        return not jax.tree.leaves(beside)


def make_model(
    config: Any,
    mesh: Mesh,
    *,
    dtype: str,
    implementation: str | None,
    recompute: rwkv7.Recompute | None = None,
    module: ModuleType = rwkv7,
    parts: tuple[Parts, Parts] | None = None,
    piece: int | None = None,
    truncate: bool = False,
) -> Model:
    """The model with the kernels for its mesh. `parts` are arrays, or their shapes, and labels; if
    None, the model is a new one, all of which is trained."""
    kernels = Kernels(implementation)
    if mesh.shape["seq"] > 1:
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence="seq")
        kernels = Kernels(implementation, wkv=wkv)
    if parts is None:
        new = Parts(jax.eval_shape(lambda: module.init(jax.random.key(0), config)))
        parts = new, labels(new, ALL)
    trains_embedding = parts[1].params.emb.weight == TRAINED
    if mesh.size == 1 and trains_embedding and not has_tables(parts[0].params):
        kernels = Kernels(implementation, embed=of_weight)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts[0])
    return Model(module, config, mesh, dtype, kernels, recompute, shapes, parts[1], piece, truncate)


def mean_loss(
    model: Model,
    parts: Parts,
    batch: Batch,
    *,
    copies: Any = None,
    l2_wrap: float = 0.0,
    training: bool = False,
) -> jax.Array:
    """The mean loss of the predictions that count, in nats. `copies` are those of
    `_training.copies` that are used in place of parameters. `l2_wrap` is that of `cross_entropy`.
    There is dropout in `training` alone."""
    mesh = model.mesh
    if model.exchanges:
        copies = rounded(parts, model.dtype) if copies is None else copies
        loss = _by_compiler if mesh.shape["seq"] > 1 else _of_rows
        return loss(model, in_place(parts, copies).params, batch, l2_wrap)
    parts = parts if copies is None else in_place(parts, copies)
    base = parts.params
    if mesh.size > 1:
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P(*exchange.OVER)))
        # Each parameter is gathered to compute with it, and its gradient is scattered.
        for over in (exchange.OVER, None):
            base = jax.lax.with_sharding_constraint(
                base, model.module.shardings(base, mesh, data=over, model=model.inner)
            )
    own = parts._replace(params=base).effective(_dropout_key(batch) if training else None)
    state = parts.initial_state(len(batch.tokens), model.dtype)
    if model.piece:
        loss, _ = in_pieces(
            *(own, batch.tokens, batch.targets, state),
            piece=model.piece,
            truncate=model.truncate,
            segment_ids=batch.segment_ids,
            mask=batch.mask,
            dtype=model.dtype,
            kernels=model.kernels,
            recompute=model.recompute,
            l2_wrap=l2_wrap,
        )
        return loss
    hidden_states, _ = _hidden_states(model, own, batch, model.kernels, state)
    head = own.head.wide()
    return cross_entropy(hidden_states, head, batch.targets, mask=batch.mask, l2_wrap=l2_wrap)


def _dropout_key(batch: Batch) -> jax.Array:
    """A key that depends on the batch alone, so that a resumed run has the same ones."""
    places = jnp.arange(batch.tokens.size, dtype=jnp.uint32).reshape(batch.tokens.shape)
    words = batch.tokens.astype(jnp.uint32) * (2 * places + 1)
    return jax.random.key(jnp.sum(words, dtype=jnp.uint32))


def _hidden_states(
    model: Model, params: Any, batch: Batch, kernels: Kernels, state: Any = None
) -> tuple[jax.Array, Any]:
    return model.module.hidden_states(
        params,
        batch.tokens,
        state,
        segment_ids=batch.segment_ids,
        dtype=model.dtype,
        kernels=kernels,
        recompute=model.recompute,
    )


def _of_rows(model: Model, params: rwkv7.Params, rows: Batch, l2_wrap: float) -> jax.Array:
    """The loss on devices of which each has whole rows of the batch. Each runs the program of one
    device, and gathers the parameters of a block where it computes the block.

    Along "model" each device has some heads and inner channels. What mixings add to the activations
    is summed, after which each device goes on with activations of its own. So their cotangents are
    parts of a sum as well, and the backward pass sums them where it gets to the output of a mixing,
    and not for each use of the activations.
    """
    places, inner = model.shardings(Parts(params)).params, model.inner
    axes = exchange.OVER if inner is None else (*exchange.OVER, inner)
    # The first block and the others have some names of their own.
    of_blocks = rwkv7.names(places.blocks[0]) | rwkv7.names(places.blocks[-1])

    def whole(name: str, x: jax.Array) -> jax.Array:
        return exchange.whole(x, of_blocks[name])

    def own(tree: Any) -> Any:
        return jax.tree.map(lambda x: exchange.varying(x, axes), tree)

    def gather(block: Any, x: jax.Array, of_first: Any) -> Any:
        return exchange.gathered(of_blocks, whole, own(block), x, of_first)

    def embed(emb: rwkv7.Weight, tokens: jax.Array, dtype: Any) -> jax.Array:
        x = exchange.embedding(emb.weight, tokens, places.emb.weight, dtype)
        return own(x)

    def total(dx: jax.Array) -> jax.Array:
        return own(jax.lax.psum(dx, inner))

    kernels = dataclasses.replace(model.kernels, gather=gather, embed=embed)
    if inner is not None:
        kernels = dataclasses.replace(kernels, total=total)

    def local(params: rwkv7.Params, rows: Batch) -> jax.Array:
        params = params._replace(ln_out=own(params.ln_out))
        hidden_states, state = _hidden_states(model, params, rows, kernels)
        head = exchange.scattered_before(own(params.head.weight), _late(state))
        return _summed_loss(model, places, l2_wrap, axes, hidden_states, head, rows)

    specs = jax.tree.map(lambda place: place.spec, places)
    return jax.shard_map(
        local, mesh=model.mesh, in_specs=(specs, P(*exchange.OVER)), out_specs=P()
    )(params, rows)


def _by_compiler(model: Model, params: rwkv7.Params, rows: Batch, l2_wrap: float) -> jax.Array:
    """The loss on any mesh, taken where sequences are distributed. The compiler partitions the
    blocks; embedding, head and loss are computed by each device."""
    mesh, places = model.mesh, model.shardings(Parts(params)).params
    rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, P(*exchange.OVER)))
    of_blocks, of_whole = (
        rwkv7.names(x.blocks[0]) | rwkv7.names(x.blocks[-1])
        for x in (places, rwkv7.shardings(params, mesh, model=model.inner))
    )

    def whole(name: str, x: jax.Array) -> jax.Array:
        return exchange.constrained(of_blocks[name], of_whole[name], x)

    def embed(emb: rwkv7.Weight, tokens: jax.Array, dtype: Any) -> jax.Array:
        place = places.emb.weight

        def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
            return exchange.embedding(table, tokens, place, dtype)

        in_specs = (place.spec, P(*exchange.OVER))
        embedded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P(*exchange.OVER))
        return embedded(emb.weight, tokens)

    gather = functools.partial(exchange.gathered, of_blocks, whole)
    kernels = dataclasses.replace(model.kernels, gather=gather, embed=embed)
    hidden_states, state = _hidden_states(model, params, rows, kernels)
    head = exchange.scattered_before(params.head.weight, _late(state))
    loss = functools.partial(_summed_loss, model, places, l2_wrap, exchange.OVER)
    in_specs = (P(*exchange.OVER), places.head.weight.spec, P(*exchange.OVER))
    return jax.shard_map(loss, mesh=mesh, in_specs=in_specs, out_specs=P())(
        hidden_states, head, rows
    )


def _late(state: Any) -> jax.Array:
    """A result of the block before the last one, or of the only one. If the gradient of the head is
    scattered before the backward pass of that block, it travels while the gradients of the last
    block are computed."""
    return state[-2:][0].att.shift


def _summed_loss(
    model: Model,
    places: Any,
    l2_wrap: float,
    axes: tuple[str, ...],
    hidden_states: jax.Array,
    head: jax.Array,
    rows: Batch,
) -> jax.Array:
    """The mean over all devices, of which each has some tokens, and along "model" a part of the
    vocabulary if that divides evenly. `axes` are those along which hidden states count as
    different."""
    place, sizes = places.head.weight, model.mesh.shape
    of_vocabulary = model.inner if model.inner in place.spec[:1] else None
    total = cross_entropy(
        hidden_states,
        exchange.rounded_head(head, place, model.dtype),
        rows.targets,
        mask=rows.mask,
        reduction="sum",
        l2_wrap=l2_wrap,
        axis_name=of_vocabulary,
    )
    over = [axis for axis in axes if axis != of_vocabulary]
    again = math.prod(sizes[axis] for axis in over if axis not in exchange.OVER)
    if rows.mask is None:
        count: Any = rows.targets.size * math.prod(sizes[axis] for axis in exchange.OVER)
    else:
        count = jnp.maximum(jax.lax.psum(jnp.sum(rows.mask), exchange.OVER), 1)
    return jax.lax.psum(total, over) / (again * count)
