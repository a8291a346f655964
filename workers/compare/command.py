"""The command line of a comparison, as typed and as a command that resumes it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def typed() -> str:
    """Returns the command line of this process."""
    return shlex.join(["ps-compare", *sys.argv[1:]])


def resume_command(command: str, folder: Path) -> str:
    """Returns the command that resumes a comparison in `folder`.

    Args:
        command: The command that began the comparison, with or without `--out`.
        folder: The folder of its runs.
    """
    rest, words = [], iter(shlex.split(command))
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            rest.append(word)
    return shlex.join([*rest, "--out", str(folder)])
