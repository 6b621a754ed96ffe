"""An operator that the package does not have: what the machinery gives to one that is described by
a reference step, the terms of a token and a transition alone.

The toy recurrence keeps values under keys, with a decay for each key channel. For each head:

    S_t = S_{t-1} diag(exp(w_t)) + v_t k_t^T        y_t = S_t r_t
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import AxisType

import rwkv_jax
from rwkv_jax._operator.call import Arrays, Forward, Marks, Options
from rwkv_jax._operator.implementation import ForwardFn, Transition
from rwkv_jax._operator.operator import Operator, public
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.terms import Read, Terms
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.sharding import shard
from support import cases, meshes, operators, oracle
from support.cases import Case
from support.harness import assert_right, check, expected, operands
from support.operators import OPERATORS, Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("_tested_as_toy")]

SIGNATURE = Signature(
    "toy",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV"},
    y="v",
    state={"state": "BHVK"},
    decays=("log",),
)


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    r, w, k, v = (inputs[name].astype(jnp.float32) for name in "rwkv")
    after = state["state"] * jnp.exp(w)[:, :, None] + v[..., None] * k[:, :, None]
    y = jnp.einsum("bhvk,bhk->bhv", after, r, precision="highest")
    return y.astype(inputs["v"].dtype), {"state": after}


def terms(inputs: Arrays) -> Terms:
    return Terms([Read(inputs["r"], after=True)], [inputs["k"]])


class ToyTransition(Transition):
    """The tokens take the state S to S diag(factor) + added."""

    axes: ClassVar = {"factor": "BHK", "added": "BHVK"}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        w, v = operands.inputs["w"], operands.inputs["v"]
        marks = operands.packing.marks if isinstance(operands.packing, Marks) else None
        (w,) = segments.cleared(marks, [w])
        total = jnp.sum(w, axis=1) if marks is None else segments.total(marks, w)
        start = jnp.zeros_like(v[:, 0, :, :, None] * w[:, 0, :, None], jnp.float32)
        result = forward(Forward(operands.inputs, {"state": start}, operands.packing))
        return {"factor": jnp.exp(total), "added": result.state["state"]}

    def apply(self, transition: Arrays, state: Arrays) -> Arrays:
        return {"state": transition["factor"][..., None, :] * state["state"] + transition["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": first["factor"] * second["factor"], "added": added}


OPERATOR = Operator(
    SIGNATURE,
    ToyTransition(),
    implementations={
        "xla": Chain(SIGNATURE, terms),
        "reference": TokenByToken(SIGNATURE, step),
    },
)


@public(OPERATOR)
def toy(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    initial_state: Any = None,
    *,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    decay: str = "log",
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    inputs = {"r": r, "w": w, "k": k, "v": v}
    return OPERATOR.sequence(
        inputs, initial_state, segment_ids, cu_seqlens, decay, precision, implementation
    )


@public(OPERATOR)
def toy_step(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    state: Any,
    *,
    active: Any = None,
    decay: str = "log",
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    inputs = {"r": r, "w": w, "k": k, "v": v}
    return OPERATOR.step(inputs, state, active, decay, precision, implementation)


# So far, everything that a new operator needs. From here on, what it has for that.


def make(case: Case) -> tuple[cases.Arrays, cases.Arrays]:
    inputs, cotangents = cases.wkv7(case)
    return {name: x for name, x in inputs.items() if name not in "ab"}, cotangents


def toy_oracle(inputs: cases.Arrays, form: str, cotangents: cases.Arrays) -> cases.Arrays:
    """That of WKV7, whose state is read along `a`, which is zero here."""
    zeros = np.zeros(inputs["k"].shape)
    return oracle.wkv7({**inputs, "a": zeros, "b": zeros}, form, cotangents)


CASE = Case(4, 132, 2, 4, V=3, decay="log")


@pytest.fixture
def _tested_as_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = operators.Operator(
        toy, toy_oracle, make, cases=(), inputs=tuple("rwkv"), decays=("log",)
    )
    monkeypatch.setitem(OPERATORS, "toy", tested)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("case", "packing"),
    [
        (CASE, {}),
        (CASE, {"segment_ids": np.repeat([[3, 5, 0]] * 4, [50, 70, 12], axis=1)}),
        (dataclasses.replace(CASE, B=1), {"cu_seqlens": np.array([0, 30, 30, 132], np.int32)}),
    ],
    ids=["rows", "segments", "sequences"],
)
def test_values_and_gradients(implementation: str, case: Case, packing: dict[str, Any]) -> None:
    check(Run("toy", implementation), case, **packing)


def test_checks_and_dispatch() -> None:
    inputs, _ = operands("toy", CASE)
    r, w, k, v, _ = inputs.values()
    found = rwkv_jax.implementations("toy", r, w, k, v)
    assert {name: x.available for name, x in found.items()} == {"xla": True, "reference": True}
    token = (x[:, 0] for x in (r, w, k, v))
    assert rwkv_jax.implementations("toy_step", *token)["xla"].available
    with pytest.raises(ValueError, match=r"toy: v has shape \(4, 131, 2, 3\), so T = 131"):
        toy(r, w, k, v[:, 1:])
    with pytest.raises(TypeError, match="toy: k is bfloat16 where the others are float32"):
        toy(r, w, jnp.asarray(k, jnp.bfloat16), v)
    with pytest.raises(ValueError, match="implementation is 'ffi'; accepted are 'xla', 'refer"):
        toy(r, w, k, v, implementation="ffi")


def test_descriptions_that_are_refused() -> None:
    by_head = dataclasses.replace(SIGNATURE, inputs={**SIGNATURE.inputs, "w": "BTH"})
    with pytest.raises(ValueError, match=r"toy: w has the axes \[B, T, H\]; accepted by Chain are"):
        Chain(by_head, terms)

    def wkv7() -> None: ...

    with pytest.raises(ValueError, match=r"rwkv_jax\.wkv7 has an operator wkv7"):
        public(OPERATOR)(wkv7)


def test_one_token() -> None:
    inputs, cotangents = operands("toy", Case(4, 1, 2, 4, V=3, decay="log"))
    *of_token, state = (x[:, 0] if name in "rwkv" else x for name, x in inputs.items())
    (y, after), vjp = jax.vjp(toy_step, *of_token, state)
    dy, dafter = cotangents.values()
    *_, dstate = vjp((jnp.asarray(dy[:, 0]), jnp.asarray(dafter)))
    found = {"y": y[:, None], "final_state": after, "dinitial_state": dstate}
    assert_right(found, expected("toy", inputs, cotangents))


@pytest.mark.parametrize("axes", ["data=2,model=2", "data=2,seq=2", "seq=4"])
def test_shard(axes: str, cpus: list[Any]) -> None:
    over = shard(toy, meshes.mesh(axes, AxisType.Auto, cpus), **meshes.PLACES[axes])
    check(Run("toy", None), CASE, function=over)
