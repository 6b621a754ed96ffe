"""A run of training, from its command line to its results."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax

from rwkv_jax import models
from rwkv_jax._training import (
    clocks,
    compilation,
    data,
    devices,
    dry_run,
    language_model,
    loop,
    options,
    outputs,
    report,
    sizes,
    tasks,
    xla_flags,
)
from rwkv_jax.models import rwkv7


def main(argv: Sequence[str] | None = None) -> int:
    start = clocks.Start()
    args = options.parse(argv)
    # On a GPU XLA may otherwise choose other kernels in a run that is resumed.
    xla_flags.add(xla_flags.CUBLAS, xla_flags.DETERMINISTIC)
    compilation.use_cache(None if args.dry_run else args.cache)
    start.part("import")
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    shown = sys.stdout if jax.process_index() == 0 else None
    reserved = contextlib.nullcontext(0) if args.dry_run else outputs.reserved(args)
    with contextlib.redirect_stdout(shown), reserved as saved:
        return run(args, saved, start)


def prepare(args: argparse.Namespace) -> tuple[language_model.Model, rwkv7.Params | None]:
    """The model that the options ask for, and its parameters if they are those of a file."""
    config = options.config(args)
    mesh = devices.make_mesh(args.mesh, config, batch=args.batch, context=args.context)
    params = None
    if args.model:
        try:
            params = models.load(args.model, dtype="float32").params
        except (OSError, ValueError) as error:
            sys.exit(f"--model: {error}")
    model = language_model.make_model(
        config,
        mesh,
        dtype=args.dtype,
        implementation=args.implementation,
        recompute=args.recompute,
    )
    return model, params


def run(args: argparse.Namespace, saved: int, start: clocks.Start) -> int:
    """Train, from the checkpoint after `saved` steps if these are not 0, and write the results."""
    source = tasks.Examples(args) if args.task else data.Text(args)
    model, params = prepare(args)
    recorded = options.recorded(args, source.checksum)
    parameters = sizes.size(model.shapes())
    print(f"RWKV-7 of {parameters:,} parameters on {devices.describe(model.mesh)}, {args.dtype}")
    print(source)
    try:
        if args.dry_run:
            print(dry_run.describe(args, model, source))
            return 0
        if args.cache:
            print(f"Compiled programs are kept in {args.cache}")
        results = loop.train(args, model, source, recorded, start, saved=saved, params=params)
    except NotImplementedError as error:
        if not args.implementation:
            raise
        sys.exit(f"--implementation: {error}")
    if results is None:
        return 130
    log, file, first = results.log, args.out / outputs.MODEL, jax.process_index() == 0
    params, average = (_on_one_device(x, model.mesh) for x in (results.params, results.average))
    if first:
        with outputs.written(args.out):
            models.save(file, params)
            if average is None:
                (args.out / outputs.AVERAGE).unlink(missing_ok=True)
            else:
                models.save(args.out / outputs.AVERAGE, average)
    print(f"\n{report.table(log, results.step)}")
    shown = {"options": recorded, **log}
    if isinstance(source, tasks.Examples):
        shown["exact"] = source.exact(report.answering(args, params), args.judge)
        learned = report.exact_table(shown["exact"], args.judge)
    else:
        learned = f"sample, decoded one byte at a time:\n{report.sample(args, params)}"
    if first:
        with outputs.written(args.out):
            (args.out / outputs.LOG).write_text(json.dumps(shown, indent=1))
            report.plot(args.out / outputs.PLOT, log)
    names = [file.name, *([outputs.AVERAGE] if average else []), "a checkpoint", outputs.METRICS]
    written = ", ".join([*names, f"{outputs.LOG} and {outputs.PLOT}"])
    print(f"\n{learned}\n\nWrote {written} to {args.out}")
    prompt = shlex.quote(args.prompt)
    # Bytes of a text recur all the time, unlike the tokens that the usual penalties are meant for.
    sampling = "--temperature 0" if args.task else "--presence 0 --frequency 0"
    print(f"Continue a text: python -m rwkv_jax generate {file} --prompt {prompt} {sampling}")
    return 0


def _on_one_device(params: Any, mesh: jax.sharding.Mesh) -> Any:
    """A copy of the whole arrays, which each process has, to decode with it and to save it."""
    return jax.tree.map(lambda x: x.addressable_data(0), devices.gathered(params, mesh))
