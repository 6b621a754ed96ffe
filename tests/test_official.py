"""`rwkv_jax.models` against the official models: the `rwkv` package reads the same files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import models
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


@pytest.mark.parametrize("version", checkpoints.MIXINGS)
def test_logits_and_states(tmp_path: Path, version: str) -> None:
    """Of a sequence, and of tokens one by one after it."""
    tensors = checkpoints.official(version)
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
