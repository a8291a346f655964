"""The command line of a Hubring module."""

from __future__ import annotations

import sys


def module_command(module: str, *words: str, program: str = sys.executable) -> list[str]:
    """Returns the command line that runs a Hubring module.

    Args:
        module: The module's dotted name.
        words: Arguments.
        program: The Python interpreter.
    """
    # -P: a file in the current directory must not hide a module of Hubring or of Python.
    return [program, "-P", "-m", module, *words]
