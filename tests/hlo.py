"""What a compiled or lowered program contains."""

import re

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)\b"
)
TARGET = re.compile(r"\brwkv_\w+")


def collectives(text: str | None) -> set[str]:
    return set(COLLECTIVE.findall(text or ""))


def targets(text: str | None) -> set[str]:
    """The native targets that a program calls."""
    return set(TARGET.findall("\n".join(x for x in (text or "").splitlines() if "custom" in x)))
