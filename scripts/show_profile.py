"""Print the time of each class of kernels in a profile of `rwkv-jax train --profile FOLDER`, on the
first device of this machine.

    python scripts/train.py --profile out/profile
    python scripts/show_profile.py out/profile
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from benchmarking import profile
from rwkv_jax._training.profiling import STEPS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the newest profile in this folder is read")
    parser.add_argument("--longest", type=int, default=12, help="kernels to print by name")
    args = parser.parse_args(argv)
    try:
        kernels = profile.newest(args.folder)
    except FileNotFoundError as error:
        parser.error(str(error))
    found = profile.by_class(kernels, {}, STEPS)
    profile.show("one training step", found, args.longest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
