"""The training loop."""

import argparse
import collections
import contextlib
import math
import sys
import time
from concurrent import futures
from concurrent.futures import Future

import jax
import numpy as np
from tqdm import tqdm

from rwkv_jax import finetuning
from rwkv_jax._training import checkpoints, report, steps
from rwkv_jax._training.ahead import Ahead
from rwkv_jax._training.clocks import Clock, Start
from rwkv_jax._training.data import Batch, Source
from rwkv_jax._training.interruption import Interruption
from rwkv_jax._training.language_model import Model
from rwkv_jax._training.optimizer import make_optimizer
from rwkv_jax._training.parts import Parts
from rwkv_jax._training.steps import Step, compiled_step, evaluation

IN_FLIGHT = 3
"""How many steps the device has been given beyond the last one whose loss is known."""


def train(
    args: argparse.Namespace,
    model: Model,
    source: Source,
    options: checkpoints.Options,
    start: Start,
    *,
    saved: int = 0,
    parts: Parts | None = None,
) -> tuple[checkpoints.Log, Parts] | None:
    """Train on `source` and return the log of the finished run and the parts of the model, or None
    after Ctrl-C.

    `options` go into the checkpoints. The run goes on from the checkpoint after `saved` steps, if
    these are not 0, and otherwise begins with `parts`, or with initial parameters if these are
    None. What is frozen is always that of `parts`.

    The device never waits for the next step: losses are read some steps late, one thread makes the
    next batch, and another one writes checkpoints.
    """
    log: checkpoints.Log = {"train": [], "held_out": [], "ngrams": dict(source.ngrams)}
    if saved:
        log, position = checkpoints.record(args.out, saved, options)
        source.resume(saved, position)
    optimizer = make_optimizer(args, model.mesh.size)
    shapes = steps.state_shapes(model, optimizer)
    evaluate = evaluation(model, source.held_out, args.batch)
    tokens, done, stopped = args.batch * args.context, saved, False
    clock, in_flight = Clock(), collections.deque[jax.Array]()
    began = time.perf_counter()

    def make(step: int) -> Batch:
        return steps.on_mesh(source.batch(step), model.mesh)

    with (
        Interruption() as interruption,
        contextlib.closing(Ahead(make, range(saved, args.steps))) as batches,
        checkpoints.Saver(args.out, options, saved) as saver,
    ):
        batch = batches.take()
        start.part("data")
        compiling: Future[Step] = Future()
        if batch is not None:
            compiling = compiled_step(model, optimizer, shapes, batch, args.l2_wrap, start)
        if saved:
            arrays = checkpoints.load(args.out, saved, steps.named(shapes))
            state = steps.restored(model, shapes, arrays, parts)
            print(f"Continuing after step {saved}")
        else:
            state = steps.initial_state(model, optimizer, shapes, seed=args.seed, parts=parts)
        jax.block_until_ready(state)
        start.part("initial state, while it compiles")
        if batch is not None:
            futures.wait([compiling])
            start.part("compile")
        bar = tqdm(
            desc="training",
            unit="tok",
            unit_scale=True,
            total=args.steps * tokens,
            initial=saved * tokens,
            disable=jax.process_index() > 0,
        )

        def read(but: int) -> None:
            """Read the losses of all steps but the last ones, which may be so many."""
            while len(in_flight) > but:
                loss = float(in_flight.popleft())
                if not math.isfinite(loss):
                    # Before a checkpoint of this step replaces a better one.
                    sys.exit(
                        f"The loss of step {len(log['train']) + 1} is {loss}; --resume continues "
                        "from the last checkpoint, as with a lower --learning-rate"
                    )
                log["train"].append(loss)
                recent = f"loss {np.mean(log['train'][-20:]):.3f}"
                held = f", held out {log['held_out'][-1][1]:.3f}" if log["held_out"] else ""
                bar.set_postfix_str(recent + held, refresh=False)
                bar.update(tokens)
                if (known := len(log["train"]) - saved) == 1:
                    start.part("first step")
                    clock.go()
                elif known == 2:
                    start.part("second step")
                    if not bar.disable:
                        bar.write(str(start))

        while batch is not None and not stopped:
            state, loss = compiling.result()(state, batch)
            loss.copy_to_host_async()
            in_flight.append(loss)
            done += 1
            read(IN_FLIGHT)
            saver.check()
            stopped = interruption.in_any_process(done)
            last = done == args.steps
            evaluates = done % args.eval_every == 0 or last
            saves = done % args.save_every == 0 or last or stopped
            if evaluates or saves:
                read(0)
                clock.stop()
                if evaluates:
                    whole = finetuning.join(state.params, state.frozen)
                    log["held_out"].append([done, evaluate(whole)])
                if saves:
                    saver.save(steps.named(state), log, source.position(done))
                clock.go()
            if not stopped:
                batch = batches.take()
    bar.close()
    if stopped:
        print(f"Interrupted after step {done}; --resume continues from {args.out}")
        return None
    print(f"Trained {done - saved} steps in {time.perf_counter() - began:.0f} s")
    if done - saved > 1:
        rate = tokens * (done - saved - 1) / clock.seconds
        print(report.speed(model, rate, args.peak))
    return log, finetuning.join(state.params, state.frozen)
