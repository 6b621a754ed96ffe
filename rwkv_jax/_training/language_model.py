"""The model on a mesh, and its loss."""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from rwkv_jax import finetuning
from rwkv_jax._training.copies import in_place
from rwkv_jax._training.data import Batch
from rwkv_jax._training.parts import ALL, Parts, labels
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import Kernels, rwkv7
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
    """

    module: ModuleType
    config: Any
    mesh: Mesh
    dtype: str
    kernels: Kernels
    recompute: rwkv7.Recompute | None
    shapes: Parts
    labels: Parts

    @property
    def generation(self) -> str:
        """Its name, such as RWKV-7."""
        return f"RWKV-{self.module.__name__[-1]}"

    def split(self, parts: Parts) -> tuple[Parts, Parts]:
        """What is trained of the parts, and what is frozen."""
        return finetuning.split(parts, self.labels)

    def shardings(self, parts: Parts) -> Any:
        """Where the arrays of parts are, some of which may be None."""
        params = self.module.shardings(self.shapes.params, self.mesh, data="data", model="model")
        named = rwkv7.names(Parts(params))
        whole = NamedSharding(self.mesh, P())

        def place(path: KeyPath, _: Any) -> NamedSharding:
            return named.get(jax.tree_util.keystr(path, simple=True, separator="."), whole)

        return jax.tree_util.tree_map_with_path(place, parts)


def make_model(
    config: Any,
    mesh: Mesh,
    *,
    dtype: str,
    implementation: str | None,
    recompute: rwkv7.Recompute | None = None,
    module: ModuleType = rwkv7,
    parts: tuple[Parts, Parts] | None = None,
) -> Model:
    """The model with the kernels for its mesh. `parts` are arrays, or their shapes, and labels; if
    None, the model is a new one, all of which is trained."""
    kernels = Kernels(implementation)
    if mesh.size > 1:
        sequence = "seq" if mesh.shape["seq"] > 1 else None
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence=sequence)
        kernels = Kernels(implementation, wkv=wkv)
    if parts is None:
        new = Parts(jax.eval_shape(lambda: module.init(jax.random.key(0), config)))
        parts = new, labels(new, ALL)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parts[0])
    return Model(module, config, mesh, dtype, kernels, recompute, shapes, parts[1])


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
    `training.copies` that are used in place of parameters. `l2_wrap` is that of `cross_entropy`.
    There is dropout in `training` alone."""
    mesh = model.mesh
    batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data", "seq")))
    base = parts.params if copies is None else in_place(parts.params, copies)
    # Each parameter is gathered to compute with it, and its gradient is scattered.
    for data in ("data", None):
        base = jax.lax.with_sharding_constraint(
            base, model.module.shardings(base, mesh, data=data, model="model")
        )
    own = parts._replace(params=base).effective(_dropout_key(batch) if training else None)
    hidden_states, _ = model.module.hidden_states(
        own,
        batch.tokens,
        parts.initial_state(len(batch.tokens), model.dtype),
        segment_ids=batch.segment_ids,
        dtype=model.dtype,
        kernels=model.kernels,
        recompute=model.recompute,
    )
    head = own.head.wide()
    return cross_entropy(hidden_states, head, batch.targets, mask=batch.mask, l2_wrap=l2_wrap)


def _dropout_key(batch: Batch) -> jax.Array:
    """A key that depends on the batch alone, so that a resumed run has the same ones."""
    places = jnp.arange(batch.tokens.size, dtype=jnp.uint32).reshape(batch.tokens.shape)
    words = batch.tokens.astype(jnp.uint32) * (2 * places + 1)
    return jax.random.key(jnp.sum(words, dtype=jnp.uint32))
