"""The command line of one of our own programs."""

from __future__ import annotations

import sys


def module_command(module: str, *words: str, program: str = sys.executable) -> list[str]:
    """The command line that runs a module of ours.

    Args:
        module: Its dotted name.
        words: Its arguments.
        program: The Python that runs it.
    """
    # -P: a file in the current directory must never stand for one of our modules, or of Python's.
    return [program, "-P", "-m", module, *words]
