"""The training loop."""

import argparse
import contextlib
import sys
import time
from concurrent.futures import Future
from typing import NamedTuple

import jax

from rwkv_jax import finetuning
from rwkv_jax._training import checkpoints, report, steps
from rwkv_jax._training.ahead import Ahead, in_thread
from rwkv_jax._training.by_block import joined
from rwkv_jax._training.clocks import Start
from rwkv_jax._training.data import Batch, Source
from rwkv_jax._training.interruption import TOGETHER, Interruption
from rwkv_jax._training.language_model import Model
from rwkv_jax._training.metrics import Metrics
from rwkv_jax._training.optimizer import average, make_optimizer
from rwkv_jax._training.parts import Parts
from rwkv_jax._training.processes import by_first
from rwkv_jax._training.profiling import Profile
from rwkv_jax._training.progress import Progress
from rwkv_jax._training.steps import State, Step, compiled_step, evaluation


class Trained(NamedTuple):
    """The results of a run: its log, and of a step, which is the last one or the best one, the
    parts of the model and those with the average of what is trained, if there is one."""

    log: checkpoints.Log
    step: int
    parts: Parts
    average: Parts | None


def train(
    args: argparse.Namespace,
    model: Model,
    source: Source,
    options: checkpoints.Options,
    start: Start,
    *,
    saved: int = 0,
    parts: Parts | None = None,
) -> Trained | None:
    """Train on `source` and return the results of the finished run, or None after Ctrl-C.

    `options` go into the checkpoints. The run goes on from the checkpoint after `saved` steps, if
    these are not 0, and otherwise begins with `parts`, or with initial parameters if these are
    None. What is frozen is always that of `parts`.

    The device never waits for the next step: losses are read some steps late, one thread makes the
    next batch, and another one writes checkpoints.
    """
    profile = Profile(args.profile, args.steps - saved)
    log: checkpoints.Log = {
        "train": [],
        "held_out": [],
        "averaged": [],
        "ngrams": dict(source.ngrams),
    }
    if saved:
        log, position = checkpoints.record(args.out, saved, options)
        source.resume(saved, position)
    optimizer = make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    checkpoints.require_room(args.out, steps.named(shapes))
    evaluate = evaluation(model, source.held_out, args.batch // args.accumulate)
    done, stopped = saved, False
    began = saved_at = time.perf_counter()

    first = source.batch(saved) if saved < args.steps else None

    def make(step: int) -> Batch:
        batch = first if first is not None and step == saved else source.batch(step)
        return steps.on_mesh(batch, model.mesh)

    with (
        Interruption() as interruption,
        contextlib.closing(Ahead(make, range(saved, args.steps))) as batches,
        checkpoints.Saver(args.out, options, saved, args.keep) as saver,
        contextlib.ExitStack() as stack,
    ):
        start.part("first batch")

        def begin() -> State:
            state = steps.initial_state(model, optimizer, shapes, seed=args.seed, initial=parts)
            return jax.block_until_ready(state)

        beginning = None if saved else in_thread(begin)
        compiling: Future[Step] = Future()
        if first is not None:
            compiling = compiled_step(model, optimizer, shapes, first, args, start)
        if beginning is None:
            arrays = checkpoints.load(args.out, saved, steps.named(shapes))
            state = steps.restored(model, shapes, arrays, parts)
            print(f"Continuing after step {saved}")
        else:
            state = beginning.result()
        start.part("initial state, while it compiles")
        if first is not None:
            compiling.result()
            start.part("compile")
        batch = batches.take()
        # Not earlier, because it removes what follows the checkpoint.
        metrics = Metrics(args.out, saved, tensorboard=args.tensorboard)
        stack.enter_context(contextlib.closing(metrics))
        progress = Progress(args, log, metrics, start, source.places)
        stack.enter_context(contextlib.closing(progress))
        clock, ended = progress.clock, progress.stagnates
        stack.enter_context(contextlib.closing(profile))

        def save(*, sound: bool = False, last: bool = True) -> None:
            metrics.flush()
            best = progress.best if args.best else None
            position = source.position(done)
            saver.save(steps.named(state), log, position, best=best, sound=sound, last=last)

        def take() -> Batch | None:
            """The next batch. Where the data cannot be read, the finished steps are saved first.
            Several processes do not save then, as some of them may have read theirs."""
            try:
                return batches.take()
            except (OSError, ValueError) as error:
                if jax.process_count() > 1:
                    raise
                try:
                    progress.read()
                    if not saves:
                        save()
                    saver.wait()
                except SystemExit as failure:
                    then = str(failure)
                else:
                    then = f"--resume continues from {checkpoints.path(args.out, done)}"
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{error}; the run has ended after step {done}. {then}") from error

        def overdue() -> bool:
            """Whether the last checkpoint is too old, which the first of several processes says to
            the others. They wait for their devices to hear it, and ask after some steps only."""
            if not args.save_minutes or (jax.process_count() > 1 and done % TOGETHER):
                return False
            age = time.perf_counter() - saved_at
            return bool(by_first(lambda: int(age > 60 * args.save_minutes)))

        while batch is not None and not stopped and not ended:
            state, measures = compiling.result()(state, batch)
            done += 1
            progress.add(measures)
            profile.after(done - saved, state, clock)
            saver.check(len(log["train"]))
            stopped = interruption.in_any_process(done)
            last = done == args.steps
            evaluates = done % args.eval_every == 0 or last
            saves = done % args.save_every == 0 or last or stopped or overdue()
            if evaluates or saves:
                progress.read()
                clock.stop()
                if evaluates:
                    whole, averaged = _results(state)
                    of_average = None if averaged is None else evaluate(averaged)
                    progress.evaluated(evaluate(whole), of_average)
                    ended = progress.stagnates
                    saves = saves or ended or (args.best and progress.best == done)
                if saves:
                    save(sound=evaluates, last=last or stopped or ended)
                    saved_at = time.perf_counter()
                clock.go()
            if not stopped and not ended:
                batch = take()
        clock.stop()
    if stopped:
        print(f"Interrupted after step {done}; --resume continues from {args.out}")
        return None
    print(f"Trained {done - saved} steps in {time.perf_counter() - began:.0f} s")
    if ended and done < args.steps:
        print(f"No held-out loss was lower than that of step {progress.best}: ended early")
    if done - saved > 1:
        rate = args.batch * args.context * (done - saved - 1) / clock.seconds
        print(report.speed(model, rate, args.peak))
    if args.best and (best := progress.best) not in (None, done):
        checkpoint = checkpoints.path(args.out, best)
        if flaw := checkpoints.fault(checkpoint):
            print(
                f"{checkpoint} is damaged: {flaw}; the last step is in its place", file=sys.stderr
            )
        else:
            frozen = state.frozen
            for x in jax.tree.leaves(state._replace(frozen=None)):
                x.delete()
            arrays = checkpoints.load(args.out, best, steps.named(shapes))
            state = steps.restored(model, shapes, arrays)._replace(frozen=frozen)
            done = best
    return Trained(log, done, *_results(state))


def _results(state: State) -> tuple[Parts, Parts | None]:
    """The parts of the model, and those with the average of what is trained, if there is one."""
    averaged = average(joined(state.optimizer))
    if averaged is not None:
        averaged = finetuning.join(averaged, state.frozen)
    return finetuning.join(state.params, state.frozen), averaged
