"""Lifeline: a process that ends our children should we be killed before we could.

It reads from a pipe whose other end only we hold. What we start, we name there; what has ended, we
take back. When the pipe closes and names are left, their sessions are killed. SIGKILL leaves us no
last word, so somebody else must have been told before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from itertools import takewhile
from subprocess import PIPE
from types import TracebackType

from hubring.ps.process.child import Child
from hubring.ps.process.command import module_command


class Lifeline:
    """Our end; leaving the `with` block ends the process."""

    def __enter__(self) -> Lifeline:
        self._child = Child("the lifeline", module_command(__name__), stdin=PIPE, session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.ask_to_stop()
        self._child.wait()

    def hold(self, pid: int) -> None:
        """From here on the session of this process ends with us."""
        self._child.tell(f"+{pid}")

    def release(self, pid: int) -> None:
        """It has ended: its number may soon be another's."""
        self._child.tell(f"-{pid}")


def keep(words: Iterable[str]) -> None:
    """Keeps what is held, until the words end; kills what is then left.

    Args:
        words: `+PID` and `-PID`, one a line.
    """
    held: dict[int, None] = {}
    for word in words:
        pid = int(word[1:])
        if word[0] == "+":
            held[pid] = None
        else:
            held.pop(pid, None)
    for pid in held:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself meanwhile
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    keep(takewhile(str.strip, sys.stdin))
