"""Which implementation runs, what is said where one cannot, and what an installation reports."""

import functools
import os
import re
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import core

import rwkv_jax
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import rwkv7
from support import cases, hlo, internals, layer_functions
from support.cases import Case
from support.harness import operands, results, value_and_gradients
from support.models import shapes_of
from support.operators import OPERATORS, SEQUENCES, STEPS, Run, available
from support.tolerance import assert_trees_close

pytestmark = pytest.mark.quick("op", "platform", "implementation")

CASE = Case(2, 16, 2, 32)
PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
NATIVE = "ffi" in available("wkv7", CASE)

each_operator = pytest.mark.parametrize("op", OPERATORS)
ALIKE = ("wkv5", "wkv6")
"""Operators whose dispatch is that of the others; slow."""


def _targets(op: str) -> set[str]:
    return internals.targets(op, "fwd", "bwd")


def _lowered(implementation: str | None, platform: str, case: Case = CASE, op: str = "wkv7") -> str:
    with hlo.device(platform):
        traced = value_and_gradients.trace(Run(op, implementation), *operands(op, case))
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("op", "implementation"),
    [
        pytest.param(op, name, marks=[pytest.mark.slow] * (name == "xla" or op in ALIKE))
        for op in OPERATORS
        for name in (None, *available(op, CASE))
        if op in STEPS or name in (None, "ffi", "xla")
    ],
)
def test_what_is_compiled_here(op: str, implementation: str | None) -> None:
    run, native = Run(op, implementation), NATIVE and implementation in (None, "ffi")
    if op in SEQUENCES:
        compiled = value_and_gradients.lower(run, *operands(op, CASE)).compile()
        targets = _targets(op)
    else:
        inputs, _ = operands(op, Case(2, 1, 2, 32))
        compiled = jax.jit(lambda xs: results(run, **xs)).lower(inputs).compile()
        targets = internals.targets(op.removesuffix("_step"), "step")
    assert hlo.targets(compiled.as_text()) == (targets if native else set())


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[pytest.mark.slow] * (op in ALIKE)) for op in SEQUENCES]
)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_platform_is_that_of_the_lowering(platform: str, op: str, pretend: Any) -> None:
    """Not that of the default device: a program for another machine is lowered here."""
    pretend("cpu", None)
    pretend("cuda", None)
    assert hlo.targets(_lowered(None, platform, op=op)) == _targets(op)
    assert hlo.targets(_lowered("ffi", platform, op=op)) == _targets(op)


def _trace_ffi(case: Case) -> None:
    native = functools.partial(rwkv_jax.wkv7, decay="sigmoid", implementation="ffi")
    jax.eval_shape(lambda inputs: native(**inputs), cases.wkv7(case)[0])


def test_a_refusal_while_tracing_says_each_reason_once(pretend: Any) -> None:
    pretend("cpu", "on holiday")
    pretend("cuda", "on holiday")
    with pytest.raises(NotImplementedError) as error:
        _trace_ffi(CASE)
    assert str(error.value) == (
        "wkv7: implementation 'ffi' cannot run this call on cpu, cuda: on holiday; "
        "on tpu, others: native kernels exist for CPUs and for CUDA GPUs"
    )


@pytest.mark.parametrize(
    "op",
    [
        *("wkv7_step", "read_out", "cross_entropy"),
        *(pytest.param(op, marks=pytest.mark.slow) for op in ("wkv7", "wkv4")),
    ],
)
def test_within_compile_time_evaluation(op: str) -> None:
    """Where JAX evaluates what depends on no operand while it traces: results and gradients."""
    call: Any
    if op == "cross_entropy":
        x = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
        call, inputs = cross_entropy, {"hidden_states": x, "weight": x, "targets": np.arange(3)}
    elif op in OPERATORS:
        call = functools.partial(OPERATORS[op].function, decay=OPERATORS[op].decays[-1])
        inputs, _ = OPERATORS[op].make(Case(1, 1 if op in STEPS else 3, 1, 16))
    else:
        call = layer_functions.LAYER_FUNCTIONS[op].call
        inputs, _ = layer_functions.operands(op, layer_functions.Case(B=1, T=3))
    first = next(iter(inputs))

    def total(x: Any) -> jax.Array:
        leaves = jax.tree.leaves(call(**inputs | {first: x}))
        return sum((jnp.sum(x) for x in leaves), jnp.float32(0))

    x = jnp.asarray(inputs[first])
    expected = jax.jit(jax.value_and_grad(total))(x)

    def program(zero: jax.Array) -> Any:
        with jax.ensure_compile_time_eval():
            constants = jax.value_and_grad(total)(x)
        assert not any(isinstance(y, core.Tracer) for y in constants)
        return jax.tree.map(lambda y: y + zero, constants)

    assert_trees_close(jax.jit(program)(jnp.float32(0)), expected, 1e-6)


def test_pallas_within_compile_time_evaluation() -> None:
    inputs, _ = cases.wkv7(CASE)
    message = r"on cuda, tpu: JAX traces no Pallas kernel within jax\.ensure_compile_time_eval"
    with (
        jax.ensure_compile_time_eval(),
        hlo.device("cuda"),
        pytest.raises(NotImplementedError, match=message),
    ):
        rwkv_jax.wkv7(**inputs, decay="sigmoid", implementation="pallas")


@pytest.mark.parametrize(
    ("platform", "op"),
    [
        *(("cpu", "wkv7"), ("cuda", "wkv7"), ("tpu", "wkv7")),
        *(("rocm", "wkv7"), ("rocm", "wkv6"), ("rocm", "wkv4")),
    ],
)
def test_without_native_kernels(platform: str, op: str, pretend: Any) -> None:
    reason = "native kernels exist for CPUs and for CUDA GPUs"
    if platform in ("cpu", "cuda"):
        pretend(platform, "the kernels are on holiday")
        reason = f"{platform}.*the kernels are on holiday"
    else:
        pretend("cpu", None)  # so that only the platform is at fault
    lowered = _lowered(None, platform, op=op)
    assert hlo.targets(lowered) == set()
    # For CUDA there are kernels of Pallas.
    assert platform == "cuda" or "custom_call @" not in lowered
    with pytest.raises(NotImplementedError, match=reason):
        _lowered("ffi", platform, op=op)


@pytest.mark.slow
def test_a_training_step_on_rocm() -> None:
    """Operator, layer functions and loss: XLA's own operations, without any kernel."""
    config = rwkv7.Config(num_layers=2, hidden_size=64, head_size=32, vocab_size=256)
    params = shapes_of(rwkv7, config)

    def loss(params: rwkv7.Params, tokens: jax.Array) -> jax.Array:
        hidden_states, _ = rwkv7.hidden_states(params, tokens, dtype=jnp.bfloat16)
        return cross_entropy(hidden_states, params.head.weight, tokens)

    tokens = jax.ShapeDtypeStruct((2, 17), jnp.int32)
    traced = jax.jit(jax.value_and_grad(loss)).trace(params, tokens)
    assert "custom_call @" not in traced.lower(lowering_platforms=("rocm",)).as_text()


@pytest.mark.parametrize("case", cases.GENERAL, ids=str)
def test_head_sizes_without_native_kernels_run_on_xla(case: Case) -> None:
    assert hlo.targets(_lowered(None, PLATFORM, case)) == set()
    reason = rwkv_jax.implementations("wkv7", *cases.wkv7(case)[0].values())["ffi"].reason
    assert reason is not None
    if NATIVE:
        assert f"K = {case.K} and V = {case.values}" in reason
    with pytest.raises(NotImplementedError, match="wkv7: implementation 'ffi' cannot run"):
        _trace_ffi(case)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_native_kernels_take_these(platform: str, dtype: str, size: int, pretend: Any) -> None:
    """So that a case that a kernel should have is never left out of the other tests unnoticed."""
    pretend(platform, None)
    for op in OPERATORS:
        tokens = 1 if op in STEPS else 5
        assert "ffi" in available(op, Case(1, tokens, 1, size, dtype=dtype), platform), op


@each_operator
def test_implementations(op: str) -> None:
    operator = OPERATORS[op]
    inputs, _ = operator.make(Case(2, 1, 2, 32))
    result = rwkv_jax.implementations(
        op, *inputs.values(), decay=operator.decays[-1], precision="highest"
    )
    native = {"ffi": internals.missing(PLATFORM)}
    reason = None if PLATFORM == "cuda" else "pallas kernels exist for CUDA GPUs and for TPUs"
    pallas = {} if op.startswith("wkv4") else {"pallas": reason}
    reasons = native | pallas | {"xla": None, "reference": None}
    assert {name: x.reason for name, x in result.items()} == reasons
    for found in result.values():
        assert found.available == (found.reason is None) == (found.description is not None)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs.values()]
    options = {"decay": operator.decays[-1], "precision": "highest"}
    assert rwkv_jax.implementations(op, *shapes, **options) == result
    assert rwkv_jax.implementations(op, *shapes[: len(operator.inputs)], **options) == result

    tpu, gpu, cuda = (
        rwkv_jax.implementations(op, *shapes, platform=platform)
        for platform in ("tpu", "gpu", "cuda")
    )
    assert tpu["reference"].description == "lax.scan, one token at a time in float32"
    assert tpu["xla"].description == "chunks in plain jax.numpy"
    assert tpu["ffi"].reason == "native kernels exist for CPUs and for CUDA GPUs"
    assert gpu == cuda


@each_operator
@pytest.mark.usefixtures("unchecked_types")
def test_implementations_refuses(op: str) -> None:
    inputs, _ = OPERATORS[op].make(CASE)
    operands = tuple(inputs.values())
    with pytest.raises(ValueError, match="op is 'wkv9'; accepted are"):
        rwkv_jax.implementations("wkv9", *operands)
    for wrong in (operands[0].tolist(), None):
        message = f"{op}: .* is a {type(wrong).__name__}; accepted is a JAX or numpy array"
        with pytest.raises(TypeError, match=message):
            rwkv_jax.implementations(op, wrong, *operands[1:])
    with pytest.raises(TypeError, match="platform is 3; accepted are a name and None"):
        rwkv_jax.implementations(op, *operands, platform=3)  # pyright: ignore[reportArgumentType]
    names = ", ".join(OPERATORS[op].inputs)
    with pytest.raises(ValueError, match=f"takes the operands {names}, "):
        rwkv_jax.implementations(op, *operands[:3])
    with pytest.raises(ValueError, match=f"{len(operands) + 1} were given"):
        rwkv_jax.implementations(op, *operands, operands[-1])
    with pytest.raises(ValueError, match=f"{op}: k has shape"):
        rwkv_jax.implementations(op, *operands[:2], operands[2][0], *operands[3:])
    if op in STEPS:
        with pytest.raises(ValueError, match=f"{op} takes neither segment_ids nor cu_seqlens"):
            rwkv_jax.implementations(op, *operands, segment_ids=np.ones(2, np.int32))


def test_build_info() -> None:
    info = rwkv_jax.build_info()
    assert set(info) == {"cxx", "cpu_isas", "cuda_compiler", "cuda_archs", "missing"}
    assert set(info["missing"]) == {"cpu", "cuda"}
    if info["missing"]["cpu"] is None:
        assert info["cxx"]
        assert info["cpu_isas"]
    if info["missing"]["cuda"] is None:
        assert info["cuda_compiler"]
        assert info["cuda_archs"]
    else:
        assert "cuda" in info["missing"]["cuda"].lower()


def _installed(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def test_modules_for_other_versions_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for an older version is registered, and one for a newer version is not: a handler that is
    too new breaks every later computation."""
    registered = []

    def load(*version: int) -> str | None:
        contents: dict[str, Any] = {"ffi_version": lambda: version}
        contents["registrations"] = lambda: registered.append(version) or {}
        _installed(monkeypatch, "rwkv_jax._fake", **contents)
        return internals.load_native("cpu", "rwkv_jax._fake")

    assert load(0, 1) is None
    reason = load(99, 1) or ""
    assert "rwkv_jax._fake was built for XLA FFI 99.1 and this jaxlib speaks 0." in reason
    assert "upgrade jax" in reason
    assert registered == [(0, 1)]


def test_modules_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was not built, one of another version, and one that cannot be linked. Of another
    version not even its version of the XLA FFI is asked for."""
    for platform in ("cpu", "cuda"):
        reason = internals.load_native(platform, "rwkv_jax._never_built") or ""
        assert f"this installation has no {platform.upper()} kernels" in reason
        assert "reinstall rwkv-jax" in reason
    for name in ("", "._cuda", "._build"):
        _installed(monkeypatch, f"rwkv_jax_cuda13{name}", VERSION="0.0.1")
    own = rwkv_jax.__version__
    assert internals.load_native("cuda", "rwkv_jax_cuda13._cuda") == (
        f"rwkv-jax-cuda13 has version 0.0.1 and rwkv-jax {own}; install rwkv-jax-cuda13=={own}"
    )

    def fail(name: str) -> types.ModuleType:
        raise ImportError("undefined symbol: _Z3foov")

    internals.fail_to_import(monkeypatch, fail)
    reason = internals.load_native("cpu", "rwkv_jax._cpu")
    assert reason == "rwkv_jax._cpu cannot be loaded: undefined symbol: _Z3foov"


@pytest.mark.parametrize(
    ("installed", "module"),
    [
        ((), "rwkv_jax._cuda"),
        (("rwkv_jax._cuda", "rwkv_jax_cuda13._cuda"), "rwkv_jax._cuda"),
        (("rwkv_jax_cuda12._cuda", "jax_cuda13_plugin"), "rwkv_jax_cuda12._cuda"),
        (("rwkv_jax_cuda12._cuda", "rwkv_jax_cuda13._cuda"), "rwkv_jax_cuda13._cuda"),
        (
            ("rwkv_jax_cuda12._cuda", "rwkv_jax_cuda13._cuda", "jax_cuda12_plugin"),
            "rwkv_jax_cuda12._cuda",
        ),
    ],
)
def test_which_cuda_kernels(
    installed: tuple[str, ...], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the source build, or of the wheel, preferably for the CUDA version of JAX."""
    assert internals.cuda_module_of(monkeypatch, installed) == module


IMPORT = """
import sys
import jax
before = set(sys.modules)
import rwkv_jax
print(*set(sys.modules) - before)
import rwkv_jax.models, rwkv_jax.nn
assert not {"flax", "equinox", "optax"} & set(sys.modules)
"""


def test_import_brings_the_operators_alone_and_touches_no_device() -> None:
    """Models and what belongs to them, kernels of Pallas, and packages other than JAX take longer
    to import than the operators. JAX is told to use a platform that does not exist: any computation
    would fail."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env={**os.environ, "JAX_PLATFORMS": "nowhere"},
        check=True,
        capture_output=True,
        text=True,
    )
    imported = set(run.stdout.split())
    packages = {x.split(".")[0] for x in imported if "." in x}
    assert packages <= {"jax", "jaxtyping", "numpy", "rwkv_jax"}
    rest = "models|nn|layers|losses|tokenizers|generation|serving|evaluation|_commands"
    later = re.compile(rf"rwkv_jax\.({rest}|wkv.\.pallas)|jax\.experimental\.pallas")
    assert not [x for x in imported if later.fullmatch(x)]
