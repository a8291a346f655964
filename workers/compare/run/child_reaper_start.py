"""Lifeline: a process that ends our children should we be killed before we could.

It reads from a pipe whose other end only we hold. What we start, we name there; what has ended, we
take back. When the pipe closes and names are left, their sessions are killed. SIGKILL leaves us no
last word, so somebody else must have been told before.
"""

from __future__ import annotations

import sys
from subprocess import PIPE
from types import TracebackType

from hubring.ps.process.child import Child
from hubring.workers.compare.run import child_reaper


class Lifeline:
    """Our end; leaving the `with` block ends the process."""

    def __enter__(self) -> Lifeline:
        # Neither what is installed nor what stands in the environment can keep it from starting.
        command = [sys.executable, "-I", "-S", child_reaper.__file__]
        self._child = Child("the lifeline", command, stdin=PIPE, session=True)
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
