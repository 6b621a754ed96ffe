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

COMPILERS = {"cuda": "Triton", "tpu": "Mosaic", "cpu": "interpreter"}


@dataclass(frozen=True, eq=False)
class PallasKernels(walk.Operator, Implementation):
    """Kernels for CUDA GPUs and for TPUs."""

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        inputs = operands.inputs
        if platform in lowering.PLATFORMS and folds_constants():
            return "JAX traces no Pallas kernel within jax.ensure_compile_time_eval"
        if reason := lowering.why_not(platform):
            return reason
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
        return f"Pallas kernels ({COMPILERS[platform]}), tiles with products of {dtype} operands"

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        if not self._is_empty(operands.inputs):
            return walk.forward(self, options, platform, operands)
        y, states = operands.inputs[self.signature.y], {}
        if options.save:
            dtype = self.signature.states_dtype(options, operands.inputs)
            for part, x in operands.state.items():
                states[part] = jnp.repeat(x[:, None], chunks(y.shape[1]), axis=1).astype(dtype)
        return Result(y, operands.state, states)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        if not self._is_empty(operands.inputs):
            return walk.backward(self, options, platform, operands)
        zeros = {name: jnp.zeros_like(x) for name, x in operands.inputs.items()}
        return Gradients(zeros, operands.dstate)

    def _is_empty(self, inputs: Mapping[str, Any]) -> bool:
        """Whether there is nothing to compute: no row, no token or no head."""
        sizes = self.signature.sizes(inputs)
        return 0 in (sizes["B"], sizes["T"], sizes["H"])
