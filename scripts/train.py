"""`rwkv-jax train` of a checkout: trains a new RWKV-7, by default one of bytes on the sources of
Python's standard library, or finetunes a published one.

    python scripts/train.py                      # the demo: minutes on two CPU cores
    python scripts/train.py --data book.txt --size small --steps 20000
    python scripts/train.py --resume             # after Ctrl-C; loses no step
    python scripts/train.py --force              # start anew, in place of the run in the folder
    python scripts/train.py --model model.pth --data talks.jsonl --train lora
    python scripts/train.py --mesh data=2,seq=4  # on 8 devices
    python scripts/train.py --task reverse       # exact recall: up to 60 digits, in reverse
    python scripts/train.py --options run.toml   # options from a file, in TOML
    python scripts/train.py --dry-run            # sizes, memory and an estimate of the speed

Writes to --out what was trained (model.safetensors, or the folder model; adapter, a folder of PEFT;
state.pth), metrics.jsonl (a line for each step), log.json, loss.png and the last two checkpoints. A
checkpoint has every array that is trained by its name, the options and the log, where the data goes
on, and checksums of its files. A resumed run skips damaged checkpoints. One run at a time writes to
a folder.

The axes of --mesh are data (rows of the batch; also parts of parameters and optimizer state), model
(heads, inner channels and the vocabulary; with many tokens rows instead, which exchanges less) and
seq (consecutive parts of the context), the last one over the nearest devices. A run may resume on
another mesh. Without GPUs, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8 devices of a
CPU.

Several processes train on one mesh of all their devices. --out is a folder that all of them share;
the first one prints. Those that Slurm, Open MPI or Kubernetes starts find each other. Elsewhere
start each with the same options and its --process:

    srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 python scripts/train.py --mesh data=8
    python scripts/train.py --mesh data=8 --coordinator HOST:12345 --processes 2 --process 0
"""

import sys
from collections.abc import Sequence

from rwkv_jax import _commands


def main(argv: Sequence[str] | None = None) -> int:
    return _commands.main(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
