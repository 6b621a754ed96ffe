"""`wkv7_keys` and `wkv7` in one, whose kernels store nothing that passes between the two."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32, Int

from rwkv_jax._native import library
from rwkv_jax._native.kernels import NativeKernels
from rwkv_jax._operator import check, dispatch
from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Options,
    Result,
    SegmentIds,
)
from rwkv_jax._operator.dispatch import Computation, Pass
from rwkv_jax._operator.operator import KEPT, Operator
from rwkv_jax._operator.partition import Shards
from rwkv_jax._packing import segments
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _function
from rwkv_jax.layers.wkv7_keys import FUNCTION, inverse_length, wkv7_keys
from rwkv_jax.wkv7 import OPERATOR, wkv7

TENSORS = {"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "rate": "BTHK"}
STATE = {"initial_state": "BHVK"}

Results: TypeAlias = tuple[Array, Array, Array]

TARGETS = {"forward": "rwkv_wkv7_keyed_fwd_v2", "backward": "rwkv_wkv7_keyed_bwd_v2"}
library.register_export_targets(*TARGETS.values())

HEAD_SIZE = 64
"""The size of the heads that the kernels take."""

SIGNATURE = dataclasses.replace(
    OPERATOR.signature, name="keyed_wkv7", inputs={**TENSORS, **FUNCTION.parameters}
)

KERNELS = NativeKernels(
    dataclasses.replace(OPERATOR.signature, inputs=TENSORS), head_sizes={"cuda": (HEAD_SIZE,)}
)
"""They take the parameters as one array besides."""


class KeyedWkv7(NamedTuple):
    """The output of `wkv7`, the bonus of each head for `read_out`, and the final state."""

    y: Float[Array, "B T H V"]
    bonus: Float32[Array, "B T H"]
    final_state: Float32[Array, "B H V K"]


def keyed_wkv7(
    r: Float[Operand, "B T H K"],
    w: Float[Operand, "B T H K"],
    k: Float[Operand, "B T H K"],
    v: Float[Operand, "B T H V"],
    rate: Float[Operand, "B T H K"],
    k_k: Float32[Operand, "H K"],
    k_a: Float32[Operand, "H K"],
    a0: Float32[Operand, "H K"],
    r_k: Float32[Operand, "H K"],
    initial_state: Float32[Operand, "B H V K"] | None = None,
    *,
    segment_ids: Int[Operand, "B T"] | None = None,
    implementation: str | None = None,
) -> KeyedWkv7:
    """`wkv7` with the operands that `wkv7_keys` makes for it:

        k', a, b, bonus, r = wkv7_keys(k, rate, r, k_k, k_a, a0, r_k)
        y, final_state = wkv7(r, w, k', v, a, b, initial_state, decay="sigmoid")

    Results and gradients are those of the two functions. On CUDA GPUs, with bfloat16 or float16,
    heads of 64 channels and 16 tokens or more, the kernels of `wkv7` make k', a and b where they
    need them, and neither these nor their gradients are ever stored. Anywhere else this is a call
    of each function.

    Args:
      r: the projected receptance, float32, bfloat16 or float16.
      w: the decay, d = exp(-exp(-1/2) sigmoid(w)).
      k: the projected keys.
      v: the values.
      rate: the low-rank projection of the in-context learning rate.
      k_k: the parameter of `wkv7_keys` of this name.
      k_a: likewise.
      a0: likewise.
      r_k: likewise.
      initial_state: the state before the first token; zeros if None.
      segment_ids: as `wkv7` takes it.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      y in the dtype of `v`, and the bonus and the final state in float32.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.
    """
    op = "keyed_wkv7"
    if implementation is not None:
        check.choice(op, "implementation", implementation, FUNCTION.implementations)
    given = {"r": r, "w": w, "k": k, "v": v, "rate": rate}
    given |= {"k_k": k_k, "k_a": k_a, "a0": a0, "r_k": r_k}
    if initial_state is not None:
        given["initial_state"] = initial_state
    axes = {**TENSORS, **FUNCTION.parameters, **STATE}
    given = check.arrays(op, axes, given, states=(*FUNCTION.parameters, *STATE))
    if segment_ids is not None:
        segment_ids = segments.checked(op, segment_ids, *given["v"].shape[:2])
    options = Options("sigmoid", implementation=implementation)
    if not _has_kernels(given, options):
        return _composed(given, segment_ids, implementation)
    state = {"state": given["initial_state"]} if initial_state is not None else {}
    inputs = {name: given[name] for name in SIGNATURE.inputs}
    packing = None if segment_ids is None else SegmentIds(segment_ids)
    operator = Operator(SIGNATURE, OPERATOR.transition, {})
    found: Results = _run(options, operator.prepared(Forward(inputs, state, packing)))
    return KeyedWkv7(*found)


def _composed(given: Arrays, segment_ids: Array | None, implementation: str | None) -> KeyedWkv7:
    names = ("k", "rate", "r", *FUNCTION.parameters)
    keys = wkv7_keys(*(given[name] for name in names), implementation=implementation)
    y, last = wkv7(
        *(keys.r, given["w"], keys.k, given["v"], keys.a, keys.b, given.get("initial_state")),
        segment_ids=segment_ids,
        decay="sigmoid",
        implementation=implementation,
    )
    return KeyedWkv7(y, keys.bonus, last)


def _has_kernels(given: Arrays, options: Options) -> bool:
    """Whether there may be kernels for both functions in one."""
    tensors = _tensors(given)
    sizes = check.sizes(TENSORS, tensors)
    return (
        options.implementation in (None, "ffi")
        and not library.why_not("cuda")
        and sizes["K"] == sizes["V"] == HEAD_SIZE
        and tensors["v"].dtype != jnp.float32
        and not check.symbolic(sizes, "BTH")
        and not any(KERNELS.why_by_token(options, "cuda", Forward(tensors, {})))
    )


Found: TypeAlias = tuple[Result, Any, Any]
"""The results of the forward pass: those of `wkv7`, the bonus, and 1 / max(|k k_k|, 1e-12) of each
head, from which the backward pass makes k', a and b again."""

Operands: TypeAlias = tuple[Backward, Any, Any]
"""The operands of the backward pass: those of `wkv7` with the inputs of both functions, the last of
`Found`, and the cotangent of the bonus."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, operands: Forward) -> Results:
    found: Found = dispatch.run(_BOTH, "forward", options, operands)
    result, bonus, _ = found
    return result.y, bonus, result.state["state"]


def _forward(options: Options, operands: Forward) -> tuple[Results, Any]:
    found: Found = dispatch.run(_BOTH, "forward", dataclasses.replace(options, save=True), operands)
    found = jax.tree.map(lambda x: checkpoint_name(x, KEPT), found)
    result, bonus, inverse = found
    kept = operands.inputs, result.states, inverse, operands.packing
    return (result.y, bonus, result.state["state"]), kept


def _backward(options: Options, kept: Any, cotangents: Results) -> tuple[Forward]:
    inputs, states, inverse, packing = kept
    dy, dbonus, dstate = cotangents
    recurrent = Backward(inputs, states, dy, {"state": dstate}, packing)
    return (dispatch.run(_BOTH, "backward", options, (recurrent, inverse, dbonus)),)


_run.defvjp(_forward, _backward)


class _Keyed(Computation):
    """`wkv7_keys` and `wkv7`. Elsewhere than on CUDA, the implementation is that of `wkv7` with the
    formula of `wkv7_keys`."""

    name = "keyed_wkv7"
    implementations, left_to_jax = ("ffi", "xla"), ()

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        bonus = FUNCTION.results["bonus"]
        if name == "forward":
            packing = operands.packing
            result = SIGNATURE.result_axes(packing, options)
            return SIGNATURE.forward_axes(packing), (result, bonus, bonus)
        packing = operands[0].packing
        given = SIGNATURE.backward_axes(packing), bonus, bonus
        return given, SIGNATURE.gradient_axes(packing)

    def why_not(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Any
    ) -> str | None:
        if choice == "ffi" and platform == "cuda":
            return library.why_not(platform)
        recurrent = operands if name == "forward" else operands[0]
        inputs = {name: recurrent.inputs[name] for name in "rwkv"}
        inputs |= {"a": inputs["k"], "b": inputs["k"]}  # of their shape and dtype
        shaped = dataclasses.replace(recurrent, inputs=inputs)
        return OPERATOR.why_not(name, choice, options, platform, shaped)

    def implementation(
        self, name: Pass, choice: str, options: Options, platform: str, shards: Shards
    ) -> Callable[[Any], Any]:
        if choice == "ffi" and platform == "cuda":
            native = _native_forward if name == "forward" else _native_backward
            return functools.partial(native, options)
        composed = _composed_forward if name == "forward" else _composed_backward
        wkv7_pass = OPERATOR.implementation(name, choice, options, platform, shards)
        return functools.partial(composed, options, wkv7_pass)


_BOTH = _Keyed()


def _tensors(inputs: Arrays) -> Arrays:
    return {name: inputs[name] for name in TENSORS}


def _of_keys(inputs: Arrays) -> Arrays:
    """The inputs of `wkv7_keys`."""
    return {name: inputs[name] for name in FUNCTION.inputs}


def _native_forward(options: Options, operands: Forward) -> Found:
    inputs = operands.inputs
    tensors = dataclasses.replace(operands, inputs=_tensors(inputs))
    results, given, attributes, result = KERNELS.forward_call(options, "cuda", tensors)
    each_head = inputs["k"].shape[:-1], jnp.float32
    *found, bonus, inverse = library.call(
        TARGETS["forward"],
        [*results, each_head, each_head],
        *(*given, FUNCTION.native_parameters(_of_keys(inputs))),
        **attributes,
    )
    return result(found), bonus, inverse


def _native_backward(options: Options, operands: Operands) -> Gradients:
    recurrent, inverse, dbonus = operands
    of_keys = _of_keys(recurrent.inputs)
    tensors = dataclasses.replace(recurrent, inputs=_tensors(recurrent.inputs))
    results, given, attributes, gradients = KERNELS.backward_call(options, "cuda", tensors)
    parameters = FUNCTION.native_parameters(of_keys)
    *found, partials = library.call(
        TARGETS["backward"],
        [*results, FUNCTION.partials(of_keys)],
        *(*given, parameters, inverse, dbonus),
        **attributes,
    )
    of_wkv7 = gradients(found)
    return Gradients(of_wkv7.inputs | FUNCTION.sums(of_keys, partials), of_wkv7.state)


def _with_keys(inputs: Arrays, options: Options) -> tuple[Arrays, Arrays]:
    """The inputs of `wkv7`, and the results of `wkv7_keys`."""
    of_keys = _function.Operands(_of_keys(inputs))
    keys, _ = FUNCTION.formula("forward", options, of_keys)
    r, w, v = (inputs[name] for name in "rwv")
    return {"r": r, "w": w, "k": keys["key"], "v": v, "a": keys["a"], "b": keys["b"]}, keys


def _composed_forward(
    options: Options, wkv7_pass: Callable[[Forward], Result], operands: Forward
) -> Found:
    inputs, keys = _with_keys(operands.inputs, options)
    result = wkv7_pass(dataclasses.replace(operands, inputs=inputs))
    inverse = inverse_length(operands.inputs["k"], operands.inputs["k_k"])
    return result, keys["bonus"], inverse


def _composed_backward(
    options: Options, wkv7_pass: Callable[[Backward], Gradients], operands: Operands
) -> Gradients:
    recurrent, _, dbonus = operands
    given = recurrent.inputs
    inputs, _ = _with_keys(given, options)
    found = wkv7_pass(dataclasses.replace(recurrent, inputs=inputs))
    r, w, k, v, a, b = (found.inputs[name] for name in "rwkvab")
    cotangents = {"key": k, "a": a, "b": b, "bonus": dbonus, "r": r}
    of_keys = _function.Operands(_of_keys(given), {}, cotangents)
    gradients = FUNCTION.formula("backward", options, of_keys)
    return Gradients({"w": w, "v": v, **gradients}, found.state)
