"""Formulas that the official initialisations of several generations use."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Key

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm, init_norm
from rwkv_jax.models._trees import BlockParams, Params

Tree = TypeVar("Tree")

InitMix: TypeAlias = Callable[[Array | None, Any, int], Any]

Vector: TypeAlias = Any
"""[C] of NumPy, which takes nothing to compile, in place of a JAX array."""


def init(
    key: Key[Array, ""],
    config: Any,
    init_time_mix: InitMix,
    init_channel_mix: InitMix,
) -> Params:
    """Parameters of a model, float32. The functions give the parameters of the mixings of a layer
    from a key, `config` and the number of the layer, from 0. From a key of None they give what the
    key does not change, and the shapes of the matrices that it does."""
    width, vocabulary, layers = config.hidden_size, config.vocab_size, config.num_layers
    embedding, head, *_ = keys = jax.random.split(key, 2 + layers)
    uniform = functools.partial(jax.random.uniform, minval=-1e-4, maxval=1e-4)
    return float32(
        Params(
            emb=Weight(_random(uniform, embedding, vocabulary, width)),
            blocks=_blocks(keys[2:], config, init_time_mix, init_channel_mix),
            ln_out=init_norm(width),
            head=Weight(orthogonal(head, vocabulary, width, 0.5)),
        )
    )


def float32(params: Tree) -> Tree:
    """The parameters as JAX arrays of float32."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


AT_ONCE = 8
"""How many blocks have their random matrices from one loop."""


def _blocks(
    keys: Key[Array, " layers"], config: Any, init_time_mix: InitMix, init_channel_mix: InitMix
) -> tuple[BlockParams, ...]:
    """The blocks of all layers, each with one of the keys.

    The body of a loop is compiled once for all its blocks. The stacked matrices of a loop take
    memory beside those of its blocks, so one loop does not make those of all blocks.
    """
    layers, kind = config.num_layers, (config, init_time_mix, init_channel_mix)
    blocks: list[BlockParams] = []
    for part in np.array_split(np.arange(layers), -(-layers // AT_ONCE)):
        stacked = _matrices(keys[part[0] : part[-1] + 1], *kind)
        matrices = [{name: x[i] for name, x in stacked.items()} for i in range(len(part))]
        # The next loop begins when the matrices of this one are there.
        keys, matrices = lax.optimization_barrier((keys, matrices))
        blocks += [
            _completed(_block(None, int(layer), *kind), own)
            for layer, own in zip(part, matrices, strict=True)
        ]
    return tuple(blocks)


def _block(
    key: Key[Array, ""] | None,
    layer: int,
    config: Any,
    init_time_mix: InitMix,
    init_channel_mix: InitMix,
) -> BlockParams:
    att, ffn = split(key, 2)
    return BlockParams(
        ln0=init_norm(config.hidden_size) if layer == 0 else None,
        ln1=init_norm(config.hidden_size),
        ln2=init_norm(config.hidden_size),
        att=init_time_mix(att, config, layer),
        ffn=init_channel_mix(ffn, config, layer),
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _matrices(keys: Key[Array, " layers"], *kind: Any) -> dict[str, Array]:
    """The random matrices of blocks by name, stacked."""
    named = _parameters.names(_block(None, 1, *kind))

    def matrices(key: Key[Array, ""]) -> dict[str, Array]:
        made = _parameters.names(_block(key, 1, *kind))
        return {name: made[name] for name, x in named.items() if _is_shape(x)}

    return lax.map(matrices, keys)


def _completed(params: BlockParams, matrices: Mapping[str, Array]) -> BlockParams:
    """The parameters, with matrices in place of their shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: matrices[_parameters.name(path)] if _is_shape(x) else x, params
    )


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def split(key: Key[Array, ""] | None, count: int) -> Iterator[Any]:
    """So many keys from one, or None from None."""
    return iter([None] * count if key is None else jax.random.split(key, count))


def _random(
    draw: Callable[..., Array], key: Key[Array, ""], rows: int, columns: int
) -> Float[Array, "rows columns"]:
    """A matrix of random numbers that `draw` gives from a key and a shape.

    They are the first numbers of an array that is as large for all matrices with at most as many
    rows as columns: most of the time to compile a matrix goes into its generator of random numbers,
    which is compiled once for each size.
    """
    numbers = draw(key, (max(rows, columns) * columns,))
    return numbers[: rows * columns].reshape(rows, columns)


def orthogonal(key: Key[Array, ""] | None, rows: int, columns: int, scale: float) -> Any:
    """A matrix with orthogonal rows or columns, `scale` times as large as an orthonormal one, and
    larger by sqrt(rows / columns) where it has more rows than columns. The shape of it, if the key
    is None."""
    if key is None:
        return jax.ShapeDtypeStruct((rows, columns), jnp.float32)
    scale *= math.sqrt(max(rows / columns, 1))
    # The same matrices as those of `jax.nn.initializers.orthogonal`.
    numbers = _random(jax.random.normal, key, rows, columns)
    q, r = jnp.linalg.qr(numbers.reshape(max(rows, columns), -1))
    q *= jnp.sign(jnp.diagonal(r))[None]
    return scale * (q if rows >= columns else q.T)


def token_shift_mix(width: int, exponent: float) -> Vector:
    """The share of the previous token in each channel: from 1 in the first channel to almost 0 in
    the last, and the smaller the exponent, the faster it falls."""
    return 1 - (np.arange(width) / width) ** exponent


def depth(layer: int, layers: int) -> float:
    """Where a layer (from 0) is in a model: 0 for the first one, 1 for the last."""
    return layer / max(layers - 1, 1)


def hidden_width(width: int) -> int:
    """The hidden channels of the channel mixings of RWKV-5 and 6: 3.5 times those of the model,
    rounded down to a multiple of 32, and at least 32."""
    return max(7 * width // 64 * 32, 32)


def small(key: Key[Array, ""] | None, shape: tuple[int, ...]) -> Any:
    """The second factor of a low-rank map in RWKV-6, whose first factor starts as zeros. The shape
    of it, if the key is None."""
    if key is None:
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.random.uniform(key, shape, minval=-0.01, maxval=0.01)


def _fraction(width: int) -> Vector:
    return np.arange(width) / max(width - 1, 1)


def decay(width: int, layer: int, layers: int, start: float = -6.0, span: float = 5.0) -> Vector:
    """The decay of RWKV-4 to 6, w in exp(-exp(w)): from `start` in the first channel to `start` +
    `span` in the last."""
    return start + span * _fraction(width) ** (0.7 + 1.3 * depth(layer, layers))


def zigzag(width: int) -> Vector:
    """0, 1, -1, and again."""
    return (np.arange(width) + 1.0) % 3 - 1


def bonus(width: int, layer: int, layers: int) -> Vector:
    """The bonus of the present token in RWKV-5 and 6."""
    return depth(layer, layers) * (1 - _fraction(width)) + 0.1 * zigzag(width)


def head_norm(width: int, layer: int, layers: int) -> Norm:
    """The normalisation of the heads, whose scale grows with the layer (from 0)."""
    return Norm(jnp.full(width, ((1 + layer) / layers) ** 0.7), jnp.zeros(width))
