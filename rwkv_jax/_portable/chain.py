"""An implementation in plain `jax.numpy` of any operator with one state [V, K] for each head.

What a sub-chunk of some tokens does to the state before it follows from parts that its tokens alone
make up (`rwkv_jax._portable.recurrence`). The parts of all sub-chunks of a chunk group are made at
once, in few, large products. On a CPU the forward pass goes from token to token instead (see
`rwkv_jax._portable.steps`).

The backward pass makes the parts of each chunk group again, from the last to the first. The states
before its sub-chunks follow from the saved ones. The cotangents of the states after its sub-chunks,
and of U, come from a chain that starts at the end. With all of these fixed, the equations of a
sub-chunk are linear in the parts. So the gradients of the parts are products of two factors each,
which needs no derivative of the inverse.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator import check
from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Operands,
    Options,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.decay import BOUNDED
from rwkv_jax._portable.products import Products, exact, on_matrix_units
from rwkv_jax._portable.recurrence import (
    Parts,
    along,
    ask,
    back_along,
    for_chain,
    solve,
    through,
    within,
)
from rwkv_jax._portable.steps import Steps, steps
from rwkv_jax._portable.sub_chunks import (
    ELSEWHERE,
    LONG_SUB_CHUNKS,
    ON_CPU,
    Sizes,
    SubChunksOfRows,
    sub_chunks,
)
from rwkv_jax._portable.terms import TermsFn

_Sums: TypeAlias = tuple[Any, Arrays, Arrays]


@dataclass(frozen=True, eq=False)
class Chain(Implementation):
    """Runs everywhere, for any sizes.

    The inputs are those of tokens, [B, T, H, K or V], and parameters [H, K]. `w` and `k` are among
    them, and the last axis of `w` may have the size 1.
    """

    signature: Signature
    terms: TermsFn

    def __post_init__(self) -> None:
        for name, axes in self.signature.inputs.items():
            if not ((len(axes) == 4 and axes.startswith("BTH")) or axes == "HK"):
                raise ValueError(
                    f"{self.signature.name}: {name} has the axes [{', '.join(axes)}]; accepted by "
                    "Chain are [B, T, H, and one more] and [H, K]"
                )

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        reason = check.symbolic(self.signature.sizes(operands.inputs), "TKV")
        return reason and f"{reason}; xla cuts rows into chunks, whose number it has to know"

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        return "chunks in plain jax.numpy"

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._on_any_platform(self._forward, options, operands, goes_by_tokens=True)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return self._on_any_platform(self._backward, options, operands, goes_by_tokens=False)

    def _on_any_platform(
        self,
        compute: Callable[[Options, Any, Products, SubChunksOfRows], Any],
        options: Options,
        operands: Operands,
        *,
        goes_by_tokens: bool,
    ) -> Any:
        """A pass with the products and chunk groups that suit the platform that it is lowered for.
        One that does not go by tokens on a CPU is traced once where the chunk groups are alike."""
        on_cpu = self._sub_chunks(ON_CPU, operands)
        product, elsewhere = self._on_matrix_units(options, operands)
        if on_cpu.count == elsewhere.count and not product.rounds and not goes_by_tokens:
            return compute(options, operands, product._replace(minimize_flops=True), elsewhere)
        return lax.platform_dependent(
            cpu=lambda: compute(options, operands, exact(options), on_cpu),
            default=lambda: compute(options, operands, product, elsewhere),
        )

    def _sub_chunks(self, sizes: Sizes, operands: Operands) -> SubChunksOfRows:
        return sub_chunks(self.signature, sizes, operands.inputs, operands.packing)

    def _on_matrix_units(
        self, options: Options, operands: Operands
    ) -> tuple[Products, SubChunksOfRows]:
        """The products and sub-chunks on platforms with matrix units."""
        inputs = operands.inputs
        key_size = self.signature.sizes(inputs)["K"]
        product = on_matrix_units(options, inputs[self.signature.y].dtype, key_size)
        is_long = product.rounds and options.decay in BOUNDED
        return product, self._sub_chunks(LONG_SUB_CHUNKS if is_long else ELSEWHERE, operands)

    def _forward(
        self, options: Options, operands: Forward, product: Products, call: SubChunksOfRows
    ) -> Result:
        signature = self.signature
        (part,) = operands.state
        state, values = operands.state[part], operands.inputs[signature.y]
        save_as = signature.states_dtype(options, operands.inputs)

        def group(number: Any, carry: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            carried, room = carry
            per_token, shared, tokens = call.inputs(number)
            chain = call.path(number), state, save_as
            if product.minimize_flops:
                own = steps(self.terms, options, per_token, shared, tokens, signature.y)
                carried, before, found = through(Steps.run, own, carried, *chain)
                y = own.outputs(found, per_token[signature.y].shape)
            else:
                parts = self._parts(options, product, tokens, per_token, shared)
                solved, _ = solve(product, parts)
                xs = for_chain(product, solved)
                carried, before, (states, _) = along(product, xs, carried, *chain)
                y = _read(product, parts, states, ask(product, solved, states))
            room = room | {"y": call.put(number, room["y"], y.astype(values.dtype))}
            if options.save:
                room |= {"states": call.save(number, room["states"], before)}
            return carried, room

        room = {"y": call.room(values)}
        if options.save:
            room["states"] = call.room_for_states(state, save_as)
        carried, room = call.run(group, (call.start(state), room))
        states = {part: call.states(room["states"])} if options.save else {}
        return Result(call.whole(room["y"]), {part: call.end(carried)}, states)

    def _backward(
        self, options: Options, operands: Backward, product: Products, call: SubChunksOfRows
    ) -> Gradients:
        signature = self.signature
        (part,) = operands.states
        given = operands.dstate[part]

        def group(number: Any, carry: _Sums) -> _Sums:
            carried, dshared, room = carry
            per_token, shared, tokens = call.inputs(number)
            dy = call.at(number, operands.dy).astype(product.dtype)
            saved = call.of_chunks(number, operands.states[part]).astype(jnp.float32)

            of_tokens = functools.partial(self._parts, options, product, tokens)
            parts, pull_back = jax.vjp(of_tokens, per_token, shared)
            solved, inverse = solve(product, parts)
            states, written = within(product, parts, solved, saved)
            carried, dafter, asked = back_along(
                product, parts, solved, dy, carried, call.path(number), given
            )
            if inverse is not None:
                du, _ = jnp.split(asked, 2, axis=-2)
                dz = product("...ij,...iv->...jv", inverse, du)
                asked = jnp.concatenate([dz, dy], axis=-2)
            d_per_token, more = pull_back(
                _gradients(product, parts, states, written, asked, dafter)
            )
            room = {name: call.put(number, x, d_per_token[name]) for name, x in room.items()}
            return carried, jax.tree.map(jnp.add, dshared, more), room

        room = {name: call.room(operands.inputs[name]) for name in signature.per_token}
        zeros = jax.tree.map(jnp.zeros_like, call.shared)
        carry = call.start(given), zeros, room
        carried, dshared, room = call.run(group, carry, reverse=True)
        d_per_token = {name: call.whole(dx) for name, dx in room.items()}
        dshared = {name: jnp.squeeze(dx, (0, 1, 4)) for name, dx in dshared.items()}
        return Gradients(d_per_token | dshared, {part: call.end(carried)})

    def _parts(
        self, options: Options, product: Products, tokens: Tokens, per_token: Arrays, shared: Arrays
    ) -> Parts:
        inputs = {name: x.astype(jnp.float32) for name, x in (per_token | shared).items()}
        w = inputs["w"]
        w = jnp.broadcast_to(w, jnp.broadcast_shapes(w.shape, inputs["k"].shape))
        decays = algebra.decays(w, options.decay, tokens, product)
        terms = self.terms(inputs)
        values = inputs[self.signature.y].astype(product.dtype)
        factors = algebra.factors(product, decays, tokens, *terms)
        return Parts(decays.enter, decays.stay, decays.leave, *factors, values)


def _read(product: Products, parts: Parts, states: Array, asked: Array | None) -> Array:
    """Y, from the states before sub-chunks and U, if there is one."""
    rows, own, others = parts.of_read()
    result = product("...tk,...vk->...tv", rows, states)
    if own is not None and asked is not None:
        result += product("...ij,...jv->...iv", own, asked)
    return result + product("...ij,...jv->...iv", others, parts.values)


def _gradients(
    product: Products, parts: Parts, state: Array, written: Array, asked: Array, dafter: Array
) -> Parts:
    """The cotangents of the parts, from the states before sub-chunks, W, the cotangents of U - P_uu
    U and Y, and those of the states after sub-chunks."""
    keys, of_values = parts.of_values()
    dvalues = product("...ij,...iv->...jv", of_values, asked)
    columns = product("...tv,...vk->...tk", written, dafter)
    kept = _sum(state, dafter)
    enter, leave = parts.enter, None
    if parts.leave is not None:
        leave = kept if parts.stay is None else kept * parts.stay
        leave += _sum(parts.columns, columns)
    return Parts(
        # No result depends on where the middle is.
        enter=None if enter is None else jnp.zeros_like(enter),
        stay=None if parts.stay is None else kept,
        leave=leave,
        rows=product("...tv,...vk->...tk", asked, state),
        columns=columns,
        pairs=product("...iv,...jv->...ij", asked, written),
        values=dvalues + product("...tk,...vk->...tv", keys, dafter),
    )


def _sum(x: Array, y: Array) -> Array:
    """The sums of x y [..., n, K] along n, by a product, since some compilers are slow to sum along
    this axis."""
    both = x.astype(jnp.float32) * y.astype(jnp.float32)
    ones = jnp.ones((*both.shape[:-2], 1, both.shape[-2]), jnp.float32)
    return jnp.einsum("...on,...nk->...k", ones, both, precision=lax.Precision.HIGHEST)
