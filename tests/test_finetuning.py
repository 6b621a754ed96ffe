"""`rwkv_jax.finetuning`: adapters, tuned states, and what of a tree is trained."""

import functools
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import finetuning, models
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._checkpoints import files
from rwkv_jax.models._linear import linear
from support import checkpoints, hlo
from support.commands import Command
from support.models import config_of, parameters, random_like, shapes_of
from support.tolerance import assert_trees_close, rms_error

TOKENS = jnp.asarray([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])


def adapter_of(params: Any, **options: Any) -> finetuning.Adapter:
    """An adapter of random numbers."""
    options = {"rank": 4, "alpha": 8.0} | options
    first = finetuning.init_adapter(jax.random.key(0), params, **options)
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), first)


def assert_same_arrays(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


@pytest.mark.quick("dora")
@pytest.mark.parametrize(
    ("module", "dora"),
    [(rwkv7, False), (rwkv7, True), (rwkv6, False), (rwkv5, False), (rwkv4, True)],
    ids=lambda x: x.__name__[-5:] if isinstance(x, ModuleType) else "dora" if x else "lora",
)
def test_applied_equals_merged(module: ModuleType, dora: bool) -> None:
    """For sequences and tokens, in all forms; and W + B A alpha / rank is what numpy computes, with
    the magnitudes of DoRA."""
    params = parameters(module)
    adapter = adapter_of(params, dora=dora)
    merged = finetuning.merge(params, adapter)

    @jax.jit
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        sequence, state = module.apply(params, TOKENS)
        # The maps of a token are those of a sequence in all generations.
        token = module.apply(params, TOKENS[:, 0], state)[0] if module is rwkv7 else sequence
        return sequence, token

    expected = run(merged)
    fast = models.for_decoding(params)
    trees = (fast, module.stacked(params)) if module is rwkv7 else (params,)
    for tree in trees:
        found = run(finetuning.adapted(tree, adapter))
        for x, y in zip(found, expected, strict=True):
            assert rms_error(x, y) < 1e-6
    for form in (module.stacked, models.for_decoding):
        found = finetuning.merge(form(params), adapter)
        if dora:  # sums of squares are not added in the same order
            assert_trees_close(found, form(merged), 1e-6)
        else:
            assert_same_arrays(found, form(merged))
    before, after = module.names(params), module.names(merged)
    for name, x in before.items():
        if low := adapter.matrices.get(name.removesuffix(".weight")):
            x = x + np.asarray(low.lora_B, np.float64) @ low.lora_A * 8 / 4
            if dora:
                norms = np.linalg.norm(x, axis=1, keepdims=True)
                x = np.asarray(low.lora_magnitude_vector)[:, None] * x / norms
        np.testing.assert_allclose(after[name], x, rtol=1e-6, atol=1e-6)
    assert len(adapter.matrices) == 2 * len(finetuning.TARGETS)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("base", ["float32", "int8"])
def test_gradients(base: str, dora: bool) -> None:
    """They are what the chain rule makes of the gradients of merged matrices, where norms of DoRA
    are constants. With dropout and a base of int8, whose matrices have none, they are those of
    plain JAX."""
    params = parameters(rwkv7)
    adapter = adapter_of(params, dropout=0.25, dora=dora)

    def loss(tree: Any, **options: Any) -> jax.Array:
        return jnp.sum(jnp.sin(rwkv7.hidden_states(tree, TOKENS, **options)[0]))

    @functools.partial(jax.jit, static_argnames="layers")
    def gradients(params: Any, key: Any = None, layers: str | None = None) -> Any:
        def of(adapter: finetuning.Adapter) -> jax.Array:
            own = finetuning.adapted(params, adapter, key=key)
            return loss(own, kernels=models.Kernels(layers=layers))

        return jax.grad(of)(adapter).matrices

    if base == "int8":
        params, key = models.quantize(params), jax.random.key(1)
        found = gradients(params, key), gradients(params, key, layers="reference")
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), *found)
        return
    of_merged = rwkv7.names(jax.jit(jax.grad(loss))(finetuning.merge(params, adapter)))
    for name, found in gradients(params).items():
        first, second, magnitude = adapter.matrices[name]
        whole = of_merged[f"{name}.weight"]
        if magnitude is not None:
            matrix = rwkv7.names(params)[f"{name}.weight"] + 8 / 4 * second @ first
            norms = jnp.linalg.norm(matrix, axis=1)
            expected = jnp.sum(whole * matrix, 1) / norms
            assert rms_error(found.lora_magnitude_vector, expected) < 1e-5
            whole *= (magnitude / norms)[:, None]
        whole *= 8 / 4
        assert rms_error(found.lora_A, second.T @ whole) < 1e-5
        assert rms_error(found.lora_B, whole @ first.T) < 1e-5


def test_gradients_over_devices() -> None:
    """Of an adapter that all devices have whole, each with a row of its own; with dropout and a
    base of int8, which have no gradients; and with `check_vma` and without."""
    params, key = models.quantize(parameters(rwkv7)), jax.random.key(1)

    def loss(adapter: finetuning.Adapter, params: Any, tokens: Any, key: Any) -> jax.Array:
        own = finetuning.adapted(params, adapter, key=key)
        return jnp.sum(jnp.sin(rwkv7.hidden_states(own, tokens)[0]))

    def by_row(*operands: Any) -> jax.Array:
        adapter, params, tokens, key = operands
        return sum((loss(adapter, params, row[None], key) for row in tokens), jnp.float32(0))

    def over_devices(*operands: Any) -> jax.Array:
        return jax.lax.psum(loss(*operands), "data")

    operands = adapter_of(params, dropout=0.25, dora=True), params, TOKENS, key
    expected = jax.jit(jax.grad(by_row))(*operands)
    for check_vma in (False, True):
        distributed = jax.shard_map(
            over_devices,
            mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
            in_specs=(P(), P(), P("data"), P()),
            out_specs=P(),
            check_vma=check_vma,
        )
        assert_trees_close(jax.jit(jax.grad(distributed))(*operands), expected, 1e-5)


def test_targets_and_scales() -> None:
    """Patterns of names; rsLoRA's factor; an adapter that was just made changes nothing."""
    params = parameters(rwkv7)
    made = finetuning.init_adapter(
        jax.random.key(0), params, rank=3, targets=["*.1.att.*", "ffn.key"]
    )
    assert set(made.matrices) == {
        "blocks.0.ffn.key",
        "blocks.1.ffn.key",
        *(f"blocks.1.att.{name}" for name in ("receptance", "key", "value", "output")),
    }
    first, second, _ = made.matrices["blocks.0.ffn.key"]
    assert (first.shape, second.shape) == ((3, 32), (128, 3))
    assert np.abs(first).max() <= 1 / math.sqrt(32)
    assert np.std(first) == pytest.approx(1 / math.sqrt(3 * 32), rel=0.2)
    assert_same_arrays(finetuning.merge(params, made), params)
    zero = jax.tree.map(lambda x: x.at[0].set(0) if x.ndim == 2 else x, params)
    made = finetuning.init_adapter(jax.random.key(0), zero, dora=True)
    assert_trees_close(finetuning.merge(zero, made), zero, 1e-6)
    low = adapter_of(params, rslora=True, targets=["blocks.0.ffn.key"])
    first, second, _ = low.matrices["blocks.0.ffn.key"]
    change = (
        finetuning.merge(params, low).blocks[0].ffn.key.weight - params.blocks[0].ffn.key.weight
    )
    np.testing.assert_allclose(change, 8 / math.sqrt(4) * second @ first, rtol=1e-4, atol=1e-5)


def test_dropout() -> None:
    """A share of the inputs of A is left out, others for each matrix and key, with the mean kept,
    and nothing without a key."""
    params = parameters(rwkv7)
    adapter = adapter_of(params, dropout=0.25)
    x = jnp.ones((1, 4000, 32))
    weights = finetuning.adapted(params, adapter, key=jax.random.key(1)).blocks[0].att
    kept = [np.asarray(w.dropout.of(x)) for w in (weights.key, weights.value)]
    for each in kept:
        assert set(np.unique(each)) == {0.0, np.float32(1 / 0.75)}
        assert each.mean() == pytest.approx(1, abs=0.01)
    assert (kept[0] != kept[1]).any()

    @jax.jit
    def logits(key: Any) -> jax.Array:
        tree = finetuning.adapted(rwkv7.stacked(params), adapter, key=key)
        return rwkv7.apply(tree, TOKENS)[0]

    first, again, other = (logits(jax.random.key(i)) for i in (1, 1, 2))
    assert (first == again).all()
    assert rms_error(first, other) > 1e-3
    weight = finetuning.adapted(params, adapter).blocks[0].att.key
    assert weight.dropout is None


def test_dropout_of_dora() -> None:
    """As in PEFT, the model has W x, to which W and A of the same share of the inputs are added."""
    params = parameters(rwkv7)
    adapter = adapter_of(params, dropout=0.25, dora=True)
    weight = finetuning.adapted(params, adapter, key=jax.random.key(1)).blocks[0].att.key
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 40, 32)), jnp.float32)
    found = linear(weight, x)[0]
    first, second, magnitude = map(np.asarray, adapter.matrices["blocks.0.att.key"])
    matrix = np.asarray(params.blocks[0].att.key.weight)
    kept = np.asarray(weight.dropout.of(x)[0])
    factor = magnitude / np.linalg.norm(matrix + 2 * second @ first, axis=1)
    added = (factor - 1) * (kept @ matrix.T) + factor * 2 * (kept @ first.T @ second.T)
    np.testing.assert_allclose(found, x[0] @ matrix.T + added, rtol=1e-4, atol=1e-4)


def tunable() -> rwkv7.Params:
    """A model whose state lasts, and counts for what it says."""
    params = parameters(rwkv7)

    def scaled(weight: rwkv7.Weight, by: float) -> rwkv7.Weight:
        return rwkv7.Weight(by * weight.weight)

    def block(p: rwkv7.BlockParams) -> rwkv7.BlockParams:
        att = p.att._replace(w0=p.att.w0 - 8, value=scaled(p.att.value, 0.05))
        return p._replace(att=att, ffn=p.ffn._replace(value=scaled(p.ffn.value, 0.1)))

    return params._replace(head=scaled(params.head, 3.0), blocks=tuple(map(block, params.blocks)))


@pytest.mark.quick
@pytest.mark.parametrize("what", ["states", "adapter"])
def test_learning(what: str) -> None:
    """The frozen model answers no token with 7. Tuned states do, and so does an adapter of an int8
    model, also for tokens that were not trained on, and every other bit stays."""
    rng = np.random.default_rng(0)
    tokens, others = jnp.asarray(rng.integers(8, 61, (2, 4, 8)))
    answers = jnp.full((4, 8), 7)
    params = models.quantize(tunable())
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=4)
    start = {"params": params, "adapter": adapter, "states": finetuning.initial_states(params)}
    labels = finetuning.labels(start, {what: f"{what}.*"})
    trained, frozen = finetuning.split(start, labels)
    optimizer = optax.adam(0.1 if what == "states" else 0.02)

    def logits(trained: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
        tree = finetuning.join(trained, frozen)
        own = finetuning.adapted(tree["params"], tree["adapter"])
        return rwkv7.apply(own, tokens, finetuning.state_of(own, tree["states"], 4))[0]

    def loss(trained: Any, frozen: Any) -> jax.Array:
        found = logits(trained, frozen, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(found, answers).mean()

    @jax.jit
    def learn(trained: Any, frozen: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            trained, moments = carry
            gradients = jax.grad(loss)(trained, frozen)
            updates, moments = optimizer.update(gradients, moments, trained)
            return optax.apply_updates(trained, updates), moments

        with jax.numpy_dtype_promotion("standard"):  # optax
            trained, _ = jax.lax.fori_loop(0, 60, step, (trained, optimizer.init(trained)))
        return finetuning.join(trained, frozen)

    @jax.jit
    def right(tree: Any) -> jax.Array:
        return jnp.mean(jnp.argmax(logits(tree, tree, others), -1) == 7)

    learned = learn(trained, frozen)
    assert (right(start), right(learned)) == (0, 1)
    for name in start:
        if name != what:
            assert_same_arrays(learned[name], start[name])


def test_backward_pass_keeps_weights_as_they_are_stored() -> None:
    """Of int8 and bfloat16 weights, no copies in the dtype of the activations."""
    params = random_like(shapes_of(rwkv7, config_of(rwkv7, hidden_size=48)))
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=2, dora=True)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for tree in (rwkv7.stacked(models.quantize(params)), narrow):

        def residuals(adapter: Any, tree: Any) -> Any:
            def run(adapter: Any) -> jax.Array:
                return rwkv7.hidden_states(finetuning.adapted(tree, adapter), TOKENS)[0]

            return jax.vjp(run, adapter)[1]

        kept = jax.tree.leaves(jax.eval_shape(residuals, adapter, tree))
        matrices = {(48, 48), (192, 48), (48, 192)}
        found = {str(x.dtype) for x in kept if x.shape[-2:] in matrices}
        assert found == {"bfloat16" if tree.head.scale is None else "int8"}


@pytest.mark.parametrize("base", ["bfloat16", "int8"])
def test_products(base: str) -> None:
    """Products of tokens are of bfloat16. No two of them sum over the same axes of one operand: on
    a GPU XLA would join the others, one of which is a matrix of the model, in a copy. The backward
    pass computes no gradient of tokens before that of the matrix that gave them, but for A of the
    output matrices, whose input it makes again."""
    params = random_like(shapes_of(rwkv7, config_of(rwkv7)))
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=2)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    params = models.quantize(params) if base == "int8" else params

    def run(adapter: Any) -> jax.Array:
        own = finetuning.adapted(params, adapter)
        return rwkv7.hidden_states(own, TOKENS, dtype=jnp.bfloat16)[0].astype(jnp.float32).sum()

    equations = {id(x): x for x in hlo.equations(jax.make_jaxpr(jax.grad(run))(adapter).jaxpr)}
    operands = [
        (v, axes)
        for x in equations.values()
        if x.primitive.name == "dot_general"
        and TOKENS.shape in {v.aval.shape[:2] for v in x.invars}
        for v, axes in zip(x.invars, x.params["dimension_numbers"][0], strict=True)
    ]
    assert {str(v.aval.dtype) for v, _ in operands} == {"bfloat16"}
    of_tokens = [x for x in operands if x[0].aval.shape[:2] == TOKENS.shape]
    assert len(of_tokens) == len({*of_tokens}) > 6 * len(adapter.matrices)
    together = [
        x
        for x in equations.values()
        if x.primitive.name == "optimization_barrier"
        and sorted(v.aval.ndim for v in x.outvars) == [2, 3]
    ]
    assert len(together) == 2 * (2 * len(adapter.matrices) - len(params.blocks))


def test_partition() -> None:
    """The first group that fits; what is frozen; and what is refused."""
    params = parameters(rwkv7)
    tree = {"params": params, "states": finetuning.initial_states(params)}
    groups = {
        "decays": "blocks.*.att.w0",
        "rest of block 1": ["params.blocks.1.*"],
        "s": "states.*",
    }
    labels = finetuning.labels(tree, groups)
    found = rwkv7.names(labels)
    assert found["params.blocks.1.att.w0"] == "decays"
    assert found["params.blocks.1.ffn.key.weight"] == "rest of block 1"
    assert (
        found["params.blocks.0.ffn.key.weight"] == found["params.emb.weight"] == finetuning.FROZEN
    )
    assert found["states.blocks.0.att.time_state"] == "s"
    rates = {"decays": 0.0, "rest of block 1": 1.0, "s": 2.0}
    kinds: Any = {group: optax.sgd(rate) for group, rate in rates.items()}
    optimizer = optax.multi_transform(kinds | {finetuning.FROZEN: optax.set_to_zero()}, labels)
    ones = jax.tree.map(jnp.ones_like, tree)
    updates = rwkv7.names(optimizer.update(ones, optimizer.init(tree), tree)[0])
    for name, x in updates.items():
        np.testing.assert_array_equal(x, -rates.get(found[name], 0.0))
    trained, frozen = finetuning.split(tree, labels)
    assert set(rwkv7.names(trained)) == {x for x in found if found[x] != finetuning.FROZEN}
    assert_same_arrays(finetuning.join(trained, frozen), tree)
    with pytest.raises(ValueError, match=r"'a' has 'x\.\*'; accepted are patterns of the names"):
        finetuning.labels(tree, {"a": "x.*"})
    with pytest.raises(ValueError, match=r"params\.blocks\.0.*is int8; accepted are floats"):
        finetuning.labels({"params": models.quantize(params)}, {"all": "*"})


@pytest.mark.parametrize("module", [rwkv7, rwkv5], ids=lambda x: x.__name__[-5:])
def test_states(tmp_path: Path, module: ModuleType) -> None:
    """From zeros or from a file, to a file that `load_state` reads; and averages."""
    params = parameters(module)
    zeros = finetuning.initial_states(params)
    rng = np.random.default_rng(0)
    states, others = (
        {name: jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for name, x in zeros.items()}
        for _ in range(2)
    )
    for tree in (params, module.stacked(params)):
        assert_same_arrays(finetuning.state_of(tree, zeros, 3), module.initial_state(tree, 3))
        path = tmp_path / "state.pth"
        models.save_state(path, finetuning.state_of(tree, states))
        loaded = models.load_state(path, tree, 2, dtype=jnp.bfloat16)
        assert_same_arrays(finetuning.state_of(tree, states, 2, dtype=jnp.bfloat16), loaded)
        again = finetuning.initial_states(tree, models.load_state(path, tree))
        assert_same_arrays(again, states)
    mean = finetuning.average([states, others], [3.0, 1.0])
    for name, x in mean.items():
        np.testing.assert_allclose(x, 0.75 * states[name] + 0.25 * others[name], rtol=1e-5)
    assert_same_arrays(finetuning.average([states, states]), states)
    name = "blocks.1.att.time_state"
    wrong = states | {name: states[name][:, :3]}
    missing = {other: x for other, x in states.items() if other != name}
    for call, message in (
        (lambda: finetuning.state_of(params, wrong), rf"{name} \[2, 3, 16\]; accepted is \[2, 16"),
        (lambda: finetuning.state_of(params, missing), f"{name} missing; accepted is"),
        (lambda: finetuning.average([states, missing]), rf"states\[1\] has {name} missing"),
        (lambda: finetuning.average([]), "states is empty"),
        (lambda: finetuning.average([states], [1.0, 2.0]), "weights has 2 numbers; accepted are 1"),
        (lambda: finetuning.average([states, others], [1.0, -1.0]), "the sum of weights is 0"),
        (lambda: finetuning.initial_states(parameters(rwkv4)), "params is of rwkv4; accepted is"),
        (
            lambda: finetuning.initial_states(params, module.initial_state(params, 2)),
            r"state has blocks\.0\.att\.time_state \[2, 2, 16, 16\]; accepted is \[1, 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


NAMES = {
    "hf": "model.blocks.1.att.key",
    "fla": "model.layers.1.attn.k_proj",
    "official": "blocks.1.att.key",
}


@pytest.mark.quick("dora")
@pytest.mark.parametrize(
    ("names", "dora"), [("hf", True), ("hf", False), ("fla", False), ("official", False)]
)
def test_files(tmp_path: Path, names: Any, dora: bool) -> None:
    """What was saved is read back bit for bit, with the names that PEFT looks for."""
    params = parameters(rwkv7)
    adapter = adapter_of(params, alpha=12.0, rslora=True, dropout=0.5, dora=dora)
    finetuning.save_adapter(tmp_path / "a", adapter, names=names, base="of/hub")
    assert_same_arrays(finetuning.load_adapter(tmp_path / "a", rwkv7.stacked(params)), adapter)
    found = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 4, "lora_alpha": 12.0, "use_rslora": True}
    expected["use_dora"] = dora
    assert found.items() >= (expected | {"base_model_name_or_path": "of/hub"}).items()
    assert NAMES[names] in found["target_modules"]
    tensors = files.read(tmp_path / "a" / "adapter_model.safetensors")
    low = adapter.matrices["blocks.1.att.key"]
    for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")[: 2 + dora]:
        x = tensors[f"base_model.model.{NAMES[names]}.{part}"]
        np.testing.assert_array_equal(x.array, getattr(low, part.removesuffix(".weight")))
    assert len(tensors) == 12 * (2 + dora)
    narrow = finetuning.load_adapter(tmp_path / "a", params, dtype=jnp.bfloat16)
    dtypes = [str(x.dtype) for x in jax.tree.leaves(narrow.matrices["blocks.1.att.key"])]
    assert dtypes == ["bfloat16", "bfloat16", "float32"][: 2 + dora]


def test_files_of_peft(tmp_path: Path) -> None:
    """PEFT merges an adapter of this package to the same matrices, and this package one of PEFT."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    params = parameters(rwkv7)

    def modules() -> Any:
        """The linear maps of the model as modules of PyTorch with the names of Hugging Face."""
        root = torch.nn.Module()
        for name, x in rwkv7.names(params).items():
            *path, last, _ = f"model.{name}".split(".") if x.ndim == 2 else ("",) * 3
            if last not in ("receptance", "key", "value", "output"):
                continue
            parent = root
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, torch.nn.Module())
                parent = getattr(parent, part)
            linear = torch.nn.Linear(*x.shape[::-1], bias=False)
            linear.weight.data = torch.tensor(np.asarray(x))
            parent.add_module(last, linear)
        root.prepare_inputs_for_generation = None  # what PEFT asks of a language model
        root.config = {}
        return root

    def assert_merged(model: Any, adapter: finetuning.Adapter) -> None:
        expected = model.merge_and_unload().state_dict()
        found = rwkv7.names(finetuning.merge(params, adapter))
        for name, x in expected.items():
            np.testing.assert_allclose(found[name.removeprefix("model.")], x, rtol=1e-6, atol=1e-6)

    for options in ({}, {"rslora": True}, {"dora": True}):
        adapter = adapter_of(params, **options)
        finetuning.save_adapter(tmp_path, adapter)
        assert_merged(peft.PeftModel.from_pretrained(modules(), tmp_path), adapter)
        own = {f"use_{name}": x for name, x in options.items()}
        config = peft.LoraConfig(r=3, target_modules=["att.key", "value"], **own)
        made = peft.get_peft_model(modules(), config)
        for name, x in made.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                torch.nn.init.normal_(x)
        made.save_pretrained(tmp_path / "peft")
        adapter = finetuning.load_adapter(tmp_path / "peft", params)
        assert len(adapter.matrices) == 6
        assert_merged(made, adapter)


def rewrite(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> None:
    """A folder of PEFT with some tensors, and a configuration with other values."""
    checkpoints.write_safetensors(folder / "adapter_model.safetensors", tensors)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_files_that_are_refused(tmp_path: Path) -> None:
    params = parameters(rwkv7)
    finetuning.save_adapter(tmp_path, adapter_of(params, targets=["blocks.0.att.key"]))
    first = np.zeros((4, 32), np.float32)
    name = "base_model.model.model.blocks.0.att.key.lora_"
    right = {f"{name}A.weight": first, f"{name}B.weight": first.T.copy()}
    other = {x.replace(".0.", ".7."): y for x, y in right.items()}
    large = {f"{name}A.weight": np.zeros((4, 48), np.float32)}
    for tensors, config, messages in (
        (right, {"peft_type": "LOHA"}, ["peft_type is 'LOHA'; accepted is LORA"]),
        (right, {"use_dora": 1}, ["use_dora is 1; accepted is true or false"]),
        (right, {"use_dora": True}, ["lora_magnitude_vector of blocks.0.att.key is missing;"]),
        (
            right | {f"{name}magnitude_vector": first[0]},
            {},
            ["lora_magnitude_vector of blocks.0.att.key is there; expected is none where use_dora"],
        ),
        (right, {"init_lora_weights": "pissa"}, ["init_lora_weights is 'pissa'; accepted is True"]),
        (right, {"bias": "all"}, ["bias is 'all'"]),
        (right, {"modules_to_save": ["head"]}, ["modules_to_save is ['head']"]),
        (right, {"rank_pattern": {"att": 2}}, ["rank_pattern is {'att': 2}"]),
        (right, {"lora_dropout": 2}, ["dropout is 2.0"]),
        (right | other, {}, ["2 tensors", "blocks.7.att.key.lora_A.weight' is [4, 32]; no matrix"]),
        (right | large, {}, ["lora_A of blocks.0.att.key is [4, 48]; expected is [4, 32]"]),
        (
            right,
            {"r": 8},
            ["of rank 8", "lora_B of blocks.0.att.key is [32, 4]; expected is [32, 8]"],
        ),
        (large, {}, ["lora_B of blocks.0.att.key is missing; expected is [32, 4]"]),
        ({"head.weight": first}, {}, ["'head.weight' is [4, 32]; no matrix"]),
    ):
        folder = tmp_path / "wrong"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text((tmp_path / "adapter_config.json").read_text())
        rewrite(folder, tensors, **config)
        with pytest.raises(ValueError, match=str(folder)) as error:
            finetuning.load_adapter(folder, params)
        for message in messages:
            assert message in str(error.value)
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json"):
        finetuning.load_adapter(tmp_path / "none", params)


@pytest.mark.usefixtures("unchecked_types")
def test_calls_that_are_refused(tmp_path: Path) -> None:
    params = parameters(rwkv7)
    adapter = adapter_of(params, targets=["blocks.1.att.key"])
    with_adapter = finetuning.adapted(params, adapter)
    wide = {"blocks.1.att.key": finetuning.LowRank(jnp.ones((4, 48)), jnp.ones((32, 4)))}
    stacked = rwkv7.stacked(random_like(shapes_of(rwkv7, config_of(rwkv7, num_layers=3))))
    init = functools.partial(finetuning.init_adapter, jax.random.key(0), params)
    for call, message in (
        (
            lambda: init(targets=["att.gate"]),
            r"'att\.gate'; accepted are patterns of blocks\.0\.att",
        ),
        (lambda: init(targets=["w1"]), "targets has 'w1'"),
        (lambda: init(targets=[]), "targets is empty"),
        (lambda: init(rank=0), "rank is 0; accepted is an integer from 1"),
        (lambda: init(dropout=1.0), "dropout is 1.0; accepted are numbers from 0 to below 1"),
        (lambda: finetuning.adapted(with_adapter, adapter), "params has an adapter; accepted"),
        (
            lambda: finetuning.adapted(parameters(rwkv6), finetuning.Adapter(wide, 1.0)),
            r"\[4, 48\]",
        ),
        (lambda: finetuning.adapted(stacked, adapter), "has 1 of the 2 matrices that blocks.rest"),
        (lambda: finetuning.merge(models.quantize(params), adapter), "key is int8; accepted are"),
        (lambda: finetuning.save_adapter(tmp_path / "a.pth", adapter), "accepted is a folder"),
        (
            lambda: models.save(tmp_path / "x.pth", with_adapter),
            "lora_A is of an adapter; accepted",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="init_adapter: params is a dict; accepted is a Params"):
        finetuning.init_adapter(jax.random.key(0), {})
    with pytest.raises(TypeError, match="init_adapter: params are shapes; accepted for dora are"):
        finetuning.init_adapter(jax.random.key(0), shapes_of(rwkv7, config_of(rwkv7)), dora=True)
    with pytest.raises(TypeError, match="merge: adapter is a Params; accepted is an Adapter"):
        finetuning.merge(params, params)


def test_other_functions_of_models() -> None:
    """An adapted model is placed, quantised and decoded like its base, but not by fused blocks."""
    params = parameters(rwkv7)
    tree = finetuning.adapted(params, adapter_of(params))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    places = rwkv7.names(rwkv7.shardings(tree, mesh, data="data", model="model"))
    assert places["blocks.0.att.key.base.weight"].spec == P("model", "data")
    assert places["blocks.0.ffn.value.base.weight"].spec == P("data", "model")
    small = models.quantize(params)
    assert_same_arrays(models.quantize(tree), finetuning.adapted(small, adapter_of(params)))
    with pytest.raises(
        NotImplementedError, match=r"att\.receptance\.weight is stored in another way"
    ):
        rwkv7.apply(tree, TOKENS[:, 0], kernels="fused")


def test_command(tmp_path: Path, command: Command) -> None:
    """`rwkv-jax merge` writes what `merge` gives."""
    model = checkpoints.write_model(tmp_path, dtype="bfloat16")
    params = models.load(model, dtype=jnp.float32).params
    adapter = adapter_of(params)
    finetuning.save_adapter(tmp_path / "adapter", adapter)
    given = (model, tmp_path / "adapter", tmp_path / "merged.pth", "--dtype", "float32")
    assert command("merge", *given).out.startswith(f"{given[2]}: RWKV-7, 12 matrices with an ad")
    assert_same_arrays(models.load(given[2]).params, finetuning.merge(params, adapter))
    error = command.refused("merge", *given)
    assert error == f"rwkv-jax merge: {given[2]} exists; --force replaces it\n"
    error = command.refused("merge", model, tmp_path, tmp_path / "other.pth")
    assert error == f"rwkv-jax merge: {tmp_path}/adapter_config.json: No such file or directory\n"


def test_a_file_of_rwkv_peft(tmp_path: Path, command: Command) -> None:
    """Merged as its own script does it: alpha / rank, and what was trained beside the adapter in
    place of what the model has."""
    model = checkpoints.write_model(tmp_path)
    params = models.load(model).params
    adapter = adapter_of(params, targets=["att.key"])
    file, merged = tmp_path / "rwkv-0.pth", tmp_path / "merged.pth"
    beside = {"ln_out.bias": np.ones(24, np.float32), "blocks.1.att.x_r": np.ones((1, 1, 24))}
    tensors = {name: x.astype(np.float32) for name, x in beside.items()}
    for name, low in adapter.matrices.items():
        tensors |= {f"{name}.lora_{x}": np.asarray(y) for x, y in zip("AB", low[:2], strict=True)}
    checkpoints.write_pth(file, tensors)
    command("merge", model, file, merged, "--lora-alpha", 8)
    found = rwkv7.names(models.load(merged).params)
    expected = rwkv7.names(finetuning.merge(params, adapter))
    for name, x in (expected | {name: y.reshape(-1) for name, y in beside.items()}).items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    error = command.refused("merge", model, file, tmp_path / "other.pth")
    assert "--lora-alpha is None; accepted is a file of RWKV-PEFT with --lora-alpha" in error
    with pytest.raises(ValueError, match=r"is a file; .*`rwkv-jax merge MODEL FILE OUT --lora-al"):
        finetuning.load_adapter(file, params)
    wrong = {"ln_out.bias": np.ones(3, np.float32), "head.x": np.ones(1, np.float32)}
    checkpoints.write_pth(
        file, {**tensors, "blocks.0.att.key.lora_A": np.ones((3, 24), np.float32), **wrong}
    )
    error = command.refused("merge", model, file, tmp_path / "other.pth", "--lora-alpha", 8)
    for message in (
        "lora_B of blocks.0.att.key is [24, 4]; expected is [24, 3]",
        "'ln_out.bias' is [3]; expected is [24]",
        "'head.x' is [1]; no parameter of floats has this name",
    ):
        assert message in error
