"""The CUDA kernels of WKV7 that make its operands where they need them: those on matrix units, and
that of one token.

What they do not take is made into a call of WKV7 by XLA.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rwkv_jax._native import cuts, library
from rwkv_jax._native.kernels import HEAD_SIZES, NativeKernels
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Arrays, Backward, Forward, Gradients, Operands, Options, Result
from rwkv_jax._operator.form import Form
from rwkv_jax._operator.signature import Signature
from rwkv_jax.wkv7.operator import SIGNATURE as WKV7


@dataclass(frozen=True, eq=False)
class DeltaKernels(Form):
    """The native implementation of a form of WKV7 with the inputs of the delta rule.

    signature: that of the form.
    """

    signature: Signature

    def __post_init__(self) -> None:
        library.register_export_targets(*(self._target(name) for name in ("fwd", "bwd", "step")))

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        if not self._suits(options, platform, operands):
            return super().forward(options, platform, operands)
        signature, packing = self.signature, operands.packing
        n = self._kernels.cuts(platform, operands)
        operands = self._cut(signature.forward_axes(packing), operands, n)
        tensors, floats = self._apart(options, operands.inputs)
        results, given, attributes, result = self._kernels.forward_call(
            *self._call(options, platform, operands, tensors)
        )
        behind = *floats.values(), self._scale(options, operands)
        found = library.call(self._target("fwd"), results, *given, *behind, **attributes)
        return cuts.joined(signature.result_axes(packing, options), result(found), n)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        if not self._suits(options, platform, operands):
            return super().backward(options, platform, operands)
        signature, packing, inputs = self.signature, operands.packing, operands.inputs
        n = self._kernels.cuts(platform, operands)
        operands = self._cut(signature.backward_axes(packing), operands, n)
        tensors, floats = self._apart(options, operands.inputs)
        results, given, attributes, gradients = self._kernels.backward_call(
            *self._call(options, platform, operands, tensors)
        )
        behind = *floats.values(), self._scale(options, operands)
        of_floats = [(x.shape, x.dtype) for x in floats.values()]
        target = self._target("bwd")
        found = library.call(target, [*results, *of_floats], *given, *behind, **attributes)
        last = dict(zip(floats, found[len(results) :], strict=True))
        of_tensors = gradients(found[: len(results)])
        dinputs = of_tensors.inputs | last
        for name, axis in self._of_heads.items() if n > 1 else ():
            x = dinputs[name]
            each = x.reshape(*x.shape[:axis], -1, n, *x.shape[axis + 1 :])
            dinputs[name] = jnp.sum(each, axis=axis + 1, dtype=jnp.float32)
        dinputs = {name: dx.astype(inputs[name].dtype) for name, dx in dinputs.items()}
        result = dataclasses.replace(of_tensors, inputs=dinputs)
        return cuts.joined(signature.gradient_axes(packing), result, n)

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        if platform != "cuda":
            return super().step(options, platform, operands)
        tensors, floats = self._apart(options, operands.inputs)
        behind = *floats.values(), self._scale(options, operands)
        options, _, made = self._call(options, platform, operands, tensors)
        result = self._kernels.step_of(self._target("step"), options, made, *behind)
        return dataclasses.replace(result, y=result.y.astype(operands.inputs["v"].dtype))

    def _target(self, name: str) -> str:
        return f"rwkv_{self.signature.name}_{name}_v1"

    @functools.cached_property
    def _kernels(self) -> NativeKernels:
        """Of the inputs that share a dtype. They are planned as those of WKV7 are."""
        axes = self.signature.inputs
        tensors = {name: axes[name] for name in axes if "K" in axes[name] or "V" in axes[name]}
        signature = dataclasses.replace(WKV7, inputs=tensors)
        return NativeKernels(signature, head_sizes=HEAD_SIZES, shares_keys=True)

    @functools.cached_property
    def _of_heads(self) -> dict[str, int]:
        """The inputs that each head has for all of V, and the axis H of each."""
        axes = self.signature.inputs
        return {name: x.index("H") for name, x in axes.items() if "H" in x and "V" not in x}

    def _cut(self, axes: Any, operands: Any, n: int) -> Any:
        """The operands with each head cut into `n` along V."""
        if n == 1:
            return operands
        operands = cuts.cut(axes, operands, n)
        repeated = {
            name: jnp.repeat(operands.inputs[name], n, axis=axis)
            for name, axis in self._of_heads.items()
        }
        return dataclasses.replace(operands, inputs=operands.inputs | repeated)

    def _suits(self, options: Options, platform: str, operands: Operands) -> bool:
        """Whether kernels on matrix units compute both passes."""
        inputs = operands.inputs
        sizes = self.signature.sizes(inputs)
        if platform != "cuda" or options.exact or check.symbolic(sizes, "BTGH"):
            return False
        if inputs["v"].dtype == jnp.float32 or 0 in sizes.values():
            return False
        call = self._call(options, platform, operands, self._apart(options, inputs)[0])
        return not any(self._kernels.why_by_token(*call))

    def _apart(self, options: Options, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """The tensors, of the dtype of the values unless nothing may be rounded, and the inputs
        [B, T, H], of float32."""
        names = self._kernels.signature.inputs
        given = [inputs[name] for name in names]
        widest = max(given, key=lambda x: x.dtype.itemsize)
        dtype = (widest if options.exact else inputs["v"]).dtype
        tensors = {name: x.astype(dtype) for name, x in zip(names, given, strict=True)}
        others = (name for name in self.signature.inputs if name not in names)
        return tensors, {name: inputs[name].astype(jnp.float32) for name in others}

    def _call(
        self, options: Options, platform: str, operands: Any, tensors: Mapping[str, Any]
    ) -> tuple[Options, str, Any]:
        options = dataclasses.replace(options, decay=self.decay)
        return options, platform, dataclasses.replace(operands, inputs=dict(tensors))

    def _scale(self, options: Options, operands: Operands) -> Any:
        return jnp.full(1, options.scale_of(operands.inputs["q"].shape[-1]), jnp.float32)
