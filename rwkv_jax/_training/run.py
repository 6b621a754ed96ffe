"""A run of training, from its command line to its results."""

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence

import jax

from rwkv_jax._training import (
    checkpoints,
    clocks,
    compilation,
    data,
    devices,
    documents,
    dry_run,
    language_model,
    loop,
    options,
    outputs,
    parts,
    processes,
    report,
    sizes,
    tasks,
    xla_flags,
)
from rwkv_jax._training.ahead import in_thread
from rwkv_jax._training.parts import Parts
from rwkv_jax.models import rwkv7
from rwkv_jax.models._trees import has_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Train as a command line asks for.

    Raises:
      OSError, ValueError, ImportError: the model or the data cannot be read, or do not fit.
      SystemExit: all other errors of the user.
    """
    start = clocks.Start()
    args = options.parse(argv)
    # On a GPU XLA may otherwise choose other kernels in a run that is resumed.
    xla_flags.add(xla_flags.CUBLAS, xla_flags.DETERMINISTIC)
    if args.mesh:
        xla_flags.add_for_several_devices(args.mesh)
    compilation.use_cache(None if args.dry_run else args.cache)
    compilation.draw_by_kernel()
    start.part("import")
    processes.connect(args.coordinator, args.processes, args.process)
    # GPUs take seconds to start and to give memory, in which the data are read.
    in_thread(lambda: [jax.device_put(0, x) for x in jax.local_devices()])
    shown = sys.stdout if processes.is_first() else None
    reserved = contextlib.nullcontext(0) if args.dry_run else outputs.reserved(args)
    with contextlib.redirect_stdout(shown), reserved as saved, processes.watched(args.out):
        return run(args, saved, start)


def prepare(args: argparse.Namespace) -> tuple[language_model.Model, Parts | None]:
    """The model that the options ask for, and its arrays if they are those of a file."""
    found, config = options.base(args), options.config(args)
    whole = parts.targets(args.train) == [parts.ALL] and not args.piece
    mesh = devices.make_mesh(
        *(args.mesh, config),
        batch=args.batch,
        context=args.context,
        parts=args.accumulate,
        gathers=whole and not (found and has_tables(found.params)),
    )
    loaded = parts.load(args, mesh) if args.model else None
    model = language_model.make_model(
        config,
        mesh,
        dtype=args.dtype,
        implementation=args.implementation,
        recompute=args.recompute,
        module=found.module if found else rwkv7,
        parts=loaded,
        piece=args.piece,
        truncate=args.truncate,
    )
    return model, loaded[0] if loaded else None


def source_of(args: argparse.Namespace) -> data.Source:
    """What the options ask to train on."""
    if args.task:
        return tasks.Examples(args)
    if not args.data:
        return data.StandardLibrary(args)
    # A state before the first token is that of the first document of a row alone.
    packed = parts.STATES not in parts.targets(args.train)
    return documents.Documents(args, options.config(args).vocab_size, packed=packed)


def run(args: argparse.Namespace, saved: int, start: clocks.Start) -> int:
    """Train, from the checkpoint after `saved` steps if these are not 0, and write the results."""
    with contextlib.closing(source_of(args)) as source:
        model, initial = prepare(args)
        start.part("data and start of the devices")
        recorded = options.recorded(args, source.checksums)
        trained = sizes.size(model.split(model.shapes)[0])
        print(
            f"{model.generation} of {sizes.size(model.shapes.params):,} parameters, {trained:,} "
            f"numbers are trained, on {devices.describe(model.mesh, args.mesh)}, {args.dtype}"
        )
        print(source)
        try:
            if args.dry_run:
                print(dry_run.describe(args, model, source))
                return 0
            if args.cache:
                print(f"Compiled programs are kept in {args.cache}")
            results = loop.train(args, model, source, recorded, start, saved=saved, parts=initial)
        except NotImplementedError as error:
            if not args.implementation:
                raise
            sys.exit(f"--implementation: {error}")
    if results is None:
        return 130
    if model.mesh.size > 1:
        parts, average = (_on_one_device(x, model.mesh) for x in (results.parts, results.average))
        results = results._replace(parts=parts, average=average)
    if jax.process_index() == 0:
        with outputs.written(args.out):
            outputs.save(args, results.parts, results.average)
    report_on(args, model, source, results, recorded)
    return 0


def _on_one_device(parts: Parts | None, mesh: jax.sharding.Mesh) -> Parts | None:
    """A copy of the whole arrays, which each process has, to decode with it and to save it."""
    return jax.tree.map(lambda x: x.addressable_data(0), devices.gathered(parts, mesh))


def report_on(
    args: argparse.Namespace,
    model: language_model.Model,
    source: data.Source,
    results: loop.Trained,
    recorded: checkpoints.Options,
) -> None:
    """Print what a finished run has learned and what reads it, and write the log."""
    log, result = results.log, results.parts
    size = report.bytes_per_token(source.tokenizer, source.held_out)
    print(f"\n{report.table(log, results.step, size, model.generation)}")
    if isinstance(source, documents.Documents) and (share := source.efficiency) is not None:
        print(f"\n{share:.1%} of the places of all rows had a token to predict")
    found, learned, prompt = {"options": recorded, **log}, "", args.prompt
    if isinstance(source, tasks.Examples):
        found["exact"] = source.exact(report.answering(args, result.params), args.judge)
        learned = f"\n{report.exact_table(found['exact'], args.judge)}\n"
    elif tokenizer := source.tokenizer:
        begin = report.begin_of_text(source.held_out)
        tokens = begin if prompt is None else tokenizer.encode(prompt)
        prompt = tokenizer.decode(tokens)
        text = report.sample(args, model, result, tokenizer, tokens)
        learned = f"\nsample, decoded one token at a time:\n{text}\n"
    if jax.process_index() == 0:
        with outputs.written(args.out):
            (args.out / outputs.LOG).write_text(json.dumps(found, indent=1))
            report.plot(args.out / outputs.PLOT, log, model.generation)
    names = [*outputs.results(args), "a checkpoint", outputs.METRICS]
    written = ", ".join([*names, f"{outputs.LOG} and {outputs.PLOT}"])
    print(f"{learned}\nWrote {written} to {args.out}")
    name = source.tokenizer.name if source.tokenizer else None
    vocabulary = model.config.vocab_size
    line = [*outputs.command(args, vocabulary, name), "--prompt", prompt or "..."]
    if size == 1:
        # Bytes of a text recur all the time, unlike the tokens that the usual penalties are for.
        line += ["--temperature", "0"] if args.task else ["--presence", "0", "--frequency", "0"]
    print(f"Continue a text: {shlex.join(line)}")
