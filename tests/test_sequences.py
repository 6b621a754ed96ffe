"""`cu_seqlens`: sequences of different lengths in one row, each with its own states."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import _ffi, _sequences, sharding
from support import hlo, tolerance
from support.cases import Case
from support.operators import SEQUENCES, Run, flat, library, sequential

TOKENS = 70
"""Of a row: more than a frame."""

CU = np.array([0, 0, 1, 7, 7, 70, 70], np.int32)
"""Empty sequences at both ends and between, a single token, and one of 63."""

LONG = np.array([0, 0, 64, 65, 65, 193, 257, 300], np.int32)
"""Whole frames, and frames with a token."""


def made(op: str, case: Case, sequences: int) -> tuple[dict, dict]:
    """The operands of one row with so many states, and cotangents."""
    own = SEQUENCES[op]
    inputs, cotangents = own.make(own.suited(case))
    like = Case(sequences, 1, case.H, case.K, state=case.state)
    states, dstates = own.make(own.suited(like))
    inputs |= {name: states[name] for name in own.states if name in states}
    return inputs, cotangents | {n: x for n, x in dstates.items() if n != "dy"}


def alone(op: str, inputs: dict, cu: np.ndarray, decay: str, cotangents: dict) -> dict:
    """By the oracle, from each sequence on its own."""
    own = SEQUENCES[op]
    several = []
    for s, (start, end) in enumerate(itertools.pairwise(cu)):
        part, row = (slice(None), slice(start, end)), slice(s, s + 1)
        given = {n: inputs[n] if n in own.shared else inputs[n][part] for n in own.inputs}
        given |= {n: inputs[n][row] for n in own.states if n in inputs}
        d = {n: x[part] if n == "dy" else x[row] for n, x in cotangents.items()}
        several.append(own.oracle(given, decay, d))

    def joined(name: str) -> np.ndarray:
        parts = [x[name] for x in several]
        if name.removeprefix("d") in own.shared:
            return np.sum(parts, axis=0)
        return np.concatenate(parts, axis=int(name == "y" or name[1:] in own.inputs))

    return {name: joined(name) for name in several[0]}


def operands(run: Run, inputs: Mapping[str, Any], cu: Any) -> dict[str, Any]:
    options = {"decay": run.operator.decays[-1], "implementation": run.implementation}
    return {**inputs, **options, "precision": "highest", "cu_seqlens": cu}


@functools.partial(jax.jit, static_argnames=("run", "options"))
def found_by(
    run: Run, inputs: dict, cotangents: dict, cu: Any, options: tuple[tuple[str, Any], ...] = ()
) -> dict:
    own = run.operator

    def call(inputs: dict) -> dict:
        results = own.function(**operands(run, inputs, cu) | dict(options))
        return dict(zip(own.results, results, strict=True))

    results, vjp = jax.vjp(call, inputs)
    (gradients,) = vjp({name: cotangents[f"d{name}"] for name in own.results})
    return results | {f"d{name}": x for name, x in gradients.items()}


def assert_right(found: Mapping[str, Any], expected: Mapping[str, Any], limits: Any = None) -> None:
    arrays = {name: np.asarray(x) for name, x in found.items()}
    limits = tolerance.EXACT_FLOAT32 if limits is None else limits
    tolerance.assert_close(arrays, {n: expected[n] for n in arrays}, limits)


def _available(op: str, case: Case) -> list[str]:
    inputs, _ = made(op, case, len(CU) - 1)
    decay = SEQUENCES[op].decays[-1]
    can = rwkv_jax.implementations(op, *inputs.values(), cu_seqlens=CU, decay=decay)
    return [name for name, reason in can.items() if reason is None]


CASE = Case(1, TOKENS, 2, 16)
ALL = {op: _available(op, CASE) for op in SEQUENCES}
FAST = {op: Run(op, "ffi" if "ffi" in found else "reference") for op, found in ALL.items()}
"""What compiles in a moment."""

each_fast = pytest.mark.parametrize("run", FAST.values(), ids=FAST)
of_two = pytest.mark.parametrize("run", [FAST["wkv7"], FAST["wkv4"]], ids=["wkv7", "wkv4"])


def _slowly(op: str, name: str) -> bool:
    return name == "xla" or (name == "reference" and op != "wkv7")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            *[Run(op, name)],
            marks=[pytest.mark.slow] if _slowly(op, name) else [],
            id=f"{op}-{name}",
        )
        for op, several in ALL.items()
        for name in several
        if name == "ffi" or op in ("wkv7", "wkv4")
    ],
)
def test_sequences_are_as_if_alone(run: Run) -> None:
    inputs, cotangents = made(run.op, Case(1, int(LONG[-1]), 2, 16), len(LONG) - 1)
    expected = alone(run.op, inputs, LONG, run.operator.decays[-1], cotangents)
    assert_right(found_by(run, inputs, cotangents, LONG), expected)


@each_fast
def test_long_sequences(run: Run) -> None:
    """Of which native kernels take the longest first."""
    cu = np.array([0, 300, 1100], np.int32)
    assert cu[-1] >= _sequences.LONG * 2
    inputs, cotangents = made(run.op, Case(1, int(cu[-1]), 1, 16), len(cu) - 1)
    expected = alone(run.op, inputs, cu, run.operator.decays[-1], cotangents)
    assert_right(found_by(run, inputs, cotangents, cu), expected)


@of_two
def test_sixteen_bits(run: Run) -> None:
    """And sequences that start without tokens."""
    case = Case(1, TOKENS, 2, 16, dtype="bfloat16", state=False)
    inputs, cotangents = made(run.op, case, len(CU) - 1)
    found = found_by(run, inputs, cotangents, CU)
    kind = sequential(run.op, str(run.implementation), inputs)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=kind, highest=True) for n in found}
    expected = alone(run.op, inputs, CU, run.operator.decays[-1], cotangents)
    assert_right(found, expected, limits)


def in_a_row(run: Run, expected: dict, cu: np.ndarray, tokens: int) -> dict:
    """With zeros for the tokens that no sequence has."""
    timed = {n for n in run.operator.inputs if n not in run.operator.shared}
    placed = dict(expected)
    for name, x in expected.items():
        if name == "y" or name[1:] in timed:
            placed[name] = np.zeros((1, tokens, *x.shape[2:]))
            placed[name][:, cu[0] : cu[-1]] = x
    return placed


COUNT = 5
cuts = strategies.lists(strategies.integers(0, TOKENS), min_size=COUNT - 1, max_size=COUNT - 1)
right = cuts.map(lambda several: [0, *sorted(several), TOKENS])
anything = strategies.lists(
    strategies.integers(-5, TOKENS + 5) | strategies.sampled_from([-(2**31), 2**31 - 1]),
    min_size=COUNT + 1,
    max_size=COUNT + 1,
)


@each_fast
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
@hypothesis.given(several=right | anything)
def test_any_lengths(run: Run, several: list[int]) -> None:
    """Those that only the device knows, and that are wrong, are clamped."""
    inputs, cotangents = made(run.op, Case(1, TOKENS, 1, 16), COUNT)
    cu = np.maximum.accumulate(np.clip(np.array(several), 0, TOKENS))
    expected = alone(run.op, inputs, cu, run.operator.decays[-1], cotangents)
    expected = in_a_row(run, expected, cu, TOKENS)
    assert_right(found_by(run, inputs, cotangents, np.array(several, np.int32)), expected)


@pytest.mark.parametrize(
    "run", [FAST["wkv4"], pytest.param(FAST["wkv7"], marks=pytest.mark.slow)], ids=["wkv4", "wkv7"]
)
def test_vmap(run: Run) -> None:
    """With lengths that are mapped and that are not, and an operand that is not."""
    inputs, cotangents = made(run.op, CASE, len(CU) - 1)
    timed = [n for n in run.operator.inputs if n not in run.operator.shared]
    mapped = {n: np.stack([x, x[:, ::-1]]) if n in timed[1:] else x for n, x in inputs.items()}
    axes = {n: 0 if n in timed[1:] else None for n in inputs}
    several = np.stack([CU, np.array([0, 9, 9, 9, 50, 66, 70], np.int32)])
    call = functools.partial(found_by, run)
    for cu, axis in ((several, 0), (CU, None)):
        found = jax.vmap(call, in_axes=(axes, None, axis))(mapped, cotangents, cu)
        for i in range(2):
            one = {n: x[i] if n in timed[1:] else x for n, x in mapped.items()}
            own = cu[i] if axis == 0 else cu
            expected = alone(run.op, one, own, run.operator.decays[-1], cotangents)
            assert_right({n: x[i] for n, x in found.items()}, expected)


def test_remat_inside_a_scan() -> None:
    run = FAST["wkv7"]
    inputs, cotangents = made(run.op, CASE, len(CU) - 1)

    def loss(v: jax.Array, run: Run, remat: bool) -> jax.Array:
        def layer(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            return run.operator.function(**operands(run, {**inputs, "v": v}, CU))[0], None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, v, None, length=2)
        return jnp.vdot(y, cotangents["dy"])

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    found = gradient(inputs["v"], run, True)
    expected = gradient(inputs["v"], Run(run.op, "reference"), False)
    assert_right({"dv": found}, {"dv": np.asarray(expected)})


@pytest.mark.slow
@pytest.mark.parametrize("op", ["wkv4"])
def test_derivatives_of_the_reference(op: str) -> None:
    """Forward mode, and forward over reverse mode against a difference of gradients."""
    run, cu = Run(op, "reference"), np.array([0, 2, 2, 5], np.int32)
    inputs, cotangents = made(op, Case(1, 5, 1, 4), 3)
    tangents, _ = made(op, Case(1, 5, 1, 4, seed=1), 3)

    def loss(inputs: dict) -> jax.Array:
        results = run.operator.function(**operands(run, inputs, cu))
        parts = zip(results, run.operator.results, strict=True)
        return jnp.sum(jnp.stack([jnp.vdot(jnp.sin(x), cotangents[f"d{n}"]) for x, n in parts]))

    gradient = jax.jit(jax.grad(loss))
    _, slope = jax.jvp(loss, (inputs,), (tangents,))
    expected = sum(np.vdot(x, tangents[n]) for n, x in gradient(inputs).items())
    np.testing.assert_allclose(slope, expected, rtol=1e-4)
    _, curvature = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (tangents,)))(inputs)
    step = 1e-2
    ahead, behind = (
        gradient({n: x + s * tangents[n] for n, x in inputs.items()}) for s in (step, -step)
    )
    for name, x in curvature.items():
        difference = np.asarray((ahead[name] - behind[name]) / (2 * step))
        assert tolerance.rms_error(difference, np.asarray(x)) < 1e-2, name


@of_two
@pytest.mark.parametrize(("tokens", "cu"), [(0, [0]), (0, [0, 0, 0]), (3, [0, 3])], ids=str)
def test_few_tokens(run: Run, tokens: int, cu: list[int]) -> None:
    inputs, cotangents = made(run.op, Case(1, tokens, 2, 16), len(cu) - 1)
    found = found_by(run, inputs, cotangents, np.array(cu, np.int32))
    if len(cu) == 1:
        assert {n: x.shape for n, x in found.items() if n[1:] in inputs} == {
            f"d{n}": x.shape for n, x in inputs.items()
        }
        assert found["y"].shape == inputs["v"].shape
    else:
        expected = alone(run.op, inputs, np.array(cu), run.operator.decays[-1], cotangents)
        assert_right(found, expected)


def test_tokens_without_any_sequence() -> None:
    run = FAST["wkv7"]
    inputs, cotangents = made(run.op, CASE, 0)
    found = found_by(run, inputs, cotangents, np.zeros(1, np.int32))
    assert all(not np.asarray(x).any() for x in found.values())


PLACED = [
    ("wkv7", AxisType.Auto, False),
    *(pytest.param(x, AxisType.Explicit, True, marks=pytest.mark.slow) for x in ("wkv7", "wkv5")),
    *(pytest.param(x, AxisType.Auto, False, marks=pytest.mark.slow) for x in ("wkv6", "wkv4")),
]


@pytest.mark.parametrize(("op", "axis_type", "shard"), PLACED)
def test_heads_over_devices(op: str, axis_type: AxisType, shard: bool, cpus: list[Any]) -> None:
    """By a plain call, and by `sharding.shard`."""
    run, case = FAST[op], Case(1, TOKENS, 4, 16)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(axis_type,), devices=cpus[:2])
    inputs, cotangents = made(op, case, len(CU) - 1)
    axes = library(op).arguments_of_sequences
    places = {n: P(*("model" if x in "HC" else None for x in axes[n])) for n in inputs}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, places[name])) for name, x in inputs.items()
    }
    function = getattr(rwkv_jax, op)
    function = flat(op, sharding.shard(function, mesh, heads="model") if shard else function)

    def both(inputs: dict, cu: jax.Array) -> dict:
        def call(inputs: dict) -> tuple:
            return tuple(function(**operands(run, inputs, cu)))

        results, vjp = jax.vjp(call, inputs)
        given = [jnp.asarray(cotangents[f"d{n}"]) for n in run.operator.results]
        if axis_type == AxisType.Explicit:
            given = [
                jax.sharding.reshard(x, jax.typeof(y).sharding)
                for x, y in zip(given, results, strict=True)
            ]
        (gradients,) = vjp(tuple(given))
        found = dict(zip(run.operator.results, results, strict=True))
        return found | {f"d{n}": x for n, x in gradients.items()}

    compiled = jax.jit(both).lower(placed, jnp.asarray(CU)).compile()
    expected = alone(op, inputs, CU, run.operator.decays[-1], cotangents)
    assert_right(compiled(placed, jnp.asarray(CU)), expected)
    if run.implementation == "ffi":
        assert hlo.collectives(compiled.as_text()) == set()


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("op", SEQUENCES)
def test_refusals(op: str, cpus: list[Any]) -> None:
    inputs, _ = made(op, Case(1, 8, 2, 16), 2)

    def refuses(error: type[Exception], message: str, cu: Any, **more: Any) -> None:
        with pytest.raises(error, match=rf"^{op}: {message}"):
            SEQUENCES[op].function(**{**inputs, **more}, cu_seqlens=cu)

    def numbers(*several: int) -> np.ndarray:
        return np.array(several, np.int32)

    right, accepted = numbers(0, 3, 8), "accepted are numbers from 0 to T = 8"
    refuses(TypeError, "cu_seqlens is a list; accepted is a JAX or numpy array", [0, 3, 8])
    refuses(TypeError, "cu_seqlens is int64; accepted is int32", right.astype(np.int64))
    refuses(TypeError, "cu_seqlens is float32; accepted is int32", right.astype(np.float32))
    refuses(ValueError, r"cu_seqlens has shape \(1, 3\); accepted is \[S \+ 1\]", right[None])
    refuses(ValueError, r"cu_seqlens has shape \(0,\); accepted is \[S \+ 1\]", right[:0])
    refuses(ValueError, f"cu_seqlens starts with 1; {accepted}", numbers(1, 3, 8))
    refuses(ValueError, f"cu_seqlens has 5 behind 9; {accepted}", numbers(0, 9, 5))
    refuses(ValueError, f"cu_seqlens ends with 7; {accepted}", numbers(0, 3, 7))
    state = SEQUENCES[op].states[0]
    message = rf"{state} has shape \(2, .*\), so S = 2, where cu_seqlens has S \+ 1 = 4"
    refuses(ValueError, message, numbers(0, 3, 3, 8))
    rows, _ = SEQUENCES[op].make(SEQUENCES[op].suited(Case(2, 8, 2, 16)))
    refuses(ValueError, "cu_seqlens with B = 2; accepted is B = 1", right, **rows)
    ids = np.ones((1, 8), np.int32)
    refuses(ValueError, "segment_ids with cu_seqlens; accepted is None", right, segment_ids=ids)

    devices = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=cpus[:2])
    function = getattr(rwkv_jax, op)
    with pytest.raises(ValueError, match=f"{op}: cu_seqlens with sequence = 'x'; accepted with it"):
        flat(op, sharding.shard(function, devices, sequence="x"))(**inputs, cu_seqlens=right)
    with pytest.raises(ValueError, match=f"{op}: cu_seqlens along 'x'; accepted is None"):
        flat(op, sharding.sequence_parallel(function, "x"))(**inputs, cu_seqlens=right)


BF16, F32 = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("op", "dtype", "options", "targets"),
    [
        *((op, BF16, {}, f"rwkv_{op}_sequences_%s_v1") for op in ("wkv7", "wkv6", "wkv5")),
        *((op, F32, {}, f"rwkv_{op}_%s_v1") for op in SEQUENCES),
        ("wkv4", BF16, {}, "rwkv_wkv4_%s_v1"),
        ("wkv7", BF16, {"decay": "log"}, "rwkv_wkv7_%s_v1"),
        ("wkv6", BF16, {"precision": "highest"}, "rwkv_wkv6_%s_v1"),
        ("wkv7", BF16, {"fits": False}, "rwkv_wkv7_%s_v1"),
    ],
    ids=str,
)
def test_kernels_for_sequences(
    op: str, dtype: str, options: dict, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On matrix units, if they are for such a call and fit the GPU; else one token at a time."""
    options = {"decay": SEQUENCES[op].decays[-1], "precision": "default", **options}
    fits = options.pop("fits", True)
    monkeypatch.setitem(_ffi.MISSING, "cuda", None)
    monkeypatch.setattr(_ffi, "fits_matrix_units", lambda: fits)
    jax.clear_caches()
    inputs, cotangents = made(op, Case(1, TOKENS, 2, 64, dtype=dtype), len(CU) - 1)
    with hlo.device("cuda"):
        run = Run(op, "ffi")
        traced = found_by.trace(run, inputs, cotangents, CU, tuple(options.items()))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.targets(text) == {targets % "fwd", targets % "bwd"}
    ways = rwkv_jax.implementations(
        *(op, *inputs.values()), cu_seqlens=CU, platform="cuda", details=True, **options
    )
    assert ("matrix units" in str(ways["ffi"])) == ("sequences" in targets)
    monkeypatch.undo()
    jax.clear_caches()
