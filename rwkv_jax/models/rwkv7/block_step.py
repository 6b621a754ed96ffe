"""A block for one token of each row, in a few CUDA kernels.

They read the weights and the state from memory once, in five launches for one row:

    the products that give r, k and v, and the first ones of the low-rank maps, from the
    normalised, shifted and mixed tokens
    all that stands between these and the output product, `wkv7` included
    the output product, and the sum with the input of the block
    the key product of the channel mixing, from tokens as before, and the squared ReLU
    its value product, and the sum that leaves the block

Several rows of bfloat16 or float16 are multiplied on the matrix units. The normalised, shifted and
mixed tokens and the second products of the low-rank maps then are launches of their own. On GPUs of
compute capability 9.0 the products of bfloat16 are computed in tiles of up to 128 rows; where few
tiles share out the inputs, another launch adds up the sums of the last product. Several
rows of float32 go through the five launches 8 at a time, and each time the weights are read. For
one row, the matrices of the products may also be of int8, as `rwkv_jax.models.quantize` makes them,
and the value matrix of the channel mixing may be stored by input, as `rwkv_jax.models.for_decoding`
stores it: then only its inputs that are not zero are read.

Sums are float32, and vectors between the kernels are rounded less often than by the model. The
kernels are for inference on one device. Derivatives, `vmap` and arrays on a mesh take the model's
usual way.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax._native import gpus, library
from rwkv_jax._native.kernels import DTYPES
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Options
from rwkv_jax._operator.dispatch import Computation, Pass, compute
from rwkv_jax.models import _parameters
from rwkv_jax.models._deferral import MAX_PENDING, Deferred
from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._trees import BlockParams, BlockState, TimeMixState

Block: TypeAlias = Callable[
    [BlockParams, Array, Array | None, BlockState, Array | None], tuple[Array, Array, BlockState]
]

NAME = "rwkv7_block"
MAX_ROWS, MAX_MANY_ROWS, MAX_QUANTISED_ROWS, MAX_ROWS_BY_INPUT = 32, 1024, 1, 1
HEAD_SIZE = 64
VECTORS = 5
LEAST_DEFERRED = 33
"""From so many rows on, updates of states are deferred."""
RANK_MULTIPLE, MAX_RANK = 8, 1024

_MATRICES = {
    **{f"att.{name}": "CC" for name in ("receptance", "key", "value", "output")},
    "ffn.key": "FC",
    "ffn.value": "CF",
}
"""The axes of the matrices that may be quantised."""

_RANKS = {"W": "att.w1", "A": "att.a1", "G": "att.g1", "R": "att.v1"}
"""The axes of low-rank maps, each with a matrix that has it."""


def step_block(
    block: Block,
    params: BlockParams,
    x: Float[Array, "B C"],
    v_first: Float[Array, "B C"] | None,
    state: BlockState,
    segment_ids: Int[Array, " B"] | None = None,
    *,
    required: bool = True,
) -> tuple[Float[Array, "B C"], Float[Array, "B C"], BlockState]:
    """`block(params, x, v_first, state, segment_ids)` by kernels.

    Args:
      block: the block in plain JAX, which is the formula.
      params: the parameters, in the dtype of `x` if they are not quantised. `ln0` has been applied.
      x: a token of each row, the input of the block.
      v_first: the value of the first block, or None in that block.
      state: the state of the block. If it is donated, the next state takes its place.
      segment_ids: a row whose id is 0 has no token, and its state stays.
      required: that the kernels run or raise an error. Otherwise they run where the program is for
        CUDA and one device, and if they can and were measured to be faster, which is so for
        one row, and for several rows of 16-bit floats.

    Returns:
      The output of the block, the value of the first block, and the next state.

    Raises:
      NotImplementedError: the kernels are required and cannot run the call.
      ValueError: arrays have sizes that do not fit together, or `v_first` is missing.
    """
    params = params._replace(ln0=None)
    block = _settled(block)
    if _is_first(params):
        v_first = None
    elif v_first is None:
        raise ValueError(f"{NAME}: v_first is None; only the first block has a value of its own")
    operands = params, x, v_first, state, segment_ids
    whole = all(jax.typeof(a).sharding.mesh.empty for a in jax.tree.leaves(operands))
    if whole and (required or _prefers_kernels(*operands)):
        return _step(block, required, *operands)
    return block(*operands)


def _settled(block: Block) -> Block:
    """The block for a state that may be deferred, which it updates each time. Where one step of a
    program takes it, all steps do, since all of them are for the same platform."""

    def flush(
        params: BlockParams,
        x: Array,
        v_first: Array | None,
        state: BlockState,
        segment_ids: Array | None,
    ) -> tuple[Array, Array, BlockState]:
        own = state.att.wkv
        if not isinstance(own, Deferred):
            return block(params, x, v_first, state, segment_ids)
        operands = params, x, v_first, _with_wkv(state, own.state), segment_ids
        x, v_first, after = block(*operands)
        return x, v_first, _with_wkv(after, Deferred(after.att.wkv, own.waiting))

    return flush


def _with_wkv(state: BlockState, wkv: Any) -> BlockState:
    return state._replace(att=state.att._replace(wkv=wkv))


def deferred(params: BlockParams, state: BlockState) -> BlockState:
    """The state of a block with an update that may be deferred, or as it is where the kernels
    would not be chosen, or deferring was not measured to be faster."""
    rows, heads = state.att.wkv.shape[:2]
    if rows < LEAST_DEFERRED:
        return state
    waiting = jnp.zeros((rows, heads, MAX_PENDING, VECTORS, HEAD_SIZE), jnp.bfloat16)

    def with_schedule(schedule: Array | None) -> BlockState:
        return _with_wkv(state, Deferred(state.att.wkv, waiting, schedule))

    # The last inputs of a mixing are like those of the block.
    x = state.ffn
    v_first = None if _is_first(params) else x
    like = with_schedule(jnp.zeros(4, jnp.int32))
    return with_schedule(None) if _prefers_kernels(params, x, v_first, like, None) else state


def _is_first(params: BlockParams) -> bool:
    return any(x is None for x in (params.att.v0, params.att.v1, params.att.v2))


def _prefers_kernels(
    params: BlockParams,
    x: Array,
    v_first: Array | None,
    state: BlockState,
    segment_ids: Array | None,
) -> bool:
    if len(x) > 1 and x.dtype.itemsize > 2:
        return False  # several rows of float32 are not multiplied on the matrix units
    operands = params, x, v_first, state, segment_ids
    fused = _fused(None, params, v_first, state)
    return fused.why_not("step", "fused", Options(), "cuda", operands) is None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _step(
    block: Block,
    required: bool,
    params: BlockParams,
    x: Array,
    v_first: Array | None,
    state: BlockState,
    segment_ids: Array | None,
) -> tuple[Array, Array, BlockState]:
    operands = params, x, v_first, state, segment_ids
    options = Options(implementation="fused" if required else None)
    return compute(_fused(block, params, v_first, state), "step", options, operands)


@_step.defjvp
def _(block: Block, required: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    del required
    return jax.jvp(block, primals, tangents)


def _given(
    params: BlockParams,
    x: Array,
    v_first: Array | None,
    state: BlockState,
    segment_ids: Array | None,
) -> dict[str, Array]:
    """The operands by name, those that the target takes among them. Scales are vectors, and those
    of groups of inputs are left out."""
    present = jnp.ones(len(x), bool) if segment_ids is None else segment_ids != 0
    ids = present.astype(jnp.int32)
    given = {"x": x, "segment_ids": ids, **_parameters.names(state), **_parameters.names(params)}
    if "att.wkv.state" in given:
        given["att.wkv"] = given.pop("att.wkv.state")
    for name in given.keys() & {f"{matrix}.scale" for matrix in _MATRICES}:
        scale = given.pop(name)
        if scale.shape[1] == 1:
            given[name] = scale.reshape(-1)
    return given if v_first is None else {**given, "v_first": v_first}


def _fused(
    block: Block | None, params: BlockParams, v_first: Array | None, state: BlockState
) -> "_FusedBlock":
    receptance = params.att.receptance
    return _FusedBlock(
        block,
        first=v_first is None,
        quantised=isinstance(receptance, Weight) and receptance.scale is not None,
        by_input=isinstance(params.ffn.value, WeightByInput),
        deferred=isinstance(state.att.wkv, Deferred),
    )


@dataclasses.dataclass(frozen=True)
class _FusedBlock(Computation):
    """`block`, and the kernels for it. The first block and the others have different operands, and
    so have blocks with and without weights of int8, with `ffn.value` by input, and with a state
    that is deferred.

    Kernels that were not asked for run in programs for a single device: on a mesh each device would
    gather all weights for them.
    """

    block: Block | None
    first: bool
    quantised: bool
    by_input: bool
    deferred: bool

    name = NAME
    implementations = ("fused", "xla")
    vmap: ClassVar = "formula"
    mesh: ClassVar = "none"
    only_alone: ClassVar = True

    @functools.cached_property
    def inputs(self) -> dict[str, str]:
        """The axes of the operands of the target, in its order."""
        state = {"x": "BC", "att.shift": "BC", "att.wkv": "BHVK", "ffn": "BC"}
        others = {} if self.first else {"v_first": "BC"}
        norms = {f"{n}.{part}": "C" for n in _NORMS for part in ("weight", "bias")}
        mixes = {f"att.x_{name}": "C" for name in "rwkvag"}
        matrices: dict[str, str] = {}
        for name, axes in _MATRICES.items():
            if self.by_input and name == "ffn.value":
                matrices[f"{name}.by_input"] = axes[::-1]
            else:
                matrices[f"{name}.weight"] = axes
            if self.quantised:
                matrices[f"{name}.scale"] = axes[0]
        waiting = {"att.wkv.waiting": "BHNUK", "att.wkv.schedule": "P"} if self.deferred else {}
        share = {} if self.first else {"att.v0": "C", "att.v1": "CR", "att.v2": "RC"}
        return {
            **state,
            **others,
            "segment_ids": "B",
            **waiting,
            **norms,
            **mixes,
            "ffn.x_k": "C",
            "att.w0": "C",
            "att.w1": "CW",
            "att.w2": "WC",
            "att.a0": "C",
            "att.a1": "CA",
            "att.a2": "AC",
            "att.g1": "CG",
            "att.g2": "GC",
            **share,
            "att.k_k": "C",
            "att.k_a": "C",
            "att.r_k": "HK",
            **matrices,
        }

    @functools.cached_property
    def results(self) -> dict[str, str]:
        """The axes of the results of the target, in its order, without its scratch."""
        names = ["x", "att.shift", "att.wkv", "ffn"]
        made = {"v_first": "BC"} if self.first else {}
        found = {**{name: self.inputs[name] for name in names}, **made}
        if self.deferred:
            found["att.wkv.waiting"] = self.inputs["att.wkv.waiting"]
        return found

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        _, x, _, state, _ = operands
        if self.deferred:
            state = _with_wkv(state, state.att.wkv._replace(schedule=None))
        return None, jax.tree.map(lambda _: "", (x, x, state))

    def formula(self, name: Pass, options: Options, operands: Any) -> Any:
        assert self.block is not None
        return self.block(*operands)

    def why_no_kernel(self, name: Pass, options: Options, operands: Any) -> str | None:
        given = _given(*operands)
        if "ffn.s_emb.weight" in given:
            return "the model is RWKV-7a; the kernels have no DeepEmbed"
        if missing := [x for x in self.inputs if x not in given]:
            return (
                f"{missing[0]} is stored in another way; the kernels take the parameters as "
                "`init`, `load` and `for_decoding` give them, or as `quantize` does with one scale "
                "for each output"
            )
        inputs = {name: given[name] for name in self.inputs}
        check.share_sizes(NAME, self.inputs, inputs)
        own = inputs["x"].dtype
        if own not in check.DTYPES:
            return f"x is {own}; the kernels take {', '.join(check.DTYPES)}"
        if self.deferred and own != jnp.bfloat16:
            return f"x is {own}; the kernels that defer updates of states take bfloat16"
        for operand, x in inputs.items():
            wanted = self._dtypes.get(operand)
            if wanted is not None and x.dtype != wanted:
                return f"{operand} is {x.dtype}; the kernels take {wanted}"
            if wanted is None and x.dtype != own:
                return (
                    f"{operand} is {x.dtype} where x is {own}; the kernels take parameters and "
                    "token shifts in the dtype of the activations"
                )
        sizes = check.sizes(self.inputs, inputs)
        if not (0 < sizes["B"] <= MAX_ROWS or _takes_many_rows(sizes["B"], own)):
            return (
                f"B = {sizes['B']}; the kernels take 1 to {MAX_ROWS} rows, and up to "
                f"{MAX_MANY_ROWS} of bfloat16 on GPUs of compute capability 9.0"
            )
        if self.quantised and sizes["B"] > MAX_QUANTISED_ROWS:
            return f"B = {sizes['B']}; the kernels take {MAX_QUANTISED_ROWS} row with int8 weights"
        if self.by_input and sizes["B"] > MAX_ROWS_BY_INPUT:
            return (
                f"B = {sizes['B']}; the kernels take {MAX_ROWS_BY_INPUT} row with ffn.value by "
                "input"
            )
        if sizes["K"] != HEAD_SIZE:
            return f"K = {sizes['K']}; the kernels take heads of {HEAD_SIZE} channels"
        if sizes["F"] % HEAD_SIZE:
            return (
                f"the channel mixing has {sizes['F']} hidden channels; the kernels take multiples "
                f"of {HEAD_SIZE}"
            )
        for letter, matrix in _RANKS.items():
            rank = sizes.get(letter, RANK_MULTIPLE)
            if rank % RANK_MULTIPLE or not 0 < rank <= MAX_RANK:
                return (
                    f"{matrix} has a rank of {rank}; the kernels take multiples of {RANK_MULTIPLE} "
                    f"up to {MAX_RANK}"
                )
        return None

    @functools.cached_property
    def _dtypes(self) -> dict[str, str]:
        """The dtypes of the operands that do not have that of the activations."""
        others = {"att.wkv": "float32", "segment_ids": "int32"}
        others |= {"att.wkv.waiting": "bfloat16", "att.wkv.schedule": "int32"}
        for name in self.inputs if self.quantised else ():
            matrix, _, part = name.rpartition(".")
            if matrix in _MATRICES:
                others[name] = "float32" if part == "scale" else "int8"
        return others

    def kernel(self, name: Pass, options: Options, operands: Any) -> Any:
        v_first = operands[2]
        given = _given(*operands)
        inputs = {name: given[name] for name in self.inputs}
        sizes = check.sizes(self.inputs, inputs)
        scratch = library.block_scratch(
            dtype=DTYPES[inputs["x"].dtype.name],
            rows=sizes["B"],
            width=sizes["C"],
            hidden=sizes["F"],
            ranks=sum(sizes.get(letter, 0) for letter in _RANKS),
        )
        shapes = [
            ([sizes[x] for x in axes], self._dtypes.get(name, inputs["x"].dtype))
            for name, axes in self.results.items()
        ]
        target = _target(first=self.first, by_input=self.by_input, deferred=self.deferred)
        states = [*self.inputs][1:4] + ["att.wkv.waiting"] * self.deferred
        results = library.call(
            target,
            [*shapes, ((scratch,), jnp.float32)],
            *inputs.values(),
            aliases={[*self.inputs].index(name): [*self.results].index(name) for name in states},
        )
        found = dict(zip(self.results, results, strict=False))
        wkv = found["att.wkv"]
        if self.deferred:
            wkv = Deferred(wkv, found["att.wkv.waiting"])
        after = BlockState(TimeMixState(found["att.shift"], wkv), found["ffn"])
        return found["x"], found["v_first"] if v_first is None else v_first, after


def _takes_many_rows(rows: int, dtype: Any) -> bool:
    fits = MAX_ROWS < rows <= MAX_MANY_ROWS and dtype == jnp.bfloat16
    return fits and gpus.why_not_hopper() is None


def _target(*, first: bool, by_input: bool = False, deferred: bool = False) -> str:
    kinds = "_by_input" * by_input + "_deferred" * deferred
    return f"rwkv_rwkv7_{'first_' * first}block{kinds}_v1"


_NORMS = ("ln1", "ln2", "att.ln_x")

TARGETS = tuple(
    _target(first=first, **kind)
    for kind in ({}, {"by_input": True}, {"deferred": True})
    for first in (True, False)
)
library.register_export_targets(*TARGETS)
