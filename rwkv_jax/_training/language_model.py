"""The model on a mesh, and its loss."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._training import exchange
from rwkv_jax._training.copies import in_place, rounded
from rwkv_jax._training.data import Batch
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import Kernels, rwkv7
from rwkv_jax.sharding import shard
from rwkv_jax.wkv7 import wkv7


class Model(NamedTuple):
    """All of a model but its parameters.

    Attributes:
      config: its sizes.
      mesh: the devices.
      dtype: the dtype of the activations.
      kernels: the kernels that compute it.
      recompute: what the backward pass computes again.
    """

    config: rwkv7.Config
    mesh: Mesh
    dtype: str
    kernels: Kernels
    recompute: rwkv7.Recompute | None

    def shapes(self) -> rwkv7.Params:
        """The shapes of its parameters."""
        return jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), self.config))

    def shardings(self, params: rwkv7.Params) -> Any:
        """Where the parameters are, or arrays of their shapes."""
        return rwkv7.shardings(params, self.mesh, data=exchange.OVER, model=self.inner)

    @property
    def inner(self) -> str | None:
        """The mesh axis along which heads and inner channels are distributed, if there is one."""
        return "model" if self.mesh.shape["model"] > 1 else None


def make_model(
    config: rwkv7.Config,
    mesh: Mesh,
    *,
    dtype: str,
    implementation: str | None,
    recompute: rwkv7.Recompute | None = None,
) -> Model:
    """The model, with the kernels for its mesh."""
    kernels = Kernels(implementation)
    if mesh.shape["seq"] > 1:
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence="seq")
        # The CUDA kernels of the layer functions would gather the tokens of a row.
        kernels = Kernels(implementation, layers="xla", wkv=wkv)
    return Model(config, mesh, dtype, kernels, recompute)


def mean_loss(
    model: Model,
    params: rwkv7.Params,
    batch: Batch,
    *,
    copies: Any = None,
    l2_wrap: float = 0.0,
) -> jax.Array:
    """The mean loss of the predictions that count, in nats. `copies` are those of
    `training.copies` that are used in place of parameters. `l2_wrap` is that of
    `cross_entropy`."""
    labels = batch.tokens[:, 1:]
    rows = Rows(batch.tokens[:, :-1], labels, batch.mask, batch.segment_ids)
    if model.mesh.size == 1:
        params = params if copies is None else in_place(params, copies)
        hidden_states, _ = _hidden_states(model, params, rows, model.kernels)
        return cross_entropy(
            *(hidden_states, params.head.weight, labels), mask=batch.mask, l2_wrap=l2_wrap
        )
    copies = rounded(params, model.dtype) if copies is None else copies
    loss = _of_rows if model.mesh.size == model.mesh.shape["data"] else _by_compiler
    return loss(model, in_place(params, copies), rows, l2_wrap)


class Rows(NamedTuple):
    """The inputs and labels of rows of tokens, and what `Batch` has beside them."""

    inputs: jax.Array | np.ndarray
    labels: jax.Array | np.ndarray
    mask: jax.Array | np.ndarray | None
    segment_ids: jax.Array | np.ndarray | None


def _hidden_states(
    model: Model, params: rwkv7.Params, rows: Rows, kernels: Kernels
) -> tuple[jax.Array, rwkv7.State]:
    return rwkv7.hidden_states(
        params,
        rows.inputs,
        segment_ids=rows.segment_ids,
        dtype=model.dtype,
        kernels=kernels,
        recompute=model.recompute,
    )


def _of_rows(model: Model, params: rwkv7.Params, rows: Rows, l2_wrap: float) -> jax.Array:
    """The loss on devices of which each has some rows of the batch. Each runs the program of one
    device, and gathers the parameters of a block where it computes the block."""
    places = model.shardings(params)
    # The first block and the others have some names of their own.
    of_blocks = rwkv7.names(places.blocks[0]) | rwkv7.names(places.blocks[-1])

    def whole(name: str, x: jax.Array) -> jax.Array:
        return exchange.whole(x, of_blocks[name])

    def embed(emb: rwkv7.Weight, tokens: jax.Array, dtype: Any) -> jax.Array:
        return exchange.embedding(emb.weight, tokens, places.emb.weight, dtype)

    gather = functools.partial(exchange.gathered, of_blocks, whole)
    kernels = dataclasses.replace(model.kernels, gather=gather, embed=embed)

    def local(params: rwkv7.Params, rows: Rows) -> jax.Array:
        params = params._replace(ln_out=jax.tree.map(exchange.whole, params.ln_out, places.ln_out))
        hidden_states, state = _hidden_states(model, params, rows, kernels)
        head = exchange.scattered_before(params.head.weight, state[-1].att.shift)
        return _summed_loss(model, places, l2_wrap, hidden_states, head, rows)

    specs = jax.tree.map(lambda place: place.spec, places)
    return jax.shard_map(
        local, mesh=model.mesh, in_specs=(specs, P(*exchange.OVER)), out_specs=P()
    )(params, rows)


def _by_compiler(model: Model, params: rwkv7.Params, rows: Rows, l2_wrap: float) -> jax.Array:
    """The loss on any mesh. The compiler partitions the blocks; embedding, head and loss are
    computed by each device."""
    mesh, places = model.mesh, model.shardings(params)
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
    head = exchange.scattered_before(params.head.weight, state[-1].att.shift)
    loss = functools.partial(_summed_loss, model, places, l2_wrap)
    in_specs = (P(*exchange.OVER), places.head.weight.spec, P(*exchange.OVER))
    return jax.shard_map(loss, mesh=mesh, in_specs=in_specs, out_specs=P())(
        hidden_states, head, rows
    )


def _summed_loss(
    model: Model,
    places: Any,
    l2_wrap: float,
    hidden_states: jax.Array,
    head: jax.Array,
    rows: Rows,
) -> jax.Array:
    """The mean over all devices, of which each has some tokens, and along "model" a part of the
    vocabulary."""
    place = places.head.weight
    total = cross_entropy(
        hidden_states,
        exchange.rounded_head(head, place, model.dtype),
        rows.labels,
        mask=rows.mask,
        reduction="sum",
        l2_wrap=l2_wrap,
        axis_name=place.spec[0] if len(place.spec) else None,
    )
    if rows.mask is None:
        count: Any = rows.labels.size * math.prod(model.mesh.shape[axis] for axis in exchange.OVER)
    else:
        count = jnp.maximum(jax.lax.psum(jnp.sum(rows.mask), exchange.OVER), 1)
    return jax.lax.psum(total, exchange.OVER) / count
