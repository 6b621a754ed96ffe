"""Which calls the experimental kernels for Hopper GPUs take, and what the kernels are given.

Mosaic GPU compiles these kernels. All others for GPUs are compiled by Triton, which JAX has
announced to remove from Pallas.
"""

import functools
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._native import gpus
from rwkv_jax._operator.call import (
    CHUNK,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Options,
    Packing,
    Result,
    Sequences,
    chunks,
)
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments, sequences
from rwkv_jax._pallas import lowering
from rwkv_jax._pallas.lowering import Operands, Results

SINCE = (0, 11, 2)
"""The first version of JAX whose Mosaic GPU is known to compile these kernels."""

SIZE = 64
"""K and V. With CHUNK tokens every array of a chunk is 64 x 64, and the matrix units of Hopper take
products of at least 64 rows."""


@dataclass(frozen=True, eq=False)
class HopperKernels:
    """The passes of an operator in kernels for Hopper GPUs.

    module: the name of the module with the kernels FORWARD and BACKWARD. It is imported when a call
      asks for it, because JAX may lack the compiler.
    decays: the forms of decay that the kernels take.
    enough_heads: for each pass the heads of all sequences from which on it is faster than in
      kernels of Triton. One program computes all chunks of a head, so fewer heads leave
      multiprocessors idle.
    """

    signature: Signature
    module: str
    decays: Collection[str]
    enough_heads: Mapping[str, int]

    @functools.cached_property
    def _module(self) -> ModuleType | Exception:
        try:
            return importlib.import_module(self.module)
        except (ImportError, AttributeError) as error:
            return error

    def why_not(self, options: Options, platform: str, operands: Forward | Backward) -> str | None:
        """Why the kernels cannot take a call, or None."""
        if not lowering.interprets_hopper(platform):
            if platform != "cuda" or not gpus.are_hopper():
                return "the kernels for Hopper GPUs need a GPU of compute capability 9"
            if jax.__version_info__ < SINCE:
                return f"the kernels for Hopper GPUs need JAX {'.'.join(map(str, SINCE))}"
        if isinstance(self._module, Exception):
            return f"the kernels for Hopper GPUs cannot be imported: {self._module}"
        found, taken = self._limit(options, operands.inputs)
        return found and f"{found}; the kernels for Hopper GPUs take {taken}"

    def _limit(self, options: Options, inputs: Mapping[str, Any]) -> tuple[str | None, str]:
        dtype = inputs[self.signature.y].dtype
        if dtype != jnp.bfloat16:
            return f"{dtype} inputs", "bfloat16"
        if options.exact:
            return "precision 'highest'", "the default"
        sizes = self.signature.sizes(inputs)
        if not sizes["K"] == sizes["V"] == SIZE:
            return f"K = {sizes['K']} and V = {sizes['V']}", f"{SIZE}"
        if options.decay not in self.decays:
            return f"decay {options.decay!r}", " and ".join(map(repr, self.decays))
        return None, ""

    def is_faster(self, name: str, operands: Forward | Backward) -> bool:
        """Whether a pass of a call is faster than in kernels of Triton, which need not fill up
        short sequences to a whole chunk."""
        rows, *tokens, heads, _ = operands.inputs[self.signature.y].shape
        packing = operands.packing
        in_a_row = packing.offsets.shape[-1] - 1 if isinstance(packing, Sequences) else 1
        programs = rows * in_a_row * heads
        return programs >= self.enough_heads[name] and sum(tokens) >= in_a_row * CHUNK

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        (part,) = operands.state
        y = self.signature.y
        axes, tokens = self.signature.rows[y], operands.inputs[y].shape[1]
        results: Results = {"y": (axes, jnp.bfloat16)}
        if options.save:
            results["states"] = "BNHVK", jnp.bfloat16
        given = self._given(platform, options, operands.inputs, operands.packing)
        state, count = operands.state[part], _chunks(operands.packing, tokens)
        found, state = self._run("FORWARD", platform, options, given, state, results, count)
        states = {part: found["states"]} if options.save else {}
        return Result(found["y"][:, :tokens], {part: state}, states)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        (part,) = operands.states
        rows, inputs = self.signature.rows, operands.inputs
        results: Results = {f"d{n}": (rows[n], jnp.bfloat16) for n in self.signature.per_token}
        results |= {f"d{n}": ("BNHK", jnp.float32) for n in self.signature.shared}
        packing, tokens = operands.packing, operands.dy.shape[1]
        given = self._given(platform, options, inputs | {"dy": operands.dy}, packing)
        given["states"] = "BNHVK", operands.states[part].astype(jnp.bfloat16)
        carry, count = operands.dstate[part], _chunks(packing, tokens)
        found, dstate = self._run("BACKWARD", platform, options, given, carry, results, count)

        def of_row(name: str) -> Array:
            x = found[f"d{name}"]
            if name in self.signature.per_token:
                return x[:, :tokens]
            if isinstance(packing, Sequences):
                used = sequences.layout(packing.offsets, tokens).used
                x = jnp.where(used[:, :, None, None], x, 0.0)
            return jnp.sum(x, 1)

        return Gradients({name: of_row(name) for name in inputs}, {part: dstate})

    def _given(self, platform: str, options: Options, arrays: Arrays, packing: Packing) -> Operands:
        """Arrays of tokens with whole chunks, filled up with tokens that change no state,
        parameters, and the segments or the sequences of a row."""
        identity_token, tokens = self._identity_token(options), arrays[self.signature.y].shape[1]
        missing = -tokens % CHUNK
        if isinstance(packing, Sequences):
            # A copy of a chunk may end behind the row, except in the interpreter.
            missing = CHUNK if platform == "cpu" else max(CHUNK - tokens, 0)

        def whole(name: str, x: Array) -> Array:
            if name in self.signature.shared or not missing:
                return x
            number = identity_token.get(name, 0)
            return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=number)

        axes = self.signature.rows | {"dy": self.signature.inputs[self.signature.y]}
        given = {name: (axes[name], whole(name, x)) for name, x in arrays.items()}
        if isinstance(packing, Marks):
            given["segments"] = "BNML", _segments(packing.marks)
        if isinstance(packing, Sequences):
            given["sequences"] = "BSM", _sequences(packing.offsets, tokens)
        return given

    def _identity_token(self, options: Options) -> dict[str, float]:
        """The inputs of a token that changes no state, where they are not 0."""
        identity_token = self.signature.identity_token or {}
        return {name: numbers[options.decay] for name, numbers in identity_token.items()}

    def _run(
        self,
        name: str,
        platform: str,
        options: Options,
        operands: Operands,
        carry: Array,
        results: Results,
        count: int,
    ) -> tuple[Arrays, Array]:
        kernel = getattr(self._module, name)
        identity_token = self._identity_token(options)
        return kernel.run(platform, options.decay, operands, carry, results, identity_token, count)


def _chunks(packing: Packing, tokens: int) -> int:
    """How many states are saved of a row."""
    if isinstance(packing, Sequences):
        return sequences.chunks(packing.offsets, tokens)
    return chunks(tokens)


def _segments(marks: Array) -> Array:
    """What `rwkv_jax._pallas.chunk.SEGMENTS` says of tokens with these marks [B, T]."""
    missing = -marks.shape[1] % CHUNK
    marks = jnp.pad(marks, ((0, 0), (0, missing)), constant_values=segments.PADDING)
    marks = marks.reshape(len(marks), -1, CHUNK)
    starts, there = marks == segments.STARTS, marks != segments.PADDING
    place = lax.broadcasted_iota(jnp.int32, marks.shape, 2)
    first = lax.cummax(jnp.where(starts, place, -1), axis=2)
    later = lax.cummin(jnp.where(starts, place, CHUNK), axis=2, reverse=True)[:, :, 1:]
    following = jnp.pad(later, ((0, 0), (0, 0), (0, 1)), constant_values=CHUNK)
    count = jnp.sum(there, axis=2, keepdims=True, dtype=jnp.int32)
    return jnp.stack([first, following, jnp.where(there, count, 0)], axis=2)


def _sequences(offsets: Array, tokens: int) -> Array:
    """What `rwkv_jax._pallas.warpgroup.SEQUENCES` says of rows with so many tokens and with offsets
    [B, Z]. The longest sequences come first, so that no program is the last one for long."""
    layout = sequences.layout(offsets, tokens)
    start, end = layout.offsets[:, :-1], layout.offsets[:, 1:]
    number = lax.broadcasted_iota(jnp.int32, start.shape, 1)
    before = jnp.where(number == 0, 0, start)
    until = jnp.where(number == number.shape[1] - 1, tokens, end)
    found = jnp.stack([number, start, end, layout.first[:, :-1], before, until], axis=-1)
    return jnp.take_along_axis(found, jnp.argsort(start - end, axis=1)[:, :, None], axis=1)
