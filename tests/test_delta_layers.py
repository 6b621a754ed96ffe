"""The layers of the delta rule and their parts, without `transformers`."""

import dataclasses
import math
import re
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rwkv_jax.layers import (
    DeltaNetState,
    gated_delta_net,
    gated_rms_norm,
    kimi_delta_net,
    l2_norm,
    log_decay,
    short_convolution,
)
from rwkv_jax.nn import equinox, flax
from support.tolerance import assert_close, assert_trees_close

GATED = gated_delta_net.Config(24, 2, 4, 16, 16)
KIMI = kimi_delta_net.Config(24, 3, 16, conv_size=3, lower_bound=-5.0)
LAYERS: Any = (
    (gated_delta_net, GATED, flax.GatedDeltaNet, equinox.GatedDeltaNet),
    (kimi_delta_net, KIMI, flax.KimiDeltaAttention, equinox.KimiDeltaAttention),
)
IDS = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 2, 3, 3, 0], [5, 6, 6, 6, 5, 5, 5, 5, 5, 5, 5, 5]])
"""Segments with padding around them and without, and some that are shorter than a convolution."""

each_layer = pytest.mark.parametrize(
    ("module", "config"),
    [row[:2] for row in LAYERS],
    ids=[row[0].__name__.rpartition(".")[2] for row in LAYERS],
)
pytestmark = pytest.mark.quick("module")


def random_params(module: ModuleType, config: Any, seed: int = 0) -> Any:
    """Of a size with which all parameters matter."""
    rng = np.random.default_rng(seed)
    return module.from_tensors(
        {
            name: (0.5 * rng.standard_normal(shape)).astype(np.float32)
            for name, shape in config.shapes.items()
        },
        config=config,
    )


def random_state(module: ModuleType, config: Any, rows: int) -> DeltaNetState:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        module.initial_state(config, rows),
    )


def random_tokens(config: Any, *shape: int) -> jax.Array:
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((*shape, config.hidden_size)), jnp.float32)


def run(module: ModuleType, config: Any, implementation: str | None = "reference") -> Any:
    """The layer as a program. The reference is what compiles soonest."""
    return jax.jit(
        lambda params, x, state=None, segment_ids=None: module.apply(
            params,
            x,
            state,
            config=config,
            segment_ids=segment_ids,
            implementation=implementation,
        )
    )


def segments_of(row: np.ndarray) -> list[np.ndarray]:
    """The indices of the tokens of each segment."""
    ends = np.flatnonzero(np.diff(row)) + 1
    return [part for part in np.split(np.arange(len(row)), ends) if row[part[0]]]


@each_layer
def test_packed_documents_are_their_tokens_one_by_one(module: ModuleType, config: Any) -> None:
    """Each alone, the first one of a row from the state. Padding, which is NaN, gives zeros."""
    params, state = random_params(module, config), random_state(module, config, len(IDS))
    x = random_tokens(config, *IDS.shape)
    x = jnp.where((IDS != 0)[..., None], x, jnp.nan)
    step = run(module, config)
    y, after = run(module, config, None)(params, x, state, IDS)
    for i, row in enumerate(IDS):
        expected = np.zeros(y.shape[1:], np.float32)
        s = jax.tree.map(lambda z, i=i: z[i : i + 1], state)
        for number, document in enumerate(segments_of(row)):
            s = s if number == 0 else module.initial_state(config, 1)
            for t in document:
                out, s = step(params, x[i : i + 1, t], s)
                expected[t] = out[0]
        assert_close({"y": np.asarray(y[i])}, {"y": expected}, 1e-5)
        assert not np.any(y[i][row == 0])
        assert_trees_close(jax.tree.map(lambda z, i=i: z[i : i + 1], after), s)


@each_layer
def test_nothing_leaks(module: ModuleType, config: Any) -> None:
    """By gradients: an output depends on all earlier tokens of its segment and on no others, and
    only the first segment depends on the state."""
    params, state = random_params(module, config), random_state(module, config, len(IDS))
    x = random_tokens(config, *IDS.shape)
    # Decays that leave a gradient of distant tokens.
    params["A_log"] = params["A_log"] - 2

    def of_token(x: jax.Array, state: DeltaNetState) -> Any:
        y, after = run(module, config)(params, x, state, IDS)
        last = after.conv.sum((1, 2)) + after.recurrent.sum((1, 2, 3))
        return jnp.concatenate([y.sum(-1), last[:, None]], axis=1)

    of_x, of_state = jax.jit(jax.jacrev(of_token, (0, 1)))(x, state)
    rows, tokens = IDS.shape
    expected = np.zeros((rows, tokens + 1, rows, tokens), bool)
    of_first = np.zeros((rows, tokens + 1, rows), bool)
    for i, row in enumerate(IDS):
        documents = segments_of(row)
        for document in documents:
            for t in document:
                expected[i, t, i, document[0] : t + 1] = True
        expected[i, tokens, i, documents[-1]] = True
        of_first[i, documents[0], i] = True
    np.testing.assert_array_equal(np.any(of_x != 0, axis=-1), expected)
    recurrent = np.any(of_state.recurrent != 0, axis=(-3, -2, -1))
    np.testing.assert_array_equal(recurrent, of_first)
    np.testing.assert_array_equal(np.any(of_state.conv != 0, axis=(-2, -1)), of_first)


@each_layer
def test_tokens_without_a_state_and_with_padding(module: ModuleType, config: Any) -> None:
    """A row without a token keeps its state, and a token without a state is a sequence of one."""
    params, state = random_params(module, config), random_state(module, config, 2)
    x = random_tokens(config, 2)
    call = run(module, config)
    y, after = call(params, x, state, jnp.array([3, 0]))
    alone, expected = call(params, x, state)
    assert_trees_close(y[0], alone[0])
    assert not np.any(y[1])
    for found, right, kept in zip(after, expected, state, strict=True):
        np.testing.assert_array_equal(found[1], kept[1])
        assert_trees_close(found[0], right[0])
    y, after = call(params, x)
    zs, expected = call(params, x[:, None])
    assert_trees_close((y, after), (zs[:, 0], expected))
    _, after = call(params, x[:, None][:, :0], state)
    jax.tree.map(np.testing.assert_array_equal, after, state)


each_class = pytest.mark.parametrize("row", LAYERS, ids=lambda row: row[2].__name__)


@each_class
def test_flax_and_equinox(row: Any) -> None:
    """Both have the program of the function, of sequences and of tokens."""
    module, config, of_flax, of_equinox = row
    params, state = random_params(module, config), random_state(module, config, len(IDS))
    x = random_tokens(config, *IDS.shape)

    def program(call: Any, *operands: Any) -> str:
        lowered = jax.jit(lambda x, s, ids: call(x, s, segment_ids=ids)).lower(*operands)
        return lowered.as_text()

    def of_rows(x: Any, state: Any, segment_ids: Any) -> Any:
        return module.apply(params, x, state, config=config, segment_ids=segment_ids)

    def of_row(*row: Any, segment_ids: Any) -> Any:
        x, state, ids = jax.tree.map(lambda z: z[None], (*row, segment_ids))
        return jax.tree.map(lambda z: z[0], of_rows(x, state, ids))

    module_, layer = of_flax(config, params=params), of_equinox(config, params=params)
    for operands in ((x, state, IDS), (x, None, None), (x[:, 0], state, IDS[:, 0])):
        assert program(module_, *operands) == program(of_rows, *operands)
        row = jax.tree.map(lambda z: z[0], operands)
        assert program(layer, *row) == program(of_row, *row)
    given = of_flax(config, params=params, implementation="reference")
    assert program(given, x, state, IDS) != program(module_, x, state, IDS)


def test_gradients_of_flax_and_equinox() -> None:
    """By the names of checkpoints, of all parameters, and equal."""
    params = random_params(kimi_delta_net, KIMI)
    x = random_tokens(KIMI, 1, 5)
    module: Any = flax.KimiDeltaAttention(KIMI, params=params, implementation="reference")
    layer = equinox.KimiDeltaAttention(KIMI, params=params, implementation="reference")
    gradient: Any = nnx.grad(lambda m: jnp.square(m(x)[0]).sum())
    found = nnx.jit(gradient)(module)
    names = {".".join(map(str, path)): z.get_value() for path, z in nnx.to_flat_state(found)}
    assert names.keys() == {f"params.{name}" for name in KIMI.shapes}
    assert all(map(np.any, names.values()))
    of_equinox = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.square(m(x[0])[0]).sum()))(layer)
    assert_trees_close(flax.arrays(found.params), of_equinox.params)


@each_class
@pytest.mark.usefixtures("unchecked_types")
def test_new_layers(row: Any) -> None:
    """Both frameworks start with the parameters of `init`, which are those of a new model."""
    module, config, of_flax, of_equinox = row
    key = nnx.Rngs(0).params()
    params = module.init(key, config)
    assert_trees_close(flax.arrays(of_flax(config, rngs=nnx.Rngs(0)).params), params, 0)
    assert_trees_close(of_equinox(config, key=key).params, params, 0)
    names = {".".join(map(str, path)): x.shape for path, x in nnx.to_flat_state(nnx.state(params))}
    assert names == config.shapes
    with pytest.raises(TypeError, match=f"{of_flax.__name__}: params and rngs are None"):
        of_flax(config)
    with pytest.raises(TypeError, match=f"{of_flax.__name__}: params and key are given"):
        of_equinox(config, params=params, key=key)
    with pytest.raises(TypeError, match=r"config is a dict; accepted is a \w+_delta_net.Config"):
        of_flax({}, rngs=nnx.Rngs(0))
    del params["A_log"]
    with pytest.raises(ValueError, match=r"params are .*; accepted are "):
        of_equinox(config, params=params)


def test_initialisation() -> None:
    def init(module: ModuleType, config: Any) -> Any:
        return jax.jit(lambda key: module.init(key, config))(jax.random.key(0))

    many = dataclasses.replace(GATED, num_key_heads=64, num_value_heads=64)
    params = init(gated_delta_net, many)
    rate = np.exp(params["A_log"])
    assert 0.01 <= rate.min() < 2 < 14 < rate.max() <= 16
    assert np.all(params["dt_bias"] == 1)
    assert np.all(params["norm"]["weight"] == 1)
    assert abs(np.std(params["out_proj"]["weight"]) - 0.02) < 1e-3
    many = dataclasses.replace(KIMI, num_heads=64, lower_bound=None)
    params = init(kimi_delta_net, many)
    rate, step = np.exp(params["A_log"]), np.logaddexp(params["dt_bias"], 0)
    assert 1 <= rate.min() < 3 < 14 < rate.max() <= 16.001
    assert 0.0009 < step.min() < 0.002 < 0.05 < step.max() < 0.101
    assert not np.any(init(kimi_delta_net, KIMI)["A_log"])


@each_layer
def test_bfloat16(module: ModuleType, config: Any) -> None:
    """The parameters may stay float32. The state of the operator is float32."""
    params, x = random_params(module, config), random_tokens(config, *IDS.shape)
    call = run(module, config, None)
    right, _ = call(params, x)
    y, state = call(params, x.astype(jnp.bfloat16))
    assert y.dtype == state.conv.dtype == jnp.bfloat16
    assert state.recurrent.dtype == jnp.float32
    assert_close({"y": np.asarray(y, np.float32)}, {"y": np.asarray(right)}, 5e-2)
    # A state of another dtype goes on in that of the tokens.
    state = module.initial_state(config, 2)
    y, state = call(params, x[:, 0].astype(jnp.bfloat16), state)
    assert y.dtype == state.conv.dtype == jnp.bfloat16


def test_separate_projections() -> None:
    """Those of Qwen3.5 are the rows of those of Qwen3-Next in another order."""
    params = random_params(gated_delta_net, GATED)
    separate = dataclasses.replace(GATED, projections="separate")
    qkvz = params["in_proj_qkvz"]["weight"].reshape(GATED.num_key_heads, -1, GATED.hidden_size)
    ba = params["in_proj_ba"]["weight"].reshape(GATED.num_key_heads, 2, -1, GATED.hidden_size)
    q, k, v, z = np.split(np.asarray(qkvz), (16, 32, 64), axis=1)
    rows = {"qkv": np.concatenate([part.reshape(-1, 24) for part in (q, k, v)])}
    rows |= {"z": z.reshape(-1, 24), "b": ba[:, 0].reshape(-1, 24), "a": ba[:, 1].reshape(-1, 24)}
    others = {name: x for name, x in params.items() if not name.startswith("in_proj")}
    others |= {f"in_proj_{name}": {"weight": jnp.asarray(x)} for name, x in rows.items()}
    x = random_tokens(GATED, 2, 9)
    found = run(gated_delta_net, separate)(others, x)
    assert_trees_close(found, run(gated_delta_net, GATED)(params, x))


def test_from_tensors() -> None:
    """A layer of a whole checkpoint, and what is refused."""
    prefix = "model.layers.0.self_attn."
    tensors = {
        f"{prefix}{name}": np.full(shape, i, np.float32)
        for i, (name, shape) in enumerate(KIMI.shapes.items())
    }
    other = {"model.norm.weight": np.zeros(3), "model.layers.1.self_attn.A_log": np.zeros(9)}
    params = kimi_delta_net.from_tensors(tensors | other, prefix, config=KIMI)
    assert np.all(params["q_proj"]["weight"] == 0)
    assert params["A_log"].shape == (1, 1, 3, 1)
    flat = {f"{prefix}A_log": np.zeros(3, np.float32)}
    assert kimi_delta_net.from_tensors(tensors | flat, prefix, config=KIMI)["A_log"].shape == (3,)

    def refused(changes: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=re.escape(f"kimi_delta_net.from_tensors: {message}")):
            kimi_delta_net.from_tensors(tensors | changes, prefix, config=KIMI)

    name = f"{prefix}o_proj.weight"
    wrong = np.zeros((24, 47), np.float32)
    refused({name: wrong}, ValueError, f"{name} has shape (24, 47); accepted is (24, 48)")
    refused({name: np.zeros((24, 48), int)}, TypeError, f"{name} is int64; accepted are float32")
    refused({name: [1.0]}, TypeError, f"{name} is a list; accepted is a JAX or numpy array")
    both = f"{prefix}A_log has shape (4,); accepted is (1, 1, 3, 1) or (3,)"
    refused({f"{prefix}A_log": np.zeros(4, np.float32)}, ValueError, both)
    more = f"{prefix}o_proj.bias"
    refused({more: np.zeros(24)}, ValueError, f"{more} is given; accepted are q_proj.weight, ")
    del tensors[name]
    refused({}, ValueError, f"{name} is missing; accepted is a tensor of shape (24, 48)")


@pytest.mark.usefixtures("unchecked_types")
def test_configurations() -> None:
    """Those of Qwen3-Next-80B-A3B, Qwen3.5, Kimi-Linear-48B-A3B and GLM-5.3."""
    qwen = {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "hidden_act": "silu",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
    }
    config = gated_delta_net.Config.from_hugging_face(qwen)
    assert config == gated_delta_net.Config(2048, 16, 32, 128, 128)
    assert config.shapes["in_proj_qkvz.weight"] == (12288, 2048)
    text = {"model_type": "qwen3_5", "text_config": qwen | {"model_type": "qwen3_5_text"}}
    found = gated_delta_net.Config.from_hugging_face(text)
    assert found == dataclasses.replace(config, projections="separate")
    attention = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "kda_layers": [1]}
    kimi: Any = {"model_type": "kimi_linear", "hidden_size": 2304, "rms_norm_eps": 1e-5}
    kimi["linear_attn_config"] = attention
    of_kimi = kimi_delta_net.Config.from_hugging_face
    config = kimi_delta_net.Config(2304, 32, 128)
    bounded = dataclasses.replace(config, lower_bound=-5.0)
    assert of_kimi(kimi) == config
    assert of_kimi(kimi | {"model_type": "glm5_next"}) == bounded
    assert of_kimi(kimi | {"linear_attn_config": attention | {"safe_gate": True}}) == bounded
    found = of_kimi(kimi | {"linear_attn_config": attention | {"gate_lower_bound": -3}})
    assert found.lower_bound == -3
    with pytest.raises(ValueError, match="Config: config has no hidden_size; accepted is one with"):
        of_kimi({})
    with pytest.raises(ValueError, match=r"config\.linear_attn_config has no num_heads"):
        of_kimi(kimi | {"linear_attn_config": {}})
    with pytest.raises(ValueError, match="hidden_act is 'gelu'; accepted is 'silu'"):
        of_kimi(kimi | {"hidden_act": "gelu"})
    with pytest.raises(ValueError, match="num_value_heads is 4; accepted is a multiple of num_key"):
        dataclasses.replace(GATED, num_key_heads=3)
    with pytest.raises(ValueError, match="lower_bound is 5; accepted is a number below 0"):
        dataclasses.replace(KIMI, lower_bound=5)
    with pytest.raises(
        TypeError, match="gated_delta_net: conv_size is None; accepted is an integer"
    ):
        dataclasses.replace(GATED, conv_size=None)
    with pytest.raises(ValueError, match="projections is 'one'; accepted are 'by key head'"):
        dataclasses.replace(GATED, projections="one")


STATE = gated_delta_net.initial_state(GATED, 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": np.zeros((2, 3, 23), np.float32)}, ValueError, r"\(2, 3, 23\); accepted is \[B, T"),
        ({"x": np.zeros((2, 3, 24), int)}, TypeError, "x is int64; accepted are float32, bfloat16"),
        ({"x": [1.0]}, TypeError, "x is a list; accepted is a JAX or numpy array"),
        ({"state": STATE.conv}, TypeError, r"state is a \w+; accepted is a DeltaNetState"),
        (
            {"state": STATE._replace(conv=STATE.conv[:, 1:])},
            ValueError,
            r"state.conv has shape \(2, 2, 128\); accepted is \[B, W - 1, D\] = \(2, 3, 128\)",
        ),
        (
            {"state": STATE._replace(recurrent=STATE.recurrent.astype(jnp.bfloat16))},
            TypeError,
            "state.recurrent is bfloat16; accepted is float32",
        ),
        (
            {"segment_ids": np.zeros((2, 4), int)},
            ValueError,
            r"segment_ids has shape \(2, 4\); accepted is \[B, T\] = \(2, 3\)",
        ),
        ({"params": {}}, ValueError, "params are ; accepted are in_proj_qkvz.weight, "),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_input(changes: Any, error: type[Exception], message: str) -> None:
    given = {"params": random_params(gated_delta_net, GATED)}
    given |= {"x": np.zeros((2, 3, 24), np.float32)}
    with pytest.raises(error, match=f"gated_delta_net: .*{message}"):
        gated_delta_net.apply(**given | changes, config=GATED)


# The parts.


@pytest.mark.parametrize("taps", [1, 4])
def test_short_convolution(taps: int) -> None:
    """Against the sum of its definition, with NaN as padding."""
    rng = np.random.default_rng(0)
    rows, tokens, channels = *IDS.shape, 3
    x = rng.standard_normal((rows, tokens, channels))
    weight = rng.standard_normal((channels, 1, taps))
    state = rng.standard_normal((rows, taps - 1, channels))
    expected, after = np.zeros_like(x), state.copy()
    for i, row in enumerate(IDS):
        for number, document in enumerate(segments_of(row)):
            before = state[i] if number == 0 else np.zeros_like(state[i])
            seen = np.concatenate([before, x[i, document]])
            for n, t in enumerate(document):
                total = (seen[n : n + taps] * weight[:, 0].T).sum(0)
                expected[i, t] = total / (1 + np.exp(-total))
            after[i] = seen[len(seen) - taps + 1 :]
    given = np.where((IDS != 0)[..., None], x, np.nan)
    given, weight, state = (z.astype(np.float32) for z in (given, weight, state))

    def run(weight: jax.Array) -> Any:
        y, after = short_convolution(given, weight, state, segment_ids=IDS)
        return jnp.where((IDS != 0)[..., None], y, 0), after

    (found, found_after), pullback = jax.vjp(run, jnp.asarray(weight))
    right = {"y": expected, "after": after}
    assert_close({"y": np.asarray(found), "after": np.asarray(found_after)}, right, 1e-6)
    assert np.isfinite(pullback((found, found_after))[0]).all()
    ids = np.zeros_like(IDS)
    np.testing.assert_array_equal(
        short_convolution(given, weight, state, segment_ids=ids)[1], state
    )


@pytest.mark.parametrize("channels", [(), (5,)])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_log_decay(channels: tuple[int, ...], lower_bound: float | None) -> None:
    rng = np.random.default_rng(0)
    x = 3 * rng.standard_normal((2, 7, 4, *channels))
    x.flat[:4] = -200, -30, 30, 200
    A_log, dt_bias = rng.standard_normal(4), rng.standard_normal((4, *channels))
    rate = np.exp(A_log).reshape(4, *[1] * len(channels))
    shifted = x + dt_bias
    right = -rate * np.logaddexp(shifted, 0)
    if lower_bound is not None:
        right = lower_bound / (1 + np.exp(-rate * shifted))
    given = (z.astype(np.float32) for z in (x, A_log, dt_bias))
    found = log_decay(*given, lower_bound=lower_bound)
    np.testing.assert_allclose(found, right, rtol=2e-5, atol=1e-30)
    assert found.dtype == jnp.float32


def test_norms() -> None:
    """Of zeros too, with finite gradients."""
    rng = np.random.default_rng(0)
    x, gate = rng.standard_normal((2, 2, 3, 4, 8))
    x[0, 0] = 0
    weight = rng.standard_normal(8)
    of_float32 = [z.astype(np.float32) for z in (x, gate, weight)]
    right = x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(l2_norm(of_float32[0]), right, rtol=1e-5)
    assert np.isfinite(jax.grad(lambda x: l2_norm(x).sum())(of_float32[0])).all()
    right = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight / (1 + np.exp(-gate))
    for activation, expected in {"sigmoid": right, "silu": right * gate}.items():
        found = gated_rms_norm(*of_float32, eps=1e-5, activation=activation)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


X = np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: log_decay(X, X[0, 0], X[0, 0, :3]),
            r"dt_bias has shape \(3,\); accepted is \[H\]",
        ),
        (
            lambda: log_decay(X, X[0, 0, :3], X[0, 0]),
            r"A_log has shape \(3,\); accepted is \[H\] =",
        ),
        (lambda: log_decay(X, X[0, 0], X[0, 0], lower_bound=0), "lower_bound is 0; accepted is a"),
        (
            lambda: gated_rms_norm(X, X, X[0, 0], eps=0, activation="tanh"),
            "activation is 'tanh'; accepted are 'silu', 'sigmoid'",
        ),
        (
            lambda: gated_rms_norm(X, X[:1], X[0, 0], eps=0, activation="silu"),
            r"gate has shape \(1, 3, 4\); accepted is that of x = \(2, 3, 4\)",
        ),
        (
            lambda: short_convolution(X, X[:, :1]),
            r"weight has shape \(2, 1, 4\); accepted is \[D, 1, W\] with D = 4",
        ),
        (
            lambda: short_convolution(X, np.zeros((4, 1, 3), np.float32), X),
            r"state has shape \(2, 3, 4\); accepted is \[B, W - 1, D\] = \(2, 2, 4\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_bad_input_of_parts(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_are_as_many_as_the_models_have() -> None:
    """Of one layer: Qwen3-Next-80B-A3B and Kimi-Linear-48B-A3B."""
    qwen = gated_delta_net.Config(2048, 16, 32, 128, 128)
    kimi = kimi_delta_net.Config(2304, 32, 128)
    for config, count in ((qwen, 33_718_464), (kimi, 39_514_272)):
        assert sum(math.prod(shape) for shape in config.shapes.values()) == count
