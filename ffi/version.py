"""The version of the package, for scikit-build-core: that of the git tag.

A checkout of tag v1.2.3 has version 1.2.3, and five commits later it is 1.2.4.dev5+g0123abc. A
source distribution has its version in PKG-INFO.
"""

import email
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = "v0.1.0"
"""The version before there is a tag."""


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version() -> str:
    """Returns: the version, or `FIRST` as a development version where nothing tells it."""
    if (ROOT / "PKG-INFO").is_file():
        return email.message_from_string((ROOT / "PKG-INFO").read_text())["Version"]
    # A project that lies in another one's checkout does not have that one's version.
    if _git("rev-parse", "--show-prefix") != "":
        return f"{FIRST[1:]}.dev0"
    commit = _git("rev-parse", "--short=7", "HEAD")
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    since = _git("rev-list", "--count", f"{tag}..HEAD" if tag else "HEAD")
    if tag and since == "0":
        return tag[1:]
    release = [int(part) for part in (tag or FIRST)[1:].split(".")]
    if tag:
        release[-1] += 1
    return f"{'.'.join(map(str, release))}.dev{since}+g{commit}"


def dynamic_metadata(field: str, settings: Any) -> str:
    """Called by scikit-build-core.

    Raises:
      ValueError: a field other than the version, or settings, are given.
    """
    if field != "version" or settings:
        raise ValueError(f"ffi/version.py gives the version, without settings, and not {field}")
    return version()
