"""Standard output and standard error in a process that runs a script, which may close or replace both.

Scripts put objects in their place that have only `write` and `flush`, set them to None, detach their buffer,
or point their descriptors at a file. Our own lines still go to where the process was started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal. One that is closed, None, or no file is not."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def kept(stream: Any) -> Any:
    """Returns a copy of the interpreter's own standard output or error, which only the caller closes.

    A stream that something has replaced, as notebooks do, is returned as it is.
    """
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    try:
        copy = os.dup(stream.fileno())
    except (OSError, ValueError):  # closed or detached
        return stream
    return open(copy, "w", buffering=1, encoding=stream.encoding, errors="backslashreplace")


def fill_missing() -> None:
    """Discards output of a program that was started with a closed standard output or error."""
    for name in _NAMES:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process


def flush_outputs() -> None:
    """Writes what is buffered, as far as that is possible."""
    streams: tuple[Any, ...] = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    for stream in streams:
        with suppress(Exception):  # None, closed, or an object of the script: nothing can be written there
            stream.flush()


@contextmanager
def outputs_restored() -> Iterator[None]:
    """Restores `sys.stdout` and `sys.stderr`, and where they write to, after a script that runs inside."""
    copies = {name: kept(getattr(sys, name)) for name in _NAMES}
    try:
        yield
    finally:
        flush_outputs()
        for name, copy in copies.items():
            setattr(sys, name, copy)
