"""`rwkv_jax.models` against the official models: the `rwkv` package reads the same files."""

import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import layers, losses, models
from rwkv_jax.wkv4 import Wkv4State
from support import checkpoints, official
from support.tolerance import EXACT_FLOAT32, assert_trees_close

TOKENS, PROMPT = (3, 36, 4, 1, 5, 9, 2, 6, 0, 3, 5), 8
TUNED = ("RWKV-5.0", "RWKV-5.2", "RWKV-6")
"""Versions of which the package starts from a tuned state in the file."""


def sums(state: Any) -> Any:
    """The sums of RWKV-4 as they are, of which a state may hold any common share."""

    def unscaled(x: Any) -> Any:
        if not isinstance(x, Wkv4State):
            return x
        return np.exp(x.log_max) * np.stack([x.num, x.den])

    return jax.tree.map(unscaled, state, is_leaf=lambda x: isinstance(x, Wkv4State))


@pytest.mark.parametrize("version", [*checkpoints.MIXINGS, "RWKV-7a"])
def test_logits_and_states(tmp_path: Path, version: str) -> None:
    """Of a sequence, and of tokens one by one after it."""
    is_7a = version == "RWKV-7a"
    tensors = checkpoints.rwkv7a(size=32) if is_7a else checkpoints.official(version)
    if version in TUNED:
        rng = np.random.default_rng(1)
        names = [f"blocks.{i}.att.time_state" for i in range(2)]
        tensors |= {name: rng.standard_normal((3, 8, 8), np.float32) for name in names}
    path = official.save(tmp_path / "model.pth", tensors)
    right = official.run(version, path, TOKENS, PROMPT)

    found = models.load(path)
    tokens = jnp.asarray([TOKENS], jnp.int32)
    start = found.module.initial_state(found.params, 1)
    if version in TUNED:
        start = models.load_state(path, found.params)

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        def step(state: Any, token: jax.Array) -> Any:
            logits, state = found.module.apply(params, token, state)
            return state, logits

        of_prompt, state = found.module.apply(params, tokens[:, :PROMPT], state)
        state, others = jax.lax.scan(step, state, tokens[:, PROMPT:].T)
        return jnp.concatenate([of_prompt[0], others[:, 0]]), state

    logits, state = run(found.params, start)
    assert_trees_close((logits, sums(state)), (right.logits, sums(right.state)), EXACT_FLOAT32)


def test_formulas_of_the_training_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for the kernels of RWKV-LM's training code in float32 computes what
    `rwkv_jax.layers` and `rwkv_jax.losses` compute. `wkv7` needs a GPU."""
    torch = importlib.import_module("torch")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")
    formulas = importlib.import_module("benchmarking.official_float32").functions(Path(), 8)
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def heads(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.reshape(*x.shape[:-1], -1, 8))

    def run(name: str, *operands: np.ndarray) -> Any:
        found = formulas[name](*map(torch.from_numpy, operands))
        return jax.tree.map(lambda x: x.numpy(), found)

    def close(found: Any, expected: Any) -> None:
        expected = jax.tree.map(lambda x, y: x.reshape(y.shape), expected, found)
        assert_trees_close(found, expected)

    x, r, v, first, rate, gate = (random(2, 5, 16) for _ in range(6))
    a, b, c, d = (random(16) for _ in range(4))
    before = np.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    shares = [x + (before - x) * share for share in (a, b, c)]
    close(run("tmix_mix6_bf16_v5", x, a, b, c), tuple(shares))
    value = layers.value_residual(*map(heads, (v, rate, first, a)))[0]
    close(run("tmix_vres_gate_bf16_v3", v, first, a, rate), value)

    given = (*map(heads, (x, rate, r)), *(heads(p) for p in (a, b, c, d)))
    k, unit, scaled, bonus, _ = layers.wkv7_keys(*given)
    alpha = run("tmix_a_gate_bf16", c, rate)
    close(run("tmix_kk_pre_bf16_v5", x, a, alpha, b), (k, unit, scaled))
    out = layers.read_out(heads(first), bonus, heads(v), heads(gate), heads(a), heads(b))
    found = formulas["tmix_lnx_rkvres_xg_bf16_v1"](
        *map(torch.from_numpy, (first, r, np.array(k).reshape(x.shape), v)),
        *map(torch.from_numpy, (d.reshape(2, 8), a, b, gate)),
    )
    close(found.numpy(), out)

    key, matrix = random(64, 16), random(16, 64)
    mixed = jnp.asarray(x + (before - x) * a)
    found = formulas["_CmixLayerV2Fn"].apply(*map(torch.from_numpy, (x, a, key, matrix)))
    close(found.numpy(), layers.feed_forward(mixed, jnp.asarray(key), jnp.asarray(matrix)))

    targets, head = rng.integers(0, 64, (2, 5)), jnp.asarray(key)
    of_hidden_states = functools.partial(losses.cross_entropy, l2_wrap=1e-4)
    loss, gradient = jax.value_and_grad(of_hidden_states)(
        jnp.asarray(x), head, jnp.asarray(targets)
    )
    hidden_states = torch.from_numpy(x).requires_grad_()
    found = formulas["l2wrap_cross_entropy"](
        hidden_states @ torch.from_numpy(key).T, torch.from_numpy(targets)
    )
    found.backward()
    close((found.detach().numpy(), hidden_states.grad.numpy()), (loss, gradient))
