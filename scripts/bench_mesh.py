"""Time the operators on all devices against one of them, at the same size: batch, heads or sequence
distributed by `rwkv_jax.sharding.shard`.

    python scripts/bench_mesh.py --op wkv7                          # all GPUs of this machine
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/bench_mesh.py --device cpu

Both run in turn, as in bench.py, and their results are compared. Bytes are those of the results of
all collectives in the compiled program, for one device; they do not depend on the tokens.
"""

import argparse
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import bench
import rwkv_jax
from rwkv_jax import sharding

OPERATORS, SEQUENCES, tolerance = bench.OPERATORS, bench.SEQUENCES, bench.tolerance
hlo = importlib.import_module("support.hlo")
flat = importlib.import_module("support.operators").flat

PLACES = {
    "batch": {"B": "devices"},
    "heads": {"H": "devices", "C": "devices"},
    "sequence": {"T": "devices"},
}

SIZES = {
    "gpu": {"batch": (8, 4096, 64, 64), "heads": (8, 4096, 64, 64), "sequence": (1, 32768, 64, 64)},
    "cpu": {"batch": (2, 256, 4, 64), "heads": (2, 256, 4, 64), "sequence": (1, 1024, 4, 64)},
}
"""B, T, H, K; of one device where the batch or the sequence is distributed, of all with heads."""


def sizes_of(args: argparse.Namespace, kind: str) -> tuple[int, int, int, int]:
    batch, tokens, heads, keys = SIZES[args.device][kind]
    count = len(jax.devices())
    return batch * count ** (kind == "batch"), tokens * count ** (kind == "sequence"), heads, keys


def measure(args: argparse.Namespace, kind: str) -> Iterator[str]:
    op, sizes, places = args.op, sizes_of(args, kind), PLACES[kind]
    operands = bench.Operands(op, sizes, args.dtype, args.device)
    mesh = jax.make_mesh((len(jax.devices()),), ("devices",), axis_types=(AxisType.Auto,))
    distributed: dict[str, Any] = {kind: "devices"}
    function = flat(op, sharding.shard(getattr(rwkv_jax, op), mesh, **distributed))
    programs = {
        name: bench.in_jax(name, args.decay, op, functools.partial(f, decay=args.decay))
        for name, f in (("one", OPERATORS[op].function), ("all", function))
    }

    def placed(name: str, x: jax.Array) -> jax.Array:
        spec = P(*(places.get(letter) for letter in operands.axes[name]))
        return jax.device_put(x, NamedSharding(mesh, spec))

    given = operands.repeated(args.decay)
    spread = [{name: placed(name, x) for name, x in named.items()} for named in given]
    ready = {"one": programs["one"].prepare(*given), "all": programs["all"].prepare(*spread)}
    for direction in bench.DIRECTIONS:
        calls = {name: programs[name].call[direction] for name in ready}
        results = {name: calls[name](ready[name]) for name in ready}
        error = max(
            tolerance.rms_error(np.asarray(x, np.float32), np.asarray(results["one"][name]))
            for name, x in results["all"].items()
        )
        del results
        jitted: Any = calls["all"]
        text = jitted.args[0].lower(*ready["all"]).compile().as_text()
        timed = [functools.partial(calls[name], ready[name]) for name in ready]
        one, every = bench.medians(timed, args.device, args.repeats)
        yield (
            f"{kind:9} {'x'.join(map(str, sizes)):17} {direction:17}{one:9.3f}{every:9.3f}"
            f"{one / every:8.2f}{one / every / len(jax.devices()):9.1%}{error:10.1e}"
            f"{hlo.exchanged(text):12,}  {', '.join(sorted(hlo.collectives(text))) or '-'}"
        )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the operators on all devices and on one.")
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), help="what JAX has, if not given")
    add("--op", choices=SEQUENCES, default="wkv7")
    add("--kinds", nargs="+", choices=PLACES, default=list(PLACES), help="what is distributed")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="as in bench.py")
    add("--repeats", type=int, default=9, help="batches for each median")
    args = parser.parse_args(argv)
    if args.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.device, args.device))
    args.device = jax.default_backend()
    args.dtype = args.dtype or bench.DEFAULTS[args.device]["dtype"]
    args.decay = SEQUENCES[args.op].decays[-1]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    count = len(jax.devices())
    print(
        f"{args.op}, {args.dtype}, {count} x {jax.devices()[0].device_kind}, {os.cpu_count()} "
        f"cores, jax {jax.__version__}\n{'':45}{'1: ms':>9}{f'{count}: ms':>9}{'faster':>8}"
        f"{'of ideal':>9}{'differ':>10}{'bytes':>12}  collectives"
    )
    for kind in args.kinds:
        for line in measure(args, kind):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
