"""What a child says, on its way to a file of ours."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import IO


class Output:
    """Carries a child's output on to a file of ours, line by line, until that ends.

    Args:
        source: Our end of the child's pipe; is closed.
        target: Where whole lines go, one write each.
        mark: What stands before each line.
        copy: A file that gets the same without marks; None: none.
        keeps_last: The last line stays here; `join` returns it.
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
        # A process that the child left behind may hold the pipe for good: no reason for us to stay.
        self._thread = Thread(target=self._carry, args=(source, copied), name=f"output {mark}", daemon=True)
        self._thread.start()

    def join(self, seconds: float | None = None) -> bytes:
        """Returns the line that stays here once all others have been carried.

        Args:
            seconds: For how long we listen to a source that says nothing; None: until it ends.
        """
        before = -1
        while self._thread.is_alive() and (self._carrying or before != self._lines):
            before = self._lines
            self._thread.join(seconds)
        return self._last

    def write(self, line: bytes) -> None:
        """Carries a line on."""
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
