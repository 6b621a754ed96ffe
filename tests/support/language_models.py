"""The language models of RWKV-4 to 7 in numpy float64, one token of one sequence at a time.

Written from the published formulas and independent of the package: "RWKV: Reinventing RNNs for the
Transformer Era" (arXiv:2305.13048), "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic
Recurrence" (arXiv:2404.05892), "RWKV-7 Goose with Expressive Dynamic State Evolution"
(arXiv:2503.14456), and RWKV-LM for what these leave open and for RWKV-7a. The parameters are a flat
dictionary with the official names.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray

LAYER_NORM_EPS = 1e-5
HEAD_SIZE_DIVISOR = 8


class Layer:
    """The parameters of a layer, by the ends of their names."""

    def __init__(self, tensors: Mapping[str, Array], prefix: str):
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> Array:
        return self.tensors[self.prefix + name]

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def linear(self, name: str, x: Array) -> Array:
        return self[f"{name}.weight"] @ x

    def norm(self, name: str, x: Array, groups: int = 1, eps: float = LAYER_NORM_EPS) -> Array:
        parts = x.reshape(groups, -1)
        centred = parts - parts.mean(1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(1, keepdims=True) + eps)
        return scaled.reshape(-1) * self[f"{name}.weight"] + self[f"{name}.bias"]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def shifted(p: Layer, name: str, x: Array, before: Array) -> Array:
    """A token mixed with the one before it, in RWKV-4 and 5."""
    mix = p[f"time_mix_{name}"]
    return x * mix + before * (1 - mix)


def linear_attention(r: Array, decay: Array, k: Array, v: Array, u: Array, wkv: Array) -> Array:
    """What a token reads of a state, one [K, V] matrix for each head, which it then changes."""
    r, decay, k, v = (x.reshape(u.shape) for x in (r, decay, k, v))
    written = k[:, :, None] * v[:, None, :]
    y = np.einsum("hk,hkv->hv", r, wkv + u[:, :, None] * written)
    wkv *= decay[:, :, None]
    wkv += written
    return y.reshape(-1)


def time_mix_7(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    """The value of the first layer is in `state["first"]`, the state of this layer."""

    def mixed(name: str) -> Array:
        return x + (state["att"] - x) * p[f"x_{name}"]

    # The paper's own form of the decay: -softplus(-x) - 1/2, then exp(-exp()).
    w = -np.logaddexp(0, -(p["w0"] + np.tanh(mixed("w") @ p["w1"]) @ p["w2"])) - 0.5
    r, k, v = (p.linear(name, mixed(name[0])) for name in ("receptance", "key", "value"))
    if state is state["first"]:
        state["value"] = v
    else:
        share = sigmoid(p["v0"] + mixed("v") @ p["v1"] @ p["v2"])
        v = v + (state["first"]["value"] - v) * share
    a = sigmoid(p["a0"] + mixed("a") @ p["a1"] @ p["a2"])
    gate = sigmoid(mixed("g") @ p["g1"]) @ p["g2"]
    heads, size = p["r_k"].shape
    removed = (k * p["k_k"]).reshape(heads, size)
    removed = removed / np.linalg.norm(removed, axis=1, keepdims=True)
    k = k * (1 + (a - 1) * p["k_a"])
    r, w, k, v, a = (z.reshape(heads, size) for z in (r, w, k, v, a))
    wkv = state.setdefault("wkv", np.zeros((heads, size, size)))
    read = np.einsum("hvk,hk->hv", wkv, -removed)
    wkv *= np.exp(-np.exp(w))[:, None, :]
    wkv += read[:, :, None] * (removed * a)[:, None, :] + v[:, :, None] * k[:, None, :]
    y = np.einsum("hvk,hk->hv", wkv, r).reshape(-1)
    y = p.norm("ln_x", y, heads, LAYER_NORM_EPS * HEAD_SIZE_DIVISOR**2)
    y = y + ((r * k * p["r_k"]).sum(1, keepdims=True) * v).reshape(-1)
    return p.linear("output", y * gate)


def time_mix_6(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    change = state["att"] - x
    hidden = np.tanh((x + change * p["time_maa_x"]) @ p["time_maa_w1"])
    mixed = {}
    for i, name in enumerate("wkvrg"):
        rank = p["time_maa_w2"].shape[1]
        share = hidden[i * rank : (i + 1) * rank] @ p["time_maa_w2"][i]
        mixed[name] = x + change * (p[f"time_maa_{name}"] + share)
    w = p["time_decay"] + np.tanh(mixed["w"] @ p["time_decay_w1"]) @ p["time_decay_w2"]
    r, k, v = (p.linear(name, mixed[name[0]]) for name in ("receptance", "key", "value"))
    u = p["time_faaaa"]
    wkv = state.setdefault("wkv", np.zeros((*u.shape, u.shape[1])))
    y = linear_attention(r, np.exp(-np.exp(w)), k, v, u, wkv)
    y = p.norm("ln_x", y, len(u), LAYER_NORM_EPS * HEAD_SIZE_DIVISOR**2)
    return p.linear("output", y * silu(p.linear("gate", mixed["g"])))


def time_mix_5(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    """Of all versions: 5.2 has decay and bonus for each channel, 5.1 for each head, and 5.0 the log
    of the bonus and no gate."""
    names = ("receptance", "key", "value")
    r, k, v = (p.linear(name, shifted(p, name[0], x, state["att"])) for name in names)
    heads = len(p["time_decay"])
    shape = (heads, len(r) // heads)
    decay = np.broadcast_to(np.exp(-np.exp(p["time_decay"])).reshape(heads, -1), shape)
    u = p["time_faaaa"] if "time_faaaa" in p else np.exp(p["time_first"])
    u = np.broadcast_to(u.reshape(heads, -1), shape)
    wkv = state.setdefault("wkv", np.zeros((*shape, shape[1])))
    y = linear_attention(r, decay, k, v, u, wkv)
    y = p.norm("ln_x", y / HEAD_SIZE_DIVISOR, heads)
    if "time_mix_g" in p:
        y = y * silu(p.linear("gate", shifted(p, "g", x, state["att"])))
    return p.linear("output", y)


def time_mix_4(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    """With the sums as they are published, whose exponents are small in tests."""
    names = ("receptance", "key", "value")
    r, k, v = (p.linear(name, shifted(p, name[0], x, state["att"])) for name in names)
    num, den = state.get("sums", (0.0, 0.0))
    own = np.exp(p["time_first"] + k)
    y = (num + own * v) / (den + own)
    decay = np.exp(-np.exp(p["time_decay"]))
    state["sums"] = decay * num + np.exp(k) * v, decay * den + np.exp(k)
    return p.linear("output", sigmoid(r) * y)


def channel_mix_5(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    x_k, x_r = (shifted(p, name, x, state["ffn"]) for name in "kr")
    hidden = np.maximum(p.linear("key", x_k), 0) ** 2
    return sigmoid(p.linear("receptance", x_r)) * p.linear("value", hidden)


def channel_mix_6(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    x_k, x_r = (x + (state["ffn"] - x) * p[f"time_maa_{name}"] for name in "kr")
    hidden = np.maximum(p.linear("key", x_k), 0) ** 2
    return sigmoid(p.linear("receptance", x_r)) * p.linear("value", hidden)


def channel_mix_7(p: Layer, x: Array, state: dict[str, Any]) -> Array:
    """With the DeepEmbed of RWKV-7a, if there is one."""
    mixed = x + (state["ffn"] - x) * p["x_k"]
    hidden = np.maximum(p.linear("key", mixed), 0) ** 2
    if "s_emb.weight" in p:
        of_token = p["s_emb.weight"][state["token"]] + p.linear("s_emb_x", state["embedding"])
        low = x @ p["s1"]
        low = low @ of_token.reshape(len(low), len(low))
        hidden = hidden * (low @ p["s2"] + p["s0"])
    return p.linear("value", hidden)


MIXINGS = {
    "rwkv4": (time_mix_4, channel_mix_5),
    "rwkv5": (time_mix_5, channel_mix_5),
    "rwkv6": (time_mix_6, channel_mix_6),
    "rwkv7": (time_mix_7, channel_mix_7),
}


def logits(generation: str, tensors: Mapping[str, Any], tokens: Iterable[int]) -> Array:
    """The logits of the next token after each of `tokens`, [tokens, vocabulary]."""
    time_mix, channel_mix = MIXINGS[generation]
    tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    model = Layer(tensors, "")
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    width = tensors["emb.weight"].shape[1]
    states: list[dict[str, Any]] = [
        {"att": np.zeros(width), "ffn": np.zeros(width)} for _ in range(layers)
    ]
    for state in states:
        state["first"] = states[0]
    results = []
    for token in tokens:
        x = embedding = model.norm("blocks.0.ln0", tensors["emb.weight"][token])
        for layer, state in enumerate(states):
            state |= {"token": token, "embedding": embedding}
            normalised = model.norm(f"blocks.{layer}.ln1", x)
            x = x + time_mix(Layer(tensors, f"blocks.{layer}.att."), normalised, state)
            state["att"] = normalised
            normalised = model.norm(f"blocks.{layer}.ln2", x)
            x = x + channel_mix(Layer(tensors, f"blocks.{layer}.ffn."), normalised, state)
            state["ffn"] = normalised
        results.append(model.linear("head", model.norm("ln_out", x)))
    return np.stack(results)
