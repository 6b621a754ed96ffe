"""The model on a mesh, and its loss."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._training.copies import in_place
from rwkv_jax._training.data import Batch
from rwkv_jax.losses import cross_entropy, in_pieces
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
      piece: how many tokens of a row are read at once; all of them if None.
      truncate: whether gradients stop at the states between pieces.
    """

    config: rwkv7.Config
    mesh: Mesh
    dtype: str
    kernels: Kernels
    recompute: rwkv7.Recompute | None
    piece: int | None
    truncate: bool

    def shapes(self) -> rwkv7.Params:
        """The shapes of its parameters."""
        return jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), self.config))

    def shardings(self, params: rwkv7.Params) -> Any:
        """Where the parameters are, or arrays of their shapes."""
        return rwkv7.shardings(params, self.mesh, data="data", model="model")


def make_model(
    config: rwkv7.Config,
    mesh: Mesh,
    *,
    dtype: str,
    implementation: str | None,
    recompute: rwkv7.Recompute | None = None,
    piece: int | None = None,
    truncate: bool = False,
) -> Model:
    """The model, with the kernels for its mesh."""
    kernels = Kernels(implementation)
    if mesh.size > 1:
        sequence = "seq" if mesh.shape["seq"] > 1 else None
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence=sequence)
        # The CUDA kernels of the layer functions would gather the tokens of a row.
        kernels = Kernels(implementation, layers="xla" if sequence else None, wkv=wkv)
    return Model(config, mesh, dtype, kernels, recompute, piece, truncate)


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
    mesh = model.mesh
    inputs, labels, mask, segment_ids = jax.lax.with_sharding_constraint(
        (batch.tokens[:, :-1], batch.tokens[:, 1:], batch.mask, batch.segment_ids),
        NamedSharding(mesh, P("data", "seq")),
    )
    if copies is not None:
        params = in_place(params, copies)
    # Each parameter is gathered to compute with it, and its gradient is scattered.
    for data in ("data", None):
        params = jax.lax.with_sharding_constraint(
            params, rwkv7.shardings(params, mesh, data=data, model="model")
        )
    of_model = {
        "segment_ids": segment_ids,
        "dtype": model.dtype,
        "kernels": model.kernels,
        "recompute": model.recompute,
    }
    if model.piece:
        pieces = {"piece": model.piece, "truncate": model.truncate, "mask": mask}
        loss, _ = in_pieces(params, batch.tokens, **pieces, l2_wrap=l2_wrap, **of_model)
        return loss
    hidden_states, _ = rwkv7.hidden_states(params, inputs, **of_model)
    return cross_entropy(hidden_states, params.head.weight, labels, mask=mask, l2_wrap=l2_wrap)
