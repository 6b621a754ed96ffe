"""Train a byte-level RWKV-7 language model, by default on the sources of Python's standard library.

    python scripts/train.py                      # the demo: minutes on two CPU cores
    python scripts/train.py --data book.txt --size small --steps 20000
    python scripts/train.py --resume             # after Ctrl-C; loses no step
    python scripts/train.py --mesh data=2,seq=4  # on 8 devices

Writes checkpoint.json (options and log) with a folder of every array by its name, log.json and
loss.png to --out.

The axes of --mesh are data (rows of the batch; also parts of parameters and optimizer state), model
(heads, inner channels and the vocabulary) and seq (consecutive parts of the context), the last one
over the nearest devices. A run may resume on another mesh. Without GPUs,
XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 devices of a CPU.

Several processes train on one mesh of all their devices. Start each with the same options and its
--process, on one host each with GPUs of its own (CUDA_VISIBLE_DEVICES). --out is a folder that all
of them share; the first one prints.

    python scripts/train.py --mesh data=16 --coordinator HOST:12345 --processes 2 --process 0
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before JAX starts: on a GPU XLA may otherwise choose other kernels in a run that is resumed.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from rwkv_jax.models import rwkv7
from rwkv_jax.nn.flax import RWKV7, arrays, parameters
from rwkv_jax.sharding import shard
from rwkv_jax.wkv7 import wkv7

SIZES = {
    "tiny": rwkv7.Config(layers=2, width=64, head_size=32, vocabulary=256),
    "demo": rwkv7.Config(layers=4, width=128, head_size=64, vocabulary=256),
    "small": rwkv7.Config(layers=6, width=384, head_size=64, vocabulary=256),
    "0.1b": rwkv7.Config(layers=12, width=768, head_size=64, vocabulary=256),
    "1.5b": rwkv7.Config(layers=24, width=2048, head_size=64, vocabulary=256),
}
AXES = ("data", "model", "seq")
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
HELD_OUT_EVERY = 20
MAY_CHANGE = {"out", "resume", "save_every", "sample", "temperature", "prompt", "peak"}
MAY_CHANGE |= {"mesh", "coordinator", "processes", "process"}
"""Options that a resumed run need not share with the interrupted one."""


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def mesh_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in AXES or axis in sizes or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} has {part!r}; accepted are data=N, model=N and seq=N, each once, with "
                "commas between them"
            )
        sizes[axis] = int(number)
    return sizes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level RWKV-7 language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    sizes = ", ".join(f"{n} = {c.layers}x{c.width}" for n, c in SIZES.items())
    add("--size", choices=SIZES, default="demo", help=f"layers x width: {sizes}")
    add("--layers", type=positive, help="instead of that of --size")
    add("--width", type=positive, help="instead of that of --size")
    add("--head-size", type=positive, help="instead of that of --size")
    add("--data", type=Path, help="a file, or a folder of files; the standard library if not given")
    add("--pattern", default="*.py", help="which files of a folder, at any depth")
    add("--steps", type=positive, default=1000, help="optimizer steps")
    add("--batch", type=positive, default=8, help="sequences a step")
    add("--context", type=positive, default=128, help="bytes a sequence")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the activations")
    add(
        "--implementation",
        choices=("ffi", "xla", "reference"),
        help="of wkv7; the best if not given",
    )
    add("--learning-rate", type=float, default=4e-3, help="at its peak")
    add("--warmup", type=int, default=50, help="steps until the peak")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--seed", type=int, default=0, help="of parameters, data order and sample")
    add("--eval-every", type=positive, default=250, help="steps between held-out losses")
    add("--eval-bytes", type=positive, default=65536, help="held-out bytes that are predicted")
    add("--save-every", type=positive, default=500, help="steps between checkpoints")
    add("--out", type=Path, default=Path("out/train"), help="output folder")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--prompt", default="class ", help="what the sample continues")
    add("--sample", type=positive, default=500, help="bytes of text to generate at the end")
    add("--temperature", type=float, default=0.9, help="of the sample")
    add("--mesh", type=mesh_sizes, help="devices, as in data=2,model=2,seq=2; one if not given")
    add("--coordinator", metavar="HOST:PORT", help="of several processes: where the first one is")
    add("--processes", type=positive, help="how many there are")
    add("--process", type=int, help="which one this is, from 0")
    add("--peak", type=float, help="TFLOP/s of a device, to say how much of it is made use of")
    args = parser.parse_args(argv)
    several = (args.coordinator, args.processes, args.process)
    if several != (None, None, None):
        if None in several:
            parser.error("--coordinator, --processes and --process go together")
        if args.process not in range(args.processes):
            parser.error(f"--process is {args.process}; accepted is 0 to {args.processes - 1}")
    return args


def config(args: argparse.Namespace) -> rwkv7.Config:
    sizes = {"layers": args.layers, "width": args.width, "head_size": args.head_size}
    return dataclasses.replace(SIZES[args.size], **{n: s for n, s in sizes.items() if s})


def make_mesh(args: argparse.Namespace) -> Mesh:
    """The devices of --mesh; an axis that it does not name has one."""
    given = args.mesh or {}
    sizes = {axis: 1 for axis in AXES if axis not in given} | given
    count, present = math.prod(sizes.values()), jax.device_count()
    if count > present or (jax.process_count() > 1 and count < present):
        accepted = "at most that many" if jax.process_count() == 1 else "all of them"
        sys.exit(f"--mesh has {count} devices where there are {present}; accepted are {accepted}")
    model = config(args)
    heads = model.width // model.head_size
    for axis, name, size in (
        ("data", "--batch", args.batch),
        ("model", "the number of heads", heads),
        ("seq", "--context", args.context),
    ):
        if size % sizes[axis]:
            sys.exit(
                f"--mesh has {axis}={sizes[axis]} where {name} is {size}; "
                f"accepted is what divides {size}"
            )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def place(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array that all processes have, each giving its own devices their parts of it."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def gathered(tree: Any, mesh: Mesh) -> Any:
    """The same arrays, whole on each device.

    One program, while `device_put` would start one for each array: over processes on CPUs programs
    that run at once may wait for each other without end.
    """
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)


def make_model(args: argparse.Namespace, mesh: Mesh) -> RWKV7:
    wkv = wkv7
    if mesh.size > 1:
        sequence = "seq" if mesh.shape["seq"] > 1 else None
        wkv = shard(wkv7, mesh, batch="data", heads="model", sequence=sequence)
    model = RWKV7(
        config(args),
        dtype=args.dtype,
        implementation=args.implementation,
        wkv=wkv,
        rngs=nnx.Rngs(args.seed),
    )
    params = arrays(model.params)
    places = rwkv7.shardings(params, mesh, data="data", model="model")
    model.params = parameters(jax.tree.map(place, params, places))
    return model


def read(data: Path | None, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: every twentieth file is held out, or the end of a single one."""
    folder = data or Path(sysconfig.get_path("stdlib"))
    if folder.is_file():
        text = np.frombuffer(folder.read_bytes(), np.uint8)
        cut = len(text) - len(text) // HELD_OUT_EVERY
        return text[:cut], text[cut:]
    paths = sorted(path.relative_to(folder) for path in folder.rglob(pattern))
    files = [(folder / path).read_bytes() for path in paths if NOT_OURS.isdisjoint(path.parts)]
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        sys.exit(
            f"{folder} has {len(files)} files {pattern}; needed are {HELD_OUT_EVERY} or one file"
        )
    train, test = (np.frombuffer(b"\n".join(part), np.uint8) for part in (files, held_out))
    return train, test


def check_size(text: np.ndarray, context: int) -> np.ndarray:
    if len(text) <= context:
        sys.exit(f"there are {len(text)} bytes; needed are more than the context, {context}")
    return text


def batch_at(step: int, text: np.ndarray, args: argparse.Namespace) -> np.ndarray:
    """Sequences [batch, context + 1] that depend on the seed and the step alone."""
    starts = np.random.default_rng((args.seed, step)).integers(
        len(text) - args.context, size=args.batch
    )
    return windows(text, starts, args.context)


def windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def ngram_losses(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Nats a byte of a unigram (add-one) and a bigram (backed by that unigram) model, counted in
    `train`, where the model predicts: all but the first byte of each row of `held_out`."""
    before, after = held_out[:, :-1], held_out[:, 1:]
    pairs = np.bincount(train[:-1].astype(np.int32) * 256 + train[1:], minlength=65536)
    pairs = pairs.reshape(256, 256)
    unigram = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    bigram = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1)
    return {
        "unigram": float(-np.log(unigram[after]).mean()),
        "bigram": float(-np.log(bigram[before, after]).mean()),
    }


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW as in the official training: matrices decay, and `w0` learns at twice the rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        0,
        args.learning_rate,
        args.warmup,
        max(args.steps, args.warmup + 1),
        args.learning_rate / 20,
    )

    def where(test):
        def mask(params):
            return jax.tree_util.tree_map_with_path(
                lambda path, x: test(jax.tree_util.keystr(path, simple=True, separator="."), x),
                params,
            )

        return mask

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.99, eps=1e-18),
        optax.add_decayed_weights(
            args.weight_decay, where(lambda name, x: "weight" in name and x.ndim == 2)
        ),
        optax.masked(optax.scale(2.0), where(lambda name, x: "w0" in name)),
        optax.scale_by_learning_rate(schedule),
    )


def losses_of(mesh: Mesh, model: RWKV7, tokens: jax.Array) -> jax.Array:
    """Nats of predicting each byte of [B, T + 1] tokens but the first: [B, T]."""
    inputs, labels = jax.lax.with_sharding_constraint(
        (tokens[:, :-1], tokens[:, 1:]), NamedSharding(mesh, P("data", "seq"))
    )
    params = arrays(model.params)
    # Each parameter is gathered to compute with it, and its gradient is scattered.
    for data in ("data", None):
        params = jax.lax.with_sharding_constraint(
            params, rwkv7.shardings(params, mesh, data=data, model="model")
        )
    logits, _ = rwkv7.rwkv7(
        params, inputs, dtype=model.dtype, implementation=model.implementation, wkv=model.wkv
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@functools.partial(nnx.jit, static_argnums=0)
def train_step(mesh: Mesh, model: RWKV7, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda m: losses_of(mesh, m, tokens).mean())(model)
    optimizer.update(model, gradients)
    return loss


@functools.partial(nnx.jit, static_argnums=(0, 3))
def eval_step(mesh: Mesh, model: RWKV7, tokens: jax.Array, rows: int) -> jax.Array:
    """The loss of the first `rows`; others fill up a batch that the mesh does not divide."""
    return losses_of(mesh, model, tokens)[:rows].mean()


def flops_per_token(params: rwkv7.Params) -> int:
    """Floating-point operations of training on a token: each number of a matrix is multiplied and
    added once forward and twice backward, and each of a state [K, K] takes part in four products
    of the time mixing. What is computed anew backward does not count."""
    matrices = sum(
        x.size
        for name, x in rwkv7.names(params).items()
        if x.ndim == 2 and not name.startswith("emb.") and not name.endswith(".r_k")
    )
    states = sum(block.att.r_k.size * block.att.r_k.shape[1] for block in params.blocks)
    return 6 * (matrices + 4 * states)


def variables(model: RWKV7, optimizer: nnx.Optimizer) -> dict[str, nnx.Variable]:
    """Everything that a training step changes, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        {"model": model.params, "optimizer": optimizer.opt_state, "step": optimizer.step},
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def save(folder: Path, state: dict[str, nnx.Variable], record: dict[str, Any]) -> None:
    """Replaces the checkpoint in one step: an interruption leaves the old one or the new one.

    The record names the folder of the arrays, which go where those of the old record are not.
    """
    path = folder / "checkpoint.json"
    old = json.loads(path.read_text())["arrays"] if path.is_file() else None
    new = "arrays.1" if old == "arrays.0" else "arrays.0"
    with ocp.StandardCheckpointer() as checkpointer:
        values = {name: x[...] for name, x in state.items()}
        checkpointer.save((folder / new).absolute(), values, force=True)
    if jax.process_index() == 0:
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps({**record, "arrays": new}))
        os.replace(scratch, path)
        shutil.rmtree(folder / str(old), ignore_errors=True)


def load(folder: Path, state: dict[str, nnx.Variable], expected: dict[str, Any]) -> dict[str, Any]:
    """Sets the variables, each where it is, and returns the record, whose options are to be as
    `expected`."""
    path = folder / "checkpoint.json"
    if not path.is_file():
        sys.exit(f"{path} does not exist; run without --resume first")
    record = json.loads(path.read_text())
    for name, value in expected.items():
        if record["options"][name] != value:
            sys.exit(f"{path} was made with {name} {record['options'][name]}, not {value}")
    with ocp.StandardCheckpointer() as checkpointer:
        places = {name: x[...] for name, x in state.items()}
        values = checkpointer.restore((folder / record["arrays"]).absolute(), places)
    for name, x in state.items():
        x[...] = values[name]
    return record


def plot(path: Path, log: dict[str, Any]) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(
        range(1, len(log["train"]) + 1), log["train"], lw=0.5, alpha=0.6, label="RWKV-7, training"
    )
    axes.plot(*zip(*log["held_out"], strict=True), "o-", label="RWKV-7, held out")
    for (name, loss), style in zip(log["ngrams"].items(), (":", "--"), strict=True):
        axes.axhline(loss, color="gray", ls=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def evaluate(mesh: Mesh, model: RWKV7, held_out: np.ndarray, batch: int) -> float:
    parts = [held_out[i : i + batch] for i in range(0, len(held_out), batch)]
    rows = NamedSharding(mesh, P("data"))
    losses = []
    for part in parts:
        filled = np.pad(part, ((0, -len(part) % mesh.shape["data"]), (0, 0)))
        losses.append(float(eval_step(mesh, model, place(filled, rows), len(part))))
    return float(np.average(losses, weights=[len(part) for part in parts]))


def in_any_process(flag: bool) -> bool:
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def train(
    args: argparse.Namespace,
    mesh: Mesh,
    model: RWKV7,
    text: np.ndarray,
    held_out: np.ndarray,
    options: dict[str, Any],
) -> dict[str, Any] | None:
    """The log of a finished run, or None after Ctrl-C."""
    optimizer = nnx.Optimizer(model, make_optimizer(args), wrt=nnx.Param)
    state = variables(model, optimizer)
    for x in state.values():
        if x.ndim == 0:  # counts; all else is where its parameter is
            x[...] = place(x[...], NamedSharding(mesh, P()))
    log = {"train": [], "held_out": [], "ngrams": ngram_losses(text, held_out)}
    if args.resume:
        log = load(args.out, state, options)["log"]
    done = first = len(log["train"])
    interrupted = stopped = False

    def interrupt(*_) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, usual)

    # The step under way is finished first; a second Ctrl-C stops at once.
    usual = signal.signal(signal.SIGINT, interrupt)
    tokens = args.batch * args.context
    began = time.perf_counter()
    times = []
    with tqdm(
        desc="training",
        unit="tok",
        unit_scale=True,
        total=args.steps * tokens,
        initial=first * tokens,
        disable=jax.process_index() > 0,
    ) as bar:
        while done < args.steps and not stopped:
            start = time.perf_counter()
            batch = place(batch_at(done, text, args), NamedSharding(mesh, P("data")))
            log["train"].append(float(train_step(mesh, model, optimizer, batch)))
            times.append(time.perf_counter() - start)
            done += 1
            if done % args.eval_every == 0 or done == args.steps:
                log["held_out"].append([done, evaluate(mesh, model, held_out, args.batch)])
            recent = f"loss {np.mean(log['train'][-20:]):.3f}"
            held = f", held out {log['held_out'][-1][1]:.3f}" if log["held_out"] else ""
            bar.set_postfix_str(recent + held, refresh=False)
            bar.update(tokens)
            stopped = in_any_process(interrupted)
            if done % args.save_every == 0 or done == args.steps or stopped:
                save(args.out, state, {"options": options, "log": log})
    signal.signal(signal.SIGINT, usual)
    if stopped:
        print(f"Interrupted after step {done}; --resume continues from {args.out}")
        return None
    print(f"Trained {done - first} steps in {time.perf_counter() - began:.0f} s")
    if times[1:]:
        speed = tokens * len(times[1:]) / sum(times[1:])
        flops = speed * flops_per_token(arrays(model.params)) / 1e12
        share = f", {flops / mesh.size / args.peak:.1%} of the peak" if args.peak else ""
        print(f"{speed:,.0f} tokens/s after the first step, {flops:.3g} TFLOP/s{share}")
    return log


def sample(args: argparse.Namespace, mesh: Mesh, model: RWKV7) -> str:
    """Text that continues the prompt, decoded one byte at a time, on each device the same."""
    generate = jax.jit(
        functools.partial(
            rwkv7.generate,
            length=args.sample,
            temperature=args.temperature,
            dtype=args.dtype,
            implementation=args.implementation,
        )
    )
    params = gathered(arrays(model.params), mesh)
    prompt = args.prompt.encode()
    tokens = jnp.asarray([list(prompt)], jnp.int32)
    new = np.asarray(generate(params, jax.random.key(args.seed), tokens))
    return (prompt + bytes(new[0].astype(np.uint8))).decode(errors="replace")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    with contextlib.redirect_stdout(sys.stdout if jax.process_index() == 0 else None):
        return run(args)


def run(args: argparse.Namespace) -> int:
    mesh = make_mesh(args)
    text, held_out = (check_size(part, args.context) for part in read(args.data, args.pattern))
    count = max(1, min(args.eval_bytes, len(held_out)) // args.context)
    starts = np.linspace(0, len(held_out) - args.context - 1, count)
    held_out = windows(held_out, starts.astype(int), args.context)
    options = {name: x for name, x in vars(args).items() if name not in MAY_CHANGE}
    options |= {"data": zlib.crc32(text.tobytes()), **dataclasses.asdict(config(args))}
    model = make_model(args, mesh)
    size = sum(x.size for x in rwkv7.names(arrays(model.params)).values())
    where = ", ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1)
    where = f"{mesh.devices.flat[0]}" + (f" and others ({where})" if where else "")
    print(f"RWKV-7 of {size:,} parameters on {where}, {args.dtype}")
    print(f"{len(text):,} bytes to train on, {held_out[:, 1:].size:,} held-out bytes to predict")

    args.out.mkdir(parents=True, exist_ok=True)
    log = train(args, mesh, model, text, held_out, options)
    if log is None:
        return 130
    if jax.process_index() == 0:
        (args.out / "log.json").write_text(json.dumps({"options": options, **log}, indent=1))
        plot(args.out / "loss.png", log)
    print(f"\n{'held-out loss':14} nats/byte  bits/byte")
    for name, loss in (log["ngrams"] | {"RWKV-7": log["held_out"][-1][1]}).items():
        print(f"{name:14} {loss:9.3f}  {loss / math.log(2):9.3f}")
    print(f"\nsample, decoded one byte at a time:\n{sample(args, mesh, model)}")
    print(f"\nWrote a checkpoint, log.json and loss.png to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
