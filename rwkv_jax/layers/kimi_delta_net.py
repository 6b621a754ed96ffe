"""The layer of Kimi Delta Attention, as Kimi Linear has it in place of most attention layers.

Parameters have the names, the shapes and the orientation of the checkpoints, so that
`params["o_proj"]["weight"]` is `o_proj.weight`, [outputs, inputs]. For each token x:

    q, k, v = short_convolution(q_proj x, k_proj x, v_proj x)  of conv_size tokens, then SiLU
    q, k = l2_norm(q), l2_norm(k)                              in each head
    g = -exp(A_log) softplus(f_b_proj f_a_proj x + dt_bias)    for each channel, see `log_decay`
    beta = sigmoid(b_proj x)
    o = kimi_delta_attention(q, k, v, g, beta)
    y = o_proj (o_norm(o) * sigmoid(g_b_proj g_a_proj x))      see `gated_rms_norm`

Products are computed in the dtype of x; gates, normalisations and the convolution in float32.

Source: "Kimi Linear: An Expressive, Efficient Attention Architecture" (arXiv:2510.26692) and the
implementations of Kimi Linear and, for the lower bound of the decay, GLM-5.3 in `transformers`, for
the initialisation as well.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Key

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand
from rwkv_jax.kimi_delta_attention import kimi_delta_attention, kimi_delta_attention_step
from rwkv_jax.layers import _delta_layer
from rwkv_jax.layers._delta_layer import DeltaNetState, Params, Projections, heads, linear
from rwkv_jax.layers.delta_gates import gated_rms_norm, log_decay

_NAME = "kimi_delta_net"

_SIZES = ("hidden_size", "num_heads", "head_size", "conv_size")

_NESTED = {"num_heads": "num_heads", "head_size": "head_dim", "conv_size": "short_conv_kernel_size"}
"""The names in `linear_attn_config` of a `config.json`."""

_FLAT = {
    "num_heads": "linear_num_heads",
    "head_size": "linear_head_dim",
    "conv_size": "linear_conv_kernel_dim",
}
"""The names in a `config.json` that `transformers` writes."""

_LOWER_BOUND = -5.0
"""The lower bound of a configuration that asks for one and does not name it."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of the layer.

    Attributes:
      hidden_size: the channels of its input and output.
      num_heads: its heads.
      head_size: the channels of a head, and the rank of the maps that give decay and output gate.
      conv_size: the tokens that the convolution sees.
      norm_eps: the eps of `o_norm`.
      lower_bound: the least log decay, such as -5; None, as in Kimi Linear, for none.
      initializer_range: the standard deviation of initial matrices.

    Raises:
      ValueError: a size is not positive, or `lower_bound` is not below 0.
      TypeError: a size is no integer.
    """

    hidden_size: int
    num_heads: int
    head_size: int
    conv_size: int = 4
    norm_eps: float = 1e-5
    lower_bound: float | None = None
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _delta_layer.check_sizes(_NAME, self, _SIZES)
        bound = self.lower_bound
        if bound is not None and check.real(_NAME, "lower_bound", bound) >= 0:
            raise ValueError(f"{_NAME}: lower_bound is {bound}; accepted is a number below 0")

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> "Config":
        """The configuration in a `config.json` of Kimi Linear or GLM-5.3, as a dictionary.

        Raises:
          ValueError: it lacks a size, or has an activation other than SiLU.
        """
        op = f"{_NAME}.Config: config"
        config = config.get("text_config", config)
        own = {"hidden_size": "hidden_size", "norm_eps": "rms_norm_eps"}
        bounded = str(config.get("model_type", "")).startswith("glm5_next")
        linear = config.get("linear_attn_config")
        if linear is None:
            fields = _delta_layer.read_config(op, config, own | _FLAT)
            bound = config.get("linear_lower_bound", _LOWER_BOUND if bounded else None)
        else:
            fields = _delta_layer.read_config(op, config, own)
            fields |= _delta_layer.read_config(f"{op}.linear_attn_config", linear, _NESTED)
            bound = linear.get("gate_lower_bound", config.get("linear_lower_bound"))
            if bound is None and linear.get("safe_gate", bounded):
                bound = _LOWER_BOUND
        deviation = config.get("initializer_range", 0.02)
        return cls(**fields, lower_bound=bound, initializer_range=deviation)

    @property
    def channels(self) -> int:
        """The channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        outer, inner, rank = self.hidden_size, self.channels, self.head_size
        return {
            **{f"{x}_proj.weight": (inner, outer) for x in "qkv"},
            **{f"{x}_conv1d.weight": (inner, 1, self.conv_size) for x in "qkv"},
            "f_a_proj.weight": (rank, outer),
            "f_b_proj.weight": (inner, rank),
            "A_log": (1, 1, self.num_heads, 1),
            "dt_bias": (inner,),
            "b_proj.weight": (self.num_heads, outer),
            "g_a_proj.weight": (rank, outer),
            "g_b_proj.weight": (inner, rank),
            "o_norm.weight": (self.head_size,),
            "o_proj.weight": (outer, inner),
        }

    @property
    def _also(self) -> dict[str, tuple[int, ...]]:
        """The shapes that tensors have in some checkpoints."""
        return {"A_log": (self.num_heads,)}


def init(key: Key[Array, ""], config: Config) -> Params:
    """Parameters with the initialisation of Kimi Linear, float32: `A_log` is the logarithm of
    numbers that are uniform between 1 and 16, or 0 if there is a lower bound; softplus(`dt_bias`)
    is log-uniform between 0.001 and 0.1; `o_norm.weight` is 1; and matrices and the filters of the
    convolution are normal."""
    others = {
        "A_log": _delta_layer.log_uniform(1.0, 16.0),
        "dt_bias": _initial_offset,
        "o_norm.weight": _delta_layer.ones,
    }
    if config.lower_bound is not None:
        others["A_log"] = lambda key, shape: jnp.zeros(shape, jnp.float32)
    return _delta_layer.initialised(key, config.shapes, config.initializer_range, others)


def _initial_offset(key: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of softplus, y + log(1 - exp(-y)), of log-uniform numbers y."""
    least, most = math.log(1e-3), math.log(1e-1)
    y = jnp.exp(jax.random.uniform(key, shape, minval=least, maxval=most))
    return y + jnp.log(-jnp.expm1(-y))


def from_tensors(tensors: Mapping[str, Any], prefix: str = "", *, config: Config) -> Params:
    """The parameters of a layer of a checkpoint.

    Args:
      tensors: JAX or numpy arrays by their names, such as all those of a checkpoint.
      prefix: what the names of the layer begin with, such as "model.layers.0.self_attn.".
      config: the sizes.

    Raises:
      TypeError: a tensor of the layer is no array, or is not float32, bfloat16 or float16.
      ValueError: a tensor is missing or has another shape, or the prefix has one more tensor.
    """
    op = f"{_NAME}.from_tensors"
    return _delta_layer.from_tensors(op, config.shapes, tensors, prefix, config._also)


def checked(params: Mapping[str, Any], config: Config) -> Params:
    """The parameters, if they have the names and shapes of `config`.

    Raises:
      TypeError: one is no array, or is not float32, bfloat16 or float16.
      ValueError: one is missing or has another shape, or there is another one.
    """
    return _delta_layer.nested(_delta_layer.by_name(_NAME, config.shapes, params, config._also))


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
      segment_ids: integers [B, T] or [B], as in `kimi_delta_attention`: neither the convolution nor
        the operator reads a token of another segment. At padding, which is 0, the output is 0, and
        it changes no state.
      implementation: that of `kimi_delta_attention`.

    Returns:
      The output in the dtype of `x`, and the next state.

    Raises:
      TypeError, ValueError: an argument has another type, shape or dtype.
      NotImplementedError: the implementation cannot run the call.
    """
    p = _delta_layer.by_name(_NAME, config.shapes, params, config._also)
    tokens = _delta_layer.tokens(_NAME, x, config.hidden_size, segment_ids)
    _delta_layer.check_state(_NAME, state, *_state_shapes(config, len(tokens.x)))

    def projection(*names: str) -> Array:
        y = tokens.x
        for name in names:
            y = linear(p[f"{name}_proj.weight"], y)
        return y

    shape, size = (config.num_heads, config.head_size), config.head_size
    g = log_decay(
        heads(projection("f_a", "f_b"), size),
        p["A_log"].reshape(config.num_heads),
        p["dt_bias"].reshape(shape),
        lower_bound=config.lower_bound,
    )
    o, state = _delta_layer.delta_rule(
        *(kimi_delta_attention, kimi_delta_attention_step),
        tokens,
        Projections(*(projection(name) for name in "qkv")),
        Projections(*(p[f"{name}_conv1d.weight"] for name in "qkv")),
        *(size, size),
        g=g,
        beta=jax.nn.sigmoid(projection("b").astype(jnp.float32)),
        state=state,
        implementation=implementation,
    )
    gate = heads(projection("g_a", "g_b"), size)
    o = gated_rms_norm(o, gate, p["o_norm.weight"], eps=config.norm_eps, activation="sigmoid")
    y = linear(p["o_proj.weight"], o.reshape(*o.shape[:2], config.channels))
    return tokens.as_given(y), state


def _state_shapes(config: Config, rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    recurrent = (rows, config.num_heads, config.head_size, config.head_size)
    return (rows, config.conv_size - 1, 3 * config.channels), recurrent
