"""The command line of a comparison: as it was typed, and as it goes on with what is missing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def typed() -> str:
    """The command line of this process."""
    return shlex.join(["ps-compare", *sys.argv[1:]])


def going_on(command: str, folder: Path) -> str:
    """The command that finishes in `folder` what another one began.

    Args:
        command: The other, with `--out`, however it was spelt, or without.
        folder: Where its runs lie.
    """
    kept, words = [], iter(shlex.split(command))
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join([*kept, "--out", str(folder)])
