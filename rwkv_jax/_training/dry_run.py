"""What --dry-run prints: the sizes of a run, the memory of a step, and an estimate of its speed."""

import argparse
import math
from typing import Any

import jax

from rwkv_jax._training import sizes, steps
from rwkv_jax._training.data import Source
from rwkv_jax._training.language_model import Model
from rwkv_jax._training.optimizer import make_optimizer

ASSUMED = 0.4
"""The share of the peak of a device that the estimate of the speed assumes."""


def describe(args: argparse.Namespace, model: Model, source: Source) -> str:
    """A line for each size. The program of the gradients, which needs the most memory, is compiled,
    and nothing is computed."""
    optimizer, devices = make_optimizer(args), model.mesh.size
    shapes = steps.state_shapes(model, optimizer)
    batch = steps.on_mesh(source.batch(0), model.mesh)
    step = steps.train_step(model, optimizer, shapes, args.l2_wrap, args.accumulate)
    program = step.gradients.lower(shapes.params, shapes.copies, shapes.frozen, batch)
    memory = program.compile().memory_analysis()
    tokens = args.batch * args.context
    operations = sizes.flops_per_token(model.shapes.params, shapes.frozen.params)
    lines = {
        "parameters": f"{sizes.size(model.shapes.params):,}, {sizes.size(shapes.params):,} trained",
        "tokens a step": f"{tokens:,}",
        "tokens of the run": f"{tokens * args.steps:,}",
        "operations": f"{operations:.3g} FLOP a token, {operations * tokens:.3g} FLOP a step",
        "a checkpoint": _size(_bytes(steps.named(shapes))),
    }
    if source.tokens:
        lines["steps an epoch"] = f"{source.tokens / tokens:,.1f}"
    if memory is not None:
        between = _bytes((shapes, batch), on_device=True)
        within = memory.temp_size_in_bytes + memory.output_size_in_bytes
        present = _present(model.mesh.devices.flat[0])
        lines |= {
            "arrays between steps": f"{_size(between)} on each device",
            "arrays in a step": f"{_size(within)} on each device",
            "memory": f"{_size(between + within)} on each device{present}",
        }
    if args.peak:
        seconds = operations * tokens / (devices * args.peak * 1e12 * ASSUMED)
        assumed = f"{ASSUMED:.0%} of {args.peak:g} TFLOP/s a device"
        lines["speed"] = f"{seconds:.3g} s a step, {tokens / seconds:,.0f} tokens/s with {assumed}"
        lines["time of the run"] = f"{seconds * args.steps / 3600:.3g} hours at that speed"
    return "\n".join(f"{name:20}  {value}" for name, value in lines.items())


def _bytes(shapes: Any, *, on_device: bool = False) -> int:
    """Of arrays of these shapes, or of the shards of them that a device has."""

    def shape(x: Any) -> tuple[int, ...]:
        return x.sharding.shard_shape(x.shape) if on_device else x.shape

    return sum(math.prod(shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"


def _present(device: Any) -> str:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return f", of {_size(limit)}" if limit else ""
