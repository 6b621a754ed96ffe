"""What every implementation of an operator provides, and what it may leave to the machinery."""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeAlias

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Operands,
    Options,
    Result,
)

ForwardFn: TypeAlias = Callable[[Forward], Result]


class Transition(abc.ABC):
    """What a run of tokens does to a state, as a map that composes.

    The transition of each part of a sequence is computed on its own. The states between the parts
    follow from the transitions alone, and then all parts are computed side by side, each from its
    own state.
    """

    axes: ClassVar[Mapping[str, str]]
    """The axes of each array of a transition, all in float32."""

    @abc.abstractmethod
    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        """The transition of all tokens, by the forward pass of an implementation."""

    @abc.abstractmethod
    def apply(self, transition: Arrays, state: Arrays) -> Arrays:
        """The state after the run, from the state before it. Leading axes broadcast."""

    @abc.abstractmethod
    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        """The transition of two runs, one after the other."""


class Implementation(abc.ABC):
    """One way to compute the passes of an operator, for all packings but, perhaps, sequences.

    Operands are checked and on the same mesh axes; parameters come once for each row, in float32.
    """

    has_step: ClassVar[bool] = False
    """Whether it has a step of its own, or computes one token as the reference does."""

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        """Why a call with inputs of the shapes and dtypes of these cannot run, or None. They may be
        `jax.ShapeDtypeStruct`s, here and in `describe`."""
        return None

    def takes_sequences(self, platform: str) -> bool:
        """Whether the passes take a packing of `Sequences`. Where not, the machinery runs them one
        chunk after another (`rwkv_jax._packing.by_chunk`)."""
        return False

    @abc.abstractmethod
    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        """In a few words, how a call that can run is computed."""

    @abc.abstractmethod
    def forward(self, options: Options, platform: str, operands: Forward) -> Result: ...

    @abc.abstractmethod
    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients: ...

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        """One token; no operand has the axis T."""
        raise NotImplementedError

    def transition(
        self, transition: Transition, options: Options, platform: str, operands: Forward
    ) -> Arrays:
        return transition.of(functools.partial(self.forward, options, platform), options, operands)

    def reverse_transition(self, options: Options, platform: str, operands: Backward) -> Arrays:
        """The cotangent of the initial state alone."""
        return self.backward(options, platform, operands).state
