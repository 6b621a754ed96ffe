"""RWKV and delta-rule layers for Equinox, with the official initialisation.

`params` of each layer is a parameter tree of `rwkv_jax.models.rwkv7`, or of another generation. The
`Config` that a layer is made with says of which. The docstring of that module describes what the
layers compute, their modes and dtypes. `GatedDeltaNet` and `KimiDeltaAttention` are those of
`rwkv_jax.layers.gated_delta_net` and `kimi_delta_net`. As usual in Equinox, inputs and states have
no batch axis: use `jax.vmap`.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Key

from rwkv_jax._typing import Operand
from rwkv_jax.layers import DeltaNetState, gated_delta_net, kimi_delta_net
from rwkv_jax.models._arguments import check_tokens
from rwkv_jax.models._generations import generation_of
from rwkv_jax.models._initialisation import float32
from rwkv_jax.models._kernels import Kernels, chosen
from rwkv_jax.models._model import Generation
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._trees import Params, State, TimeMixState
from rwkv_jax.nn._arguments import of_layer, of_model

Tree = TypeVar("Tree")


def _batch(tree: Tree) -> Tree:
    """The same arrays with a batch axis of size 1 in front."""
    return jax.tree.map(lambda x: x[None], tree)


def _unbatch(tree: Tree) -> Tree:
    """The same arrays without the batch axis of size 1."""
    return jax.tree.map(lambda x: x[0], tree)


class TimeMix(eqx.Module):
    """The time mixing of layer `layer` (from 0) of a model with the sizes of `config`."""

    params: Any
    generation: Generation = eqx.field(static=True)
    kernels: Kernels = eqx.field(static=True)

    def __init__(
        self,
        config: Any,
        layer: int,
        *,
        kernels: Kernels | str | None = None,
        key: Key[Array, ""],
    ):
        self.generation = generation_of(config)
        self.params = float32(self.generation.init_time_mix(key, config, layer))
        self.kernels = chosen("TimeMix", kernels)

    def __call__(
        self,
        x: Float[Array, "*T C"],
        state: TimeMixState | None = None,
        v_first: Float[Array, "*T C"] | None = None,
        *,
        segment_ids: Int[Operand, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T C"], TimeMixState, Float[Array, "*T C"] | None]:
        """`time_mix` of a sequence [T, C] or a token [C]: the output, the next state, and in RWKV-7
        the value of the first layer."""
        x, state, v_first, segment_ids = _batch((x, state, v_first, segment_ids))
        return _unbatch(
            self.generation.time_mix(
                self.params,
                x,
                state,
                v_first,
                segment_ids=segment_ids,
                kernels=self.kernels,
            )
        )


class ChannelMix(eqx.Module):
    """The channel mixing of layer `layer` (from 0) of a model with the sizes of `config`."""

    params: Any
    generation: Generation = eqx.field(static=True)

    def __init__(self, config: Any, layer: int, *, key: Key[Array, ""]):
        self.generation = generation_of(config)
        self.params = float32(self.generation.init_channel_mix(key, config, layer))

    def __call__(
        self,
        x: Float[Array, "*T C"],
        state: Float[Array, " C"] | None = None,
        *,
        segment_ids: Int[Operand, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T C"], Float[Array, " C"]]:
        """`channel_mix` of a sequence [T, C] or a token [C]: the output and the next state."""
        x, state, ids = _batch((x, state, segment_ids))
        return _unbatch(self.generation.channel_mix(self.params, x, state, segment_ids=ids))


class RWKV(eqx.Module):
    """The language model. Activations have `dtype`.

    Its parameters are `params`, such as those of a checkpoint, or float32 ones with the official
    initialisation from `key`.

    Raises:
      TypeError: `config` is of no generation, or `params` of another one; or both `params` and
        `key` are None, or neither is.
      ValueError: `params` have other sizes than `config`.
    """

    params: Params
    generation: Generation = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)
    kernels: Kernels = eqx.field(static=True)
    recompute: Recompute | None = eqx.field(static=True)

    def __init__(
        self,
        config: Any,
        *,
        params: Params | None = None,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
        recompute: Recompute | None = None,
        key: Key[Array, ""] | None = None,
    ):
        self.generation, self.params = of_model(config, params, key=key)
        self.dtype = jnp.dtype(dtype)
        self.kernels = chosen("RWKV", kernels)
        self.recompute = recompute

    def __call__(
        self,
        tokens: Int[Operand, "*T"],
        state: State | None = None,
        *,
        segment_ids: Int[Operand, "*T"] | None = None,
    ) -> tuple[Float32[Array, "*T vocabulary"], State]:
        """`apply` of a sequence [T] or a token []: the logits and the next state."""
        vocabulary = self.params.emb.weight.shape[0]
        check_tokens(self.generation.name, tokens, vocabulary, {1: "[T]", 0: "[]"})
        tokens, state, segment_ids = _batch((tokens, state, segment_ids))
        return _unbatch(
            self.generation.apply(
                self.params,
                tokens,
                state,
                segment_ids=segment_ids,
                dtype=self.dtype,
                kernels=self.kernels,
                recompute=self.recompute,
            )
        )


class _DeltaNet(eqx.Module):
    """A layer of the delta rule, whose functions are those of `layer`."""

    layer: ClassVar[ModuleType]

    params: Any
    config: Any = eqx.field(static=True)
    implementation: str | None = eqx.field(static=True)

    def __init__(
        self,
        config: Any,
        *,
        params: Any,
        implementation: str | None,
        key: Key[Array, ""] | None,
    ):
        self.params = of_layer(type(self).__name__, self.layer, config, params, key=key)
        self.config = config
        self.implementation = implementation

    def __call__(
        self,
        x: Float[Array, "*T C"],
        state: DeltaNetState | None = None,
        *,
        segment_ids: Int[Operand, "*T"] | None = None,
    ) -> tuple[Float[Array, "*T C"], DeltaNetState]:
        """`apply` of a sequence [T, C] or a token [C]: the output and the next state."""
        x, state, segment_ids = _batch((x, state, segment_ids))
        return _unbatch(
            self.layer.apply(
                self.params,
                x,
                state,
                config=self.config,
                segment_ids=segment_ids,
                implementation=self.implementation,
            )
        )


class GatedDeltaNet(_DeltaNet):
    """The layer `rwkv_jax.layers.gated_delta_net`, as Qwen3-Next has it.

    Its parameters are `params`, such as those of `gated_delta_net.from_tensors`, or float32 ones
    with the initialisation of Qwen3-Next from `key`. `layer(x, state, segment_ids=...)` is
    `gated_delta_net.apply` of a single row: the output and the next state.

    Raises:
      TypeError: `config` is of another layer; or both `params` and `key` are None, or neither is.
      ValueError: `params` have other names or shapes than those of `config`.
    """

    layer = gated_delta_net

    def __init__(
        self,
        config: gated_delta_net.Config,
        *,
        params: Mapping[str, Any] | None = None,
        implementation: str | None = None,
        key: Key[Array, ""] | None = None,
    ):
        super().__init__(config, params=params, implementation=implementation, key=key)


class KimiDeltaAttention(_DeltaNet):
    """The layer `rwkv_jax.layers.kimi_delta_net`, as Kimi Linear has it.

    Its parameters are `params`, such as those of `kimi_delta_net.from_tensors`, or float32 ones
    with the initialisation of Kimi Linear from `key`. `layer(x, state, segment_ids=...)` is
    `kimi_delta_net.apply` of a single row: the output and the next state.

    Raises:
      TypeError: `config` is of another layer; or both `params` and `key` are None, or neither is.
      ValueError: `params` have other names or shapes than those of `config`.
    """

    layer = kimi_delta_net

    def __init__(
        self,
        config: kimi_delta_net.Config,
        *,
        params: Mapping[str, Any] | None = None,
        implementation: str | None = None,
        key: Key[Array, ""] | None = None,
    ):
        super().__init__(config, params=params, implementation=implementation, key=key)
