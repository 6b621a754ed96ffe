"""The Pallas implementation of any operator with one state [V, K] for each head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rwkv_jax._operator import check
from rwkv_jax._operator.call import (
    Backward,
    Forward,
    Gradients,
    Operands,
    Options,
    Result,
    chunks,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.partition import folds_constants
from rwkv_jax._pallas import lowering, walk
from rwkv_jax._pallas.algebra import product
from rwkv_jax._pallas.hopper import HopperKernels

COMPILERS = {"cuda": "Triton", "tpu": "Mosaic", "cpu": "interpreter"}
MOSAIC_GPU = "Mosaic GPU"


@dataclass(frozen=True, eq=False)
class PallasKernels(walk.Operator, Implementation):
    """Kernels for CUDA GPUs and for TPUs, and perhaps others for Hopper GPUs, which run what they
    are faster at, and, on a JAX without Triton, all that they take."""

    hopper: HopperKernels | None = None

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        inputs = operands.inputs
        if platform in lowering.PLATFORMS and folds_constants():
            return "JAX traces no Pallas kernel within jax.ensure_compile_time_eval"
        if reason := lowering.why_not(platform):
            if self.hopper is None or lowering.compiler(platform) not in ("cuda", lowering.HOPPER):
                return reason
            other = self.hopper.why_not(options, platform, operands)
            return other and f"{reason}; {other}"
        sizes = self.signature.sizes(inputs)
        if reason := check.symbolic(sizes, "BTKV"):
            return f"{reason}; the pallas kernels have grids of numbers"
        if lowering.is_tpu(platform) and inputs[self.signature.y].dtype == jnp.float16:
            return "float16 inputs; on TPUs the pallas kernels take float32 and bfloat16"
        if not {sizes["K"], sizes["V"]} <= set(lowering.HEAD_SIZES):
            accepted = ", ".join(map(str, lowering.HEAD_SIZES))
            return f"K = {sizes['K']} and V = {sizes['V']}; the pallas kernels take {accepted}"
        return None

    def takes_sequences(self, platform: str) -> bool:
        return not lowering.is_tpu(platform)

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        dtype = product(options, operands.inputs[self.signature.y].dtype).dtype.__name__
        on_hopper = [
            self._on_hopper(name, options, platform, operands) is not None
            for name in ("forward", "backward")
        ]
        compiler, length = COMPILERS[platform], "tiles"
        if all(on_hopper):
            compiler, length = MOSAIC_GPU, "chunks"
        elif any(on_hopper):
            compiler = f"{MOSAIC_GPU}, and for gradients {compiler}"
            length = "chunks and tiles"
        return f"Pallas kernels ({compiler}), {length} with products of {dtype} operands"

    def _on_hopper(
        self, name: str, options: Options, platform: str, operands: Operands
    ) -> HopperKernels | None:
        """The kernels for Hopper GPUs, if a pass of a call runs in them."""
        own = self.hopper
        if own is None or own.why_not(options, platform, operands):
            return None
        return own if lowering.why_not(platform) or own.is_faster(name, operands) else None

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        if not self._is_empty(operands.inputs):
            if own := self._on_hopper("forward", options, platform, operands):
                return own.forward(options, platform, operands)
            return walk.forward(self, options, platform, operands)
        y, states = operands.inputs[self.signature.y], {}
        if options.save:
            dtype = self.signature.states_dtype(options, operands.inputs)
            for part, x in operands.state.items():
                states[part] = jnp.repeat(x[:, None], chunks(y.shape[1]), axis=1).astype(dtype)
        return Result(y, operands.state, states)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        if not self._is_empty(operands.inputs):
            if own := self._on_hopper("backward", options, platform, operands):
                return own.backward(options, platform, operands)
            return walk.backward(self, options, platform, operands)
        zeros = {name: jnp.zeros_like(x) for name, x in operands.inputs.items()}
        return Gradients(zeros, operands.dstate)

    def _is_empty(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is nothing to compute: no row, no token or no head."""
        sizes = self.signature.sizes(inputs)
        return 0 in (sizes["B"], sizes["T"], sizes["H"])
