"""A file that several children write to, such as the terminal.

Law: a line of one child is never joined to a line of another. A progress bar replaces the one before it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from threading import Lock
from typing import IO

_ERASE_LINE = b"\r\x1b[K"


def _nothing(error: OSError) -> None:
    """Ignores that nothing more can be written."""


class Screen:
    """Writes the lines of several children to one file.

    Args:
        target: The file.
        on_failure: Called once, by the thread that writes, if nothing more can be written: the reader of a
            pipe is gone, or a disk is full. All later output is dropped.
    """

    def __init__(self, target: IO[bytes], on_failure: Callable[[OSError], object] = _nothing) -> None:
        self._target, self._on_failure = target, on_failure
        self._terminal = target.isatty()
        self._lock = Lock()
        self._failed = False
        self._open: object = None
        """Whose line is unfinished."""
        self._replaceable = False
        """Whether the unfinished line is a progress bar."""
        self._broken: set[object] = set()
        """Whose unfinished line another line has ended."""

    def write(self, owner: object, mark: bytes, piece: bytes) -> None:
        """Writes a part of one line in one write.

        Args:
            owner: Who writes.
            mark: The prefix of the owner's lines.
            piece: The text. A carriage return in front replaces the owner's unfinished line. A newline at the
                end finishes the line.
        """
        text, ends, replaces = piece.strip(b"\r\n"), piece.endswith(b"\n"), piece.startswith(b"\r")
        with self._lock:
            broken = owner in self._broken
            self._broken.discard(owner)
            if not text and (broken or not ends):
                return
            self._put(self._lead(owner, mark, bool(text) and replaces) + text + b"\n" * ends)
            if self._open not in (None, owner):
                self._broken.add(self._open)
            self._replaceable = replaces or (self._replaceable and self._open is owner)
            self._open = None if ends else owner

    def close(self, owner: object) -> None:
        """Finishes the owner's line, if it is unfinished."""
        if self._open is owner:
            self.write(owner, b"", b"\n")

    def fail(self, error: OSError) -> None:
        """Stops writing; reports the first error."""
        first, self._failed = not self._failed, True
        if first:
            self._on_failure(error)

    def _lead(self, owner: object, mark: bytes, replaces: bool) -> bytes:
        """Returns what comes between the text before and an owner's text."""
        if self._open is None:
            return mark
        if self._open is owner:
            return b"\r" + mark if replaces else b""
        if self._replaceable and self._terminal:
            return _ERASE_LINE + mark
        return (b"\r" if self._replaceable and replaces else b"\n") + mark

    def _put(self, data: bytes) -> None:
        if self._failed:
            return
        try:
            self._target.write(data)
            self._target.flush()
        except OSError as error:
            drop(self._target)
            self.fail(error)


def drop(target: IO[bytes]) -> None:
    """Sends later writes of a file that cannot be written to nowhere, also those that are still buffered."""
    with contextlib.suppress(OSError):  # a file in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, target.fileno())
        finally:
            os.close(nowhere)
