"""An operator that the package does not have: what the machinery gives to one that is described by
a reference step, a function of a tile and a summary alone.

The toy recurrence is a decayed sum of values over keys, for each channel with its own decay:

    s_t = exp(w) s_{t-1} + k_t v_t        y_t = s_t
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
from rwkv_jax._operator.call import Arrays, Forward, Options
from rwkv_jax._operator.implementation import ForwardFn, Summary
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.public import public, run
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable.chunked import Chunked
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.sharding import shard
from support import hlo

pytestmark = pytest.mark.slow

SIGNATURE = Signature(
    "toy",
    inputs={"w": "C", "k": "BTC", "v": "BTC"},
    y="v",
    state={"sum": "BC"},
    decays=("log",),
)


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    w, k, v = (inputs[name].astype(jnp.float32) for name in "wkv")
    after = jnp.exp(w) * state["sum"] + k * v
    return after.astype(inputs["v"].dtype), {"sum": after}


def tile(
    options: Options, state: Arrays, inputs: Arrays, marks: Array | None
) -> tuple[Arrays, Array]:
    w, k, v = (inputs[name].astype(jnp.float32) for name in "wkv")
    batch, tokens, _ = k.shape
    marks = jnp.zeros((batch, tokens), jnp.uint8) if marks is None else marks
    number, there = segments.numbers(marks), marks != segments.PADDING
    age = jnp.cumsum(there, axis=1)[..., None].astype(jnp.float32)
    decay = jnp.exp((age[:, :, None] - age[:, None]) * w[:, None, None])
    seen = (number[:, :, None] == number[:, None]) & jnp.tril(jnp.ones((1, tokens, tokens), bool))
    sums = jnp.einsum("bij,bijc,bjc->bic", seen.astype(jnp.float32), decay, k * v)
    start = jnp.where((number == 0)[..., None], jnp.exp(age * w[:, None]), 0.0)
    sums += start * state["sum"][:, None]
    y = jnp.where(there[..., None], sums, 0.0)
    return {"sum": sums[:, -1]}, y.astype(inputs["v"].dtype)


class ToySummary(Summary):
    """The tokens take the sum s to f s + a."""

    axes: ClassVar = {"factor": "BC", "added": "BC"}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        ends = []
        for start in (0.0, 1.0):
            state = {"sum": jnp.zeros_like(operands.inputs["k"][:, 0], jnp.float32) + start}
            result = forward(Forward(operands.inputs, state, operands.packing))
            ends.append(result.state["sum"])
        return {"factor": ends[1] - ends[0], "added": ends[0]}

    def apply(self, summary: Arrays, state: Arrays) -> Arrays:
        return {"sum": summary["factor"] * state["sum"] + summary["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"sum": first["added"]})["sum"]
        return {"factor": first["factor"] * second["factor"], "added": added}


REFERENCE = TokenByToken(SIGNATURE, step)
OPERATOR = Operator(
    SIGNATURE,
    ToySummary(),
    implementations={"xla": Chunked(SIGNATURE, tile, REFERENCE), "reference": REFERENCE},
)


@public(OPERATOR)
def toy(
    w: Any,
    k: Any,
    v: Any,
    initial_state: Any = None,
    *,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    slots: Any = None,
    decay: str = "log",
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    return run(toy, locals())


@public(OPERATOR, is_step=True)
def toy_step(
    w: Any,
    k: Any,
    v: Any,
    state: Any,
    *,
    slots: Any = None,
    decay: str = "log",
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    return run(toy_step, locals())


# So far, everything that a new operator needs. From here on, what it has for that.

B, T, C = 4, 130, 8
RNG = np.random.default_rng(0)
W = -RNG.uniform(0.01, 0.5, C).astype(np.float32)
K, V = RNG.standard_normal((2, B, T, C), dtype=np.float32)
STATE = RNG.standard_normal((B, C), dtype=np.float32)
DY, DSTATE = RNG.standard_normal((B, T, C)), RNG.standard_normal((B, C))


def expected(w: np.ndarray, k: np.ndarray, v: np.ndarray, state: np.ndarray) -> Any:
    """`y` and the final state of rows [B, T, C], in float64."""
    decay, s, ys = np.exp(w.astype(np.float64)), state.astype(np.float64), []
    for t in range(k.shape[1]):
        s = decay * s + k[:, t].astype(np.float64) * v[:, t]
        ys.append(s)
    return np.stack(ys, axis=1), s


def close(x: Any, y: Any, ceiling: float = 1e-5) -> None:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(x - y) <= ceiling * np.linalg.norm(y)


def loss(operator: Any, *operands: Any, **options: Any) -> Array:
    y, state = operator(*operands, **options)
    return jnp.sum(y * DY.astype(np.float32)) + jnp.sum(state * DSTATE.astype(np.float32))


def gradients(operator: Any, *operands: Any, **options: Any) -> Any:
    compute = jax.jit(jax.grad(lambda *xs: loss(operator, *xs, **options), argnums=(0, 1, 2, 3)))
    return compute(*operands)


@pytest.fixture(scope="module")
def of_reference() -> Any:
    return gradients(toy, W, K, V, STATE, implementation="reference")


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_values(implementation: str | None) -> None:
    for x, y in zip(
        toy(W, K, V, STATE, implementation=implementation), expected(W, K, V, STATE), strict=True
    ):
        close(x, y)


def test_gradients_of_chunks(of_reference: Any) -> None:
    for x, y in zip(gradients(toy, W, K, V, STATE), of_reference, strict=True):
        close(x, y)
    # The derivative in the direction of each operand, by finite differences in float64.
    for i, dx in enumerate(of_reference):
        operands = [np.asarray(x, np.float64) for x in (W, K, V, STATE)]
        direction = RNG.standard_normal(operands[i].shape)

        sums = []
        for distance in (1e-6, -1e-6):
            moved = [x + distance * direction if j == i else x for j, x in enumerate(operands)]
            y, state = expected(*moved)
            sums.append(np.sum(y * DY) + np.sum(state * DSTATE))
        close(np.sum(np.asarray(dx) * direction), (sums[0] - sums[1]) / 2e-6, 1e-4)


def test_checks_and_dispatch() -> None:
    assert rwkv_jax.implementations("toy", W, K, V) == {"xla": None, "reference": None}
    assert rwkv_jax.implementations("toy_step", W, K[:, 0], V[:, 0])["xla"] is None
    with pytest.raises(ValueError, match=r"toy: v has shape \(4, 129, 8\), so T = 129"):
        toy(W, K, V[:, 1:])
    with pytest.raises(TypeError, match="toy: k is bfloat16 where the others are float32"):
        toy(W, jnp.asarray(K, jnp.bfloat16), V)
    with pytest.raises(ValueError, match="implementation is 'ffi'; accepted are 'xla', 'refer"):
        toy(W, K, V, implementation="ffi")


def test_one_token() -> None:
    y, state = jax.jit(toy_step)(W, K[:, 0], V[:, 0], STATE)
    for x in (y, state):
        close(x, expected(W, K[:, :1], V[:, :1], STATE)[1])
    dstep = jax.grad(lambda s: jnp.sum(toy_step(W, K[:, 0], V[:, 0], s)[1]))(STATE)
    close(dstep, np.broadcast_to(np.exp(W), STATE.shape))


def test_vmap(of_reference: Any) -> None:
    one = jax.vmap(lambda k, v, s: toy(W, k[None], v[None], s[None])[0][0])
    close(one(K, V, STATE), expected(W, K, V, STATE)[0])
    each = jax.vmap(lambda k: jax.grad(lambda x: loss(toy, W, x, V, STATE))(k))
    close(each(jnp.stack([K, K]))[1], of_reference[1])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharding(axis_type: AxisType, of_reference: Any, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((2, 2), ("b", "c"), axis_types=(axis_type,) * 2, devices=cpus)
    specs = P("c"), P("b", None, "c"), P("b", None, "c"), P("b", "c")
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip((W, K, V, STATE), specs, strict=True)
        ]
        assert not hlo.collectives(jax.jit(toy).lower(*placed).compile().as_text())
        dk = jax.jit(jax.grad(lambda k: jnp.sum(toy(placed[0], k, *placed[2:])[0])))(placed[1])
    close(dk, jax.grad(lambda k: jnp.sum(toy(W, k, V, STATE)[0]))(K))


@pytest.mark.parametrize("sequence", [None, "s"])
def test_shard(sequence: str | None, of_reference: Any, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((2, 2), ("b", "s"), axis_types=(AxisType.Auto,) * 2, devices=cpus)
    k, v = K[:, :128], V[:, :128]
    over = shard(toy, mesh, batch="b", sequence=sequence)
    for x, y in zip(over(W, k, v, STATE), expected(W, k, v, STATE), strict=True):
        close(x, y)
    dk = jax.jit(jax.grad(lambda k: jnp.sum(over(W, k, v, STATE)[0])))(k)
    close(dk, jax.grad(lambda k: jnp.sum(toy(W, k, v, STATE)[0]))(k))


def test_segments() -> None:
    ids = np.repeat([[3, 5, 0]], B, axis=0).repeat([50, 70, 10], axis=1)
    y, final = jax.jit(toy)(W, K, V, STATE, segment_ids=ids)
    first, _ = expected(W, K[:, :50], V[:, :50], STATE)
    second, state = expected(W, K[:, 50:120], V[:, 50:120], np.zeros_like(STATE))
    close(y, np.concatenate([first, second, np.zeros((B, 10, C))], axis=1))
    close(final, state)


def test_sequences_and_slots() -> None:
    offsets, pool = jnp.array([0, 30, 30, T], jnp.int32), jnp.asarray(STATE)
    slots = jnp.array([2, 0, 1], jnp.int32)
    call = jax.jit(toy, donate_argnums=3)
    y, after = call(W, K[:1], V[:1], pool, cu_seqlens=offsets, slots=slots)
    first, of_first = expected(W, K[:1, :30], V[:1, :30], STATE[2:3])
    last, of_last = expected(W, K[:1, 30:], V[:1, 30:], STATE[1:2])
    close(y, np.concatenate([first, last], axis=1))
    close(after, np.concatenate([STATE[:1], of_last, of_first, STATE[3:]]))


def test_export() -> None:
    exported = export.export(jax.jit(toy), disabled_checks=rwkv_jax.export_checks())(W, K, V)
    y, _ = export.deserialize(exported.serialize()).call(W, K, V)
    close(y, expected(W, K, V, np.zeros_like(STATE))[0])
