"""Reads a child's output and shows it."""

from __future__ import annotations

import os
import re
import select
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import IO

from hubring.ps.process.screen import Screen

UNFINISHED_SECONDS = 0.1
"""How long an unfinished line waits for its end before it is shown: `print` writes the end separately."""
CHUNK_BYTES = 1 << 16

_PIECE = re.compile(rb"\r?[^\r\n]*(?:\r?\n)?")


class Output:
    """Shows a child's output until the output ends.

    Whole lines are shown at once, progress bars at each carriage return, and a line that stays unfinished,
    such as a prompt, after a moment.

    Args:
        source: This process's end of the child's pipe. Closed at the end.
        screen: Where to show it.
        mark: A prefix for each line.
        copy: A file that gets the output as it is; None for none.
        keeps_result: Whether to hold back a last line that is a JSON object. `join` returns it.
    """

    def __init__(
        self,
        source: IO[bytes],
        screen: Screen,
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
        self._screen.write(self, self._mark, piece)

    def _copy(self, copy: IO[bytes], chunk: bytes) -> None:
        try:
            copy.write(chunk)
        except OSError as error:
            self._screen.fail(OSError(error.errno, error.strerror, copy.name))
