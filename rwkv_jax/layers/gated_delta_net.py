"""The layer Gated DeltaNet, as Qwen3-Next and Qwen3.5 have it in place of most attention layers.

Parameters have the names, the shapes and the orientation of the checkpoints, so that
`params["out_proj"]["weight"]` is `out_proj.weight`, [outputs, inputs]. For each token x:

    q, k, v, z, b, a = projections of x
    q, k, v = short_convolution(q, k, v)               causal, of conv_size tokens, then SiLU
    q, k = l2_norm(q), l2_norm(k)                      in each head
    g = -exp(A_log) softplus(a + dt_bias)              for each head, see `log_decay`
    beta = sigmoid(b)
    o = gated_delta_rule(q, k, v, g, beta)
    y = out_proj (norm(o) * silu(z))                   see `gated_rms_norm`

Qwen3-Next has two matrices for the projections, `in_proj_qkvz` and `in_proj_ba`, whose outputs are
ordered by key head: those of a key head are its q and k, and the v and z, or the b and a, of all
value heads that it serves. Qwen3.5 has the matrices `in_proj_qkv`, `in_proj_z`, `in_proj_b` and
`in_proj_a`, each ordered by head.

Products are computed in the dtype of x; gates, normalisations and the convolution in float32.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (arXiv:2412.06464) and the
implementations of Qwen3-Next and Qwen3.5 in `transformers`, for the initialisation as well.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Key

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand
from rwkv_jax.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from rwkv_jax.layers import _delta_layer
from rwkv_jax.layers._delta_layer import DeltaNetState, Params, Projections, linear
from rwkv_jax.layers.delta_gates import gated_rms_norm, log_decay

_NAME = "gated_delta_net"

_SIZES = (
    "hidden_size",
    "num_key_heads",
    "num_value_heads",
    "key_head_size",
    "value_head_size",
    "conv_size",
)

_FIELDS = {
    "hidden_size": "hidden_size",
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_head_size": "linear_key_head_dim",
    "value_head_size": "linear_value_head_dim",
    "conv_size": "linear_conv_kernel_dim",
    "norm_eps": "rms_norm_eps",
}
"""The names in `config.json`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of the layer.

    Attributes:
      hidden_size: the channels of its input and output.
      num_key_heads: the heads of q and k.
      num_value_heads: the heads of v, z and the decay, a multiple of `num_key_heads`.
      key_head_size: the channels of a head of q and k.
      value_head_size: the channels of a head of v and z.
      conv_size: the tokens that the convolution sees.
      norm_eps: the eps of `norm`.
      projections: "by key head" as in Qwen3-Next, or "separate" as in Qwen3.5.
      initializer_range: the standard deviation of initial matrices.

    Raises:
      ValueError: a size is not positive, `num_value_heads` is no multiple of `num_key_heads`, or
        `projections` is none of the names.
      TypeError: a size is no integer.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_size: int
    value_head_size: int
    conv_size: int = 4
    norm_eps: float = 1e-6
    projections: str = "by key head"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _delta_layer.check_sizes(_NAME, self, _SIZES)
        check.choice(_NAME, "projections", self.projections, ("by key head", "separate"))
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"{_NAME}: num_value_heads is {self.num_value_heads}; accepted is a multiple of "
                f"num_key_heads = {self.num_key_heads}"
            )

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "Config":
        """The configuration in a `config.json` of Qwen3-Next or Qwen3.5, as a dictionary.

        Raises:
          ValueError: it lacks a size, or has an activation other than SiLU.
        """
        config = config.get("text_config", config)
        fields = _delta_layer.read_config(f"{_NAME}.Config: config", config, _FIELDS)
        separate = str(config.get("model_type", "")).startswith("qwen3_5")
        return cls(
            **fields,
            projections="separate" if separate else "by key head",
            initializer_range=config.get("initializer_range", 0.02),
        )

    @property
    def key_channels(self) -> int:
        return self.num_key_heads * self.key_head_size

    @property
    def value_channels(self) -> int:
        return self.num_value_heads * self.value_head_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        qkv = 2 * self.key_channels + self.value_channels
        if self.projections == "separate":
            rows = {"qkv": qkv, "z": self.value_channels}
            rows |= {"b": self.num_value_heads, "a": self.num_value_heads}
        else:
            rows = {"qkvz": qkv + self.value_channels, "ba": 2 * self.num_value_heads}
        return {
            **{f"in_proj_{x}.weight": (n, self.hidden_size) for x, n in rows.items()},
            "conv1d.weight": (qkv, 1, self.conv_size),
            "A_log": (self.num_value_heads,),
            "dt_bias": (self.num_value_heads,),
            "norm.weight": (self.value_head_size,),
            "out_proj.weight": (self.hidden_size, self.value_channels),
        }


def init(key: Key[Array, ""], config: Config) -> Params:
    """Parameters with the initialisation of Qwen3-Next, float32: `A_log` is the logarithm of
    numbers that are uniform between 0.01 and 16, `dt_bias` and `norm.weight` are 1, and matrices
    and the filters of the convolution are normal."""
    others = {
        "A_log": _delta_layer.log_uniform(0.01, 16.0),
        "dt_bias": _delta_layer.ones,
        "norm.weight": _delta_layer.ones,
    }
    return _delta_layer.initialised(key, config.shapes, config.initializer_range, others)


def from_tensors(tensors: Mapping[str, Any], prefix: str = "", *, config: Config) -> Params:
    """The parameters of a layer of a checkpoint.

    Args:
      tensors: JAX or numpy arrays by their names, such as all those of a checkpoint.
      prefix: what the names of the layer begin with, such as "model.layers.0.linear_attn.".
      config: the sizes.

    Raises:
      TypeError: a tensor of the layer is no array, or is not float32, bfloat16 or float16.
      ValueError: a tensor is missing or has another shape, or the prefix has one more tensor.
    """
    return _delta_layer.from_tensors(f"{_NAME}.from_tensors", config.shapes, tensors, prefix, {})


def checked(params: Mapping[str, Any], config: Config) -> Params:
    """The parameters, if they have the names and shapes of `config`.

    Raises:
      TypeError: one is no array, or is not float32, bfloat16 or float16.
      ValueError: one is missing or has another shape, or there is another one.
    """
    return _delta_layer.nested(_delta_layer.by_name(_NAME, config.shapes, params, {}))


def initial_state(config: Config, rows: int, dtype: DTypeLike = jnp.float32) -> DeltaNetState:
    """The state before the first token of each row, zeros. `dtype` is that of the activations."""
    conv, recurrent = _state_shapes(config, rows)
    return DeltaNetState(jnp.zeros(conv, dtype), jnp.zeros(recurrent, jnp.float32))


def apply(
    params: Mapping[str, Any],
    x: Float[Operand, "B *T C"],
    state: DeltaNetState | None = None,
    *,
    config: Config,
    segment_ids: Int[Operand, "B *T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B *T C"], DeltaNetState]:
    """The layer of a sequence [B, T, C] or of one token of each row [B, C].

    Args:
      params: the parameters, of any float dtype.
      x: the input, float32, bfloat16 or float16.
      state: the state before the first token; zeros if None.
      config: the sizes.
      segment_ids: integers [B, T] or [B], as in `gated_delta_rule`: neither the convolution nor the
        operator reads a token of another segment. At padding, which is 0, the output is 0, and it
        changes no state.
      implementation: that of `gated_delta_rule`.

    Returns:
      The output in the dtype of `x`, and the next state.

    Raises:
      TypeError, ValueError: an argument has another type, shape or dtype.
      NotImplementedError: the implementation cannot run the call.
    """
    p = _delta_layer.by_name(_NAME, config.shapes, params, {})
    tokens = _delta_layer.tokens(_NAME, x, config.hidden_size, segment_ids)
    _delta_layer.check_state(_NAME, state, *_state_shapes(config, len(tokens.x)))
    q, k, v, z, b, a = _projected(p, tokens.x, config)
    ends = (config.key_channels, 2 * config.key_channels)
    o, state = _delta_layer.delta_rule(
        *(gated_delta_rule, gated_delta_rule_step),
        tokens,
        Projections(q, k, v),
        Projections(*jnp.split(p["conv1d.weight"], ends)),
        *(config.key_head_size, config.value_head_size),
        g=log_decay(a, p["A_log"], p["dt_bias"]),
        beta=jax.nn.sigmoid(b.astype(jnp.float32)),
        state=state,
        implementation=implementation,
    )
    z = _delta_layer.heads(z, config.value_head_size)
    o = gated_rms_norm(o, z, p["norm.weight"], eps=config.norm_eps, activation="silu")
    y = linear(p["out_proj.weight"], o.reshape(*o.shape[:2], config.value_channels))
    return tokens.as_given(y), state


def _projected(p: Mapping[str, Array], x: Array, config: Config) -> list[Array]:
    """q, k, v, z, b and a, [B, T, channels or heads], ordered by head."""
    if config.projections == "separate":
        qkv, *others = (linear(p[f"in_proj_{name}.weight"], x) for name in ("qkv", "z", "b", "a"))
        ends = (config.key_channels, 2 * config.key_channels)
        return [*jnp.split(qkv, ends, axis=-1), *others]
    groups, size = config.num_key_heads, config.key_head_size
    values = config.num_value_heads // groups * config.value_head_size
    qkvz, ba = (linear(p[f"in_proj_{name}.weight"], x) for name in ("qkvz", "ba"))
    qkvz, ba = (y.reshape(*x.shape[:2], groups, y.shape[-1] // groups) for y in (qkvz, ba))
    ends = (size, 2 * size, 2 * size + values)
    parts = [*jnp.split(qkvz, ends, axis=-1), *jnp.split(ba, 2, axis=-1)]
    return [part.reshape(*x.shape[:2], groups * part.shape[-1]) for part in parts]


def _state_shapes(config: Config, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    channels = 2 * config.key_channels + config.value_channels
    recurrent = (rows, config.num_value_heads, config.value_head_size, config.key_head_size)
    return (rows, config.conv_size - 1, channels), recurrent
