"""`r` of WKV7 as a result, for its other use in the model: the backward pass of the operator adds
the cotangent from there."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax.models import rwkv7
from support import harness, hlo, internals, meshes, models
from support.cases import Case
from support.internals import wkv7_passed
from support.operators import Run, runs
from support.tolerance import assert_trees_close

IDS = np.repeat(np.array([[3, 0, 4, 5], [0, 2, 0, 0]]), [20, 9, 21, 20], axis=1)
CASE = Case(2, 70, 2, 32)
SMALL = Case(4, 16, 4, 16)

SEGMENTS = {"segment_ids": IDS}

RUNS = runs(CASE, others=0)
each_run = pytest.mark.parametrize("run", RUNS)
FAST = RUNS[0].values[0]


def _operands(case: Case, **packing: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs, cotangents = harness.operands("wkv7", case, **packing)
    return inputs, harness.with_passed(inputs, cotangents)


def _found(run: Run, *arrays: Any, **options: Any) -> dict[str, jax.Array]:
    return harness.value_and_gradients(run, *arrays, function=wkv7_passed, **options)


@pytest.mark.parametrize(
    ("run", "dtype", "packing"),
    [
        *(
            pytest.param(FAST, dtype, packing, id=f"{FAST}-{dtype}-{','.join(packing)}")
            for dtype in ("float32", "bfloat16", "float16")
            for packing in ({}, SEGMENTS)
        ),
        # The others share one addition.
        *(pytest.param(*x.values, "float32", SEGMENTS, id=x.id) for x in RUNS[1:]),
    ],
)
def test_definition(run: Run, dtype: str, packing: dict[str, Any]) -> None:
    """The gradient of padding is the cotangent from the other use alone."""
    arrays = _operands(Case(**{**vars(CASE), "dtype": dtype}), **packing)
    found, expected = _found(run, *arrays, **packing), harness.expected("wkv7", *arrays, **packing)
    assert np.asarray(found.pop("passed")).tobytes() == expected["passed"].tobytes()
    harness.assert_right(found, expected, harness.ceilings(run, arrays[0], **packing))
    assert found["dr"].dtype == dtype
    if packing:
        dr, dpassed = np.asarray(found["dr"]), arrays[1]["dpassed"]
        np.testing.assert_array_equal(dr[IDS == 0], dpassed[IDS == 0])


@pytest.mark.parametrize(
    ("case", "packed"),
    [
        *((Case(1, tokens, 1, 16), False) for tokens in (0, 1, 65)),
        (Case(2, 70, 2, 64, dtype="bfloat16"), False),
        (Case(2, 70, 2, 64, dtype="float16"), True),
        (Case(2, 70, 2, 128, dtype="bfloat16"), True),
        (Case(1, 1000, 1, 128, dtype="float16"), False),
        (Case(1, 1000, 3, 64, dtype="bfloat16", regime="mixed", decay="exp"), False),
    ],
    ids=str,
)
def test_lengths_and_head_sizes(case: Case, packed: bool) -> None:
    """Those of kernels on matrix units too, where a GPU is."""
    packing = {"segment_ids": IDS} if packed else {}
    options = {"decay": case.decay, "precision": None, **packing}
    arrays = _operands(case, **packing)
    found = _found(FAST, *arrays, **options)
    del found["passed"]
    expected = harness.expected("wkv7", *arrays, decay=case.decay, **packing)
    harness.assert_right(found, expected, harness.ceilings(FAST, arrays[0], **options))


@each_run
def test_vmap(run: Run) -> None:
    several = [_operands(Case(**{**vars(SMALL), "seed": seed})) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *several)
    mapped = jax.vmap(functools.partial(_found, run))(*stacked)
    for i, arrays in enumerate(several):
        found = {name: x[i] for name, x in mapped.items()}
        harness.assert_right(found, harness.expected("wkv7", *arrays))


def test_a_function_of_the_callers() -> None:
    """It gives its own results alone."""
    x = harness.operands("wkv7", SMALL)[0]
    call = functools.partial(rwkv_jax.wkv7, decay="sigmoid")
    found, passed = internals.passing(call, **x)
    assert not passed
    assert_trees_close(found, call(**x))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@each_run
def test_batch_and_heads_need_no_collective(run: Run, axis_type: Any, cpus: list[Any]) -> None:
    mesh = meshes.mesh("data=2,model=2", axis_type, cpus)
    arrays = _operands(SMALL)
    specs = {name: P("data", None, "model") for x in arrays for name in x}
    specs |= dict.fromkeys(("initial_state", "dfinal_state"), P("data", "model"))
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled = jax.jit(functools.partial(_found, run)).lower(*placed).compile()
    harness.assert_right(compiled(*placed), harness.expected("wkv7", *arrays))
    assert not hlo.collectives(compiled.as_text())


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_in_shard_map(check_vma: bool, cpus: list[Any]) -> None:
    """An `r` that all devices share, whose gradient is the sum over the devices."""
    inputs, cotangents = _operands(SMALL)
    whole = inputs | {"r": np.repeat(inputs["r"][:1], 4, axis=0)}
    right = harness.expected("wkv7", whole, cotangents)
    gradients = {name: right[f"d{name}"] for name in inputs}
    gradients["r"] = gradients["r"].sum(axis=0, keepdims=True)

    def loss(inputs: dict[str, jax.Array], cotangents: dict[str, jax.Array]) -> jax.Array:
        found = harness.results(FAST, wkv7_passed, **inputs)
        return jax.lax.psum(sum(jnp.vdot(x, cotangents[f"d{n}"]) for n, x in found.items()), "data")

    sharded = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=4", AxisType.Auto, cpus),
        in_specs=({n: P() if n == "r" else P("data") for n in inputs}, P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    shared = inputs | {"r": inputs["r"][:1]}
    harness.assert_right(jax.jit(jax.grad(sharded))(shared, cotangents), gradients)


def _own(*operands: Any, **options: Any) -> Any:
    """A function of a caller's, which the model calls as it is."""
    return rwkv_jax.wkv7(*operands, **options)


def _loss(params: rwkv7.Params, tokens: jax.Array, **options: Any) -> jax.Array:
    features, state = rwkv7.features(params, tokens, **options)
    return jnp.sum(jnp.sin(features)) + sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(state))


_gradients = jax.jit(jax.grad(_loss), static_argnames=("wkv", "recompute", "implementation"))


@pytest.mark.parametrize(
    ("packed", "recompute", "stacked"),
    [
        (False, None, False),
        pytest.param(True, "cheap", True, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_the_model(packed: bool, recompute: str | None, stacked: bool) -> None:
    params = models.parameters(rwkv7)
    params = rwkv7.stacked(params) if stacked else params
    tokens = jnp.arange(2 * 70).reshape(2, 70) % models.VOCABULARY
    options: dict[str, Any] = {"segment_ids": jnp.asarray(IDS)} if packed else {}
    options |= {"recompute": recompute, "implementation": FAST.implementation}
    found, expected = (_gradients(params, tokens, wkv=wkv, **options) for wkv in (None, _own))
    assert_trees_close(found, expected, 1e-6)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_model_has_no_sum_of_its_own(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two cotangents of `r` in a layer are added in the backward kernel."""
    internals.pretend(monkeypatch, platform, None)
    params = jax.eval_shape(functools.partial(models.parameters, rwkv7))
    tokens = jax.ShapeDtypeStruct((3, 17), jnp.int32)

    def lowered(wkv: Any) -> str:
        gradients = jax.jit(functools.partial(jax.grad(_loss), wkv=wkv))
        with hlo.device(platform):
            traced = gradients.trace(params, tokens)
            return traced.lower(lowering_platforms=(platform,)).as_text()

    def sums(text: str) -> int:
        adds = [x for x in text.splitlines() if "stablehlo.add " in x]
        return sum(f"tensor<3x17x{heads}x{size}xf32>" in x for x in adds)

    heads, size = params.blocks[0].att.r_k.shape
    passed, alone = lowered(None), lowered(_own)
    monkeypatch.undo()
    jax.clear_caches()
    assert sums(alone) - sums(passed) == len(params.blocks)
    own = {target for target in hlo.targets(passed) if "wkv7_bwd" in target}
    assert own == internals.targets("wkv7", "bwd_passed")
    own = {target for target in hlo.targets(alone) if "wkv7_bwd" in target}
    assert own == internals.targets("wkv7", "bwd")
