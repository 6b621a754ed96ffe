"""`wkv7_keys` and `wkv7` in one, with a backward pass that has kernels of its own."""

import functools
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32, Int

from rwkv_jax._native import library
from rwkv_jax._operator import check, dispatch
from rwkv_jax._operator.call import Arrays, Backward, Forward, Gradients, Leaf, Marks, Options
from rwkv_jax._operator.derivative import KEPT
from rwkv_jax._operator.operator import Pass
from rwkv_jax._operator.partition import alike, check_whole, repeated
from rwkv_jax._packing import segments
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _function
from rwkv_jax.layers.wkv7_keys import FUNCTION, wkv7_keys
from rwkv_jax.wkv7 import OPERATOR, ffi, wkv7

TENSORS = {"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "rate": "BTHK"}
STATE = {"initial_state": "BHVK"}

Results: TypeAlias = tuple[Array, Array, Array]

TARGET = "rwkv_wkv7_keyed_bwd_v1"

DTYPES, HEAD_SIZE = ("bfloat16", "float16"), 64
"""What the kernels of the backward pass take."""


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

    Results and gradients are those of the two functions. On CUDA GPUs, with bfloat16 or float16 and
    heads of 64 channels, one kernel computes both backward passes, and the gradients of k', a and b
    are never stored. Anywhere else this is a call of each function.

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
    if not _has_kernels(given, implementation):
        return _composed(given, segment_ids, implementation)
    options = Options("sigmoid", lax.Precision.DEFAULT, implementation)
    found: Results = _run(options, _prepared(op, axes, given, segment_ids))
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


def _has_kernels(given: Arrays, implementation: str | None) -> bool:
    """Whether the backward pass may have a kernel for both functions."""
    v, sizes = given["v"], dict(zip(TENSORS["k"], given["k"].shape, strict=True))
    return (
        (implementation == "ffi" or (implementation is None and not library.why_not("cuda")))
        and v.dtype in DTYPES
        and sizes["K"] == v.shape[-1] == HEAD_SIZE
        and sizes["B"] <= _function.MAX_ROWS
        and sizes["T"] <= _function.MAX_TOKENS
    )


def _prepared(
    op: str, axes: dict[str, str], given: Arrays, segment_ids: Array | None
) -> Forward[Array]:
    """The inputs by name and the state, all on the same mesh axes, and parameters once for each
    row."""
    given = dict(given)
    if "initial_state" not in given:
        rows, _, heads, size = given["v"].shape
        given["initial_state"] = jnp.zeros((rows, heads, size, given["r"].shape[-1]), jnp.float32)
    letters = {name: axes[name] for name in given}
    if segment_ids is not None:
        (ids,) = alike(["BT"], segment_ids)
        given["segment_ids"], letters["segment_ids"] = segments.marks(ids), "BT"
    check_whole(op, list(letters.items()), given.values())
    inputs = dict(zip(given, alike(letters.values(), *given.values()), strict=True))
    state = {"state": inputs.pop("initial_state")}
    packing = Marks(inputs.pop("segment_ids")) if segment_ids is not None else None
    for name, letter in FUNCTION.parameters.items():
        inputs[name] = repeated(inputs[name], letter, inputs["v"], TENSORS["v"])
    return Forward(inputs, state, packing)


def _both(options: Options, operands: Forward) -> tuple[Arrays, Any]:
    """The results of `wkv7_keys`, and those of the forward pass of `wkv7`."""
    inputs = operands.inputs
    of_keys = _function.Operands({name: inputs[name] for name in FUNCTION.inputs})
    keys, _ = dispatch.dispatched(FUNCTION, "forward", options.saving(False), of_keys)
    keys = {name: checkpoint_name(x, FUNCTION.name) for name, x in keys.items()}
    given = Forward(_recurrent(inputs, keys), operands.state, operands.packing)
    result = dispatch.run(OPERATOR, "forward", options, given)
    return keys, jax.tree.map(lambda x: checkpoint_name(x, KEPT), result)


def _recurrent(inputs: Arrays, keys: Arrays) -> Arrays:
    """The inputs of `wkv7`."""
    r, w, v = (inputs[name] for name in "rwv")
    return {"r": r, "w": w, "k": keys["key"], "v": v, "a": keys["a"], "b": keys["b"]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, operands: Forward) -> Results:
    keys, result = _both(options, operands)
    return result.y, keys["bonus"], result.state["state"]


def _forward(options: Options, operands: Forward) -> tuple[Results, Any]:
    keys, result = _both(options.saving(True), operands)
    results = result.y, keys.pop("bonus"), result.state["state"]
    return results, (operands.inputs, keys, result.states, operands.packing)


def _backward(options: Options, residuals: Any, cotangents: Results) -> tuple[Forward]:
    inputs, keys, states, packing = residuals
    dy, dbonus, dstate = cotangents
    operands = Operands(
        Backward(_recurrent(inputs, keys), states, dy, {"state": dstate}, packing),
        {name: inputs[name] for name in FUNCTION.inputs if name != "r"},
        dbonus,
    )
    found = dispatch.dispatched(_BOTH, "backward", options, operands)
    return (Forward(found.inputs, found.state),)


_run.defvjp(_forward, _backward)


# The backward pass of both.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The operands of the backward pass of `wkv7`, the inputs of `wkv7_keys` but r, and the
    cotangent of the bonus."""

    recurrent: Backward[Leaf]
    keys: dict[str, Leaf]
    dbonus: Leaf

    @property
    def packing(self) -> Any:
        return self.recurrent.packing


class _Both:
    """What `dispatch.dispatched` asks for. Elsewhere than on CUDA the implementation is that of
    `wkv7`."""

    implementations = ("ffi", "xla")

    def title(self, name: Pass) -> str:
        return "keyed_wkv7"

    def axes(self, name: Pass, options: Options, packing: Any) -> tuple[Any, Any]:
        recurrent, results = OPERATOR.axes("backward", options, packing)
        keys = {name: axes for name, axes in FUNCTION.inputs.items() if name != "r"}
        operands = Operands(recurrent, keys, FUNCTION.results["bonus"])
        return operands, Gradients({**TENSORS, **keys}, results.state)

    def why_not(
        self, choice: str, platform: str, options: Options, operands: Operands
    ) -> str | None:
        if choice == "ffi" and platform == "cuda":
            return library.why_not(platform)
        return OPERATOR.why_not(choice, platform, options, operands.recurrent)

    def compute(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Operands
    ) -> Gradients:
        recurrent = operands.recurrent
        inputs = {"r": recurrent.inputs["r"], **operands.keys}
        inputs = {name: inputs[name] for name in FUNCTION.inputs}
        if choice == "ffi" and platform == "cuda":
            found, (partials,) = ffi.IMPLEMENTATION.backward_by(
                *(TARGET, options, platform, recurrent),
                [inputs["k"], inputs["rate"], FUNCTION.native_parameters(inputs), operands.dbonus],
                [FUNCTION.partials(inputs)],
            )
            gradients = {name: found.inputs[name] for name in "rwkv"}
            gradients |= {"rate": found.inputs["a"], **FUNCTION.sums(inputs, partials)}
            return Gradients(gradients, found.state)
        found = OPERATOR.compute("backward", choice, options, platform, recurrent)
        r, w, k, v, a, b = (found.inputs[name] for name in "rwkvab")
        cotangents = {"key": k, "a": a, "b": b, "bonus": operands.dbonus, "r": r}
        of_keys = _function.Operands(inputs, {}, cotangents)
        gradients = FUNCTION.compute("backward", "xla", options, platform, of_keys)
        return Gradients({"w": w, "v": v, **gradients}, found.state)

    def has_rule(self, options: Options) -> bool:
        return True


_BOTH = _Both()
