"""RWKV-7 layers for Equinox, with the official initialisation.

`params` of each layer is the parameter tree of `rwkv_jax.models.rwkv7`. The docstring of that
module describes what the layers compute, their modes and dtypes. As usual in Equinox, inputs and
states have no batch axis: use `jax.vmap`.
"""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Key

from rwkv_jax.models import rwkv7
from rwkv_jax.wkv7 import wkv7

Tree = TypeVar("Tree")


def _batch(tree: Tree) -> Tree:
    """The same arrays with a batch axis of size 1 in front."""
    return jax.tree.map(lambda x: x[None], tree)


def _unbatch(tree: Tree) -> Tree:
    """The same arrays without the batch axis of size 1."""
    return jax.tree.map(lambda x: x[0], tree)


class TimeMix(eqx.Module):
    """The time mixing of layer `layer` (from 0) of a model with `layers` layers."""

    params: rwkv7.TimeMixParams
    implementation: str | None = eqx.field(static=True)
    wkv: rwkv7.Wkv = eqx.field(static=True)

    def __init__(
        self,
        width: int,
        head_size: int = 64,
        *,
        layer: int,
        layers: int,
        implementation: str | None = None,
        wkv: rwkv7.Wkv = wkv7,
        key: Key[Array, ""],
    ):
        self.params = rwkv7.init_time_mix(key, width, head_size, layer=layer, layers=layers)
        self.implementation = implementation
        self.wkv = wkv

    def __call__(
        self,
        x: Float[Array, "*T C"],
        state: rwkv7.TimeMixState | None = None,
        v_first: Float[Array, "*T C"] | None = None,
        *,
        segment_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "*T C"], rwkv7.TimeMixState, Float[Array, "*T C"]]:
        """`rwkv7.time_mix` of a sequence [T, C] or a token [C]: the output, the next state and
        the value of the first layer."""
        x, state, v_first, segment_ids = _batch((x, state, v_first, segment_ids))
        return _unbatch(
            rwkv7.time_mix(
                self.params,
                x,
                state,
                v_first,
                segment_ids=segment_ids,
                implementation=self.implementation,
                wkv=self.wkv,
            )
        )


class ChannelMix(eqx.Module):
    """The channel mixing of layer `layer` (from 0) of a model with `layers` layers."""

    params: rwkv7.ChannelMixParams

    def __init__(self, width: int, *, layer: int, layers: int, key: Key[Array, ""]):
        self.params = rwkv7.init_channel_mix(key, width, layer=layer, layers=layers)

    def __call__(
        self,
        x: Float[Array, "*T C"],
        state: Float[Array, " C"] | None = None,
        *,
        segment_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "*T C"], Float[Array, " C"]]:
        """`rwkv7.channel_mix` of a sequence [T, C] or a token [C]: the output and
        the next state."""
        x, state, ids = _batch((x, state, segment_ids))
        return _unbatch(rwkv7.channel_mix(self.params, x, state, segment_ids=ids))


class RWKV7(eqx.Module):
    """The language model. Parameters are float32, and activations have `dtype`."""

    params: rwkv7.Params
    dtype: jnp.dtype = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)
    layers: str | None = eqx.field(static=True)
    recompute: rwkv7.Recompute | None = eqx.field(static=True)
    wkv: rwkv7.Wkv = eqx.field(static=True)

    def __init__(
        self,
        config: rwkv7.Config,
        *,
        dtype: DTypeLike = jnp.float32,
        implementation: str | None = None,
        layers: str | None = None,
        recompute: rwkv7.Recompute | None = None,
        wkv: rwkv7.Wkv = wkv7,
        key: Key[Array, ""],
    ):
        self.params = rwkv7.init(key, config)
        self.dtype = jnp.dtype(dtype)
        self.implementation = implementation
        self.layers = layers
        self.recompute = recompute
        self.wkv = wkv

    def __call__(
        self,
        tokens: Int[Array, "*T"],
        state: rwkv7.State | None = None,
        *,
        segment_ids: Int[Array, " T"] | None = None,
    ) -> tuple[Float32[Array, "*T vocabulary"], rwkv7.State]:
        """`rwkv7.apply` of a sequence [T] or a token []: the logits and the next
        state."""
        tokens, state, segment_ids = _batch((tokens, state, segment_ids))
        return _unbatch(
            rwkv7.apply(
                self.params,
                tokens,
                state,
                segment_ids=segment_ids,
                dtype=self.dtype,
                implementation=self.implementation,
                layers=self.layers,
                recompute=self.recompute,
                wkv=self.wkv,
            )
        )
