"""The arguments of a public function: from what a caller gives to a checked call.

Messages speak of the arguments as callers know them: of `initial_state`, or of a part of it such as
`initial_num`, where the operands of the passes are parts of a state by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rwkv_jax._operator import check
from rwkv_jax._operator.call import Forward, Options, SegmentIds, Sequences
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments, sequences, slots
from rwkv_jax._packing.slots import Pool


@dataclass(frozen=True)
class Call:
    """A checked call of a public function.

    The operands have the axes that callers know: parameters stand once, offsets of sequences are
    [Z], and the state is empty where none was given. `pool` is the pool that the state is from.
    """

    options: Options
    operands: Forward
    pool: Pool | None = None


@dataclass(frozen=True)
class Arguments:
    """The arguments of a function of an operator: on whole sequences, or on one token."""

    operator: Operator
    is_step: bool

    @property
    def signature(self) -> Signature:
        return self.operator.signature

    @property
    def name(self) -> str:
        return self.operator.step_name if self.is_step else self.operator.name

    @property
    def arguments(self) -> dict[str, str]:
        """The array arguments and their axes, the parts of the state last."""
        signature = self.signature
        inputs = signature.tokens if self.is_step else signature.inputs
        parts = {self._part(part): axes for part, axes in signature.state.items()}
        return {**inputs, **parts}

    @property
    def state_argument(self) -> str:
        return "state" if self.is_step else "initial_state"

    def _part(self, part: str) -> str:
        """The name by which messages call a part of the state."""
        return part if self.is_step else f"initial_{part}"

    def checked(self, arguments: Mapping[str, Any]) -> Call:
        """A call from all arguments of the function by name."""
        given = dict(arguments)
        chosen = {name: given.pop(name) for name in ("decay", "precision", "implementation")}
        options = check.options(self.name, self.operator, **chosen)
        ids, offsets = given.pop("segment_ids", None), given.pop("cu_seqlens", None)
        places, state = given.pop("slots"), given.pop(self.state_argument)
        if offsets is not None and ids is not None:
            raise ValueError(
                f"{self.name}: segment_ids with cu_seqlens; accepted is None for one of them"
            )
        inputs = {name: self._whole(name, x, given) for name, x in given.items()}
        parts, pool = self._parts(state), None
        if places is not None:
            pool = self._pool(places, parts, self._states_given(given, offsets))
            parts = {self._part(part): x for part, x in pool.rows().items()}
        axes = self.arguments if offsets is None else self.arguments_of_sequences
        arrays = check.arrays(self.name, axes, inputs | parts, states=list(axes)[len(inputs) :])
        packing = None
        if offsets is not None:
            packing = Sequences(self._checked_offsets(offsets, arrays))
        elif ids is not None:
            packing = SegmentIds(segments.checked(self.name, ids, *self.row_sizes(arrays)))
        signature = self.signature
        operands = Forward(
            {name: arrays[name] for name in signature.inputs},
            {part: arrays[self._part(part)] for part in signature.state if parts},
            packing,
        )
        return Call(options, operands, pool)

    @property
    def arguments_of_sequences(self) -> dict[str, str]:
        """The arguments of sequences in a row, with S states."""
        inputs = self.signature.inputs
        return {n: x if n in inputs else x.replace("B", "S") for n, x in self.arguments.items()}

    def row_sizes(self, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """The shape of `segment_ids`."""
        return self.signature.row_sizes(arrays, token=self.is_step)

    def _checked_offsets(self, offsets: Any, arrays: Mapping[str, Array]) -> Array:
        offsets = sequences.checked(self.name, offsets, *self.signature.row_sizes(arrays))
        for name, axes in self.arguments_of_sequences.items():
            if "S" in axes and name in arrays and len(arrays[name]) != len(offsets) - 1:
                raise ValueError(
                    f"{self.name}: {name} has shape {arrays[name].shape}, so S = "
                    f"{len(arrays[name])}, where cu_seqlens has S + 1 = {len(offsets)}"
                )
        return offsets

    def _whole(self, name: str, x: Any, given: Mapping[str, Any]) -> Any:
        """A parameter of each head as one of each channel. Whatever is wrong stays as it is, for
        the checks to refuse."""
        signature = self.signature
        one = isinstance(x, jax.Array | np.ndarray) and x.ndim == 2 and x.shape[1] == 1
        if name not in signature.per_head or not one:
            return x
        full = next(n for n, axes in signature.inputs.items() if "B" in axes and "K" in axes)
        return jnp.broadcast_to(x, (x.shape[0], *np.shape(given[full])[-1:]))

    def _parts(self, state: Any) -> dict[str, Any]:
        """The parts of a state by the names of messages; none if a sequence starts without one."""
        signature = self.signature
        names = [self._part(part) for part in signature.state]
        if state is None and not self.is_step:
            return {}
        if signature.state_type is None:
            return {names[0]: state}
        if not (isinstance(state, tuple) and len(state) == len(names)):
            accepted = getattr(signature.state_type, "__name__", signature.state_type)
            raise TypeError(
                f"{self.name}: {self.state_argument} is a {type(state).__name__}; "
                f"accepted is a {accepted}"
            )
        return dict(zip(names, state, strict=True))

    def _states_given(self, given: Mapping[str, Any], offsets: Any) -> tuple[int, ...]:
        """The shape that slots must have. The arguments are not checked yet."""
        if offsets is not None:
            return tuple(n - 1 for n in np.shape(offsets)[:1])
        batched = next(name for name, axes in self.arguments.items() if "B" in axes)
        return np.shape(given[batched])[:1]

    def _pool(self, places: Any, parts: Mapping[str, Any], states: tuple[int, ...]) -> Pool:
        name, signature = self.state_argument, self.signature
        if not parts or any(x is None for x in parts.values()):
            raise ValueError(
                f"{self.name}: {name} is None; accepted with slots is a pool of states"
            )
        # Messages call a part of a pool as callers do: an attribute of the argument.
        several = signature.state_type is not None
        names = [f"{name}.{part}" if several else name for part in signature.state]
        axes = [axes.replace("B", "P") for axes in signature.state.values()]
        arrays = check.arrays(
            self.name,
            dict(zip(names, axes, strict=True)),
            dict(zip(names, parts.values(), strict=True)),
            states=names,
        )
        pool = dict(zip(signature.state, arrays.values(), strict=True))
        size = len(next(iter(pool.values())))
        return Pool(pool, slots.checked(self.name, places, states, size))

    def axes(self, operands: Forward) -> Forward[str]:
        """The axes of the operands of a checked call."""
        signature = self.signature
        inputs = signature.tokens if self.is_step else dict(signature.inputs)
        packing = None
        match operands.packing:
            case SegmentIds():
                packing = SegmentIds("B" if self.is_step else "BT")
            case Sequences():
                packing = Sequences("Z")
        state = self.result_axes(operands)[1] if operands.state else {}
        return Forward(inputs, state, packing)

    def result_axes(self, operands: Forward) -> tuple[str, dict[str, str]]:
        """The axes of `y` and of the parts of the state."""
        signature = self.signature
        letter = "S" if isinstance(operands.packing, Sequences) else "B"
        state = {part: axes.replace("B", letter) for part, axes in signature.state.items()}
        return (signature.tokens if self.is_step else signature.inputs)[signature.y], state

    def results(self, y: Any, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """`y` and the state as callers see them."""
        signature = self.signature
        parts = [state[part] for part in signature.state]
        return y, signature.state_type(*parts) if signature.state_type else parts[0]
