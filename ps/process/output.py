"""Copies a child's output to a file."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import IO


class Output:
    """Copies a child's output to a file, line by line, until the output ends.

    Args:
        source: This process's end of the child's pipe. Closed at the end.
        target: The file. Each line is one write.
        mark: A prefix for each line.
        copy: A file that gets the output without prefixes; None for none.
        keeps_last: Whether to hold back the last line. `join` returns it.
    """

    def __init__(
        self,
        source: IO[bytes],
        target: IO[bytes],
        mark: str = "",
        copy: Path | None = None,
        *,
        keeps_last: bool = False,
    ) -> None:
        self._target, self._mark, self._keeps_last = target, mark.encode(), keeps_last
        self._last = b""
        copied = copy.open("ab", buffering=0) if copy else None
        self._lines, self._carrying = 0, False
        # A daemon thread: a process that the child left behind may hold the pipe open for ever.
        self._thread = Thread(target=self._carry, args=(source, copied), name=f"output {mark}", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> bytes:
        """Waits for the output to end and returns the last line if `keeps_last`.

        Args:
            seconds: How long to wait for a source that is silent; None until it ends.
        """
        before = -1
        while self._thread.is_alive() and (self._carrying or before != self._lines):
            before = self._lines
            self._thread.join(seconds)
        return self._last

    def write(self, line: bytes) -> None:
        """Writes one line to the target."""
        if line:
            self._target.write(self._mark + line + (b"" if line.endswith(b"\n") else b"\n"))
            self._target.flush()

    def _carry(self, source: IO[bytes], copy: IO[bytes] | None) -> None:
        with source, copy or nullcontext():
            for line in source:
                self._carrying = True
                self._lines += 1
                if copy is not None:
                    copy.write(line)
                if self._keeps_last:
                    line, self._last = self._last, line
                self.write(line)
                self._carrying = False
