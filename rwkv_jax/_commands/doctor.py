"""`rwkv-jax doctor`: what is installed, what runs on each device, and whether it is right."""

import argparse
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rwkv_jax
from rwkv_jax._commands.output import table
from rwkv_jax._operator.dispatch import ORDER, OTHER, platform_of
from rwkv_jax._operator.operator import PUBLIC

HELP = "Show what is installed and which kernels run on each device, and check the operators there."
EXAMPLES = ("doctor", "doctor --json")

PACKAGES = (
    *("rwkv-jax-cuda12", "rwkv-jax-cuda13"),
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu", "numpy", "jaxtyping"),
    *("flax", "equinox", "optax", "orbax-checkpoint"),
    *("tokenizers", "pyrwkv-tokenizer", "matplotlib", "tqdm"),
)
"""The distributions besides rwkv-jax that decide what it can do."""

SIZES = {"B": 2, "T": 100, "G": 1, "H": 2, "K": 64, "V": 64, "C": 128}
"""The axes of the call that is described and checked."""

OPERATORS = {operator.name: operator for operator in PUBLIC.values()}

CEILINGS = {"float32": 1e-4, "bfloat16": 3e-2}
"""The largest error that passes, relative to the norm of an array. Correct kernels stay several
times below it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON object")


def run(arguments: argparse.Namespace) -> int:
    devices, error = _devices()
    platforms = dict.fromkeys(platform_of(x.platform) for x in devices)
    implementations = [row for name in platforms for row in _implementations(name)]
    report = {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "folder": str(Path(rwkv_jax.__file__).parent),
        "packages": {"rwkv-jax": rwkv_jax.__version__, **{x: _version(x) for x in PACKAGES}},
        "build": rwkv_jax.build_info(),
        "devices": [{"device": str(x), "kind": x.device_kind} for x in devices],
        "device_error": error,
        "implementations": implementations,
        "checks": list(_checks(implementations, devices)),
    }
    print(json.dumps(report) if arguments.json else _text(report))
    return 0 if error is None and all(x["passed"] for x in report["checks"]) else 1


def _devices() -> tuple[list[Any], str | None]:
    """The devices of the default platform, then those of the CPU; or none, and the reason."""
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return [], str(error)
    try:
        cpus = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        cpus = []
    return list(dict.fromkeys([*devices, *cpus])), None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _dtype(name: str) -> str:
    """The data type in which a platform is described and checked: the one it is mostly used in."""
    return "float32" if name == "cpu" else "bfloat16"


def _shape(axes: str) -> tuple[int, ...]:
    return tuple(SIZES[axis] for axis in axes)


def _implementations(name: str) -> Iterator[dict[str, Any]]:
    """For each operator and implementation, whether it runs on a platform, and how or why not. One
    of each operator is the default: it runs if none is asked for by name."""
    dtype = _dtype(name)
    order = ORDER.get(name, ORDER[OTHER])
    for op, operator in OPERATORS.items():
        inputs = operator.signature.inputs.values()
        operands = [jax.ShapeDtypeStruct(_shape(axes), dtype) for axes in inputs]
        found = rwkv_jax.implementations(op, *operands, platform=name)
        default = next(x for x in order if x in found and found[x].available)
        for implementation, availability in found.items():
            yield {
                "platform": name,
                "dtype": dtype,
                "operator": op,
                "implementation": implementation,
                "runs": availability.available,
                "default": implementation == default,
                "details": availability.description or availability.reason,
            }


def _checks(
    implementations: Sequence[Mapping[str, Any]], devices: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """The largest error of the default implementation of each operator on each device, over the
    results and gradients of a call and the results of a step after it. The reference runs on the
    last device, which is a CPU if JAX has one."""
    references: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for device in devices:
        for row in implementations:
            if row["platform"] != platform_of(device.platform) or not row["default"]:
                continue
            op, dtype = row["operator"], row["dtype"]
            if (op, dtype) not in references:
                references[op, dtype] = _results(op, "reference", dtype, devices[-1])
            errors, exception = {}, None
            try:
                found = _results(op, row["implementation"], dtype, device)
                errors = {name: _error(x, references[op, dtype][name]) for name, x in found.items()}
            except Exception as error:  # of a kernel, a driver or a compiler
                exception = f"{type(error).__name__}: {error}"
            largest = max(errors, key=errors.__getitem__, default=None)
            yield {
                "device": str(device),
                "operator": op,
                "implementation": row["implementation"],
                "ceiling": CEILINGS[dtype],
                "error": None if largest is None else errors[largest],
                "array": largest,
                "exception": exception,
                "passed": largest is not None and errors[largest] <= CEILINGS[dtype],
            }


def _results(op: str, implementation: str, dtype: str, device: Any) -> dict[str, np.ndarray]:
    """The results and gradients of a call, and the results of a step after it, by name."""
    rng = np.random.default_rng(0)
    signature = OPERATORS[op].signature
    operands = {name: rng.standard_normal(_shape(axes)) for name, axes in signature.inputs.items()}
    if op == "wkv7":
        # As in the model: the negative of a unit vector, and the vector times a learning rate.
        unit = operands["a"] / np.linalg.norm(operands["a"], axis=-1, keepdims=True)
        operands |= {"a": -unit, "b": unit * rng.uniform(size=unit.shape)}
    elif "beta" in operands:
        length = np.linalg.norm(operands["k"], axis=-1, keepdims=True)
        beta = rng.uniform(size=operands["beta"].shape)
        operands |= {"k": operands["k"] / length, "g": -np.abs(operands["g"]), "beta": beta}
    inputs = {name: x.astype(dtype) for name, x in operands.items()}
    # The cotangent of each result is the beginning of these numbers.
    numbers = rng.standard_normal(_shape("BTHK")).astype(np.float32).ravel()
    options = {"implementation": implementation}
    if signature.decays:
        options["decay"] = signature.decays[-1]
    sequence, step = getattr(rwkv_jax, op), getattr(rwkv_jax, f"{op}_step")

    @jax.jit
    def compute(inputs: dict[str, jax.Array], numbers: jax.Array) -> dict[str, jax.Array]:
        results, gradient = jax.vjp(lambda inputs: sequence(**inputs, **options), inputs)
        cotangents = jax.tree.map(
            lambda x: numbers[: x.size].reshape(x.shape).astype(x.dtype), results
        )
        (gradients,) = gradient(cotangents)
        token = {n: x[:, -1] if n in signature.per_token else x for n, x in inputs.items()}
        named = {
            "result": results,
            "gradient": gradients,
            "step": step(**token, state=results[1], **options),
        }
        leaves = jax.tree.leaves_with_path(named)
        return {jax.tree_util.keystr(path, simple=True, separator=" "): x for path, x in leaves}

    found = compute(*jax.device_put((inputs, numbers), device))
    return {name: np.asarray(x, np.float32) for name, x in found.items()}


def _error(x: np.ndarray, expected: np.ndarray) -> float:
    """`||x - expected|| / ||expected||`, or the largest float32 where that is NaN or infinite."""
    with np.errstate(all="ignore"):
        error = np.linalg.norm(x - expected) / np.linalg.norm(expected)
    return float(error if np.isfinite(error) else np.finfo(np.float32).max)


def _text(report: Mapping[str, Any]) -> str:
    """The findings for a reader."""
    build, packages = report["build"], report["packages"]
    compiled = {
        "cpu": f"by {build['cxx']} for {', '.join(build['cpu_isas'])}",
        "cuda": f"by {build['cuda_compiler']} for {', '.join(build['cuda_archs'])}",
    }
    installed = [
        ("python", report["python"]),
        ("folder", report["folder"]),
        *((name, version) for name, version in packages.items() if version is not None),
        ("not installed", ", ".join(x for x, version in packages.items() if version is None)),
    ]
    native = [
        (f"{name} kernels", reason or f"loaded, compiled {compiled[name]}")
        for name, reason in build["missing"].items()
    ]
    parts = [table(installed), table(native)]
    if report["device_error"]:
        return "\n\n".join([*parts, report["device_error"]])
    parts.append(table([(x["device"], x["kind"]) for x in report["devices"]]))
    sizes = ", ".join(f"{axis} = {size}" for axis, size in SIZES.items())
    for name, lines in _lines(report["implementations"]).items():
        parts.append(f"{name}, {_dtype(name)}, {sizes}; * is the default\n{table(lines)}")
    header = ("check", "operator", "implementation", "largest error", "of", "")
    checks = [
        (
            *(x["device"], x["operator"], x["implementation"]),
            "none" if x["exception"] else f"{x['error']:.1e}",
            x["array"] or "",
            "passed" if x["passed"] else "FAILED",
        )
        for x in report["checks"]
    ]
    exceptions = [
        f"{x['device']} {x['operator']}: {x['exception']}"
        for x in report["checks"]
        if x["exception"]
    ]
    return "\n\n".join([*parts, table([header, *checks]), *exceptions])


def _lines(implementations: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """For each platform the lines of a table of what runs. Operators of which the same is true
    share a line."""
    grouped: dict[str, dict[tuple[str, str], list[str]]] = {}
    for x in implementations:
        what = x["implementation"], ("" if x["runs"] else "no: ") + x["details"]
        op = x["operator"] + "*" * x["default"]
        grouped.setdefault(x["platform"], {}).setdefault(what, []).append(op)
    return {
        name: [(f"{x} of {', '.join(ops)}", text) for (x, text), ops in sorted(lines.items())]
        for name, lines in grouped.items()
    }
