"""The command line of a Hubring module."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec


def module_command(
    module: str, *words: str, program: str = sys.executable, options: Sequence[str] = ()
) -> list[str]:
    """Returns the command line that runs a Hubring module.

    Args:
        module: The module's dotted name.
        words: Arguments.
        program: The Python interpreter.
        options: More options of the interpreter.
    """
    # -P: a file in the current directory must not hide a module of Hubring or of Python.
    return [program, *options, "-P", "-m", module, *words]


def module_exists(name: str) -> bool:
    """Whether `python -m name` finds at least the module's outermost package. Imports nothing."""
    outermost = name.partition(".")[0]
    return PathFinder.find_spec(outermost, [""]) is not None or find_spec(outermost) is not None
