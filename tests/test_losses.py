"""`rwkv_jax.losses` against the definition in numpy float64: values, gradients, transformations,
meshes, bad input, and what the compiled programs hold and exchange."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax.losses import cross_entropy
from support import hlo, internals, meshes
from support.cases import DTYPES
from support.tolerance import assert_close, assert_trees_close

VOCABULARY, CHANNELS = 37, 16

ALL_TERMS: dict[str, Any] = {"z_loss": 0.02, "l2_wrap": 0.03, "soft_cap": 3.0}
"""Each large enough to show."""


def arrays(
    *shape: int,
    vocabulary: int = VOCABULARY,
    channels: int = CHANNELS,
    dtype: str = "float32",
    weight: str = "float32",
) -> dict[str, Any]:
    """Features, weight, targets, and a mask that selects most tokens."""
    rng = np.random.default_rng([*shape, vocabulary, channels])
    hidden_states = rng.standard_normal((*shape, channels)).astype(DTYPES[dtype])
    matrix = (0.5 * rng.standard_normal((vocabulary, channels))).astype(DTYPES[dtype])
    return {
        "hidden_states": hidden_states,
        "weight": matrix.astype(DTYPES[weight]),
        "targets": np.asarray(rng.integers(0, vocabulary, shape), np.int32),
        "mask": np.asarray(rng.random(shape) < 0.8),
    }


def oracle(
    hidden_states: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    mask: np.ndarray | None = None,
    cotangents: np.ndarray | float = 1.0,
    *,
    reduction: str = "mean",
    z_loss: float = 0.0,
    l2_wrap: float = 0.0,
    soft_cap: float | None = None,
) -> dict[str, np.ndarray]:
    """The loss, and its gradients times `cotangents`, token by token in float64."""
    x, w = (np.asarray(array, np.float64) for array in (hidden_states, weight))
    scale = np.ones(targets.shape) if mask is None else np.asarray(mask, np.float64)
    losses, dx, dw = np.zeros(targets.shape), np.zeros_like(x), np.zeros_like(w)
    count = max(scale.sum(), 1) if reduction == "mean" else 1
    slopes = np.broadcast_to(cotangents, targets.shape) / count
    for i in np.ndindex(targets.shape):
        z = w @ x[i]
        slope = np.ones_like(z)
        if soft_cap is not None:
            z = soft_cap * np.tanh(z / soft_cap)
            slope = 1 - (z / soft_cap) ** 2
        log_sum = z.max() + np.log(np.exp(z - z.max()).sum())
        losses[i] = scale[i] * (log_sum - z[targets[i]] + z_loss * log_sum**2)
        dz = np.exp(z - log_sum) * (1 + 2 * z_loss * log_sum)
        dz[targets[i]] -= 1
        dz[z.argmax()] += l2_wrap * z.max()
        dz *= slope * scale[i] * slopes[i]
        dx[i], dw = w.T @ dz, dw + np.outer(dz, x[i])
    loss = losses if reduction == "none" else losses.sum() / count
    return {"loss": loss, "dhidden_states": dx, "dweight": dw}


def value_and_gradients(
    given: Mapping[str, Any],
    cotangents: Any = 1.0,
    function: Callable[..., jax.Array] = cross_entropy,
    **options: Any,
) -> dict[str, jax.Array]:
    rest = {name: x for name, x in given.items() if name not in ("hidden_states", "weight")}

    @jax.jit
    def both(hidden_states: jax.Array, weight: jax.Array, cotangents: jax.Array) -> dict:
        loss = functools.partial(function, **rest, **options)
        value, vjp = jax.vjp(loss, hidden_states, weight)
        dhidden_states, dweight = vjp(jnp.broadcast_to(cotangents, value.shape))
        return {"loss": value, "dhidden_states": dhidden_states, "dweight": dweight}

    return both(given["hidden_states"], given["weight"], jnp.asarray(cotangents, jnp.float32))


EXACT = {"loss": 1e-6, "dhidden_states": 1e-5, "dweight": 1e-5}
"""Ceilings in float32."""

OF_16_BITS = {"loss": 1e-5, "dhidden_states": 4e-3, "dweight": 4e-3}
"""Ceilings where gradients of logits are rounded to bfloat16 or float16."""


def assert_right(
    found: Mapping[str, jax.Array],
    expected: Mapping[str, np.ndarray],
    ceilings: Mapping[str, float] = EXACT,
) -> None:
    assert_close({name: np.asarray(x) for name, x in found.items()}, expected, ceilings)


def check(
    given: Mapping[str, Any], cotangents: Any = 1.0, *, mine: Mapping[str, Any] = {}, **options: Any
) -> dict[str, jax.Array]:
    """Values and gradients against the oracle; the options `mine` are not for the oracle."""
    found = value_and_gradients(given, cotangents, **options, **mine)
    expected = oracle(**given, cotangents=cotangents, **options)
    ceilings = EXACT if given["hidden_states"].dtype == np.float32 else OF_16_BITS
    assert_right(found, expected, ceilings)
    assert all(x.dtype == given[name[1:]].dtype for name, x in found.items() if name != "loss")
    return found


WEIGHTED = arrays(3, 7)
WEIGHTED["mask"] = WEIGHTED["mask"] * np.linspace(0.2, 3, 21, dtype=np.float32).reshape(3, 7)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (arrays(3, 7), {}),
    "z_loss": (arrays(3, 7), {"z_loss": 0.02}),
    "l2_wrap": (arrays(3, 7), {"l2_wrap": 0.03}),
    "soft_cap": (arrays(3, 7), {"soft_cap": 3.0}),
    "all terms": (arrays(3, 7), ALL_TERMS),
    "sum": (arrays(3, 7), {"reduction": "sum", **ALL_TERMS}),
    "none": (arrays(3, 7), {"reduction": "none", **ALL_TERMS}),
    "bfloat16": (arrays(4, 16, dtype="bfloat16"), ALL_TERMS),
    "float16": (arrays(4, 16, dtype="float16"), ALL_TERMS),
    "weight": (arrays(5, 3, dtype="bfloat16", weight="bfloat16"), {}),
    "weights of tokens": (WEIGHTED, ALL_TERMS),
    "weights of tokens, none": (WEIGHTED, {"reduction": "none", **ALL_TERMS}),
    "one token": (arrays(), {}),
    "a row": (arrays(5), {}),
    "three axes": (arrays(2, 3, 5), {}),
    "no tokens": (arrays(2, 0), {}),
    "no tokens, sum": (arrays(2, 0), {"reduction": "sum"}),
    "no tokens, none": (arrays(2, 0), {"reduction": "none"}),
    "no token counts": (arrays(2, 5) | {"mask": np.zeros((2, 5), bool)}, ALL_TERMS),
    **{f"vocabulary of {x}": (arrays(6, vocabulary=x), ALL_TERMS) for x in (1, 2, 64, 300)},
    **{
        f"targets in {x}": (arrays(9) | {"targets": arrays(9)["targets"].astype(x)}, {})
        for x in ("uint8", "int8", "uint32", "int16")
    },
    # Logits whose exponentials are out of range.
    "far apart": (arrays(8) | {"weight": 200 * arrays(8)["weight"]}, {"l2_wrap": 1e-4}),
}


@pytest.mark.parametrize("case", CASES)
def test_definition(case: str) -> None:
    given, options = CASES[case]
    shape = given["targets"].shape
    of_each = np.linspace(-1, 2, math.prod(shape)).reshape(shape)
    cotangents = of_each if options.get("reduction") == "none" else 0.7
    # Shapes and integers are the same to both.
    both = not case.startswith(("a row", "three", "vocabulary", "targets"))
    for recompute in (False, True)[: 1 + both]:
        check(given, cotangents, mine={"recompute": recompute, "chunk_size": 4}, **options)


@pytest.mark.parametrize("recompute", [False, True])
def test_small_cotangents_in_float16(recompute: bool) -> None:
    """The gradient of a float32 weight does not lose what float16 cannot hold."""
    given = arrays(64, dtype="float16")
    found = value_and_gradients(given, 1e-9, recompute=recompute)
    dweight = oracle(**given, cotangents=1e-9)["dweight"]
    assert_close({"dweight": np.asarray(found["dweight"])}, {"dweight": dweight}, 4e-3)


@pytest.mark.parametrize("chunk_size", [None, 1, 6, 7, 100])
def test_chunks(chunk_size: int | None) -> None:
    check(arrays(3, 7), mine={"chunk_size": chunk_size}, **ALL_TERMS)


def test_targets_outside_the_vocabulary() -> None:
    """An ignored one may be anything. One that counts has a loss that is not a number."""
    given = arrays(6)
    outside = np.array([-100, 0, VOCABULARY, 1, -1, 2], np.int32)
    mask = (outside >= 0) & (outside < VOCABULARY)
    inside = np.where(mask, outside, 0)
    found = value_and_gradients({**given, "targets": outside, "mask": mask})
    assert_right(found, oracle(given["hidden_states"], given["weight"], inside, mask))
    losses = cross_entropy(given["hidden_states"], given["weight"], outside, reduction="none")
    np.testing.assert_array_equal(np.isnan(losses), ~mask)


@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"soft_cap": 3.0}, {"reduction": "none"}], ids=str
)
def test_hidden_states_of_tokens_that_do_not_count(options: dict) -> None:
    """Nor do the cotangents of their losses: none of them is in any gradient."""
    given, cotangents = arrays(3, 7), np.float32(0.7)
    hidden_states = given["hidden_states"].copy()
    hidden_states[~given["mask"]] = np.resize([np.nan, np.inf, -np.inf], CHANNELS)
    if options.get("reduction") == "none":
        cotangents = np.where(given["mask"], cotangents, np.nan)
    found = value_and_gradients(given | {"hidden_states": hidden_states}, cotangents, **options)
    mine = {name: x for name, x in options.items() if name != "recompute"}
    assert_right(found, oracle(**given, cotangents=0.7, **mine))
    assert not np.asarray(found["dhidden_states"])[~given["mask"]].any()


@pytest.mark.slow
def test_vmap() -> None:
    """Over hidden states, over weights, and over both, inside and outside of a gradient."""
    x, w, t, _ = arrays(5).values()
    pairs = jnp.stack([x, 2 * x]), jnp.stack([w, w + 1]), jnp.stack([t, (t + 1) % 7])

    def loss(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return cross_entropy(x, w, t, chunk_size=2)

    for axes in [(0, None, None), (None, 0, None), (0, 0, 0)]:
        each = [
            [pair[0 if axis is None else i] for axis, pair in zip(axes, pairs, strict=True)]
            for i in range(2)
        ]
        operands = [
            pair[0] if axis is None else pair for axis, pair in zip(axes, pairs, strict=True)
        ]
        for function in (loss, jax.grad(loss, (0, 1))):
            found = jax.jit(jax.vmap(function, axes))(*operands)
            expected = [jax.jit(function)(*one) for one in each]
            assert_trees_close(found, jax.tree.map(lambda *ys: jnp.stack(ys), *expected))
    xs, ws, ts = pairs
    nested = jax.jit(jax.vmap(jax.vmap(loss, (0, None, None)), (None, 0, None)))(xs, ws, ts[0])
    assert nested.shape == (2, 2)
    summed = jax.jit(jax.grad(lambda w: jax.vmap(loss, (0, None, 0))(xs, w, ts).sum()))(ws[0])
    gradient = jax.jit(jax.grad(loss, 1))
    assert_trees_close(summed, sum(gradient(xs[i], ws[0], ts[i]) for i in range(2)))


@pytest.mark.parametrize("recompute", [False, True])
def test_remat_and_scan(recompute: bool) -> None:
    x, w, t, _ = arrays(4, 5).values()

    def loss(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return cross_entropy(x, w, t, recompute=recompute, l2_wrap=0.1)

    def in_rows(x: jax.Array, w: jax.Array) -> jax.Array:
        def row(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + jax.checkpoint(loss)(row[0], w, row[1]) / 4, None

        return jax.lax.scan(row, jnp.float32(0), (x, t))[0]

    found = jax.jit(jax.value_and_grad(in_rows, (0, 1)))(x, w)
    expected = jax.value_and_grad(lambda x, w: loss(x, w, t), (0, 1))(x, w)
    assert_trees_close(found, expected)


@pytest.mark.parametrize(
    ("options", "products"),
    [({}, 3), (ALL_TERMS, 3), ({"recompute": True}, 4), ({"reduction": "none"}, 4)],
    ids=str,
)
def test_products_and_memory(options: dict, products: int) -> None:
    """Of a loss of bfloat16 hidden states of 8 channels and a float32 weight: all products have
    operands of 16 bits, no product of the head is computed in vain, and no array has all logits."""
    tokens, vocabulary = (128, 1024), 65536
    shapes = (
        jax.ShapeDtypeStruct((*tokens, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((vocabulary, 8), jnp.float32),
        jax.ShapeDtypeStruct(tokens, jnp.int32),
    )

    def loss(*operands: jax.Array) -> jax.Array:
        return cross_entropy(*operands, **options).sum()

    program: Any = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes)
    text = program.as_text()
    found = re.findall(r"dot_general.*: \(tensor<(.*?)>, tensor<(.*?)>\) -> tensor<(.*?)>", text)
    assert len(found) == products
    for *operands, result in found:
        assert [x.split("x")[-1] for x in operands] == ["bf16", "bf16"]
        assert result.endswith("xf32")
    # Products of a GPU have 32 MB of workspace besides.
    all_logits = 4 * math.prod(tokens) * vocabulary
    assert program.compile().memory_analysis().temp_size_in_bytes < all_logits / 4


PLACES = [
    (P("data"), P("model")),
    (P(None, "data"), P("model")),
    (P("data"), P(("model", "data"))),
    (P("data", None, "model"), P(None, "model")),
    (P(), P(("data", "model"))),
    (P(("data", "model")), P()),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("of_hidden_states", "of_weight"), PLACES, ids=str)
def test_meshes(kind: AxisType, of_hidden_states: P, of_weight: P, cpus: list[Any]) -> None:
    """Values and gradients, where the gradients are, and that no device gathers logits."""
    every_other = PLACES.index((of_hidden_states, of_weight)) % 2 == 0
    recompute = every_other == (kind == AxisType.Auto)
    mesh = meshes.mesh("data=2,model=2", kind, cpus)
    given = arrays(4, 16, vocabulary=512, channels=8)
    specs = {"hidden_states": of_hidden_states, "weight": of_weight}
    specs |= {"targets": P("data"), "mask": P()}
    placed = meshes.put(mesh, specs, given)
    results = {"loss": NamedSharding(mesh, P())}
    results |= {f"d{name}": placed[name].sharding for name in ("hidden_states", "weight")}

    def gradients(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return value_and_gradients(given, recompute=recompute, chunk_size=5, **ALL_TERMS)

    with jax.set_mesh(mesh):
        program = jax.jit(gradients, out_shardings=results).lower(placed).compile()
        found = program(placed)
    assert_right(found, oracle(**given, **ALL_TERMS))
    logits_of_a_device = 4 * 64 * 512 // 4
    assert hlo.exchanged(program.as_text()) < logits_of_a_device / 2 + 2 * 4 * 512 * 8


@pytest.mark.parametrize(("recompute", "check_vma"), [(False, True), (True, False)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shard_map(check_vma: bool, reduction: Any, recompute: bool, cpus: list[Any]) -> None:
    """The vocabulary along one axis, the batch along another; differentiated from outside."""
    mesh = meshes.mesh("data=2,model=2", AxisType.Auto, cpus)
    given = arrays(4, 6, vocabulary=38) | {"mask": np.ones((4, 6), bool)}
    options = {"reduction": reduction, "recompute": recompute, "chunk_size": 5, **ALL_TERMS}

    def local(hidden_states: Any, weight: Any, targets: Any, mask: Any) -> jax.Array:
        loss = cross_entropy(
            hidden_states, weight, targets, mask=mask, axis_name="model", **options
        )
        if reduction == "none":
            return loss
        loss = jax.lax.psum(loss, "data")
        return loss / 2 if reduction == "mean" else loss

    tokens = P("data")
    spread = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, P("model"), tokens, tokens),
        out_specs=tokens if reduction == "none" else P(),
        check_vma=check_vma,
    )
    cotangents = np.linspace(-1, 2, 24).reshape(4, 6) if reduction == "none" else 0.7
    found = value_and_gradients(
        given, cotangents, lambda x, w, targets, mask: spread(x, w, targets, mask)
    )
    expected = oracle(**given, cotangents=cotangents, reduction=reduction, **ALL_TERMS)
    assert_right(found, expected)


def test_vocabulary_along_two_axes(cpus: list[Any]) -> None:
    """Differentiated inside the `shard_map`, where the gradient of the hidden states is whole."""
    mesh = meshes.mesh("outer=2,inner=2", AxisType.Auto, cpus)
    given, axes = arrays(7, vocabulary=40), ("outer", "inner")

    def local(given: dict[str, Any]) -> dict[str, Any]:
        return value_and_gradients(given, axis_name=axes, **ALL_TERMS)

    specs = dict.fromkeys(given, P()) | {"weight": P(axes)}
    outs = {"loss": P(), "dhidden_states": P(), "dweight": P(axes)}
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=outs))(given)
    assert_right(found, oracle(**given, **ALL_TERMS))


# Which kernels run.

LARGE: dict[str, Any] = {"vocabulary": 512, "channels": 64, "dtype": "bfloat16"}
"""What the kernel of hidden states takes, from 1024 tokens on."""


def test_programs_for_a_gpu(monkeypatch: pytest.MonkeyPatch, pretend: Any) -> None:
    pretend("cuda", None)

    def targets(tokens: int = 1024, change: Mapping[str, Any] = {}, **options: Any) -> set[str]:
        x, w, t, _ = arrays(tokens, **{**LARGE, **change}).values()
        loss = functools.partial(cross_entropy, l2_wrap=1e-4, **options)
        with hlo.device("cuda"):
            traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, w, t)
            return hlo.targets(traced.lower(lowering_platforms=("cuda",)).as_text())

    of_hidden_states = {internals.of_losses.OF_HIDDEN_STATES}
    of_logits = {internals.of_losses.OF_LOGITS}
    assert targets() == of_hidden_states
    assert targets(1023) == of_logits
    for change in ({"vocabulary": 520}, {"channels": 96}, {"dtype": "float32"}):
        assert targets(change=change) == of_logits, change
    assert targets(z_loss=0.01) == targets(precision="highest") == of_logits
    assert targets(soft_cap=3.0) == set()
    with monkeypatch.context() as few:
        few.setattr(internals.of_losses, "MAX_TOKENS", 1024)
        assert targets() == of_hidden_states
        assert targets(1025) == of_logits
    monkeypatch.setattr(internals.gpus, "HOPPER", ("B200",))
    jax.clear_caches()
    assert targets() == of_logits


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel may not run on this GPU")
def test_the_way_of_the_kernel_of_hidden_states_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, pretend: Any
) -> None:
    pretend("cuda", None)
    monkeypatch.setattr(internals.gpus, "why_not_hopper", lambda: None)
    monkeypatch.setattr(internals.of_losses, "MIN_TOKENS", 0)
    check(arrays(5, 8, **LARGE), 0.7, mine={"chunk_size": 16}, l2_wrap=0.03)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives_are_refused(reduction: Any, recompute: bool) -> None:
    x, weight, targets, _ = arrays(3).values()

    def total(x: jax.Array) -> jax.Array:
        loss = cross_entropy(x, weight, targets, reduction=reduction, recompute=recompute)
        return jnp.sum(loss)

    message = r"cross_entropy: a second derivative is asked for; .*jax\.nn\.log_softmax"
    with pytest.raises(NotImplementedError, match=message):
        jax.hessian(total)(jnp.asarray(x))


BAD_TYPES = [
    ("hidden_states", [1.0], "is a list; accepted is a JAX or numpy array"),
    ("targets", 1, "is a int; accepted is a JAX or numpy array"),
    ("hidden_states", np.zeros((3, 16)), "is float64; accepted are float32"),
    ("weight", np.zeros((37, 16), np.int32), "is int32; accepted are float32"),
    ("targets", np.zeros(3, np.float32), "is float32; accepted are integers"),
    ("mask", np.zeros(3, np.int32), "is int32; accepted are bool and float32"),
]
BAD_VALUES = [
    ("hidden_states", np.zeros((), np.float32), "has shape (); accepted is"),
    ("weight", np.zeros(16, np.float32), "has shape (16,); accepted is"),
    ("weight", np.zeros((0, 16), np.float32), "has shape (0, 16); accepted"),
    ("weight", np.zeros((37, 8), np.float32), "so C = 8, where hidden_states has C = 16"),
    ("targets", np.full(3, 2**32 + 1), "has 4294967297; accepted are integers from -2147483648"),
    ("targets", np.zeros(4, np.int32), "has shape (4,); accepted is that"),
    ("mask", np.zeros((3, 1), bool), "has shape (3, 1); accepted is that"),
    ("reduction", "average", "is 'average'; accepted are 'mean', 'sum'"),
    ("z_loss", -1.0, "is -1.0; accepted is a number of at least 0"),
    ("z_loss", "1", "is '1'; accepted is a number"),
    ("l2_wrap", math.nan, "is nan; accepted is a number"),
    ("l2_wrap", None, "is None; accepted is a number"),
    ("soft_cap", 0.0, "is 0.0; accepted are None and a number above 0"),
    ("soft_cap", math.inf, "is inf; accepted are None and a number"),
    ("chunk_size", 0, "is 0; accepted are None and an integer of at least 1"),
    ("chunk_size", 2.0, "is 2.0; accepted are None and an integer"),
    ("chunk_size", True, "is True; accepted are None and an integer"),
    ("precision", "best", "is 'best'; accepted are None"),
    ("axis_name", "model", "is 'model'; accepted are None and mesh axes"),
    ("axis_name", 0, "is 0; accepted are None and mesh axes"),
]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("error", "argument", "value", "message"),
    [*((TypeError, *bad) for bad in BAD_TYPES), *((ValueError, *bad) for bad in BAD_VALUES)],
)
def test_bad_input(error: type[Exception], argument: str, value: Any, message: str) -> None:
    given: dict[str, Any] = arrays(3) | {argument: value}
    with pytest.raises(error, match=rf"^cross_entropy: {argument} .*{re.escape(message)}"):
        jax.eval_shape(lambda: cross_entropy(**given))


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        cross_entropy(*arrays(3).values())  # pyright: ignore[reportCallIssue]
