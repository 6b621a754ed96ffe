"""Prints that a process has ended before its run, and the newest checkpoint in the folder of the
run. The message begins with the first argument, the folder is the second.

This file runs in a process of its own. It waits for the end of its standard input, which the
watched process holds open as long as it lives, and is killed where that ends as it should.
"""

import sys
from pathlib import Path


def main(which: str, folder: str) -> None:
    sys.stdin.read()
    checkpoints = [x for x in Path(folder).glob("checkpoint.*") if x.suffix[1:].isdecimal()]
    newest = max(checkpoints, key=lambda x: int(x.suffix[1:]), default=None)
    resume = f"--resume continues from {newest}" if newest else f"{folder} has no checkpoint"
    print(
        f"{which} has ended before the run. If the lines above name another process, that one was "
        f"lost; {resume}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
