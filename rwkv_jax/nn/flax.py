"""RWKV-7 layers for Flax NNX, with the official initialisation.

`params` of each layer is the parameter tree of `rwkv_jax.models.rwkv7` with an `nnx.Param` at each
leaf. The docstring of that module describes what the layers compute, their modes and dtypes.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models import rwkv7
from rwkv_jax.wkv7 import wkv7

Tree = TypeVar("Tree")


def parameters(tree: Tree) -> Tree:
    """The same tree with an `nnx.Param` around each array."""
    return nnx.data(jax.tree.map(nnx.Param, tree))


def arrays(tree: Tree) -> Tree:
    """The same tree with the array of each `nnx.Param`."""
    return jax.tree.map(lambda x: x[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


class TimeMix(nnx.Module):
    """The time mixing of layer `layer` (from 0) of a model with `layers` layers."""

    def __init__(
        self,
        width: int,
        head_size: int = 64,
        *,
        layer: int,
        layers: int,
        implementation: str | None = None,
        wkv: rwkv7.Wkv = wkv7,
        rngs: nnx.Rngs,
    ):
        self.params = parameters(
            rwkv7.init_time_mix(rngs.params(), width, head_size, layer=layer, layers=layers)
        )
        self.implementation = implementation
        self.wkv = wkv

    def __call__(
        self,
        x: Float[Array, "B *T C"],
        state: rwkv7.TimeMixState | None = None,
        v_first: Float[Array, "B *T C"] | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], rwkv7.TimeMixState, Float[Array, "B *T C"]]:
        """`rwkv7.time_mix` of a sequence [B, T, C] or a token [B, C]: the output, the next state
        and the value of the first layer."""
        return rwkv7.time_mix(
            arrays(self.params),
            x,
            state,
            v_first,
            segment_ids=segment_ids,
            implementation=self.implementation,
            wkv=self.wkv,
        )


class ChannelMix(nnx.Module):
    """The channel mixing of layer `layer` (from 0) of a model with `layers` layers."""

    def __init__(self, width: int, *, layer: int, layers: int, rngs: nnx.Rngs):
        self.params = parameters(
            rwkv7.init_channel_mix(rngs.params(), width, layer=layer, layers=layers)
        )

    def __call__(
        self,
        x: Float[Array, "B *T C"],
        state: Float[Array, "B C"] | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
        """`rwkv7.channel_mix` of a sequence [B, T, C] or a token [B, C]: the output and
        the next state."""
        return rwkv7.channel_mix(arrays(self.params), x, state, segment_ids=segment_ids)


class RWKV7(nnx.Module):
    """The language model. Parameters are float32, and activations have `dtype`."""

    def __init__(
        self,
        config: rwkv7.Config,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        layers: str | None = None,
        recompute: rwkv7.Recompute | None = None,
        wkv: rwkv7.Wkv = wkv7,
        rngs: nnx.Rngs,
    ):
        self.params = parameters(rwkv7.init(rngs.params(), config))
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        self.layers = layers
        self.recompute: rwkv7.Recompute | None = recompute
        self.wkv = wkv

    def __call__(
        self,
        tokens: Int[Array, " B *T"],
        state: rwkv7.State | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float32[Array, "B *T vocabulary"], rwkv7.State]:
        """`rwkv7.apply` of sequences [B, T] or a token each [B]: the logits and the next
        state."""
        return rwkv7.apply(
            arrays(self.params),
            tokens,
            state,
            segment_ids=segment_ids,
            dtype=self.dtype,
            implementation=self.implementation,
            layers=self.layers,
            recompute=self.recompute,
            wkv=self.wkv,
        )
