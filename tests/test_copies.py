"""Copies of matrices in the dtype of the activations, with which training computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import finetuning
from rwkv_jax._training import copies
from rwkv_jax._training.parts import Parts
from rwkv_jax.models import Kernels, rwkv7
from support.models import random_like, shapes_of

CONFIG = rwkv7.Config(2, 64, head_size=32, vocab_size=16)


def test_matrices_of_blocks_are_copied() -> None:
    """And the model computes with the copies."""
    params = random_like(shapes_of(rwkv7, CONFIG))
    tree = copies.rounded(params, "bfloat16")
    made, before = rwkv7.names(tree), rwkv7.names(params)
    low_rank = {f"att.{letter}{i}" for letter in "wavg" for i in (1, 2)}
    linear = {f"att.{x}.weight" for x in ("receptance", "key", "value", "output")}
    matrices = low_rank | linear | {"ffn.key.weight", "ffn.value.weight"}
    expected = {f"blocks.{i}.{name}" for i in (0, 1) for name in matrices}
    assert made.keys() == expected - {"blocks.0.att.v1", "blocks.0.att.v2"}
    assert {x.dtype.name for x in made.values()} == {"bfloat16"}
    assert not jax.tree.leaves(copies.rounded(params, "float32"))
    used = rwkv7.names(copies.in_place(params, jax.tree.map(lambda x: x + 1, tree)))
    assert used.keys() == before.keys()
    for name, x in used.items():
        y = made[name] + 1 if name in made else before[name]
        np.testing.assert_array_equal(x, y, strict=True)


def test_matrices_of_adapters_are_copied() -> None:
    """Beside a frozen model, of which there are no copies, and states, which are no matrices."""
    params = shapes_of(rwkv7, CONFIG)
    adapter = jax.eval_shape(lambda: finetuning.init_adapter(jax.random.key(0), params, rank=2))
    parts = Parts(None, adapter, {"blocks.0.att.time_state": jnp.zeros((2, 32, 32))})
    made = jax.eval_shape(lambda: copies.rounded(random_like(parts), "bfloat16"))
    assert made.states == {"blocks.0.att.time_state": None}
    assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), made.adapter) == jax.tree.map(
        lambda x: (x.shape, "bfloat16"), adapter
    )


@pytest.mark.slow
def test_copies_change_neither_loss_nor_gradients() -> None:
    rng = np.random.default_rng(0)
    params = random_like(shapes_of(rwkv7, dataclasses.replace(CONFIG, num_layers=1)))
    tokens = jnp.asarray(rng.integers(0, 16, (2, 20)))

    # Else the compiler may use a matrix as it was before it was rounded.
    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    @jax.value_and_grad
    def loss(params: rwkv7.Params, made: rwkv7.Params) -> jax.Array:
        used = copies.in_place(params, made)
        logits, _ = rwkv7.apply(used, tokens, dtype="bfloat16", kernels=Kernels("xla"))
        return jnp.mean(jnp.square(logits))

    found = loss(params, copies.rounded(params, "bfloat16"))
    expected = loss(params, jax.tree.map(lambda _: None, params))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
