"""The model on a mesh, and its loss."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import Kernels, rwkv7
from rwkv_jax.nn.flax import RWKV, arrays, parameters
from rwkv_jax.sharding import shard
from rwkv_jax.wkv7 import wkv7
from training.copies import in_place
from training.data import Batch
from training.devices import place


def make_model(
    config: rwkv7.Config,
    mesh: Mesh,
    *,
    dtype: str,
    implementation: str | None,
    seed: int,
    scan: bool = False,
    recompute: rwkv7.Recompute | None = None,
    params: rwkv7.Params | None = None,
) -> RWKV:
    """The model with `params`, or with initial ones from the seed, which are distributed over the
    mesh; with `scan` they have the stacked form."""
    kernels = Kernels(implementation)
    if mesh.size > 1:
        sequence = "seq" if mesh.shape["seq"] > 1 else None
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence=sequence)
        # The CUDA kernels of the layer functions would gather the tokens of a row.
        kernels = Kernels(implementation, layers="xla" if sequence else None, wkv=wkv)
    model = RWKV(
        config,
        params=params,
        dtype=dtype,
        kernels=kernels,
        recompute=recompute,
        rngs=nnx.Rngs(seed) if params is None else None,
    )
    params = arrays(model.params)
    if scan:
        params = rwkv7.stacked(params)
    shardings = rwkv7.shardings(params, mesh, data="data", model="model")
    model.params = parameters(jax.tree.map(place, params, shardings))
    return model


def mean_loss(
    mesh: Mesh,
    model: RWKV,
    batch: Batch,
    *,
    copies: Any = None,
    l2_wrap: float = 0.0,
) -> jax.Array:
    """The mean loss of the predictions that count, in nats. `copies` are those of
    `training.copies` that are used in place of parameters. `l2_wrap` is that of
    `cross_entropy`."""
    inputs, labels, mask, segment_ids = jax.lax.with_sharding_constraint(
        (batch.tokens[:, :-1], batch.tokens[:, 1:], batch.mask, batch.segment_ids),
        NamedSharding(mesh, P("data", "seq")),
    )
    params = arrays(model.params)
    if copies is not None:
        params = in_place(params, copies)
    # Each parameter is gathered to compute with it, and its gradient is scattered.
    for data in ("data", None):
        params = jax.lax.with_sharding_constraint(
            params, rwkv7.shardings(params, mesh, data=data, model="model")
        )
    hidden_states, _ = rwkv7.hidden_states(
        params,
        inputs,
        segment_ids=segment_ids,
        dtype=model.dtype,
        kernels=model.kernels,
        recompute=model.recompute,
    )
    return cross_entropy(hidden_states, params.head.weight, labels, mask=mask, l2_wrap=l2_wrap)
