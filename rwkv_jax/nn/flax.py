"""RWKV layers of all generations for Flax NNX, with the official initialisation.

`params` of each layer is a parameter tree of `rwkv_jax.models.rwkv7`, or of another generation,
with an `nnx.Param` at each leaf. The `Config` that a layer is made with says of which. The
docstring of that module describes what the layers compute, their modes and dtypes.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax._typing import Operand
from rwkv_jax.models._generations import generation_of
from rwkv_jax.models._kernels import Kernels, chosen
from rwkv_jax.models._parameters import arrays as arrays
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._trees import Params, State, TimeMixState
from rwkv_jax.nn._arguments import of_model

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
        self.params = parameters(self.generation.init_time_mix(rngs.params(), config, layer))
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
        self.params = parameters(self.generation.init_channel_mix(rngs.params(), config, layer))

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
