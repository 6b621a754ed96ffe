"""The loss of a language model on rows that are longer than memory.

The model reads a row in pieces, with the state from one to the next. Two functions add up the
losses of the pieces, and differ in their gradients. Both sum the gradients of parameters in
float32, whatever the dtype of the parameters.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Bool, Float32, Int

from rwkv_jax._operator import check
from rwkv_jax._packing import segments
from rwkv_jax._typing import Operand
from rwkv_jax.losses._arguments import count
from rwkv_jax.losses._cross_entropy import cross_entropy
from rwkv_jax.models import _arguments
from rwkv_jax.models._generations import generation_of_params
from rwkv_jax.models._kernels import Kernels
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._stacking import select_rows
from rwkv_jax.models._trees import Params, State


def in_pieces(
    params: Any,
    tokens: Int[Operand, " B T"],
    targets: Int[Operand, " B T"],
    state: Any = None,
    *,
    piece: int,
    truncate: bool = False,
    segment_ids: Int[Operand, " B T"] | None = None,
    mask: Operand | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    dtype: DTypeLike = jnp.float32,
    kernels: Kernels | str | None = None,
    recompute: Recompute | None = None,
    z_loss: float = 0.0,
    l2_wrap: float = 0.0,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[Float32[Array, ""], State]:
    """The loss of predicting a target after each of the tokens [B, T], with the activations of
    `piece` tokens of a row in memory at once.

    The model reads T tokens of each row in T / piece pieces, one after another, and the state after
    a piece is the state before the next one. The loss, and without `truncate` its gradients too,
    are those of reading the whole row at once, up to rounding:

    - Without `truncate`, the state before each piece is kept for the backward pass, which computes
      the piece again.
    - With `truncate`, no gradient flows from a piece to those before it. The gradients are computed
      in the forward pass, piece by piece: nothing is kept but their sum, and nothing is computed
      twice.

    Gradients of parameters are summed over pieces in float32, and then get the dtype of the
    parameters. The size of the program does not depend on the number of pieces.

    Args:
      params: the parameters of a model of RWKV-4 to 7, in either form, perhaps with an adapter.
      tokens: integers below the size of the vocabulary, which the model reads.
      targets: the token to be predicted at each place, usually the next one, as `cross_entropy`
        takes it.
      state: the state before the first token; the initial state if None.
      piece: how many tokens of a row the model reads at once. T is a multiple of it.
      truncate: whether gradients stop at the states between pieces. They then reach a given `state`
        from the first piece alone, and none flows through the returned one.
      segment_ids: which of the tokens that the model reads are one document, as `hidden_states`
        of the model takes it. Documents may begin and end anywhere in a piece.
      mask: which of the T predictions of each row count, or their weights, as `cross_entropy` takes
        it; all if None. Leave out those of padding and those of the first token of a document.
      reduction: "mean" over the predictions that count, which is 0 if there are none, or "sum".
      dtype: the dtype of the activations.
      kernels: which kernels compute the model, as its `hidden_states` takes it.
      recompute: what the backward pass of one piece computes again, as `hidden_states` takes it.
      z_loss: as `cross_entropy` takes it, and so are the arguments after it.
      l2_wrap: adds to the gradient, and not to the value.
      soft_cap: the bound of the logits.
      chunk_size: how many tokens have logits in memory at once, at most.

    Returns:
      The loss in nats, and the state after the T tokens. Both are differentiable once in reverse
      mode, but for the state with `truncate`.

    Raises:
      TypeError, ValueError: an argument has a wrong type, dtype, shape or value.
      NotImplementedError: the kernels cannot run the call.
    """
    what = "in_pieces"
    generation = generation_of_params(what, params)
    params = generation.checked(params)
    _arguments.check_tokens(what, tokens, params.emb.weight.shape[0], {2: "[B, T]"})
    rows, length = tokens.shape
    check.number(what, "piece", piece, 1)
    if length % piece:
        raise ValueError(
            f"{what}: tokens has shape {tokens.shape} where piece is {piece}; accepted is [B, T] "
            "with a T that is a multiple of piece"
        )
    check.array(what, "targets", targets)
    if targets.shape != tokens.shape or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(
            f"{what}: targets is {targets.dtype} of shape {targets.shape}; accepted are integers "
            f"of the shape of tokens, {tokens.shape}"
        )
    segment_ids = _arguments.checked_segment_ids(what, segment_ids, (rows, length))
    if mask is not None and mask.shape != (rows, length):
        raise ValueError(
            f"{what}: mask has shape {mask.shape}; accepted is [B, T] = {(rows, length)}"
        )
    check.choice(what, "reduction", reduction, ("mean", "sum"))
    unit = 1.0 if reduction == "sum" else 1 / count(mask, rows * length)

    def of_piece(params: Params, state: State, piece: _Piece) -> tuple[Array, State]:
        if piece.starts is not None:
            fresh = generation.initial_state(params, rows, dtype)
            state = select_rows(piece.starts, fresh, state)
        hidden_states, state = generation.hidden_states(
            *(params, piece.inputs, state),
            segment_ids=piece.segment_ids,
            dtype=dtype,
            kernels=kernels,
            recompute=recompute,
        )
        total = cross_entropy(
            *(hidden_states, params.head.wide(), piece.targets),
            mask=piece.mask,
            reduction="sum",
            z_loss=z_loss,
            l2_wrap=l2_wrap,
            soft_cap=soft_cap,
            chunk_size=chunk_size,
        )
        return total * piece.unit, state

    if state is None:
        state = generation.initial_state(params, rows, dtype)
    pieces = _pieces(jnp.asarray(tokens), jnp.asarray(targets), segment_ids, mask, unit, piece)
    narrow = functools.partial(_narrowed, dtype=dtype)
    return (_truncated if truncate else _exact)(of_piece, narrow, params, state, pieces)


class _Piece(NamedTuple):
    """A piece of all rows [B, P], or all pieces [N, B, P]. `starts` says in which rows the first
    token that is no padding begins a document, and `unit` is what the losses are multiplied by."""

    inputs: Int[Array, "*N B P"]
    targets: Int[Array, "*N B P"]
    segment_ids: Int[Array, "*N B P"] | None
    starts: Bool[Array, "*N B"] | None
    mask: Any
    unit: Float32[Array, "*N"]


_OfPiece: TypeAlias = Callable[[Params, State, _Piece], tuple[Array, State]]
_Narrow: TypeAlias = Callable[[Params], Params]


def _pieces(
    tokens: Array, targets: Array, segment_ids: Array | None, mask: Any, unit: Any, size: int
) -> _Piece:
    count = tokens.shape[1] // size

    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(len(x), count, size), 1, 0)

    starts = None
    if segment_ids is not None:
        marks = cut(segments.marks(segment_ids))
        first = jnp.argmax(marks != segments.PADDING, axis=2, keepdims=True)
        starts = jnp.take_along_axis(marks, first, axis=2)[..., 0] == segments.STARTS
        segment_ids = cut(segment_ids)
    return _Piece(
        inputs=cut(tokens),
        targets=cut(targets),
        segment_ids=segment_ids,
        starts=starts,
        mask=None if mask is None else cut(jnp.asarray(mask)),
        unit=jnp.broadcast_to(jnp.float32(unit), count),
    )


def _narrowed(params: Params, dtype: DTypeLike) -> Params:
    """The parameters with the matrices of blocks as products of `dtype` read them, so that they are
    not rounded again in each piece."""

    def rounded(x: Any) -> Any:
        wide = isinstance(x, Weight) and x.weight.dtype == jnp.float32
        return x._replace(weight=x.weight.astype(dtype)) if wide else x

    blocks = jax.tree.map(rounded, params.blocks, is_leaf=lambda x: isinstance(x, Weight))
    return params._replace(blocks=blocks)


def _wide(x: Array) -> Array:
    """`x` in float32, if it is of 16 bits."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_narrow else x


def _with_gradient_of(x: Array, wide: Array) -> Array:
    """`x`, whose gradient goes to `wide`, which differs from it by rounding alone."""
    return _instead(x, wide) if jnp.issubdtype(x.dtype, jnp.floating) else x


@jax.custom_vjp
def _instead(x: Array, wide: Array) -> Array:
    return x


_instead.defvjp(lambda x, wide: (x, None), lambda _, dx: (None, _wide(dx)))


def _exact(
    of_piece: _OfPiece, narrow: _Narrow, params: Params, state: State, pieces: _Piece
) -> tuple[Array, State]:
    """The loss of all pieces, and the last state."""
    narrowed, wide = narrow(params), jax.tree.map(_wide, params)

    # The forward and the backward pass are two loops, which the compiler cannot merge.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state: State, piece: _Piece) -> tuple[State, Array]:
        # A scan sums the cotangents of what it does not carry in their dtype.
        loss, state = of_piece(jax.tree.map(_with_gradient_of, narrowed, wide), state, piece)
        return state, loss

    state, losses = lax.scan(step, state, pieces)
    return jnp.sum(losses), state


def _truncated(
    of_piece: _OfPiece, narrow: _Narrow, params: Params, state: State, pieces: _Piece
) -> tuple[Array, State]:
    """The loss of all pieces, and the last state. Gradients are computed with the loss, and the
    backward pass only scales them."""
    leaves, structure = jax.tree.flatten((params, state))
    dtypes = [x.dtype for x in leaves]

    def narrowed(leaves: list[Array]) -> tuple[Params, State]:
        params, state = jax.tree.unflatten(structure, leaves)
        return narrow(params), state

    @jax.custom_vjp
    def total(leaves: list[Array], pieces: _Piece) -> tuple[Array, State]:
        params, state = narrowed(leaves)

        def step(state: State, piece: _Piece) -> tuple[State, Array]:
            loss, state = of_piece(params, state, piece)
            return state, loss

        state, losses = lax.scan(step, state, pieces)
        return jnp.sum(losses), state

    def forward(given: list[Any], pieces: Any) -> tuple[tuple[Array, State], dict[int, Array]]:
        leaves, pieces = jax.tree.map(lambda x: x.value, (given, pieces))
        # Which have gradients, in the dtype of their sums.
        varied = {i: _wide(x) for i, x in enumerate(leaves) if given[i].perturbed}
        _, state = used = narrowed(leaves)

        def step(carry: Any, of_step: tuple[Array, _Piece]) -> tuple[Any, Array]:
            state, sums = carry
            is_first, piece = of_step

            def loss_of(varied: dict[int, Array]) -> tuple[Array, State]:
                own = [
                    _with_gradient_of(x, varied[i]) if i in varied else x
                    for i, x in enumerate(jax.tree.leaves(used))
                ]
                params, initial = jax.tree.unflatten(structure, own)
                start = jax.tree.map(lambda x, y: jnp.where(is_first, x, y), initial, state)
                return of_piece(params, start, piece)

            loss, backward, state = jax.vjp(loss_of, varied, has_aux=True)
            (gradients,) = backward(jnp.ones_like(loss))
            return (state, jax.tree.map(jnp.add, sums, gradients)), loss

        zeros = jax.tree.map(jnp.zeros_like, varied)
        is_first = jnp.arange(len(pieces.unit)) == 0
        (state, sums), losses = lax.scan(step, (state, zeros), (is_first, pieces))
        return (jnp.sum(losses), state), sums

    def backward(sums: dict[int, Array], cotangents: Any) -> tuple[list[Array | None], None]:
        of_loss, _ = cotangents
        if isinstance(of_loss, SymbolicZero):
            return [None] * len(dtypes), None
        scaled = {i: (x * of_loss).astype(dtypes[i]) for i, x in sums.items()}
        return [scaled.get(i) for i in range(len(dtypes))], None

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(leaves, pieces)
