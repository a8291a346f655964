"""Lifeline: a process that kills our children if this process is killed.

It reads from a pipe whose other end only this process holds. This process sends the id of each child that it
starts, and again when the child has ended. When the pipe closes, the lifeline kills the sessions of the
remaining children. A separate process is necessary because SIGKILL cannot be handled.
"""

from __future__ import annotations

import sys
from subprocess import PIPE
from types import TracebackType

from hubring.ps.process.child import Child
from hubring.workers.compare.run import child_reaper


class Lifeline:
    """This process's end; leaving the `with` block ends the lifeline."""

    def __enter__(self) -> Lifeline:
        # Isolated, so that neither installed packages nor the environment can break its start.
        command = [sys.executable, "-I", "-S", child_reaper.__file__]
        self._child = Child("the lifeline", command, stdin=PIPE, session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.ask_to_stop()
        self._child.wait()

    def hold(self, pid: int) -> None:
        """Adds a child, whose session is killed if this process is killed."""
        self._child.tell(f"+{pid}")

    def release(self, pid: int) -> None:
        """Removes a child that has ended, because its id can be reused."""
        self._child.tell(f"-{pid}")
