"""A child process: started, watched, asked to stop, and ended for certain."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

log = logging.getLogger(__name__)

GRACE_SECONDS = 15.0
"""How long a child gets to stop by itself; a busy machine takes its time."""


def ending(code: int) -> str:
    """How a process with this return code ended, as a clause."""
    if code >= 0:
        return f"exited with {code}"
    names = [f" ({each.name})" for each in signal.Signals if each == -code]  # real-time signals have none
    return f"was killed by signal {-code}{''.join(names)}"


class Child:
    """One started process. It leads a process group: a Ctrl-C in the terminal is ours to handle.

    Args:
        name: What people call it.
        command: Program and arguments.
        environment: All of its variables; None: ours.
        session: It leads a session of its own as well, so closing our terminal does not end it.
        stdin: With a pipe, an empty line there or its end asks the child to stop; else SIGTERM does.
        more: `stdout`, `stderr` and `pass_fds` of `subprocess.Popen`.
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
        stand: dict[str, Any] = {"start_new_session": True} if session else {"process_group": 0}
        self._process = subprocess.Popen[bytes](command, env=environment, stdin=stdin, **stand, **more)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def ended(self) -> str:
        """How it ended, as a clause; empty while it runs."""
        return "" if self.code is None else ending(self.code)

    @property
    def stdout(self) -> IO[bytes]:
        """Our end of its standard output, where that is a pipe; likewise `stdin` and `stderr`."""
        return _pipe(self._process.stdout)

    @property
    def stdin(self) -> IO[bytes]:
        return _pipe(self._process.stdin)

    @property
    def stderr(self) -> IO[bytes]:
        return _pipe(self._process.stderr)

    def signal(self, number: int) -> None:
        """Sends it a signal; nothing happens once it has ended."""
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        """Writes a line into the pipe."""
        self.stdin.write(f"{line}\n".encode())
        self.stdin.flush()

    def ask_to_stop(self) -> None:
        """Asks it to end by itself."""
        if self._process.stdin is None:
            self.signal(signal.SIGTERM)
        elif not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                # To close the pipe is not enough: a process that we forked may hold its other copy.
                self.stdin.write(b"\n")
                self.stdin.close()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ends within so many seconds; None: as long as it takes."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def exit_code(self) -> int:
        """Waits for its end; returns its exit code, or 128+n if signal n ended it, as a shell does."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def end(self, seconds: float) -> None:
        """Returns once it has ended; after so many seconds it is killed, with all of its group."""
        if not self.wait(seconds):
            log.warning("%s did not stop: killed", self)
            with contextlib.suppress(ProcessLookupError):  # it ended just now, and another thread saw it
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def stop(self, seconds: float = GRACE_SECONDS) -> None:
        """Asks it to stop, and ends it."""
        self.ask_to_stop()
        self.end(seconds)


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end
