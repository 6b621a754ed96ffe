"""RWKV and delta-rule layers for Flax NNX, with the official initialisation.

`params` of each layer is a parameter tree of `rwkv_jax.models.rwkv7`, or of another generation,
with an `nnx.Param` at each leaf. The `Config` that a layer is made with says of which. The
docstring of that module describes what the layers compute, their modes and dtypes. `GatedDeltaNet`
and `KimiDeltaAttention` are those of `rwkv_jax.layers.gated_delta_net` and `kimi_delta_net`.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax._typing import Operand
from rwkv_jax.layers import DeltaNetState, gated_delta_net, kimi_delta_net
from rwkv_jax.models._generations import generation_of
from rwkv_jax.models._initialisation import float32
from rwkv_jax.models._kernels import Kernels, chosen
from rwkv_jax.models._parameters import arrays as arrays
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._trees import Params, State, TimeMixState
from rwkv_jax.nn._arguments import of_layer, of_model

Tree = TypeVar("Tree")


def parameters(tree: Tree) -> Tree:
    """The same tree with an `nnx.Param` around each array."""
    return nnx.data(jax.tree.map(nnx.Param, tree))


class TimeMix(nnx.Module):
    """The time mixing of layer `layer` (from 0) of a model with the sizes of `config`."""

    def __init__(
        self,
        config: Any,
        layer: int,
        *,
        kernels: Kernels | str | None = None,
        rngs: nnx.Rngs,
    ):
        self.generation = generation_of(config)
        self.params = parameters(
            float32(self.generation.init_time_mix(rngs.params(), config, layer))
        )
        self.kernels = chosen("TimeMix", kernels)

    def __call__(
        self,
        x: Float[Array, "B *T C"],
        state: TimeMixState | None = None,
        v_first: Float[Array, "B *T C"] | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], TimeMixState, Float[Array, "B *T C"] | None]:
        """`time_mix` of a sequence [B, T, C] or a token [B, C]: the output, the next state, and in
        RWKV-7 the value of the first layer."""
        return self.generation.time_mix(
            arrays(self.params),
            x,
            state,
            v_first,
            segment_ids=segment_ids,
            kernels=self.kernels,
        )


class ChannelMix(nnx.Module):
    """The channel mixing of layer `layer` (from 0) of a model with the sizes of `config`."""

    def __init__(self, config: Any, layer: int, *, rngs: nnx.Rngs):
        self.generation = generation_of(config)
        self.params = parameters(
            float32(self.generation.init_channel_mix(rngs.params(), config, layer))
        )

    def __call__(
        self,
        x: Float[Array, "B *T C"],
        state: Float[Array, "B C"] | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
        """`channel_mix` of a sequence [B, T, C] or a token [B, C]: the output and the next
        state."""
        return self.generation.channel_mix(arrays(self.params), x, state, segment_ids=segment_ids)


class RWKV(nnx.Module):
    """The language model. Activations have `dtype`.

    Its parameters are `params`, such as those of a checkpoint, or float32 ones with the official
    initialisation from `rngs`.

    Raises:
      TypeError: `config` is of no generation, or `params` of another one; or both `params` and
        `rngs` are None, or neither is.
      ValueError: `params` have other sizes than `config`.
    """

    def __init__(
        self,
        config: Any,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
        recompute: Recompute | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        key = None if rngs is None else rngs.params()
        self.generation, params = of_model(config, params, rngs=key)
        self.params = parameters(params)
        self.dtype = jnp.dtype(dtype)
        self.kernels = chosen("RWKV", kernels)
        self.recompute: Recompute | None = recompute

    def __call__(
        self,
        tokens: Int[Operand, " B *T"],
        state: State | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
    ) -> tuple[Float32[Array, "B *T vocabulary"], State]:
        """`apply` of sequences [B, T] or a token each [B]: the logits and the next state."""
        return self.generation.apply(
            arrays(self.params),
            tokens,
            state,
            segment_ids=segment_ids,
            dtype=self.dtype,
            kernels=self.kernels,
            recompute=self.recompute,
        )


class _DeltaNet(nnx.Module):
    """A layer of the delta rule, whose functions are those of `layer`."""

    layer: ClassVar[ModuleType]

    def __init__(
        self,
        config: Any,
        *,
        params: Any,
        implementation: str | None,
        rngs: nnx.Rngs | None,
    ):
        key = None if rngs is None else rngs.params()
        name = type(self).__name__
        self.params = parameters(of_layer(name, self.layer, config, params, rngs=key))
        self.config = config
        self.implementation = implementation

    def __call__(
        self,
        x: Float[Array, "B *T C"],
        state: DeltaNetState | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], DeltaNetState]:
        """`apply` of a sequence [B, T, C] or a token [B, C]: the output and the next state."""
        return self.layer.apply(
            arrays(self.params),
            x,
            state,
            config=self.config,
            segment_ids=segment_ids,
            implementation=self.implementation,
        )


class GatedDeltaNet(_DeltaNet):
    """The layer `rwkv_jax.layers.gated_delta_net`, as Qwen3-Next has it.

    Its parameters are `params`, such as those of `gated_delta_net.from_tensors`, or float32 ones
    with the initialisation of Qwen3-Next from `rngs`. `layer(x, state, segment_ids=...)` is
    `gated_delta_net.apply`: the output and the next state.

    Raises:
      TypeError: `config` is of another layer; or both `params` and `rngs` are None, or neither is.
      ValueError: `params` have other names or shapes than those of `config`.
    """

    layer = gated_delta_net

    def __init__(
        self,
        config: gated_delta_net.Config,
        *,
        params: Mapping[str, Any] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(config, params=params, implementation=implementation, rngs=rngs)


class KimiDeltaAttention(_DeltaNet):
    """The layer `rwkv_jax.layers.kimi_delta_net`, as Kimi Linear has it.

    Its parameters are `params`, such as those of `kimi_delta_net.from_tensors`, or float32 ones
    with the initialisation of Kimi Linear from `rngs`. `layer(x, state, segment_ids=...)` is
    `kimi_delta_net.apply`: the output and the next state.

    Raises:
      TypeError: `config` is of another layer; or both `params` and `rngs` are None, or neither is.
      ValueError: `params` have other names or shapes than those of `config`.
    """

    layer = kimi_delta_net

    def __init__(
        self,
        config: kimi_delta_net.Config,
        *,
        params: Mapping[str, Any] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(config, params=params, implementation=implementation, rngs=rngs)
