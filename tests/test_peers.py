"""The delta rule and its layers against `transformers`, in float32 and with the same tensors."""

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from rwkv_jax.layers import DeltaNetState, gated_delta_net, kimi_delta_net
from support import cases
from support.cases import Case
from support.tolerance import EXACT_FLOAT32, assert_close

MODELS = "transformers.models."
PEERS = {
    "gated_delta_rule": (
        "qwen3_next.modeling_qwen3_next",
        ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    ),
    "kimi_delta_attention": (
        "kimi_linear.modeling_kimi_linear",
        ("recurrent_kimi_delta_attention", "chunk_kimi_delta_attention"),
    ),
}
"""The module of each operator, and its functions."""

GATED = {
    "hidden_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
KIMI = {
    "hidden_size": 24,
    "linear_num_heads": 3,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
}
LAYERS: Any = {
    "Qwen3NextGatedDeltaNet": (gated_delta_net, "qwen3_next", "Qwen3NextConfig", GATED),
    "Qwen3_5GatedDeltaNet": (gated_delta_net, "qwen3_5", "Qwen3_5TextConfig", GATED),
    "KimiLinearDeltaAttention": (kimi_delta_net, "kimi_linear", "KimiLinearConfig", KIMI),
    "Glm5NextTextLinearAttention": (kimi_delta_net, "glm5_next", "Glm5NextTextConfig", KIMI),
}
"""The module here and that of `transformers`, and its configuration."""

PROMPT, TOKENS = 13, 3
"""A sequence, and tokens one by one after it."""


def modeling(name: str) -> tuple[Any, Any]:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    return torch, importlib.import_module(f"{MODELS}{name}")


@pytest.mark.parametrize("op", PEERS)
def test_operators(op: str) -> None:
    """Values and gradients of the recurrence, and values of the form in chunks. The states of
    `transformers` are the transposes."""
    name, (recurrence, chunks) = PEERS[op]
    torch, module = modeling(name)
    by_head = op == "gated_delta_rule"
    inputs, cotangents = cases.delta_rule(Case(2, 70, 4, 16, V=8, decay="log"), by_head=by_head)
    if not by_head:  # whose function has no grouped heads
        inputs |= {x: np.repeat(inputs[x], 4 // inputs[x].shape[2], axis=2) for x in "qk"}
    tensors = {x: torch.tensor(np.asarray(y), requires_grad=True) for x, y in inputs.items()}
    state = tensors["initial_state"].transpose(-1, -2)
    words = {"q": "query", "k": "key", "v": "value", "g": "g", "beta": "beta"}
    given = {word: tensors[x] for x, word in words.items()}
    y, after = getattr(module, recurrence)(**given, initial_state=state, output_final_state=True)
    after = after.transpose(-1, -2)
    torch.autograd.backward(
        (y, after), [torch.tensor(np.asarray(cotangents[d])) for d in ("dy", "dfinal_state")]
    )
    right = {"y": y, "final_state": after} | {f"d{x}": t.grad for x, t in tensors.items()}
    right = {x: t.detach().numpy() for x, t in right.items()}

    @jax.jit
    def run(inputs: Any, cotangents: Any) -> Any:
        found, pullback = jax.vjp(lambda inputs: getattr(rwkv_jax, op)(**inputs), inputs)
        gradients = pullback((cotangents["dy"], cotangents["dfinal_state"]))[0]
        return dict(zip(("y", "final_state"), found, strict=True)), gradients

    arrays = jax.tree.map(jnp.asarray, (inputs, cotangents))
    values, gradients = run(*arrays)
    found = values | {f"d{x}": d for x, d in gradients.items()}
    assert_close({x: np.asarray(y) for x, y in found.items()}, right, EXACT_FLOAT32)
    with torch.no_grad():
        y, after = getattr(module, chunks)(**given, initial_state=state, output_final_state=True)
    right = {"y": y.numpy(), "final_state": after.transpose(-1, -2).numpy()}
    assert_close({x: np.asarray(values[x]) for x in right}, right, EXACT_FLOAT32)


def as_checkpoint(tensors: dict[str, Any], of_kimi: bool) -> dict[str, np.ndarray]:
    """The tensors by the names of checkpoints: where `transformers` has one convolution of q, k and
    v and a module for the decay, checkpoints of Kimi Delta Attention have neither."""
    found = {x.removeprefix("forget_gate."): y.numpy().copy() for x, y in tensors.items()}
    if of_kimi:
        parts = np.split(found.pop("conv1d.weight"), 3)
        found |= {f"{x}_conv1d.weight": part for x, part in zip("qkv", parts, strict=True)}
    return found


def of_peer(name: str) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The layer of `transformers` with random parameters, its configuration and its tensors."""
    here, model, config_name, sizes = LAYERS[name]
    torch, module = modeling(f"{model}.modeling_{model}")
    configuration = importlib.import_module(f"{MODELS}{model}.configuration_{model}")
    config = getattr(configuration, config_name)(**sizes, num_hidden_layers=4)
    layer = getattr(module, name)(config, 0)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            x = 0.5 * rng.standard_normal(parameter.shape)
            parameter.copy_(torch.tensor(x + (parameter.ndim == 1)))
    return layer, config, as_checkpoint(layer.state_dict(), here is kimi_delta_net)


@pytest.mark.quick("name")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """A sequence and the gradients of all parameters, and tokens one by one after it."""
    here: ModuleType = LAYERS[name][0]
    layer, own, tensors = of_peer(name)
    torch = importlib.import_module("torch")
    config = here.Config.from_hugging_face(own.to_dict())
    # Not every draw is as good: a first token whose q and k are almost orthogonal has an output
    # near 0, and its normalisation magnifies the rounding of both.
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, PROMPT + TOKENS, config.hidden_size)).astype(np.float32)
    weight = rng.standard_normal((2, PROMPT, config.hidden_size)).astype(np.float32)

    given = torch.tensor(x[:, :PROMPT], requires_grad=True)
    y = layer(given)
    (y * torch.tensor(weight)).sum().backward()
    gradients = {n: parameter.grad for n, parameter in layer.named_parameters()}
    right = {f"d{n}": d for n, d in as_checkpoint(gradients, here is kimi_delta_net).items()}
    right |= {"y": y.detach().numpy(), "dx": given.grad.numpy()}

    params = here.from_tensors(tensors, config=config)

    @jax.jit
    def run(params: Any, x: jax.Array) -> Any:
        def mixed(params: Any, x: jax.Array) -> Any:
            y, state = here.apply(params, x, config=config)
            return (y * weight).sum(), (y, state)

        gradients, (y, state) = jax.grad(mixed, (0, 1), has_aux=True)(params, x)
        return gradients, y, state

    (of_params, of_x), y, state = run(params, jnp.asarray(x[:, :PROMPT]))
    leaves, _ = jax.tree_util.tree_flatten_with_path(of_params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    found = {f"d{n}": d for n, (_, d) in zip(names, leaves, strict=True)} | {"y": y, "dx": of_x}
    assert_close({n: np.asarray(z) for n, z in found.items()}, right, EXACT_FLOAT32)

    cache = importlib.import_module("transformers").DynamicCache(config=own)
    step = jax.jit(lambda params, x, state: here.apply(params, x, state, config=config))
    with torch.no_grad():
        layer(given, cache)
        for t in range(PROMPT, PROMPT + TOKENS):
            right_y = layer(torch.tensor(x[:, t : t + 1]), cache)
            y, state = step(params, jnp.asarray(x[:, t]), state)
            assert_close({"y": np.asarray(y)}, {"y": right_y[:, 0].numpy()}, EXACT_FLOAT32)
    assert isinstance(state, DeltaNetState)
    of_cache = cache.get_recurrent_state(0).transpose(-1, -2).numpy()
    conv = cache.get_conv_state(0).transpose(-1, -2).numpy()[:, 1 - config.conv_size :]
    found = {"conv": np.asarray(state.conv), "recurrent": np.asarray(state.recurrent)}
    assert_close(found, {"conv": conv, "recurrent": of_cache}, EXACT_FLOAT32)
