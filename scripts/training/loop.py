"""The training loop."""

import argparse
import time

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from rwkv_jax.nn.flax import RWKV
from training import checkpoints, report
from training.data import Source
from training.devices import place
from training.interruption import Interruption
from training.optimizer import make_optimizer
from training.steps import bound_train_step, evaluate, on_mesh, variables


def train(
    args: argparse.Namespace,
    mesh: Mesh,
    model: RWKV,
    source: Source,
    options: checkpoints.Options,
    saved: int = 0,
) -> checkpoints.Log | None:
    """Train on `source` and return the log of the finished run, or None after Ctrl-C.

    `options` go into the checkpoints. The run goes on from the checkpoint after `saved` steps, if
    these are not 0.
    """
    optimizer = nnx.Optimizer(model, make_optimizer(args, mesh.size), wrt=nnx.Param)
    state = variables(model, optimizer)
    for x in state.values():
        if x.ndim == 0:  # counts; every other variable already is where its parameter is
            x[...] = place(x[...], NamedSharding(mesh, P()))
    log: checkpoints.Log = {"train": [], "held_out": [], "ngrams": dict(source.ngrams)}
    if saved:
        log = checkpoints.load(args.out, saved, state, options)
        print(f"Continuing after step {saved}")
    step = bound_train_step(mesh, model, optimizer, args.l2_wrap)
    done = first = saved
    stopped = False
    tokens = args.batch * args.context
    began = time.perf_counter()
    times = []
    progress = tqdm(
        desc="training",
        unit="tok",
        unit_scale=True,
        total=args.steps * tokens,
        initial=first * tokens,
        disable=jax.process_index() > 0,
    )
    with Interruption() as interruption, progress as bar:
        while done < args.steps and not stopped:
            start = time.perf_counter()
            batch = on_mesh(source.batch(done), mesh)
            loss = step(batch)
            log["train"].append(float(loss))
            times.append(time.perf_counter() - start)
            done += 1
            if done % args.eval_every == 0 or done == args.steps:
                log["held_out"].append([done, evaluate(mesh, model, source.held_out, args.batch)])
            recent = f"loss {np.mean(log['train'][-20:]):.3f}"
            held = f", held out {log['held_out'][-1][1]:.3f}" if log["held_out"] else ""
            bar.set_postfix_str(recent + held, refresh=False)
            bar.update(tokens)
            stopped = interruption.in_any_process()
            if done % args.save_every == 0 or done == args.steps or stopped:
                saved = checkpoints.save(args.out, state, options, log, saved)
    if stopped:
        print(f"Interrupted after step {done}; --resume continues from {args.out}")
        return None
    print(f"Trained {done - first} steps in {time.perf_counter() - began:.0f} s")
    if times[1:]:
        print(report.speed(mesh, model, tokens * len(times[1:]) / sum(times[1:]), args.peak))
    return log
