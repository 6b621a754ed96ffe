"""Which calls of layer functions have kernels, how often a program calls them, what their backward
pass keeps, and which calls models make."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from rwkv_jax import finetuning, layers, models
from rwkv_jax.models import Kernels, _linear, rwkv6, rwkv7
from support import hlo, internals, layer_functions
from support.layer_functions import (
    LAYER_FUNCTIONS,
    PRODUCTS,
    Case,
    operands,
    read_out_and_product,
    value_and_gradients,
)
from support.models import shapes_of
from support.tolerance import assert_trees_close

pytestmark = pytest.mark.quick("name")

FEED_FORWARD = (*internals.feed_forward.TARGETS.values(),)
LOW_RANK = tuple(internals.low_rank.TARGETS["tanh", name] for name in ("forward", "backward"))
OF_MAPS = (internals.low_rank_maps.TARGET,)
KEYED = (*internals.keyed_wkv7.TARGETS.values(),)
KEYS_AND_WKV7 = (*internals.wkv7_keys.FUNCTION.targets, "rwkv_wkv7_fwd_v2", "rwkv_wkv7_bwd_v2")
RESTORING = internals.projected_read_out.RESTORING.targets
READ_OUT = internals.read_out.FUNCTION.targets
NO_KERNEL = ()

CALLS = {
    "feed_forward": Case(2, 2048, 8, 64, "bfloat16", others={"F": 512}),
    "low_rank": Case(2, 6144, 2, 64, "bfloat16"),
    "low_rank_maps": Case(2, 256, 3, 16, "bfloat16"),
    "keyed_wkv7": Case(2, 17, 2, 64, "bfloat16"),
    "projected_read_out": Case(2, 17, 2, 64, "bfloat16"),
    "value_residual": Case(1, 17, 2, 64, "bfloat16"),
}
"""Calls that the kernels take, of products by None with just enough tokens."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be lowered for GPUs with the kernels, as they can where these are installed."""
    internals.pretend(monkeypatch, "cuda", None)


def _targets(
    name: str,
    changes: dict[str, Any],
    implementation: str | None = None,
    device: str = "cuda",
    **options: Any,
) -> tuple[str, ...]:
    """The kernels that a program for an H200 with the gradients calls, where sizes of axes or
    fields of the call are changed."""
    fields = {n: x for n, x in changes.items() if hasattr(CALLS[name], n)}
    sizes = {n: x for n, x in changes.items() if n not in fields}
    case = dataclasses.replace(CALLS[name], **fields, others={**CALLS[name].others, **sizes})
    arrays = layer_functions.shapes(name, case)
    with hlo.device(device):
        traced = value_and_gradients.trace(name, implementation, *arrays, **options)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return tuple(sorted(re.findall(r"custom_call @(rwkv_\w+)\(", text)))


WHICH = [
    ("feed_forward", {}, None, FEED_FORWARD),
    ("feed_forward", {"T": 2047}, None, NO_KERNEL),
    ("feed_forward", {"T": 2047}, "ffi", FEED_FORWARD),
    ("feed_forward", {"T": 512, "F": 8192}, None, FEED_FORWARD[:1]),
    ("feed_forward", {"T": 511, "F": 8192}, None, NO_KERNEL),
    ("low_rank", {}, None, LOW_RANK),
    ("low_rank", {"without": ("offset",)}, None, LOW_RANK),
    ("low_rank", {"T": 6143}, None, NO_KERNEL),
    ("low_rank", {"T": 6143}, "ffi", LOW_RANK),
    ("low_rank_maps", {}, None, OF_MAPS),
    ("low_rank_maps", {"T": 2048}, None, OF_MAPS),
    ("low_rank_maps", {"T": 255}, None, NO_KERNEL),
    ("low_rank_maps", {"T": 255}, "ffi", OF_MAPS),
    ("low_rank_maps", {"T": 2049}, None, NO_KERNEL),
    ("keyed_wkv7", {}, None, KEYED),
    ("keyed_wkv7", {}, "ffi", KEYED),
    ("keyed_wkv7", {"origin": True}, None, KEYED),
    ("keyed_wkv7", {"T": 16, "dtype": "float16", "without": ("initial_state",)}, None, KEYED),
    ("keyed_wkv7", {"T": 15}, None, KEYS_AND_WKV7),
    ("keyed_wkv7", {"dtype": "float32"}, None, KEYS_AND_WKV7),
    ("keyed_wkv7", {"K": 128}, None, KEYS_AND_WKV7),
    ("projected_read_out", {}, None, RESTORING),
    ("projected_read_out", {"K": 16, "dtype": "float32"}, "ffi", RESTORING),
    ("projected_read_out", {"K": 24, "dtype": "float32"}, None, NO_KERNEL),
    *((name, {}, other, NO_KERNEL) for name in CALLS for other in ("xla", "reference")),
]


@pytest.mark.parametrize(("name", "changes", "implementation", "targets"), WHICH)
def test_which_calls_have_kernels(
    name: str, changes: dict[str, Any], implementation: str | None, targets: tuple[str, ...]
) -> None:
    """Each kernel is called once."""
    assert _targets(name, changes, implementation) == tuple(sorted(targets))


REFUSED = [
    *(("feed_forward", x) for x in ({"dtype": "float32"}, {"C": 544}, {"C": 448}, {"F": 320})),
    *(("low_rank", x) for x in ({"dtype": "float32"}, {"C": 192, "D": 192}, {"D": 256})),
    *(("low_rank", x) for x in ({"R": 20}, {"R": 264})),
    *(("low_rank_maps", x) for x in ({"dtype": "float32"}, {"C": 52, "D": 52}, {"D": 24})),
    ("low_rank_maps", {"Q": 4}),
    *(("value_residual", x) for x in ({"B": 2**16, "T": 2**15}, {"T": 2**31})),
]


@pytest.mark.parametrize(("name", "changes"), REFUSED)
def test_what_kernels_do_not_take(name: str, changes: dict[str, Any]) -> None:
    assert _targets(name, changes) == NO_KERNEL
    with pytest.raises(NotImplementedError, match=rf"{name}.*the cuda kernels take"):
        _targets(name, changes, "ffi")


@pytest.mark.parametrize("name", PRODUCTS)
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals.gpus, "device_kinds", set)
    assert _targets(name, {}, device="") == NO_KERNEL
    with pytest.raises(NotImplementedError, match="no CUDA GPU is here"):
        _targets(name, {}, "ffi", device="")


@pytest.mark.parametrize("activation", internals.low_rank.ACTIVATIONS)
def test_kernels_of_activations(activation: str) -> None:
    call = functools.partial(LAYER_FUNCTIONS["low_rank"].call, activation=activation)
    targets = {internals.low_rank.TARGETS[activation, x] for x in ("forward", "backward")}
    assert {*_targets("low_rank", {}, function=call)} == targets


def _kept(size: int, call: Callable[..., Any], *arguments: Any) -> int:
    """How many arrays of a size the backward pass needs."""
    found = jax.eval_shape(lambda *x: jax.vjp(call, *x)[1], *arguments)
    return [x.size for x in jax.tree.leaves(found)].count(size)


def test_what_is_kept() -> None:
    """By `projected_read_out`, of arrays of the size of y, the three arguments. Its kernel runs
    once, also where the backward pass keeps nothing."""
    name = "projected_read_out"
    inputs, _ = operands(name, CALLS[name])
    size, call = inputs["y"].size, LAYER_FUNCTIONS[name].call
    for implementation in (None, "ffi", "xla"):
        chosen = functools.partial(call, implementation=implementation)
        assert _kept(size, lambda x, chosen=chosen: chosen(**x), inputs) == 3
    assert _kept(size, lambda x: read_out_and_product(**x), inputs) == 4
    assert _targets(name, {}, function=jax.checkpoint(call)) == tuple(sorted(RESTORING))


# Models.


OF_SEQUENCES = {FEED_FORWARD[0], *OF_MAPS}
OF_MODELS = [
    (rwkv7, (2, 2048), None, None, OF_SEQUENCES),
    (rwkv7, (2, 2048), None, "ffi", OF_SEQUENCES),
    (rwkv7, (2, 2048), None, "xla", set()),
    (rwkv7, (2, 2048), models.quantize, None, {*OF_MAPS}),
    (rwkv7, (2, 2048), models.for_decoding, None, {*OF_MAPS}),
    (rwkv7, (4096,), None, None, set()),
    (rwkv6, (2, 6144), None, None, {FEED_FORWARD[0], LOW_RANK[0]}),
    (rwkv6, (2, 6144), None, "xla", set()),
    (rwkv6, (12288,), None, None, set()),
]


@pytest.mark.quick("module")
@pytest.mark.parametrize(("module", "tokens", "change", "choice", "targets"), OF_MODELS)
def test_products_of_models(
    module: ModuleType,
    tokens: tuple[int, ...],
    change: Callable[[Any], Any] | None,
    choice: str | None,
    targets: set[str],
) -> None:
    """Models have the kernels of products for sequences, and that of a feed-forward network for
    plain weights."""
    params = shapes_of(module, module.Config(num_layers=1, hidden_size=512, vocab_size=32))
    params = params if change is None else jax.eval_shape(change, params)
    options = {"dtype": jnp.bfloat16, "kernels": Kernels(layers=choice)}
    call = jax.jit(lambda *operands: module.apply(*operands, **options))
    with hlo.device("cuda"):
        traced = call.trace(params, jax.ShapeDtypeStruct(tokens, jnp.int32))
        found = hlo.targets(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert found & {*FEED_FORWARD, *LOW_RANK, *OF_MAPS} == targets


CONFIG = rwkv7.Config(num_layers=1, hidden_size=128, vocab_size=32, head_size=64)
TIME_MIXING = "rwkv_jax.models.rwkv7.projected_read_out"


def _operator(*operands: Any, **options: Any) -> Any:
    """`wkv7`, unknown to the model."""
    return rwkv_jax.wkv7(*operands, **options)


def _in_two(params: Any, of_heads: Sequence[jax.Array], choice: str | None) -> jax.Array:
    """`read_out` and the product, for the model."""
    out = layers.read_out(*of_heads, implementation=choice)
    return _linear.linear(params, out.reshape(*out.shape[:2], -1))


def _hidden_states(params: rwkv7.Params, tokens: jax.Array, **options: Any) -> jax.Array:
    return rwkv7.hidden_states(params, tokens, dtype=jnp.bfloat16, **options)[0].astype(jnp.float32)


def _sum(*arguments: Any, **options: Any) -> jax.Array:
    return jnp.sum(_hidden_states(*arguments, **options) ** 3)


def _shapes_of_model(config: rwkv7.Config = CONFIG) -> tuple[Any, Any]:
    return shapes_of(rwkv7, config), jax.ShapeDtypeStruct((2, 17), jnp.int32)


ONCE = collections.Counter([*KEYED, *RESTORING])


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, ONCE),
        ({"recompute": "blocks"}, ONCE + collections.Counter([KEYED[0], RESTORING[0]])),
        ({"recompute": "mixes"}, ONCE),
        ({"recompute": "cheap"}, ONCE),
        ({"kernels": Kernels("ffi", "ffi")}, ONCE),
        # An operator, or another implementation, for one of the two functions.
        ({"kernels": Kernels(wkv=_operator)}, collections.Counter(RESTORING)),
        ({"kernels": Kernels("ffi")}, collections.Counter(RESTORING)),
        ({"kernels": Kernels(layers="xla")}, collections.Counter()),
    ],
)
def test_the_model_takes_the_kernels(options: dict[str, Any], calls: dict[str, int]) -> None:
    """It computes nothing again for "cheap"."""
    call = jax.grad(functools.partial(_sum, **options))
    program = jax.make_jaxpr(call)(*_shapes_of_model())
    assert {x: hlo.calls(program, x) for x in ONCE} == {x: calls[x] for x in ONCE}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("change", [None, models.quantize])
def test_the_model_keeps_one_array_less_for_each_block(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any] | None, adapter: bool
) -> None:
    """With any weights, all of which are differentiated or an adapter alone."""
    params, tokens = _shapes_of_model(dataclasses.replace(CONFIG, num_layers=2))
    params = params if change is None else jax.eval_shape(change, params)
    trained, call = params, _sum
    if adapter:
        base = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
        trained = finetuning.init_adapter(jax.random.key(0), params, rank=4)

        def call(adapter: Any, tokens: jax.Array) -> jax.Array:
            return _sum(finetuning.adapted(base, adapter), tokens)

    size = tokens.size * CONFIG.hidden_size
    kept = _kept(size, lambda *x: call(*x), trained, tokens)
    monkeypatch.setattr(TIME_MIXING, _in_two)
    assert _kept(size, lambda *x: call(*x), trained, tokens) == kept + 2
    program = jax.make_jaxpr(lambda *x: jax.vjp(call, *x)[1](jnp.float32(1)))(trained, tokens)
    assert [hlo.calls(program, x) for x in READ_OUT] == [2, 2]


@pytest.mark.slow
def test_the_model_equals_the_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and all gradients, of blocks that are stacked behind the first one."""
    params = rwkv7.init(jax.random.key(0), dataclasses.replace(CONFIG, num_layers=2))
    # Initial matrices of zeros would hide gradients.
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)
    tokens = jax.random.randint(jax.random.key(1), (2, 33), 0, CONFIG.vocab_size)

    def gradients(**options: Any) -> Any:
        call = jax.value_and_grad(functools.partial(_sum, **options))
        loss, found = jax.jit(call)(rwkv7.stacked(params), tokens)
        return loss, rwkv7.unstacked(found)

    found = gradients()
    monkeypatch.setattr(TIME_MIXING, _in_two)
    assert_trees_close(found, gradients(kernels=Kernels(wkv=_operator)), 1e-3)
    assert all(np.any(x) for x in jax.tree.leaves(found[1].blocks[1].att))


def test_the_model_has_another_product_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIME_MIXING, None)
    params, tokens = _shapes_of_model()
    jax.eval_shape(_hidden_states, params, jax.ShapeDtypeStruct((2,), jnp.int32))
    with pytest.raises(TypeError, match="not callable"):
        jax.eval_shape(_hidden_states, params, tokens)
