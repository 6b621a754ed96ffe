"""`rwkv_jax.layers` against formulas in numpy float64: values and gradients, transformations,
meshes and bad input. What kernels compute test_emulation.py shows and, of products on warpgroups,
test_gpu.py."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import layers
from support import hlo, internals, meshes, tolerance
from support.cases import DTYPES, Arrays
from support.layer_functions import (
    ELEMENTWISE,
    IN_TWO,
    LAYER_FUNCTIONS,
    PRODUCTS,
    Case,
    assert_right,
    check,
    expected,
    operands,
    value_and_gradients,
)

pytestmark = pytest.mark.quick("name")

ON_GPU = jax.default_backend() == "gpu"
NATIVE = ON_GPU and rwkv_jax.build_info()["missing"]["cuda"] is None
IMPLEMENTATIONS = [*(["ffi"] if NATIVE else []), "xla", "reference"]
FAST = IMPLEMENTATIONS[0]

each_function = pytest.mark.parametrize("name", LAYER_FUNCTIONS)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is one for all platforms and has the kernels for CUDA GPUs, however few tokens
    there are."""
    if ON_GPU:
        return
    internals.pretend(monkeypatch, "cuda", None)
    monkeypatch.setattr(internals.gpus, "why_not_hopper", lambda: None)
    for module in (internals.feed_forward, internals.low_rank, internals.low_rank_maps):
        monkeypatch.setattr(module, "MIN_TOKENS", 0)


def _small(name: str, **changes: Any) -> Case:
    """A call that the kernels take."""
    if name in ELEMENTWISE:
        return Case(**{"T": 17, "mixes": 1, **changes})
    sizes = {"T": 8, "H": 8} if name in PRODUCTS else {"T": 17, "H": 2}
    return Case(**{"K": 64, "dtype": "bfloat16", **sizes, **changes})


@each_function
def test_gradients_of_the_oracle(name: str) -> None:
    """Against finite differences of its own results."""
    own = LAYER_FUNCTIONS[name]
    inputs, cotangents = operands(name, Case(B=2, T=5, H=2, K=3, origin=True))
    inputs |= {n: np.float64(x) for n, x in inputs.items() if n not in own.integers}
    right = expected(name, inputs, cotangents)
    rng, step = np.random.default_rng(0), 1e-6
    for n in own.inputs:
        direction = rng.standard_normal(inputs[n].shape)
        moved = (inputs | {n: inputs[n] + s * direction} for s in (step, -step))
        ends = [expected(name, x, cotangents) for x in moved]
        slopes = {x: (ends[0][x] - ends[1][x]) / (2 * step) for x in own.results}
        numeric = sum(np.vdot(cotangents[f"d{x}"], slope) for x, slope in slopes.items())
        assert np.vdot(right[f"d{n}"], direction) == pytest.approx(numeric, rel=1e-6, abs=1e-7), n


@pytest.mark.quick("name", "implementation", "dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@each_function
def test_definition(name: str, implementation: str, dtype: str) -> None:
    """With matrices of float32."""
    if implementation == "ffi" and name in PRODUCTS:
        implementation = "xla"
    tokens = 17 if name == "keyed_wkv7" else 65
    check(name, implementation, Case(3, tokens, dtype=dtype, origin=True, matrices="float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_parameters_over_many_tokens(dtype: str) -> None:
    """Gradients of parameters are summed in float32 whatever the dtype."""
    for name in ELEMENTWISE:
        check(name, FAST, Case(B=2, T=1000, dtype=dtype, mixes=1))


SHAPES = [
    Case(B=1, T=0, mixes=1),
    Case(B=1, T=0, origin=True),
    Case(B=0, T=15),
    Case(B=3, T=1, origin=True),
    Case(B=1, T=64, mixes=1, without=("initial_state", "offset")),
    Case(B=1, T=16, H=3, K=64, mixes=1),
    Case(B=1, T=5, H=1, K=24, mixes=3),
]
"""The last one has sizes that kernels lack."""


@pytest.mark.parametrize("case", SHAPES, ids=str)
@each_function
def test_shapes(name: str, case: Case) -> None:
    check(name, None, case)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_head_of_zeros(name: str) -> None:
    """Variances and lengths of 0 make no NaN."""
    inputs, cotangents = operands(name, Case(B=1, T=3))
    for x in inputs.values():
        if x.ndim > 1:
            x[..., :1, :] = 0
    found = value_and_gradients(name, FAST, inputs, cotangents)
    for n, x in found.items():
        assert np.isfinite(x).all(), n
    if name != "wkv7_keys":  # whose slope at a length of 0 is 1e12
        assert_right(name, found, expected(name, inputs, cotangents), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_squared(dtype: str) -> None:
    x, dy = np.random.default_rng(0).standard_normal((2, 1000)).astype(DTYPES[dtype])
    y, vjp = jax.vjp(layers.relu_squared, jnp.asarray(x))
    found = {"y": np.asarray(y), "dx": np.asarray(vjp(jnp.asarray(dy))[0])}
    positive = np.maximum(np.float64(x), 0)
    right = {"y": positive**2, "dx": 2 * positive * np.float64(dy)}
    limit = tolerance.ceiling("", dtype, sequential=True, highest=True)
    tolerance.assert_close(found, right, limit)
    assert {str(z.dtype) for z in found.values()} == {dtype}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("activation", "rank", "offset"),
    [
        ("identity", 24, True),
        ("sigmoid", 24, False),
        ("tanh", 24, False),
        ("identity", 13, False),
        ("sigmoid", 1, True),
        ("tanh", 8, True),
    ],
)
def test_activations(activation: str, rank: int, offset: bool) -> None:
    """Of `low_rank`, by the formula that kernels have on other platforms and, for sizes that no
    kernel has, by the other one."""
    sizes = {"R": rank} if rank % 8 == 0 else {"R": rank, "D": 40}
    case = _small("low_rank", others=sizes, without=() if offset else ("offset",))
    inputs, cotangents = operands("low_rank", case)
    call = functools.partial(LAYER_FUNCTIONS["low_rank"].call, activation=activation)
    found = value_and_gradients("low_rank", None, inputs, cotangents, function=call)
    right = expected("low_rank", inputs, cotangents, activation=activation)
    assert_right("low_rank", found, right, case.dtype)


@pytest.mark.parametrize("name", IN_TWO)
def test_equals_the_two_functions(name: str) -> None:
    """Exactly, where it is a call of each."""
    arrays = operands(name, _small(name, dtype="float32" if name == "keyed_wkv7" else "bfloat16"))
    calls = (None, IN_TWO[name])
    found, right = (value_and_gradients(name, None, *arrays, function=call) for call in calls)
    for n, x in found.items():
        assert x.dtype == right[n].dtype, n
        assert np.array_equal(x, right[n]), n


# Transformations.


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, None) for name in LAYER_FUNCTIONS),
        # Of all references JAX makes the rule.
        *((name, "reference") for name in ("norm_shift_mix", "low_rank_maps", "keyed_wkv7")),
    ],
)
def test_vmap(name: str, implementation: str | None) -> None:
    """Of tensors, while every second parameter is shared."""
    own, dtype = LAYER_FUNCTIONS[name], _small(name).dtype
    several = [operands(name, _small(name, seed=seed)) for seed in range(2)]
    inputs, cotangents = jax.tree.map(lambda *xs: np.stack(xs), *several)
    shared = {n: several[0][0][n] for n in [*own.parameters, *own.matrices][::2]}
    axes = {n: None if n in shared else 0 for n in inputs}
    call = functools.partial(value_and_gradients, name, implementation)
    found = jax.jit(jax.vmap(call, in_axes=(axes, 0)))(inputs | shared, cotangents)
    for i, (one, d) in enumerate(several):
        right = expected(name, one | shared, d)
        assert_right(name, {n: x[i] for n, x in found.items()}, right, dtype)


def _sum(results: dict[str, jax.Array], cotangents: Arrays) -> jax.Array:
    """What has these cotangents as gradients."""
    wide = functools.partial(jnp.asarray, dtype=jnp.float32)
    return sum(
        (jnp.vdot(wide(x), wide(cotangents[f"d{n}"])) for n, x in results.items()), jnp.zeros(())
    )


@pytest.mark.parametrize("name", ["read_out", "projected_read_out"])
def test_reference_has_forward_mode(name: str) -> None:
    inputs, cotangents = operands(name, Case(2, 17))
    call = functools.partial(LAYER_FUNCTIONS[name].call, implementation="reference")
    _, tangents = jax.jvp(lambda x: call(**x), (inputs,), (inputs,))
    right = expected(name, inputs, cotangents)
    assert _sum(tangents, cotangents) == pytest.approx(
        sum(np.vdot(right[f"d{n}"], x) for n, x in inputs.items()), rel=1e-4
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", PRODUCTS)
def test_second_derivative(name: str) -> None:
    """Against differences of the first derivatives of the oracle."""
    case, tensors = _small(name, T=4), LAYER_FUNCTIONS[name].tensors
    inputs, cotangents = operands(name, case)

    def scaled(scale: Any) -> Arrays:
        # Half of the rows, so that the slopes of activations are not close to zero.
        return {n: x * (0.5 * scale) if n in tensors else x for n, x in inputs.items()}

    def gradients(scale: jax.Array) -> dict[str, jax.Array]:
        found = value_and_gradients(name, None, scaled(scale), cotangents)
        return {f"d{n}": found[f"d{n}"] for n in tensors}

    one, step = jnp.ones((), "bfloat16"), 1e-4
    _, found = jax.jvp(gradients, (one,), (one,))
    inputs = {n: np.float64(x) for n, x in inputs.items()}
    ends = [expected(name, scaled(1 + s), cotangents) for s in (step, -step)]
    right = {n: (ends[0][n] - ends[1][n]) / (2 * step) for n in found}
    assert_right(name, found, right, case.dtype)


# Meshes: forced CPU devices, with GPUs as well.

HEADS, ROWS, TOKENS, CHANNELS, HIDDEN, MATRICES = (
    {"B": "data", "H": "model", "C": "model"},
    {"B": "data"},
    {"B": "data", "T": "seq"},
    {"B": "data", "C": "model"},
    {"B": "data", **dict.fromkeys("FRQU", "model")},
    {"B": "data", "matrices": "data"},
)
"""The mesh axis of each axis, or, for "matrices", of the first axis of every matrix."""


def _specs(name: str, where: dict[str, str]) -> dict[str, P]:
    """The specs of all arrays by name."""
    own = LAYER_FUNCTIONS[name]
    specs = {n: P(*map(where.get, letters)) for n, letters in own.axes.items()}
    if "matrices" in where:
        specs |= {n: P(where["matrices"]) for n in own.matrices}
    return specs


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

ON_MESHES = [
    *((name, None, where, AUTO) for name in [*ELEMENTWISE, *IN_TWO] for where in (HEADS, ROWS)),
    *((name, None, HEADS, EXPLICIT) for name in [*ELEMENTWISE, "keyed_wkv7"]),
    *((name, None, ROWS, EXPLICIT) for name in [*ELEMENTWISE, *IN_TWO]),
    *((name, "reference", ROWS, EXPLICIT) for name in [*ELEMENTWISE, *IN_TWO]),
    *((name, None, where, AUTO) for name in PRODUCTS for where in (CHANNELS, HIDDEN, MATRICES)),
    *((name, None, ROWS, kind) for name in PRODUCTS for kind in (AUTO, EXPLICIT)),
]


@pytest.mark.quick("name", "axis_type")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "implementation", "where", "axis_type"), ON_MESHES)
def test_meshes(
    name: str,
    implementation: str | None,
    where: dict[str, str],
    axis_type: AxisType,
    cpus: list[Any],
) -> None:
    """Devices exchange nothing but the sums of gradients of parameters, and with a product no more
    than without it. That is over the heads of all devices, so that an Explicit mesh cannot
    distribute these."""
    own, case = LAYER_FUNCTIONS[name], _small(name)
    mesh, specs = meshes.mesh("data=2,model=2", axis_type, cpus), _specs(name, where)
    arrays = operands(name, case)
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled = value_and_gradients.lower(name, implementation, *placed).compile()
    assert_right(name, compiled(*placed), expected(name, *arrays), case.dtype)
    if name in PRODUCTS:
        return
    text = compiled.as_text()
    assert hlo.collectives(text) == {"all-reduce"}
    if name == "projected_read_out":
        in_two = value_and_gradients.lower(name, implementation, *placed, function=IN_TWO[name])
        assert hlo.exchanged(text) == hlo.exchanged(in_two.compile().as_text())
    else:
        # Sums may be exchanged in several parts, but each part once.
        sums = sum(math.prod(case.sizes[x] for x in axes) for axes in own.parameters.values())
        assert 0 < hlo.exchanged(text) <= 4 * sums


BY_TOKEN = [name for name in LAYER_FUNCTIONS if name != "keyed_wkv7"]
"""The functions that compute a token from no more than the one before it."""


@pytest.mark.quick("name", "axis_type")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "origin", "axis_type"),
    [
        *((name, False, AUTO) for name in BY_TOKEN),
        *((name, False, EXPLICIT) for name in ("norm_shift_mix", "read_out", "feed_forward")),
        *(("norm_shift_mix", True, kind) for kind in (AUTO, EXPLICIT)),
    ],
)
def test_tokens_over_devices(name: str, origin: bool, axis_type: AxisType, cpus: list[Any]) -> None:
    """A token shift exchanges one token of each row in the forward pass, and it and its cotangent
    in the backward pass. Everything else are sums of gradients."""
    case = _small(name, T=8, origin=origin)
    mesh, specs = meshes.mesh("data=2,seq=2", axis_type, cpus), _specs(name, TOKENS)
    arrays = operands(name, case)
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    compiled = value_and_gradients.lower(name, None, *placed).compile()
    assert_right(name, compiled(*placed), expected(name, *arrays), case.dtype)
    exchanged = hlo.exchanged_by(compiled.as_text())
    assert exchanged.keys() <= {"all-reduce", "collective-permute"}
    of_a_token = [4 * case.sizes["D"]] * 3 if name == "norm_shift_mix" else []
    assert exchanged["collective-permute"] == of_a_token


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("check_vma", [True, False])
@each_function
def test_gradients_through_shard_map(name: str, check_vma: bool, cpus: list[Any]) -> None:
    """Those of parameters are sums over devices."""
    case, specs = _small(name), _specs(name, ROWS)
    arrays = operands(name, case)

    def loss(inputs: Arrays, cotangents: Arrays) -> jax.Array:
        return jax.lax.psum(_sum(LAYER_FUNCTIONS[name].call(**inputs), cotangents), "data")

    mapped = jax.shard_map(
        loss,
        mesh=meshes.mesh("data=2", AUTO, cpus),
        in_specs=tuple({n: specs[n] for n in x} for x in arrays),
        out_specs=P(),
        check_vma=check_vma,
    )
    found = {f"d{n}": x for n, x in jax.jit(jax.grad(mapped))(*arrays).items()}
    right = expected(name, *arrays)
    assert_right(name, found, {n: right[n] for n in found}, case.dtype)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_gradients_inside_shard_map(name: str, cpus: list[Any]) -> None:
    """Over batch and heads, where there are heads."""
    arrays, specs = operands(name, _small(name)), _specs(name, HEADS)
    right = expected(name, *arrays)
    call = jax.shard_map(
        functools.partial(value_and_gradients, name, None),
        mesh=meshes.mesh("data=2,model=2", AUTO, cpus),
        in_specs=tuple({n: specs[n] for n in x} for x in arrays),
        out_specs={n: specs[n] for n in right},
    )
    assert_right(name, jax.jit(call)(*arrays), right, "float32")


# Bad input.


@pytest.mark.usefixtures("unchecked_types")
@each_function
def test_wrong_arguments(name: str) -> None:
    own = LAYER_FUNCTIONS[name]
    inputs, _ = operands(name, Case(B=2, T=17, mixes=1, origin=name == "keyed_wkv7"))

    def error(argument: str, change: Callable[[Any], Any], kind: type[Exception]) -> str:
        with pytest.raises(kind, match=rf"^{name}: ") as caught:
            own.call(**inputs | {argument: change(inputs[argument])})
        return str(caught.value)

    for argument in inputs:
        public = own.public(argument)
        axes = own.axes[argument].replace("O", "D")
        text = error(argument, lambda x: x[None], ValueError)
        assert f"{public} has shape (1, " in text
        assert f"[{', '.join(axes)}]" in text
        longer = error(argument, lambda x: np.concatenate([x, x], axis=-1), ValueError)
        assert public in longer
        assert "accepted is " in longer
        wrong = np.float32 if argument in own.integers else np.int32
        text = error(argument, lambda x, wrong=wrong: x.astype(wrong), TypeError)
        assert f"{public} is {np.dtype(wrong)}" in text
        assert "accepted" in text
        assert f"{public} is a list" in error(argument, lambda x: x.tolist(), TypeError)
        if argument in own.integers or argument in own.matrices or name in PRODUCTS[:2]:
            continue
        other = np.dtype(np.float16 if argument in own.tensors else DTYPES["bfloat16"])
        text = error(argument, lambda x, other=other: x.astype(other), TypeError)
        # Of two tensors either may be the odd one.
        assert f"is {other}" in text or f"others are {other}" in text
        assert public in text
    with pytest.raises(ValueError, match=rf"{name}: implementation is 'cuda'; accepted are 'ffi'"):
        own.call(**inputs, implementation="cuda")


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_origin() -> None:
    inputs, _ = operands("norm_shift_mix", Case(B=2, T=3, mixes=1, origin=True))
    origin = inputs.pop("origin")
    message = r"norm_shift_mix: origin is .*; accepted is int32 \[B, T\] = \[2, 3\]"
    for wrong in (origin[:, :2], origin[0], origin.astype(np.float32), origin[:1]):
        with pytest.raises((TypeError, ValueError), match=message):
            layers.norm_shift_mix(**inputs, origin=wrong)
    with pytest.raises(TypeError, match="origin is a list; accepted is a JAX or numpy array"):
        layers.norm_shift_mix(**inputs, origin=origin.tolist())


@pytest.mark.usefixtures("unchecked_types")
def test_wrong_maps() -> None:
    inputs, _ = operands("low_rank", Case(2, 3))
    with pytest.raises(ValueError, match="low_rank: activation is 'relu'; accepted are"):
        layers.low_rank(**inputs, activation="relu")
    one = layers.LowRankMap(**inputs)
    with pytest.raises(ValueError, match=r"maps\[1\].activation is 'relu'; accepted are"):
        layers.low_rank_maps([one, one._replace(activation="relu")])
    for maps in ([], [one] * 8):
        with pytest.raises(ValueError, match=f"{len(maps)} maps; accepted are 1 to 7"):
            layers.low_rank_maps(maps)
    with pytest.raises(TypeError, match="maps is a ndarray; accepted is a sequence with LowRankM"):
        layers.low_rank_maps(inputs["x"])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_implementations_that_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the reason of each platform."""
    internals.pretend(monkeypatch, "cuda", "on holiday")
    arrays = operands(name, Case(B=2, T=3, mixes=1))
    with pytest.raises(NotImplementedError) as error:
        value_and_gradients(name, "ffi", *arrays)
    assert str(error.value) == (
        f"{name}: implementation 'ffi' cannot run this call on cpu, tpu, others: "
        f"{name} has native kernels for CUDA GPUs; on cuda: on holiday"
    )


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_second_derivatives(name: str) -> None:
    """The reference has them, and others say so."""
    inputs, cotangents = operands(name, Case(B=2, T=3, mixes=1))
    first = next(iter(LAYER_FUNCTIONS[name].tensors))

    def curvature(implementation: str | None) -> Any:
        def slope(x: Any) -> jax.Array:
            found = value_and_gradients(name, implementation, inputs | {first: x}, cotangents)
            return jnp.sum(found[f"d{first}"])

        return jax.eval_shape(jax.grad(slope), inputs[first])

    assert curvature("reference").shape == inputs[first].shape
    message = f"{name}: a second derivative is asked for; .*; implementation='reference' has"
    with pytest.raises(NotImplementedError, match=message):
        curvature(None)
