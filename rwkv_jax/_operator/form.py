"""An operator as a form of another one: its operands are made into those of the other operator.

Every implementation of the other operator is then one of the form, with all passes. The backward
pass makes the operands again, so that what is saved are the inputs of the form.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Operands,
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.dispatch import Pass
from rwkv_jax._operator.implementation import Implementation, Transition
from rwkv_jax._operator.operator import Operator
from rwkv_jax._packing import segments

MakeFn: TypeAlias = Callable[[Options, Arrays], Arrays]
"""`make(options, inputs)`: the inputs of the other operator, elementwise along B, T and H. They may
be float32 where the inputs are not."""


@dataclass(frozen=True, eq=False)
class Form(Implementation):
    """The implementation `choice` of `operator`, with the operands that `make` makes.

    decay: the form of the decay that it makes.
    """

    operator: Operator
    choice: str
    make: MakeFn
    decay: str
    has_step = True

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        return self.operator.why_not(
            "forward", self.choice, *self._shapes(options, platform, operands)
        )

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        return self.operator.describe(self.choice, *self._shapes(options, platform, operands))

    def takes_sequences(self, platform: str) -> bool:
        return True

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._result("forward", options, platform, operands)

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._result("step", options, platform, operands)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        of_packing = functools.partial(self._inputs, options, operands.packing)
        inputs, pull_back = jax.vjp(of_packing, operands.inputs)
        gradients = self._run("backward", options, platform, self._with(operands, inputs))
        (inputs,) = pull_back(gradients.inputs)
        return dataclasses.replace(gradients, inputs=inputs)

    def transition(
        self, transition: Transition, options: Options, platform: str, operands: Forward
    ) -> Arrays:
        return self._run("transition", options, platform, self._made(options, operands))

    def reverse_transition(self, options: Options, platform: str, operands: Backward) -> Arrays:
        return self._run("reverse_transition", options, platform, self._made(options, operands))

    def _result(self, name: Pass, options: Options, platform: str, operands: Forward) -> Result:
        result = self._run(name, options, platform, self._made(options, operands))
        dtype = operands.inputs[self.operator.signature.y].dtype
        return dataclasses.replace(result, y=result.y.astype(dtype))

    def _run(self, name: Pass, options: Options, platform: str, operands: Any) -> Any:
        options = dataclasses.replace(options, decay=self.decay)
        return self.operator.implementation(name, self.choice, options, platform, {})(operands)

    def _made(self, options: Options, operands: Any) -> Any:
        """The operands of the other operator."""
        return self._with(operands, self._inputs(options, operands.packing, operands.inputs))

    def _inputs(self, options: Options, packing: Packing, inputs: Arrays) -> Arrays:
        """Its inputs. Padding, which it does not read, is cleared, so that whatever it holds has a
        gradient of 0."""
        if isinstance(packing, Marks):
            cleared = segments.cleared(packing.marks, list(inputs.values()))
            inputs = dict(zip(inputs, cleared, strict=True))
        return self.make(options, inputs)

    def _with(self, operands: Any, inputs: Arrays) -> Any:
        operands = dataclasses.replace(operands, inputs=inputs)
        if not isinstance(operands, Backward):
            return operands
        dtype = inputs[self.operator.signature.y].dtype
        return dataclasses.replace(operands, dy=operands.dy.astype(dtype))

    def _shapes(self, options: Options, platform: str, operands: Operands) -> Any:
        """What `Operator.why_not` takes: the options, the platform and the shapes of operands."""
        inputs = jax.eval_shape(functools.partial(self.make, options), operands.inputs)
        made = dataclasses.replace(operands, inputs=inputs)
        return dataclasses.replace(options, decay=self.decay), platform, made
