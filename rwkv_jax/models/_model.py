"""The language model of any generation: initialisation, states, the forward pass and the placement
on a mesh, all of which follow from what a generation consists of."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, export
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int, Key, PyTree

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand
from rwkv_jax.models import (
    _arguments,
    _initialisation,
    _mesh,
    _parameters,
    _placement,
    _recomputation,
    _trees,
)
from rwkv_jax.models._blocks import add, in_turn, scan
from rwkv_jax.models._kernels import Kernels, Options, Tokens, chosen
from rwkv_jax.models._linear import embed, logits
from rwkv_jax.models._normalisation import layer_norm
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._trees import (
    BlockParams,
    BlockState,
    InitialWkv,
    Params,
    State,
    TimeMixState,
    first_block,
    has_tables,
    initial_block,
)

_StepBlock: TypeAlias = Callable[..., tuple[Array, Any, BlockState]]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The models of a generation. The module of a generation has the methods as functions.

    Attributes:
      name: the name of its module, such as "rwkv7".
      config: the class of the sizes of a model. All of them have `num_layers`,
        `hidden_size` and `vocab_size`.
      time_mix_params: the class of the parameters of a time mixing.
      mix_tokens: the time mixing. It takes its parameters, a normalisation, its input, its state,
        what the first block has for all others (the value in RWKV-7; otherwise None) and
        `Options`. It returns the input, for its other uses, the output, the next state, and what
        the first block has.
      mix_channels: the channel mixing. It takes its parameters, a normalisation, its input, its
        state and `Options`. It returns the input, the output and the next state.
      init_time_mix: the parameters of a time mixing, from a key, a config and the number of the
        layer, of any dtype. From a key of None it gives the shape of each random matrix.
      init_channel_mix: the same for a channel mixing.
      initial_wkv: the state of the operator before the first token.
      rules: where parameters are on a mesh.
      step_block: a block for one token of each row by kernels of its own, or None. It takes the
        block in plain JAX, which it stands for, and the arguments of that.
      deferred_block: the state of a block whose updates `step_block` may defer, or None. It
        takes the parameters of the block and its state.
    """

    name: str
    config: type
    time_mix_params: type
    mix_tokens: Callable[..., tuple[Array, Array, Any, Any]]
    mix_channels: Callable[..., tuple[Array, Array, Array]]
    init_time_mix: _initialisation.InitMix
    init_channel_mix: _initialisation.InitMix
    initial_wkv: InitialWkv
    rules: _placement.Rules
    step_block: _StepBlock | None = None
    deferred_block: Callable[[BlockParams, BlockState], BlockState] | None = None

    def init(self, key: Key[Array, ""], config: Any) -> Params:
        """Parameters with the official initialisation, float32, of a model with the sizes of
        `config`, a `Config` of the generation.

        Raises:
          TypeError: `config` is no such `Config`.
        """
        if not isinstance(config, self.config):
            given = f"{type(config).__module__}.{type(config).__qualname__}"
            accepted = f"{self.config.__module__}.{self.config.__qualname__}"
            raise TypeError(f"{self.name}: config is a {given}; accepted is a {accepted}")
        return _initialisation.init(key, config, self.init_time_mix, self.init_channel_mix)

    def checked(self, params: Any) -> Params:
        """The parameters of a model of this generation, in either form, or of a Flax module that
        has them.

        Raises:
          TypeError: they are none.
        """
        if not isinstance(params, Params):
            accepted = "a Params, which a model of rwkv_jax.nn has as its params"
            given = type(params).__name__
            raise TypeError(f"{self.name}: params is a {given}; accepted is {accepted}")
        if not isinstance(first_block(params).att, self.time_mix_params):
            given = type(first_block(params).att).__module__.rsplit(".", 1)[-1]
            raise TypeError(f"{self.name}: params is of {given}; accepted are those of {self.name}")
        return params if isinstance(params.ln_out.weight, Array) else _parameters.arrays(params)

    def initial_state(self, params: Params, batch: int, dtype: DTypeLike = jnp.float32) -> State:
        """The state before the first token of `batch` rows, in the form of `params` and on their
        devices, whole on each of them. `dtype` is the dtype of the activations."""
        params, dtype = self.checked(params), _parameters.floating(self.name, dtype)
        rows: Any = batch
        if not export.is_symbolic_dim(rows):
            check.number(self.name, "batch", rows, 0)
        state = _trees.initial_state(self.initial_wkv, params, batch, dtype)
        return _mesh.beside(state, params.ln_out.weight)

    def deferred(self, params: Params, state: State) -> State:
        """What `_deferral.deferred` returns: with many rows of bfloat16, where blocks are
        computed by kernels of their own, a state whose updates may be deferred."""
        if self.deferred_block is None or isinstance(state, Stacked):
            return state
        pairs = zip(params.blocks, state, strict=True)
        return tuple(self.deferred_block(p, s) for p, s in pairs)

    def hidden_states(
        self,
        params: Params,
        tokens: Int[Operand, " B *T"],
        state: State | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
        recompute: Recompute | None = None,
    ) -> tuple[Float[Array, "B *T C"], State]:
        """What `params.head` makes logits of: the normalised output of the last block, for a
        sequence [B, T] of tokens or for one token each, [B].

        `rwkv_jax.losses` computes a loss from it without the logits of all tokens at once.

        Args:
          params: the parameters, in either form: as `init` or as `stacked` gives them.
          tokens: integers below the size of the vocabulary. Inside `jit`, where their values are
            not known, others read the row of another token.
          state: the state after the tokens before `tokens`, in the form of `params`;
            `initial_state` if None. The state of a token shift has the dtype of the activations.
          segment_ids: which tokens of a row are one document, with 0 for padding. The first
            document goes on from `state`, every other one starts anew, and the next state is the
            one after the last document. With one token each, a row whose id is 0 has none: its
            state stays, and its hidden states mean nothing.
          dtype: the dtype of the activations.
          kernels: which kernels compute it: a `models.Kernels`, a name of some, or None.
          recompute: what the backward pass computes again rather than keeps: "mixes", what the
            token shifts of time mixings give; "cheap", all but the products and the results of the
            operator; "blocks", everything but the activations between blocks; or None, what is
            almost free to compute again.

        Returns:
          The hidden states [B, T, C] or [B, C] in `dtype`, and the next state.

        Raises:
          TypeError, ValueError: `params` are not of this generation; `tokens`, `segment_ids` or
            `recompute` are wrong; `state` is not one of this model and this number of rows; `dtype`
            is not float32, bfloat16 or float16; `kernels` is none of those accepted; blocks are to
            be fused where there are no such kernels; or sizes are symbolic and kernels are asked
            for that need numbers; or the model is RWKV-7a and `kernels` has `gather`, `embed` or
            `total`.
          NotImplementedError: the kernels cannot run the call.
        """
        params, kernels = self.checked(params), chosen(self.name, kernels)
        if recompute is not None:
            check.choice(self.name, "recompute", recompute, _recomputation.ACCEPTED)
        _arguments.check_tokens(self.name, tokens, params.emb.weight.shape[0])
        segment_ids = _arguments.checked_segment_ids(self.name, segment_ids, tokens.shape)
        dtype, rows = _parameters.floating(self.name, dtype), tokens.shape[0]
        _arguments.check_state(self.name, self.initial_state, params, state, rows, dtype)
        kernels = kernels.of_call(self.name, tokens.shape, self.step_block is not None)
        if has_tables(params) and (kernels.gather or kernels.embed or kernels.total):
            raise ValueError(
                f"{self.name}: kernels has gather, embed or total, and params has tables for "
                "tokens (DeepEmbed); accepted with them is None"
            )
        tokens = jnp.asarray(tokens)
        operands = (params, tokens, state, segment_ids)
        kernels = _mesh.as_explicit(self.name, kernels, operands, tokens)

        def compute(
            params: Params, tokens: Array, state: Any, segment_ids: Array | None
        ) -> tuple[Array, State]:
            step = self._step_for(params, kernels)
            x = (kernels.embed or embed)(params.emb, tokens, dtype)
            looked_up = _tokens(params, tokens, x) if has_tables(params) else None
            options = Options(segment_ids, kernels, looked_up)
            block = functools.partial(_block, self, step, options)
            recomputed = functools.partial(_recomputation.recomputed, block, recompute)
            if isinstance(params.blocks, Stacked):
                body = recomputed(scanned=True)
                x, next_state = scan(recomputed(), body, params.blocks, x, state)
            else:
                x, next_state = in_turn(recomputed(), params.blocks, x, state)
            return layer_norm(params.ln_out, x), next_state

        results = functools.partial(_mesh.specs_of_hidden_states, params, tokens, state)
        return _mesh.partitioned(compute, *operands, results=results)

    def _step_for(self, params: Params, kernels: Kernels) -> _StepBlock | None:
        """What computes a block by kernels of its own, or None where no block may be."""
        if self.step_block is None or kernels.blocks == "fused":
            return self.step_block
        # A scan over stacked blocks would copy the weights of each block for its kernels.
        if kernels.blocks == "separate" or isinstance(params.blocks, Stacked):
            return None
        return functools.partial(self.step_block, required=False)

    def apply(
        self,
        params: Params,
        tokens: Int[Operand, " B *T"],
        state: State | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
        recompute: Recompute | None = None,
    ) -> tuple[Float32[Array, "B *T vocabulary"], State]:
        """Logits of the next token after each token of a sequence [B, T], or after one token each,
        [B].

        The arguments and errors are those of `hidden_states`.

        Returns:
          Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.
        """
        params = self.checked(params)
        x, next_state = self.hidden_states(
            *(params, tokens, state),
            segment_ids=segment_ids,
            dtype=dtype,
            kernels=kernels,
            recompute=recompute,
        )
        return logits(params.head, x), next_state

    def time_mix(
        self,
        params: Any,
        x: Float[Array, "B *T C"],
        state: TimeMixState | None = None,
        v_first: Float[Array, "B *T C"] | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
        kernels: Kernels | str | None = None,
    ) -> tuple[Float[Array, "B *T C"], TimeMixState, Float[Array, "B *T C"] | None]:
        """The time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`. The
        module of the generation has the formula.

        Args:
          params: the parameters of the time mixing of one layer.
          x: the normalised input.
          state: the state after the tokens before `x`; zeros if None.
          v_first: the value of the first layer, which every other layer of RWKV-7 needs. The other
            generations have no such value.
          segment_ids: as `hidden_states` takes it.
          kernels: as `hidden_states` takes it, but for fused blocks.

        Returns:
          The output, with the shape and dtype of `x`, the next state, and the value of the first
          layer, or None where the generation has no such value.

        Raises:
          ValueError: `v_first` is missing.
          TypeError, ValueError: `segment_ids` or `kernels` is wrong.
        """
        check.array("time_mix", "x", x)
        segment_ids = _arguments.checked_segment_ids("time_mix", segment_ids, x.shape[:-1])
        operands = (params, x, state, v_first, segment_ids)
        kernels = chosen("time_mix", kernels).of_call("time_mix", x.shape[:-1], False)
        kernels = _mesh.as_explicit("time_mix", kernels, operands, x)

        def compute(params: Any, x: Array, state: Any, v_first: Any, segment_ids: Any) -> Any:
            options = Options(segment_ids, kernels)
            return self.mix_tokens(params, None, x, state, v_first, options)[1:]

        def results() -> Any:
            spec = _mesh.spec_of(x)
            return spec, _mesh.specs_of_next(state, x), spec

        return _mesh.partitioned(compute, *operands, results=results)

    def channel_mix(
        self,
        params: Any,
        x: Float[Array, "B *T C"],
        state: Float[Array, "B C"] | None = None,
        *,
        segment_ids: Int[Operand, " B *T"] | None = None,
    ) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
        """The channel mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`. The
        module of the generation has the formula.

        Args:
          params: the parameters of the channel mixing of one layer.
          x: the normalised input.
          state: the input of the token before the first one; zeros if None.
          segment_ids: as `hidden_states` takes it.

        Returns:
          The output, with the shape and dtype of `x`, and the next state.

        Raises:
          TypeError, ValueError: `segment_ids` is wrong.
          ValueError: `params` are of RWKV-7a, which looks up tokens and not activations alone.
        """
        check.array("channel_mix", "x", x)
        segment_ids = _arguments.checked_segment_ids("channel_mix", segment_ids, x.shape[:-1])

        def compute(params: Any, x: Array, state: Any, segment_ids: Any) -> Any:
            return self.mix_channels(params, None, x, state, Options(segment_ids, Kernels()))[1:]

        def results() -> Any:
            return _mesh.spec_of(x), _mesh.specs_of_next(state, x)

        return _mesh.partitioned(compute, *(params, x, state, segment_ids), results=results)

    def shardings(
        self,
        params: Params,
        mesh: Mesh,
        *,
        data: _placement.MeshAxes = None,
        model: _placement.MeshAxes = None,
    ) -> PyTree[NamedSharding]:
        """Where the parameters are on a mesh: a tree of `NamedSharding`, for `jit` and
        `device_put`.

        With `data`, each device keeps a part of the parameters, and of every tree with the shapes
        of the parameters, such as the moments of an optimizer. Gather the parameters along these
        axes before computing with them, because the compiler may not do so by itself:

            jax.lax.with_sharding_constraint(params, shardings(params, mesh, model="model"))

        Args:
          params: the parameters, or their shapes.
          mesh: a mesh with axes of type Auto or Explicit.
          data: mesh axes that only save memory, such as the axes of the batch.
          model: mesh axes that split the heads, the channels within the mixings and the vocabulary.

        Returns:
          The tree of `params` with a sharding at each leaf. An axis that does not divide evenly
          stays whole, and so do the channels of the time mixing if the heads do not divide evenly.

        Raises:
          TypeError: `params` are not of this generation, `mesh` is no mesh, or `data` or `model`
            are no names.
          ValueError: `data` or `model` names an axis that the mesh does not have, or both do one.
        """
        params = self.checked(params)
        # The axes of a state of an operator begin with rows and heads, in RWKV-4 channels.
        state = jax.eval_shape(functools.partial(self.initial_wkv, first_block(params).att, 1))
        heads = jax.tree.leaves(state)[0].shape[1]
        return _placement.shardings(params, mesh, self.rules, heads, data=data, model=model)


def _tokens(params: Params, ids: Array, x: Array) -> Tokens:
    """Tokens with what the first block makes of their embeddings."""
    norm = first_block(params).ln0
    return Tokens(ids, x if norm is None else layer_norm(norm, x))


def _block(
    generation: Generation,
    step: _StepBlock | None,
    options: Options,
    p: BlockParams,
    x: Float[Array, "B *T C"],
    of_first: Any,
    s: BlockState | None,
) -> tuple[Array, Any, BlockState]:
    """The activations after a block, what the first block has for all others, and the next
    state."""
    if options.kernels.gather is not None:
        p, x, of_first = options.kernels.gather(p, x, of_first)
    if s is None:
        s = initial_block(generation.initial_wkv, p, x.shape[0], x.dtype)
    if p.ln0 is not None:
        x = layer_norm(p.ln0, x)
    if step is None:
        return _mixings(generation, options, p, x, of_first, s)

    def block(p: BlockParams, x: Array, of_first: Any, s: BlockState, ids: Array | None) -> Any:
        return _mixings(generation, options._replace(segment_ids=ids), p, x, of_first, s)

    return step(block, p, x, of_first, s, options.segment_ids)


def _mixings(
    generation: Generation,
    options: Options,
    p: BlockParams,
    x: Float[Array, "B *T C"],
    of_first: Any,
    s: BlockState,
) -> tuple[Array, Any, BlockState]:
    """`_block` after the normalisation of the embedding."""
    x, dx, att, of_first = generation.mix_tokens(p.att, p.ln1, x, s.att, of_first, options)
    after = functools.partial(_after, options.kernels.total)
    x, dx, ffn = generation.mix_channels(p.ffn, p.ln2, after(x, dx), s.ffn, options)
    return after(x, dx), of_first, BlockState(att, ffn)


def _after(total: Callable[[Array], Array] | None, x: Array, dx: Array) -> Array:
    """The activations after a mixing of `x` that has given `dx`, perhaps on one of many devices."""
    return add(x, dx if total is None else _recomputation.product(total(dx)))
