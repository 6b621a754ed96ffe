"""Time `rwkv_jax.losses.cross_entropy` beside a head and a loss that hold all logits.

    python scripts/bench_loss.py
    python scripts/bench_loss.py --chunk-sizes 2048 4096 8192 16384
    python scripts/bench_loss.py --l2-wrap 1e-4
    python scripts/bench_loss.py --shapes 16384x2048x65536 --dtype float32

The hidden states are in --dtype and the weight is in float32, as in training. "forward+backward" is
the loss with its gradients of hidden states and weight. The share of the peak counts one product of
tokens, channels and vocabulary forward, and three with the gradients, whatever a contestant
computes. "temporary" is the memory that the compiled program has beside its operands and results.
"differs" is the largest relative RMS difference of a result from that of `cross_entropy` in float32
with precision "highest" and the same rounded operands. The contestant "all logits" is the loss of
optax where that is installed, and the same formula otherwise. It has no --l2-wrap, --z-loss and
--soft-cap.
"""

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarking.operands import DIRECTIONS
from benchmarking.report import DTYPES, Table
from benchmarking.timing import Contestant, time_in_turn
from rwkv_jax.losses import cross_entropy

SHAPES = {"gpu": [(16384, 2048, 65536), (65536, 768, 65536)], "cpu": [(512, 64, 4096)]}
"""Tokens, channels, vocabulary."""

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def of_all_logits(hidden_states: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean loss from all logits at once."""
    weight = weight.astype(hidden_states.dtype)
    logits = jnp.einsum("nc,vc->nv", hidden_states, weight, preferred_element_type=jnp.float32)
    try:
        import optax
    except ImportError:
        picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return (jax.nn.logsumexp(logits, axis=1) - picked).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def contestants(args: argparse.Namespace) -> Iterator[tuple[str, Loss]]:
    ours = functools.partial(cross_entropy, **args.terms)
    yield "all logits", of_all_logits
    yield "cross_entropy", ours
    yield "cross_entropy, recompute", functools.partial(ours, recompute=True)
    for size in args.chunk_sizes:
        yield f"chunks of {size}", functools.partial(ours, chunk_size=size)


def make(shape: Sequence[int], dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens, channels, vocabulary = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden_states = jax.random.normal(keys[0], (tokens, channels)).astype(dtype)
    weight = jax.random.normal(keys[1], (vocabulary, channels)) * 2 / math.sqrt(channels)
    return hidden_states, weight, jax.random.randint(keys[2], (tokens,), 0, vocabulary)


def program_of(direction: str, loss: Loss) -> Any:
    return jax.jit(loss if direction == "forward" else jax.value_and_grad(loss, (0, 1)))


@jax.jit
def difference(x: jax.Array, expected: jax.Array) -> jax.Array:
    expected = expected.astype(jnp.float32)
    distance = jnp.linalg.norm((x.astype(jnp.float32) - expected).ravel())
    return distance / jnp.linalg.norm(expected.ravel())


def measure(args: argparse.Namespace, shape: Sequence[int], direction: str) -> list[dict[str, Any]]:
    operands = make(shape, args.dtype)
    hidden_states, weight, targets = operands
    exact = functools.partial(cross_entropy, **args.terms, precision="highest")
    rounded = weight.astype(args.dtype).astype(jnp.float32)
    right = program_of(direction, exact)(hidden_states.astype(jnp.float32), rounded, targets)
    rows: dict[str, dict[str, Any]] = {}

    def contestant(name: str, loss: Loss) -> Contestant:
        rows[name] = {"shape": shape, "direction": direction, "contestant": name}

        def start() -> list[Callable[[], Any]]:
            print(f"{'x'.join(map(str, shape))} {direction}: {name}", file=sys.stderr)
            program = program_of(direction, loss).lower(*operands).compile()
            rows[name]["temporary_bytes"] = program.memory_analysis().temp_size_in_bytes
            differ = jax.tree.map(difference, program(*operands), right)
            rows[name]["differs"] = max(map(float, jax.tree.leaves(differ)))
            return [functools.partial(program, *operands)]

        return Contestant(name, start)

    timings = time_in_turn([contestant(*x) for x in contestants(args)], args.repeats)
    products = 1 if direction == "forward" else 3
    for name, timing in timings.items():
        rows[name] |= {"ms": timing.ms, "best_ms": timing.best_ms, "failure": timing.failure}
        if timing.ms:
            flops = products * 2 * math.prod(shape)
            rows[name]["share_of_peak"] = flops / (timing.ms * 1e9 * args.peak)
    return list(rows.values())


def shape_of(text: str) -> tuple[int, ...]:
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not NxCxV")
    return sizes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the head and its loss.")
    add = parser.add_argument
    shapes = "tokens, channels and vocabulary"
    add("--shapes", type=shape_of, nargs="+", metavar="NxCxV", help=shapes)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on cpu")
    add(
        "--chunk-sizes",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="tokens of a chunk, to compare",
    )
    add("--z-loss", type=float, default=0.0)
    add("--l2-wrap", type=float, default=0.0)
    add("--soft-cap", type=float)
    add("--peak", type=float, default=989.0, help="peak TFLOP/s of the device")
    add("--repeats", type=int, default=9, help="batches for each median")
    add("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    device = jax.default_backend()
    if device not in SHAPES:
        parser.error(f"no benchmark for {device}")
    args.shapes = args.shapes or SHAPES[device]
    args.dtype = args.dtype or DTYPES[device]
    args.terms = {name: getattr(args, name) for name in ("z_loss", "l2_wrap", "soft_cap")}
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    title = f"{args.dtype}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(f"head and cross entropy, {title}; peak {args.peak:g} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape, direction in itertools.product(args.shapes, DIRECTIONS):
        rows += (here := measure(args, shape, direction))
        print()
        names = "ms", "best", "of peak", "temporary", "differs"
        table = Table(f"{'x'.join(map(str, shape))}, {direction}", *names, widths=(44, 9))
        for row in here:
            if row["ms"] is None:
                table.row(row["contestant"], row["failure"])
                continue
            table.row(
                row["contestant"],
                f"{row['ms']:.2f}",
                f"{row['best_ms']:.2f}",
                f"{row['share_of_peak']:.1%}",
                f"{row['temporary_bytes'] / 1e9:.2f} GB",
                f"{row['differs']:.1e}",
            )
    if args.json:
        args.json.write_text(json.dumps({"title": title, "rows": rows}, indent=2) + "\n")
    return int(any(row["failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
