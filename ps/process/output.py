"""Reads the output of several children and shows it on one screen: a file such as the terminal.

Law: a line of one child is never joined to a line of another. A progress bar replaces the one before it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

_ERASE_LINE = b"\r\x1b[K"


class SharedScreen:
    """Writes the lines of several children to one file.

    Args:
        target: The file.
        on_failure: Called once, by the thread that writes, if nothing more can be written: the reader of a
            pipe is gone, or a disk is full. All later output is dropped.
    """

    def __init__(self, target: IO[bytes], on_failure: Callable[[OSError], object] = lambda _: None) -> None:
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
            drop_output(self._target)
            self.fail(error)


def drop_output(target: IO[bytes]) -> None:
    """Sends later writes of a file that cannot be written to nowhere, also those that are still buffered."""
    with contextlib.suppress(OSError):  # a file in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, target.fileno())
        finally:
            os.close(nowhere)


UNFINISHED_SECONDS = 0.1
"""How long an unfinished line waits for its end before it is shown: `print` writes the end separately."""
CHUNK_BYTES = 1 << 16

_PIECE = re.compile(rb"\r?[^\r\n]*(?:\r?\n)?")


class ChildOutput:
    """Shows a child's output until the output ends.

    Whole lines are shown at once, progress bars at each carriage return, and a line that stays unfinished,
    such as a prompt, after a moment.

    Args:
        source: This process's end of the child's pipe. Closed at the end.
        screen: Where to show it.
        mark: A prefix for each line.
        copy: A file that gets the output as it is; None for none.
        keeps_result: Whether to hold back a last line that is a JSON object. `join` returns it.

    Attributes:
        wrote_at: When the child last wrote to this output for its user, in monotonic seconds. Of the standard
            error only progress bars count; other lines are logs and warnings.
    """

    def __init__(
        self,
        source: IO[bytes],
        screen: SharedScreen,
        mark: str = "",
        copy: Path | None = None,
        *,
        keeps_result: bool = False,
    ) -> None:
        self._screen, self._mark, self._keeps_result = screen, mark.encode(), keeps_result
        self._result = b""
        """A line that is the last so far."""
        copied = copy.open("ab", buffering=0) if copy else None
        self._chunks, self._carrying = 0, False
        self.wrote_at = -math.inf
        # A daemon thread: a process that the child left behind may hold the pipe open for ever.
        self._thread = Thread(target=self._carry, args=(source, copied), name=f"output {mark}", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> bytes:
        """Waits for the output to end and returns the last line if `keeps_result`.

        Args:
            seconds: How long to wait for a source that is silent; None until it ends.
        """
        before = -1
        while self._thread.is_alive() and (self._carrying or before != self._chunks):
            before = self._chunks
            self._thread.join(seconds)
        return self._result

    def result(self, seconds: float | None = None) -> dict[str, Any]:
        """Waits as `join`, and returns the result of one of our programs in the last line.

        A last line that is no result is one of the script: it is shown, and the result is empty.
        """
        last = self.join(seconds)
        with contextlib.suppress(ValueError):
            result: dict[str, Any] = json.loads(last)
            if "exit_code" in result:
                return result
        if last:
            self.show(last)
        return {}

    def show(self, line: bytes) -> None:
        """Shows one line, after the output has ended."""
        self._screen.write(self, self._mark, line if line.endswith(b"\n") else line + b"\n")

    def _carry(self, source: IO[bytes], copy: IO[bytes] | None) -> None:
        left = b""
        with source, copy or nullcontext():
            while True:
                if left and not select.select([source], [], [], UNFINISHED_SECONDS)[0]:
                    left = self._take(left, everything=True)
                chunk = os.read(source.fileno(), CHUNK_BYTES)
                if not chunk:
                    break
                self._carrying = True
                self._chunks += 1
                if copy is not None:
                    self._copy(copy, chunk)
                left = self._take(left + chunk, everything=False)
                self._carrying = False
            self._take(left, everything=True)
            self._screen.close(self)

    def _take(self, data: bytes, *, everything: bool) -> bytes:
        """Shows the whole lines, or everything; returns the rest.

        The rest can be a carriage return alone: it belongs to the text that follows.
        """
        pieces = [piece for piece in _PIECE.findall(data) if piece]
        unfinished = bool(pieces) and not pieces[-1].endswith(b"\n")
        left = pieces.pop() if unfinished and (not everything or pieces[-1] == b"\r") else b""
        for piece in pieces:
            self._hand_on(piece)
        return left

    def _hand_on(self, piece: bytes) -> None:
        if self._keeps_result:
            before, self._result = self._result, b""
            if before:
                self._screen.write(self, self._mark, before)
            if piece.startswith(b"{") and piece.endswith(b"}\n"):
                self._result = piece
                return
        if self._keeps_result or piece.startswith(b"\r"):
            self.wrote_at = time.monotonic()
        self._screen.write(self, self._mark, piece)

    def _copy(self, copy: IO[bytes], chunk: bytes) -> None:
        try:
            copy.write(chunk)
        except OSError as error:
            self._screen.fail(OSError(error.errno, error.strerror, copy.name))
