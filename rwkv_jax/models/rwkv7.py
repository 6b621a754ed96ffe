"""The RWKV-7 "Goose" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.receptance.weight`, and weights have the official layout,
[outputs, inputs]. (Official vectors have leading axes of size 1, which are left out here.)

Every forward function has two modes, told apart by the rank of its input: a sequence has a time
axis, a single token (decoding) has none. Both take a state and return the next one. Parameters are
cast to the dtype of the activations; normalisation, states and logits are float32.

Rows of a batch may hold several documents, with `segment_ids` as `wkv7` takes them: neither a state
nor the shift of a token crosses from one to the next, and what comes out for padding means nothing.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456) and, for the
initialisation, the training code of RWKV-LM.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Key

from rwkv_jax import _check, _packing
from rwkv_jax._partition import axis_names
from rwkv_jax._typing import State as WkvState
from rwkv_jax.wkv7 import wkv7, wkv7_step

LAYER_NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5
UNIT_NORM_EPS = 1e-12

Tree = TypeVar("Tree")


class Weight(NamedTuple):
    """A linear map [outputs, inputs] without bias, or an embedding [vocabulary, C]."""

    weight: Array


class Norm(NamedTuple):
    """The scale and offset of a normalisation, [C]."""

    weight: Array
    bias: Array


class TimeMixParams(NamedTuple):
    """Vectors are [C], `r_k` is [H, K]; `w1`, `a1`, `v1`, `g1` are [C, rank], `w2` and so on
    [rank, C]. The first layer, whose value the others mix in, has no `v0`, `v1`, `v2`."""

    x_r: Array
    x_w: Array
    x_k: Array
    x_v: Array
    x_a: Array
    x_g: Array
    w0: Array
    w1: Array
    w2: Array
    a0: Array
    a1: Array
    a2: Array
    v0: Array | None
    v1: Array | None
    v2: Array | None
    g1: Array
    g2: Array
    k_k: Array
    k_a: Array
    r_k: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    x_k: Array
    key: Weight
    value: Weight


class BlockParams(NamedTuple):
    """Only the first block has `ln0`, which normalises the embedding."""

    ln0: Norm | None
    ln1: Norm
    ln2: Norm
    att: TimeMixParams
    ffn: ChannelMixParams


class Params(NamedTuple):
    emb: Weight
    blocks: tuple[BlockParams, ...]
    ln_out: Norm
    head: Weight


class TimeMixState(NamedTuple):
    """`shift` [B, C] is the last input, `wkv` [B, H, V, K] the float32 state of `wkv7`."""

    shift: Array
    wkv: Array


class BlockState(NamedTuple):
    """`ffn` [B, C] is the last input of the channel mixing."""

    att: TimeMixState
    ffn: Array


State = tuple[BlockState, ...]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model. `width` (C) is a multiple of `head_size` (K).

    Raises:
      ValueError: a size is not positive, or `width` is not a multiple of `head_size`.
    """

    layers: int
    width: int
    head_size: int = 64
    vocabulary: int = 65536

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"rwkv7: {name} is {size}; accepted is a positive integer")
        if self.width % self.head_size:
            raise ValueError(
                f"rwkv7: width is {self.width}; accepted is a multiple of head_size = "
                f"{self.head_size}"
            )


def init(key: Key[Array, ""], config: Config) -> Params:
    """Parameters with the official initialisation, float32."""
    embedding, head, *blocks = jax.random.split(key, 2 + config.layers)
    vocabulary, width = config.vocabulary, config.width
    params = Params(
        emb=Weight(jax.random.uniform(embedding, (vocabulary, width), minval=-1e-4, maxval=1e-4)),
        blocks=tuple(_init_block(block, layer, config) for layer, block in enumerate(blocks)),
        ln_out=_init_norm(width),
        head=Weight(_orthogonal(head, vocabulary, width, 0.5)),
    )
    return _cast(params, jnp.float32)


def _init_block(key: Key[Array, ""], layer: int, config: Config) -> BlockParams:
    att, ffn = jax.random.split(key)
    width, layers = config.width, config.layers
    return BlockParams(
        ln0=_init_norm(width) if layer == 0 else None,
        ln1=_init_norm(width),
        ln2=_init_norm(width),
        att=init_time_mix(att, width, config.head_size, layer=layer, layers=layers),
        ffn=init_channel_mix(ffn, width, layer=layer, layers=layers),
    )


def init_time_mix(
    key: Key[Array, ""], width: int, head_size: int, *, layer: int, layers: int
) -> TimeMixParams:
    """Time mixing of layer `layer` (from 0) among `layers`.

    Raises:
      ValueError: as `Config`.
    """
    Config(layers, width, head_size)
    keys = iter(jax.random.split(key, 7))
    depth = layer / max(layers - 1, 1)
    channel = jnp.arange(width, dtype=jnp.float32)
    fraction = channel / max(width - 1, 1)
    linear = fraction - 0.5
    half = max(head_size - 1, 1) / 2
    in_head = (channel % head_size) / half - 1
    zigzag = in_head * jnp.abs(in_head)

    def mix(exponent: float) -> Array:
        return _init_mix(width, exponent * (1 - layer / layers))

    def low_rank(size: float) -> tuple[Array, Array]:
        rank = max(32, round(size * math.sqrt(width) / 32) * 32)
        return jnp.zeros((width, rank)), _orthogonal(next(keys), rank, width, 0.1)

    def square(scale: float) -> Weight:
        return Weight(jax.nn.initializers.orthogonal(scale)(next(keys), (width, width)))

    w1, w2 = low_rank(2.5)
    a1, a2 = low_rank(2.5)
    v1, v2 = low_rank(1.7)
    g1, g2 = low_rank(5.0)
    first = layer == 0
    params = TimeMixParams(
        x_r=mix(0.2),
        x_w=mix(0.9),
        x_k=mix(0.7),
        x_v=mix(0.7),
        x_a=mix(0.9),
        x_g=mix(0.2),
        w0=-5.5 + 6 * fraction ** (1 + depth**0.3) + 2.5 * zigzag,
        w1=w1,
        w2=w2,
        a0=-0.19 + 0.3 * zigzag + 0.4 * linear,
        a1=a1,
        a2=a2,
        v0=None if first else 0.73 - 0.4 * linear,
        v1=None if first else v1,
        v2=None if first else v2,
        g1=g1,
        g2=g2,
        k_k=0.71 - 0.1 * linear,
        k_a=jnp.full(width, 1.02),
        r_k=jnp.full((width // head_size, head_size), -0.04),
        receptance=square(1.0),
        key=square(0.1),
        value=square(1.0),
        output=Weight(jnp.zeros((width, width))),
        ln_x=Norm(jnp.full(width, ((1 + layer) / layers) ** 0.7), jnp.zeros(width)),
    )
    return _cast(params, jnp.float32)


def init_channel_mix(
    key: Key[Array, ""], width: int, *, layer: int, layers: int
) -> ChannelMixParams:
    """Channel mixing of layer `layer` (from 0) among `layers`, four times as wide inside."""
    params = ChannelMixParams(
        x_k=_init_mix(width, (1 - layer / layers) ** 4),
        key=Weight(jax.nn.initializers.orthogonal()(key, (4 * width, width))),
        value=Weight(jnp.zeros((width, 4 * width))),
    )
    return _cast(params, jnp.float32)


def _init_mix(width: int, exponent: float) -> Array:
    return 1 - (jnp.arange(width, dtype=jnp.float32) / width) ** exponent


def _init_norm(width: int) -> Norm:
    return Norm(jnp.ones(width), jnp.zeros(width))


def _orthogonal(key: Key[Array, ""], rows: int, columns: int, scale: float) -> Array:
    """Orthogonal and as large per output as a square one, however many the rows."""
    scale *= math.sqrt(max(rows / columns, 1))
    return jax.nn.initializers.orthogonal(scale)(key, (rows, columns))


def names(params: Params) -> dict[str, Array]:
    """The parameters by their official names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


_BY_OUTPUT = ("emb.weight", "head.weight", "receptance.weight", "key.weight", "att.value.weight")
_BY_INPUT = ("output.weight", "ffn.value.weight")
_DISTRIBUTED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_BY_OUTPUT, ("model", "data")),
    (_BY_INPUT, ("data", "model")),
    (("w1", "a1", "v1", "g1"), ("data",)),
    (("w2", "a2", "v2", "g2"), ("data", "model")),
    (("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias"), ("model",)),
)
"""How the names of parameters end, and what their axes are distributed along. Others are whole."""


def shardings(
    params: Params,
    mesh: Mesh,
    *,
    data: str | tuple[str, ...] | None = None,
    model: str | tuple[str, ...] | None = None,
) -> Any:
    """Where the parameters are on a mesh: a tree of `NamedSharding`, for `jit` and `device_put`.

    With `data`, each device keeps a part of the parameters and of whatever is as they are, such as
    moments of the gradients. To compute, gather them along these axes first, which the compiler
    may not find by itself:

        jax.lax.with_sharding_constraint(params, shardings(params, mesh, model="model"))

    Args:
      params: the parameters, or their shapes.
      mesh: a mesh with axes of type Auto.
      data: mesh axes to save memory along, such as those of the batch.
      model: mesh axes of heads, of the channels within the mixings and of the vocabulary.

    Returns:
      The tree of `params`. An axis that does not divide evenly stays whole.

    Raises:
      ValueError: an axis is not one of the mesh.
    """
    along = {"data": data, "model": model}
    devices = {}
    for place, axes in along.items():
        names = axis_names(axes)
        for name in names:
            _check.choice("shardings", place, name, mesh.axis_names)
        devices[place] = math.prod(mesh.shape[name] for name in names)

    def sharding(path: tuple, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        places = next((places for ends, places in _DISTRIBUTED if name.endswith(ends)), ())
        spec = (
            along[place] if size % devices[place] == 0 else None
            for size, place in zip(x.shape, places, strict=False)
        )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, params)


def initial_state(params: Params, batch: int, dtype: DTypeLike = jnp.float32) -> State:
    """The state before the first token: zeros, the shifts in the dtype of the activations."""

    def block(p: BlockParams) -> BlockState:
        # Two arrays, not one twice, so that the state can be donated.
        att, ffn = (jnp.zeros((batch, p.att.r_k.size), dtype) for _ in range(2))
        return BlockState(TimeMixState(att, _initial_wkv(p.att, batch)), ffn)

    return tuple(block(p) for p in params.blocks)


def _initial_wkv(params: TimeMixParams, batch: int) -> WkvState:
    heads, head_size = params.r_k.shape
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)


def rwkv7(
    params: Params,
    tokens: Int[Array, "B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    wkv: Callable = wkv7,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """Logits of the next token after each of `tokens`, [B, T], or after one token each, [B].

    Args:
      params: the parameters.
      tokens: integers below the size of the vocabulary.
      state: what the tokens before these left; `initial_state` if None.
      segment_ids: of sequences, which tokens of a row are one document, 0 for padding. The first
        document goes on from `state`, and the next state is that after the last.
      dtype: what to compute in.
      implementation: of `wkv7`.
      wkv: what computes the time mixing of a sequence: `wkv7`, or `sharding.shard` of it.

    Returns:
      Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with one token each.
    """
    _check_ids("rwkv7", segment_ids, tokens.shape)
    if state is None:
        state = initial_state(params, tokens.shape[0], dtype)
    x = params.emb.weight[tokens].astype(dtype)
    v_first = None
    next_state = []
    for p, s in zip(params.blocks, state, strict=True):
        if p.ln0 is not None:
            x = layer_norm(p.ln0, x)
        dx, att, v_first = time_mix(
            *(p.att, layer_norm(p.ln1, x), s.att, v_first),
            segment_ids=segment_ids,
            implementation=implementation,
            wkv=wkv,
        )
        x = x + dx
        dx, ffn = channel_mix(p.ffn, layer_norm(p.ln2, x), s.ffn, segment_ids=segment_ids)
        x = x + dx
        next_state.append(BlockState(att, ffn))
    x = layer_norm(params.ln_out, x)
    head = params.head.weight.astype(dtype)
    logits = jnp.einsum("...c,nc->...n", x, head, preferred_element_type=jnp.float32)
    return logits, tuple(next_state)


def generate(
    params: Params,
    key: Key[Array, ""],
    prompt: Int[Array, "B T"],
    length: int,
    *,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Int[Array, "B length"]:
    """`length` tokens sampled after `prompt`, which has at least one token.

    The prompt is read as a sequence, then decoding goes token by token. Logits are divided by
    `temperature`, which is above 0.
    """
    forward = functools.partial(rwkv7, params, dtype=dtype, implementation=implementation)
    logits, state = forward(prompt)

    def step(carry: tuple[Array, State], key: Array) -> tuple[tuple[Array, State], Array]:
        logits, state = carry
        tokens = jax.random.categorical(key, logits / temperature)
        return forward(tokens, state), tokens

    _, tokens = lax.scan(step, (logits[:, -1], state), jax.random.split(key, length))
    return tokens.T


def time_mix(
    params: TimeMixParams,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None = None,
    v_first: Float[Array, "B *T C"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    wkv: Callable = wkv7,
) -> tuple[Float[Array, "B *T C"], TimeMixState, Float[Array, "B *T C"]]:
    """Time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`.

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: what the tokens before these left; zeros if None.
      v_first: the value of the first layer, for any other layer.
      segment_ids: as `rwkv7` takes it.
      implementation: of `wkv7`.
      wkv: what computes the time mixing of a sequence: `wkv7`, or `sharding.shard` of it.

    Returns:
      The output like `x`, the next state, and the value of the first layer.

    Raises:
      ValueError: `v_first` is missing.
      TypeError, ValueError: `segment_ids` is wrong, or given with a token.
    """
    _check_ids("time_mix", segment_ids, x.shape[:-1])
    p = _beside(params, x)
    heads, head_size = p.r_k.shape
    if state is None:
        state = TimeMixState(_initial_shift(x), _initial_wkv(p, len(x)))
    before, shift = _shift(x, state.shift, segment_ids)
    mixes = (p.x_r, p.x_w, p.x_k, p.x_v, p.x_a, p.x_g)
    xr, xw, xk, xv, xa, xg = (x + (before - x) * mix for mix in mixes)

    r = _linear(p.receptance, xr)
    w = p.w0 + jnp.tanh(xw @ p.w1) @ p.w2
    k = _linear(p.key, xk)
    v = _linear(p.value, xv)
    if p.v0 is None or p.v1 is None or p.v2 is None:
        v_first = v
    elif v_first is None:
        raise ValueError("time_mix: v_first is None; only the first layer has a value of its own")
    else:
        v = v + (v_first - v) * jax.nn.sigmoid(p.v0 + xv @ p.v1 @ p.v2)
    a = jax.nn.sigmoid(p.a0 + xa @ p.a1 @ p.a2)
    g = jax.nn.sigmoid(xg @ p.g1) @ p.g2
    kk = k * p.k_k
    k = k * (1 + (a - 1) * p.k_a)

    r, w, k, v, a, kk = (z.reshape(*z.shape[:-1], heads, head_size) for z in (r, w, k, v, a, kk))
    kk = _unit(kk)
    mix = wkv if x.ndim == 3 else wkv7_step
    options = {"decay": "sigmoid", "implementation": implementation}
    if segment_ids is not None:
        options["segment_ids"] = segment_ids
    y, last = mix(r, w, k, v, -kk, kk * a, state.wkv, **options)
    y = _normalise(y, GROUP_NORM_EPS).reshape(x.shape) * p.ln_x.weight + p.ln_x.bias
    bonus = (r * k * jnp.broadcast_to(p.r_k, r.shape)).sum(-1, keepdims=True) * v
    y = _linear(p.output, (y + bonus.reshape(x.shape)) * g)
    return y, TimeMixState(shift, last), v_first


def channel_mix(
    params: ChannelMixParams,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
    """Channel mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`.

    `state` is the input of the token before these, zeros if None; `segment_ids` is as `rwkv7` takes
    it. Returns the output like `x` and the next state.
    """
    _check_ids("channel_mix", segment_ids, x.shape[:-1])
    p = _beside(params, x)
    if state is None:
        state = _initial_shift(x)
    before, shift = _shift(x, state, segment_ids)
    k = jax.nn.relu(_linear(p.key, x + (before - x) * p.x_k))
    return _linear(p.value, k * k), shift


def layer_norm(params: Norm, x: Float[Array, "*shape C"]) -> Float[Array, "*shape C"]:
    p = _beside(params, x)
    return _normalise(x, LAYER_NORM_EPS) * p.weight + p.bias


def _normalise(x: Array, eps: float) -> Array:
    """Zero mean and unit variance over the last axis."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)


def _unit(x: Array) -> Array:
    """Unit length over the last axis."""
    wide = x.astype(jnp.float32)
    square = (wide * wide).sum(-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.maximum(square, UNIT_NORM_EPS**2))).astype(x.dtype)


def _check_ids(name: str, ids: Any, shape: tuple[int, ...]) -> None:
    if ids is None:
        return
    if len(shape) != 2:
        raise ValueError(f"{name}: segment_ids with one token a row; accepted is None")
    _packing.checked(name, ids, shape)


def _initial_shift(x: Float[Array, "B *T C"]) -> Float[Array, "B C"]:
    """Zeros, distributed over devices as one token of `x` is. `x` may have no tokens."""
    return jnp.zeros_like(x[:, :1].sum(1) if x.ndim == 3 else x)


def _shift(
    x: Float[Array, "B *T C"], last: Float[Array, "B C"], ids: Int[Array, "B T"] | None = None
) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
    """The token before each token, and the last token.

    The last token is a copy, so that donating the next state deletes neither `x` nor `last`.
    Compiled programs do not copy.
    """
    last = last.astype(x.dtype)
    if x.ndim == 2:
        return last, jnp.copy(x)
    if x.shape[1] == 0:
        return x, jnp.copy(last)
    # Where a sequence is distributed, the compiler finds that this exchanges one token.
    before = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (1, -1, 0), (0, 0, 0)))
    before = lax.dynamic_update_slice_in_dim(before, last[:, None], 0, axis=1)
    if ids is None:
        return before, jnp.copy(x[:, -1])
    marks = _packing.marks(ids)
    there, tokens = marks != _packing.ABSENT, x.shape[1]
    place = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    # Padding may stand before the first token and behind the last one.
    first = place == jnp.min(jnp.where(there, place, tokens), axis=1, keepdims=True)
    before = jnp.where(first[..., None], last[:, None], before)
    before = jnp.where((marks == _packing.STARTS)[..., None], jnp.zeros_like(x), before)
    end = jnp.max(jnp.where(there, place, -1), axis=1)[:, None, None]
    after = jnp.take_along_axis(x, jnp.maximum(end, 0), axis=1)[:, 0]
    return before, jnp.where(end[:, 0] < 0, last, after)


def _linear(p: Weight, x: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, p.weight)


def _cast(params: Tree, dtype: DTypeLike) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _beside(params: Tree, x: Array) -> Tree:
    """In the dtype of `x`, and vectors with as many axes."""

    def beside(p: Array) -> Array:
        return p.reshape((1,) * (x.ndim - 1) + p.shape) if p.ndim == 1 else p

    return jax.tree.map(beside, _cast(params, x.dtype))
