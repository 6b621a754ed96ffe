"""Train a byte-level RWKV-7 language model, by default on the sources of Python's standard library.

    python scripts/train.py                      # the demo: minutes on two CPU cores
    python scripts/train.py --data book.txt --size small --steps 20000
    python scripts/train.py --resume             # after Ctrl-C; loses no step
    python scripts/train.py --model FILE         # go on from the parameters of a checkpoint
    python scripts/train.py --mesh data=2,seq=4  # on 8 devices
    python scripts/train.py --task reverse       # exact recall: up to 60 digits, in reverse

Writes model.safetensors (the parameters), checkpoint.json (options and log) with a folder of every
array by its name, log.json and loss.png to --out.

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
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import jax
from jax.sharding import Mesh

from rwkv_jax import models
from rwkv_jax.nn.flax import RWKV, arrays
from training import (
    data,
    devices,
    language_model,
    loop,
    options,
    report,
    sizes,
    tasks,
    xla_flags,
)


def main(argv: Sequence[str] | None = None) -> int:
    args = options.parse(argv)
    # On a GPU XLA may otherwise choose other kernels in a run that is resumed.
    xla_flags.add(xla_flags.CUBLAS, xla_flags.DETERMINISTIC)
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    with contextlib.redirect_stdout(sys.stdout if jax.process_index() == 0 else None):
        return run(args)


def prepare(args: argparse.Namespace) -> tuple[Mesh, RWKV]:
    """The mesh and the model that the options ask for."""
    config = options.config(args)
    mesh = devices.make_mesh(args.mesh, config, batch=args.batch, context=args.context)
    params = models.load(args.model, dtype="float32").params if args.model else None
    model = language_model.make_model(
        config,
        mesh,
        dtype=args.dtype,
        implementation=args.implementation,
        seed=args.seed,
        scan=args.scan,
        recompute=args.recompute,
        params=params,
    )
    return mesh, model


def run(args: argparse.Namespace) -> int:
    mesh, model = prepare(args)
    source = tasks.Examples(args) if args.task else data.Text(args)
    recorded = options.recorded(args, source.checksum)
    parameters = sizes.size(arrays(model.params))
    print(f"RWKV-7 of {parameters:,} parameters on {devices.describe(mesh)}, {args.dtype}")
    print(source)

    args.out.mkdir(parents=True, exist_ok=True)
    log = loop.train(args, mesh, model, source, recorded)
    if log is None:
        return 130
    # Each process has the whole arrays, of which it decodes and saves a copy on one device.
    whole = devices.gathered(arrays(model.params), mesh)
    params = jax.tree.map(lambda x: x.addressable_data(0), whole)
    results = {"options": recorded, **log}
    print(f"\n{report.table(log)}")
    if isinstance(source, tasks.Examples):
        results["exact"] = source.exact(report.answering(args, params), args.judge)
        print(f"\n{report.exact_table(results['exact'], args.judge)}")
    else:
        print(f"\nsample, decoded one byte at a time:\n{report.sample(args, params)}")
    file = args.out / "model.safetensors"
    if jax.process_index() == 0:
        models.save(file, params)
        (args.out / "log.json").write_text(json.dumps(results, indent=1))
        report.plot(args.out / "loss.png", log)
    print(f"\nWrote {file.name}, a checkpoint, log.json and loss.png to {args.out}")
    prompt = shlex.quote(args.prompt)
    # Bytes of a text recur all the time, unlike the tokens that the usual penalties are meant for.
    sampling = "--temperature 0" if args.task else "--presence 0 --frequency 0"
    print(f"Continue a text: python -m rwkv_jax generate {file} --prompt {prompt} {sampling}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
