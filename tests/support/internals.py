"""The private names of the package that tests know, all in this one place."""

import dataclasses
import functools
import importlib
import math
import sys
import types
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rwkv_jax._devices import sequence as over_devices
from rwkv_jax._native import gpus as gpus
from rwkv_jax._native import kernels, library, packing
from rwkv_jax._operator import dispatch
from rwkv_jax._operator.call import CHUNK as CHUNK
from rwkv_jax._operator.call import Arrays, Backward, Forward, Marks, Options, Sequences
from rwkv_jax._operator.dispatch import in_program_of_one_device as in_program_of_one_device
from rwkv_jax._operator.implementation import Implementation, Transition
from rwkv_jax._operator.operator import PUBLIC, Operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable import chain, inverses, products
from rwkv_jax._portable import decay as decays
from rwkv_jax.generation import _decoding, _sampling, _session
from rwkv_jax.layers import _function as layers
from rwkv_jax.losses import _native as of_losses
from rwkv_jax.models import Kernels, _row_product
from rwkv_jax.models._deferral import MAX_PENDING as MAX_PENDING
from rwkv_jax.models._deferral import at_step as at_step
from rwkv_jax.models._deferral import flush as flush
from rwkv_jax.models.rwkv7 import block_step

CONTINUES, STARTS, PADDING = segments.CONTINUES, segments.STARTS, segments.PADDING
"""The marks of a token."""

feed_forward, low_rank, norm_shift_mix, wkv7_keys, keyed_wkv7, value_residual, read_out = (
    # The package has a function of each of these names.
    importlib.import_module(f"rwkv_jax.layers.{name}")
    for name in (
        *("feed_forward", "low_rank", "norm_shift_mix"),
        *("wkv7_keys", "keyed_wkv7", "value_residual", "read_out"),
    )
)
projected_read_out, low_rank_maps = (
    importlib.import_module(f"rwkv_jax.layers.{name}")
    for name in ("projected_read_out", "low_rank_maps")
)

TILE = 16
"""The fewest tokens that CUDA kernels on matrix units take."""

LONG_SEQUENCE = packing.LONG
"""Tokens for each sequence from which on native kernels take the longest sequences first."""


def operator(op: str) -> Operator:
    """The package's own account of an operator, by the name of a public function: "wkv7" or
    "wkv7_step"."""
    return next(found for function, found in PUBLIC.items() if function.__name__ == op)


def signature(op: str) -> Signature:
    return operator(op).signature


def implementation(op: str, name: str) -> Implementation:
    return operator(op).imported(name)


def axes_of_arguments(op: str) -> Mapping[str, str]:
    """The axis letters of the arguments of an operator, by name."""
    return signature(op).arguments(token=op.endswith("_step"))


def axes_of_sequences(op: str) -> Mapping[str, str]:
    """The axis letters of the arguments with `cu_seqlens`."""
    return signature(op).arguments(sequences=True)


def axes_of_results(op: str) -> Mapping[str, str]:
    """The axis letters of `y` and of the final state."""
    own = signature(op)
    return {"y": own.inputs[own.y]} | {f"final_{n}": axes for n, axes in own.state.items()}


def axes_of_state(op: str) -> Mapping[str, str]:
    """The axis letters of the parts of the state."""
    return signature(op).state


def transition(op: str) -> Transition:
    """The transitions of an operator: axes, combine, apply."""
    return operator(op).transition


def state_of(op: str, arrays: Mapping[str, Any], form: str = "initial_{}") -> Arrays:
    """The parts of a state, out of arrays that are named as arguments, results or cotangents."""
    return {part: jnp.asarray(arrays[form.format(part)]) for part in signature(op).state}


def inputs_of(op: str, arrays: Mapping[str, Any]) -> Arrays:
    """The inputs of an implementation: parameters stand once for each row, in float32."""
    own = signature(op)
    batch = next(len(arrays[name]) for name in own.per_token)
    inputs = {name: jnp.asarray(arrays[name]) for name in own.inputs}
    for name in own.shared:
        inputs[name] = jnp.repeat(inputs[name][None].astype(jnp.float32), batch, axis=0)
    return inputs


def options_of(
    op: str, *, decay: str, implementation: str | None, precision: Any, save: bool = False
) -> Options:
    options = operator(op).options(decay, precision, implementation, token=False)
    return dataclasses.replace(options, save=save)


def forward_operands(
    op: str, arrays: Mapping[str, Any], packing: Marks | Sequences | None = None
) -> Forward:
    """The operands of the forward pass, out of arrays that are named as arguments."""
    return Forward(inputs_of(op, arrays), state_of(op, arrays), packing)


def backward_operands(
    op: str,
    arrays: Mapping[str, Any],
    states: Arrays,
    cotangents: Mapping[str, Any],
    packing: Marks | Sequences | None = None,
) -> Backward:
    """The operands of the backward pass, out of arrays that are named as arguments and results."""
    dstate = state_of(op, cotangents, "dfinal_{}")
    return Backward(inputs_of(op, arrays), states, jnp.asarray(cotangents["dy"]), dstate, packing)


def step_operands(op: str, arrays: Mapping[str, Any]) -> Forward:
    """The operands of a step of a sequence's operator, out of arrays that are named as arguments of
    the step."""
    return Forward(inputs_of(op, arrays), state_of(op, arrays, "{}"))


def marks_of(segment_ids: Any) -> Marks:
    """The packing that implementations get for `segment_ids`."""
    return Marks(segments.marks(jnp.asarray(segment_ids)))


def run_pass(op: str, name: str, operands: Any, **options: Any) -> Any:
    """A pass of an operator, such as "transition", for options as `options_of` takes them."""
    run: Any = dispatch.run
    return run(operator(op), name, options_of(op, **options), operands)


def run_native_pass(op: str, name: str, platform: str, operands: Any, **options: Any) -> Any:
    """As `run_pass`, but on the native kernels of a platform whatever the operands are, and without
    rules of batching and partition."""
    chosen = options_of(op, implementation="ffi", **options)
    return getattr(implementation(op, "ffi"), name)(chosen, platform, operands)


def targets(op: str, *passes: str) -> set[str]:
    """The native targets for passes of an operator: "fwd", "bwd", "step", "transition" or
    "reverse_transition"."""
    return {f"rwkv_{op}_{name}_v2" for name in passes}


def other_targets(platform: str = "cuda") -> set[str]:
    """The native targets of forms of WKV7, layer functions and losses, which are for CUDA, and of
    models."""
    if platform == "cpu":
        return {_row_product.TARGET}
    functions = (
        *(norm_shift_mix._function(mixes, has_origin=False) for mixes in norm_shift_mix.MIXES),
        *(module.FUNCTION for module in (wkv7_keys, value_residual, read_out)),
        projected_read_out.RESTORING,
    )
    of_layers = {target for function in functions for target in function.targets}
    of_forms = {*keyed_wkv7.TARGETS.values()}
    for op in ("gated_delta_rule", "kimi_delta_attention"):
        of_forms |= {f"rwkv_{op}_{name}_v1" for name in ("fwd", "bwd", "step")}
    of_products = {*feed_forward.TARGETS.values(), *low_rank.TARGETS.values(), low_rank_maps.TARGET}
    losses = {of_losses.OF_LOGITS, of_losses.OF_HIDDEN_STATES}
    return of_layers | of_forms | of_products | losses | {*block_step.TARGETS}


def layer_constants() -> dict[str, float]:
    """The constants that the native code of layer functions shares with Python, by its names, as
    Python has them."""
    return {
        "run": layers.RUN,
        "max_width": norm_shift_mix.MAX_WIDTH,
        "max_mixes": max(norm_shift_mix.MIXES),
        "layer_norm_eps": norm_shift_mix.LAYER_NORM_EPS,
        "group_norm_eps": read_out.GROUP_NORM_EPS,
        "unit_length_eps": wkv7_keys.UNIT_LENGTH_EPS,
        "origin_token": norm_shift_mix.TOKEN,
        "origin_nothing": norm_shift_mix.NOTHING,
        "origin_state": norm_shift_mix.STATE,
    }


def missing(platform: str) -> str | None:
    """Why a platform has no native kernels, or None where it has them."""
    return library.MISSING.get(platform)


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str, reason: str | None) -> None:
    """The native module of a platform is missing for a reason, or is there, so that programs can be
    lowered for it."""
    if reason is None and missing(platform) is not None:
        module = types.ModuleType(library.MODULES[platform])
        vars(module).update(
            scratch=lambda *_, **__: 0,
            device=lambda ordinal: None,
            plan=_plan,
            block_scratch=lambda **_: 0,
            has_transition=lambda *_, **__: False,
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(library.MISSING, platform, reason)
    jax.clear_caches()


def _plan(op: str, name: str, **problem: int) -> dict[str, Any]:
    """The plan of a large GPU, as far as operators with heads are concerned."""
    sizes = {problem["head_size"], problem["value_size"]}
    suits = problem["dtype"] != kernels.DTYPES["float32"] and problem["tokens"] >= TILE
    if op == "wkv7":
        suits &= all(16 <= size <= 128 and size % 8 == 0 for size in sizes)
    else:
        suits &= sizes in ({64}, {128})
    return {"why": "" if suits else "it has few tokens, float32, or other heads"}


def native_module(platform: str) -> Any:
    """The native module of a platform, which is there."""
    return library.module(platform)


def constants_of_python(platform: str) -> dict[str, float]:
    """The constants that a native module shares with Python, by its names, as Python has them."""
    sizes = kernels.HEAD_SIZES[platform]
    short, long = (
        packing.spans(jnp.zeros((1, 2), jnp.int32), tokens)[0].shape[1]
        for tokens in (1, packing.LONG)
    )
    kinds = {"none": type(None), "marks": Marks, "sequences": Sequences}
    return {
        "chunk": CHUNK,
        "tile": TILE,
        "word_tokens": packing.WORD,
        "min_head_size": min(sizes),
        "max_head_size": max(sizes),
        "min_log_decay": decays.MIN_LOG_DECAY,
        "sigmoid_scale": decays.SIGMOID_SCALE,
        "max_log_rate": math.log(decays.LARGEST_RATE),
        "span_words": short,
        "span_words_in_turn": long,
        **{f"decay_{name}": code for name, code in kernels.DECAYS.items()},
        **{f"dtype_{name}": code for name, code in kernels.DTYPES.items()},
        **{f"packing_{name}": kernels.PACKINGS[kind] for name, kind in kinds.items()},
    }


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, multiprocessors: int, shared_memory: int) -> None:
    """The first GPU has so many multiprocessors, and so many bytes of shared memory for a block."""
    module = native_module("cuda")
    gpus = {0: (multiprocessors, shared_memory)}
    monkeypatch.setattr(module, "device", gpus.get)


def pretend_scratch(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """CUDA kernels have scratch for one split of each sequence, and for this share of the others
    that the first GPU would have. They run in as many splits as there is scratch for."""
    module = native_module("cuda")
    multiprocessors, shared_memory = module.device(0)

    def scratch(platform: str, op: str, name: str, **problem: int) -> int:
        least, most = (
            module.plan(op, name, multiprocessors=n, shared_memory=shared_memory, **problem)
            for n in (1, multiprocessors)
        )
        return least["scratch"] + int(share * (most["scratch"] - least["scratch"]))

    monkeypatch.setattr(library, "scratch", scratch)
    jax.clear_caches()


def load_native(platform: str, module: str) -> str | None:
    """Register the targets of a native module; the reason where that is impossible."""
    return library._load(platform, module)


def cuda_module_of(monkeypatch: pytest.MonkeyPatch, installed: Collection[str]) -> str:
    """The module with the CUDA kernels, if these modules are installed."""
    monkeypatch.setattr(library, "_is_installed", lambda name: name in installed)
    return library._cuda_module()


def fail_to_import(monkeypatch: pytest.MonkeyPatch, fail: Any) -> None:
    """`fail` is called in place of the import of a native module."""
    monkeypatch.setattr(library.importlib, "import_module", fail)


def intercept_native_calls(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    """`call(target, results, *operands, aliases=None, **attributes)` takes the place of every call
    into native code. Returns what it has replaced."""
    through = library.call
    monkeypatch.setattr(library, "call", call)
    return through


def run_as_on_cuda(monkeypatch: pytest.MonkeyPatch, module: Any, call: Any) -> None:
    """Programs for a CPU are lowered as for CUDA, with `module` in place of the native module of
    CUDA and `call` as in `intercept_native_calls`."""
    intercept_native_calls(monkeypatch, call)
    monkeypatch.setattr(library, "module", lambda platform: module)
    monkeypatch.setitem(library.MISSING, "cuda", None)
    monkeypatch.setitem(library.MISSING, "cpu", "its kernels are left to other tests")
    monkeypatch.setattr(gpus, "why_not_hopper", lambda: None)
    monkeypatch.setitem(dispatch.LOWERED_AS, "cpu", "cuda")
    # Not traced once for all devices, which differ here.
    monkeypatch.setattr(dispatch, "run", dispatch.compute)


def step_block(params: Any, x: Any, v_first: Any, state: Any, segment_ids: Any = None) -> Any:
    """The step of a whole block by its kernels, without rules of differentiation and batching."""
    operands = params._replace(ln0=None), x, v_first, state, segment_ids
    options = Options(implementation="fused")
    block = block_step._fused(None, operands[0], v_first, state)
    return block_step.compute(block, "step", options, operands)


def lowered_decoding(
    module: Any,
    params: Any,
    rows: int,
    dtype: Any,
    kernels: Kernels | None = None,
    defers: bool = True,
) -> str:
    """The loop over tokens of `rwkv_jax.generation`, lowered for CUDA."""
    jax.clear_caches()
    model = _session.Model(module, jnp.dtype(dtype), kernels or Kernels())
    session = jax.eval_shape(functools.partial(_session.started, model, batch=rows), params)
    vocabulary = len(params.head.weight)
    controls = _decoding.Controls(
        _sampling.settings(_sampling.Sampling(), rows, vocabulary),
        jnp.zeros((rows, vocabulary), bool),
    )
    left = jnp.ones(rows, jnp.int32)
    traced = _decoding.decode.trace(
        *(model, params, session, controls, left, jnp.int32(2), jnp.int32(1)), defers=defers
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def deferred(params: Any, state: Any) -> Any:
    """The state of a model, each block with an update that may be deferred, for few rows, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_step, "LEAST_DEFERRED", 0)
        patch.setattr(block_step, "_prefers_kernels", lambda *_: True)
        return tuple(block_step.deferred(p, s) for p, s in zip(params.blocks, state, strict=True))


def run_blocks_as_on_cuda(monkeypatch: pytest.MonkeyPatch, module: Any, call: Any) -> None:
    """The step of a whole block runs as it would on a GPU, with `module` and `call` as in
    `run_as_on_cuda`, and all else as it would anyway."""
    through = library.call

    def run(block: Any, name: Any, options: Options, operands: Any) -> Any:
        assert block.why_no_kernel(name, options, operands) is None
        return block.kernel(name, options, operands)

    def call_either(target: str, *operands: Any, **more: Any) -> Any:
        return (call if target in block_step.TARGETS else through)(target, *operands, **more)

    monkeypatch.setattr(library, "call", call_either)
    monkeypatch.setattr(library, "block_scratch", module.block_scratch)
    monkeypatch.setattr(block_step, "compute", run)


def take_longest_first(monkeypatch: pytest.MonkeyPatch, longest_first: bool) -> None:
    """Native kernels take the longest sequences first, or all sequences as they come."""
    monkeypatch.setattr(packing, "LONG", 0 if longest_first else 1 << 30)


def split_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a sequence over devices are split on each device from 128 tokens on."""
    monkeypatch.setattr(over_devices, "SPLIT_TOKENS", CHUNK)
    monkeypatch.setattr(over_devices, "ENOUGH_HEADS", 1 << 30)


def pallas_lowering() -> Any:
    """The module with the platforms and the interpreter of the Pallas kernels."""
    return importlib.import_module("rwkv_jax._pallas.lowering")


def interpret_pallas(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Run the Pallas kernels of a platform by the interpreter."""
    monkeypatch.setattr(pallas_lowering(), "INTERPRET", platform)
    jax.clear_caches()


def why_not_pallas(
    monkeypatch: pytest.MonkeyPatch, inputs: Mapping[str, Any], missing: str, platform: str
) -> str | None:
    """The reason of the Pallas kernels of WKV7 not to run where JAX lacks a module."""
    package, _, module = missing.rpartition(".")
    monkeypatch.delattr(importlib.import_module(package), module, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [n for n in sys.modules if n.startswith("rwkv_jax._pallas.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rwkv_jax.wkv7.pallas", raising=False)
    options = options_of("wkv7", decay="log", implementation=None, precision=None)
    operands = Forward(dict(inputs), {})
    return operator("wkv7").why_not("forward", "pallas", options, platform, operands)


def unroll_wkv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let WKV4 in plain XLA run on a CPU as it runs on other platforms."""
    module = importlib.import_module("rwkv_jax.wkv4.xla")
    monkeypatch.setattr(module, "_as_the_platform_needs", lambda run, operands: run(True, operands))
    jax.clear_caches()


def use_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the products of `xla` run on a CPU as they run on other platforms."""

    def on_any_platform(self: Any, compute: Any, options: Options, operands: Any, **_: Any) -> Any:
        return compute(options, operands, *self._on_matrix_units(options, operands))

    monkeypatch.setattr(chain.Chain, "_on_any_platform", on_any_platform)
    jax.clear_caches()


def inverse_of_sub_chunk(x: Any, *, minimize_flops: bool) -> Any:
    """What `xla` solves a sub-chunk with, with the fewest multiplications or on matrix units."""
    product = products.Products(jnp.float32, jax.lax.Precision.HIGHEST, minimize_flops)
    return inverses.inverse(product, x)
