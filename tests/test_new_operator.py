"""An operator that the package does not have: what the machinery gives to one that is described by
a reference step, the terms of a token and a summary alone.

The toy recurrence keeps values under keys, with a decay for each key channel. For each head:

    S_t = S_{t-1} diag(exp(w_t)) + v_t k_t^T        y_t = S_t r_t
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax._operator.call import Arrays, Forward, Marks, Options
from rwkv_jax._operator.implementation import ForwardFn, Summary
from rwkv_jax._operator.operator import Operator, public
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.terms import Read, Terms
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.sharding import shard
from support import hlo

pytestmark = pytest.mark.slow

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


class ToySummary(Summary):
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

    def apply(self, summary: Arrays, state: Arrays) -> Arrays:
        return {"state": summary["factor"][..., None, :] * state["state"] + summary["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": first["factor"] * second["factor"], "added": added}


OPERATOR = Operator(
    SIGNATURE,
    ToySummary(),
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

B, T, H, K, V = 4, 130, 2, 4, 3
RNG = np.random.default_rng(0)
INPUTS = {
    "r": RNG.standard_normal((B, T, H, K), dtype=np.float32),
    "w": -RNG.uniform(0.01, 0.5, (B, T, H, K)).astype(np.float32),
    "k": RNG.standard_normal((B, T, H, K), dtype=np.float32),
    "v": RNG.standard_normal((B, T, H, V), dtype=np.float32),
}
STATE = RNG.standard_normal((B, H, V, K), dtype=np.float32)
DY, DSTATE = RNG.standard_normal((B, T, H, V)), RNG.standard_normal((B, H, V, K))
OPERANDS: Any = (*INPUTS.values(), STATE)


def of_tokens(tokens: Any, inputs: dict[str, np.ndarray] = INPUTS) -> tuple[Any, Any, Any, Any]:
    """The inputs of some tokens of all rows."""
    r, w, k, v = (x[:, tokens] for x in inputs.values())
    return r, w, k, v


def expected(*operands: np.ndarray) -> Any:
    """`y` and the final state, in float64."""
    r, w, k, v, s = (x.astype(np.float64) for x in operands)
    ys = []
    for t in range(k.shape[1]):
        s = s * np.exp(w[:, t, :, None]) + v[:, t, :, :, None] * k[:, t, :, None]
        ys.append(np.einsum("bhvk,bhk->bhv", s, r[:, t]))
    return np.stack(ys, axis=1), s


def close(x: Any, y: Any, ceiling: float = 1e-5) -> None:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(x - y) <= ceiling * np.linalg.norm(y)


def loss(operator: Any, *operands: Any, **options: Any) -> Array:
    y, state = operator(*operands, **options)
    return jnp.sum(y * DY.astype(np.float32)) + jnp.sum(state * DSTATE.astype(np.float32))


def gradients(*operands: Any, **options: Any) -> Any:
    compute = jax.jit(jax.grad(lambda *xs: loss(toy, *xs, **options), argnums=(0, 1, 2, 3, 4)))
    return compute(*operands)


@pytest.fixture(scope="module")
def of_reference() -> Any:
    return gradients(*OPERANDS, implementation="reference")


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_values(implementation: str | None) -> None:
    found = toy(*OPERANDS, implementation=implementation)
    for x, y in zip(found, expected(*OPERANDS), strict=True):
        close(x, y)


def test_gradients_of_chunks(of_reference: Any) -> None:
    for x, y in zip(gradients(*OPERANDS), of_reference, strict=True):
        close(x, y)
    # The derivative in the direction of each operand, by finite differences in float64.
    for i, dx in enumerate(of_reference):
        operands = [np.asarray(x, np.float64) for x in OPERANDS]
        direction = RNG.standard_normal(operands[i].shape)

        sums = []
        for distance in (1e-6, -1e-6):
            moved = [x + distance * direction if j == i else x for j, x in enumerate(operands)]
            y, state = expected(*moved)
            sums.append(np.sum(y * DY) + np.sum(state * DSTATE))
        close(np.sum(np.asarray(dx) * direction), (sums[0] - sums[1]) / 2e-6, 1e-4)


def test_checks_and_dispatch() -> None:
    found = rwkv_jax.implementations("toy", *INPUTS.values())
    assert {name: x.available for name, x in found.items()} == {"xla": True, "reference": True}
    assert rwkv_jax.implementations("toy_step", *of_tokens(0))["xla"].available
    r, w, k, v = INPUTS.values()
    with pytest.raises(ValueError, match=r"toy: v has shape \(4, 129, 2, 3\), so T = 129"):
        toy(r, w, k, v[:, 1:])
    with pytest.raises(TypeError, match="toy: k is bfloat16 where the others are float32"):
        toy(r, w, jnp.asarray(k, jnp.bfloat16), v)
    with pytest.raises(ValueError, match="implementation is 'ffi'; accepted are 'xla', 'refer"):
        toy(r, w, k, v, implementation="ffi")


def test_one_token() -> None:
    y, state = jax.jit(toy_step)(*of_tokens(0), STATE)
    right, after = expected(*of_tokens(slice(1)), STATE)
    close(y, right[:, 0])
    close(state, after)
    dstep = jax.grad(lambda s: jnp.sum(toy_step(*of_tokens(0), s)[1]))(STATE)
    close(dstep, np.broadcast_to(np.exp(INPUTS["w"][:, 0, :, None]), STATE.shape))


def test_vmap(of_reference: Any) -> None:
    one = jax.vmap(lambda *row: toy(*(x[None] for x in row))[0][0])
    close(one(*OPERANDS), expected(*OPERANDS)[0])
    r, w, k, v = INPUTS.values()
    each = jax.vmap(lambda k: jax.grad(lambda x: loss(toy, r, w, x, v, STATE))(k))
    close(each(jnp.stack([k, k]))[1], of_reference[2])


def _dk(operator: Any, r: Any, w: Any, k: Any, *others: Any) -> Any:
    return jax.jit(jax.grad(lambda k: jnp.sum(operator(r, w, k, *others)[0])))(k)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharding(axis_type: AxisType, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(axis_type,) * 2, devices=cpus)
    specs = *[P("b", None, "h")] * 4, P("b", "h")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(OPERANDS, specs, strict=True)
        ]
        assert not hlo.collectives(jax.jit(toy).lower(*placed).compile().as_text())
        dk = _dk(toy, *placed)
    close(dk, _dk(toy, *OPERANDS))


@pytest.mark.parametrize("sequence", [None, "s"])
def test_shard(sequence: str | None, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=(AxisType.Auto,) * 2, devices=cpus)
    operands = (*of_tokens(slice(128)), STATE)
    over = shard(toy, mesh, batch="b", sequence=sequence)
    for x, y in zip(over(*operands), expected(*operands), strict=True):
        close(x, y)
    close(_dk(over, *operands), _dk(toy, *operands))


def test_segments() -> None:
    ids = np.repeat([[3, 5, 0]], B, axis=0).repeat([50, 70, 10], axis=1)
    y, final = jax.jit(toy)(*OPERANDS, segment_ids=ids)
    first, _ = expected(*of_tokens(slice(50)), STATE)
    second, state = expected(*of_tokens(slice(50, 120)), np.zeros_like(STATE))
    close(y, np.concatenate([first, second, np.zeros((B, 10, H, V))], axis=1))
    close(final, state)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_sequences(implementation: str) -> None:
    offsets, row = jnp.array([0, 30, 30, T], jnp.int32), {n: x[:1] for n, x in INPUTS.items()}
    y, after = jax.jit(toy, static_argnames="implementation")(
        *row.values(), STATE[:3], cu_seqlens=offsets, implementation=implementation
    )
    first, of_first = expected(*of_tokens(slice(30), row), STATE[:1])
    last, of_last = expected(*of_tokens(slice(30, None), row), STATE[2:3])
    close(y, np.concatenate([first, last], axis=1))
    close(after, np.concatenate([of_first, STATE[1:2], of_last]))


def test_export() -> None:
    exported = export.export(jax.jit(toy), disabled_checks=rwkv_jax.export_disabled_checks())
    y, _ = export.deserialize(exported(*OPERANDS).serialize()).call(*OPERANDS)
    close(y, expected(*OPERANDS)[0])
