"""A child process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hubring.ps.process.process import process

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""Seconds that a child has to stop by itself. A busy machine needs that long."""


def ending(code: int) -> str:
    """Describes how a process with this return code ended, as a clause."""
    if code >= 0:
        return f"exited with {code}"
    names = [f" ({each.name})" for each in signal.Signals if each == -code]  # real-time signals have none
    return f"was killed by signal {-code}{''.join(names)}"


class Child:
    """A child process in its own process group, so that a Ctrl-C in the terminal reaches only the parent.

    Args:
        name: Its display name.
        command: Program and arguments.
        environment: All of its environment variables; None for the parent's.
        session: Whether the child also leads a session, so that closing the terminal does not end it.
        stdin: With a pipe, an empty line or the end of input asks the child to stop. Otherwise SIGTERM does.
        more: `stdout`, `stderr` and `pass_fds` of `subprocess.Popen`.

    Attributes:
        process: The child as other processes can name it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        session: bool = False,
        stdin: int | None = subprocess.DEVNULL,
        **more: Any,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        group: dict[str, Any] = {"start_new_session": True} if session else {"process_group": 0}
        self._process = subprocess.Popen[bytes](command, env=environment, stdin=stdin, **group, **more)
        self.process = process(self.pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """The process id, which is also the process group's id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the child runs."""
        return self._process.poll()

    @property
    def ended(self) -> str:
        """How the child ended, as a clause; empty while it runs."""
        return "" if self.code is None else ending(self.code)

    @property
    def stdout(self) -> IO[bytes]:
        """The parent's end of the standard output pipe. `stdin` and `stderr` likewise."""
        return _pipe(self._process.stdout)

    @property
    def stdin(self) -> IO[bytes]:
        return _pipe(self._process.stdin)

    @property
    def stderr(self) -> IO[bytes]:
        return _pipe(self._process.stderr)

    def signal(self, number: int) -> None:
        """Sends a signal. Does nothing once the child has ended."""
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Writes a line to the child's standard input."""
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def ask_to_stop(self) -> None:
        """Asks the child to stop."""
        if self._process.stdin is None:
            self.signal(signal.SIGTERM)
        elif not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # the child has ended already
                # Closing the pipe is not enough: another child of ours may hold a copy.
                self.stdin.write(b"\n")
                self.stdin.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Returns whether the child ends within `seconds`; None for no limit."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int:
        """Waits for the child and returns its exit code, or 128+n after signal n, like a shell."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self, seconds: float) -> None:
        """Waits `seconds` for the child, then kills its process group."""
        if not self.wait(seconds):
            log.warning("%s did not stop in time; killing it", self)
            self.kill()

    def kill(self) -> None:
        """Kills the child's process group at once, also what a child that has ended left in it."""
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def stop(self, seconds: float = GRACE_SECONDS) -> None:
        """Asks the child to stop, then ends it."""
        self.ask_to_stop()
        self.end(seconds)


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end
