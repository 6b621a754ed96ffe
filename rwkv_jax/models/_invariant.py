"""A model whose results for a sequence have the same bits in any batch and in any pieces."""

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand
from rwkv_jax.models import _arguments, _linear, _mesh
from rwkv_jax.models._model import Generation
from rwkv_jax.models._stacking import block_axes, select_rows


@dataclasses.dataclass(frozen=True)
class Invariant:
    """A model of any generation, whose logits and states for a sequence have the same bits at any
    batch size, at any place in the batch, and however calls cut the sequence into pieces.

    How a product of matrices or a sum rounds depends on the shapes of its operands, and those of a
    sequence on its neighbours and on its length. Here all results come from one loop over tokens,
    whose body takes one token of each of `rows` rows, whatever the call: larger batches are taken
    in groups of that size, and smaller ones filled up. The body has the same shapes in every
    program, and the number of its iterations is unknown to the compiler. So the results have the
    same bits as long as the compiler makes the same code of the same body, and as long as a row of
    a product has the same bits at every place. Other `rows` round in another way.

    The price is that of a step of decoding for every token of a prompt, and of `rows` rows for the
    smallest batch. There are no derivatives in reverse mode.

    `rwkv_jax.generation` and `rwkv_jax.serving` take it in place of a module.

    Attributes:
      module: `rwkv_jax.models.rwkv7`, `rwkv6`, `rwkv5` or `rwkv4`.
      rows: how many rows are computed at once.

    Raises:
      TypeError: `module` is no such module, or `rows` no integer.
      ValueError: `rows` is less than 1.
    """

    module: ModuleType
    rows: int = 8

    def __post_init__(self) -> None:
        of_module("Invariant", self.module)
        check.number("Invariant", "rows", self.rows, 1)

    def initial_state(self, params: Any, batch: int, dtype: DTypeLike = jnp.float32) -> Any:
        """That of the module."""
        return self.module.initial_state(params, batch, dtype)

    def hidden_states(
        self,
        params: Any,
        tokens: Int[Operand, " B *T"],
        state: Any = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
        dtype: DTypeLike = jnp.float32,
        **options: Any,
    ) -> tuple[Float[Array, "B *T C"], Any]:
        """As `hidden_states` of the module, with its arguments and errors."""
        params = self.module.GENERATION.checked(params)
        _arguments.check_tokens("Invariant", tokens, params.emb.weight.shape[0])
        segment_ids = _arguments.checked_segment_ids("Invariant", segment_ids, tokens.shape)
        _arguments.check_state("Invariant", self.initial_state, params, state, len(tokens), dtype)
        tokens = jnp.asarray(tokens)
        ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        return _mesh.partitioned(
            functools.partial(self._hidden_states, dtype, options),
            *(params, tokens, state, ids),
            results=functools.partial(_mesh.specs_of_hidden_states, params, tokens, state),
        )

    def _hidden_states(
        self,
        dtype: DTypeLike,
        options: dict[str, Any],
        params: Any,
        tokens: Array,
        state: Any,
        ids: Array,
    ) -> tuple[Array, Any]:
        batch = tokens.shape[0]
        if state is None:
            state = self.initial_state(params, batch, dtype)
        one = tokens.ndim == 1
        if one:
            tokens, ids = tokens[:, None], ids[:, None]
        count, width = tokens.shape[1], params.head.weight.shape[-1]
        if tokens.size == 0:
            shape = (batch, width) if one else (batch, count, width)
            return jnp.zeros(shape, dtype), state
        groups = -(-batch // self.rows)
        tokens, ids = (self._groups(x, groups) for x in (tokens, ids))
        nothing = self.initial_state(params, self.rows, dtype)
        state = jax.tree_util.tree_map_with_path(
            lambda p, x: self._filled(x, groups, block_axes(p)), state
        )
        all_groups, all_tokens = _unknown(groups, count)

        def group(g: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            states, found = carry
            tokens_here, ids_here = tokens[g], ids[g]

            def token(t: Array, carry: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
                state, last, found = carry
                id = lax.dynamic_index_in_dim(ids_here, t, 1, keepdims=False)
                # Also where no document can start, since all programs are to have the same body.
                starts = (id != 0) & (last != 0) & (id != last)
                state = select_rows(starts, nothing, state)
                x, state = self.module.hidden_states(
                    *(params, lax.dynamic_index_in_dim(tokens_here, t, 1, keepdims=False), state),
                    segment_ids=id,
                    dtype=dtype,
                    **options,
                )
                return state, jnp.where(id != 0, id, last), found.at[:, t].set(x)

            own = jax.tree_util.tree_map_with_path(
                lambda p, x: lax.dynamic_slice_in_dim(x, g * self.rows, self.rows, block_axes(p)),
                states,
            )
            here = jnp.zeros((self.rows, count, width), dtype)
            last = jnp.zeros_like(ids_here, shape=self.rows)
            own, _, here = lax.fori_loop(0, all_tokens, token, (own, last, here))
            states = jax.tree_util.tree_map_with_path(
                lambda p, x, new: lax.dynamic_update_slice_in_dim(
                    x, new, g * self.rows, block_axes(p)
                ),
                *(states, own),
            )
            return states, found.at[g].set(here)

        found = jnp.zeros((len(tokens), self.rows, count, width), dtype)
        state, found = lax.fori_loop(0, all_groups, group, (state, found))
        state = jax.tree_util.tree_map_with_path(
            lambda p, x: lax.slice_in_dim(x, 0, batch, axis=block_axes(p)), state
        )
        found = found.reshape(len(found) * self.rows, count, width)[:batch]
        return found[:, 0] if one else found, state

    def logits(
        self, params: Any, hidden_states: Float[Array, "*shape C"]
    ) -> Float32[Array, "*shape V"]:
        """What the head makes of hidden states, in groups of as many rows."""
        return _mesh.partitioned(
            self._logits,
            *(params.head, hidden_states),
            results=lambda: _mesh.spec_of_product(hidden_states, params.head.weight),
        )

    def _logits(self, head: Any, hidden_states: Array) -> Array:
        shape, width = hidden_states.shape[:-1], hidden_states.shape[-1]
        flat = hidden_states.reshape(math.prod(shape), width)
        vocabulary = len(head.weight)
        if len(flat) == 0:
            return jnp.zeros((*shape, vocabulary), jnp.float32)
        groups = -(-len(flat) // self.rows)
        x = self._groups(flat, groups)
        found = jnp.zeros((groups, self.rows, vocabulary), jnp.float32)

        def group(g: Array, found: Array) -> Array:
            return found.at[g].set(_linear.logits(head, x[g]))

        found = lax.fori_loop(0, _unknown(groups)[0], group, found)
        found = found.reshape(groups * self.rows, vocabulary)[: len(flat)]
        return found.reshape(*shape, vocabulary)

    def apply(
        self, params: Any, tokens: Int[Operand, " B *T"], state: Any = None, **options: Any
    ) -> tuple[Float32[Array, "B *T V"], Any]:
        """As `apply` of the module, with its arguments and errors."""
        params = self.module.GENERATION.checked(params)
        x, state = self.hidden_states(params, tokens, state, **options)
        return self.logits(params, x), state

    def _groups(self, x: Array, groups: int) -> Array:
        """[B, ...] as [groups, rows, ...], with zeros behind."""
        return self._filled(x, groups, 0).reshape(groups, self.rows, *x.shape[1:])

    def _filled(self, x: Array, groups: int, axis: int) -> Array:
        missing = [(0, 0)] * x.ndim
        missing[axis] = 0, groups * self.rows - x.shape[axis]
        return jnp.pad(x, missing)


def of_module(what: str, module: Any) -> Generation:
    """The generation of a module of `rwkv_jax.models`, or of an `Invariant` of one.

    Raises:
      TypeError: `module` is neither. The message begins with `what`.
    """
    module = module.module if isinstance(module, Invariant) else module
    if not isinstance(found := getattr(module, "GENERATION", None), Generation):
        raise TypeError(
            f"{what}: module is a {type(module).__name__}; accepted are rwkv4 to rwkv7 of "
            "rwkv_jax.models, and a models.Invariant of one"
        )
    return found


def _unknown(*numbers: int) -> tuple[Array, ...]:
    """Numbers that the compiler does not know, so that it takes no loop apart because of them."""
    return lax.optimization_barrier(tuple(map(jnp.int32, numbers)))
